"""``torch.export`` with effects that only the tracing thread sees.

While it runs, torch sets flags, and its tracer intercepts the calls of all modules of the process. Both are
limited to the tracing thread: eager code of other threads that asks whether it is traced would compute other
masks.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from graphplan._compat.assertions import passed_assertions
from graphplan._compat.export import assignment_hook, export_tracer, graph_maker, paths_of
from graphplan._compat.export_work import less_work
from graphplan._compat.symbolic_numbers import exact_bounds, plain_flags, plain_texts
from graphplan._compat.torch import backward_engine, inference_switch, mask_reader, parsed_move
from graphplan._compat.value_reads import value_reads
from graphplan._compat.whole_numbers import WholeNumbers
from graphplan.capture.attention import on_any_device
from graphplan.capture.autocast import AUTOCAST
from graphplan.capture.changes.assigned_state import AssignedState, KeptStateError, restored
from graphplan.capture.changes.assigned_writes import place_writes
from graphplan.capture.changes.attribute_data import attributes_of
from graphplan.capture.changes.attribute_snapshots import put_back, snapshot
from graphplan.capture.changes.code_caches import CodeCaches
from graphplan.capture.model.function_references import untouched_by_hooks
from graphplan.capture.model_methods import with_forward
from graphplan.capture.parameter_notes import NOTES, notes_of
from graphplan.capture.repeated.repeated_modules import RepeatedModules
from graphplan.capture.sizes.symbolic_lengths import symbolic_lengths
from graphplan.capture.source_lines import calling_line
from graphplan.capture.structure import torch_knows
from graphplan.capture.thread_patches import Patch, patched
from graphplan.capture.value_branches import Branches
from graphplan.errors import CaptureError, NoGraphError
from graphplan.message_text import first_line

logger = logging.getLogger("graphplan")

STATE = "graphplan_state"
"""Key in the ``meta`` of a traced module: the :class:`AssignedState` of its trace."""

_MOST_SECONDS = 30.0
"""Limit of the CPU time of a trace in which all sizes vary. For padded and shifted windows, as in SAM 2,
torch would prove conditions for minutes."""


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    keep_grad: bool,
    new_branches: Callable[[], Branches],
    sizes: bool = False,
) -> torch.export.ExportedProgram:
    """Call ``torch.export.export`` with graphplan's pytrees and patches; ``keep_grad`` as in ``capture``.

    ``new_branches`` returns the branches of a new trace of the code. ``sizes`` says that all sizes of
    ``dynamic_shapes`` vary, so that the time of the trace is limited. The trace is repeated with what it
    teaches about the code::

        the trace ends at                                the next trace
        a branch on values of weights or inputs          knows these values
        int() of a data-dependent number                 has another int() there
        gradients that forward computes                  is below autograd, without copies of blocks
        anything else, after blocks were copied          copies no blocks

    Raises:
        CaptureError: the trace takes too long.
        KeptStateError: the model depends on attributes that its previous call assigns.
        NoGraphError: a call leaves a buffer with a gradient history.
        Exception: any error of the model's own code or of the tracer.
    """
    tracer = _CallTracer(module, args, kwargs, keep_grad=keep_grad)
    before, ends = attributes_of(module), time.thread_time() + _MOST_SECONDS if sizes else math.inf
    copies = True
    try:
        while True:
            branches = new_branches()
            repeated = RepeatedModules(branches) if copies and not branches.by_weights else None
            try:
                state, program = tracer.run(dynamic_shapes, branches, repeated, ends)
                if not tracer.numbers.learn():  # else the model's code has caught the error
                    repeated = None  # later errors would be the same without copies of blocks
                    if keep_grad:
                        state.refuse_history()
                    trace_next = functools.partial(tracer.run, branches=new_branches())
                    _require_same_next(module, state, program, trace_next, dynamic_shapes)
                    place_writes(program.graph)
                    program.graph_module.meta[STATE] = state
                    return program
            except _OwnGradientsError:
                copies, tracer.below_autograd = False, True
            except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
                if not branches.learn(error) and not tracer.numbers.learn():
                    raise
            except Exception as error:  # the tracer runs the model's own code, which may raise anything
                if repeated is None or not repeated.used or time.thread_time() > ends:
                    raise
                logger.info("%s is traced again, without copies of blocks: %s", type(module).__name__, error)
                copies = False
            put_back(before)
    finally:
        put_back(before)


class _CallTracer:
    """The traces of one call, which share what they teach about the code.

    Attributes:
        numbers: the calls of ``int`` to replace.
        below_autograd: whether to trace the operations that autograd runs.
    """

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep_grad: bool
    ) -> None:
        self.numbers, self.below_autograd = WholeNumbers(), False
        self._module, self._args, self._kwargs, self._keep_grad = module, args, kwargs, keep_grad
        self._caches = CodeCaches(module)

    def run(
        self,
        dynamic_shapes: Any,
        branches: Branches,
        repeated: RepeatedModules | None = None,
        ends: float = math.inf,
    ) -> tuple[AssignedState, torch.export.ExportedProgram]:
        """Trace once; ``repeated`` and ``ends`` as in :func:`exporting`."""
        module, state = self._module, AssignedState(self._module, branches)
        patches = exporting(
            keep_grad=self._keep_grad, state=state, repeated=repeated, ends=ends, below=self.below_autograd
        )
        # in the end torch gives each module its own copy of a container that several share
        tables = [table for part in module.modules() for table in (part._buffers, vars(part))]
        with (
            restored(tables),
            _keeping_notes(module),
            self._caches.untouched(),
            untouched_by_hooks(module) as state.kept_by_hooks,
            patches,
            patched(*symbolic_lengths(module), *self.numbers.replacements()),
            self.numbers.in_place(),
        ):
            export = functools.partial(torch.export.export, dynamic_shapes=dynamic_shapes, strict=False)
            # it may set context variables
            program = copy_context().run(export, module, self._args, self._kwargs)
        state.data.require_kept()
        return state, program


def _require_same_next(
    module: nn.Module,
    state: AssignedState,
    program: torch.export.ExportedProgram,
    trace: Callable[[Any], tuple[AssignedState, torch.export.ExportedProgram]],
    dynamic_shapes: Any,
) -> None:
    """Raise KeptStateError if the next call depends on attributes that the traced one has assigned."""
    with state.after_call(program) as may_differ:
        if not may_differ:
            return
        try:  # tensors that the first call made have one size
            again = trace(None if state.makes_tensors else dynamic_shapes)
        except Exception as error:  # the tracer runs the model's own code, which may raise anything
            name = type(module).__name__
            raise KeptStateError(
                f"after its first call {name} has attributes with which it cannot be traced: "
                f"{first_line(error)}"
            ) from error
        state.require_same_next(program, *again)


@contextmanager
def _keeping_notes(module: nn.Module) -> Iterator[None]:
    """Context manager in which traced parameters have the attributes of the module's parameters.

    Without it, the tensors by which torch replaces parameters lack, say, the scales of quantised weights.
    """
    noted = [
        (part._parameters, name, notes)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and (notes := notes_of(parameter))
    ]
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        for table, name, notes in noted:
            vars(table[name]).update(notes | {NOTES: notes})
        before = [{key: snapshot(one) for key, one in notes.items()} for _, _, notes in noted]
        result = forward(*args, **kwargs)
        for (table, name, _), snapshots in zip(noted, before, strict=True):
            for key, kept in snapshots.items():
                if not kept.is_of(vars(table[name]).get(key)):
                    raise NoGraphError(
                        f"forward changes the attribute {key!r} of a parameter, which a graph cannot do"
                    )
        return result

    with with_forward(module, run) if noted else nullcontext():
        yield


@contextmanager
def exporting(
    *,
    keep_grad: bool,
    state: AssignedState,
    repeated: RepeatedModules | None = None,
    ends: float = math.inf,
    below: bool = False,
) -> Iterator[None]:
    """Context manager that patches torch for an export, which fails after the thread's CPU time ``ends``.

    ``repeated`` copies the graphs of repeated blocks. With ``below``, the operations that autograd runs are
    traced, so that the graph has gradients that ``forward`` computes.
    """
    tracer: Any = export_tracer()
    flags, branches = torch.compiler, state.branches
    blocks: list[Any] = [] if repeated is None else repeated.blocks
    less_patches = less_work(
        keep_grad=keep_grad, blocks=blocks, assigned_data=state.data.assign, copied=state.note_value
    )
    value_patches = value_reads(state.note_value, branches.read, branches.make, branches.read_all)
    number_patches = [*plain_flags(), *plain_texts(branches.decide), *exact_bounds()]
    replaced = [*number_patches, *passed_assertions(), *less_patches, *value_patches]
    with (
        torch_knows(),
        patched(
            Patch(flags, "is_exporting", lambda: False, flags.is_exporting),
            Patch(flags, "is_compiling", flags.is_dynamo_compiling, flags.is_compiling),
            Patch(tracer, "call_module", _call, _calling(tracer.call_module, state, repeated)),
            (*assignment_hook(), lambda _: lambda *_: SimpleNamespace(remove=lambda: None)),
            *(repeated.patches() if repeated else ()),
            Patch(tracer, "getattr", lambda _tracer, _name, value, _known: value, tracer.getattr),
            (tracer, "path_of_module", _path_in_model),
            (tracer, "create_node", functools.partial(_with_notes, ends, blocks)),
            (*mask_reader(), lambda _: _is_declared_causal),
            *((module, name, _refusing) for module in (torch, torch.random) for name in _SEED_FUNCTIONS),
            *((nn.functional, name, _lazy_dropout) for name in _DROPOUTS),
            *((owner, "where", _accepting_bytes) for owner in (torch, torch.Tensor)),
            (nn.Module, "to", _lazy_to),
            (*inference_switch(), _without_gradients),
            (*backward_engine(), functools.partial(_checked_backward, keep_grad, below)),
            *([(*graph_maker(), _tracing_below)] if below else ()),
            *replaced,
        ),
        on_any_device() if below else nullcontext(),
    ):
        yield


def _tracing_below(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``make_fx`` that traces below autograd."""

    def make_fx(function: Callable[..., Any], *, pre_dispatch: bool, **options: Any) -> Any:
        assert pre_dispatch
        return own(function, **options)

    return make_fx


def _path_in_model(own: Callable[..., str]) -> Callable[..., str]:
    """Return a ``path_of_module`` with model paths: torch's may be ``layers.slice(1, None, None).0``."""

    def path_of_module(tracer: Any, module: Any) -> str:
        path, paths = own(tracer, module), paths_of(tracer, module)
        inside = [name.partition(".")[2] for name in paths]  # the tracer's root wraps the model
        return path if not paths or path in (*paths, *inside) else paths[0]

    return path_of_module


_READERS = ("initial_seed", "get_rng_state")
_SEED_FUNCTIONS = ("manual_seed", "seed", "set_rng_state", *_READERS)


def _refusing(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a seed function that only torch's own code may call, since it restores the state."""
    verb = "reads" if own.__name__ in _READERS else "sets"

    @functools.wraps(own)
    def seed_function(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)  # the caller of the patch, which calls this
        if caller.f_globals["__name__"].partition(".")[0] == "torch":
            return own(*args, **kwargs)
        raise NoGraphError(
            f"forward {verb} the state of torch's random numbers, by torch.{own.__name__}, which a graph "
            "cannot do"
        )

    return seed_function


def _without_gradients(own: Callable[[bool], Any]) -> Callable[[bool], Any]:
    """Return a switch to inference mode that only disables gradients in the model's code.

    The traced weights are no inference tensors. Torch uses the mode itself for stand-ins of such inputs.
    """

    def enter(mode: bool) -> Any:
        caller = sys._getframe(3).f_globals.get("__name__")  # beyond the context manager and the patch
        if caller == "torch._subclasses.meta_utils":
            return own(mode)
        return torch.no_grad() if mode else nullcontext()

    return enter


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")


def _lazy_dropout(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a dropout that returns its input if it drops nothing, as kernels do: a trace would copy it."""

    @functools.wraps(own)
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return own(input, p, training, inplace) if training and p > 0 else input

    return dropout


def _accepting_bytes(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``where`` whose condition may be uint8, as of kernels: a trace accepts bool alone."""
    index = 0 if own is torch.where else 1  # the method of a tensor has ``self`` before the condition

    @functools.wraps(own)
    def where(*args: Any, **kwargs: Any) -> Any:
        positional = [*args, *(kwargs.pop("condition") for _ in range("condition" in kwargs))]
        if positional[index].dtype == torch.uint8:
            positional[index] = positional[index].bool()
        return own(*positional, **kwargs)

    return where


def _lazy_to(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``nn.Module.to`` that does nothing if nothing changes: a trace cannot replace parameters."""

    @functools.wraps(own)
    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device, dtype = parsed_move(*args, **kwargs)
        for tensor in chain(module.parameters(), module.buffers()):
            can_cast = tensor.is_floating_point() or tensor.is_complex()
            if device not in (None, tensor.device) or (can_cast and dtype not in (None, tensor.dtype)):
                return own(module, *args, **kwargs)
        return module

    return to


class _OwnGradientsError(BaseException):
    """``forward`` computes gradients, whose operations a trace above autograd does not see.

    It derives from ``BaseException`` so that a model that handles errors does not catch it.
    """


def _checked_backward(keep_grad: bool, below: bool, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward engine that refuses calls that a graph cannot make, or requires a trace ``below``."""

    def run(outputs: Any, gradients: Any, retain: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
        # an output may be an edge of autograd's graph, which always has a gradient
        if kwargs["accumulate_grad"] and any(getattr(one, "requires_grad", True) for one in outputs):
            raise NoGraphError(
                "forward calls backward(), which adds to the grad of tensors: a graph cannot do that"
            )
        if keep_grad and not create_graph:
            raise NoGraphError(
                "forward calls torch.autograd.grad without create_graph, so that no gradients flow through "
                "its results: in a graph they would"
            )
        if not keep_grad and not below:
            raise _OwnGradientsError("forward computes gradients")
        return own(outputs, gradients, retain, create_graph, *args, **kwargs)

    return run


def _is_declared_causal(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
    """Whether the model declares that a mask is causal: a trace does not see its values."""
    return is_causal is True


def _call(_tracer: Any, _module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _calling(
    own: Callable[..., Any], state: AssignedState, repeated: RepeatedModules | None
) -> Callable[..., Any]:
    """Return a ``call_module`` that writes assigned buffers, and lets ``repeated`` copy repeated blocks."""

    def call_module(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        state.branches.enter(tracer, (args, kwargs))
        run = functools.partial(state.call, tracer, module, forward)
        copied = run if repeated is None else functools.partial(repeated.call, tracer, module, run)
        return own(tracer, module, copied, args, kwargs)

    return call_module


def _with_notes(ends: float, blocks: list[Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``create_node`` that notes autocast blocks, and one line of code instead of the stack."""

    def create_node(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        if time.thread_time() > ends:
            raise CaptureError(f"a trace in which all sizes vary takes more than {_MOST_SECONDS:.0f} seconds")
        tracer.record_stack_traces = False
        node = own(tracer, *args, **kwargs)
        if node.op == "call_function":
            node.meta["stack_trace"] = calling_line()
            node.meta |= {AUTOCAST: tuple(blocks)} if blocks else {}
        return node

    return create_node
