"""Several example calls over one placement of weights."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import bytes_of, chain, largest_difference, moves_of, planned_moves
from instances import GIB, A, B, Card, devices
from networks import llama
from torch import nn

import graphplan
from graphplan import Graph, Link, Operation, Plan, Value, Weight
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.topology import CPU
from graphplan.ir.constraints import Constraints
from graphplan.passes.placement.calls.joint import Call, place_jointly
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.params import Limits
from graphplan.passes.placement.problem import Problem

KIB = 1024
X, MEMORY = torch.randn(8, 64), torch.randn(1, 64)


class Steps(nn.Module):
    """An encoder that the first call runs, and a decoder that every call runs."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.decoder = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if memory is None:
            memory = x
            for layer in self.encoder:
                memory = torch.relu(layer(memory))
        y = x + memory.mean(0) + torch.tensor([0.25])
        for layer in self.decoder:
            y = torch.relu(layer(y))
        return {"y": y, "memory": memory}


SLOW = {(0, "cpu"): Link(1e9, 15e-6)}  # what is streamed over it does not hide behind so little work
ROOMY: dict[Any, int] = {0: 1 << 30, "cpu": 1 << 30}
PREFILL: dict[str, Any] = {"x": X}
DECODE: dict[str, Any] = {"x": X[:1], "memory": MEMORY}


def run_all(machine: Any, placed: Any, calls: list[dict[str, Any]]) -> list[Any]:
    """Call a placed module with each, and hold each call's plan against what was measured."""
    results = []
    for call, plan in zip(calls, placed.plans[: len(calls)], strict=True):
        gc.collect()
        machine.reset_peaks()
        results.append(placed(**call))
        for spec in plan.topology.devices:
            if isinstance(spec.key, int):
                assert machine.peak_bytes(spec.key) <= plan.peak_bytes[spec.key] <= spec.room
        assert moves_of(machine) == planned_moves(plan)
    return results


@pytest.mark.parametrize(
    "shares",
    [
        {0: 0.7, 1: 0.7},
        pytest.param({0: 0.6, "cpu": 4.0}, marks=pytest.mark.slow),
        {0: 2.0},
        pytest.param({0: 0.4, 1: 0.4, "cpu": 4.0}, marks=pytest.mark.slow),
    ],
)
def test_results_equal_and_budgets_hold_in_every_call(shares: dict[Any, float]) -> None:
    model = Steps().eval()
    calls = [PREFILL, DECODE]
    expected = [model(**call) for call in calls]
    budgets = {key: int(share * bytes_of(model)) + 8192 for key, share in shares.items()}
    with graphplan.simulate({**budgets, 9: 0}) as machine:
        placed = graphplan.partition(model, budgets, calls=calls, weights=[1, 200])
        assert len(placed.plans) == 2
        for result, want in zip(run_all(machine, placed, calls), expected, strict=True):
            assert largest_difference(result, want) < 1e-5
        first, second = placed.plans
        assert placed.plan is first
        assert first.others == (second,)
        assert first.placement == second.placement
        assert first.weighted_makespan == pytest.approx(first.makespan + 200 * second.makespan)
        assert first.weighted_lower_bound <= first.weighted_makespan * (1 + 1e-9)
        first.verify()


def test_call_weights_decide_resident_weights() -> None:
    # room for one of the two halves: the decoder is what most calls run
    model = Steps(width=128, depth=2).eval()
    call = {"x": torch.randn(8, 128)}, {"x": torch.randn(1, 128), "memory": torch.randn(1, 128)}
    budgets = {0: bytes_of(model) // 2 + 24 * KIB, "cpu": "1GiB"}
    alone = graphplan.plan(model, budgets, kwargs=call[0], links=SLOW)
    joint = graphplan.plan(model, budgets, calls=list(call), weights=[1, 200], links=SLOW)
    large = {name: key for name, key in joint.placement.items() if name.endswith(".weight")}
    assert {name.split(".")[0] for name, key in large.items() if key == 0} == {"decoder"}
    # the same weights as for the first call alone, and the best that the second can make of them
    homes = {name: key for name, key in alone.schedule.assignment.weights.items() if name in alone.placement}
    second = joint.others[0]
    kept = place(Problem(second.graph, second.topology, "cpu", fixed_weights=homes)).evaluation
    assert joint.weighted_makespan < alone.makespan + 200 * kept.seconds


def test_streaming_calls_share_prefetch_buffers_within_the_budget() -> None:
    torch.manual_seed(0)
    model = Steps(depth=4).eval()
    calls = {"x": torch.randn(256, 64)}, DECODE
    expected = [model(**call) for call in calls]
    pin = {name: "cpu" for name, _ in model.named_parameters() if name.endswith(".weight")}
    options: dict[str, Any] = {"pin": pin, "cpu_compute": False}
    # a decode alone takes a prefetch buffer for which a prefill, with its large activations, has no room
    prefill, decode = (graphplan.plan(model, ROOMY, kwargs=call, **options) for call in calls)
    assert prefill.schedule.prefetch_buffers[0].nbytes < decode.schedule.prefetch_buffers[0].nbytes
    budgets = {0: prefill.peak_bytes[0], "cpu": 1 << 30}
    assert graphplan.plan(model, budgets, kwargs=calls[1], **options).schedule == decode.schedule
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, budgets, calls=list(calls), weights=[1, 200], **options)
        first, second = placed.plans
        assert all(len(list(plan.schedule.loads())) >= 4 for plan in placed.plans)
        (size,) = {buffer.nbytes for plan in placed.plans for buffer in plan.schedule.prefetch_buffers}
        assert size == prefill.schedule.prefetch_buffers[0].nbytes
        for _ in range(2):
            for result, want in zip(run_all(machine, placed, list(calls)), expected, strict=True):
                assert largest_difference(result, want) < 1e-5
        (storage,) = placed._graphplan.streams.storages.values()
        assert storage.bytes.numel() == size
        assert first.others == (second,)
        first.verify()
        assert Plan.from_json(first.to_json()) == first
        # a third structure finds the prefetch buffer that is there, and leaves the others their budgets
        third = {"x": X[:3], "memory": MEMORY}
        assert largest_difference(placed(**third), model(**third)) < 1e-5
        assert {buffer.nbytes for plan in placed.plans for buffer in plan.schedule.prefetch_buffers} == {
            storage.bytes.numel()
        }
        run_all(machine, placed, list(calls))
        assert placed.plan.others == (placed.plans[1],)


def test_new_structures_are_planned_at_their_first_call() -> None:
    model = Steps().eval()
    third = {"x": X[:3], "memory": MEMORY}
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}):  # room for the copies
        placed = graphplan.partition(model, {0: "64KiB", 1: "64KiB"}, calls=[PREFILL, DECODE])
        assert largest_difference(placed(**third), model(**third)) < 1e-5
        assert len(placed.plans) == 3
        assert placed.plans[2].placement == placed.plan.placement
        model_copy = copy.deepcopy(placed)
        assert largest_difference(model_copy(**DECODE), model(**DECODE)) < 1e-5
        again = pickle.loads(pickle.dumps(placed))
        assert again.plan == placed.plan
        assert largest_difference(again(**DECODE), model(**DECODE)) < 1e-5


def test_calls_of_one_structure_are_merged() -> None:
    plan = graphplan.plan(
        Steps(), {0: "1MiB"}, calls=[PREFILL, {"x": X + 1}, ((X[:1],), {"memory": MEMORY})], weights=[1, 2, 5]
    )
    assert [one.call_weight for one in plan.calls] == [3.0, 5.0]


def test_json_keeps_the_other_calls() -> None:
    plan = graphplan.plan(
        Steps(),
        {0: "64KiB", "cpu": "1MiB"},
        calls=[PREFILL, DECODE],
        weights=[1, 9],
        pin={"encoder.0": "cpu"},
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.weighted_makespan == plan.weighted_makespan
    again.verify()


def test_pin_of_a_module_that_one_call_runs() -> None:
    plan = graphplan.plan(Steps(), {0: "1MiB", 1: "1MiB"}, calls=[DECODE, PREFILL], pin={"encoder": 1})
    assert {key for name, key in plan.placement.items() if name.startswith("encoder")} == {1}
    assert plan.others[0].device_of("encoder") == 1
    with pytest.raises(graphplan.PlanError, match="no module, operation or weight of that name"):
        graphplan.plan(Steps(), {0: "1MiB"}, calls=[DECODE, PREFILL], pin={"nonsense": 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calls": []}, "calls must be a list"),
        ({"calls": PREFILL}, "calls must be a list"),
        ({"weights": [1]}, "weights= goes with calls="),
        ({"weights": np.array([1.0, 2.0])}, "weights= goes with calls="),
        ({"calls": [X]}, r"pair \(args, kwargs\)"),
        ({"calls": [(X, {})]}, r"pair \(args, kwargs\)"),
        ({"calls": [PREFILL], "weights": [1, 2]}, "calls has 1 entries and weights 2"),
        ({"calls": [PREFILL], "weights": [0]}, "positive"),
        ({"calls": [PREFILL], "weights": 2}, "positive"),
        ({"calls": [PREFILL], "weights": [True]}, "positive"),
        ({"calls": [PREFILL], "kwargs": PREFILL}, "not in both"),
        ({"calls": [PREFILL], "args": X}, "not in both"),
        ({"calls": [{"nonsense": X}]}, "do not fit forward"),
    ],
)
def test_invalid_calls_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(graphplan.InputError, match=message):
        graphplan.partition(Steps(), {"cpu": "1GiB"}, **arguments)


# -- on graphs built by hand ------------------------------------------------------------------------------


def readers(weights: dict[str, int], reads: list[str], activation: int = KIB, flops: int = 10**6) -> Graph:
    """A chain that reads some of the weights."""
    values, operations = [Value("x", 512, 512)], []
    for i, name in enumerate(reads):
        values.append(Value(f"v{i}", activation, activation))
        before = values[-2].name
        operations.append(Operation(f"v{i}", "f", (before, name), (f"v{i}",), (), flops, weights[name]))
    owned = [Weight(name, nbytes, (name,)) for name, nbytes in weights.items()]
    return Graph(operations, values, owned, ["x"], [values[-1].name])


NO_LIMITS = Limits()


def joint(
    graphs: list[Graph], counts: list[float], budgets: dict[Any, int], limits: Limits = NO_LIMITS
) -> Any:
    topology = read_max_memory(budgets)
    calls = [Call(Problem(g, topology, "cpu"), Constraints(), w) for g, w in zip(graphs, counts, strict=True)]
    return place_jointly(calls, limits)


def total(solutions: Any, counts: list[float]) -> float:
    return sum(count * s.evaluation.seconds for count, s in zip(counts, solutions, strict=True))


WEIGHTS = {f"w{i}": 8 * KIB for i in range(4)}


@pytest.mark.parametrize(("counts", "kept"), [([1.0, 50.0], {"w2", "w3"}), ([50.0, 1.0], {"w0", "w1"})])
def test_the_heavier_call_gets_the_accelerator(counts: list[float], kept: set[str]) -> None:
    one, other = readers(WEIGHTS, ["w0", "w1"]), readers(WEIGHTS, ["w2", "w3"])
    solutions = joint([one, other], counts, {0: 20 * KIB, "cpu": 1 << 20})
    homes = solutions[0].evaluation.schedule.assignment.weights
    assert {name for name, key in homes.items() if key == 0} == kept
    assert homes == solutions[1].evaluation.schedule.assignment.weights


@pytest.mark.parametrize(("seed", "most"), [(12, 126e-6), (30, 114e-6)])
def test_layer_weights_move_while_writers_stay_with_their_buffers(seed: int, most: float) -> None:
    draw = random.Random(seed)
    weights = {f"w{i}": draw.randint(1, 6) * 4096 for i in range(5)}
    statistics = [Weight(f"s{i}", 512, (f"s{i}",), "buffer", mutated=True) for i in (0, 2)]
    graphs, written = [], {"w0": ("s0",), "w2": ("s2",)}
    for _ in range(2):
        reads = draw.sample(sorted(weights), draw.randint(2, 5))
        graph = readers(weights, reads, flops=draw.randint(1, 50) * 10**6)
        operations = [
            replace(one, inputs=(*one.inputs, *more), mutates=more)
            for one in graph.operations.values()
            for more in [written.get(one.inputs[1], ())]
        ]
        graphs.append(graph.changed(operations=operations, weights=[*graph.weights.values(), *statistics]))
    counts = [1.0, draw.choice([0.1, 1.0, 7.0, 100.0])]
    total_bytes = sum(weights.values())
    budgets = {0: total_bytes // 2 + 8192, 1: total_bytes // 3 + 8192, "cpu": 1 << 30}
    solutions = joint(graphs, counts, budgets)
    assert total(solutions, counts) <= most
    for graph, solution in zip(graphs, solutions, strict=True):
        found = solution.evaluation.assignment
        for one in graph.operations.values():
            assert all(found.weights[name] == found.operations[one.name] for name in one.mutates)


def test_call_with_few_weights_leaves_room_for_large_activations() -> None:
    light = readers(WEIGHTS, list(WEIGHTS), activation=512)
    heavy = readers(WEIGHTS, list(WEIGHTS), activation=6 * KIB)
    budgets = {0: 36 * KIB, 1: 36 * KIB, "cpu": 1 << 20}
    assert place(Problem(light, read_max_memory(budgets), "cpu")).evaluation.feasible
    for counts in ([1.0, 1.0], [1000.0, 1.0], [1.0, 1000.0]):
        solutions = joint([light, heavy], counts, budgets)
        assert all(s.evaluation.feasible for s in solutions)
        bound = sum(c * s.bound.seconds for c, s in zip(counts, solutions, strict=True))
        assert bound <= total(solutions, counts) * (1 + 1e-9)


@pytest.mark.full_search
@pytest.mark.parametrize("lighter_first", [True, False])
@pytest.mark.parametrize("budgets", [{0: 20 * KIB, 1: 10 * KIB}, {0: 24 * KIB, "cpu": 4 * KIB}])
def test_error_of_one_call_names_budgets_for_all(budgets: dict[Any, int], lighter_first: bool) -> None:
    """Regression: they sufficed for the first call that does not fit, and not for the others."""
    graphs = [readers(WEIGHTS, list(WEIGHTS), activation=nbytes) for nbytes in (512, 6 * KIB)]
    if not lighter_first:
        graphs.reverse()
    with pytest.raises(graphplan.InfeasibleError, match="These budgets suffice") as caught:
        joint(graphs, [1.0, 1.0], budgets)
    assert caught.value.device in budgets
    assert caught.value.operation
    assert all(one.evaluation.feasible for one in joint(graphs, [1.0, 1.0], caught.value.needed))


def test_error_without_time_names_budgets_for_all() -> None:
    """Regression: without a probe, those of the first call were named, which it had, and its module."""
    light, heavy = (readers(WEIGHTS, list(WEIGHTS), activation=nbytes) for nbytes in (512, 6 * KIB))
    graphs = [
        graph.changed(operations=[replace(one, module_path=path) for one in graph.operations.values()])
        for path, graph in (("light", light), ("heavy", heavy))
    ]
    with pytest.raises(graphplan.InfeasibleError, match="These budgets suffice") as caught:
        joint(graphs, [1.0, 1.0], {0: 36 * KIB}, Limits(time.monotonic()))
    assert caught.value.needed[0] > 36 * KIB
    assert "(in heavy)" in str(caught.value)
    joint(graphs, [1.0, 1.0], caught.value.needed)


@pytest.mark.slow
@pytest.mark.full_search
def test_placement_of_all_calls_found_by_a_short_search() -> None:
    """Regression: longer searches do not find it, and the error named the given budgets as sufficient."""
    weights = {"w0": 3584, "w1": 4096, "w2": 2560, "w3": 1024, "w4": 2560}
    reads = ["w0", "w4", "w1", "w3"], ["w1", "w3", "w0"]
    results = [2048, 512, 2048, 512], [4096, 1024, 512]
    graphs = []
    for names, sizes, flops in zip(reads, results, (8_000_000, 40_000_000), strict=True):
        graph = readers(weights, names, flops=flops)
        operations = [
            replace(one, inputs=("v0", *one.inputs)) if one.name == "v2" else one
            for one in graph.operations.values()
        ]
        values = [graph.values["x"], *(Value(f"v{i}", size, size) for i, size in enumerate(sizes))]
        graphs.append(graph.changed(operations=operations, values=values))
    solutions = joint(graphs, [1.0, 1.0], {0: 8704, 1: 9728, "cpu": 11008})
    assert all(one.evaluation.feasible for one in solutions)


@pytest.mark.slow
def test_decode_leaves_room_for_activations_of_a_prefill() -> None:
    """Two GPUs hold the model; the decode alone would fill the faster one with weights."""
    prefill, decode = (llama(12, 2048, 5632, 512, 32000, rows) for rows in (512, 1))
    gib = prefill.weight_bytes / GIB
    topology, counts = devices([Card(A, 0.7 * gib + 0.1), Card(B, 0.5 * gib + 0.1)]), [1.0, 64.0]
    calls = [
        Call(Problem(graph, topology, CPU), Constraints(), count)
        for graph, count in zip((prefill, decode), counts, strict=True)
    ]
    solutions = place_jointly(calls)
    bound = sum(count * one.bound.seconds for count, one in zip(counts, solutions, strict=True))
    assert total(solutions, counts) <= 1.05 * bound


SLOW_SEEDS = [
    pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 3, 4, 5, 6, 7, 11, 16, 28, 48, 49)
]


@pytest.mark.parametrize("seed", [pytest.param(2, marks=pytest.mark.slow), *SLOW_SEEDS])
def test_homes_are_optimal_by_enumeration(seed: int) -> None:
    """Against every assignment of weights to devices, each call placed at its best over them."""
    draw = random.Random(seed)
    weights = {f"w{i}": draw.randint(1, 6) * 4096 for i in range(4)}
    graphs = [
        readers(weights, draw.sample(sorted(weights), draw.randint(1, 4)), flops=draw.randint(1, 50) * 10**6)
        for _ in range(2)
    ]
    counts = [1.0, draw.choice([0.1, 1.0, 7.0, 100.0])]
    budgets = {0: sum(weights.values()) // 2 + 8192, "cpu": 1 << 30}
    found = total(joint(graphs, counts, budgets), counts)
    assert found <= best_homes(graphs, counts, budgets) * (1 + 1e-9)


def best_homes(graphs: list[Graph], counts: list[float], budgets: dict[Any, int]) -> float:
    best = float("inf")
    for homes in itertools.product(budgets, repeat=len(graphs[0].weights)):
        fixed = dict(zip(graphs[0].weights, homes, strict=True))
        seconds = 0.0
        for graph, count in zip(graphs, counts, strict=True):
            problem = Problem(graph, read_max_memory(budgets), "cpu", fixed_weights=fixed)
            try:
                seconds += count * place(problem).evaluation.seconds
            except graphplan.InfeasibleError:
                seconds = float("inf")
        best = min(best, seconds)
    return best


def test_calls_that_fit_only_separately_raise() -> None:
    # one call needs w0 off the device that the other call fills with other data
    one = readers({"w0": 16 * KIB, "w1": 16 * KIB}, ["w0"], activation=512)
    other = readers({"w0": 16 * KIB, "w1": 16 * KIB}, ["w1", "w0"], activation=8 * KIB)
    with pytest.raises(graphplan.InfeasibleError) as caught:
        joint([one, other], [1.0, 1.0], {0: 33 * KIB})
    needed = dict(caught.value.needed)
    assert all(s.evaluation.feasible for s in joint([one, other], [1.0, 1.0], needed))


def test_single_joint_call_equals_plain_placement() -> None:
    topology = read_max_memory({0: 16 * KIB, 1: 16 * KIB})
    problem = Problem(chain(6), topology, "cpu")
    (solution,) = place_jointly([Call(problem, Constraints(), 3.0)])
    assert solution.evaluation.seconds == place(problem).evaluation.seconds


@pytest.mark.filterwarnings("ignore:.*the first call will be traced:graphplan.GraphplanWarning")
@pytest.mark.parametrize("examples", [True, False])
def test_model_placed_in_inference_mode_can_be_trained(examples: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(2, 8)
    with graphplan.simulate({0: "1MiB"}) as machine:
        with torch.inference_mode():
            y = x.clone()  # which autograd does not save
            placed = graphplan.partition(model, machine.max_memory, (y,) if examples else (), grad=True)
            assert torch.allclose(placed(y), model(y), atol=1e-6)
            assert torch.allclose(placed(y[:1]), model(y[:1]), atol=1e-6)  # captured here
        assert placed.plan.method != "hooks"
        placed(x).sum().backward()
        assert all(parameter.grad is not None for parameter in placed.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("order", [(1, 0), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_call_runs_the_plan_with_the_smallest_sizes(order: tuple[int, int]) -> None:
    """Regression: the plan for large calls, if listed first, served small calls that had their own plan."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(2))
    ).eval()
    batches = [(torch.ones(1, 256),), (torch.ones(256, 256),)]
    with graphplan.simulate({0: int(1.05 * bytes_of(model)), "cpu": "1GiB"}) as machine:
        calls, weights = [(batches[at], {}) for at in order], [(1000, 1)[at] for at in order]
        placed = graphplan.partition(model, machine.max_memory, calls=calls, weights=weights)
        small, large = (placed.plans[order.index(at)] for at in (0, 1))
        assert len(planned_moves(small)) != len(planned_moves(large))
        for batch, plan in zip((*batches, *batches), (small, large, small, large), strict=True):
            machine.reset_peaks()
            placed(*batch)
            assert moves_of(machine) == planned_moves(plan)
