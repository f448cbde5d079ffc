"""How fast devices and links are: the caller's figures, or those that were measured here.

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

from graphplan.devices.datasheets import card_names, find_card
from graphplan.devices.device_keys import by_own_keys, own_key
from graphplan.devices.max_memory import links_to_host, own_links
from graphplan.devices.topology import DeviceKey, DeviceSpec, Efficiency, Link, Origin, Topology, is_figure
from graphplan.errors import DeviceError, GraphplanError, PlanError
from graphplan.versioned_json import Format, JsonFile, decode_fields, encode, fields_but

_FORMAT = Format("graphplan.measurements", 2, "measurements")
_MAY_BE_ZERO = frozenset({"overhead"})


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one device; None, and no efficiency, keep the datasheet value or default.

    Each field is one of :class:`~graphplan.devices.topology.DeviceSpec` too.

    Attributes:
        flops: FLOP/s that a large matrix product reaches.
        bandwidth: bytes/s of the device's own memory, reads and writes together.
        overhead: seconds that the smallest operation takes.
        efficiency: type of operation (``"conv2d"``) -> :class:`Efficiency`, what it reaches of both.
        origin: where the figures come from, for those who read a plan.
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
                least = "a number of at least 0" if may_be_zero else "a positive number"
                raise DeviceError(f"Speed({name}={value!r}): write {least}, or None")

    @classmethod
    def of(cls, spec: DeviceSpec) -> Speed:
        """The figures that a device that computes has."""
        return cls(**{item.name: getattr(spec, item.name) for item in fields(cls)})

    @classmethod
    def of_card(cls, name: str) -> Speed:
        """The datasheet figures of a card (``"H100"``, ``"NVIDIA GeForce RTX 4090"``).

        Raises:
            DeviceError: no such card is known.
        """
        card = find_card(name)
        if card is None:
            raise DeviceError(f"no card {name!r} is known; known are {', '.join(card_names())}")
        return cls(card.flops, card.bandwidth, origin="datasheet")

    def applied(self, spec: DeviceSpec) -> DeviceSpec:
        """The device with the figures that are not None."""
        known = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(spec, **{name: value for name, value in known.items() if value not in (None, {})})


@dataclass(frozen=True, slots=True)
class Measurements(JsonFile):
    """Measured speeds of a machine, for ``devices=`` of :func:`graphplan.plan`.

    Attributes:
        speeds: device key -> its speed.
        links: (source key, destination key) -> the link in that direction.
        notes: device key -> why it was not measured, or what to know about the measurement.
        dtypes: device key -> dtype of the matrix product that was timed.
    """

    speeds: Mapping[DeviceKey, Speed] = field(default_factory=dict)
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] = field(default_factory=dict)
    notes: Mapping[DeviceKey, str] = field(default_factory=dict)
    dtypes: Mapping[DeviceKey, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The figures as JSON text; :meth:`from_json` reads them back."""
        return json.dumps({**_FORMAT.head(), **encode(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` has written.

        Raises:
            PlanError: the text holds no measurements, or those of an unknown version.
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
"""What ``devices=`` of :func:`graphplan.plan` takes: figures or the name of a card for each, or measured."""


def with_speeds(topology: Topology, devices: GivenSpeeds | None) -> Topology:
    """The topology with the caller's figures, those of the cards that are named, or measured ones.

    Links that the topology has already stay as they are, but for those of datasheets. Measurements may be of
    more devices than are planned for, and of fewer: what they lack keeps its defaults.

    Raises:
        DeviceError: ``devices`` is none of these, or names a device that is not planned for, or an unknown
            card.
    """
    if devices is None:
        return topology
    if isinstance(devices, Measurements):
        speeds = {own_key(topology.devices, key, "devices"): one for key, one in devices.speeds.items()}
        links = own_links(topology.devices, devices.links)
    else:
        named = _read_named(topology, devices)
        speeds = {key: _read_speed(key, speed) for key, speed in named.items()}
        links = links_to_host(topology.devices, named)
    kept = (pair for pair, link in topology.links.items() if link.origin != "datasheet")
    given = {pair for a, b in kept for pair in ((a, b), (b, a))}
    found = {pair: link for pair, link in links.items() if pair not in given}
    specs = (speeds[s.key].applied(s) if s.key in speeds and s.computes else s for s in topology.devices)
    return replace(topology, devices=tuple(specs), links={**topology.links, **found})


def _read_named(topology: Topology, devices: Any) -> dict[DeviceKey, Speed | str]:
    if not isinstance(devices, Mapping) or not all(isinstance(s, Speed | str) for s in devices.values()):
        raise DeviceError(
            "devices must map device keys to graphplan.Speed or to names of cards, as {0: 'H100'}, or be "
            f"graphplan.Measurements, not {devices!r}"
        )
    return by_own_keys(topology.devices, devices, "devices")


def _read_speed(key: DeviceKey, speed: Speed | str) -> Speed:
    try:
        return Speed.of_card(speed) if isinstance(speed, str) else speed
    except DeviceError as error:
        raise DeviceError(f"devices[{key!r}]: {error}") from error
