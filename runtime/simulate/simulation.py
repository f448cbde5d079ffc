"""Accelerators simulated on a CPU: real values, counted bytes, logged copies.

Inside ``with simulate({0: "1GiB", 1: "1GiB"}) as machine`` the devices ``sim:0`` and ``sim:1`` exist.
Their tensors hold CPU data. Operations on tensors of different devices fail, as on accelerators; each storage
occupies its bytes, rounded up to 512, of the device's capacity until its last tensor is freed; each copy
between devices is logged. To torch they are its PrivateUse1 device, renamed ``sim`` for the whole process on
first use; a process that uses PrivateUse1 for something else cannot simulate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import (
    compiling,
    current_mode,
    device_module,
    name_own_device,
    own_device_name,
    without_current_mode,
)
from graphplan.devices.machine import current_machine
from graphplan.devices.max_memory import MaxMemory, Size, links_by_caller_key, read_max_memory, read_size
from graphplan.devices.simulated_machine import SimulatedMachine
from graphplan.devices.topology import CPU, SIMULATED, DeviceKey, Link
from graphplan.errors import BudgetError, DeviceError
from graphplan.runtime.simulate.simulated_tensor import SimulatedTensor, is_simulated, is_whole, run_simulated

aten = torch.ops.aten

# operations that C++ calls with Python modes off, as in torch.tensor(..., device=...)
_WITHOUT_MODES = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten._copy_from.default,
    aten._local_scalar_dense.default,
)


@contextmanager
def simulate(
    capacities: MaxMemory,
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] | None = None,
    *,
    workspace: Size = 0,
) -> Iterator[SimulatedMachine]:
    """Context manager that simulates accelerators.

    Args:
        capacities: device index -> bytes or text such as ``"1GiB"``; ``"cpu"`` may be among them, and is
            passed on in ``machine.max_memory``.
        links: the links between them, for the planner's cost model.
        workspace: bytes, or text such as ``"8MiB"``, that each device allocates at its first matrix product,
            as cuBLAS does on CUDA.

    Raises:
        BudgetError: a capacity or ``workspace`` is not a valid size.
        DeviceError: a key is neither an index nor ``"cpu"``, a link is invalid, or blocks are nested.
    """
    if current_machine.get() is not None:
        raise DeviceError("simulate() inside simulate(): name all devices in one")
    try:
        topology = read_max_memory(capacities, links)
    except (BudgetError, DeviceError) as error:
        raise type(error)(str(error).replace("max_memory", "capacities")) from error
    sizes: dict[int, int] = {}
    for spec in topology.devices:
        if isinstance(spec.key, int):
            sizes[spec.key] = spec.memory
        elif spec.device != CPU:
            raise DeviceError(f"cannot simulate {spec.key!r}: use indices such as 0, 1, and 'cpu'")
    cpu = None if topology.cpu is None else topology[topology.cpu].memory
    link_map = links_by_caller_key(topology.devices, links or {})
    workspace_bytes = read_size(workspace, "workspace")
    machine = SimulatedMachine(sizes, cpu, link_map, workspace=workspace_bytes)
    _register_backend()
    # the multithreaded autograd engine would require a queue for each device from C++
    single_thread = torch.autograd.set_multithreading_enabled(False)
    mode = SimulationMode()  # type: ignore[no-untyped-call]  # torch's
    with current_machine.use(machine), single_thread, compiling("force_eager"), mode:
        yield machine


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

    def get_rng_state(self, _device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()  # simulated devices draw from the CPU's generator

    def set_rng_state(self, state: torch.Tensor, _device: Any = None) -> None:
        torch.set_rng_state(state)

    def current_stream(self, _device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, _stream: _Stream) -> AbstractContextManager[None]:
        return nullcontext()


@cache
def _register_backend() -> torch.library.Library:
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
