"""Devices as the caller names them: ``max_memory`` is read into a ``Topology``.

A *key* is what the caller wrote in ``max_memory`` (``0``, ``"cpu"``, ``"cuda:1"``); the plan speaks in
keys, and :class:`~graphplan.devices.topology.DeviceSpec` maps each to its ``torch.device``.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from accelerate.utils import convert_file_size_to_int

from graphplan.devices.cuda_memory import taken_beside
from graphplan.devices.datasheets import Card, find_card
from graphplan.devices.device_keys import by_own_keys, device_named, own_key
from graphplan.devices.machine import accelerator_type, current_machine, detect_max_memory
from graphplan.devices.topology import CPU, DISK, SIMULATED, DeviceKey, DeviceSpec, Link, Topology
from graphplan.errors import BudgetError, DeviceError
from graphplan.message_text import readable_bytes

Size = int | float | str  # bytes, or text such as "10GiB"
MaxMemory = Mapping[DeviceKey, Size]
Reserve = Size | Mapping[DeviceKey, Size]

_ACCELERATOR = (100e12, 1.0e12)  # FLOP/s and bytes/s of a card that is not known
_ACCELERATOR_OVERHEAD = 4e-6  # one asynchronous kernel launch
_CPU_SPEED = (1e12, 50e9)
# An operation on the CPU stops the host from queueing work for the accelerators, so its price is
# the thread pool's wake-up and a drained queue, not a launch.
_CPU_OVERHEAD = 20e-6
_TERABYTES = re.compile(r"(.+)t(i?b)", re.IGNORECASE)
_ELSEWHERE = "To plan for another machine use graphplan.plan; to try it here, graphplan.simulate"
_SIMULATED_HERE = (
    "Inside graphplan.simulate, name devices by their index, and make plans to carry out there too"
)


def read_max_memory(
    max_memory: MaxMemory | None,
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] | None = None,
    reserve: Reserve = 0,
    *,
    grad: bool = False,
) -> Topology:
    """Read ``max_memory`` into a :class:`Topology`.

    Args:
        max_memory: key -> bytes or text such as ``"10GiB"``; None detects this machine.
        links: what is known of the links; a simulated machine brings its own.
        reserve: bytes to leave free on every device, or key -> bytes.
        grad: whether there is a backward pass, which another thread runs.

    Raises:
        BudgetError: an empty mapping, or a value that is no non-negative number of bytes.
        DeviceError: a key that is no device.
    """
    if max_memory is None:
        max_memory = dict(detect_max_memory())
    if not isinstance(max_memory, Mapping):
        kind = type(max_memory).__name__
        raise BudgetError(f"max_memory must map device keys to bytes, not be {max_memory!r} ({kind})")
    if not max_memory:
        raise BudgetError("max_memory is empty: name at least one device, e.g. {0: '20GiB', 'cpu': '60GiB'}")
    sizes = {key: read_size(value, f"max_memory[{key!r}]") for key, value in max_memory.items()}
    specs = tuple(_spec(key, memory, 1 + grad) for key, memory in sizes.items())
    _reject_twins(specs)
    if not any(spec.computes for spec in specs):
        raise BudgetError(
            "max_memory names only 'disk', which cannot run operations: add an accelerator or 'cpu'"
        )
    _check_links(links, specs)
    machine, own = current_machine.get(), own_links(specs, links or {})
    known = links_to_host(specs) if machine is None else own_links(specs, machine.links)
    given = {pair for a, b in own for pair in ((a, b), (b, a))}
    known = {pair: link for pair, link in known.items() if pair not in given}
    return Topology(_with_reserve(specs, reserve), {**known, **own})


def links_to_host(
    specs: Sequence[DeviceSpec], named: Mapping[DeviceKey, object] | None = None
) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """Those of cards of known kinds: that are ``named``, or by default those that are here."""
    host: DeviceKey = next((spec.key for spec in specs if spec.device == CPU), CPU)
    if named is None:
        cards = {spec.key: _card(spec.device) for spec in specs}
    else:
        cards = {key: find_card(n) for key, n in named.items() if isinstance(n, str) and key != host}
    latency = Link().latency
    return {(key, host): Link(c.host, latency, "datasheet") for key, c in cards.items() if c is not None}


def _card(device: str) -> Card | None:
    """The kind of a card of this machine; None for another device, and where it is not known."""
    index = _index_here(device)
    return None if index is None else find_card(torch.cuda.get_device_name(index))


def _index_here(device: str) -> int | None:
    """Of a CUDA card of this machine; None for another device."""
    kind, _, index = device.partition(":")
    here = kind == "cuda" and torch.cuda.is_available() and int(index) < torch.cuda.device_count()
    return int(index) if here else None


def _check_links(links: object, specs: Sequence[DeviceSpec]) -> None:
    """Refuse links that no plan would look up: inputs may come from devices beside those of a plan."""
    if links is None:
        return
    if not isinstance(links, Mapping) or not all(isinstance(link, Link) for link in links.values()):
        raise DeviceError(f"links must map (source, destination) to graphplan.Link, not be {links!r}")
    keys = {spec.key for spec in specs}
    for pair in links:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise DeviceError(f"links has the key {pair!r}: write (source, destination), as (0, 'cpu')")
        for end in pair:
            if own_key(specs, end, "links") not in keys and isinstance(end, numbers.Integral):
                raise DeviceError(f"links names {end!r}, which is not in max_memory")


def own_links(
    specs: Sequence[DeviceSpec], links: Mapping[tuple[DeviceKey, DeviceKey], Link]
) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """Links, by the keys of ``max_memory``."""
    own = {
        (own_key(specs, source, "links"), own_key(specs, destination, "links")): link
        for (source, destination), link in links.items()
    }
    if len(own) < len(links) or any(source == destination for source, destination in own):
        raise DeviceError(
            f"links name a pair twice, or a device with itself, in {list(links)}: keep one of each"
        )
    return own


def _with_reserve(specs: tuple[DeviceSpec, ...], reserve: Reserve) -> tuple[DeviceSpec, ...]:
    if not isinstance(reserve, Mapping):
        nbytes = read_size(reserve, "reserve")
        return tuple(
            _reserved(spec, nbytes, "reserve") if spec.is_accelerator else replace(spec, reserve=nbytes)
            for spec in specs
        )
    own = by_own_keys(specs, reserve, "reserve")
    sizes = {key: read_size(value, f"reserve[{key!r}]") for key, value in own.items()}
    return tuple(_reserved(spec, sizes.get(spec.key, 0), f"reserve[{spec.key!r}]") for spec in specs)


def _reserved(spec: DeviceSpec, nbytes: int, name: str) -> DeviceSpec:
    if nbytes >= spec.memory - spec.taken > 0:
        raise BudgetError(
            f"{name} = {readable_bytes(nbytes)} leaves nothing of max_memory[{spec.key!r}] = "
            f"{readable_bytes(spec.memory)}: reserve less, or leave the device out"
        )
    return replace(spec, reserve=nbytes)


def require_present(topology: Topology, hint: str = _ELSEWHERE) -> None:
    """Raise DeviceError, with a hint, unless this machine (or the simulated one) has every device."""
    machine = current_machine.get()
    for spec in topology.devices:
        if not spec.is_accelerator:
            continue
        index = int(spec.device.partition(":")[2] or 0)
        if machine is not None and spec.type == SIMULATED:
            present, have = index in machine.capacities, f"simulates {sorted(map(str, machine.max_memory))}"
        else:
            found = accelerator_type() if machine is None else None
            here = torch.accelerator.device_count() if found is not None else 0
            present = spec.type == found and index < here
            have = f"has {here} {found or 'accelerator'} device{'' if here == 1 else 's'}"
            hint = hint if machine is None else _SIMULATED_HERE
        if not present:
            raise DeviceError(f"device {spec.key!r} ({spec.device}) is not here: this machine {have}. {hint}")


def text_bytes(text: str) -> int:
    """Bytes that a number with a unit means, ``"10GiB"`` or ``"1.5TB"``.

    Raises:
        ValueError: it is no such text.
        OverflowError: it is infinite.
    """
    if tera := _TERABYTES.fullmatch(text):  # accelerate's reader ends with gigabytes
        number, unit = tera.groups()
        text = f"{float(number) * (1024 if len(unit) == 2 else 1000)}G{unit}"
    return int(convert_file_size_to_int(text))


def read_size(value: object, name: str) -> int:
    """Bytes that are given as a number or a text such as ``"10GiB"``; ``name`` says what they are.

    Raises:
        BudgetError: they are no such size.
    """
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise BudgetError(f"{name} must be bytes or text such as '10GiB', not {value!r}")
    try:
        nbytes = text_bytes(value) if isinstance(value, str) else math.floor(float(value))
    except (ValueError, OverflowError) as error:
        negative = str(value).lstrip().startswith("-")
        what = "is negative" if negative else "is no size: write bytes, '10GiB' or '10GB'"
        raise BudgetError(f"{name} = {value!r} {what}") from error
    if nbytes < 0:
        raise BudgetError(f"{name} = {value!r} is negative")
    if nbytes == 0 and not isinstance(value, str) and value != 0:
        raise BudgetError(f"{name} = {value!r} is less than a byte: write '{value}GiB' for as many GiB")
    return nbytes


def _spec(key: object, memory: int, threads: int) -> DeviceSpec:
    device = device_named(key)
    own = int(key) if isinstance(key, numbers.Integral) else str(key)
    if device == DISK:
        return DeviceSpec(own, DISK, memory, 0.0, 0.0, 0.0)
    if device == CPU:
        return DeviceSpec(own, CPU, memory, *_CPU_SPEED, _CPU_OVERHEAD)
    return _accelerator(own, device, memory, threads)


def _accelerator(key: DeviceKey, device: str, memory: int, threads: int) -> DeviceSpec:
    machine, card, index = current_machine.get(), _card(device), _index_here(device)
    spec = DeviceSpec(key, device, memory, *_ACCELERATOR, _ACCELERATOR_OVERHEAD)
    if machine is not None and spec.type == SIMULATED:
        spec = replace(spec, taken=machine.workspace)
    if card is not None:
        spec = replace(spec, flops=card.flops, bandwidth=card.bandwidth, origin="datasheet")
    return spec if index is None else replace(spec, taken=taken_beside(index, memory, threads))


def _reject_twins(specs: Sequence[DeviceSpec]) -> None:
    seen: dict[str, DeviceKey] = {}
    for spec in specs:
        if spec.device in seen:
            raise DeviceError(
                f"max_memory keys {seen[spec.device]!r} and {spec.key!r} are both {spec.device}"
            )
        seen[spec.device] = spec.key
