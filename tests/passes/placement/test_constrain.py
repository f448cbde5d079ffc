"""Constraints of the caller: pins, groups, no offload, no CPU compute, balance, reserves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import bytes_of, chain, largest_difference, run_placed
from language_models import build
from test_partition import IDS, Tied
from torch import nn

import graphplan
from graphplan import Graph, Operation, Value, Weight
from graphplan.analysis.lack_of_room import lacks_room, seconds_with_room
from graphplan.devices.max_memory import read_max_memory
from graphplan.ir.constraints import Constraints
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.problem import Problem

KIB = 1024
MIB = 1 << 20


def placed_chain(budgets: dict[Any, int], count: int = 6, **constraints: Any) -> dict[str, Any]:
    problem = constrain(Problem(chain(count), read_max_memory(budgets), "cpu"), Constraints(**constraints))
    return dict(place(problem).evaluation.schedule.assignment.operations)


def test_pinned_module_runs_and_resides_on_its_device() -> None:
    plan = graphplan.plan(
        Tied().eval(), {0: "64KiB", 1: "64KiB", "cpu": "1MiB"}, (IDS,), pin={"blocks.2": 1, "embed": "cpu"}
    )
    assert plan.device_of("blocks.2") == 1
    assert plan.placement["blocks.2.0.weight"] == 1
    assert plan.device_of("embed") == "cpu"
    assert plan.placement["head.weight"] == "cpu"  # tied to embed's
    plan.verify()


@pytest.mark.parametrize("name", ["cuda:0", "cuda", torch.device("cuda", 0), torch.device("cuda"), 0])
def test_a_pin_may_name_a_device_as_torch_does(name: Any) -> None:
    plan = graphplan.plan(
        nn.Linear(8, 8), {0: 1 << 20, 1: 1 << 20}, (torch.randn(2, 8),), pin={"weight": name}
    )
    assert plan.placement["weight"] == 0
    assert plan.constraints.pin == {"weight": 0}


@pytest.mark.parametrize(("host", "name"), [("cpu", torch.device("cpu", 0)), ("cpu:0", "cpu")])
def test_pin_accepts_other_names_of_the_cpu(host: str, name: Any) -> None:
    plan = graphplan.plan(Tied().eval(), {0: "1MiB", host: "1MiB"}, (IDS,), pin={"blocks.1": name})
    assert plan.device_of("blocks.1") == host


def test_pinned_parameter_resides_on_cpu_and_is_streamed() -> None:
    plan = graphplan.plan(
        Tied().eval(), {0: "64KiB", "cpu": "1MiB"}, (IDS,), pin={"blocks.1.0.weight": "cpu"}
    )
    assert plan.placement["blocks.1.0.weight"] == "cpu"
    assert plan.device_of("blocks.1.0") == 0
    assert [load.weights for load in plan.schedule.loads()] == [("blocks.1.0.weight",)]
    assert plan.streams == tuple(plan.schedule.loads())


@pytest.mark.parametrize("order", [1, -1])
def test_innermost_of_nested_pins_wins(order: int) -> None:
    pin: list[tuple[str, Any]] = [("", 0), ("blocks", 1), ("blocks.1", 0), ("blocks.1.0.weight", "cpu")]
    model, budgets = Tied().eval(), {0: "1MiB", 1: "1MiB", "cpu": "1MiB"}
    plan = graphplan.plan(model, budgets, (IDS,), pin=dict(pin[::order]))
    assert [plan.device_of(f"blocks.{i}.0") for i in range(3)] == [1, 0, 1]
    found = {name: plan.placement[name] for name in ("embed.weight", "blocks.0.0.weight", "blocks.1.0.bias")}
    assert found == {"embed.weight": 0, "blocks.0.0.weight": 1, "blocks.1.0.bias": 0}
    assert plan.placement["blocks.1.0.weight"] == "cpu"
    assert "pin={'': 0}" not in str(plan.explain("blocks.2"))
    assert (
        plan.explain("blocks.1.0.weight")
        .alternative_on(1)
        .obstacle.startswith("pin={'blocks.1.0.weight': 'cpu'}")
    )


class _Skips(nn.Module):
    """A module with the name of an operation, and a layer that not every call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for layer in self.linear[::2] if skip else self.linear:
            x = layer(x)
        return x


@pytest.mark.parametrize("skips", [[False, True], [True, False]])
@pytest.mark.parametrize("outer", ["", "linear"])
def test_innermost_pin_wins_in_calls_without_its_module(outer: str, skips: list[bool]) -> None:
    model, x, pin = _Skips(), torch.ones(2, 8), {outer: 0, "linear.1": 1}
    with graphplan.simulate({0: "64KiB", 1: "64KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x, skips[0]), pin=pin)
        assert torch.equal(placed(x, skips[1]), model(x, skips[1]))
        together = graphplan.plan(
            model, machine.max_memory, calls=[((x, skip), {}) for skip in skips], pin=pin
        )
    for plan in (*placed.plans, together):
        assert [plan.placement[f"linear.{i}.weight"] for i in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("order", [1, -1])
def test_pin_of_shared_weight_overrides_pins_of_modules(order: int) -> None:
    pin: list[tuple[str, Any]] = [("embed", 0), ("head", 1), ("head.weight", 1), ("", 0)]
    budgets = {0: "1MiB", 1: "1MiB", "cpu": "1MiB"}
    plan = graphplan.plan(Tied().eval(), budgets, (IDS,), pin=dict(pin[::order]))
    assert plan.placement["embed.weight"] == 1
    assert (plan.device_of("embed"), plan.device_of("head")) == (0, 1)


@pytest.mark.slow
def test_pin_of_whole_model_keeps_caches_with_their_layers() -> None:
    model, ids = build("gpt2").eval(), torch.arange(4)[None]
    with graphplan.simulate({0: "8MiB", 1: "8MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(
            model, machine.max_memory, kwargs={"input_ids": ids}, pin={"": 0, "transformer.h.1": 1}
        )
        expected = model.generate(ids, max_new_tokens=2, do_sample=False)
        assert torch.equal(placed.generate(ids, max_new_tokens=2, do_sample=False), expected)


def test_explanations_name_the_pin_of_the_whole_model() -> None:
    plan = graphplan.plan(nn.Linear(8, 8), {0: "1MiB", 1: "1MiB"}, (torch.ones(2, 8),), pin={"": 0})
    assert "pin={'': 0}" in str(plan.explain("weight"))


def test_pinned_models_run() -> None:
    model = Tied().eval()
    with graphplan.simulate({0: "64KiB", 1: "64KiB"}) as machine:
        placed = graphplan.partition(
            model, machine.max_memory, (IDS,), pin={"blocks.1": 1, "blocks.3.0": 1, "head": 0}
        )
        assert largest_difference(run_placed(machine, placed, (IDS,)), model(IDS)) < 1e-5


def test_unpinned_layers_between_pins_are_placed_freely() -> None:
    devices = placed_chain({0: 30 * KIB, 1: 30 * KIB}, pin={"v0": 1, "v5": 1})
    assert (devices["v0"], devices["v5"]) == (1, 1)


def test_groups_are_not_split() -> None:
    free = placed_chain({0: 16 * KIB, 1: 16 * KIB})
    assert free["v2"] != free["v3"]
    tied = placed_chain({0: 16 * KIB, 1: 20 * KIB}, together=[["layer2", "layer3"]])
    assert tied["v2"] == tied["v3"]
    plan = graphplan.plan(Tied().eval(), {0: "24KiB", 1: "36KiB"}, (IDS,), together=["blocks.1", "blocks.2"])
    for block in ("blocks.1", "blocks.2"):
        plan.device_of(block)  # one device, or an error


def test_offload_false_does_not_use_the_cpu() -> None:
    budgets = {0: 10 * KIB, "cpu": 1 << 20}
    assert set(placed_chain(budgets).values()) == {0, "cpu"}
    with pytest.raises(graphplan.InfeasibleError) as caught:
        placed_chain(budgets, offload=False)
    assert set(placed_chain({**budgets, **caught.value.needed}, offload=False).values()) == {0}


def test_offload_false_without_accelerator_raises() -> None:
    with pytest.raises(graphplan.PlanError, match="max_memory names none"):
        placed_chain({"cpu": 1 << 20}, offload=False)


@pytest.mark.slow
def test_without_cpu_compute_weights_are_streamed() -> None:
    problem = Problem(chain(6), read_max_memory({0: 12 * KIB, "cpu": 1 << 20}), "cpu")
    found = place(constrain(problem, Constraints(cpu_compute=False))).evaluation
    assert set(found.schedule.assignment.operations.values()) == {0}
    assert "cpu" in found.schedule.assignment.weights.values()


def test_balance_spreads_a_model_that_fits_one_device() -> None:
    budgets = {0: 1 << 20, 1: 1 << 20, 2: 1 << 20}
    assert set(placed_chain(budgets).values()) == {0}
    devices = placed_chain(budgets, balance=True)
    assert [list(devices.values()).count(key) for key in budgets] == [2, 2, 2]


def test_balance_on_one_accelerator_has_no_effect() -> None:
    problem = Problem(chain(6), read_max_memory({0: 1 << 20, "cpu": 1 << 20}), "cpu")
    plain, balanced = place(problem), place(constrain(problem, Constraints(balance=True)))
    assert balanced.bound.seconds == plain.bound.seconds
    assert balanced.evaluation.seconds == plain.evaluation.seconds


def test_impossible_balance_warns() -> None:
    with pytest.warns(UserWarning, match="even pieces"):
        devices = placed_chain({0: 10 * KIB, "cpu": 1 << 20}, balance=True)
    assert "cpu" in devices.values()


def test_a_reserve_is_left_free() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.ones(1, 64)
    size = bytes_of(model) + 4096
    assert len(graphplan.plan(model, {0: size, 1: size}, (x,)).stages) == 1
    plan = graphplan.plan(model, {0: size, 1: size}, (x,), reserve={0: "20KiB", 1: "20KiB"})
    assert len(plan.stages) == 2
    assert all(plan.peak_bytes[key] <= size - 20 * KIB for key in (0, 1))
    assert graphplan.Plan.from_json(plan.to_json()) == plan


def test_infeasible_error_includes_the_reserve() -> None:
    # the peak lies between what is left and the whole budget
    budgets = {0: 30 * KIB, 1: 30 * KIB}
    with pytest.raises(graphplan.InfeasibleError) as caught:
        place(Problem(chain(6), read_max_memory(budgets, reserve={0: 20 * KIB, 1: 20 * KIB}), "cpu"))
    needed = caught.value.needed
    assert needed[caught.value.device] > 30 * KIB
    place(Problem(chain(6), read_max_memory(needed, reserve={0: 20 * KIB, 1: 20 * KIB}), "cpu"))


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"pin": {"nonsense": 0}}, "no module, operation or weight of that name"),
        ({"pin": {"blocks.9": 0}}, "did you mean 'blocks"),
        ({"pin": {"head": 7}}, "no such device, max_memory has 0, 'cpu'"),
        ({"pin": {"head": "CPU"}}, "pin: 'CPU' is not a device: did you mean 'cpu'"),
        ({"pin": {"embed": 0, "head": "cpu"}}, "pin puts 'embed.weight' on 0"),
        ({"together": ["nonsense"]}, "together="),
        ({"pin": {"blocks.0": 0, "blocks.1": "cpu"}, "together": [["blocks.0", "blocks.1"]]}, "must share"),
        (
            {"pin": {"blocks.0": 0, "blocks.1": "cpu"}, "together": ["blocks"]},
            r"together=\['blocks'\] and pin=\{'blocks.0': 0, 'blocks.1': 'cpu'\} contradict",
        ),
        ({"pin": {"head": "cpu"}, "offload": False}, r"pin=\{'head': 'cpu'\} contradicts offload=False"),
        ({"reserve": "80KiB"}, r"reserve = 80.0 KiB .* leaves nothing of max_memory\[0\] = 64.0 KiB"),
        (
            {"reserve": {"cpu": "1GiB"}},
            r"reserve\['cpu'\] = 1.0 GiB .* leaves nothing of max_memory\['cpu'\]",
        ),
        ({"reserve": {5: 1}}, "reserve names 5"),
        ({"reserve": -1}, "negative"),
    ],
)
def test_invalid_constraints_raise(constraints: dict[str, Any], message: str) -> None:
    with pytest.raises(graphplan.GraphplanError, match=message):
        graphplan.plan(Tied().eval(), {0: "64KiB", "cpu": "1MiB"}, (IDS,), **constraints)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"pin": ["head"]}, "pin must map names to device keys"),
        ({"pin": "head"}, "pin must map names to device keys"),
        ({"together": "blocks.1"}, r"together must list names, or lists of them: write \['blocks.1'\]"),
        ({"together": 1}, "together must list names"),
        ({"together": [3]}, "together must list names, or lists of them: 3 is neither"),
        ({"together": [[]]}, r"together must list names, or lists of them: \[\] is neither"),
        ({"pin": {3: 1}}, "not 3"),
        ({"offload": "no"}, "offload must be True or False, not 'no'"),
        ({"balance": 1}, "balance must be True or False, not 1"),
    ],
)
def test_malformed_constraints_raise(constraint: dict[str, Any], message: str) -> None:
    with pytest.raises(graphplan.InputError, match=message):
        graphplan.plan(Tied().eval(), {0: "64KiB", "cpu": "1MiB"}, (IDS,), **constraint)


def test_tensors_written_by_one_operation_share_a_device() -> None:
    names = ("mean", "variance")
    graph = Graph(
        [Operation("norm", "batch_norm", ("x", *names), ("y",), names)],
        [Value("x", 512, 512), Value("y", 512, 512)],
        [Weight(name, 512, (name,), "buffer", mutated=True) for name in names],
        ["x"],
        ["y"],
    )
    topology = read_max_memory({0: 1 << 20, "cpu": 1 << 20})
    problem = Problem(graph, topology, "cpu", fixed_weights={"mean": 0, "variance": "cpu"})
    with pytest.raises(graphplan.PlanError, match="'mean' on 0, 'variance' on 'cpu'"):
        constrain(problem, Constraints())


def beside_a_buffer(nbytes: int, **changes: Any) -> Problem:
    """A chain whose second and third weights an earlier plan has left on the CPU; the third is large."""
    graph = chain(4)
    weights = [replace(w, nbytes=64 * KIB) if w.name == "w2" else w for w in graph.weights.values()]
    topology = read_max_memory({0: MIB, 1: MIB, "cpu": MIB})
    homes = {"w0": 0, "w1": "cpu", "w2": "cpu", "w3": 1}
    problem = Problem(
        graph.changed(weights=weights),
        topology,
        "cpu",
        fixed_weights=homes,
        prefetch_limits={0: nbytes, 1: 128 * KIB},
    )
    return constrain(replace(problem, **changes), Constraints())


def test_reader_of_weight_larger_than_buffer_runs_elsewhere() -> None:
    assert beside_a_buffer(63 * KIB).allowed == {"v2": {1, "cpu"}}
    assert beside_a_buffer(64 * KIB).allowed == {}
    assert beside_a_buffer(KIB).allowed == {"v1": {1, "cpu"}, "v2": {1, "cpu"}}
    assert beside_a_buffer(KIB, streaming=False).allowed == {}  # copied one by one


@pytest.mark.slow
@pytest.mark.full_search
def test_plan_quality_does_not_depend_on_input_device() -> None:
    # it was planned for inputs of twice the size, which have room on the CPU alone: 300 times as slow
    model = nn.Sequential(
        nn.Embedding(4096, 256), *(nn.Linear(256, 256, bias=False) for _ in range(24))
    ).eval()
    ids = torch.randint(0, 4096, (15, 16))
    budgets = {0: 4 * MIB, "cpu": 64 * MIB}
    speeds = {0: graphplan.Speed(1e14, 1e12, 4e-6), "cpu": graphplan.Speed(1e10, 1e10, 4e-6)}
    with torch.no_grad(), graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, machine.max_memory, (ids,), devices=speeds)
        first = placed.plan
        assert largest_difference(placed(ids.to("sim:0")).cpu(), model(ids)) < 1e-5
        again = placed.plans[-1]
    assert again is not first
    assert again.makespan < 2 * first.makespan


def slow_for_large_inputs() -> tuple[nn.Module, dict[Any, int], dict[Any, graphplan.Speed]]:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12))).eval()
    speeds = {0: graphplan.Speed(1e14, 1e12, 4e-6), "cpu": graphplan.Speed(1e10, 1e10, 4e-6)}
    return model, {0: 2 * MIB, "cpu": 64 * MIB}, speeds


def test_slow_calls_without_room_warn_once_and_share_plan() -> None:
    model, budgets, speeds = slow_for_large_inputs()
    large = torch.randn(2200, 256)
    with torch.no_grad(), graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, machine.max_memory, (torch.ones(15, 256),), devices=speeds)
        with pytest.warns(graphplan.GraphplanWarning, match=r"more memory .* calls=") as told:
            results = [placed(large[:rows]) for rows in (2049, 2050, 2060, 2100, 2200)]
        for result in results:
            assert largest_difference(result, model(large[: len(result)])) < 1e-5
    assert len(told) == 1
    assert len(placed.plans) == 2


def test_seconds_with_room_ignore_budgets_and_buffer_limits() -> None:
    model, budgets, speeds = slow_for_large_inputs()
    with torch.no_grad(), graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, machine.max_memory, (torch.ones(15, 256),), devices=speeds)
        with pytest.warns(graphplan.GraphplanWarning, match=r"call with other inputs \(.*\) is estimated"):
            placed(torch.randn(2048, 256))
        slow = placed.plans[-1]
        tight = replace(slow, prefetch_limits=dict.fromkeys(slow.prefetch_limits, KIB))
    assert lacks_room(slow)
    assert not lacks_room(placed.plan)
    assert seconds_with_room(slow) == seconds_with_room(tight) < slow.makespan / 100


@pytest.mark.slow
def test_pinned_weight_does_not_suppress_memory_advice() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 512)).eval()
    speeds = {0: graphplan.Speed(1e14, 1e12, 4e-6), "cpu": graphplan.Speed(1e10, 1e10, 4e-6)}
    budgets, x = {0: 450 * KIB, "cpu": MIB}, torch.ones(64, 256)
    plan = graphplan.plan(model, budgets, (x,), pin={"1.weight": "cpu"}, devices=speeds)
    assert plan.device_of("1") == "cpu"
    assert "more memory on GPU 0 would save" in plan.bottleneck().headline
