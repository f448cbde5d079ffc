"""Contiguous slices of the least largest load: a dynamic program over pairs of ideals.

Groups are colour classes. A value that some but not all of the groups around it share a device with
costs each accelerator among them one transfer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from dnn_ideals import TooManyIdealsError, enumerate_ideals, ideals_of_orders
from dnn_workload import CPU, Workload

Progress = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True)
class Parts:
    """Colour classes of a workload in a topological order, and the values that join them.

    ``joined[i]`` are the groups that make or use value i, ``cost[i]`` the time of one transfer.
    """

    members: tuple[tuple[int, ...], ...]
    cpu: np.ndarray
    accelerator: np.ndarray
    size: np.ndarray
    supported: np.ndarray
    joined: tuple[tuple[int, ...], ...]
    cost: np.ndarray
    predecessors: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.members)

    def spread(self, devices: Sequence[int], nodes: int) -> list[int]:
        """Devices of the groups as devices of the nodes."""
        placement = [CPU] * nodes
        for group, device in zip(self.members, devices, strict=True):
            for v in group:
                placement[v] = device
        return placement


@dataclass(frozen=True)
class Contiguous:
    """The least largest load over chains of ideals, with its devices, one a group."""

    devices: tuple[int, ...]
    load: float
    exact: bool
    ideals: int


def parts_of(workload: Workload, absorb: bool = False) -> Parts:
    """Colour classes; with ``absorb``, groups that take no time join the only group they touch."""
    together = nx.utils.UnionFind(range(len(workload)))
    first: dict[int, int] = {}
    for v, colour in enumerate(workload.colour):
        together.union(first.setdefault(colour, v), v)
    while absorb and _absorb(workload, together):
        pass
    graph = _order_graph(workload, together)
    for circle in nx.strongly_connected_components(graph):
        together.union(*circle)
    graph = _order_graph(workload, together)
    order = list(nx.lexicographical_topological_sort(graph))
    number = {root: i for i, root in enumerate(order)}
    members: list[list[int]] = [[] for _ in order]
    for v in range(len(workload)):
        members[number[together[v]]].append(v)
    costs: dict[tuple[int, ...], float] = defaultdict(float)
    for u in range(len(workload)):
        around = {number[together[v]] for v in (u, *workload.successors[u])}
        if len(around) > 1:
            costs[tuple(sorted(around))] += workload.cost[u]
    return Parts(
        members=tuple(tuple(m) for m in members),
        cpu=np.array([sum(workload.cpu[v] for v in m) for m in members]),
        accelerator=np.array([sum(workload.accelerator[v] for v in m) for m in members]),
        size=np.array([sum(workload.size[v] for v in m) for m in members]),
        supported=np.array([all(workload.supported[v] for v in m) for m in members]),
        joined=tuple(costs),
        cost=np.array(list(costs.values())),
        predecessors=tuple(tuple(sorted(number[p] for p in graph.predecessors(r))) for r in order),
    )


def _absorb(workload: Workload, together: nx.utils.UnionFind) -> bool:
    neighbours: dict[int, set[int]] = defaultdict(set)
    time: dict[int, float] = defaultdict(float)
    for u, v in workload.edges:
        if together[u] != together[v]:
            neighbours[together[u]].add(together[v])
            neighbours[together[v]].add(together[u])
    for v in range(len(workload)):
        time[together[v]] += workload.cpu[v] + workload.accelerator[v]
    for root in sorted(neighbours):
        if time[root] == 0 and len(neighbours[root]) == 1:
            together.union(root, *neighbours[root])
            return True
    return False


def _order_graph(workload: Workload, together: nx.utils.UnionFind) -> nx.DiGraph:
    """Who comes before whom in the forward pass; classes only in the backward pass follow it reversed."""
    forward = {together[v] for v in range(len(workload)) if not workload.backward[v]}
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted({together[v] for v in range(len(workload))}))
    for u, v in workload.edges:
        a, b = together[u], together[v]
        if a == b:
            continue
        if not workload.backward[u] and not workload.backward[v]:
            graph.add_edge(a, b)
        elif workload.backward[u] and workload.backward[v] and not {a, b} <= forward:
            graph.add_edge(b, a)
    return graph


class _Loads:
    """Loads of the sets between pairs of ideals."""

    def __init__(self, parts: Parts, ideals: np.ndarray) -> None:
        count = len(ideals)
        incidence = np.zeros((len(parts), len(parts.joined)), dtype=np.float32)
        for i, around in enumerate(parts.joined):
            incidence[list(around), i] = 1
        within = (ideals.astype(np.float32) @ incidence).astype(np.int16)
        whole = np.array([len(a) for a in parts.joined], dtype=np.int16)
        is_open = (within > 0) & (within < whole)
        width = max(1, int(is_open.sum(axis=1).max()))
        self.open = np.full((count, width), len(whole))
        for j in range(count):
            mine = np.nonzero(is_open[j])[0]
            self.open[j, : len(mine)] = mine
        self.within = np.pad(within, ((0, 0), (0, 1)))
        self.whole = np.append(whole, 0)
        cost = np.append(parts.cost, 0.0)
        self.open_cost = cost[self.open]
        self.open_within = np.take_along_axis(self.within, self.open, axis=1)
        self.out = self.open_cost.sum(axis=1)
        self.size = ideals @ parts.size
        self.cpu = ideals @ parts.cpu
        self.accelerator = ideals @ parts.accelerator
        self.unsupported = ideals @ (~parts.supported).astype(int)
        packed = np.packbits(ideals, axis=1)
        self.words = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8))).view(np.uint64)

    def below(self, j: int, most: float) -> np.ndarray:
        light = np.minimum(self.accelerator[j] - self.accelerator[:j], self.cpu[j] - self.cpu[:j]) < most
        candidates = np.nonzero(light)[0]
        return candidates[~(self.words[candidates] & ~self.words[j]).any(axis=1)]

    def between(self, froms: np.ndarray, j: int, limit: float) -> np.ndarray:
        now = self.within[j][self.open[froms]]
        cost = self.open_cost[froms]
        touched = ((now > self.open_within[froms]) * cost).sum(axis=1)
        still = ((now < self.whole[self.open[froms]]) * cost).sum(axis=1)
        load = self.accelerator[j] - self.accelerator[froms] + touched + self.out[j] - still
        fits = (self.size[j] - self.size[froms] <= limit) & (self.unsupported[j] == self.unsupported[froms])
        return np.where(fits, load, np.inf)


def contiguous(
    workload: Workload, parts: Parts, ideals: np.ndarray, most: float = np.inf, progress: Progress = iter
) -> Contiguous | None:
    """The best chain of ideals with loads below ``most``, by dynamic programming; None if there is none."""
    table = _Loads(parts, ideals)
    k, cores = workload.accelerators, workload.cores
    best = np.full((len(ideals), k + 1, cores + 1), np.inf)
    best[0] = 0
    come = np.full((len(ideals), k + 1, cores + 1), -1, dtype=np.int64)
    for j in progress(range(1, len(ideals))):
        froms = table.below(j, most)
        froms = froms[np.isfinite(best[froms, k, cores])]
        if not len(froms):
            continue
        on_accelerator = table.between(froms, j, workload.limit)
        on_cpu = table.cpu[j] - table.cpu[froms]
        one = np.maximum(best[froms, :-1, :], on_accelerator[:, None, None])
        two = np.maximum(best[froms, :, :-1], on_cpu[:, None, None])
        pick, other = one.argmin(axis=0), two.argmin(axis=0)
        best[j, 1:, :] = np.take_along_axis(one, pick[None], axis=0)[0]
        come[j, 1:, :] = froms[pick] * 2
        value = np.take_along_axis(two, other[None], axis=0)[0]
        better = value < best[j, :, 1:]
        best[j, :, 1:] = np.where(better, value, best[j, :, 1:])
        come[j, :, 1:] = np.where(better, froms[other] * 2 + 1, come[j, :, 1:])
        best[j][best[j] >= most] = np.inf
    if not np.isfinite(best[-1, k, cores]):
        return None
    return Contiguous(_walk(ideals, come, k, cores), float(best[-1, k, cores]), True, len(ideals))


def _walk(ideals: np.ndarray, come: np.ndarray, k: int, cores: int) -> tuple[int, ...]:
    devices = np.full(ideals.shape[1], CPU)
    j = len(ideals) - 1
    while j:
        source, on_cpu = divmod(int(come[j, k, cores]), 2)
        if on_cpu:
            devices[ideals[j] & ~ideals[source]] = -cores
            cores -= 1
        else:
            k -= 1
            devices[ideals[j] & ~ideals[source]] = k
        j = source
    return tuple(int(d) for d in devices)


def contiguous_optimum(workload: Workload, parts: Parts, limit: int, progress: Progress = iter) -> Contiguous:
    """Over all ideals if there are at most ``limit``, else over the prefixes of several orders."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(parts)))
    graph.add_edges_from((p, v) for v, ps in enumerate(parts.predecessors) for p in ps)
    orders = [range(len(parts)), _depth_first(graph), _depth_first(graph.reverse())[::-1]]
    ideals = ideals_of_orders(parts, orders)
    start = contiguous(workload, parts, ideals)
    assert start is not None
    try:
        every = enumerate_ideals(parts, limit)
    except TooManyIdealsError:
        return Contiguous(start.devices, start.load, False, len(ideals))
    return contiguous(workload, parts, every, start.load * (1 + 1e-9) + 1e-9, progress) or start


def _depth_first(graph: nx.DiGraph) -> list[int]:
    return list(nx.dfs_postorder_nodes(graph.reverse(), source=None))
