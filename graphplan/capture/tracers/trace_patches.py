"""Patches of torch during a trace, which only the tracing thread sees.

While a trace runs, torch sets flags, and its tracer intercepts the calls of all modules of the process. Both
are limited to the tracing thread: eager code of other threads that checks whether it is traced would compute
other masks. Other patches admit operations that the tracer refuses, or refuse those that no graph can run.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphplan._compat.assertions import passed_assertions
from graphplan._compat.export import argument_leaves, assignment_hook, export_tracer, graph_maker, paths_of
from graphplan._compat.export_work import less_work
from graphplan._compat.symbolic_numbers import exact_bounds, plain_flags, plain_texts
from graphplan._compat.torch import backward_engine, inference_switch, mask_reader, parsed_move
from graphplan._compat.value_reads import value_reads
from graphplan.capture.attention import on_any_device
from graphplan.capture.autocast import AUTOCAST
from graphplan.capture.changes.assigned_state import AssignedState
from graphplan.capture.repeated.repeated_modules import RepeatedModules
from graphplan.capture.source_lines import calling_line
from graphplan.capture.structure import registered_with_torch
from graphplan.capture.thread_patches import Patch, patched
from graphplan.errors import CaptureError, NoGraphError

_MAX_SECONDS = 30.0
"""Limit of the CPU time of a trace in which all sizes vary. For padded and shifted windows, as in SAM 2,
torch would prove conditions for minutes."""


def time_limit() -> float:
    """Return the CPU time of this thread at which a trace that begins now, in which all sizes vary, ends."""
    return time.thread_time() + _MAX_SECONDS


@contextmanager
def exporting(
    *,
    keep_grad: bool,
    state: AssignedState,
    repeated: RepeatedModules | None = None,
    ends: float = math.inf,
    below_autograd: bool = False,
    declared: bool = False,
) -> Iterator[None]:
    """Context manager that patches torch for an export, which fails after the thread's CPU time ``ends``.

    With ``declared``, the caller has declared the dynamic sizes, so that the text of a size must not fix it.

    ``repeated`` copies the graphs of repeated blocks. With ``below_autograd``, the operations that autograd
    and transforms of ``torch.func`` run are traced, so that the graph has the gradients that ``forward``
    computes.
    """
    tracer: Any = export_tracer()
    flags, branches = torch.compiler, state.branches

    def has_value(number: Any) -> bool:
        return branches.determine(number) or (not declared and number.node.has_hint())

    blocks: list[Any] = [] if repeated is None else repeated.blocks
    less_patches = less_work(
        keep_grad=keep_grad, blocks=blocks, assigned_data=state.data.assign, on_copy=state.record_value_read
    )
    value_patches = value_reads(
        state.record_value_read, branches.read_value, branches.run_dynamic, branches.read_list
    )
    number_patches = [*plain_flags(), *plain_texts(has_value), *exact_bounds()]
    replaced = [*number_patches, *passed_assertions(), *less_patches, *value_patches]
    with (
        registered_with_torch(),
        patched(
            Patch(flags, "is_exporting", lambda: False, flags.is_exporting),
            Patch(flags, "is_compiling", flags.is_dynamo_compiling, flags.is_compiling),
            Patch(tracer, "call_module", _call, _calling(tracer.call_module, state, repeated)),
            (*assignment_hook(), lambda _: lambda *_: SimpleNamespace(remove=lambda: None)),
            *(repeated.patches() if repeated else ()),
            Patch(tracer, "getattr", lambda _tracer, _name, value, _memo: value, tracer.getattr),
            (tracer, "path_of_module", _path_in_model),
            (
                tracer,
                "create_node",
                functools.partial(_creating, ends, blocks, transforms=keep_grad or below_autograd),
            ),
            (*mask_reader(), lambda _: _is_declared_causal),
            *((module, name, _refusing) for module in (torch, torch.random) for name in _SEED_FUNCTIONS),
            *((nn.functional, name, _lazy_dropout) for name in _DROPOUTS),
            *((owner, "where", _accepting_bytes) for owner in (torch, torch.Tensor)),
            (nn.Module, "to", _lazy_to),
            (*inference_switch(), _without_gradients),
            (
                *backward_engine(),
                functools.partial(_checked_backward, keep_grad=keep_grad, below_autograd=below_autograd),
            ),
            *([(*graph_maker(), _tracing_below)] if below_autograd else ()),
            (*argument_leaves(), _with_complex_numbers),
            *replaced,
        ),
        on_any_device() if below_autograd else nullcontext(),
    ):
        yield


def _with_complex_numbers(_original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``arg_tree_leaves`` with complex numbers, by which torch finds the dtype of ``x * 1j``."""

    def arg_tree_leaves(*args: Any, **kwargs: Any) -> list[Any]:
        return pytree.tree_leaves((args, kwargs), is_leaf=lambda part: isinstance(part, complex))

    return arg_tree_leaves


def _tracing_below(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``make_fx`` that traces below autograd."""

    def make_fx(function: Callable[..., Any], *, pre_dispatch: bool, **options: Any) -> Any:
        assert pre_dispatch
        return original(function, **options)

    return make_fx


def _path_in_model(original: Callable[..., str]) -> Callable[..., str]:
    """Return a ``path_of_module`` with model paths: torch's may be ``layers.slice(1, None, None).0``."""

    def path_of_module(tracer: Any, module: Any) -> str:
        path, paths = original(tracer, module), paths_of(tracer, module)
        inside = [name.partition(".")[2] for name in paths]  # the tracer's root wraps the model
        return path if not paths or path in (*paths, *inside) else paths[0]

    return path_of_module


_READERS = ("initial_seed", "get_rng_state")
_SEED_FUNCTIONS = ("manual_seed", "seed", "set_rng_state", *_READERS)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a seed function that only torch's own code may call, since it restores the state."""
    verb = "reads" if original.__name__ in _READERS else "sets"

    @functools.wraps(original)
    def seed_function(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)  # the caller of the patch, which calls this
        if caller.f_globals["__name__"].partition(".")[0] == "torch":
            return original(*args, **kwargs)
        raise NoGraphError(
            f"forward {verb} the state of torch's random numbers, by torch.{original.__name__}: a graph "
            "cannot do that"
        )

    return seed_function


def _without_gradients(original: Callable[[bool], Any]) -> Callable[[bool], Any]:
    """Return a switch to inference mode that only disables gradients in the model's code.

    The traced weights are not inference tensors. Torch uses the mode itself for stand-ins of such inputs.
    """

    def enter(mode: bool) -> Any:
        caller = sys._getframe(3).f_globals.get("__name__")  # beyond the context manager and the patch
        if caller == "torch._subclasses.meta_utils":
            return original(mode)
        return torch.no_grad() if mode else nullcontext()

    return enter


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")


def _lazy_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a dropout that returns its input if it drops nothing, as kernels do: a trace would copy it."""

    @functools.wraps(original)
    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return original(input, p, training, inplace) if training and p > 0 else input

    return dropout


def _accepting_bytes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``where`` whose condition may be uint8, as of kernels: a trace accepts bool alone."""
    index = 0 if original is torch.where else 1  # the method of a tensor has ``self`` before the condition

    @functools.wraps(original)
    def where(*args: Any, **kwargs: Any) -> Any:
        positional = [*args, *(kwargs.pop("condition") for _ in range("condition" in kwargs))]
        if positional[index].dtype == torch.uint8:
            positional[index] = positional[index].bool()
        return original(*positional, **kwargs)

    return where


def _lazy_to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return an ``nn.Module.to`` that does nothing if nothing changes: a trace cannot replace parameters."""

    @functools.wraps(original)
    def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device, dtype = parsed_move(*args, **kwargs)
        for tensor in chain(module.parameters(), module.buffers()):
            can_cast = tensor.is_floating_point() or tensor.is_complex()
            if device not in (None, tensor.device) or (can_cast and dtype not in (None, tensor.dtype)):
                return original(module, *args, **kwargs)
        return module

    return to


_TRANSFORMS = frozenset({"_add_batch_dim", "_enter_dual_level", "_make_dual"})


def is_transform(target: Any) -> bool:
    """Whether a node's target is a function by which a trace enters ``vmap`` or forward AD."""
    # targets that are texts, such as names of inputs, have no name of their own
    return getattr(target, "__name__", "") in _TRANSFORMS


class BelowAutogradError(BaseException):
    """``forward`` computes gradients or calls a transform, whose operations only a trace below autograd sees.

    It derives from ``BaseException`` so that a model that handles errors does not catch it.
    """


def _checked_backward(
    original: Callable[..., Any], *, keep_grad: bool, below_autograd: bool
) -> Callable[..., Any]:
    """Return a backward engine that refuses calls that a graph cannot make, or requires another trace."""

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
        if not keep_grad and not below_autograd:
            raise BelowAutogradError("forward computes gradients")
        return original(outputs, gradients, retain, create_graph, *args, **kwargs)

    return run


def _is_declared_causal(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
    """Whether the model declares that a mask is causal: a trace does not see its values."""
    return is_causal is True


def _call(_tracer: Any, _module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _calling(
    original: Callable[..., Any], state: AssignedState, repeated: RepeatedModules | None
) -> Callable[..., Any]:
    """Return a ``call_module`` that writes assigned buffers, and lets ``repeated`` copy repeated blocks."""

    def call_module(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        state.branches.record_sources(tracer, (args, kwargs))
        run = functools.partial(state.call, tracer, module, forward)
        copied = run if repeated is None else functools.partial(repeated.call, tracer, module, run)
        return original(tracer, module, copied, args, kwargs)

    return call_module


def _creating(
    ends: float, blocks: list[Any], original: Callable[..., Any], *, transforms: bool
) -> Callable[..., Any]:
    """Return a ``create_node`` that records autocast blocks, and one line of code instead of the stack.

    Unless ``transforms`` are allowed, another trace is required where one of ``torch.func`` begins.
    """

    def create_node(tracer: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        if time.thread_time() > ends:
            raise CaptureError(f"a trace in which all sizes vary takes more than {_MAX_SECONDS:.0f} seconds")
        if not transforms and is_transform(target):
            raise BelowAutogradError("forward calls torch.vmap or torch.func.jvp")
        tracer.record_stack_traces = False
        node = original(tracer, kind, target, *args, **kwargs)
        if node.op == "call_function":
            node.meta["stack_trace"] = calling_line()
            if blocks:
                node.meta[AUTOCAST] = tuple(blocks)
        return node

    return create_node
