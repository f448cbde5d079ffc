"""``torch.export`` with graphplan's patches, repeated until no trace finds new facts about the code."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphplan._compat.whole_numbers import WholeNumbers
from graphplan.capture.changes.assigned_state import AssignedState
from graphplan.capture.changes.assigned_writes import place_writes
from graphplan.capture.changes.attribute_data import attributes_of
from graphplan.capture.changes.attribute_snapshots import restore_attributes, restored, snapshot
from graphplan.capture.changes.code_caches import CodeCaches
from graphplan.capture.changes.kept_state import KeptStateError
from graphplan.capture.changes.next_call import TracedCall, compare_with_next, require_independent
from graphplan.capture.model.function_references import untouched_by_hooks
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model_methods import with_forward
from graphplan.capture.parameter_attributes import TRACED_ATTRIBUTES, custom_attributes
from graphplan.capture.repeated.repeated_modules import RepeatedModules
from graphplan.capture.sizes.symbolic_builtins import symbolic_builtins
from graphplan.capture.thread_patches import patched
from graphplan.capture.tracers.trace_patches import BelowAutogradError, exporting, time_limit
from graphplan.capture.value_branches import Branches
from graphplan.errors import NoGraphError
from graphplan.message_text import first_line

logger = logging.getLogger("graphplan")

STATE = "graphplan_state"
"""Key in the ``meta`` of a traced module: the :class:`AssignedState` of its trace."""


def export(
    model_copy: ModelCopy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    keep_grad: bool,
    sizes: bool = False,
    declared: bool = False,
) -> torch.export.ExportedProgram:
    """Export a call; ``keep_grad`` as in :func:`graphplan.capture.tracing.capture`.

    ``sizes`` says that all sizes of ``dynamic_shapes`` vary, so that the time of the trace is limited;
    ``declared`` that the caller has given them. The trace is repeated with the facts about the code that it
    finds::

        the trace ends at                                the next trace
        a branch on values of weights or inputs          uses these values
        int() of a data-dependent number                 replaces int() there
        gradients that forward computes, vmap or jvp     is below autograd, without copies of blocks
        anything else, after blocks were copied          copies no blocks

    Raises:
        CaptureError: the trace takes too long.
        KeptStateError: the model depends on attributes that its previous call assigns.
        NoGraphError: a call leaves a buffer with a gradient history.
        Exception: any error of the model's own code or of the tracer.
    """
    module = model_copy.module
    tracer = _CallTracer(model_copy, args, kwargs, keep_grad=keep_grad, declared=declared)
    before, ends = attributes_of(module), time_limit() if sizes else math.inf
    copies = True
    try:
        while True:
            branches = tracer.new_branches()
            repeated = RepeatedModules(branches) if copies and not branches.depend_on_weights else None
            try:
                state, program = tracer.run(dynamic_shapes, branches, repeated, ends)
                if not tracer.numbers.learn():  # else the model's code has caught the error
                    repeated = None  # later errors would be the same without copies of blocks
                    if keep_grad:
                        state.buffers.refuse_history()
                    tracer.require_same_next(state, program, dynamic_shapes)
                    place_writes(program.graph)
                    program.graph_module.meta[STATE] = state
                    return program
            except BelowAutogradError:
                copies, tracer.below_autograd = False, True
            except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
                if not branches.learn(error) and not tracer.numbers.learn():
                    raise
            except Exception as error:  # the tracer runs the model's own code, which may raise anything
                if repeated is None or not repeated.used or time.thread_time() > ends:
                    raise
                logger.info("%s is retraced without copies of blocks: %s", type(module).__name__, error)
                copies = False
            restore_attributes(before)
    finally:
        restore_attributes(before)


class _CallTracer:
    """The traces of one call, which share the facts about the code that they find.

    Attributes:
        numbers: the calls of ``int`` to replace.
        below_autograd: whether to trace the operations that autograd and transforms run.
    """

    def __init__(
        self,
        model_copy: ModelCopy,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        keep_grad: bool,
        declared: bool = False,
    ) -> None:
        self.numbers, self.below_autograd, self._declared = WholeNumbers(), False, declared
        self._model_copy, self._args, self._kwargs, self._keep_grad = model_copy, args, kwargs, keep_grad
        self._caches = CodeCaches(model_copy.module)

    def new_branches(self) -> Branches:
        """Return the branches of a new trace."""
        return self._model_copy.branches(self._args, self._kwargs)

    def run(
        self,
        dynamic_shapes: Any,
        branches: Branches,
        repeated: RepeatedModules | None = None,
        ends: float = math.inf,
    ) -> tuple[AssignedState, torch.export.ExportedProgram]:
        """Trace once; ``repeated`` and ``ends`` as in :func:`exporting`."""
        module = self._model_copy.module
        state = AssignedState(module, branches)
        patches = exporting(
            keep_grad=self._keep_grad,
            state=state,
            repeated=repeated,
            ends=ends,
            below_autograd=self.below_autograd,
            declared=self._declared,
        )
        # in the end torch gives each module its own copy of a container that several share
        tables = [table for part in module.modules() for table in (part._buffers, vars(part))]
        with (
            restored(tables),
            _with_custom_attributes(module),
            self._caches.untouched(),
            untouched_by_hooks(module) as state.kept_by_hooks,
            patches,
            patched(*symbolic_builtins(self._caches.namespaces.values()), *self.numbers.replacements()),
            self.numbers.in_place(),
        ):
            export = functools.partial(torch.export.export, dynamic_shapes=dynamic_shapes, strict=False)
            # it may set context variables
            program = copy_context().run(export, module, self._args, self._kwargs)
        state.data.require_kept()
        return state, program

    def require_same_next(
        self, state: AssignedState, program: torch.export.ExportedProgram, dynamic_shapes: Any
    ) -> None:
        """Raise KeptStateError if the next call depends on attributes that the traced one has assigned."""
        call = TracedCall(state, program)
        with state.after_call(program) as may_differ:
            if not may_differ:
                return
            following = self._trace_next(state, dynamic_shapes)
            compare_with_next(call, following)
        if not state.serves_next and state.settings:
            with state.after_call(program, settings=False):
                require_independent(call, following, self._trace_next(state, dynamic_shapes))

    def _trace_next(self, state: AssignedState, dynamic_shapes: Any) -> TracedCall:
        """Trace the next call; for one size if it reads tensors that the traced one made, which have one.

        Raises:
            KeptStateError: it cannot be traced.
        """
        if not state.makes_tensors:
            try:
                return TracedCall(*self.run(dynamic_shapes, self.new_branches()))
            except Exception as error:  # the tracer runs the model's own code, which may raise anything
                logger.info("tracing the next call for one size: %s", first_line(error))
        try:
            return TracedCall(*self.run(None, self.new_branches()))
        except Exception as error:  # as above
            name = type(self._model_copy.module).__name__
            raise KeptStateError(
                f"after its first call {name} has attributes with which it cannot be traced: "
                f"{first_line(error)}"
            ) from error


@contextmanager
def _with_custom_attributes(module: nn.Module) -> Iterator[None]:
    """Context manager in which traced parameters have the attributes of the module's parameters.

    Without it, the tensors by which torch replaces parameters lack, say, the scales of quantised weights.
    """
    parameters = [
        (part._parameters, name, attributes)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and (attributes := custom_attributes(parameter))
    ]
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        for table, name, attributes in parameters:
            vars(table[name]).update(attributes | {TRACED_ATTRIBUTES: attributes})
        before = [{key: snapshot(value) for key, value in table.items()} for _, _, table in parameters]
        result = forward(*args, **kwargs)
        for (table, name, _), snapshots in zip(parameters, before, strict=True):
            for key, original in snapshots.items():
                if not original.matches(vars(table[name]).get(key)):
                    raise NoGraphError(
                        f"forward changes the attribute {key!r} of a parameter, which a graph cannot do"
                    )
        return result

    with with_forward(module, run) if parameters else nullcontext():
        yield
