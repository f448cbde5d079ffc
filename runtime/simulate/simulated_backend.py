"""The backend and the dispatch mode that make torch accept simulated devices.

The backend is torch's PrivateUse1, renamed ``sim`` for the whole process on first use; a process that uses
PrivateUse1 for something else cannot simulate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import (
    current_mode,
    device_module,
    name_own_device,
    own_device_name,
    without_current_mode,
)
from graphplan.devices.machine import current_machine
from graphplan.devices.topology import SIMULATED
from graphplan.errors import DeviceError
from graphplan.runtime.simulate.simulated_tensor import SimulatedTensor, is_simulated, is_whole, run_simulated

aten = torch.ops.aten

# operations that C++ calls with Python modes off, as in torch.tensor(..., device=...)
_WITHOUT_MODES = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten._copy_from.default,
    aten._local_scalar_dense.default,
)


@dataclass(frozen=True, slots=True)
class _Stream:
    """The only stream, which is synchronous; ``torch.distributed.checkpoint`` requests it."""

    def synchronize(self) -> None:
        pass


class _Backend(device_module()):  # type: ignore[misc]  # a class that torch keeps private
    """The module ``torch.sim``, as far as torch uses it."""

    def device_count(self) -> int:
        machine = current_machine.get()
        return 1 + max(machine.capacities, default=-1) if machine is not None else 0

    def is_available(self) -> bool:
        return self.device_count() > 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def current_stream(self, _device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, _stream: _Stream) -> AbstractContextManager[None]:
        return nullcontext()


@cache
def register_backend() -> torch.library.Library:
    """Register the devices with torch, once per process; the registration lives as long as the library."""
    taken = own_device_name()
    if taken not in ("privateuseone", SIMULATED):
        raise DeviceError(f"cannot simulate: this process uses PrivateUse1 as {taken!r}")
    name_own_device(SIMULATED, _Backend())
    library = torch.library.Library("aten", "IMPL")
    for op in _WITHOUT_MODES:
        library.impl(op, lambda *args, op=op, **kwargs: run_simulated(op, args, kwargs), "PrivateUse1")
    return library


class SimulationMode(TorchDispatchMode):
    """Handle operations without simulated arguments: factories, and copies from the CPU."""

    supports_higher_order_operators = True
    simulates = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._control_flow(func, args, kwargs)
        if all(issubclass(t, SimulatedTensor) for t in types) and is_whole(func):  # others take it whole
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            pinned._simulated_pinned = True
            return pinned
        if func is aten.is_pinned.default:
            return getattr(args[0], "_simulated_pinned", False)
        if is_simulated(kwargs.get("device")) or any(issubclass(t, SimulatedTensor) for t in types):
            return run_simulated(func, args, kwargs)
        return func(*args, **kwargs)

    def _control_flow(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run the functions of ``torch.cond`` and similar operators on the simulated tensors themselves.

        torch requires that the operators' kernels run without any mode; the functions run under all modes.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not any(isinstance(leaf, SimulatedTensor) for leaf in leaves):
            return func(*args, **kwargs)
        with ExitStack() as without:
            modes: list[Any] = [self]
            while (outer := current_mode()) is not None:
                modes.insert(0, outer)
                without.enter_context(without_current_mode())
            inside = [_under(modes, leaf) if callable(leaf) else leaf for leaf in leaves]
            args, kwargs = spec.unflatten(inside)
            return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)


def _under(modes: Sequence[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs under modes, the innermost last."""

    def run(*args: Any) -> Any:
        with ExitStack() as within:
            for mode in modes:
                within.enter_context(mode)
            return function(*args)

    return run
