"""Plans of machines with several interleaved stages each, without running them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphplan
from graphplan import ClusterPlan, Link
from graphplan.api.machines import _require_planned_for, read_cluster
from graphplan.api.plan_options import PlanOptions
from graphplan.ir.liveness import saved_bytes
from graphplan.report.cluster.cluster_perfetto import batch_slots

WIDTH = 256
NEAR = Link(1e12, 1e-9)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def stack(layers: int = 12, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(Residual(width) for _ in range(layers)))


WEIGHTS = sum(p.nbytes for p in stack().parameters())
X = torch.empty(1024, WIDTH, device="meta")


def planned(machines: Sequence[Any], **options: Any) -> ClusterPlan:
    given: dict[str, Any] = {"microbatches": 8, "schedule": "interleaved", "objective": "throughput"}
    model = options.pop("model", None) or stack()
    args = (options.pop("x", X),)
    return graphplan.plan(model, machines=machines, args=args, network=NEAR, **{**given, **options})


def check(plan: ClusterPlan, machines: Sequence[Any], each: int = 2) -> None:
    count = len(machines)
    assert [stage.machine for stage in plan.stages] == list(range(count)) * each
    plan.verify()
    assert ClusterPlan.from_json(plan.to_json()) == plan
    assert 0 < plan.lower_bound <= plan.makespan
    assert all(waits >= -1e-9 for _, _, waits in plan.shares.values())
    for machine, peaks in plan.peak_bytes.items():
        budgets = {spec.key: spec.memory for spec in plan.stages[machine].plan.topology.devices}
        assert all(peaks[key] <= budgets[key] for key in budgets)


@pytest.mark.slow
def test_bubble_is_smaller_than_with_one_stage_each() -> None:
    machines = [{"cpu": "1GiB"}] * 4
    plan = planned(machines)
    check(plan, machines)
    for options in ({}, {"train": True}):
        one, two = (planned(machines, schedule=kind, **options) for kind in ("gpipe", "interleaved"))
        assert two.bubble < 0.75 * one.bubble, options
        assert two.makespan < one.makespan
    three = planned(machines, stages_per_machine=3)
    check(three, machines, 3)
    assert three.bubble < plan.bubble


@pytest.mark.parametrize(
    "machines",
    [
        pytest.param([{0: "9MiB", "cpu": "40MiB"}, {0: "20MiB", "cpu": "12MiB"}], marks=pytest.mark.slow),
        [{"cpu": "80MiB"}, {0: "8MiB", "cpu": "40MiB"}, {0: "30MiB"}, {0: "6MiB", 1: "6MiB", "cpu": "60MiB"}],
    ],
)
def test_unequal_machines(machines: list[Any]) -> None:
    check(planned(machines, model=stack(8)), machines)


@pytest.mark.slow
def test_training_counts_saved_activations_of_microbatches_in_flight() -> None:
    machines = [{"cpu": "1GiB"}] * 2
    plan = planned(machines, train=True, optimizer=torch.optim.AdamW)
    check(plan, machines)
    for stage, most in zip(plan.stages, (4, 3, 2, 1), strict=True):  # in flight, as torch has it
        saved = saved_bytes(stage.plan.graph, stage.plan.topology, stage.plan.schedule)["cpu"]
        assert saved > 0
        assert stage.kept_bytes.get("cpu", 0) == (most - 1) * saved
    for stage in plan.stages:
        assert stage.plan.graph.held_bytes == 4 * stage.plan.graph.weight_bytes
    second = plan.stages[1]
    less = replace(second, plan=replace(second.plan, graph=second.plan.graph.changed(in_flight=2)))
    stages = (plan.stages[0], less, *plan.stages[2:])
    with pytest.raises(graphplan.VerificationError, match="2 microbatches in flight, and interleaved has 3"):
        replace(plan, stages=stages).verify()


@pytest.mark.slow
def test_tight_training_keeps_the_budgets() -> None:
    model, x = stack(8), torch.empty(4096, WIDTH, device="meta")
    weights = sum(p.nbytes for p in model.parameters())
    machines = [{"cpu": int(4 * weights * 0.55) + (44 << 20)}] * 2
    plan = planned(machines, model=model, x=x, train=True, optimizer=torch.optim.AdamW)
    check(plan, machines)
    assert any(stage.plan.recomputed for stage in plan.stages)


class Lumpy(nn.Module):
    """One layer has more than half of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, WIDTH)
        self.layers = stack(8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(ids))


@pytest.mark.parametrize("key", ["cpu", 0])
def test_stage_may_take_more_than_an_equal_share(key: Any) -> None:
    model, ids = Lumpy(), torch.zeros(64, 8, dtype=torch.int64, device="meta")
    table = model.table.weight.nbytes
    machines = [{key: int(table * 1.35)}] * 2
    plan = planned(machines, model=model, x=ids)
    check(plan, machines)
    assert plan.stages[0].held_bytes(plan.stages[0].plan.topology.devices[0]) > 0.6 * table * 1.35


def test_the_stages_of_a_machine_share_its_budgets() -> None:
    machines = [{"cpu": int(WEIGHTS * 0.8)}] * 2
    plan = planned(machines)
    check(plan, machines)
    first = plan.stages[0]
    (spec,) = first.plan.topology.devices
    less = replace(spec, taken=spec.taken - first.beside_bytes["cpu"], memory=first.held_bytes(spec))
    tight = replace(first.plan, topology=replace(first.plan.topology, devices=(less,)))
    stages = (replace(first, plan=tight, beside_bytes={}), *plan.stages[1:])
    with pytest.raises(graphplan.VerificationError, match="stages of machine 0 hold"):
        replace(plan, stages=stages).verify()


def test_stages_in_another_order_raise() -> None:
    plan = planned([{"cpu": "1GiB"}] * 2)
    swapped = tuple(replace(stage, machine=1 - stage.machine) for stage in plan.stages)
    with pytest.raises(graphplan.VerificationError, match="stages are on the machines"):
        replace(plan, stages=swapped).verify()
    with pytest.raises(graphplan.VerificationError, match="stages are on the machines"):
        replace(plan, schedule="1f1b").verify()


def test_a_plan_of_no_machines_is_damaged() -> None:
    data = json.loads(planned([{"cpu": "1GiB"}] * 2, model=stack(4)).to_json())
    with pytest.raises(graphplan.PlanError, match=r"stages are on the machines \[0, 1, 0, 1\], of 0"):
        ClusterPlan.from_json(json.dumps({**data, "machines": 0}))


def test_the_stages_of_a_machine_share_its_lanes(tmp_path: Path) -> None:
    machines = [{"cpu": "1GiB"}] * 3
    plan = planned(machines, x=X[:960], microbatches=6, train=True)
    slots = list(batch_slots(plan))
    assert max(slot.end for slot in slots) == pytest.approx(plan.makespan)
    for machine in range(3):  # a machine does one thing at a time
        mine = sorted((s.start, s.end) for s in slots if plan.stages[s.stage].machine == machine)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(mine))
    plan.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"machine {i} (stages {i}, {i + 3})" for i in range(3)]
    assert {event["pid"] for event in events} == {1, 2, 3}
    computed = [event["name"] for event in events if event.get("cat") == "stage"]
    assert len(computed) == 2 * 6 * 6
    assert "microbatch 5, backward, stage 4" in computed
    received = [event for event in events if event.get("cat") == "receive"]
    assert sum(sum(event["args"].values()) for event in received) == 6 * plan.network_bytes
    said = plan.summary()
    assert "3 machines, 6 microbatches, schedule interleaved of 2 stages each" in said
    ranges = [f"{plan.stages[i].start}-{plan.stages[i].end - 1}" for i in (1, 4)]
    assert ", ".join(ranges) in said
    plan.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count(", 2 stages</text>") == 3
    assert ", ".join(ranges) in page


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"microbatches": 7}, r"7 do not divide into them: give microbatches=6 or 8"),
        ({"stages_per_machine": 1}, "stages_per_machine must be an integer, 2 or more"),
        ({"stages_per_machine": True}, "stages_per_machine must be an integer, 2 or more"),
        ({"schedule": "gpipe", "stages_per_machine": 2}, "is for schedule='interleaved'"),
        ({"objective": "latency"}, "give objective='throughput'"),
        ({"machines": [{"cpu": "1GiB"}]}, "two machines or more"),
    ],
)
def test_invalid_arguments_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(graphplan.InputError, match=match):
        planned(options.pop("machines", [{"cpu": "1GiB"}] * 3), **options)


def test_given_plan_requires_equal_stages_per_machine() -> None:
    machines = [{"cpu": "1GiB"}] * 2
    asked = PlanOptions(microbatches=8, schedule="interleaved", objective="throughput")
    cluster = read_cluster(machines, asked)
    _require_planned_for(planned(machines), cluster)
    for options in ({"stages_per_machine": 3}, {"schedule": "1f1b"}):
        with pytest.raises(graphplan.PlanError, match="stages on each machine, not for 2"):
            _require_planned_for(planned(machines, **options), cluster)


def test_one_stage_per_machine_is_allowed_for_other_schedules() -> None:
    plan = planned([{"cpu": "1GiB"}] * 2, schedule="gpipe", stages_per_machine=1)
    assert len(plan.stages) == 2


def test_error_names_machine_and_sufficient_budgets() -> None:
    machines = [{"cpu": "40MiB"}, {"cpu": "4MiB"}]
    with pytest.raises(graphplan.InfeasibleError, match=r"achine \d.* may hold 4\.\d* MiB") as caught:
        planned(machines)
    text = str(caught.value)
    budgets = eval(text[text.index("machines=") + len("machines=") :])
    check(planned(budgets), budgets)


def test_model_with_too_few_cuts_raises() -> None:
    with pytest.raises(graphplan.InfeasibleError, match=r"where the model can be cut"):
        planned([{"cpu": "1GiB"}] * 4, model=stack(1), stages_per_machine=8)


def test_model_with_too_few_trained_layers_raises() -> None:
    """The reason is not memory: gradients do not pass through stages without own parameters."""
    options = {"model": stack(2), "stages_per_machine": 4, "train": True}
    with pytest.raises(graphplan.InfeasibleError, match=r"there are 3 places where the model can be cut"):
        planned([{"cpu": "1TiB"}] * 2, **options)


class Skip(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self
        kept = x = torch.relu(first(x))
        for layer in others:
            x = torch.relu(layer(x))
        return x + kept


@pytest.mark.slow
def test_named_budgets_suffice_in_a_new_search() -> None:
    """Regression: the budgets depended on state of the failed search."""
    model, x = Skip(*(nn.Linear(16, 16, bias=False) for _ in range(3))), torch.empty(2, 16, device="meta")
    machines: list[Any] = [{0: 1475}, {0: 1475}]
    with pytest.raises(graphplan.InfeasibleError) as caught:
        planned(machines, model=model, x=x, microbatches=2)
    for (machine, key), nbytes in caught.value.needed.items():
        machines[machine] = {**machines[machine], key: nbytes}
    check(planned(machines, model=model, x=x, microbatches=2), machines)
