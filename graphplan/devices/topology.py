"""Devices and the links between them, as the planner knows them.

Speeds are bytes/s and FLOP/s, times seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from graphplan.errors import DeviceError

ALIGNMENT = 512  # bytes; CUDA's caching allocator has no smaller step

DeviceKey = int | str

CPU = "cpu"
DISK = "disk"
SIMULATED = "sim"  # what torch's PrivateUse1 backend is renamed to by ``simulate``

Origin = Literal["default", "datasheet", "measured", "given"]  # of a speed; the last: by the caller

_MIB = 1 << 20


def is_figure(value: object, *, may_be_zero: bool = False) -> bool:
    """Whether a value is a positive, finite number; 0 too where that makes sense."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))


@cache
def _type_of(device: str) -> str:
    return device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What one type of operation reaches on a device, as shares of the device's own figures.

    Above 1 where a device's figure is not the limit: memory that stays in caches, say.

    Attributes:
        flops: of the device's FLOP/s, where arithmetic takes longer than memory.
        bandwidth: of its bytes/s, where memory does.
        overhead: seconds that the smallest of the type takes; None for those of the device.
    """

    flops: float = 1.0
    bandwidth: float = 1.0
    overhead: float | None = None

    def __post_init__(self) -> None:
        overhead = self.overhead is None or is_figure(self.overhead, may_be_zero=True)
        if not (is_figure(self.flops) and is_figure(self.bandwidth) and overhead):
            raise DeviceError(f"{self}: write positive numbers; overhead may be 0")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What the planner knows of one device.

    Attributes:
        key: the caller's own key of ``max_memory``.
        device: the torch device as text (``"cuda:0"``, ``"cpu"``); ``"disk"`` for the file mapping.
        memory: the budget in bytes: weights, activations and buffers together.
        flops: FLOP/s that a large matrix product reaches.
        bandwidth: bytes/s of the device's own memory.
        overhead: seconds that the smallest operation takes.
        reserve: bytes of ``memory`` that the plan leaves free.
        taken: bytes of ``memory`` that CUDA and PyTorch take beside the plan: the workspace of cuBLAS, and
            what is not free.
        efficiency: type of operation (``"conv2d"``) -> what it reaches, where that is known.
        origin: where the speeds come from.

    Raises:
        DeviceError: a speed of a device that computes is not positive.
    """

    key: DeviceKey
    device: str
    memory: int
    flops: float
    bandwidth: float
    overhead: float
    reserve: int = 0
    taken: int = 0
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict, hash=False)
    origin: Origin = field(default="default", compare=False)

    def __post_init__(self) -> None:
        speeds = is_figure(self.flops) and is_figure(self.bandwidth)
        if self.computes and not (speeds and is_figure(self.overhead, may_be_zero=True)):
            raise DeviceError(
                f"DeviceSpec({self.key!r}, flops={self.flops!r}, bandwidth={self.bandwidth!r}, "
                f"overhead={self.overhead!r}): write positive numbers; overhead may be 0"
            )

    @property
    def withheld(self) -> int:
        """Bytes of the budget that a plan may not use."""
        return self.reserve + self.taken

    @property
    def room(self) -> int:
        """Bytes that a plan may use."""
        return max(0, self.memory - self.withheld)

    @property
    def type(self) -> str:
        """``"cuda"``, ``"sim"``, ``"cpu"``, ``"disk"``, ..."""
        return _type_of(self.device)

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

    def allocated(self, nbytes: int) -> int:
        """The most bytes that an allocator takes for a storage of ``nbytes``, among others.

        CUDA's caching allocator may hand out up to 1 MiB more of a cached block than was asked for
        when the request is above 1 MiB (``CUDACachingAllocator.cpp``, ``should_split``).
        """
        slack = _MIB if self.type == "cuda" and nbytes > _MIB else 0
        return round_up(nbytes) + slack

    def resident(self, sizes: Iterable[int]) -> int:
        """The most bytes that storages take which are allocated one after another and kept.

        CUDA's caching allocator cuts those of 1 to 10 MiB from segments of 20 MiB, the rest of which,
        up to 1 MiB, goes with the last; larger ones get segments of whole 2 MiB, and keep a rest of up
        to 1 MiB.
        """
        if self.type != "cuda":
            return sum(map(round_up, sizes))
        total = middle = 0
        for nbytes in sizes:
            total += round_up(nbytes)
            if nbytes >= 10 * _MIB:
                rest = -round_up(nbytes) % (2 * _MIB)
                total += rest if rest <= _MIB else 0
            elif nbytes > _MIB:
                middle += round_up(nbytes)
        return total + -(-middle // (19 * _MIB)) * _MIB

    def resident_alone(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """As :meth:`resident`, for one storage of each of these sizes, which are whole 512s."""
        if self.type != "cuda":
            return nbytes
        rest = -nbytes % (2 * _MIB)
        large = np.where(rest <= _MIB, rest, 0.0)
        return nbytes + np.where(nbytes >= 10 * _MIB, large, np.where(nbytes > _MIB, _MIB, 0.0))


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices: ``bandwidth`` in bytes/s, ``latency`` in seconds, their origin."""

    bandwidth: float = 25e9
    latency: float = 15e-6
    origin: Origin = field(default="given", compare=False)

    def __post_init__(self) -> None:
        if not is_figure(self.bandwidth):
            raise DeviceError(f"Link(bandwidth={self.bandwidth!r}): write a positive number of bytes/s")
        if not is_figure(self.latency, may_be_zero=True):
            raise DeviceError(f"Link(latency={self.latency!r}): write seconds, 0 or more")

    def seconds(self, nbytes: int) -> float:
        """Seconds to move ``nbytes``."""
        return self.latency + nbytes / self.bandwidth


_DISK_LINK = Link(2e9, 100e-6, "default")


@dataclass(frozen=True)
class Topology:
    """The devices in the caller's order, and the links between them.

    ``links`` maps ``(source key, destination key)`` to a :class:`Link`; a pair that is not named in
    either direction has ``default_link``, or 2 GB/s and 100 microseconds where one of them is the disk.
    """

    devices: tuple[DeviceSpec, ...]
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] = field(default_factory=dict)
    default_link: Link = Link(origin="default")

    def link(self, source: DeviceKey, destination: DeviceKey) -> Link:
        """The link from one device to another: what every copy within a machine costs is counted by it."""
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

    @property
    def budgets(self) -> dict[DeviceKey, int]:
        """The bytes of each device, as ``max_memory`` has them."""
        return {spec.key: spec.memory for spec in self.devices}

    @property
    def cpu(self) -> DeviceKey | None:
        """The caller's key for the CPU, or None where it has no budget."""
        return next((spec.key for spec in self.devices if spec.device == CPU), None)

    @property
    def computing(self) -> list[DeviceSpec]:
        """The devices that run operations."""
        return [spec for spec in self.devices if spec.computes]

    @property
    def accelerators(self) -> list[DeviceSpec]:
        """Those of them that are not the CPU."""
        return [spec for spec in self.devices if spec.is_accelerator]

    @property
    def accelerator_keys(self) -> frozenset[DeviceKey]:
        """The caller's keys of these."""
        return frozenset(spec.key for spec in self.accelerators)

    def scaled(self, factor: float) -> Topology:
        """The same devices with every budget times ``factor``."""
        grown = (replace(spec, memory=int(spec.memory * factor)) for spec in self.devices)
        return replace(self, devices=tuple(grown))

    def with_faster_link(self, one: DeviceKey, other: DeviceKey, factor: float) -> Topology:
        """The same devices with the link between two ``factor`` times as fast, in both directions."""
        faster = {}
        for ends in ((one, other), (other, one)):
            link = self.link(*ends)
            faster[ends] = replace(link, bandwidth=link.bandwidth * factor, latency=link.latency / factor)
        return replace(self, links={**self.links, **faster})

    def with_memory(self, memory: Mapping[DeviceKey, int]) -> Topology:
        """The same devices with the budgets of ``memory`` (bytes) where it names them."""
        changed = (replace(s, memory=memory.get(s.key, s.memory)) for s in self.devices)
        return replace(self, devices=tuple(changed))


def round_up(nbytes: int) -> int:
    """The fewest bytes that an allocator takes for a storage of ``nbytes``: whole 512s."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
