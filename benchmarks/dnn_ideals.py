"""Groups of nodes that go together, and the ideals (predecessor-closed sets) of their graph.

Any placement whose subgraphs wait for one another without a circle is a chain of ideals: each step
adds one subgraph, or one group on the CPU. The solvers run over pairs of ideals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import networkx as nx
import numpy as np
from dnn_workload import Workload


class TooManyIdealsError(ValueError):
    """The graph has more ideals than asked for."""


@dataclass(frozen=True)
class Groups:
    """A workload with nodes merged; groups are numbered in a topological order.

    ``value`` numbers the nodes whose value may leave its group: (group, cost, groups that need it).
    """

    members: tuple[tuple[int, ...], ...]
    cpu: np.ndarray
    accelerator: np.ndarray
    size: np.ndarray
    value_group: np.ndarray
    value_cost: np.ndarray
    value_users: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    supported: np.ndarray

    def __len__(self) -> int:
        return len(self.members)


def colours_and(
    workload: Workload, pairs: Iterable[tuple[int, int]] = (), apart: Collection[int] = ()
) -> list[list[int]]:
    """The finest partition that keeps colours and ``pairs`` together and whose graph has no circle.

    Colours in ``apart`` are left as single nodes, which is right where they are all on the CPU.
    """
    together = nx.utils.UnionFind(range(len(workload)))
    first: dict[int, int] = {}
    for v, colour in enumerate(workload.colour):
        if colour not in apart:
            together.union(first.setdefault(colour, v), v)
    for u, v in pairs:
        together.union(u, v)
    graph = nx.DiGraph()
    graph.add_nodes_from(together[v] for v in range(len(workload)))
    graph.add_edges_from((together[u], together[v]) for u, v in workload.edges)
    for circle in nx.strongly_connected_components(graph):
        together.union(*circle)
    return [sorted(part) for part in together.to_sets()]


def merge(workload: Workload, parts: Sequence[Sequence[int]], cpu_only: Collection[int] = ()) -> Groups:
    """The graph of the parts, which must have no circle; colours in ``cpu_only`` stay off accelerators."""
    part_of = {v: i for i, part in enumerate(parts) for v in part}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(parts)))
    graph.add_edges_from((part_of[u], part_of[v]) for u, v in workload.edges if part_of[u] != part_of[v])
    order = list(nx.lexicographical_topological_sort(graph, key=lambda i: min(parts[i])))
    number = {part: i for i, part in enumerate(order)}
    members = tuple(tuple(parts[i]) for i in order)
    group, cost, users = [], [], []
    for u in range(len(workload)):
        home = number[part_of[u]]
        needed = {number[part_of[v]] for v in workload.successors[u]} - {home}
        if needed:
            group.append(home)
            cost.append(workload.cost[u])
            users.append(tuple(sorted(needed)))
    return Groups(
        members=members,
        cpu=np.array([_critical(workload, part) for part in members]),
        accelerator=np.array([sum(workload.accelerator[v] for v in part) for part in members]),
        size=np.array([sum(workload.size[v] for v in part) for part in members]),
        value_group=np.array(group, dtype=int),
        value_cost=np.array(cost),
        value_users=tuple(users),
        predecessors=tuple(tuple(sorted(number[p] for p in graph.predecessors(i))) for i in order),
        supported=np.array(
            [all(workload.supported[v] and workload.colour[v] not in cpu_only for v in m) for m in members]
        ),
    )


def _critical(workload: Workload, part: Sequence[int]) -> float:
    """Longest path of a part on the CPU, whose cores are not limited."""
    inside = set(part)
    longest: dict[int, float] = {}

    def visit(v: int) -> float:
        if v not in longest:
            longest[v] = workload.cpu[v] + max(
                (visit(u) for u in workload.predecessors[v] if u in inside), default=0.0
            )
        return longest[v]

    return max(visit(v) for v in part)


class Precedence(Protocol):
    """Anything whose parts, numbered in a topological order, have predecessors."""

    @property
    def predecessors(self) -> tuple[tuple[int, ...], ...]: ...


def enumerate_ideals(groups: Precedence, limit: int) -> np.ndarray:
    """All ideals as rows of booleans, smallest first; the empty one is first, all groups last.

    Raises:
        TooManyIdealsError: if there are more than ``limit``.
    """
    need = [sum(1 << p for p in preds) for preds in groups.predecessors]
    users: list[list[int]] = [[] for _ in need]
    for v, preds in enumerate(groups.predecessors):
        for p in preds:
            users[p].append(v)
    level = {0: [v for v, mask in enumerate(need) if not mask]}
    found = [0]
    while level:
        following: dict[int, list[int]] = {}
        for ideal, available in level.items():
            for v in available:
                larger = ideal | 1 << v
                if larger in following:
                    continue
                freed = [w for w in users[v] if not need[w] & ~larger]
                following[larger] = [w for w in available if w != v] + freed
        found.extend(following)
        if len(found) > limit:
            raise TooManyIdealsError(f"more than {limit} ideals of {len(need)} groups")
        level = following
    return _rows(found, len(need))


def ideals_of_orders(groups: Precedence, orders: Iterable[Sequence[int]]) -> np.ndarray:
    """The prefixes of some topological orders, as rows of booleans, smallest first."""
    found = {0}
    for order in orders:
        ideal = 0
        for v in order:
            ideal |= 1 << v
            found.add(ideal)
    return _rows(sorted(found, key=lambda i: (i.bit_count(), i)), len(groups.predecessors))


def _rows(ideals: Sequence[int], n: int) -> np.ndarray:
    width = (n + 7) // 8
    packed = np.frombuffer(b"".join(i.to_bytes(width, "little") for i in ideals), dtype=np.uint8)
    return np.unpackbits(packed.reshape(-1, width), axis=1, bitorder="little")[:, :n].astype(bool)
