"""The machine that integer keys are about: this one, or the simulated one that is current."""

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
    """The machine of the surrounding block; threads that are started inside a block have its machine too."""

    def __init__(self) -> None:
        self._here: ContextVar[SimulatedMachine | None] = ContextVar("graphplan_machine", default=None)
        self._open: list[SimulatedMachine] = []

    def get(self) -> SimulatedMachine | None:
        """None where there is none."""
        here = self._here.get()
        return self._open[-1] if here is None and self._open else here

    @contextmanager
    def being(self, machine: SimulatedMachine) -> Iterator[None]:
        """A block of a machine."""
        token = self._here.set(machine)
        self._open.append(machine)
        try:
            yield
        finally:
            self._open.remove(machine)
            self._here.reset(token)


current_machine = _Current()


@contextmanager
def suspended() -> Iterator[None]:
    """A block that a simulated machine does not see, so that a trace is what it is without it."""
    if not getattr(current_mode(), "simulates", False):
        yield
        return
    with without_current_mode(), compiling("default"):
        yield


def unmetered() -> AbstractContextManager[None]:
    """A block in which a simulated machine counts no allocations; nothing on a real one."""
    machine = current_machine.get()
    return nullcontext() if machine is None else machine.unmetered()


def accelerator_type() -> str | None:
    """The type that integer keys mean now: the simulated one, or this machine's; None if none."""
    if current_machine.get() is not None:
        return SIMULATED
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        return None if found is None or found.type == SIMULATED else found.type
    return None


def detect_max_memory() -> dict[DeviceKey, int]:
    """Free bytes of each accelerator and of the CPU, as accelerate reads them."""
    machine = current_machine.get()
    if machine is not None:
        return dict(machine.max_memory)
    return {key: int(value) for key, value in get_max_memory().items()}
