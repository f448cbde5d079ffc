"""Devices, the links between them, and the reading of ``max_memory``.

A *key* is what the caller wrote in ``max_memory`` (``0``, ``"cpu"``, ``"cuda:1"``); the plan speaks in
keys, and :class:`DeviceSpec` maps each to its ``torch.device``. Speeds are bytes/s and FLOP/s, times
seconds, sizes bytes.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from accelerate.utils import convert_file_size_to_int, get_max_memory

from graphplan.alignment import ALIGNMENT
from graphplan.cards import find_card
from graphplan.errors import BudgetError, DeviceError

__all__ = [
    "CPU",
    "DISK",
    "SIMULATED",
    "DeviceKey",
    "DeviceSpec",
    "Link",
    "Machine",
    "MaxMemory",
    "Topology",
    "accelerator_type",
    "current_machine",
    "detect_max_memory",
    "read_max_memory",
    "require_present",
    "suspended",
    "unmetered",
]

DeviceKey = int | str
MaxMemory = Mapping[DeviceKey, int | float | str]

_MIB = 1 << 20

CPU = "cpu"
DISK = "disk"
SIMULATED = "sim"  # what torch's PrivateUse1 backend is renamed to by ``simulate``


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the planner knows of one device.

    Attributes:
        key: the caller's own key of ``max_memory``.
        device: the torch device as text (``"cuda:0"``, ``"cpu"``); ``"disk"`` for the file mapping.
        memory: the budget in bytes: weights, activations and buffers together.
        flops: FLOP/s that a large matrix product reaches.
        bandwidth: bytes/s of the device's own memory.
        overhead: seconds that an operation takes however small it is.
        reserve: bytes of ``memory`` that the plan leaves free.
    """

    key: DeviceKey
    device: str
    memory: int
    flops: float
    bandwidth: float
    overhead: float
    reserve: int = 0

    @property
    def room(self) -> int:
        """Bytes that a plan may use."""
        return max(0, self.memory - self.reserve)

    @property
    def type(self) -> str:
        """``"cuda"``, ``"sim"``, ``"cpu"``, ``"disk"``, ..."""
        return self.device.partition(":")[0]

    @property
    def computes(self) -> bool:
        """Whether operations can run here."""
        return self.type != DISK

    @property
    def is_accelerator(self) -> bool:
        """Whether this is neither the CPU nor the disk."""
        return self.type not in (CPU, DISK)

    @property
    def torch_device(self) -> torch.device:
        """The torch device; the CPU for ``"disk"``, whose weights are mapped into host memory."""
        return torch.device(CPU if self.type == DISK else self.device)

    def rounded(self, nbytes: int) -> int:
        """The fewest bytes that an allocator takes for a storage of ``nbytes``: whole 512s."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def allocated(self, nbytes: int) -> int:
        """The most bytes that an allocator takes for a storage of ``nbytes``, among others.

        CUDA's caching allocator may hand out up to 1 MiB more of a cached block than was asked for
        when the request is above 1 MiB (``CUDACachingAllocator.cpp``, ``should_split``).
        """
        slack = _MIB if self.type == "cuda" and nbytes > _MIB else 0
        return self.rounded(nbytes) + slack

    def resident(self, sizes: Iterable[int]) -> int:
        """The most bytes that storages take which are allocated one after another and kept.

        CUDA's caching allocator cuts those of 1 to 10 MiB from segments of 20 MiB, the rest of which,
        up to 1 MiB, goes with the last; larger ones get segments of whole 2 MiB, and keep a rest of up
        to 1 MiB.
        """
        total = middle = 0
        for nbytes in sizes:
            total += self.rounded(nbytes)
            if self.type == "cuda" and nbytes >= 10 * _MIB:
                rest = -self.rounded(nbytes) % (2 * _MIB)
                total += rest if rest <= _MIB else 0
            elif self.type == "cuda" and nbytes > _MIB:
                middle += self.rounded(nbytes)
        return total + -(-middle // (19 * _MIB)) * _MIB


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices: ``bandwidth`` in bytes/s, ``latency`` in seconds."""

    bandwidth: float = 25e9
    latency: float = 15e-6

    def seconds(self, nbytes: int) -> float:
        """Seconds to move ``nbytes``."""
        return self.latency + nbytes / self.bandwidth


_DISK_LINK = Link(2e9, 100e-6)


@dataclass(frozen=True)
class Topology:
    """The devices in the caller's order, and the links between them.

    ``links`` maps ``(source key, destination key)`` to a :class:`Link`; a pair that is not named in
    either direction has ``default_link``, or 2 GB/s and 100 microseconds where one of them is the disk.
    """

    devices: tuple[DeviceSpec, ...]
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] = field(default_factory=dict)
    default_link: Link = Link()

    def link(self, source: DeviceKey, destination: DeviceKey) -> Link:
        """The link from one device to another."""
        found = self.links.get((source, destination)) or self.links.get((destination, source))
        return found or (_DISK_LINK if DISK in (source, destination) else self.default_link)

    def __getitem__(self, key: DeviceKey) -> DeviceSpec:
        for spec in self.devices:
            if spec.key == key:
                return spec
        known = ", ".join(repr(spec.key) for spec in self.devices)
        raise DeviceError(f"no device {key!r} in this plan: it has {known}")

    def __contains__(self, key: object) -> bool:
        return any(spec.key == key for spec in self.devices)

    @property
    def keys(self) -> tuple[DeviceKey, ...]:
        """The caller's keys, in the caller's order."""
        return tuple(spec.key for spec in self.devices)

    def scaled(self, factor: float) -> Topology:
        """The same devices with every budget times ``factor``."""
        grown = (replace(spec, memory=int(spec.memory * factor)) for spec in self.devices)
        return replace(self, devices=tuple(grown))

    def with_memory(self, memory: Mapping[DeviceKey, int]) -> Topology:
        """The same devices with the budgets of ``memory`` (bytes) where it names them."""
        changed = (replace(s, memory=memory.get(s.key, s.memory)) for s in self.devices)
        return replace(self, devices=tuple(changed))


class Machine(Protocol):
    """What stands in for this machine's accelerators while it is current (see ``simulate``)."""

    @property
    def max_memory(self) -> dict[DeviceKey, int]:
        """Key -> bytes."""
        ...

    @property
    def device_type(self) -> str:
        """What integer keys mean."""
        ...

    @property
    def links(self) -> Mapping[tuple[DeviceKey, DeviceKey], Link]:
        """What is known of the links."""
        ...

    def has(self, index: int) -> bool:
        """Whether the device of this index exists."""
        ...

    def unmetered(self) -> AbstractContextManager[None]:
        """A block in which allocations are not counted: planning is not running."""
        ...

    def suspended(self) -> AbstractContextManager[None]:
        """A block in which operations are not intercepted."""
        ...


current_machine: ContextVar[Machine | None] = ContextVar("graphplan_machine", default=None)

_ACCELERATOR = (100e12, 1.0e12)  # FLOP/s and bytes/s of a card that is not known
_ACCELERATOR_OVERHEAD = 4e-6  # one asynchronous kernel launch
_CPU_SPEED = (1e12, 50e9)
# An operation on the CPU stops the host from queueing work for the accelerators, so its price is
# the thread pool's wake-up and a drained queue, not a launch.
_CPU_OVERHEAD = 20e-6


def suspended() -> AbstractContextManager[None]:
    """A block that a simulated machine does not see, so that a trace is what it is without it."""
    machine = current_machine.get()
    return nullcontext() if machine is None else machine.suspended()


def unmetered() -> AbstractContextManager[None]:
    """A block in which a simulated machine counts no allocations; nothing on a real one."""
    machine = current_machine.get()
    return nullcontext() if machine is None else machine.unmetered()


def accelerator_type() -> str | None:
    """The type that integer keys mean now: the simulated one, or this machine's; None if none."""
    machine = current_machine.get()
    if machine is not None:
        return machine.device_type
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


def read_max_memory(
    max_memory: MaxMemory | None,
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] | None = None,
    reserve: int | str | Mapping[DeviceKey, int | str] = 0,
) -> Topology:
    """Read ``max_memory`` into a :class:`Topology`.

    Args:
        max_memory: key -> bytes or text such as ``"10GiB"``; None detects this machine.
        links: what is known of the links; a simulated machine brings its own.
        reserve: bytes to leave free on every device, or key -> bytes.

    Raises:
        BudgetError: an empty mapping, or a value that is no non-negative number of bytes.
        DeviceError: a key that is no device.
    """
    if max_memory is None:
        max_memory = dict(detect_max_memory())
    if not isinstance(max_memory, Mapping):
        kind = type(max_memory).__name__
        raise BudgetError(f"max_memory must map device keys to bytes, not be a {kind}: {max_memory!r}")
    if not max_memory:
        raise BudgetError("max_memory is empty: name at least one device, e.g. {0: '20GiB', 'cpu': '60GiB'}")
    specs = tuple(_spec(key, _read_bytes(key, value)) for key, value in max_memory.items())
    _reject_twins(specs)
    if not any(spec.computes for spec in specs):
        raise BudgetError("max_memory names only 'disk', which computes nothing: add an accelerator or 'cpu'")
    if links is not None and not (
        isinstance(links, Mapping) and all(isinstance(link, Link) for link in links.values())
    ):
        raise DeviceError(f"links must map (source, destination) to graphplan.Link, not be {links!r}")
    machine = current_machine.get()
    known = dict(machine.links) if machine is not None else {}
    return Topology(_with_reserve(specs, reserve), {**known, **(links or {})})


def _with_reserve(
    specs: tuple[DeviceSpec, ...], reserve: int | str | Mapping[DeviceKey, int | str]
) -> tuple[DeviceSpec, ...]:
    if not isinstance(reserve, Mapping):
        nbytes = _read_bytes("reserve", reserve, "reserve")
        return tuple(replace(spec, reserve=nbytes) for spec in specs)
    if unknown := set(reserve) - {spec.key for spec in specs}:
        raise DeviceError(f"reserve names {unknown.pop()!r}, which is not in max_memory")
    sizes = {key: _read_bytes(key, value, f"reserve[{key!r}]") for key, value in reserve.items()}
    return tuple(replace(spec, reserve=sizes.get(spec.key, 0)) for spec in specs)


def require_present(topology: Topology) -> None:
    """Raise DeviceError unless this machine (or the simulated one) has every device."""
    machine = current_machine.get()
    for spec in topology.devices:
        if not spec.is_accelerator:
            continue
        device = spec.torch_device
        index = device.index or 0
        if machine is not None and device.type == machine.device_type:
            present, have = machine.has(index), f"simulates {sorted(map(str, machine.max_memory))}"
        else:
            found = accelerator_type() if machine is None else None
            here = torch.accelerator.device_count() if found is not None else 0
            present = device.type == found and index < here
            have = f"has {here} {found or 'accelerator'} device{'' if here == 1 else 's'}"
        if not present:
            raise DeviceError(
                f"max_memory names {spec.key!r} ({spec.device}), but this machine {have}. "
                "To plan for another machine use graphplan.plan; to try it here, graphplan.simulate"
            )


def _read_bytes(key: DeviceKey, value: object, name: str = "") -> int:
    name = name or f"max_memory[{key!r}]"
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise BudgetError(f"{name} must be bytes or text such as '10GiB', not {value!r}")
    try:
        nbytes = int(convert_file_size_to_int(value)) if isinstance(value, str) else math.floor(float(value))
    except (ValueError, OverflowError) as error:
        raise BudgetError(f"{name} = {value!r} is no size: write bytes or '10GiB'") from error
    if nbytes < 0:
        raise BudgetError(f"{name} = {value!r} is negative")
    return nbytes


def _spec(key: object, memory: int) -> DeviceSpec:
    if isinstance(key, numbers.Integral) and not isinstance(key, bool):
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise DeviceError(f"{key!r} is no device key: use an accelerator's index, 'cpu', 'disk' or 'cuda:0'")
    if isinstance(key, int):
        if key < 0:
            raise DeviceError(f"device key {key} is negative: accelerators count from 0")
        return _accelerator(key, f"{accelerator_type() or 'cuda'}:{key}", memory)
    if key == DISK:
        return DeviceSpec(key, DISK, memory, 0.0, 0.0, 0.0)
    try:
        device = torch.device(key)
    except RuntimeError as error:
        raise DeviceError(f"{key!r} is no device: {str(error).splitlines()[0]}") from error
    if device.type == CPU:
        return DeviceSpec(key, CPU, memory, *_CPU_SPEED, _CPU_OVERHEAD)
    if device.type == "meta":
        raise DeviceError("'meta' is no device that computes: leave it out of max_memory")
    return _accelerator(key, f"{device.type}:{device.index or 0}", memory)


def _accelerator(key: DeviceKey, device: str, memory: int) -> DeviceSpec:
    flops, bandwidth = _ACCELERATOR
    kind, _, index = device.partition(":")
    if kind == "cuda" and torch.cuda.is_available() and int(index) < torch.cuda.device_count():
        card = find_card(torch.cuda.get_device_name(int(index)))
        if card is not None:
            flops, bandwidth = card.flops, card.bandwidth
    return DeviceSpec(key, device, memory, flops, bandwidth, _ACCELERATOR_OVERHEAD)


def _reject_twins(specs: Sequence[DeviceSpec]) -> None:
    seen: dict[str, DeviceKey] = {}
    for spec in specs:
        if spec.device in seen:
            raise DeviceError(
                f"max_memory keys {seen[spec.device]!r} and {spec.key!r} are both {spec.device}"
            )
        seen[spec.device] = spec.key
