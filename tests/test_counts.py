"""The bound of counts holds where it is easily wrong: each case is a placement that the evaluator accepts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from graphplan import Graph, Link, Operation, Value, Weight
from graphplan.device import CPU, DeviceKey, read_max_memory
from graphplan.passes.close_by_leads import least_seconds
from graphplan.passes.counts import count_units
from graphplan.passes.evaluate import Problem, evaluate
from graphplan.passes.exhaustive import search_all
from graphplan.passes.limits import Limits
from graphplan.passes.place import place
from graphplan.passes.shares import Shares
from graphplan.schedule import Assignment
from graphplan.speeds import Speed, with_speeds

MIB = 1 << 20
PEAK = 100e12  # FLOP/s of an accelerator of which nothing is known


def chain_of(
    weights: Sequence[Sequence[Weight]],
    flops: Sequence[int],
    together: Sequence[frozenset[str]] = (),
    sizes: Sequence[int] | None = None,
) -> Graph:
    """Operations in a row, with the weights that each reads."""
    operations, values = [], [Value("v0", 4096, 4096)]
    for i, (read, work) in enumerate(zip(weights, flops, strict=True)):
        nbytes = 4096 if sizes is None else sizes[i]
        values.append(Value(f"v{i + 1}", nbytes, nbytes))
        inputs = (f"v{i}", *(weight.name for weight in read))
        operations.append(Operation(f"op{i}", "f", inputs, (f"v{i + 1}",), (), work, 4096))
    every = {weight.name: weight for read in weights for weight in read}
    return Graph(operations, values, list(every.values()), ["v0"], [f"v{len(weights)}"], together=together)


def with_cpu(
    graph: Graph,
    rooms: Sequence[float],
    link: Link,
    speed: Speed = Speed(5e9, 5e9),  # noqa: B008  # frozen
    links: dict[tuple[DeviceKey, DeviceKey], Link] | None = None,
    **more: object,
) -> Problem:
    to_cpu = {(CPU, i): link for i in range(len(rooms))}
    budgets = {i: int(room) for i, room in enumerate(rooms)}
    topology = read_max_memory({**budgets, CPU: "64GiB"}, {**to_cpu, **(links or {})})
    return Problem(graph, with_speeds(topology, {CPU: speed}), CPU, **more)  # type: ignore[arg-type]


def hidden_behind_a_group() -> Iterator[tuple[Problem, Assignment]]:
    """Copies run beside operations of a group that lies all over the order."""
    read = [[Weight(f"w{i}", 10 * MIB + 4096 * (i * 7 % 19))] if i % 2 else [] for i in range(40)]
    flops = [10_000_000 + i * 1000 if i % 2 else int(PEAK * 0.0009) + i for i in range(40)]
    graph = chain_of(read, flops, [frozenset(f"op{i}" for i in range(0, 40, 2))])
    everywhere = dict.fromkeys(graph.operations, frozenset({0}))
    problem = with_cpu(graph, [45 * MIB], Link(10e9, 1e-6), allowed=everywhere)
    for slots in (2, 3, 4):
        homes = dict.fromkeys(graph.weights, CPU)
        yield problem, Assignment(dict.fromkeys(graph.operations, 0), homes, slots={0: slots})


def from_another_accelerator() -> Iterator[tuple[Problem, Assignment]]:
    """A shared weight comes over a link that is faster than the CPU's."""
    tied = Weight("tied", 100 * MIB)
    read = [[Weight(f"w{i}", 10 * MIB), *([tied] if i in (2, 22) else [])] for i in range(24)]
    graph = chain_of(read, [100_000_000] * 24)
    for room in (210, 195):
        rules = {"op2": frozenset({0}), "op22": frozenset({1})}
        fast = {(0, 1): Link(400e9, 1e-6)}
        slow = Speed(5e7, 5e6)
        problem = with_cpu(graph, [222 * MIB, room * MIB], Link(1e9, 1e-6), slow, fast, allowed=rules)
        devices = {f"op{i}": int(i >= 12) for i in range(24)}
        homes: dict[str, DeviceKey] = {f"w{i}": devices[f"op{i}"] for i in range(24)}
        homes["tied"] = 0
        homes.update({f"w{23 - k}": CPU for k in range((222 - room) // 10 + 2)})
        yield problem, Assignment(devices, homes)
        yield problem, Assignment(devices, homes, slots={1: 1})


def settled_on_the_cpu() -> Iterator[tuple[Problem, Assignment]]:
    """All weights have a home, and a deep ring is filled while other operations run."""
    read = [[] if i < 10 else [Weight(f"w{i}", 41 * MIB + 4096 * (i * 7 % 11))] for i in range(30)]
    flops = [1000 if i < 2 else int(PEAK * 0.03) + i if i < 10 else 1_000_000 + i for i in range(30)]
    graph = chain_of(read, flops, sizes=[800 * MIB if i == 0 else 4096 for i in range(30)])
    homes = dict.fromkeys(graph.weights, CPU)
    rules = {f"op{i}": frozenset({0}) for i in range(2, 30)}
    link = Link(10e9, 1e-6)
    problem = with_cpu(graph, [600 * MIB], link, fixed_weights=homes, allowed=rules)
    devices: dict[str, DeviceKey] = {f"op{i}": CPU if i < 2 else 0 for i in range(30)}
    for slots in range(2, 13):
        yield problem, Assignment(devices, homes, slots={0: slots})


def a_ring_that_is_there() -> Iterator[tuple[Problem, Assignment]]:
    """What is in a ring before it is read has paid for its latency."""
    read = [[] if i < 10 else [Weight(f"w{i}", 41 * MIB + 4096 * (i * 7 % 11))] for i in range(24)]
    graph = chain_of(read, [int(PEAK * 0.012) + i if i < 10 else 1_000_000 + i for i in range(24)])
    rules = dict.fromkeys(graph.operations, frozenset({0}))
    ring = int(10.05 * 41.1 * MIB)
    room = 10.1 * 41.1 * MIB
    problem = with_cpu(graph, [room], Link(10e9, 1e-3), allowed=rules, rings={0: ring})
    for slots in range(2, 11):
        homes = dict.fromkeys(graph.weights, CPU)
        yield problem, Assignment(dict.fromkeys(graph.operations, 0), homes, slots={0: slots})


def shared_by_two_at_once() -> Iterator[tuple[Problem, Assignment]]:
    """What one operation is the first to read comes in one copy, shared or not."""
    groups = [[Weight(f"t{i}_{j}", 5_000_192) for j in range(8)] for i in range(20)]
    graph = chain_of([groups[i // 2] for i in range(40)], [1_000_000 + i for i in range(40)])
    rules = dict.fromkeys(graph.operations, frozenset({0}))
    problem = with_cpu(graph, [41_000_000], Link(10e9, 1e-4), allowed=rules)
    homes = dict.fromkeys(graph.weights, CPU)
    yield problem, Assignment(dict.fromkeys(graph.operations, 0), homes, slots={0: 1})


@pytest.mark.parametrize(
    "case",
    [
        hidden_behind_a_group,
        from_another_accelerator,
        settled_on_the_cpu,
        a_ring_that_is_there,
        shared_by_two_at_once,
    ],
)
def test_no_placement_is_below_the_count(case: object) -> None:
    assert callable(case)
    feasible = 0
    for problem, assignment in case():
        found = evaluate(problem, assignment)
        if found.feasible:
            feasible += 1
            bound, _ = count_units(Shares(problem), upper=5 * found.seconds, gap=1e-6, programs=300)
            assert bound <= found.seconds * (1 + 1e-6)
            assert least_seconds(problem, 5 * found.seconds, Limits())[0] <= found.seconds
            assert place(problem).lower_bound <= found.seconds * (1 + 1e-6)
    assert feasible


def test_a_ring_has_a_slot() -> None:
    """Without one, weights would be copied by a way that no bound knows."""
    graph = chain_of([[Weight(f"w{i}", MIB)] for i in range(4)], [1000] * 4)
    problem = with_cpu(graph, [3 * MIB], Link(10e9, 1e-6))
    homes = dict.fromkeys(graph.weights, CPU)
    found = evaluate(problem, Assignment(dict.fromkeys(graph.operations, 0), homes, slots={0: 0}))
    assert [len(ring.slots) for ring in found.schedule.rings] == [1]


def experts(seed: int) -> Problem:
    """Layers of equal experts that read one value each, on an accelerator or two that do not hold all."""
    draw = random.Random(seed)
    layers, many, wide = draw.choice([(1, 4), (2, 2), (2, 3)]), draw.choice([4096, 1 << 20]), 2 * MIB
    operations, values, weights = [], [Value("x", many, many)], []
    x = "x"
    for i in range(layers[0]):
        outs = []
        operations.append(Operation(f"norm{i}", "f", (x,), (f"normed{i}",), (), 1000, 4096))
        values.append(Value(f"normed{i}", many, many))
        for e in range(layers[1]):
            weights.append(Weight(f"w{i}.{e}", wide))
            read, out = (f"normed{i}", f"w{i}.{e}"), f"out{i}.{e}"
            operations.append(Operation(f"expert{i}.{e}", "f", read, (out,), (), 10**8, wide))
            values.append(Value(out, 4096, 4096))
            outs.append(out)
        x = f"x{i}"
        operations.append(Operation(f"combine{i}", "f", tuple(outs), (x,), (), 1000, 4096))
        values.append(Value(x, many, many))
    graph = Graph(operations, values, weights, ["x"], [x])
    total = wide * len(weights)
    rooms = [draw.uniform(0.3, 0.8) * total + 4 * many for _ in range(draw.choice([1, 2]))]
    return with_cpu(graph, rooms, Link(10e9, draw.choice([1e-6, 1e-4])), Speed(1e12, 5e10))


HARD = {6, 10}  # whose best placement takes half a minute to find


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.slow) if s in HARD else s for s in range(12)]
)
def test_experts_that_read_one_value(seed: int) -> None:
    problem = experts(seed)
    best, _ = search_all(problem, None, fetch=True, nodes=10**5)
    assert best is not None
    bound, _ = count_units(Shares(problem), upper=3 * best.seconds, gap=1e-6, programs=500)
    assert bound * (1 - 1e-6) <= best.seconds
    assert 0 < least_seconds(problem, 3 * best.seconds, Limits())[0] <= best.seconds
