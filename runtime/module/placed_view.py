"""The plans, the generated code and profiles of a placed module, as its attributes.

::

    placed.graphplan.plan      always, unless the model has a child of the name graphplan
    placed.plan                the same, unless the model has an attribute of the name plan
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.structure import leaves_of
from graphplan.errors import PlanError
from graphplan.ir.plan_data import PlanData
from graphplan.runtime.module.code_assembly import code_of
from graphplan.runtime.module.module_state import Code, ModuleState
from graphplan.runtime.module.placed_parts import runs_own_code
from graphplan.runtime.module.program import Program
from graphplan.runtime.module.training.training_step import starts_of
from graphplan.runtime.module.weight_binding import BoundCode
from graphplan.runtime.profile.call_profile import Profile, ProfilingInterpreter, Recording


class PlacedView:
    """The view of one module that :func:`graphplan.partition` returned."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def _state(self) -> ModuleState:
        state: ModuleState = vars(self._module)["_graphplan"]
        return state

    @property
    def plan(self) -> PlanData:
        """The plan of the first call structure.

        Raises:
            PlanError: nothing has been captured yet.
        """
        plan = self._state.known_plan
        return self._first_program().plan if plan is None else plan

    @property
    def plans(self) -> tuple[PlanData, ...]:
        """The plan of every call structure so far; without a graph, the one plan of the modules."""
        if self._state.untraced is not None:
            return (self.plan,)
        return tuple(program.plan for program in self._state.programs)

    @property
    def graph_modules(self) -> tuple[fx.GraphModule, ...]:
        """The generated code of every call structure so far, over the module's own weights."""
        count = len(self._state.programs)
        return tuple(code_of(self._module, self._state, index).module for index in range(count))

    @property
    def graph_module(self) -> fx.GraphModule:
        """The generated code of the first call structure; PlanError if there is none."""
        self._first_program()
        return code_of(self._module, self._state, 0).module

    @property
    def code(self) -> str:
        """The generated Python of the first call structure."""
        return str(self.graph_module.code)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run one forward pass and return its measured timeline and peaks, with the estimated ones.

        Call the module once before, so that work of the first call alone is not measured. Peaks recorded by
        simulated devices and by CUDA are reset. A training step also runs backward, from the sum of the
        outputs that it is trained on, and adds to ``grad``; the optimizer's step is not measured.
        """
        recorders: list[ProfilingInterpreter] = []  # of the forward pass, and of the backward pass of a step

        def record(program: Program, code: Code) -> Code:
            recording, backward = Recording(program.plan), code.backward
            recorders.append(ProfilingInterpreter(code.module, recording))
            if isinstance(backward, BoundCode):
                backward = ProfilingInterpreter(backward.code, recording)
                recorders.append(backward)
            return replace(code, bound=recorders[0], backward=backward)

        result = self._module._graphplan_enter("", self._state.signature, args, kwargs, record)
        if len(recorders) > 1:  # else a result may be an input that another model's step has made
            ends = starts_of(leaves_of(result))
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        recording = recorders[0].recording
        assert recording.measured is not None
        return Profile(recording.plan, recording.measured)

    def _first_program(self) -> Program:
        if self._state.untraced is not None:
            raise PlanError(
                f"there is no generated code: the model runs module by module ({self._state.untraced.reason})"
            )
        if not self._state.programs:
            raise PlanError("nothing is planned yet: run the model once, or give partition args= or kwargs=")
        return self._state.programs[0]


class ViewAttributes(nn.Module):
    """A placed module that also has the attributes of its view, unless the model has them itself."""

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute of this name, else that of its view."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            hidden = name.startswith("_") or name not in vars(PlacedView) or runs_own_code(self)
            if name != "graphplan" and hidden:
                raise
        view = PlacedView(self)
        return view if name == "graphplan" else getattr(view, name)

    def __dir__(self) -> Iterable[str]:
        names = (name for name in vars(PlacedView) if not name.startswith("_"))
        return sorted({*super().__dir__(), "graphplan", *names})  # type: ignore[no-untyped-call]  # torch's
