"""Explanations of a placement, and the bottleneck of a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import chain
from shortcuts import shortest_search
from test_calls import DECODE, PREFILL, Steps
from test_partition import IDS, Tied
from torch import nn

import graphplan
from graphplan import Graph, Link, Operation, Plan, Speed, Value, Weight
from graphplan.analysis.plan_problem import constrained_problem, plain_problem
from graphplan.analysis.relocation import _outcome, _shortage
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.speeds import with_speeds
from graphplan.ir.constraints import Constraints
from graphplan.ir.cost_model import move_seconds
from graphplan.ir.schedule_checks import check_schedule
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.params import Limits
from graphplan.passes.placement.problem import Problem
from graphplan.report.text import time_text

KIB = 1024


def planned(
    graph: Graph, budgets: dict[Any, Any], links: Any = None, speeds: Any = None, **constraints: Any
) -> Plan:
    topology = with_speeds(read_max_memory(budgets, links), speeds)
    problem = constrain(Problem(graph, topology, "cpu"), Constraints(**constraints))
    found = place(problem, Limits(effort=0.1))
    judged = found.evaluation
    return Plan(
        problem.graph,
        topology,
        judged.schedule,
        judged.seconds,
        found.bound.seconds,
        found.bound.text,
        constraints=Constraints(**constraints),
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    budgets = {2: "17KiB", 0: "17KiB", 5: "9KiB", "cpu": "1MiB"}
    with shortest_search():
        return graphplan.plan(Tied().eval(), budgets, (IDS,), pin={"blocks.2": "cpu"})


# -- explain ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [Plan.explain, Plan.stage_of, Plan.device_of])
def test_unknown_name_error_suggests_a_close_one(ask: Any) -> None:
    plan = graphplan.plan(nn.Sequential(nn.Linear(4, 4)), {"cpu": "1GiB"}, (torch.ones(2, 4),))
    with pytest.raises(graphplan.PlanError, match=r"'0.wieght'.*did you mean '0.weight'"):
        ask(plan, "0.wieght")


def test_explanation_of_a_module_on_its_device(plan: Plan) -> None:
    found = plan.explain("blocks.1")
    operations = [op for op in plan.graph.operations.values() if op.module_path.startswith("blocks.1")]
    assert (found.kind, found.operations) == ("module", tuple(op.name for op in operations))
    assert found.devices == (plan.device_of("blocks.1"),)
    owned = [plan.placement[name] for name in ("blocks.1.0.weight", "blocks.1.0.bias")]
    assert found.homes == tuple(dict.fromkeys(owned))
    assert found.stages == (plan.stage_of("blocks.1").index,)
    assert found.flops == sum(op.flops for op in operations)
    assert found.weight_bytes == (32 * 32 + 32) * 4
    assert found.compute_seconds > 0
    assert [other.device for other in found.alternatives] == list(plan.devices)


@pytest.mark.parametrize("name", ["blocks.1", "blocks.0.0.weight", "embed", "linear", "head.weight"])
def test_costs_on_other_devices_equal_the_evaluator(plan: Plan, name: str) -> None:
    found = plan.explain(name)
    for other in found.alternatives:
        assert other.here == (other.obstacle == "it is there")
        if other.possible and not other.here:
            # a plan that has it there keeps all budgets, and takes at most as long when planned freely
            free = replace(constrained_problem(plan), allowed={})
            pinned = constrain(free, Constraints(pin={name: other.device}))
            assert not evaluate_moved(plan, pinned, other.makespan)
        if other.makespan is not None:
            assert other.slower == pytest.approx(other.makespan - plan.makespan)
    assert any(other.here for other in found.alternatives)


def evaluate_moved(plan: Plan, pinned: Problem, claimed: float | None) -> bool:
    """Whether no placement of ``pinned`` is as fast as claimed."""
    assert claimed is not None
    devices = {**plan.schedule.assignment.operations}
    devices.update({name: next(iter(keys)) for name, keys in pinned.allowed.items()})
    homes = {**plan.schedule.assignment.weights, **pinned.fixed_weights}
    moved = evaluate(
        replace(pinned, allowed={}), replace(plan.schedule.assignment, operations=devices, weights=homes)
    )
    return moved.seconds < claimed - 1e-12 and moved.feasible


def test_possible_alternative_can_be_planned() -> None:
    budgets = {0: 16 * KIB, 1: 16 * KIB, "cpu": 1 << 20}
    plan = planned(chain(6), budgets)
    for name in ("layer2", "w4"):
        for other in plan.explain(name).alternatives:
            if other.possible and not other.here:
                again = planned(
                    plan.graph, {0: 16 * KIB, 1: 16 * KIB, "cpu": 1 << 20}, pin={name: other.device}
                )
                check_schedule(again.graph, again.topology, again.schedule)


def test_obstacle_names_missing_bytes_and_operation() -> None:
    budgets = {0: 16 * KIB, 1: 16 * KIB}
    plan = planned(chain(6), budgets)
    first, last = plan.schedule.assignment.operations["v0"], plan.schedule.assignment.operations["v5"]
    assert first != last
    other = plan.explain("layer5").alternative_on(first)
    assert not other.possible
    assert set(other.missing_bytes) == {first}
    assert other.operation in plan.graph.operations
    assert f"{first} is short of" in other.obstacle
    assert str(other.missing_bytes[first]) in other.obstacle
    # so many bytes more, and nothing is in the way
    budgets[first] += other.missing_bytes[first]
    grown = replace(plan, topology=read_max_memory(budgets))
    assert grown.explain("layer5").alternative_on(first).possible


def test_operation_with_the_largest_excess_is_named() -> None:
    calls: Any = SimpleNamespace(calls=[SimpleNamespace(call_weight=1.0)])
    judged: Any = SimpleNamespace(
        seconds=1.0, excess={0: 3000, 1: 1000}, peak=lambda key: SimpleNamespace(operation=f"op_{key}")
    )
    outcome = _outcome(calls, [judged])
    assert (outcome.excess, outcome.operation) == ({0: 3000, 1: 1000}, "op_0")
    assert _shortage(outcome).index("1 is short of") < _shortage(outcome).index("0 is short of")
    assert _shortage(outcome).endswith(" at 'op_0'")


def test_constraints_are_named_as_obstacles() -> None:
    budgets = {0: 64 * KIB, "cpu": 1 << 20}
    pinned = planned(chain(4), budgets, pin={"layer1": "cpu"})
    assert "pin={'layer1': 'cpu'}" in pinned.explain("layer1").alternative_on(0).obstacle
    assert "pin={'layer1': 'cpu'}" in pinned.explain("v1").alternative_on(0).obstacle
    assert (
        "offload=False"
        in planned(chain(4), budgets, offload=False).explain("v1").alternative_on("cpu").obstacle
    )
    rule = planned(chain(4), budgets, cpu_compute=False).explain("v1").alternative_on("cpu")
    assert "cpu_compute=False" in rule.obstacle
    assert rule.makespan is not None  # what it would cost is known all the same


def test_compute_seconds_are_of_the_device_that_runs_it() -> None:
    """A weight may reside on a GPU while the CPU still runs its readers."""
    speeds = {0: Speed(1e9, 1e9, 1.0), "cpu": Speed(1e9, 1e9, 0.0)}  # an operation takes a second on 0
    plan = planned(chain(4), {0: 64 * KIB, "cpu": 1 << 20}, speeds=speeds, pin={"v1": "cpu"})
    assert plan.explain("layer1").alternative_on(0).compute_seconds == pytest.approx(1, rel=0.01)
    weight = plan.explain("w1")
    assert plan.device_of("v1") == "cpu"
    assert weight.compute_seconds < 0.01
    assert weight.alternative_on("cpu").compute_seconds == weight.compute_seconds
    assert weight.alternative_on(0).compute_seconds == weight.compute_seconds
    assert "the CPU computes nothing" in plan.explain("layer2").alternative_on("cpu").obstacle
    resident = replace(plan.schedule.assignment, weights={**plan.schedule.assignment.weights, "w1": 0})
    resident_plan = replace(plan, schedule=evaluate(plain_problem(plan), resident).schedule)
    assert resident_plan.explain("w1").alternative_on(0).obstacle == "it is there"
    assert resident_plan.explain("w1").alternative_on(0).compute_seconds == weight.compute_seconds


def test_operations_that_must_move_along_are_named() -> None:
    budgets = {0: 64 * KIB, 1: 64 * KIB}
    plan = planned(chain(4), budgets, together=[["layer1", "layer2"]])
    other = plan.explain("layer1").alternative_on(1)
    assert other.along == ("v2",)
    assert not other.possible
    assert "a device with v2" in other.obstacle
    whole = planned(chain(4), budgets, pin={"layer1": 1, "layer2": 1, "layer0": 0, "layer3": 0})
    assert other.makespan == pytest.approx(whole.makespan)


def test_written_buffer_moves_with_its_readers() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).train()
    plan = graphplan.plan(model, {0: "1MiB", 1: "1MiB"}, (torch.ones(4, 64),))
    for name in ("1", "1.running_mean", "1.weight"):
        for other in plan.explain(name).alternatives:
            if other.possible and not other.here:
                assert other.makespan is not None
                assert other.makespan > plan.makespan
    with_readers, with_weights = (
        plan.explain(name).alternative_on(1).makespan for name in ("1.running_mean", "batch_norm")
    )
    assert with_readers is not None
    assert with_weights is not None
    assert with_readers > with_weights


def test_the_disk_computes_nothing() -> None:
    plan = graphplan.plan(Tied().eval(), {0: "1MiB", "disk": "1GiB"}, (IDS,))
    assert "runs no operations" in plan.explain("blocks.1").alternative_on("disk").obstacle
    with pytest.raises(graphplan.PlanError, match="no device 7"):
        plan.explain("blocks.1").alternative_on(7)


def test_unknown_names_get_close_ones(plan: Plan) -> None:
    with pytest.raises(
        graphplan.PlanError, match=r"no operation, module or weight named 'block.1'.*'blocks.1'"
    ):
        plan.explain("block.1")
    with pytest.raises(graphplan.PlanError, match="named 'nothing like it'"):
        plan.explain("nothing like it")


def test_a_plan_read_from_json_explains_itself_as_well(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    for name in ("blocks.1", "blocks.2", "embed.weight"):
        assert again.explain(name) == plan.explain(name)
    data = json.loads(again.explain("blocks.2").to_json())
    assert data["name"] == "blocks.2"
    assert len(data["alternatives"]) == len(plan.devices)


def test_explanation_of_later_plan_names_fixed_weights() -> None:
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        placed = graphplan.partition(Steps(), machine.max_memory, kwargs=PREFILL)
        placed(**DECODE)
        first, further = placed.plans
        assert "with the weights where they are" not in first.proof
        assert further.proof.endswith("with the weights where they are")
        assert first.explain("decoder.0.weight").alternative_on(1).possible
        assert "an earlier plan put" in further.explain("decoder.0.weight").alternative_on(1).obstacle


def test_several_calls_are_explained_together() -> None:
    plan = graphplan.plan(Steps(), {0: "1MiB", 1: "1MiB"}, calls=[PREFILL, DECODE], weights=[1, 100])
    other = plan.explain("decoder.1").alternative_on(1)
    assert plan.explain("decoder.1").makespan == plan.weighted_makespan
    # there and back in each of the 101 calls, at the least
    assert other.slower is not None
    assert other.slower > 101 * 2 * Link().latency


def test_explanation_prints_a_table(plan: Plan) -> None:
    text = str(plan.explain("blocks.1"))
    for expected in ("module blocks.1", "moved to", "obstacle", "it is there", "cpu"):
        assert expected in text


def test_alternative_may_use_fewer_prefetch_slots() -> None:
    graph, pin = chain(8, weight=64 * KIB, flops=10**9), {f"w{i}": "cpu" for i in range(4)}
    plan = planned(graph, {0: 7 * 64 * KIB + 8 * KIB, "cpu": 1 << 30}, pin=pin)
    assignment = replace(plan.schedule.assignment, slots={0: 3})
    deep = evaluate(constrained_problem(plan), assignment)
    assert deep.feasible
    assert [len(buffer.slots) for buffer in deep.schedule.prefetch_buffers] == [3]
    plan = replace(plan, schedule=deep.schedule, makespan=deep.seconds, constraints=Constraints())
    homes = {**assignment.weights, "w0": 0}
    assert set(evaluate(constrained_problem(plan), replace(assignment, weights=homes)).excess) == {0}
    assert plan.explain("w0").alternative_on(0).possible


# -- bottleneck -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_binding_budget_is_named_with_smallest_useful_increase() -> None:
    budgets = {0: 12 * KIB, "cpu": 1 << 20}
    plan = planned(chain(4), budgets)
    found = plan.bottleneck(progress=False)
    assert found.binds
    assert found.answer is not None
    assert (found.answer.what, found.answer.devices) == ("memory", (0,))
    grown = planned(chain(4), {**budgets, 0: 12 * KIB + found.answer.increase})
    assert grown.makespan == pytest.approx(plan.makespan - found.gain)
    # a tenth less would not do
    less = planned(chain(4), {**budgets, 0: 12 * KIB + int(found.answer.increase * 0.9)})
    assert less.makespan > grown.makespan
    assert Plan.from_json(plan.to_json()).bottleneck(progress=False) == found


def test_without_binding_budget_a_faster_device_is_named() -> None:
    slow_card = planned(chain(4), {0: 1 << 20}, speeds={0: Speed(flops=1e9)}).bottleneck(progress=False)
    assert not slow_card.binds
    assert slow_card.answer is not None
    assert (slow_card.answer.what, slow_card.answer.devices) == ("speed", (0,))
    links = {(0, "cpu"): Link(1e6, 1e-3)}
    slow_link = planned(chain(4), {0: 1 << 20, "cpu": 1 << 20}, links, {0: Speed(1e15, 1e15, 0.0)})
    found = slow_link.bottleneck(progress=False)
    assert found.answer is not None
    assert (found.answer.what, set(found.answer.devices)) == ("link", {0, "cpu"})
    assert "no budget is binding" in str(found)


@pytest.mark.slow
def test_times_add_up_to_the_makespan() -> None:
    plan = planned(chain(3), {0: 8 * KIB, 1: 8 * KIB, "cpu": 1 << 20}, cpu_compute=False)
    found = plan.bottleneck(progress=False)
    parts = (found.compute_seconds, found.transfer_seconds, found.streaming_seconds, found.io_seconds)
    assert sum(parts) == pytest.approx(plan.makespan)
    assert all(growth.gain >= 0 for growth in found.growths)
    assert json.loads(found.to_json())["binds"] == found.binds


@pytest.mark.parametrize(("flops", "waits"), [(10**6, True), (3 * 10**10, False)])
def test_times_add_up_with_streamed_weights(flops: int, waits: bool) -> None:
    graph, pin = chain(6, weight=1 << 20, flops=flops), {f"w{i}": "cpu" for i in range(6)}
    plan = planned(graph, {0: 1 << 30, "cpu": 1 << 30}, pin=pin, cpu_compute=False)
    copying = sum(move_seconds(load, plan.topology) for load in plan.schedule.loads())
    assert len(plan.streams) == len(list(plan.schedule.loads())) == 6
    found = plan.bottleneck(progress=False)
    parts = (found.compute_seconds, found.transfer_seconds, found.streaming_seconds, found.io_seconds)
    assert sum(parts) == pytest.approx(plan.makespan)
    assert found.streaming_seconds + found.hidden_seconds == pytest.approx(copying)
    assert found.hidden_seconds > 0
    assert f"{time_text(found.hidden_seconds)} of streaming are hidden" in str(found)
    # where operations take longer than copies, the call waits for the first copy at most
    assert waits == (found.streaming_seconds > copying / 6)
    module = plan.explain("layer3")
    assert module.compute_seconds == pytest.approx(found.compute_seconds / 6)
    assert (module.transfer_seconds > 0) == waits
    here = module.alternative_on(0)
    assert here.transfer_seconds == pytest.approx(plan.makespan - found.compute_seconds)


def test_faster_link_helps_streamed_weights() -> None:
    graph, pin = chain(6, weight=1 << 20), {f"w{i}": "cpu" for i in range(6)}
    plan = planned(graph, {0: 1 << 30, "cpu": 1 << 30}, pin=pin, cpu_compute=False)
    found = plan.bottleneck(progress=False)
    assert found.answer is not None
    assert (found.answer.what, set(found.answer.devices)) == ("link", {0, "cpu"})
    assert found.gain > 0.4 * plan.makespan


@pytest.mark.slow
def test_equal_devices_are_tried_once() -> None:
    plan = planned(chain(6), {0: 12 * KIB, 1: 12 * KIB, "cpu": 1 << 20})
    memory = {g.devices: g.like for g in plan.bottleneck(progress=False).growths if g.what == "memory"}
    assert memory == {(0,): (1,), ("cpu",): ()}


@pytest.mark.slow
def test_several_calls_have_one_bottleneck() -> None:
    weights = [Weight(f"w{i}", 8 * KIB, (f"w{i}",)) for i in range(3)]
    values = [Value("x", 512, 512), *(Value(f"v{i}", 512, 512) for i in range(3))]
    operations = [
        Operation(f"v{i}", "f", (values[i].name, f"w{i}"), (f"v{i}",), (), 10**6, 8 * KIB) for i in range(3)
    ]
    graph = Graph(operations, values, weights, ["x"], ["v2"])
    one = planned(graph, {0: 20 * KIB, "cpu": 1 << 20})
    both = replace(one, others=(replace(one, call_weight=3.0),))
    found, alone = both.bottleneck(progress=False), one.bottleneck(progress=False)
    assert found.makespan == pytest.approx(4 * one.makespan)
    assert found.gain == pytest.approx(4 * alone.gain)
    assert alone.gain > 0
