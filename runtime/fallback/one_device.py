"""Copy the operands of an operation to one device if they are on several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import compiling, current_mode, without_current_mode
from graphplan.capture.structure import leaves_of
from graphplan.capture.written_memory import written_arguments
from graphplan.runtime.fallback.replaced_tensors import to_device


@contextmanager
def on_one_device(device: Callable[[], torch.device]) -> Iterator[None]:
    """Context manager that runs an operation again on one device if it fails with operands on several.

    The device is that of the tensor that the operation writes to, else ``device()``.
    """
    with compiling("force_eager"), _OnOneDevice(device):
        yield


def is_on_one_device() -> bool:
    """Whether the innermost dispatch mode is that of :func:`on_one_device`."""
    return isinstance(current_mode(), _OnOneDevice)


@contextmanager
def without_one_device() -> Iterator[None]:
    """Context manager that suspends :func:`on_one_device`."""
    with without_current_mode(), compiling("default"):
        yield


class _OnOneDevice(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, device: Callable[[], torch.device]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            read = _devices(leaves_of((args, kwargs)))
            written = _devices(written_arguments(func, args, kwargs))
            if len(read) < 2 or len(written) > 1 or isinstance(func, HigherOrderOperator):
                raise
        args, kwargs = to_device((args, kwargs), next(iter(written), None) or self.device())
        return func(*args, **kwargs)


def _devices(leaves: Iterable[Any]) -> set[torch.device]:
    return {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
