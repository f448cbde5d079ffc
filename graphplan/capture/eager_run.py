"""Trial runs of a model in eager mode, to find the error that it raises, or the bytes that autograd saves.

An error that eager mode raises, too, is the user's, and a capture raises it unchanged. A trial runs the copy
of the model, whose weights are zero, on fake tensors, which need no memory. If these fail and the model is
small, it runs real kernels: fake tensors have limitations.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import compiling, storage_of
from graphplan.capture.changes.attribute_data import plain_tensors
from graphplan.capture.changes.attribute_snapshots import restored
from graphplan.capture.changes.code_caches import CodeCaches
from graphplan.capture.model.function_references import untouched_by_hooks
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import memory_of
from graphplan.capture.parameter_attributes import attribute_tensors
from graphplan.capture.signature import BoundCall
from graphplan.capture.structure import unflatten
from graphplan.capture.tracers.quiet import quiet
from graphplan.capture.written_memory import written_arguments
from graphplan.devices.machine import suspended
from graphplan.errors import CaptureError, GraphplanError

_MAX_REAL_ELEMENTS = 1 << 28  # of weights, for a trial with real kernels


def eager_error(model_copy: ModelCopy, call: BoundCall, *, keep_grad: bool) -> Exception | None:
    """Return the error that the model itself raises for a call; None if it runs, or this is unknown."""
    with torch.set_grad_enabled(keep_grad):
        error = _raised(model_copy, *_on_fakes(call), call)
        if error is None or type(error).__module__.startswith("torch.") or isinstance(error, GraphplanError):
            return None  # an error of torch's own is a limitation of fake tensors
        return _raised(model_copy, call.leaves, nullcontext(), call) if _is_small(model_copy) else error


def is_same(error: Exception, other: Exception | None) -> bool:
    """Whether two runs of a model raised the same error."""
    return type(error) is type(other) and str(error) == str(other)


@contextmanager
def random_state_restored(*models: nn.Module) -> Iterator[None]:
    """Context manager that restores torch's random number generators, and the models' own, at its exit."""
    accelerators = {t.device.index for m in models for t in m.parameters() if t.device.type == "cuda"}
    tables = [vars(part) for model in models for part in model.modules()]
    generators = [one for table in tables for one in table.values() if isinstance(one, torch.Generator)]
    states = [one.get_state() for one in generators]
    with torch.random.fork_rng(devices=sorted(accelerators)):
        try:
            yield
        finally:
            for one, state in zip(generators, states, strict=True):
                one.set_state(state)


@contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """Context manager for a trial, which restores tensors and random number generators at its exit."""
    with random_state_restored(*models), tensors_restored(*models):
        yield


@contextmanager
def tensors_restored(*models: nn.Module) -> Iterator[None]:
    """Context manager that restores parameters, their gradients, and tensors of other attributes at its exit.

    It copies only the tensors that are written to.
    """
    tensors: list[torch.Tensor] = [tensor for model in models for tensor in model.parameters()]
    tensors += [table[key] for one in tensors for _, table, key in attribute_tensors(one)]
    tensors += [tensor for model in models for *_, tensor in plain_tensors(model)]
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
    tensors += [gradient for _, gradient in gradients if gradient is not None]
    memories = [tensor.data for tensor in tensors]
    before_writes = _BeforeWrites(tensors)
    try:
        with compiling("force_eager"), before_writes:
            yield
    finally:
        for tensor, data in zip(tensors, memories, strict=True):
            if memory_of(tensor) != memory_of(data):  # its ``.data`` was assigned
                tensor.data = data
        for tensor, gradient in gradients:
            tensor.grad = gradient
        with torch.no_grad():
            for tensor, before in before_writes.copies:
                tensor.copy_(before)


class _BeforeWrites(TorchDispatchMode):
    """Copies the values of tensors before an operation writes to their memory."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._tensors: dict[Any, list[torch.Tensor]] = {}  # memory -> the tensors that share it
        for tensor in tensors:
            self._tensors.setdefault(memory_of(tensor), []).append(tensor)
        self._tensors.pop(None, None)  # wrappers, and tensors without elements
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for written in written_arguments(func, args, kwargs):
            self._copy(written)
        return func(*args, **kwargs)

    def _copy(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            tensors = self._tensors.pop(memory_of(tensor), [])  # one copy is enough
            self.copies += [(_elements(one), _elements(one).detach().to("cpu", copy=True)) for one in tensors]


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with expanded dimensions narrowed to 1: torch refuses to write to these."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def saved_bytes(model_copy: ModelCopy, call: BoundCall) -> int | None:
    """Return the bytes of the storages that autograd saves besides weights and inputs; None if unknown."""
    count = _saved_bytes(model_copy, *_on_fakes(call), call)
    if count is None and _is_small(model_copy):  # for example, it may branch on values
        return _saved_bytes(model_copy, call.leaves, nullcontext(), call)
    return count


def _on_fakes(call: BoundCall) -> tuple[list[Any], FakeTensorMode]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # torch reads .grad, and warns if there is a gradient function
        source = leaf if leaf.is_leaf else leaf.detach().requires_grad_()
        return mode.from_tensor(source)

    return list(map(fake, call.leaves)), mode


def _is_small(model_copy: ModelCopy) -> bool:
    return sum(tensor.numel() for tensor in model_copy.weights.tensors.values()) <= _MAX_REAL_ELEMENTS


def _raised(
    model_copy: ModelCopy, leaves: Sequence[Any], mode: AbstractContextManager[Any], call: BoundCall
) -> Exception | None:
    module, method = model_copy.module, model_copy.method
    run = module if method == "forward" else getattr(module, method)
    try:
        args, kwargs = unflatten(list(map(_copied_leaf, leaves)), call.spec)
        outside = CodeCaches(module).untouched(), untouched_by_hooks(module)
        buffers = restored(part._buffers for part in module.modules())
        # compiled code would access the memory of fake tensors, which ends the process
        eager = compiling("force_eager")
        with quiet(), eager, random_state_restored(module), outside[0], outside[1], mode, buffers:
            copy_context().run(run, *args, **kwargs)
    except Exception as error:  # the model's own code may raise anything
        return error
    return None


def _copied_leaf(leaf: Any) -> Any:
    """Return a copy of a leaf that is not a tensor: a trial may change it."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception as error:  # the caller's object may raise anything
        raise CaptureError(f"a {type(leaf).__name__} cannot be copied") from error


def _saved_bytes(
    model_copy: ModelCopy, leaves: Sequence[Any], mode: AbstractContextManager[Any], call: BoundCall
) -> int | None:
    tensors = [*model_copy.module.parameters(), *(x for x in leaves if isinstance(x, torch.Tensor))]
    inputs, sizes = {storage_of(tensor) for tensor in tensors}, dict[int, int]()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (key := storage_of(tensor)) not in inputs:
            sizes[key] = tensor.untyped_storage().nbytes()
            saved.append(tensor)  # so that no other storage gets its address
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with suspended(), torch.enable_grad(), hooks:
        error = _raised(model_copy, leaves, mode, call)
    return sum(sizes.values()) if error is None else None
