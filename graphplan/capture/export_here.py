"""``torch.export`` in one thread, of which others see nothing.

While it is at work, torch has flags up, and its tracer stands between every module of the process and its
call. Both are for the thread that traces alone: eager code elsewhere, which asks whether it is traced, would
make other masks.
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
"""Of a traced module's ``meta``: the :class:`AssignedState` of its trace."""

_MOST_SECONDS = 30.0
"""Processor time of a trace in which all sizes vary: where windows are padded and shifted, as in SAM 2, torch
proves conditions for minutes."""


def export(
    keep_grad: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    branches: Branches,
    sizes: bool = False,
) -> torch.export.ExportedProgram:
    """As ``torch.export.export``, of what graphplan can look inside; ``keep_grad`` as in ``capture``.

    ``branches``: of its code. ``sizes``: whether ``dynamic_shapes`` has all sizes, so that the trace may take
    too long.

    Raises:
        CaptureError: it does.
        KeptStateError: the model reads what its last call has left.
        NoGraphError: gradients flow through that.
        Exception: whatever the model's own code or the tracer raises.
    """
    numbers = WholeNumbers()
    trace = functools.partial(_export, keep_grad, module, args, kwargs, CodeCaches(module), numbers, branches)
    before, ends = attributes_of(module), time.thread_time() + _MOST_SECONDS if sizes else math.inf
    repeated = None if branches.by_weights else RepeatedModules(branches)
    name, below = type(module).__name__, False
    try:
        while True:
            try:
                state, program = trace(dynamic_shapes, repeated, ends, below=below)
                repeated = None  # what fails from here on does so without copies of blocks, too
                if keep_grad:
                    state.refuse_history()
                following = functools.partial(trace, below=below)
                _require_same_next(name, state, program, following, dynamic_shapes)
                place_writes(program.graph)
                program.graph_module.meta[STATE] = state
                return program
            except _OwnGradientsError:
                repeated, below = None, True
            except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
                if branches.learn(error):
                    again = repeated is not None and not branches.by_weights
                    repeated = RepeatedModules(branches) if again else None
                elif not numbers.learn():  # of these blocks are not copied
                    raise
            except Exception as error:  # the tracer runs the model's own code, which may raise anything
                if repeated is None or not repeated.used or time.thread_time() > ends:
                    raise
                logger.info("%s is traced again, without copies of blocks: %s", name, error)
                repeated = None
            put_back(before)
    finally:
        put_back(before)


def _require_same_next(
    name: str,
    state: AssignedState,
    program: torch.export.ExportedProgram,
    trace: Callable[..., tuple[AssignedState, torch.export.ExportedProgram]],
    dynamic_shapes: Any,
) -> None:
    """Raise KeptStateError where the call that comes next, of what the first has left, is another."""
    with state.left(program) as differs:
        if not differs:
            return
        try:
            again = trace(None if state.makes_tensors else dynamic_shapes)  # what it makes has one size
        except Exception as error:  # the tracer runs the model's own code, which may raise anything
            raise KeptStateError(
                f"after its first call {name} has attributes with which it cannot be traced: "
                f"{first_line(error)}"
            ) from error
        state.refuse_other(program, *again)


def _export(
    keep_grad: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    caches: CodeCaches,
    numbers: WholeNumbers,
    branches: Branches,
    dynamic_shapes: Any,
    repeated: RepeatedModules | None = None,
    ends: float = math.inf,
    *,
    below: bool,
) -> tuple[AssignedState, torch.export.ExportedProgram]:
    """One trace: above autograd, or below it."""
    state = AssignedState(module)
    branches.begin()
    around = exporting(
        keep_grad=keep_grad, state=state, branches=branches, repeated=repeated, ends=ends, below=below
    )
    outside = caches.untouched(), untouched_by_hooks(module)
    # torch gives modules copies of containers in the end, so that two no longer share one
    tables = [table for part in module.modules() for table in (part._buffers, vars(part))]
    patches = patched(*symbolic_lengths(module), *numbers.replacements())
    with restored(tables), _keeping_notes(module), outside[0], outside[1] as kept, around, patches:
        export = functools.partial(torch.export.export, dynamic_shapes=dynamic_shapes, strict=False)
        with numbers.in_place():
            program = copy_context().run(export, module, args, kwargs)  # it may set context variables
    state.data.require_kept()
    state.kept_by_hooks, state.branches, state.told = kept, branches.found, branches.told
    return state, program


@contextmanager
def _keeping_notes(module: nn.Module) -> Iterator[None]:
    """A block in which a call of the module finds on its parameters what is noted on them.

    What torch puts in their place for a trace is without: the scales of quantised weights, say.
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
        for (table, name, _), known in zip(noted, before, strict=True):
            for key, kept in known.items():
                if not kept.is_of(vars(table[name]).get(key)):
                    raise NoGraphError(
                        f"forward changes the attribute {key!r} of a parameter: a graph does not"
                    )
        return result

    with with_forward(module, run) if noted else nullcontext():
        yield


@contextmanager
def exporting(
    *,
    keep_grad: bool,
    state: AssignedState,
    branches: Branches,
    repeated: RepeatedModules | None = None,
    ends: float = math.inf,
    below: bool = False,
) -> Iterator[None]:
    """A block in which an export is made until the thread's time ``ends``; ``repeated`` copies blocks.

    ``below``: what autograd runs is traced, so that gradients that ``forward`` computes are in the graph.
    """
    tracer: Any = export_tracer()
    flags = torch.compiler
    blocks: list[Any] = [] if repeated is None else repeated.blocks
    less = less_work(
        keep_grad=keep_grad, blocks=blocks, assigned_data=state.data.assign, copied=state.note_value
    )
    values = value_reads(state.note_value, branches.read, branches.make, branches.read_all)
    numbers = [*plain_flags(), *plain_texts(branches.decide), *exact_bounds()]
    replaced = [*numbers, *passed_assertions(), *less, *values]
    with (
        torch_knows(),
        patched(
            Patch(flags, "is_exporting", lambda: False, flags.is_exporting),
            Patch(flags, "is_compiling", flags.is_dynamo_compiling, flags.is_compiling),
            Patch(tracer, "call_module", _call, _calling(tracer.call_module, state, branches, repeated)),
            (*assignment_hook(), lambda _: lambda *_: SimpleNamespace(remove=lambda: None)),
            *(repeated.patches() if repeated else ()),
            Patch(tracer, "getattr", lambda _tracer, _name, value, _known: value, tracer.getattr),
            (tracer, "path_of_module", _path_in_model),
            (tracer, "create_node", functools.partial(_with_notes, ends, blocks)),
            (*mask_reader(), lambda _: _said_to_be_causal),
            *((module, name, _refusing) for module in (torch, torch.random) for name in _OF_RANDOM),
            *((nn.functional, name, _if_it_drops) for name in _DROPOUTS),
            *((owner, "where", _by_flags) for owner in (torch, torch.Tensor)),
            (nn.Module, "to", _if_it_moves),
            (*inference_switch(), _without_gradients),
            (*backward_engine(), functools.partial(_if_it_goes_on, keep_grad, below)),
            *([(*graph_maker(), _tracing_below)] if below else ()),
            *replaced,
        ),
        on_any_device() if below else nullcontext(),
    ):
        yield


def _tracing_below(own: Callable[..., Any]) -> Callable[..., Any]:
    """``make_fx`` that writes down what autograd runs."""

    def make_fx(function: Callable[..., Any], *, pre_dispatch: bool, **options: Any) -> Any:
        assert pre_dispatch
        return own(function, **options)

    return make_fx


def _path_in_model(own: Callable[..., str]) -> Callable[..., str]:
    """``path_of_module``, with a path of the model: torch's own may be ``layers.slice(1, None, None).0``."""

    def path_of_module(tracer: Any, module: Any) -> str:
        path, known = own(tracer, module), paths_of(tracer, module)
        inside = [name.partition(".")[2] for name in known]  # the tracer's root is around the model
        return path if not known or path in (*known, *inside) else known[0]

    return path_of_module


_READING = ("initial_seed", "get_rng_state")
_OF_RANDOM = ("manual_seed", "seed", "set_rng_state", *_READING)


def _refusing(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that seeds, or reads the state, for torch alone, which puts back the state that it finds."""
    does = "reads" if own.__name__ in _READING else "sets"

    @functools.wraps(own)
    def of_random(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)  # of the patch, which calls this
        if caller.f_globals["__name__"].partition(".")[0] == "torch":
            return own(*args, **kwargs)
        raise NoGraphError(
            f"forward {does} the state of torch's random numbers, by torch.{own.__name__}: a graph does not"
        )

    return of_random


def _without_gradients(own: Callable[[bool], Any]) -> Callable[[bool], Any]:
    """What enters inference mode: in the model's code without gradients alone.

    A trace has weights, which are no tensors of that mode. Torch makes stand-ins for inputs in it that are.
    """

    def enter(mode: bool) -> Any:
        asks = sys._getframe(3).f_globals.get("__name__")  # beyond the block and the patch, which calls this
        if asks == "torch._subclasses.meta_utils":
            return own(mode)
        return torch.no_grad() if mode else nullcontext()

    return enter


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")


def _if_it_drops(own: Callable[..., Any]) -> Callable[..., Any]:
    """A dropout that returns its input where it drops nothing, as kernels do: a trace has a copy."""

    @functools.wraps(own)
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return own(input, p, training, inplace) if training and p > 0 else input

    return dropout


def _by_flags(own: Callable[..., Any]) -> Callable[..., Any]:
    """``where`` that takes bytes for flags, as kernels do: a trace takes flags alone."""
    at = 0 if own is torch.where else 1  # that of a tensor has it before the condition

    @functools.wraps(own)
    def where(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs.pop("condition") for _ in range("condition" in kwargs))]
        if given[at].dtype == torch.uint8:
            given[at] = given[at].bool()
        return own(*given, **kwargs)

    return where


def _if_it_moves(own: Callable[..., Any]) -> Callable[..., Any]:
    """``nn.Module.to``, which leaves tensors alone that are so already: a trace cannot replace them."""

    @functools.wraps(own)
    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device, dtype = parsed_move(*args, **kwargs)
        for tensor in chain(module.parameters(), module.buffers()):
            numbers = tensor.is_floating_point() or tensor.is_complex()
            if device not in (None, tensor.device) or (numbers and dtype not in (None, tensor.dtype)):
                return own(module, *args, **kwargs)
        return module

    return to


class _OwnGradientsError(BaseException):
    """``forward`` computes gradients: a trace above autograd does not see what these are computed from.

    No ``Exception``: a model that goes on without gradients after an error is not to see it.
    """


def _if_it_goes_on(keep_grad: bool, below: bool, own: Callable[..., Any]) -> Callable[..., Any]:
    """What computes gradients: through those of a graph gradients flow, and none is left in ``grad``."""

    def run(outputs: Any, gradients: Any, retain: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
        # an edge of autograd's graph, which may stand for a tensor, always has a gradient
        if kwargs["accumulate_grad"] and any(getattr(one, "requires_grad", True) for one in outputs):
            raise NoGraphError(
                "forward calls backward(), which adds to the grad of tensors: a graph does not"
            )
        if keep_grad and not create_graph:
            raise NoGraphError(
                "forward computes gradients through which none are to flow, by torch.autograd.grad without "
                "create_graph: in a graph they would"
            )
        if not keep_grad and not below:
            raise _OwnGradientsError("forward computes gradients")
        return own(outputs, gradients, retain, create_graph, *args, **kwargs)

    return run


def _said_to_be_causal(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
    """Whether the model says that a mask is causal: a graph does not see its values."""
    return is_causal is True


def _call(_tracer: Any, _module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _calling(
    own: Callable[..., Any],
    state: AssignedState,
    branches: Branches,
    repeated: RepeatedModules | None,
) -> Callable[..., Any]:
    """``call_module`` that writes assigned buffers, and leaves to ``repeated`` what a call traces."""

    def call_module(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        branches.enter(tracer, (args, kwargs))
        run = functools.partial(state.call, tracer, module, forward)
        known = run if repeated is None else functools.partial(repeated.call, tracer, module, run)
        return own(tracer, module, known, args, kwargs)

    return call_module


def _with_notes(ends: float, blocks: list[Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """``create_node`` that notes the blocks of autocast, and one line of code instead of the whole stack."""

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
