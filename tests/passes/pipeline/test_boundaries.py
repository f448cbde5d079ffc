"""Cuts of random graphs, whose views of weights are taken first or where they are read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from random_problems import BANDWIDTH, FLOPS, Parameters, random_graph

from graphplan.devices.topology import DeviceSpec, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.estimates import Estimates, operation_seconds
from graphplan.passes.pipeline.stage_bound import bound_stages

PARAMETERS = Parameters((5, 10), weights=2, shared=0.3)
NETWORK = Link(1e10, 1e-6)
SEEDS = range(40)


def with_views(graph: Graph, draw: random.Random) -> tuple[Graph, Graph]:
    """The same graph with views of weights, or views of these: taken late, and taken first."""
    taken: dict[str, list[Operation]] = {}
    values = list(graph.values.values())
    for weight in graph.weights.values():
        readers = graph.readers.get(weight.name, ())
        if weight.mutated or not weight.movable or not readers or draw.random() < 0.3:
            continue
        name = weight.name
        for _ in range(draw.randint(1, 3)):
            view = f"{name}.t"
            values.append(Value(view, 0, weight.nbytes, name))
            taken.setdefault(weight.name, []).append(Operation(f"view of {name}", "t", (name,), (view,)))
            name = view
    late: list[Operation] = []
    views = [view for chain in taken.values() for view in chain]
    pending = dict(taken)
    for operation in graph.operations.values():
        for name in [name for name in operation.inputs if name in pending]:
            late += pending.pop(name)
        inputs = (taken[name][-1].outputs[0] if name in taken else name for name in operation.inputs)
        late.append(replace(operation, inputs=tuple(inputs)))
    first = [*views, *(operation for operation in late if operation not in views)]

    def made(operations: list[Operation]) -> Graph:
        parts = graph.weights.values(), graph.inputs, graph.outputs, graph.together
        return Graph(operations, values, *parts)

    return made(late), made(first)


def held(boundaries: Boundaries, start: int, end: int) -> set[str]:
    """Weights that a stage reads, from its operations back."""
    graph, found = boundaries.graph, set[str]()
    operations = list(graph.operations.values())[start:end]
    todo = [one for one in operations if one.name not in boundaries.recomputed]
    while todo:
        operation = todo.pop()
        for name in () if operation.host_only else operation.inputs:
            maker = graph.producer.get(name)
            if name in graph.weights:
                found.add(name)
            elif maker in boundaries.recomputed:
                todo.append(graph.operations[maker])
    return found


def machines_for(graph: Graph, draw: random.Random) -> list[Topology]:
    """Three machines, of which two or three are needed, most often."""
    total = sum(weight.held_bytes for weight in graph.weights.values())
    rooms = [int(total * draw.uniform(0.4, 1.1)) + 1 for _ in range(3)]
    return [
        Topology((DeviceSpec(0, "sim:0", room, draw.uniform(0.5, 2.0) * FLOPS, BANDWIDTH, 0.0),))
        for room in rooms
    ]


def pipelines(boundaries: Boundaries, machines: list[Topology]) -> Iterator[tuple[float, float]]:
    """The sum and the maximum of each pipeline whose weights fit."""
    graph = boundaries.graph
    free = np.array([not op.flops and not op.bytes_accessed for op in graph.operations.values()])
    seconds = [np.where(free, 0, operation_seconds(graph, list(one.devices))) for one in machines]
    before = [np.concatenate([[0.0], one.cumsum()]) for one in seconds]
    send = boundaries.seconds(NETWORK)
    send[[0, -1]] = 0.0
    inner = [int(place) for place in boundaries.allowed[1:-1]]
    sizes = {
        (a, b): sum(graph.weights[name].nbytes for name in held(boundaries, a, b))
        for a, b in combinations([0, *inner, len(graph.operations)], 2)
    }
    for stages in range(1, len(machines) + 1):
        for cut in combinations(inner, stages - 1):
            pairs = list(pairwise((0, *cut, len(graph.operations))))
            for order in permutations(range(len(machines)), stages):
                if all(sizes[p] <= machines[k].devices[0].room for k, p in zip(order, pairs, strict=True)):
                    each = [before[k][b] - before[k][a] for k, (a, b) in zip(order, pairs, strict=True)]
                    loads = [send[a] + s + send[b] for s, (a, b) in zip(each, pairs, strict=True)]
                    yield sum(each) + sum(send[b] for _, b in pairs), max(loads)


@pytest.mark.parametrize("seed", SEEDS)
def test_boundaries_do_not_depend_on_position_of_weight_views(seed: int) -> None:
    draw = random.Random(seed)
    graph = random_graph(draw, PARAMETERS)
    late, first = (Boundaries(one) for one in with_views(graph, draw))
    machines = machines_for(graph, draw)
    bounds = [bound_stages(one, machines, NETWORK) for one in (late, first)]
    assert bounds[0].total == pytest.approx(bounds[1].total)
    assert bounds[0].slowest == pytest.approx(bounds[1].slowest)
    for boundaries, bound in zip((late, first), bounds, strict=True):
        cuts = boundaries.allowed
        estimates = Estimates(boundaries, cuts, machines[:1], NETWORK)
        for (i, a), (j, b) in combinations(enumerate(cuts), 2):
            needed = sum(boundaries.graph.weights[name].held_bytes for name in held(boundaries, a, b))
            assert estimates.weights[i, j] == needed
        for total, slowest in pipelines(boundaries, machines):
            assert bound.total <= total * (1 + 1e-9)
            assert bound.slowest <= slowest * (1 + 1e-9)


def test_random_graphs_have_views_that_matter() -> None:
    """Many graphs are cut between views and their readers, and need several machines."""
    several = 0
    for seed in SEEDS:
        draw = random.Random(seed)
        graph = random_graph(draw, PARAMETERS)
        first = Boundaries(with_views(graph, draw)[1])
        readers = {
            name: [first.graph.position_of[one] for one in first.graph.readers.get(name, ())]
            for name in first.graph.weights
        }
        several += any(
            places and readers[name] and max(places) > cut > min(readers[name])
            for name, places in first.needed_at.items()
            for cut in first.allowed[1:-1]
        )
    assert several > len(SEEDS) / 2
