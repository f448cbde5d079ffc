"""The dnn-partitioning workloads (Microsoft, NeurIPS 2020): reading them, and scoring a placement exactly.

A placement gives each node an accelerator, 0, 1, ..., or a core of the CPU: -1 is the first core,
-2 the second. The two evaluators follow the definitions alone and share no code with the solvers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CPU = -1
FOLDER = Path(__file__).resolve().parents[2] / "shared" / "workloads" / "dnn-partitioning"
Placement = Sequence[int]


class InvalidPlacementError(ValueError):
    """A placement breaks a rule of the workload; the message names the nodes and the rule."""


@dataclass(frozen=True)
class Workload:
    """A graph to place. Times are in the benchmark's own unit (ms), sizes in bytes.

    Nodes are counted from 0 in the file's order; ``ids`` are the file's. ``cost[u]`` is the time to
    carry the value of u between an accelerator and the CPU's memory.
    """

    name: str
    ids: tuple[int, ...]
    cpu: tuple[float, ...]
    accelerator: tuple[float, ...]
    size: tuple[float, ...]
    cost: tuple[float, ...]
    colour: tuple[int, ...]
    backward: tuple[bool, ...]
    supported: tuple[bool, ...]
    edges: tuple[tuple[int, int], ...]
    limit: float
    accelerators: int
    cores: int

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        return _neighbours(len(self), self.edges)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        return _neighbours(len(self), [(v, u) for u, v in self.edges])


def _neighbours(n: int, edges: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    lists: list[dict[int, None]] = [{} for _ in range(n)]
    for u, v in edges:
        lists[u][v] = None
    return tuple(tuple(each) for each in lists)


def read(path: Path) -> Workload:
    """One of the benchmark's JSON files; a node without a colour class has one of its own."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return from_json(data, f"{path.stem.lower().removesuffix('_inference')}{_kind(path)}")


def _kind(path: Path) -> str:
    return "-op" if path.parent.name == "OperatorGraphs" else "-layer"


def from_json(data: Mapping[str, Any], name: str) -> Workload:
    nodes = data["nodes"]
    index = {node["id"]: i for i, node in enumerate(nodes)}
    cost = [0.0] * len(nodes)
    seen: dict[int, float] = {}
    for edge in data["edges"]:
        u = index[edge["sourceId"]]
        if abs(seen.setdefault(u, edge["cost"]) - edge["cost"]) > 1e-6:
            raise ValueError(f"{name}: node {edge['sourceId']} has edges of two costs; the format wants one")
        cost[u] = seen[u]
    colours: dict[Any, int] = {}
    colour = [colours.setdefault(n.get("colorClass", ("own", n["id"])), len(colours)) for n in nodes]
    return Workload(
        name=name,
        ids=tuple(index),
        cpu=tuple(float(n["cpuLatency"]) for n in nodes),
        accelerator=tuple(float(n["fpgaLatency"]) for n in nodes),
        size=tuple(float(n.get("size", 0.0)) for n in nodes),
        cost=tuple(cost),
        colour=tuple(colour),
        backward=tuple(bool(n["isBackwardNode"]) for n in nodes),
        supported=tuple(bool(n["supportedOnFpga"]) for n in nodes),
        edges=tuple((index[e["sourceId"]], index[e["destId"]]) for e in data["edges"]),
        limit=float(data["maxSizePerFPGA"]),
        accelerators=int(data["maxFPGAs"]),
        cores=int(data["maxCPUs"]),
    )


def inputs(folder: Path, objective: str) -> Iterator[Workload]:
    """The workloads of an objective, ``latency`` or ``throughput``, in the order of their paths."""
    for path in sorted((folder / f"{objective}-inputs").glob("*/*.json")):
        yield read(path)


def check(workload: Workload, placement: Placement) -> None:
    """Raise for a node without a device, a colour on two devices, or a full accelerator."""
    if len(placement) != len(workload):
        raise InvalidPlacementError(f"{workload.name}: {len(placement)} devices for {len(workload)} nodes")
    device_of: dict[int, int] = {}
    used: dict[int, float] = defaultdict(float)
    for v, device in enumerate(placement):
        node = workload.ids[v]
        if not -workload.cores <= device < workload.accelerators:
            raise InvalidPlacementError(
                f"{workload.name}: node {node} is on device {device}, which is not there"
            )
        if device >= 0 and not workload.supported[v]:
            raise InvalidPlacementError(f"{workload.name}: node {node} cannot run on an accelerator")
        if device_of.setdefault(workload.colour[v], device) != device:
            raise InvalidPlacementError(f"{workload.name}: node {node} is apart from its colour class")
        used[device] += workload.size[v]
    for device, total in used.items():
        if device >= 0 and total > workload.limit:
            raise InvalidPlacementError(
                f"{workload.name}: accelerator {device} holds {total:.0f} bytes of {workload.limit:.0f}"
            )


def loads(workload: Workload, placement: Placement) -> dict[int, float]:
    """Time that each device is busy per sample, communication of the accelerators included."""
    busy: dict[int, float] = defaultdict(float)
    for v, device in enumerate(placement):
        busy[device] += workload.cpu[v] if device < 0 else workload.accelerator[v]
    carried = set()
    for u, v in workload.edges:
        if placement[u] != placement[v]:
            carried.add((u, placement[u]))
            carried.add((u, placement[v]))
    for u, device in carried:
        if device >= 0:
            busy[device] += workload.cost[u]
    return dict(busy)


def throughput(workload: Workload, placement: Placement) -> float:
    """The largest load (time per sample of a full pipeline)."""
    check(workload, placement)
    return max(loads(workload, placement).values())


def latency(workload: Workload, placement: Placement) -> float:
    """Time of one sample: an accelerator waits for all it needs, fetches, computes, and sends.

    Raises:
        InvalidPlacementError: also if two accelerators, or one and the CPU, wait for one another:
            a subgraph is not contiguous.
    """
    check(workload, placement)
    block = [v if device < 0 else len(workload) + device for v, device in enumerate(placement)]
    weight: dict[int, float] = defaultdict(float)
    for v, b in enumerate(block):
        weight[b] += workload.cpu[v] if placement[v] < 0 else workload.accelerator[v]
    carried, before, after = set(), defaultdict(set), defaultdict(set)
    for u, v in workload.edges:
        if block[u] != block[v]:
            carried.add((u, block[u]))
            carried.add((u, block[v]))
            before[block[v]].add(block[u])
            after[block[u]].add(block[v])
    for u, b in carried:
        if b >= len(workload):
            weight[b] += workload.cost[u]
    waiting = {b: len(before[b]) for b in weight}
    ready = [b for b in weight if not waiting[b]]
    finish: dict[int, float] = {}
    while ready:
        b = ready.pop()
        finish[b] = weight[b] + max((finish[a] for a in before[b]), default=0.0)
        for c in after[b]:
            waiting[c] -= 1
            if not waiting[c]:
                ready.append(c)
    if len(finish) < len(weight):
        stuck = sorted(workload.ids[v] for v, b in enumerate(block) if b not in finish)
        raise InvalidPlacementError(
            f"{workload.name}: subgraphs are not contiguous; nodes that wait for one another: {stuck[:8]}"
        )
    return max(finish.values())


def to_json(workload: Workload, placement: Placement) -> dict[str, int | str]:
    """Node id -> accelerator, "cpu", or "cpu1" and so on for further cores."""
    names = {device: f"cpu{-1 - device}" for device in range(-workload.cores, CPU)} | {CPU: "cpu"}
    return {str(i): names.get(device, device) for i, device in zip(workload.ids, placement, strict=True)}


def placement_from_json(workload: Workload, devices: Mapping[str, int | str]) -> list[int]:
    """The inverse of :func:`to_json`."""

    def parse(device: int | str) -> int:
        return device if isinstance(device, int) else CPU - int(device.removeprefix("cpu") or 0)

    return [parse(devices[str(i)]) for i in workload.ids]


def expert(workload: Workload, path: Path) -> list[int]:
    """A human expert's split in the authors' format; what it leaves out follows its colour."""
    data = json.loads(path.read_text(encoding="utf-8"))
    index = {node: v for v, node in enumerate(workload.ids)}
    by_colour: dict[int, int] = {}
    for kind, first, step in (("fpgas", 0, 1), ("cpus", CPU, -1)):
        for i, machine in enumerate(data[kind]):
            for node in machine["nodes"]:
                by_colour[workload.colour[index[node]]] = first + step * i
    return [by_colour[colour] for colour in workload.colour]
