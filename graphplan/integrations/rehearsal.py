"""Find the calls that some code makes of a model, without computing any of them.

The code runs on the copy of the model that is traced. Each call of the model, of its submodules or of its
methods is traced, and returns zeros of the shapes in the trace::

    with rehearsal.model() as model:
        model.encode(x)        traced; returns zeros
        model.decode(z)        traced; returns zeros
    rehearsal.calls            one call of each structure, and how often it was made
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.captured_graph import Capture
from graphplan.capture.signature import BoundCall, bind_call
from graphplan.capture.sizes.dynamic_sizes import exact_size, sizes_of_call
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.compiler.pipeline import Compiler, WeightedCall
from graphplan.errors import CaptureError, InputError
from graphplan.runtime.fallback.derived_classes import derive_class
from graphplan.runtime.module.module_state import ModuleState
from graphplan.runtime.module.placed_parts import link, running_own_code, unlink
from graphplan.runtime.module.result_structure import cache_layouts, rebuilder
from graphplan.runtime.module.transformers_methods import class_body

_ON_ZEROS = (
    "graphplan ran this on zeros, to find the calls to plan for; nothing was placed. If values of tensors "
    "decide which calls are made, give partition one call as its example instead: others are planned when "
    "they occur"
)


@one_at_a_time
def rehearse(run: Callable[[Any], Any], compiler: Compiler) -> list[WeightedCall]:
    """Return the calls that ``run`` makes of the model, one of each structure, weighted by their number.

    Raises:
        InputError: ``run`` makes no call.
        Exception: what ``run`` raises, with a note.
    """
    rehearsal = Rehearsal(compiler)
    with rehearsal.model() as model, torch.random.fork_rng(devices=()):
        try:
            run(model)
        except Exception as error:
            error.add_note(_ON_ZEROS)
            raise
    if not rehearsal.calls:
        raise InputError("the function given as calls= does not call the model")
    return [WeightedCall(one.first_call, float(one.count)) for one in rehearsal.calls]


@dataclass(slots=True)
class Rehearsed:
    """Calls of one structure.

    Attributes:
        number: index of the structure, in the order of first calls.
        first_call: the first call.
        capture: its trace.
        made_by: input leaf -> its origin: the number of an earlier call, and the index among its results.
        count: number of calls.
    """

    number: int
    first_call: BoundCall
    capture: Capture
    made_by: Mapping[int, tuple[int, int]]
    count: int = 1


class Rehearsal:
    """Stands in for a model: traces its calls, and returns zeros.

    ``calls`` has one call of each structure, in order. If an ``example`` is given, it is the first of them,
    and the rehearsal ends with a :class:`RepeatedCallError`.
    """

    def __init__(self, compiler: Compiler, example: BoundCall | None = None) -> None:
        self.compiler = compiler
        self.calls: list[Rehearsed] = []
        self._made: dict[int, tuple[int, int]] = {}  # id of a result -> its origin, as in Rehearsed.made_by
        self._kept: list[Any] = []  # results, kept alive so that no id is reused
        self._generates = example is not None
        if example is not None:
            capture = compiler.captures.traced(example).capture
            self.calls.append(Rehearsed(0, example, capture, {}))

    @contextmanager
    def model(self) -> Iterator[Any]:
        """Context manager that yields the model, with its own methods, to be called."""
        shell = self._shell = _shell_of(self)
        link(shell)
        try:
            yield shell
        finally:
            unlink(shell)

    def play(self, entry: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        """Trace a call of ``entry``, and return zeros in place of its results."""
        call = bind_call(signature, args, kwargs, entry)
        with running_own_code(self._shell):
            capture = self.compiler.captures.traced(call).capture
        made_by = {i: self._made[id(leaf)] for i, leaf in enumerate(call.leaves) if id(leaf) in self._made}
        seen = next((one for one in self.calls if one.capture is capture), None)
        if seen is None:
            seen = Rehearsed(len(self.calls), call, capture, made_by)
            self.calls.append(seen)
        else:
            seen.count += 1
        if self._generates and any(index in made_by for index in capture.states.values()):
            raise RepeatedCallError
        return self._answer(capture, seen.number, call)

    def _answer(self, capture: Capture, number: int, call: BoundCall) -> Any:
        sizes = sizes_of_call(capture.graph, capture.inputs, list(capture.inputs_in(call).values()))
        flat = [_zeros(result, sizes) for result in capture.outputs]
        self._kept.append(flat)
        self._made |= {id(t): (number, i) for i, t in enumerate(flat) if isinstance(t, torch.Tensor)}
        given = cache_layouts(capture.signature.spec, capture.changed_names)
        return rebuilder(capture.out_spec, given)(
            flat, {name: call.kwargs[name] for name in capture.changed_names}
        )


class RepeatedCallError(Exception):
    """A call reads state that an earlier call returned: further calls repeat traced structures."""


def _zeros(result: Any, sizes: Mapping[Any, int]) -> Any:
    """Return zeros, in memory that is never touched, for a tensor of a trace; an integer as it is."""
    val = result.meta.get("val") if isinstance(result, fx.Node) else result
    if isinstance(val, torch.SymInt):
        return _size_of(val, sizes, result)
    if not isinstance(val, torch.Tensor):
        return val
    shape = [_size_of(size, sizes, result) for size in val.shape]
    return torch.zeros(shape, dtype=val.dtype)


def _size_of(size: Any, sizes: Mapping[Any, int], result: Any) -> int:
    number = exact_size(size, sizes)
    if number is None:
        raise CaptureError(f"the data decides the size of {result}, a result that is read later")
    return number


class _StandIn:
    """Base class of a model whose calls go to a :class:`Rehearsal`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rehearsal = self.__dict__["_graphplan_rehearsal"]
        return rehearsal.play("", rehearsal.compiler.model_copy.signature, args, kwargs)

    def _graphplan_entry(self) -> tuple[Any, str]:
        return self, ""

    def _graphplan_enter(self, entry: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        return self.__dict__["_graphplan_rehearsal"].play(entry, signature, args, kwargs)


def _shell_of(rehearsal: Rehearsal) -> Any:
    """Return the model to trace, with calls redirected to the rehearsal."""
    module: nn.Module = rehearsal.compiler.model_copy.module
    original = type(module)
    shell: Any = object.__new__(derive_class(original, _StandIn, lambda: class_body(_StandIn, original)))
    shell.__dict__.update(module.__dict__, _graphplan_rehearsal=rehearsal)
    shell.__dict__["_graphplan"] = ModuleState([], refused=lambda _error: None)  # submodules are traced then
    return shell
