"""Device maps in the format of accelerate and transformers: name of a module or tensor -> device.

Their hooks act on modules, not tensors: a map works only if each module's own tensors are on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphplan.devices.topology import DeviceKey
from graphplan.ir.graph_elements import Weight

_SMALL = 0.25  # share of all bytes, up to which a module is kept on one device if its own tensors require it


def merged_map(entries: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
    """Return the shortest equivalent map: one entry for a module whose members are all on one device."""
    return dict(_merged("", list(entries.items()))) if entries else {}


def _merged(prefix: str, entries: Sequence[tuple[str, DeviceKey]]) -> Iterator[tuple[str, DeviceKey]]:
    keys = {key for _, key in entries}
    if len(keys) == 1:
        yield prefix, keys.pop()
        return
    children: dict[str, list[tuple[str, DeviceKey]]] = {}
    for name, key in entries:
        children.setdefault(_child(prefix, name), []).append((name, key))
    for child, members in children.items():
        yield from _merged(child, members)


def _child(prefix: str, name: str) -> str:
    """Return the submodule of ``prefix``, or its own tensor, with which a name begins."""
    start = len(prefix) + 1 if prefix else 0
    return name[:start] + name[start:].partition(".")[0]


def entry_of(entries: Mapping[str, Any], name: str) -> Any:
    """Return the entry of a module or tensor, or else of the nearest module around it; None without one."""
    while name and name not in entries:
        name = name.rpartition(".")[0]
    return entries.get(name)


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor under one of its names, with its device and bytes."""

    name: str
    key: DeviceKey
    nbytes: int


def module_map(
    weights: Sequence[Weight], placement: Mapping[str, DeviceKey]
) -> tuple[dict[str, DeviceKey], list[str], Counter[DeviceKey]]:
    """Return the map of modules that hooks can carry out and that is closest to a placement of weights.

    A module's own tensors go where most of their bytes are; so does a small module as a whole, if it has own
    tensors and submodules that are elsewhere.

    Returns:
        module or tensor -> device; the modules that the placement splits over devices and the map does not;
        device -> bytes of the weights that the map puts there.
    """
    gathered, nbytes = list[str](), Counter[DeviceKey]()
    parts: Counter[str] = Counter()
    for weight in weights:
        parts[weight.part_of] += weight.nbytes
    named = [
        _Named(name, placement[name], weight.nbytes + parts[weight.name])
        for weight in weights
        for name in weight.names
        if name in placement
    ]
    order = {name: index for index, name in enumerate(placement)}
    named.sort(key=lambda one: order[one.name])
    whole = sum(one.nbytes for one in named) * _SMALL
    devices = dict(_module_devices("", named, whole, gathered))
    for weight in weights:
        key = next((devices[name] for name in weight.names if name in devices), None)
        if key is not None:
            nbytes[key] += weight.nbytes + parts[weight.name]
    unsaved = {name for weight in weights if not weight.persistent for name in weight.names}
    merged = merged_map({one.name: devices[one.name] for one in named})
    entries = {name: key for name, key in merged.items() if name not in unsaved}
    return entries, gathered, nbytes


def _module_devices(
    prefix: str, members: Sequence[_Named], small_bytes: float, gathered: list[str]
) -> Iterator[tuple[str, DeviceKey]]:
    """Yield each tensor's name and device, such that a module's own tensors share one."""
    own = [tensor for tensor in members if _child(prefix, tensor.name) == tensor.name]
    children: dict[str, list[_Named]] = {}
    for tensor in members:
        if _child(prefix, tensor.name) != tensor.name:
            children.setdefault(_child(prefix, tensor.name), []).append(tensor)
    split = len({tensor.key for tensor in members}) > 1
    is_small = sum(tensor.nbytes for tensor in members) <= small_bytes or not _has_blocks(children)
    if own and split and (not children or (prefix and is_small)):
        gathered.append(prefix)
        key = _largest_share(members)
        yield from ((tensor.name, key) for tensor in members)
        return
    yield from ((tensor.name, tensor.key) for tensor in own)
    for child, descendants in children.items():
        yield from _module_devices(child, descendants, small_bytes, gathered)


def _has_blocks(children: Mapping[str, Sequence[_Named]]) -> bool:
    """Whether submodules hold module lists or are nested: one forward hardly computes with all of them."""
    names = [tensor.name.split(".") for descendants in children.values() for tensor in descendants]
    shallow = min(map(len, names), default=0) + 1
    return any(len(parts) > shallow or any(part.isdigit() for part in parts) for parts in names)


def _largest_share(members: Sequence[_Named]) -> DeviceKey:
    totals: Counter[DeviceKey] = Counter()
    for tensor in members:
        totals[tensor.key] += tensor.nbytes
    return totals.most_common(1)[0][0]
