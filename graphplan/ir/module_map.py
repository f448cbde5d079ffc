"""Device maps as accelerate and transformers read them: names of modules and tensors -> device.

Hooks reach modules, not tensors: a map is of use to them if each module's own tensors are on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphplan.devices.topology import DeviceKey
from graphplan.ir.graph_elements import Weight

_SMALL = 0.25  # of all bytes: a module of no more is kept whole where its own tensors need it


def merged_map(entries: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
    """The shortest map that says the same: a module for its parts, where they are all on one device."""
    return dict(_merged("", list(entries.items()))) if entries else {}


def _merged(prefix: str, entries: Sequence[tuple[str, DeviceKey]]) -> Iterator[tuple[str, DeviceKey]]:
    keys = {key for _, key in entries}
    if len(keys) == 1:
        yield prefix, keys.pop()
        return
    start = len(prefix) + 1 if prefix else 0
    children: dict[str, list[tuple[str, DeviceKey]]] = {}
    for name, key in entries:
        children.setdefault(name[start:].partition(".")[0], []).append((name, key))
    for child, members in children.items():
        yield from _merged(f"{prefix}.{child}" if prefix else child, members)


@dataclass(frozen=True, slots=True)
class _Named:
    """A tensor by one of its names: its device, its bytes."""

    name: str
    key: DeviceKey
    nbytes: int


def module_map(weights: Sequence[Weight], placement: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
    """A map of modules that is as near to a placement of weights as hooks can carry out.

    A module's own tensors go where most of their bytes are; so does a small module with all that is in it,
    where it has tensors of its own beside submodules that are elsewhere.

    Args:
        weights: of the graph.
        placement: name of a parameter or buffer -> its device.
    """
    parts: dict[str, int] = {}
    for weight in weights:
        if weight.part_of:
            parts[weight.part_of] = parts.get(weight.part_of, 0) + weight.nbytes
    named = [
        _Named(name, placement[name], weight.nbytes + parts.get(weight.name, 0))
        for weight in weights
        for name in weight.names
        if name in placement
    ]
    order = {name: index for index, name in enumerate(placement)}
    named.sort(key=lambda one: order[one.name])
    whole = sum(one.nbytes for one in named) * _SMALL
    settled = dict(_settled("", named, whole))
    unsaved = {name for weight in weights if not weight.persistent for name in weight.names}
    merged = merged_map({one.name: settled[one.name] for one in named})
    return {name: key for name, key in merged.items() if name not in unsaved}


def _settled(prefix: str, members: Sequence[_Named], small: float) -> Iterator[tuple[str, DeviceKey]]:
    """Each tensor's device, so that a module's own share one."""
    start = len(prefix) + 1 if prefix else 0
    own = [one for one in members if "." not in one.name[start:]]
    children: dict[str, list[_Named]] = {}
    for one in members:
        if "." in one.name[start:]:
            children.setdefault(one.name[start:].partition(".")[0], []).append(one)
    split = len({one.key for one in members}) > 1
    few = sum(one.nbytes for one in members) <= small or not _has_blocks(children)
    if own and split and (not children or (prefix and few)):
        key = _most(members)
        yield from ((one.name, key) for one in members)
        return
    yield from ((one.name, one.key) for one in own)
    for child, below in children.items():
        yield from _settled(f"{prefix}.{child}" if prefix else child, below, small)


def _has_blocks(children: Mapping[str, Sequence[_Named]]) -> bool:
    """Whether something inside is a list of modules, or deep: one forward hardly computes with all of it."""
    names = [one.name.split(".") for below in children.values() for one in below]
    shallow = min(map(len, names), default=0) + 1
    return any(len(parts) > shallow or any(part.isdigit() for part in parts) for parts in names)


def _most(members: Sequence[_Named]) -> DeviceKey:
    totals: dict[DeviceKey, int] = {}
    for one in members:
        totals[one.key] = totals.get(one.key, 0) + one.nbytes
    return max(totals, key=lambda key: totals[key])
