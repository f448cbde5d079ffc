"""The published throughput workloads, cut into contiguous stages by the planner's own dynamic programming.

python tests/problems/throughput.py [--folder FOLDER] [--seconds 3]

Operator and layer graphs of Tarnawski et al., "Efficient algorithms for device placement of DNN graph
operators" (NeurIPS 2020), and layer graphs of Tarnawski et al., "Piper" (NeurIPS 2021), these without its
data and tensor parallelism. The objective is the load of the busiest device: what it computes, and the costs
of what it takes from others and gives to others. The graphs have no order of their own, so several
topological orders are tried, as many as a time limit allows; the order of a trace is given. The optimum over
all contiguous stages is the published one, or that of a dynamic program over all ideals where there are few.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from report import parser_of, table, write

from graphplan.passes.pipeline.stage_dp import Segments, StageCosts, StageDP

FOLDER = Path("../shared/workloads")
KNOWN = {
    "LayerGraphs/bert24_inference": 17.790,
    "LayerGraphs/bert24_training": 41.746,
    "LayerGraphs/resnet50_inference": 33.775,
    "LayerGraphs/gnmt_inference": 32.911,
    "OperatorGraphs/bert_l-3_inference": 27.919,
    "OperatorGraphs/bert_l-6_inference": 29.580,
    "OperatorGraphs/bert_l-12_inference": 147.478,
    "OperatorGraphs/resnet50_inference": 124.349,
}
"""Best contiguous loads of the paper's own dynamic program, in milliseconds."""
_IDEALS = 2_000  # up to which the program over all of them is run here
_PIPER_UNIT = {"bert32a100": 1e3}  # milliseconds in the unit of its file; the others are in milliseconds


@dataclass(frozen=True)
class Workload:
    """Groups of operations that are placed together, and the tensors that pass between them.

    Attributes:
        name: of the file.
        accelerators: how many there are.
        cores: of the CPU.
        limit: bytes of each accelerator.
        fast: (groups,) load on an accelerator.
        slow: (groups,) load on the CPU.
        size: (groups,) bytes.
        sends: for each value, its cost, its group, and the groups that take it.
        graph: of the groups, without cycles.
    """

    name: str
    accelerators: int
    cores: int
    limit: float
    fast: NDArray[np.float64]
    slow: NDArray[np.float64]
    size: NDArray[np.float64]
    sends: list[tuple[float, int, tuple[int, ...]]]
    graph: nx.DiGraph


def read(path: Path) -> Workload:
    """A workload; operations of one colour, and of a cycle, are one group."""
    data = json.loads(path.read_text())
    nodes = {node["id"]: node for node in data["nodes"]}
    colour = {
        i: ("c", n["colorClass"]) if n.get("colorClass") is not None else ("n", i) for i, n in nodes.items()
    }
    forward = nx.DiGraph()
    forward.add_nodes_from(colour.values())
    for edge in data["edges"]:
        a, b = edge["sourceId"], edge["destId"]
        if not nodes[a]["isBackwardNode"] and not nodes[b]["isBackwardNode"] and colour[a] != colour[b]:
            forward.add_edge(colour[a], colour[b])
    condensed = nx.condensation(forward)
    group = {i: condensed.graph["mapping"][colour[i]] for i in nodes}
    count = condensed.number_of_nodes()
    fast, slow, size = (np.zeros(count) for _ in range(3))
    for i, node in nodes.items():
        fast[group[i]] += node["fpgaLatency"] if node["supportedOnFpga"] else np.inf
        slow[group[i]] += node["cpuLatency"]
        size[group[i]] += node["size"]
    takers: dict[int, set[int]] = {}
    cost: dict[int, float] = {}
    for edge in data["edges"]:
        takers.setdefault(edge["sourceId"], set()).add(group[edge["destId"]])
        cost[edge["sourceId"]] = edge["cost"]
    sends = [(cost[i], group[i], tuple(sorted(takers[i]))) for i in takers]
    name = f"{path.parent.name}/{path.stem}"
    return Workload(
        name, data["maxFPGAs"], data["maxCPUs"], data["maxSizePerFPGA"], fast, slow, size, sends, condensed
    )


def read_piper(path: Path) -> Workload:
    """A workload of Piper on single devices, forward and backward, with the memory of ten microbatches."""
    data, unit = json.loads(path.read_text()), _PIPER_UNIT.get(path.stem, 1.0)
    of = {node["id"]: index for index, node in enumerate(data["nodes"])}
    plain = [node["TMPCs"]["1"][0] for node in data["nodes"]]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(plain)))
    takers: dict[int, set[int]] = {}
    cost: dict[int, float] = {}
    for edge in data["edges"]:
        source = of[edge["sourceId"]]
        graph.add_edge(source, of[edge["destId"]])
        takers.setdefault(source, set()).add(of[edge["destId"]])
        cost[source] = 2e3 * edge["communicationCost"] / data["bandwidth"]  # there, and its gradient back
    seconds = np.array([one["timePerSample"] * unit for one in plain])
    size = np.array([one["memoryUsageB"] + 10 * one["memoryUsageA"] for one in plain])
    sends = [(cost[i], i, tuple(sorted(takers[i]))) for i in takers]
    count, limit = data["maxDevices"], data["maxMemoryPerDevice"]
    return Workload(f"piper/{path.stem}", count, 0, limit, seconds, seconds, size, sends, graph)


def orders(graph: nx.DiGraph, count: int) -> Iterator[list[int]]:
    """Topological orders: depth first from the end and from the start, in turn and at random."""
    yield list(nx.lexicographical_topological_sort(graph))
    rng = random.Random(0)
    for attempt in range(count):
        towards = graph if attempt % 2 else graph.reverse(copy=False)
        shuffled = nx.DiGraph()
        inner = [node for node in towards if towards.in_degree(node)]
        starts = [node for node in towards if not towards.in_degree(node)]
        shuffled.add_nodes_from([*rng.sample(starts, len(starts)), *inner])
        shuffled.add_edges_from(rng.sample(list(towards.edges), towards.number_of_edges()))
        found = list(nx.dfs_postorder_nodes(shuffled))
        yield found[::-1] if attempt % 2 else found


def costs(workload: Workload, order: Sequence[int]) -> StageCosts:
    """The load of each stretch of an order, on an accelerator and on a core."""
    count = len(order)
    at = np.empty(count, dtype=np.int64)
    at[list(order)] = np.arange(count)
    change = np.zeros((count + 2, count + 2))

    def add(rows: tuple[int, int], columns: tuple[int, int], amount: float) -> None:
        """To stretches that start in ``rows`` and end in ``columns``, both ends included."""
        if rows[0] <= rows[1] and columns[0] <= columns[1]:
            change[rows[0], columns[0]] += amount
            change[rows[1] + 1, columns[0]] -= amount
            change[rows[0], columns[1] + 1] -= amount
            change[rows[1] + 1, columns[1] + 1] += amount

    for amount, source, takers in workload.sends:
        p, q = int(at[source]), sorted(int(at[taker]) for taker in takers)
        add((0, p), (p + 1, count), amount)  # it leaves, unless all is inside
        add((0, min(p, q[0])), (max(p, q[-1]) + 1, count), -amount)
        before = -1
        for taker in q:  # it arrives, where this is the first taker inside
            add((before + 1, min(taker, p)), (taker + 1, p), amount)
            add((max(before + 1, p + 1), taker), (taker + 1, count), amount)
            before = taker
    moved = change.cumsum(0).cumsum(1)[: count + 1, : count + 1]

    def between(each: NDArray[np.float64]) -> NDArray[np.float64]:
        total = np.concatenate([[0.0], each[list(order)].cumsum()])
        return total[None, :] - total[:, None]

    backwards = np.tri(count + 1, dtype=bool)
    fits = between(workload.size) <= workload.limit * (1 + 1e-12)
    fast = np.where(backwards | ~fits, np.inf, between(workload.fast) + moved)
    slow = np.where(backwards, np.inf, between(workload.slow))
    return StageCosts([fast, slow], [fast, slow])


def best(workload: Workload, seconds: float) -> tuple[Segments, int]:
    """The stages of the least load over orders, within so many seconds, and how many orders were tried."""
    end, found, tried = time.process_time() + seconds, None, 0
    for order in orders(workload.graph, 10_000):
        dp = StageDP(costs(workload, order), [workload.accelerators, workload.cores])
        segments = dp.evenest()
        tried += 1
        if segments is not None and (found is None or segments.slowest < found.slowest):
            found = segments
        if time.process_time() > end:
            break
    assert found is not None
    return found, tried


def even(workload: Workload) -> float | None:
    """The load of the busiest device, if each has as many groups as any other; None without room."""
    order = next(orders(workload.graph, 0))
    load = costs(workload, order).load[0]
    ends = np.linspace(0, len(order), workload.accelerators + 1).round().astype(int)
    busiest = float(max(load[a, b] for a, b in pairwise(ends)))
    return busiest if np.isfinite(busiest) else None


def optimum(workload: Workload) -> float | None:
    """The least load over all contiguous stages, by a program over all ideals; None where there are many."""
    ideals = _ideals(workload.graph)
    if ideals is None:
        return None
    least = {frozenset[int](): {(0, 0): 0.0}}
    for ideal in ideals[1:]:
        here: dict[tuple[int, int], float] = {}
        for before in [one for one in least if one < ideal]:
            fast, slow = loads(workload, ideal - before)
            for (used, cores), so_far in least[before].items():
                for state, load in (((used + 1, cores), fast), ((used, cores + 1), slow)):
                    if state[0] <= workload.accelerators and state[1] <= workload.cores:
                        here[state] = min(here.get(state, np.inf), max(so_far, load))
        least[ideal] = here
    return min(least[ideals[-1]].values())


def _ideals(graph: nx.DiGraph) -> list[frozenset[int]] | None:
    found, layer = [frozenset[int]()], {frozenset[int]()}
    while layer:
        layer = {
            ideal | {node}
            for ideal in layer
            for node in graph
            if node not in ideal and ideal.issuperset(graph.predecessors(node))
        }
        found += sorted(layer, key=sorted)
        if len(found) > _IDEALS:
            return None
    return found


def loads(workload: Workload, stage: frozenset[int]) -> tuple[float, float]:
    """Of a set of groups, on an accelerator and on a core."""
    inside = list(stage)
    moved = sum(
        amount
        for amount, source, takers in workload.sends
        if (source in stage and not stage.issuperset(takers))
        or (source not in stage and not stage.isdisjoint(takers))
    )
    fits = workload.size[inside].sum() <= workload.limit * (1 + 1e-12)
    fast = workload.fast[inside].sum() + moved if fits else np.inf
    return float(fast), float(workload.slow[inside].sum())


def row(workload: Workload, seconds: float) -> dict[str, Any]:
    """The report of a workload."""
    found, tried = best(workload, seconds)
    known = KNOWN.get(workload.name)
    proven = known or optimum(workload)
    return {
        "workload": workload.name,
        "groups": len(workload.fast),
        "devices": workload.accelerators,
        "load": found.slowest,
        "optimum": proven,
        "source": "published" if known else "all ideals" if proven else None,
        "ratio": found.slowest / proven if proven else None,
        "even": even(workload),
        "orders": tried,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one core, for each workload")
    chosen = parser.parse_args()
    published = sorted((chosen.folder / "dnn-partitioning/throughput-inputs").glob("*/*.json"))
    found = [*map(read, published), *map(read_piper, sorted((chosen.folder / "piper/inputs").glob("*.json")))]
    if not found:
        print(f"no workloads in {chosen.folder}")
        return
    rows = [row(workload, chosen.seconds) for workload in found]
    print(table(rows))
    print(f"wrote {write('throughput', {'seconds': chosen.seconds, 'unit': 'ms', 'rows': rows})}")


if __name__ == "__main__":
    main()
