"""Speeds of devices and links: the caller's figures, or measured ones.

>>> import graphplan
>>> mine = {0: graphplan.Speed(flops=90e12), 1: "RTX 4090"}
>>> [spec.flops for spec in with_speeds(read_max_memory({0: "1GiB", 1: "1GiB"}), mine).devices]
[90000000000000.0, 160000000000000.0]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from graphplan.devices.datasheets import find_gpu, gpu_names
from graphplan.devices.device_keys import by_caller_keys, caller_key
from graphplan.devices.max_memory import links_besides, links_by_caller_key, links_to_host
from graphplan.devices.topology import DeviceKey, DeviceSpec, Efficiency, Link, Origin, Topology, is_figure
from graphplan.errors import DeviceError, GraphplanError, PlanError
from graphplan.versioned_json import Format, JsonFile, decode_fields, encode, fields_but

_FORMAT = Format("graphplan.measurements", 2, "measurements")
_MAY_BE_ZERO = frozenset({"overhead"})


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one device. Fields that are None, or empty, keep the datasheet value or default.

    :class:`~graphplan.devices.topology.DeviceSpec` has fields of the same names.

    Attributes:
        flops: FLOP/s that a large matrix product reaches.
        bandwidth: bytes/s of the device's own memory, reads and writes together.
        overhead: seconds that the smallest operation takes.
        efficiency: type of operation (``"conv2d"``) -> :class:`Efficiency`, the fractions of ``flops`` and
            ``bandwidth`` that it reaches.
        origin: where the figures come from, for readers of a plan.

    Raises:
        DeviceError: a figure is not positive and finite (``overhead`` may be 0).
    """

    flops: float | None = None
    bandwidth: float | None = None
    overhead: float | None = None
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict, hash=False)
    origin: Origin = field(default="given", compare=False)

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self) if item.default is None):
            value, may_be_zero = getattr(self, name), name in _MAY_BE_ZERO
            if value is not None and not is_figure(value, may_be_zero=may_be_zero):
                expected = "a number of at least 0" if may_be_zero else "a positive number"
                raise DeviceError(f"Speed({name}={value!r}): write {expected}, or None")

    @classmethod
    def of(cls, spec: DeviceSpec) -> Speed:
        """Return the speed of a computing device."""
        return cls(**{item.name: getattr(spec, item.name) for item in fields(cls)})

    @classmethod
    def of_gpu(cls, name: str) -> Speed:
        """Return the datasheet speed of a GPU (``"H100"``, ``"NVIDIA GeForce RTX 4090"``).

        Raises:
            DeviceError: the GPU is unknown.
        """
        gpu = find_gpu(name)
        if gpu is None:
            raise DeviceError(f"unknown GPU {name!r}; known GPUs: {', '.join(gpu_names())}")
        return cls(gpu.flops, gpu.bandwidth, origin="datasheet")

    def applied(self, spec: DeviceSpec) -> DeviceSpec:
        """Return the device with these figures, where they are given, in place of its own."""
        figures = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(spec, **{name: value for name, value in figures.items() if value not in (None, {})})


@dataclass(frozen=True, slots=True)
class Measurements(JsonFile):
    """Measured speeds of a machine's devices and links, for ``devices=`` of :func:`graphplan.plan`.

    Attributes:
        speeds: device key -> its speed.
        links: (source key, destination key) -> the link in that direction.
        notes: device key -> why it was not measured, or a remark on the measurement.
        dtypes: device key -> dtype of the timed matrix product.
    """

    speeds: Mapping[DeviceKey, Speed] = field(default_factory=dict)
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] = field(default_factory=dict)
    notes: Mapping[DeviceKey, str] = field(default_factory=dict)
    dtypes: Mapping[DeviceKey, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the measurements as JSON text; :meth:`from_json` reads it back."""
        return json.dumps({**_FORMAT.head(), **encode(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the measurements in JSON text that :meth:`to_json` wrote.

        Raises:
            PlanError: the text holds no measurements, or has an unknown version.
        """
        data = _FORMAT.parse(text)
        try:
            return cls(**decode_fields(cls, fields_but(cls), data))
        except (KeyError, TypeError, ValueError, GraphplanError) as error:
            raise PlanError(f"these measurements are damaged: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        lines = []
        for key, speed in self.speeds.items():
            parts = [
                "" if speed.flops is None else f"{speed.flops / 1e12:.3g} TFLOP/s",
                "" if speed.bandwidth is None else f"{speed.bandwidth / 1e9:.3g} GB/s",
                "" if speed.overhead is None else f"{speed.overhead * 1e6:.3g} µs an operation",
                f"{len(speed.efficiency)} types of operation" if speed.efficiency else "",
            ]
            dtype = f" ({self.dtypes[key]})" if key in self.dtypes else ""
            lines.append(f"{key}: {', '.join(part for part in parts if part)}{dtype}")
        for (source, destination), link in self.links.items():
            figures = f"{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} µs"
            lines.append(f"{source} -> {destination}: {figures}")
        lines += [f"{key}: {note}" for key, note in self.notes.items()]
        return "\n".join(lines)


GivenSpeeds = Mapping[DeviceKey, Speed | str] | Measurements
"""Type of ``devices=`` of :func:`graphplan.plan`: device key -> speed or GPU name; or measurements."""


def with_speeds(topology: Topology, devices: GivenSpeeds | None) -> Topology:
    """Return the topology with the caller's speeds, datasheet speeds of named GPUs, or measured speeds.

    Links of the topology remain, except for those of datasheets. Measurements may cover more devices than
    the topology, or fewer: what they lack keeps its defaults.

    Raises:
        DeviceError: ``devices`` is of another type, or names a device that the topology lacks, one that runs
            no operations, or an unknown GPU.
    """
    if devices is None:
        return topology
    if isinstance(devices, Measurements):
        speeds = {
            caller_key(topology.devices, key, "devices"): speed for key, speed in devices.speeds.items()
        }
        links = links_by_caller_key(topology.devices, devices.links)
    else:
        named = _read_named(topology, devices)
        speeds = {key: _read_speed(key, speed) for key, speed in named.items()}
        links = links_to_host(topology.devices, named)
    for spec in topology.devices:
        if spec.key in speeds and not spec.computes:
            raise DeviceError(
                f"devices[{spec.key!r}]: no operation runs there. For the speed of its copies give "
                f"links={{({spec.key!r}, {topology.computing[0].key!r}): graphplan.Link(6e9)}}"
            )
    explicit = [pair for pair, link in topology.links.items() if link.origin != "datasheet"]
    added = links_besides(explicit, links)
    specs = (speeds[s.key].applied(s) if s.key in speeds else s for s in topology.devices)
    return replace(topology, devices=tuple(specs), links={**topology.links, **added})


def _read_named(topology: Topology, devices: Any) -> dict[DeviceKey, Speed | str]:
    if not isinstance(devices, Mapping) or not all(isinstance(s, Speed | str) for s in devices.values()):
        raise DeviceError(
            "devices must map device keys to graphplan.Speed or to names of GPUs, as {0: 'H100'}, or be "
            f"graphplan.Measurements, not {devices!r}"
        )
    return by_caller_keys(topology.devices, devices, "devices")


def _read_speed(key: DeviceKey, speed: Speed | str) -> Speed:
    try:
        return Speed.of_gpu(speed) if isinstance(speed, str) else speed
    except DeviceError as error:
        raise DeviceError(f"devices[{key!r}]: {error}") from error
