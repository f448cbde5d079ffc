"""Book-keeping of simulated devices: capacities, live and peak bytes, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from graphplan._compat.torch import run_after_backward
from graphplan.devices.topology import CPU, SIMULATED, DeviceKey, Link
from graphplan.errors import DeviceError, SimulatedOutOfMemoryError
from graphplan.message_text import readable_bytes

Watch = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class SimulatedTransfer:
    """One copy between devices.

    Attributes:
        source: ``"cpu"`` or a device index.
        destination: ``"cpu"`` or a device index.
        nbytes: bytes of the tensor's elements.
    """

    source: DeviceKey
    destination: DeviceKey
    nbytes: int


@dataclass
class SimulatedMachine:
    """Simulated devices: their capacities, live and peak bytes, and the copies between them.

    Attributes:
        capacities: device index -> bytes.
        cpu_memory: budget of the CPU in bytes, or None if it has none; it is not enforced.
        links: (source key, destination key) -> link, for the planner's cost model.
        transfers: the copies since the start or :meth:`reset_peaks`, in order.
        workspace: bytes that each device takes at its first matrix product, as for cuBLAS on CUDA.
        watch: called with the tensors that each operation reads and those it writes, except for views; None
            for no calls.
    """

    capacities: dict[int, int]
    cpu_memory: int | None = None
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] = field(default_factory=dict, repr=False)
    transfers: list[SimulatedTransfer] = field(default_factory=list, repr=False)
    workspace: int = field(default=0, repr=False)
    watch: Watch | None = field(default=None, repr=False)
    _live: dict[int, int] = field(default_factory=dict, repr=False)
    _peak: dict[int, int] = field(default_factory=dict, repr=False)
    _open_unmetered: int = field(default=0, repr=False)  # number of open blocks
    _multiplied: set[int] = field(default_factory=set, repr=False)

    @property
    def max_memory(self) -> dict[DeviceKey, int]:
        """The capacities, and the CPU's budget if any, as ``max_memory`` for :func:`graphplan.partition`."""
        budgets = dict[DeviceKey, int](self.capacities.items())
        if self.cpu_memory is not None:
            budgets[CPU] = self.cpu_memory
        return budgets

    def live_bytes(self, index: int) -> int:
        """Return the bytes that are allocated on a device now; raise DeviceError if it does not exist."""
        self.require(index)
        return self._live.get(index, 0)

    def peak_bytes(self, index: int) -> int:
        """Return the most bytes allocated at once on a device since the start or :meth:`reset_peaks`."""
        self.require(index)
        return self._peak.get(index, 0)

    def reset_peaks(self) -> None:
        """Set each peak to the bytes allocated now, and clear ``transfers``."""
        self._peak = dict(self._live)
        self.transfers.clear()

    def require(self, index: int) -> None:
        """Raise DeviceError unless the device ``sim:index`` exists."""
        if index not in self.capacities:
            have = ", ".join(f"{SIMULATED}:{i}" for i in sorted(self.capacities))
            raise DeviceError(f"no simulated device {SIMULATED}:{index}: this machine has {have}")

    @contextmanager
    def unmetered(self) -> Iterator[None]:
        """Context manager in which allocations are not counted."""
        self._open_unmetered += 1
        try:
            yield
        finally:
            self._open_unmetered -= 1

    def allocate(self, index: int, nbytes: int) -> int:
        """Count an allocation and return its counted bytes, which are none in a block of :meth:`unmetered`.

        Raises:
            SimulatedOutOfMemoryError: it exceeds the capacity.
        """
        self.require(index)
        nbytes = 0 if self._open_unmetered else nbytes
        live, capacity = self._live.get(index, 0), self.capacities[index]
        if live + nbytes > capacity:
            _fail(
                SimulatedOutOfMemoryError(
                    f"{SIMULATED}:{index} is out of memory: tried to allocate {readable_bytes(nbytes)}, "
                    f"{readable_bytes(live)} of {readable_bytes(capacity)} are taken. Other placed models "
                    "and tensors count too, and what autograd saves with grad=True: delete them, use a new "
                    "simulate block, or give partition a reserve"
                )
            )
        self._live[index] = live + nbytes
        self._peak[index] = max(self._peak.get(index, 0), live + nbytes)
        return nbytes

    def multiply(self, index: int) -> None:
        """Count the workspace of a device at its first matrix product, as :meth:`allocate` does."""
        if index not in self._multiplied and self.allocate(index, self.workspace):
            self._multiplied.add(index)

    def free(self, index: int, nbytes: int) -> None:
        """Count bytes as freed."""
        self._live[index] -= nbytes


def _fail(error: SimulatedOutOfMemoryError) -> None:
    """Raise an error, or at the end of a backward pass: an error in autograd's thread ends the process."""

    def fail() -> None:
        raise error

    if not run_after_backward(fail):
        fail()
