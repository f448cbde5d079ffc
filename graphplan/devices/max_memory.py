"""Read ``max_memory`` into a ``Topology``.

A *key* is what the caller wrote in ``max_memory`` (``0``, ``"cpu"``, ``"cuda:1"``). Plans use keys, and
:class:`~graphplan.devices.topology.DeviceSpec` maps each to its ``torch.device``.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch
from accelerate.utils import convert_file_size_to_int

from graphplan.devices.cuda_memory import unavailable_bytes
from graphplan.devices.datasheets import Gpu, find_gpu
from graphplan.devices.device_keys import by_caller_keys, caller_key, device_name_of
from graphplan.devices.machine import accelerator_type, current_machine, detect_max_memory
from graphplan.devices.topology import CPU, DISK, SIMULATED, DeviceKey, DeviceSpec, Link, Topology
from graphplan.errors import BudgetError, DeviceError
from graphplan.message_text import readable_bytes

Size = int | float | str  # bytes, or text such as "10GiB"
MaxMemory = Mapping[DeviceKey, Size]
Reserve = Size | Mapping[DeviceKey, Size]

_ACCELERATOR = (100e12, 1.0e12)  # FLOP/s and bytes/s of an unknown accelerator
_ACCELERATOR_OVERHEAD = 4e-6  # one asynchronous kernel launch
_CPU_SPEED = (1e12, 50e9)
# While the CPU runs an operation, the host queues no work for the accelerators. So its overhead is a
# wake-up of the thread pool and a drained queue, not a launch.
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
        links: the caller's links; datasheet links, or a simulated machine's own, are added.
        reserve: bytes to leave free on every device, or key -> bytes.
        grad: whether there is a backward pass, which runs in autograd's thread.

    Raises:
        BudgetError: an empty mapping, or a value that is not a number of bytes.
        DeviceError: a key that is not a device, two keys of one device, or invalid links.
    """
    if max_memory is None:
        max_memory = detect_max_memory()
    if not isinstance(max_memory, Mapping):
        kind = type(max_memory).__name__
        raise BudgetError(f"max_memory must map device keys to bytes, not be {max_memory!r} ({kind})")
    if not max_memory:
        raise BudgetError("max_memory is empty: name at least one device, e.g. {0: '20GiB', 'cpu': '60GiB'}")
    sizes = {key: read_size(value, f"max_memory[{key!r}]") for key, value in max_memory.items()}
    specs = tuple(_spec(key, memory, 1 + grad) for key, memory in sizes.items())
    _reject_duplicates(specs)
    if not any(spec.computes for spec in specs):
        raise BudgetError(
            "max_memory names only 'disk', which cannot run operations: add an accelerator or 'cpu'"
        )
    _check_links(links, specs)
    machine, caller_links = current_machine.get(), links_by_caller_key(specs, links or {})
    default_links = links_to_host(specs) if machine is None else links_by_caller_key(specs, machine.links)
    links_here = {**links_besides(caller_links, default_links), **caller_links}
    return Topology(_with_reserve(specs, reserve), links_here)


def links_besides(
    excluded: Container[tuple[DeviceKey, DeviceKey]], links: Mapping[tuple[DeviceKey, DeviceKey], Link]
) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """Return the links of pairs that ``excluded`` has in neither direction."""
    return {(a, b): link for (a, b), link in links.items() if not ((a, b) in excluded or (b, a) in excluded)}


def links_to_host(
    specs: Sequence[DeviceSpec], named: Mapping[DeviceKey, object] | None = None
) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """Return datasheet links to the CPU of the GPUs ``named`` (key -> name), or by default of those here."""
    host: DeviceKey = next((spec.key for spec in specs if spec.device == CPU), CPU)
    if named is None:
        gpus = {spec.key: _datasheet(spec) for spec in specs}
    else:
        gpus = {key: find_gpu(name) for key, name in named.items() if isinstance(name, str) and key != host}
    latency = Link().latency
    return {(key, host): Link(gpu.host, latency, "datasheet") for key, gpu in gpus.items() if gpu is not None}


def _datasheet(spec: DeviceSpec) -> Gpu | None:
    """Return the datasheet of a GPU of this machine; None for other devices and unknown GPUs."""
    index = _cuda_index(spec)
    return None if index is None else find_gpu(torch.cuda.get_device_name(index))


def _cuda_index(spec: DeviceSpec) -> int | None:
    """Return the index of a CUDA device of this machine; None for other devices."""
    is_here = spec.type == "cuda" and torch.cuda.is_available() and spec.index < torch.cuda.device_count()
    return spec.index if is_here else None


def _check_links(links: object, specs: Sequence[DeviceSpec]) -> None:
    """Raise DeviceError for malformed links and indices that no plan uses; inputs may be on other devices."""
    if links is None:
        return
    if not isinstance(links, Mapping) or not all(isinstance(link, Link) for link in links.values()):
        raise DeviceError(f"links must map (source, destination) to graphplan.Link, not be {links!r}")
    keys = {spec.key for spec in specs}
    for pair in links:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise DeviceError(f"links has the key {pair!r}: write (source, destination), as (0, 'cpu')")
        for end in pair:
            if caller_key(specs, end, "links") not in keys and isinstance(end, numbers.Integral):
                raise DeviceError(f"links names {end!r}, which is not in max_memory")


def links_by_caller_key(
    specs: Sequence[DeviceSpec], links: Mapping[tuple[DeviceKey, DeviceKey], Link]
) -> dict[tuple[DeviceKey, DeviceKey], Link]:
    """Return links with the keys of ``max_memory``; raise DeviceError for repeated pairs and self-links."""
    by_key = {
        (caller_key(specs, source, "links"), caller_key(specs, destination, "links")): link
        for (source, destination), link in links.items()
    }
    if len(by_key) < len(links) or any(source == destination for source, destination in by_key):
        raise DeviceError(
            f"links name a pair twice, or a device with itself, in {list(links)}: keep one of each"
        )
    return by_key


def _with_reserve(specs: tuple[DeviceSpec, ...], reserve: Reserve) -> tuple[DeviceSpec, ...]:
    if not isinstance(reserve, Mapping):
        nbytes = read_size(reserve, "reserve")
        return tuple(
            _reserved(spec, nbytes, "reserve") if spec.is_accelerator else replace(spec, reserve=nbytes)
            for spec in specs
        )
    by_key = by_caller_keys(specs, reserve, "reserve")
    sizes = {key: read_size(value, f"reserve[{key!r}]") for key, value in by_key.items()}
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
        if machine is not None and spec.type == SIMULATED:
            present = spec.index in machine.capacities
            what = f"simulates {sorted(map(str, machine.max_memory))}"
        else:
            here_type = accelerator_type() if machine is None else None
            count = torch.accelerator.device_count() if here_type is not None else 0
            present = spec.type == here_type and spec.index < count
            what = f"has {count} {here_type or 'accelerator'} device{'' if count == 1 else 's'}"
            hint = hint if machine is None else _SIMULATED_HERE
        if not present:
            raise DeviceError(f"device {spec.key!r} ({spec.device}) is not here: this machine {what}. {hint}")


def text_bytes(text: str) -> int:
    """Return the bytes of a number with a unit: ``"10GiB"``, ``"1.5TB"``.

    Raises:
        ValueError: the text has another form.
        OverflowError: the number is infinite.
    """
    if tera := _TERABYTES.fullmatch(text):  # which accelerate's reader does not know
        number, unit = tera.groups()
        text = f"{float(number) * (1024 if len(unit) == 2 else 1000)}G{unit}"
    return int(convert_file_size_to_int(text))


def read_size(value: object, name: str) -> int:
    """Return bytes that are given as a number or as text such as ``"10GiB"``.

    Raises:
        BudgetError: ``value`` is not such a size; the message begins with ``name``.
    """
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real | str):
        raise BudgetError(f"{name} must be bytes or text such as '10GiB', not {value!r}")
    try:
        nbytes = text_bytes(value) if isinstance(value, str) else math.floor(float(value))
    except (ValueError, OverflowError) as error:
        negative = str(value).lstrip().startswith("-")
        what = "is negative" if negative else "is not a size: write bytes, '10GiB' or '10GB'"
        raise BudgetError(f"{name} = {value!r} {what}") from error
    if nbytes < 0:
        raise BudgetError(f"{name} = {value!r} is negative")
    if nbytes == 0 and not isinstance(value, str) and value != 0:
        raise BudgetError(f"{name} = {value!r} is less than a byte: write '{value}GiB' for as many GiB")
    return nbytes


def _spec(key: object, memory: int, threads: int) -> DeviceSpec:
    device = device_name_of(key)
    spec_key = int(key) if isinstance(key, numbers.Integral) else str(key)
    if device == DISK:
        return DeviceSpec(spec_key, DISK, memory, flops=0.0, bandwidth=0.0, overhead=0.0)
    if device == CPU:
        return DeviceSpec(spec_key, CPU, memory, *_CPU_SPEED, overhead=_CPU_OVERHEAD)
    machine = current_machine.get()
    spec = DeviceSpec(spec_key, device, memory, *_ACCELERATOR, overhead=_ACCELERATOR_OVERHEAD)
    gpu, index = _datasheet(spec), _cuda_index(spec)
    if machine is not None and spec.type == SIMULATED:
        spec = replace(spec, taken=machine.workspace)
    if gpu is not None:
        spec = replace(spec, flops=gpu.flops, bandwidth=gpu.bandwidth, origin="datasheet")
    return spec if index is None else replace(spec, taken=unavailable_bytes(index, memory, threads))


def _reject_duplicates(specs: Sequence[DeviceSpec]) -> None:
    key_of: dict[str, DeviceKey] = {}
    for spec in specs:
        if spec.device in key_of:
            raise DeviceError(
                f"max_memory keys {key_of[spec.device]!r} and {spec.key!r} are both {spec.device}"
            )
        key_of[spec.device] = spec.key
