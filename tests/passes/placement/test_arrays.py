"""Flat arrays agree with the evaluator on placements without streaming."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import KIB, chain
from placements import HOST, ample, cards, equal_cards, random_homes, random_units
from random_problems import MEDIUM, TINY, random_instance

from graphplan.devices.topology import CPU
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.ir.liveness import saved_bytes
from graphplan.passes.placement.arrays import Arrays, Ints
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.folding import fold
from graphplan.passes.placement.local_search import LocalSearch, _RunMove
from graphplan.passes.placement.problem import Problem

MIB = 1 << 20


def is_streamed(found: Evaluation) -> bool:
    """Whether a prefetch buffer is used, which arrays do not model."""
    return any(buffer.segments for buffer in found.schedule.prefetch_buffers)


def assert_equal(arrays: Arrays, devices: Ints, chosen: Ints | None = None) -> Evaluation:
    """Seconds, peaks of accelerators and whether budgets are kept are the evaluator's."""
    found = evaluate(arrays.problem, arrays.assignment(devices, chosen))
    assert not is_streamed(found)
    assert arrays.seconds(devices, chosen) == pytest.approx(found.seconds, rel=1e-9)
    if not arrays.unread:  # see the test of these
        for spec, nbytes in zip(arrays.specs, arrays.peaks(devices, chosen).tolist(), strict=True):
            if spec.is_accelerator:
                assert nbytes == found.peak(spec.key).nbytes, spec.key
    assert arrays.fits(devices, chosen) == (not found.excess)
    return found


def test_arrays_equal_the_evaluator_for_random_placements() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(400):
        draw = random.Random(seed)
        problem = random_instance(seed, MEDIUM if seed % 4 == 0 else TINY).problem
        arrays = Arrays(problem)
        units = random_units(arrays, draw)
        if units is None or not len(units):
            continue
        devices = arrays.expand(units)
        chosen = random_homes(arrays, devices, draw)
        found = evaluate(problem, arrays.assignment(devices, chosen))
        if is_streamed(found):
            continue
        assert_equal(arrays, devices, chosen)
        kinds["placed"] += 1
        kinds["views"] += any(value.alias_of for value in problem.graph.values.values())
        kinds["returned"] += problem.returns_to_host
        kinds["written"] += bool(arrays.written)
        kinds["fixed"] += bool(problem.fixed_weights)
        kinds["unread"] += bool(arrays.unread)
        kinds["chosen"] += bool((chosen >= 0).any())
        kinds["kept"] += not problem.streaming
    assert kinds["placed"] >= 200
    assert min(kinds.values()) >= 3, kinds


def test_peaks_with_microbatches_in_flight_add_saved_bytes() -> None:
    counted = 0
    for seed in range(300):
        problem = random_instance(seed, TINY).problem
        graph, half = problem.graph, len(problem.graph.operations) // 2
        operations = [
            replace(operation, backward=position >= half)
            for position, operation in enumerate(graph.operations.values())
        ]
        result = [name for name in operations[half - 1].outputs if graph.values[name].is_tensor]
        parts = operations, graph.values.values(), graph.weights.values(), graph.inputs, result
        alone = replace(problem, graph=Graph(*parts, graph.together))
        arrays, more = Arrays(alone), Arrays(replace(alone, graph=alone.graph.changed(in_flight=4)))
        units = random_units(arrays, random.Random(seed))
        if not result or units is None or not len(units):
            continue
        devices = arrays.expand(units)
        found = evaluate(alone, arrays.assignment(devices))
        if is_streamed(found):
            continue
        saved = saved_bytes(alone.graph, alone.topology, found.schedule)
        others = (more.peaks(devices) - arrays.peaks(devices)).tolist()
        for spec, nbytes in zip(arrays.specs, others, strict=True):
            if spec.is_accelerator:
                assert nbytes == 3 * saved.get(spec.key, 0)
        counted += any(others)
    assert counted > 50


def test_placements_become_assignments_and_back() -> None:
    for seed in range(30):
        problem = random_instance(seed, TINY).problem
        arrays = Arrays(problem)
        units = random_units(arrays, random.Random(seed))
        if units is not None and len(units):
            devices = arrays.expand(units)
            assert (arrays.devices(arrays.assignment(devices)) == devices).all()


def make(operations: list[Operation], weights: list[Weight], outputs: list[str], *views: Value) -> Graph:
    """Every value that is not named has a KiB."""
    named = {value.name for value in views}
    made = ["x", *(name for operation in operations for name in operation.outputs)]
    values = [*views, *(Value(name, KIB, KIB) for name in made if name not in named)]
    return Graph(operations, values, weights, ["x"], outputs)


def test_view_keeps_its_base_alive() -> None:
    operations = [
        Operation("a", "f", ("x",), ("a",)),
        Operation("v", "view", ("a",), ("v",)),
        Operation("b", "f", ("x",), ("b",), (), 10**6, KIB),
        Operation("c", "f", ("b", "v"), ("c",)),
    ]
    graph = make(operations, [], ["c"], Value("v", 0, KIB, "a"))
    arrays = Arrays(Problem(graph, cards(2), CPU))
    for devices in ([0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1]):
        assert_equal(arrays, np.array(devices))


def test_results_stay_or_return_to_host() -> None:
    graph = chain(3)
    for returns in (True, False):
        arrays = Arrays(Problem(graph, cards(2), CPU, returns_to_host=returns))
        for devices in ([0, 0, 0], [0, 1, 1], [1, 0, 1]):
            assert_equal(arrays, np.array(devices))
    for key in (0, CPU):
        arrays = Arrays(Problem(graph, cards(1, HOST), key))
        assert_equal(arrays, np.array([0, 0, 0]))
        assert_equal(arrays, np.array([1, 1, 1]))


def test_an_input_that_is_changed_is_copied_back() -> None:
    operations = [
        Operation("a", "f", ("w0",), ("a",), (), 10**6, KIB),
        Operation("w", "write", ("x", "a"), ("w",), ("x",), 10**6, KIB),
        Operation("b", "f", ("w", "x"), ("b",)),
    ]
    graph = make(operations, [Weight("w0", KIB)], ["b"]).tied([("w", "b")])  # as all that read it must be
    problem = Problem(graph, cards(2, HOST), CPU)
    arrays = Arrays(problem)
    assert graph.changed_inputs
    plain = Arrays(replace(problem, host=0))
    for units in ([0, 0], [0, 1], [1, 0], [2, 0]):
        assert_equal(arrays, arrays.expand(np.array(units)))
        assert_equal(plain, plain.expand(np.array(units)))
    assert arrays.seconds(arrays.expand(np.array([0, 0]))) > plain.seconds(plain.expand(np.array([0, 0])))


def test_fixed_weights_keep_their_homes() -> None:
    graph = chain(4)
    problem = Problem(graph, cards(2), CPU, fixed_weights={"w1": 1})
    arrays = Arrays(problem)
    found = assert_equal(arrays, np.zeros(4, dtype=np.int64))
    assert found.assignment.weights["w1"] == 1
    assert [move.value for move in found.schedule.moves("weight")] == ["w1"]


@pytest.mark.parametrize("kind", ["sim", "cuda"])
def test_unread_weights_count_in_peaks(kind: str) -> None:
    plain = chain(2, weight=MIB)
    idle = [Weight("idle", 3 * MIB), Weight("other", MIB)]
    parts = plain.operations.values(), plain.values.values(), [*plain.weights.values(), *idle]
    graph = Graph(*parts, ["x"], plain.outputs)
    for devices in ([0, 0], [0, 1]):
        arrays = Arrays(Problem(graph, equal_cards(2, kind=kind), CPU))
        assert len(arrays.unread) == 2
        found = assert_equal(arrays, np.array(devices))
        peaks = [found.peak(key).nbytes for key in (0, 1)]
        assert arrays.peaks(np.array(devices)).tolist() == peaks
        for less in (0, 1):  # the judgements agree at the edge
            topology = equal_cards(2, memory=max(peaks) - less, kind=kind)
            assert_equal(Arrays(Problem(graph, topology, CPU)), np.array(devices))
    arrays = Arrays(Problem(graph, equal_cards(2, HOST), CPU))
    found = assert_equal(arrays, np.zeros(2, dtype=np.int64))
    assert {found.assignment.weights[weight.name] for weight in idle} == {CPU}


def test_a_shared_weight_is_copied_from_its_home() -> None:
    plain = chain(3)
    operations = [
        replace(op, inputs=(op.inputs[0], "w0")) if name != "v1" else op
        for name, op in plain.operations.items()
    ]
    weights = [plain.weights["w0"], plain.weights["w1"]]
    graph = Graph(operations, plain.values.values(), weights, ["x"], plain.outputs)
    arrays = Arrays(Problem(graph, cards(3), CPU))
    assert [arrays.names[item] for item in arrays.shared] == ["w0"]
    for home in (0, 2):
        chosen = np.full(len(arrays.names), -1)
        chosen[arrays.item_of["w0"]] = home
        found = assert_equal(arrays, np.array([0, 1, 2]), chosen)
        assert [move.source for move in found.schedule.moves("weight")] == [home]


def step_graph(*, accumulates: bool = True) -> Graph:
    """A training step of two layers that are tied, of which the second is recomputed."""
    from torch import nn

    import graphplan

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
            self.layers[2][0].weight = self.layers[0][0].weight

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = layer(x)
            return {"loss": x.pow(2).mean(), "x": x}

    inputs = {"x": torch.randn(64, 16, requires_grad=True)}
    options: Any = {"optimizer": torch.optim.AdamW, "accumulate_gradients": accumulates}
    return graphplan.plan(Layers(), {0: "1GiB"}, kwargs=inputs, train=True, **options).graph


@pytest.mark.parametrize(
    ("folded", "accumulates"),
    [
        pytest.param(folded, accumulates, marks=[pytest.mark.slow] * (folded != accumulates))
        for folded in (False, True)
        for accumulates in (False, True)
    ],
)
def test_arrays_equal_the_evaluator_for_training_steps(folded: bool, accumulates: bool) -> None:
    graph, draw, kinds = step_graph(accumulates=accumulates), random.Random(0), Counter[str]()
    gradients = [value for value in graph.values.values() if value.gradient_of]
    assert any(value.stays for value in gradients) == (not accumulates)
    for turn in range(120):
        others = (HOST,) if turn % 2 else ()
        host = (CPU, 0)[turn % 3 == 0]
        problem = Problem(graph, cards(2, *others), host, returns_to_host=turn % 5 > 0, streaming=False)
        arrays = Arrays(fold(problem) if folded else problem, folded=folded)
        devices = arrays.expand(random_units(arrays, draw))
        found = assert_equal(arrays, devices, random_homes(arrays, devices, draw))
        kinds.update(step.kind for step in found.schedule.moves())
    assert kinds["output"] > 20
    assert kinds["gradient"] > 20


def test_local_search_prices_gradients() -> None:
    problem = Problem(step_graph(), cards(2), CPU, streaming=False)
    arrays, draw = Arrays(problem), random.Random(1)
    for _ in range(60):
        devices = arrays.expand(random_units(arrays, draw))
        search = LocalSearch(arrays, devices, ample())
        first = draw.randrange(arrays.count)
        operations, device = search._operations_to_move(_RunMove(0.0, first, draw.randrange(1, 6), 1)), 1
        trial = devices.copy()
        trial[operations] = device
        expected = arrays.seconds(trial) - arrays.seconds(devices)
        assert search._added_seconds(operations, device) == pytest.approx(expected, abs=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("problems", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_nothing_fits_where_room_is_lacking(problems: int) -> None:
    """Shares of the budgets are chosen so that some problems lack room, and others do not."""
    lacking = Counter[bool]()
    for seed in range(problems):
        problem, draw = random_instance(seed, TINY).problem, random.Random(seed)
        arrays = Arrays(replace(problem, topology=problem.topology.scaled(draw.choice((0.3, 0.6, 1.0)))))
        lacking[arrays.lacks_room] += 1
        for _ in range(20 if arrays.lacks_room else 0):
            units = random_units(arrays, draw)
            if units is not None and len(units):
                devices = arrays.expand(units)
                assignment = arrays.assignment(devices, random_homes(arrays, devices, draw))
                streamed = [name for name in problem.graph.streamable if draw.random() < 0.5]
                for homes in ({}, dict.fromkeys(streamed, problem.topology.cpu)):
                    if None in homes.values() or homes.keys() & problem.fixed_weights.keys():
                        continue
                    weights = {**assignment.weights, **homes}
                    assert evaluate(arrays.problem, replace(assignment, weights=weights)).excess
    assert min(lacking.values()) > 30


def test_weights_that_fit_one_device_take_its_room() -> None:
    """The table fits the CPU alone; beside it, the CPU has room for the results or not."""
    operation = Operation("head", "f", ("x", "table"), ("y",), (), 10**6, MIB)
    values = [Value("x", 1024, 1024), Value("y", 4 * MIB, 4 * MIB)]
    graph = Graph([operation], values, [Weight("table", 8 * MIB)], ["x"], ["y"])
    for spare, lacks in ((5, False), (3, True)):
        topology = cards(1, HOST).with_memory({0: 6 * MIB, CPU: (8 + spare) * MIB})
        assert Arrays(Problem(graph, topology, CPU)).lacks_room == lacks
