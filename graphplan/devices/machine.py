"""The machine whose accelerators integer keys mean: this one, or the current simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from accelerate.utils import get_max_memory

from graphplan._compat.torch import compiling, current_mode, without_current_mode
from graphplan.devices.simulated_machine import SimulatedMachine
from graphplan.devices.topology import SIMULATED, DeviceKey


class _Current:
    """The simulated machine of the surrounding block, which threads started in the block share."""

    def __init__(self) -> None:
        self._machine: ContextVar[SimulatedMachine | None] = ContextVar("graphplan_machine", default=None)
        self._machines: list[SimulatedMachine] = []

    def get(self) -> SimulatedMachine | None:
        """Return the machine, or None outside of all blocks."""
        machine = self._machine.get()
        return self._machines[-1] if machine is None and self._machines else machine

    @contextmanager
    def use(self, machine: SimulatedMachine) -> Iterator[None]:
        """Context manager in which ``machine`` is the current one."""
        token = self._machine.set(machine)
        self._machines.append(machine)
        try:
            yield
        finally:
            self._machines.remove(machine)
            self._machine.reset(token)


current_machine = _Current()


@contextmanager
def suspended() -> Iterator[None]:
    """Context manager that hides operations from a simulated machine, so that traces do not depend on it."""
    if not getattr(current_mode(), "simulates", False):
        yield
        return
    with without_current_mode(), compiling("default"):
        yield


def unmetered() -> AbstractContextManager[None]:
    """Return a context manager in which a simulated machine counts no allocations."""
    machine = current_machine.get()
    return nullcontext() if machine is None else machine.unmetered()


def accelerator_type() -> str | None:
    """Return the device type that integer keys mean now; None if there are no accelerators."""
    if current_machine.get() is not None:
        return SIMULATED
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        return None if accelerator is None or accelerator.type == SIMULATED else accelerator.type
    return None


def detect_max_memory() -> dict[DeviceKey, int]:
    """Return device key -> free bytes of each accelerator and the CPU, as accelerate reads them."""
    machine = current_machine.get()
    if machine is not None:
        return machine.max_memory
    return {key: int(value) for key, value in get_max_memory().items()}
