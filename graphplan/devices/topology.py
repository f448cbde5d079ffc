"""Devices and the links between them, as the planner knows them.

Speeds are in bytes/s and FLOP/s, times in seconds, sizes in bytes.
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

ALIGNMENT = 512  # bytes; CUDA's caching allocator rounds sizes up to multiples of it

DeviceKey = int | str

CPU = "cpu"
DISK = "disk"
SIMULATED = "sim"  # the name that ``simulate`` gives to torch's PrivateUse1 backend

Origin = Literal["default", "datasheet", "measured", "given"]  # of a speed; "given": by the caller

_MIB = 1 << 20


def is_figure(value: object, *, may_be_zero: bool = False) -> bool:
    """Whether a value is a positive, finite number, or 0 if ``may_be_zero``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))


@cache
def _type_of(device: str) -> str:
    return device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of a device's speed that one type of operation reaches.

    A fraction is above 1 if the device's figure is not the limit, as for data that stays in caches.

    Attributes:
        flops: fraction of the device's FLOP/s, which counts if the operation is bound by arithmetic.
        bandwidth: fraction of its bytes/s, which counts if the operation is bound by memory.
        overhead: seconds that the smallest operation of the type takes; None for the device's own.

    Raises:
        DeviceError: a fraction is not positive and finite, or ``overhead`` is negative.
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
    """Properties of one device, as the planner knows them.

    Attributes:
        key: the caller's key in ``max_memory``.
        device: the torch device as text (``"cuda:0"``, ``"cpu"``); ``"disk"`` for weights mapped from files.
        memory: the budget in bytes, for weights, activations and buffers together.
        flops: FLOP/s that a large matrix product reaches.
        bandwidth: bytes/s of the device's own memory.
        overhead: seconds that the smallest operation takes.
        reserve: bytes of ``memory`` that the plan leaves free.
        taken: bytes of ``memory`` that no plan can use: workspaces of cuBLAS, and what is not free.
        efficiency: type of operation (``"conv2d"``) -> the fractions of the speeds that it reaches, if known.
        origin: where the speeds come from.

    Raises:
        DeviceError: a speed of a computing device is not positive and finite (``overhead`` may be 0).
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
        """Bytes of the budget that a plan may not use: ``reserve`` and ``taken``."""
        return self.reserve + self.taken

    @property
    def room(self) -> int:
        """Bytes that a plan may use."""
        return max(0, self.memory - self.withheld)

    @property
    def type(self) -> str:
        """The device type: ``"cuda"``, ``"sim"``, ``"cpu"``, ``"disk"``, ..."""
        return _type_of(self.device)

    @property
    def index(self) -> int:
        """The index of the device among those of its type."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def computes(self) -> bool:
        """Whether operations can run on the device."""
        return self.type != DISK

    @property
    def is_accelerator(self) -> bool:
        """Whether the device is neither the CPU nor the disk."""
        return self.type not in (CPU, DISK)

    @property
    def torch_device(self) -> torch.device:
        """The torch device; the CPU for ``"disk"``, since files are mapped into host memory."""
        return torch.device(CPU if self.type == DISK else self.device)

    def allocated(self, nbytes: int) -> int:
        """Return the most bytes that the allocator takes for one of many storages, of ``nbytes``.

        For requests above 1 MiB, CUDA's caching allocator may hand out a cached block that is up to 1 MiB
        larger than requested (``CUDACachingAllocator.cpp``, ``should_split``).
        """
        slack = _MIB if self.type == "cuda" and nbytes > _MIB else 0
        return round_up(nbytes) + slack

    def resident(self, sizes: Iterable[int]) -> int:
        """Return the most bytes that storages of these sizes take if allocated in a row and kept.

        CUDA's caching allocator cuts storages of 1 to 10 MiB from segments of 20 MiB; a remainder of up to
        1 MiB goes with a segment's last storage. Larger storages get segments of multiples of 2 MiB, and
        keep a remainder of up to 1 MiB.
        """
        if self.type != "cuda":
            return sum(map(round_up, sizes))
        total = medium = 0
        for nbytes in sizes:
            total += round_up(nbytes)
            if nbytes >= 10 * _MIB:
                remainder = -round_up(nbytes) % (2 * _MIB)
                total += remainder if remainder <= _MIB else 0
            elif nbytes > _MIB:
                medium += round_up(nbytes)
        return total + -(-medium // (19 * _MIB)) * _MIB

    def resident_alone(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return :meth:`resident` for each size by itself; sizes are multiples of 512."""
        if self.type != "cuda":
            return nbytes
        remainder = -nbytes % (2 * _MIB)
        unusable = np.where(remainder <= _MIB, remainder, 0.0)
        return nbytes + np.where(nbytes >= 10 * _MIB, unusable, np.where(nbytes > _MIB, _MIB, 0.0))


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of the connection between two devices.

    Attributes:
        bandwidth: bytes/s.
        latency: seconds of a transfer in addition to ``nbytes / bandwidth``.
        origin: where the figures come from.

    Raises:
        DeviceError: ``bandwidth`` is not positive and finite, or ``latency`` is negative.
    """

    bandwidth: float = 25e9
    latency: float = 15e-6
    origin: Origin = field(default="given", compare=False)

    def __post_init__(self) -> None:
        if not is_figure(self.bandwidth):
            raise DeviceError(f"Link(bandwidth={self.bandwidth!r}): write a positive number of bytes/s")
        if not is_figure(self.latency, may_be_zero=True):
            raise DeviceError(f"Link(latency={self.latency!r}): write seconds, 0 or more")

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that a transfer of ``nbytes`` takes."""
        return self.latency + nbytes / self.bandwidth


_DISK_LINK = Link(2e9, 100e-6, "default")


@dataclass(frozen=True)
class Topology:
    """The devices in the caller's order, and the links between them.

    Attributes:
        devices: the devices, in the order of preference.
        links: (source key, destination key) -> :class:`Link`.
        default_link: for pairs that ``links`` has in neither direction; pairs with the disk have 2 GB/s and
            100 microseconds.
    """

    devices: tuple[DeviceSpec, ...]
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] = field(default_factory=dict)
    default_link: Link = Link(origin="default")

    def link(self, source: DeviceKey, destination: DeviceKey) -> Link:
        """Return the link by which the copies from one device to another are estimated."""
        link = self.links.get((source, destination)) or self.links.get((destination, source))
        return link or (_DISK_LINK if DISK in (source, destination) else self.default_link)

    def __getitem__(self, key: DeviceKey) -> DeviceSpec:
        for spec in self.devices:
            if spec.key == key:
                return spec
        keys = ", ".join(map(repr, self.keys))
        raise DeviceError(f"no device {key!r} in this plan: it has {keys}")

    def __contains__(self, key: object) -> bool:
        return any(spec.key == key for spec in self.devices)

    @property
    def keys(self) -> tuple[DeviceKey, ...]:
        """The caller's keys, in the caller's order."""
        return tuple(spec.key for spec in self.devices)

    @property
    def budgets(self) -> dict[DeviceKey, int]:
        """Device key -> budget in bytes, as in ``max_memory``."""
        return {spec.key: spec.memory for spec in self.devices}

    @property
    def cpu(self) -> DeviceKey | None:
        """The caller's key of the CPU, or None if it has no budget."""
        return next((spec.key for spec in self.devices if spec.device == CPU), None)

    @property
    def computing(self) -> list[DeviceSpec]:
        """The devices that can run operations."""
        return [spec for spec in self.devices if spec.computes]

    @property
    def accelerators(self) -> list[DeviceSpec]:
        """The devices that are neither the CPU nor the disk."""
        return [spec for spec in self.devices if spec.is_accelerator]

    @property
    def accelerator_keys(self) -> frozenset[DeviceKey]:
        """The caller's keys of the accelerators."""
        return frozenset(spec.key for spec in self.accelerators)

    def scaled(self, factor: float) -> Topology:
        """Return the topology with every budget multiplied by ``factor``."""
        return self.with_memory({spec.key: int(spec.memory * factor) for spec in self.devices})

    def with_faster_link(self, source: DeviceKey, destination: DeviceKey, factor: float) -> Topology:
        """Return the topology with both directions of a link ``factor`` times as fast."""
        faster = {}
        for ends in ((source, destination), (destination, source)):
            link = self.link(*ends)
            faster[ends] = replace(link, bandwidth=link.bandwidth * factor, latency=link.latency / factor)
        return replace(self, links={**self.links, **faster})

    def with_memory(self, memory: Mapping[DeviceKey, int]) -> Topology:
        """Return the topology with the budgets in ``memory`` (device key -> bytes) in place of its own."""
        changed = (replace(spec, memory=memory.get(spec.key, spec.memory)) for spec in self.devices)
        return replace(self, devices=tuple(changed))


def round_up(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of 512, the least that an allocator takes for a storage."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
