"""Plans of several machines, without running them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from cluster_models import EarlyViews
from torch import nn

import graphplan
from graphplan import ClusterPlan, ClusterProfile, Link
from graphplan.analysis.plan import Plan
from graphplan.api.machines import plan_machines, read_cluster
from graphplan.api.plan_options import PlanOptions
from graphplan.compiler.cluster.stage_placement import StagePlacement, Stretch
from graphplan.compiler.pipeline import Compiler
from graphplan.message_text import size_text
from graphplan.report.cluster.cluster_perfetto import Slot, batch_slots
from graphplan.report.cluster.cluster_text import HEADER, machine_rows, shares_text
from graphplan.report.text import time_text

WIDTH = 1024
LAYER = (WIDTH * WIDTH + WIDTH) * 4
WEIGHTS = 8 * LAYER


class Stack(nn.Module):
    def __init__(self, layers: int = 8, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


X, MANY = torch.ones(8, WIDTH), torch.ones(256, WIDTH)
NEAR = Link(1e11, 1e-7)


def planned(machines: Any, **options: Any) -> ClusterPlan:
    model = options.pop("model", None) or Stack()
    return graphplan.plan(model, machines=machines, args=(options.pop("x", X),), network=NEAR, **options)


def test_latency_uses_as_few_machines_as_possible() -> None:
    plan = planned([{0: int(WEIGHTS * 0.7)}] * 4, objective="latency")
    assert len(plan.stages) == 2
    assert plan.makespan == pytest.approx(plan.latency)
    assert plan.gap >= 0
    held = [stage.plan.graph.weight_bytes for stage in plan.stages]
    assert sum(held) == WEIGHTS
    assert set(plan.placement) == {name for name, _ in Stack().named_parameters()}


class Transposed(nn.Module):
    """Multiplies by the transposed weights, whose views are taken first, or one by one."""

    def __init__(self, first: bool, layers: int = 8) -> None:
        super().__init__()
        self.first = first
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = [weight.t() for weight in self.weights] if self.first else []
        for index, weight in enumerate(self.weights):
            x = torch.relu(x @ (views[index] if self.first else weight.t()))
        return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (6 * LAYER, {}),
        (14 * LAYER, {"train": True, "schedule": "1f1b"}),
        (20 * LAYER, {"train": True, "schedule": "interleaved"}),
    ],
)
def test_early_weight_views_do_not_pin_their_weights(budget: int, options: dict[str, Any]) -> None:
    batches: dict[str, Any] = {"microbatches": 4, "objective": "throughput"}
    late, early = (
        planned([{"cpu": budget}] * 2, model=Transposed(first), x=MANY, **batches, **options)
        for first in (False, True)
    )
    weights = [[stage.plan.graph.weight_bytes for stage in plan.stages] for plan in (late, early)]
    assert weights[0] == weights[1]
    assert len(weights[0]) > 1
    assert early.seconds == pytest.approx(late.seconds)
    assert early.lower_bound == pytest.approx(late.lower_bound)


def test_shared_weight_gradients_are_counted_while_summed() -> None:
    options: dict[str, Any] = {"train": True, "schedule": "1f1b", "microbatches": 2}
    x = torch.ones(4096, 16)
    plan = planned([{"cpu": "1GiB"}] * 2, model=EarlyViews(), x=x, objective="throughput", **options)
    first, last = (stage.plan.graph.weights.keys() for stage in plan.stages)
    assert first & last == {"weights.0", "weights.2"}
    weights = plan.stages[-1].plan.graph.weights
    gradients = {weight.name: len(weight.beside) for weight in weights.values() if weight.beside}
    assert gradients.pop("weights.0") == gradients.pop("weights.2") == 2
    assert set(gradients.values()) == {1}


class Tied(nn.Module):
    """Scores by its own frozen embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20_000, 64).requires_grad_(False)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embedding(ids)) @ self.embedding.weight.t()


@pytest.mark.slow
def test_frozen_shared_weights_have_no_room_for_sums() -> None:
    options: dict[str, Any] = {"train": True, "schedule": "1f1b", "microbatches": 4}
    ids = torch.zeros(8, 16, dtype=torch.long)
    plan = planned([{0: "1GiB", "cpu": "1GiB"}] * 2, model=Tied(), x=ids, **options)
    first, last = (stage.plan.graph.weights.keys() for stage in plan.stages)
    assert first & last == {"embedding.weight"}
    # activations and their gradients of all microbatches
    assert plan.stages[0].buffer_bytes == 4 * 2 * sum(value.nbytes for value in plan.stages[0].sends)


def test_uncuttable_model_runs_on_one_machine() -> None:
    with pytest.warns(graphplan.GraphplanWarning, match="unused machines: 1"):
        plan = planned([{0: "1GiB", 1: "1GiB"}] * 2, model=nn.Linear(WIDTH, WIDTH))
    assert len(plan.stages) == 1


def test_gap_refers_to_the_objective() -> None:
    machines = [{0: int(WEIGHTS * 0.7)}] * 4
    plan = planned(machines, microbatches=8, x=MANY, objective="latency")
    assert plan.makespan > 3 * plan.latency
    assert plan.seconds == plan.latency
    assert plan.gap == pytest.approx(1 - plan.lower_bound / plan.latency)
    assert "lower bound of one microbatch" in plan.summary()
    assert planned(machines, microbatches=8, x=MANY, objective="throughput").seconds < plan.makespan


def test_infeasible_stretch_is_not_retried_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that fit by estimate, but for which no placement is found, since bytes do not pack."""
    search, sizes = StagePlacement.search, []

    def packs_little(self: StagePlacement, stretch: Stretch) -> Plan:
        nbytes = self.source(stretch).planned.graph().weight_bytes
        sizes.append(nbytes)
        if nbytes > 3 * LAYER:
            raise graphplan.InfeasibleError("does not pack")
        return search(self, stretch)

    monkeypatch.setattr(StagePlacement, "search", packs_little)
    plan = planned([{0: 8 * LAYER}] * 6, model=Stack(16))
    assert len(plan.stages) == 6
    assert sum(nbytes > 3 * LAYER for nbytes in sizes) < 12


def test_throughput_divides_the_work_evenly() -> None:
    plan = planned([{"cpu": "1GiB"}] * 4, microbatches=8, objective="throughput")
    assert len(plan.stages) == 4
    assert max(plan.loads) < 1.3 * min(plan.loads)
    one = planned([{"cpu": "1GiB"}], microbatches=8, objective="throughput")
    assert plan.makespan < one.makespan
    assert plan.lower_bound <= plan.makespan
    assert plan.gap < 0.3


def test_unequal_machines_get_unequal_shares() -> None:
    small, large = {0: int(0.4 * WEIGHTS)}, {0: int(0.9 * WEIGHTS)}
    plan = planned([small, large])
    by_machine = {stage.machine: stage.plan.graph.weight_bytes for stage in plan.stages}
    assert by_machine[1] > by_machine[0]
    for machine, peaks in plan.peak_bytes.items():
        assert all(nbytes <= (small, large)[machine][key] for key, nbytes in peaks.items())


def test_a_plan_is_data(tmp_path: Path) -> None:
    machines = [{0: "12MiB", "cpu": "40MiB"}, {"cpu": "40MiB"}, {0: "18MiB"}]
    plan = planned(machines, microbatches=8, objective="throughput")
    assert len(plan.stages) > 1
    plan.save_json(tmp_path / "plan.json")
    again = ClusterPlan.load_json(tmp_path / "plan.json")
    assert again == plan
    again.verify()
    assert f"per microbatch, at {NEAR.bandwidth / 1e9:.3g} GB/s and " in plan.summary()
    data = json.loads(plan.to_json())
    with pytest.raises(graphplan.PlanError, match="0 microbatches do not divide a batch"):
        ClusterPlan.from_json(json.dumps({**data, "microbatches": 0}))
    data["stages"][0]["end"] += 1
    with pytest.raises(graphplan.PlanError, match="damaged"):
        ClusterPlan.from_json(json.dumps(data))


def test_trace_has_a_lane_group_for_each_machine(tmp_path: Path) -> None:
    plan = planned([{"cpu": "1GiB"}] * 3, microbatches=4, objective="throughput")
    slots = list(batch_slots(plan))
    last = max(slot.end for slot in slots)
    assert plan.latency + 3 * max(plan.loads) == pytest.approx(plan.makespan)
    assert last == pytest.approx(plan.makespan)
    for index in range(3):  # a machine does one thing at a time
        mine = sorted((s.start, s.end) for s in slots if s.stage == index)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(mine))
    plan.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2, 3}
    received = [event for event in events if event.get("cat") == "receive"]
    assert sum(sum(event["args"].values()) for event in received) == 4 * plan.network_bytes


def test_the_picture_has_a_lane_for_each_machine(tmp_path: Path) -> None:
    plan = planned([{"cpu": "1GiB"}] * 3, microbatches=4, objective="throughput")
    plan.save_svg(tmp_path / "plan.svg", title="a < b")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text and text.startswith("machine ")] == [
        f"machine {i}" for i in range(3)
    ]
    assert "a < b" in texts
    hints = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("computes" in hint for hint in hints) == 3 * 4
    assert sum("computes" not in hint for hint in hints) == 2 * 4


def test_page_shows_measured_and_estimated_batch(tmp_path: Path) -> None:
    plan = planned([{"cpu": "1GiB"}] * 2, microbatches=2, objective="throughput")
    slots = [Slot(i, m, "stage", i + m + 0.5, i + m + 1.0) for i in range(2) for m in range(2)]
    profile = ClusterProfile(plan, tuple(slots))
    assert profile.seconds == 3.0
    assert profile.busy(0) == 1.0
    assert "3.00 s measured" in str(profile)
    profile.save_svg(tmp_path / "plan.svg")
    assert (
        "2 microbatches in 3.00 s, measured; machines compute 33 % of a batch"
        in (tmp_path / "plan.svg").read_text()
    )
    profile.save_html(tmp_path / "plan.html", title="a < b")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "a < b" not in page
    assert "a &lt; b" in page


def test_profile_of_training_compares_forward_with_forward(tmp_path: Path) -> None:
    plan = planned_training("1GiB", "1f1b")
    profile = ClusterProfile(plan, tuple(batch_slots(plan, forward_only=True)))
    seconds = time_text(profile.seconds)
    assert f"one batch forward: {seconds} estimated" in str(profile)
    rows = [line.split() for line in str(profile).splitlines()[-3:]]
    assert [row[1:3] for row in rows] == [row[3:5] for row in rows]  # computes as long as estimated
    profile.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("Batch forward, ") == 2
    assert ", backward" not in page


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_timed_actions_of_training_wait_for_gradients(schedule: str) -> None:
    plan = planned_training("1GiB", schedule)
    ended = {one.action: one.end for one in plan.timed_actions}
    assert len(ended) == 2 * 3 * 8
    for one in plan.timed_actions:
        stage = one.action.stage + (1 if one.action.backward else -1)
        if 0 <= stage < 3:
            assert one.start > ended[replace(one.action, stage=stage)]
    first = min(one.end for one in plan.timed_actions if one.action.stage == 1)
    returned = min(one.start for one in plan.timed_actions if one.action.backward and not one.action.stage)
    assert first < returned
    assert plan.makespan == max(ended.values())


@pytest.mark.parametrize(
    ("microbatches", "options", "schedule"),
    [(2, {"train": True}, "1f1b"), (1, {"train": True}, "gpipe"), (8, {}, "gpipe")],
)
def test_default_schedule_training_with_enough_microbatches_is_1f1b(
    microbatches: int, options: dict[str, Any], schedule: str
) -> None:
    asked = PlanOptions(microbatches=microbatches, **options)
    assert read_cluster([{"cpu": "1GiB"}] * 2, asked).flight.schedule == schedule


def test_default_objective_is_time_of_batch() -> None:
    machines = [{"cpu": "1GiB"}] * 2
    plan = planned(machines, microbatches=8)
    assert plan.objective == "throughput"
    assert plan.used == [0, 1]
    assert planned(machines, microbatches=8, objective="latency").used == [0]  # without a warning


def test_unused_machines_warning_names_each() -> None:
    with pytest.warns(graphplan.GraphplanWarning, match=r"^unused machines: 1, 2\. .* 1.25 GB/s and 50"):
        plan = graphplan.plan(
            nn.Linear(8, 8), machines=[{"cpu": "1GiB"}] * 3, args=(torch.ones(8, 8),), microbatches=4
        )
    assert plan.used == [0]


def test_page_shows_network_traffic(tmp_path: Path) -> None:
    plan = planned([{"cpu": "1GiB"}] * 2, microbatches=2, objective="throughput")
    plan.save_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1
    for cell in (*HEADER, *(cell for row in machine_rows(plan) for cell in row)):
        assert cell in page
    assert f"<b>{size_text(plan.network_bytes)}</b>" in page
    assert f"<b>{100 * plan.bubble:.0f} %</b>" in page
    assert shares_text(plan) in page
    computing = sum(slot.end - slot.start for slot in batch_slots(plan) if slot.kind == "stage")
    assert sum(shares[0] for shares in plan.shares.values()) == pytest.approx(computing / plan.makespan)
    assert all(sum(shares) == pytest.approx(1) and min(shares) >= -1e-9 for shares in plan.shares.values())
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_microbatches_that_do_not_divide_the_batch_raise() -> None:
    plan = planned([{0: "1GiB"}])
    with pytest.raises(graphplan.VerificationError, match="5 microbatches do not divide a batch of 32"):
        replace(plan, batch=32, microbatches=5).verify()


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.stack(x) - labels).square().mean()


def test_loss_of_microbatches_raises_naming_train_step() -> None:
    inputs = (torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(graphplan.InputError, match="such as labels=, and give train_step a loss"):
        graphplan.plan(Loss(), machines=[{"cpu": "1GiB"}], args=inputs, microbatches=2)


def test_bound_above_the_plan_raises() -> None:
    plan = planned([{0: "1GiB"}])
    with pytest.raises(graphplan.VerificationError, match="lower bound"):
        replace(plan, lower_bound=plan.seconds * 1.1).verify()


def test_network_buffers_count_against_the_cpu_budget() -> None:
    machines = [{"cpu": int(WEIGHTS * 0.75)}] * 2
    plan = planned(machines, microbatches=4)
    crossing = plan.stages[0].sends[0]
    assert crossing.shape == (2, WIDTH)
    for stage in plan.stages:
        assert stage.buffer_bytes >= 4 * crossing.nbytes
        (spec,) = stage.plan.topology.devices
        assert spec.taken == stage.buffer_bytes
    peaks = plan.peak_bytes
    assert all(peaks[k]["cpu"] <= machines[k]["cpu"] for k in (0, 1))


def test_saved_activations_require_more_machines_in_training() -> None:
    from graphplan.devices.max_memory import read_max_memory
    from graphplan.ir.cluster.flight import Flight

    assert read_max_memory({"cpu": 1})
    asked = PlanOptions(microbatches=8, schedule="1f1b")
    assert read_cluster([{"cpu": "1GiB"}], asked, grad=True).flight == Flight(8, "1f1b", True)
    assert Flight(8, "gpipe", True, machines=2).kept_microbatches(after=1) == 8
    assert Flight(8, "1f1b", True, machines=2).kept_microbatches(after=1) == 2
    assert Flight(8, "1f1b", False, machines=2).kept_microbatches(after=1) == 0


def test_1f1b_has_at_most_a_stage_per_microbatch() -> None:
    asked = PlanOptions(microbatches=2, schedule="1f1b", network=NEAR)
    with pytest.warns(graphplan.GraphplanWarning, match="unused machines: 2, 3"):
        plan = plan_machines(Stack(), [{"cpu": 2 * WEIGHTS}] * 4, asked, (MANY,), None, grad=True)
    assert len(plan.stages) == 2
    with pytest.raises(graphplan.InfeasibleError, match="each of the 2 microbatches: give microbatches=4"):
        plan_machines(Stack(), [{"cpu": WEIGHTS // 2}] * 4, asked, (X,), None, grad=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def planned_training(memory: str, schedule: str, **options: Any) -> ClusterPlan:
    given: dict[str, Any] = {"train": True, "optimizer": torch.optim.AdamW, **options}
    return planned(
        [{"cpu": memory}] * 3,
        model=nn.Sequential(*(Block(64) for _ in range(6))),
        x=torch.empty(2048, 64, device="meta"),
        microbatches=8,
        objective="throughput",
        schedule=schedule,
        **given,
    )


@pytest.mark.slow
def test_training_counts_saved_activations_of_microbatches_in_flight() -> None:
    gpipe, one_forward = (planned_training("1GiB", schedule) for schedule in ("gpipe", "1f1b"))
    saved = one_forward.stages[1].kept_bytes["cpu"]
    assert [stage.kept_bytes.get("cpu", 0) for stage in one_forward.stages] == [2 * saved, saved, 0]
    assert [stage.kept_bytes["cpu"] for stage in gpipe.stages] == [7 * saved] * 3
    assert saved >= 2 * 256 * 4 * 64 * 4  # each block saves what relu returns, of 256 rows
    for plan in (gpipe, one_forward):
        assert ClusterPlan.from_json(plan.to_json()) == plan
        assert plan.lower_bound <= plan.makespan
        for stage in plan.stages:
            held = stage.plan.graph.held_bytes
            assert held == 4 * stage.plan.graph.weight_bytes  # gradients, and two moments
            alone = replace(stage.plan, graph=stage.plan.graph.changed(in_flight=1))
            peak = alone.peak_bytes["cpu"] + stage.kept_bytes.get("cpu", 0) + stage.buffer_bytes
            assert plan.peak_bytes[stage.machine]["cpu"] == peak
            # activations and their gradients, of all microbatches; nothing comes back for results
            received, sent = (sum(one.nbytes for one in side) for side in (stage.receives, stage.sends))
            assert stage.buffer_bytes >= 8 * 2 * (received + sent)
    forward = planned_training("1GiB", "gpipe", train=False, optimizer=None)
    assert one_forward.makespan > 2 * forward.makespan
    assert one_forward.transfer_seconds[0] == pytest.approx(2 * forward.transfer_seconds[0])


@pytest.mark.slow
def test_tight_training_recomputes_activations_of_microbatches_in_flight() -> None:
    plan = planned_training("8MiB", "gpipe")
    assert any(stage.plan.recomputed for stage in plan.stages)
    assert all(peaks["cpu"] <= 8 << 20 for peaks in plan.peak_bytes.values())
    stage = next(stage for stage in plan.stages if stage.kept_bytes)
    less = replace(stage, plan=replace(stage.plan, graph=stage.plan.graph.changed(in_flight=7)))
    stages = tuple(less if one is stage else one for one in plan.stages)
    with pytest.raises(graphplan.VerificationError, match="7 microbatches in flight, and gpipe has 8"):
        replace(plan, stages=stages).verify()
    with pytest.raises(graphplan.InfeasibleError, match="gradients and optimizer state"):
        planned_training("4MiB", "gpipe", recompute=False)


@pytest.mark.slow
def test_a_time_limit_is_for_all_stages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []
    plan = Compiler.plan

    def slowly(self: Compiler, *arguments: Any, **options: Any) -> Any:
        given.append(self.options.time_limit)
        time.sleep(0.1)
        return plan(self, *arguments, **options)

    monkeypatch.setattr(Compiler, "plan", slowly)
    planned_training("8MiB", "gpipe")
    without_limit = len(given)
    given.clear()
    planned_training("8MiB", "gpipe", time_limit=0.2)
    assert len(given) <= without_limit
    assert sum(limit for limit in given if limit is not None) <= 0.2


def test_frozen_stages_come_first() -> None:
    def planned_with(trained: int) -> ClusterPlan:
        model = nn.Sequential(*(Block(64) for _ in range(4)))
        model.requires_grad_(False)[trained].requires_grad_(True)
        machines = [{"cpu": "1GiB"}] * 2
        options: dict[str, Any] = {"microbatches": 2, "objective": "throughput", "train": True}
        return planned(machines, model=model, x=torch.empty(512, 64, device="meta"), **options)

    plan = planned_with(3)
    assert [stage.trains for stage in plan.stages] == [False, True]
    assert planned_with(0).stages[-1].end == plan.stages[-1].end


def test_error_names_sufficient_budgets() -> None:
    with pytest.raises(graphplan.InfeasibleError, match="machines=") as caught:
        planned([{0: "7MiB"}] * 3)
    text = str(caught.value)
    budgets = eval(text[text.index("machines=") + len("machines=") :])
    assert planned(budgets).stages
    assert caught.value.needed == {(i, key): n for i, one in enumerate(budgets) for key, n in one.items()}


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) @ self.right(x).t()


def test_results_that_mix_rows_raise() -> None:
    x = torch.ones(4, 8)
    with pytest.raises(graphplan.InputError, match="microbatches=1"):
        planned([{0: "1GiB"}], model=Contrastive(), x=x, microbatches=2)
    assert planned([{0: "1GiB"}], model=Contrastive(), x=x).stages


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + bias


@pytest.mark.parametrize("microbatches", [4, 8])
def test_non_batch_input_with_equal_rows_raises(microbatches: int) -> None:
    """Dividing it would broadcast rows silently and give wrong results."""

    def plan(rows: int) -> graphplan.ClusterPlan:
        inputs = (torch.ones(rows, 8), torch.ones(8))
        return graphplan.plan(Biased(), machines=[{0: "1GiB"}], args=inputs, microbatches=microbatches)

    with pytest.raises(graphplan.InputError, match="bias has 8 rows, as the batch has, but"):
        plan(8)
    assert plan(16).stages


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"machines": {0: "1GiB"}}, "one max_memory for each rank"),
        ({"machines": []}, "one max_memory for each rank"),
        ({"microbatches": 0}, "microbatches"),
        ({"microbatches": 3}, "8 rows does not divide into 3"),
        ({"schedule": "zigzag"}, "schedule"),
        ({"objective": "cost"}, "objective"),
        ({"network": 3}, "graphplan.Link"),
        ({"max_memory": {0: "1GiB"}}, "does not go with max_memory="),
        ({"pin": {"layers.0": 0}}, "does not go with pin="),
        ({"together": ["layers"]}, "does not go with together="),
        ({"return_outputs": False}, "does not go with return_outputs="),
        ({"args": ()}, "example inputs"),
        ({"train": True, "max_batch": 8}, "does not take max_batch"),
        ({"train": True, "train_outputs": "loss"}, "does not go with train_outputs="),
        ({"optimizer": torch.optim.SGD}, "goes with train=True"),
    ],
)
def test_invalid_arguments_are_named(options: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"machines": [{0: "1GiB"}], "args": (X,), **options}
    with pytest.raises(graphplan.InputError, match=match):
        graphplan.plan(Stack(), **given)


def test_empty_constraints_are_none() -> None:
    plan: Any = graphplan.plan(Stack(), machines=[{0: "1GiB"}], args=(X,), pin={}, together=[])
    assert plan.machines == 1


def test_without_torchrun_raises() -> None:
    with pytest.raises(graphplan.ClusterError, match="torchrun"):
        graphplan.partition(Stack(), machines=[{"cpu": "1GiB"}], args=(X,))
    many: Any = 2
    with pytest.raises(graphplan.InputError, match="one max_memory for each rank"):
        graphplan.partition(Stack(), machines=many, args=(X,))


@pytest.mark.parametrize(
    "machines",
    [
        [{0: "900KiB"}, {0: "900KiB"}, {0: "900KiB"}],
        pytest.param([{0: "900KiB"}, {0: "2MiB"}, {"cpu": "3MiB"}], marks=pytest.mark.slow),
    ],
)
def test_more_host_memory_does_not_slow_the_pipeline(machines: list[dict[Any, str]]) -> None:
    """With host memory one machine may stream the whole model, which an estimate may underrate."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    def seconds(*budgets: dict[Any, str]) -> float:
        inputs = (torch.zeros(32, 256, device="meta"),)
        network, how = graphplan.Link(12.5e9, 2e-5), {"microbatches": 4, "objective": "throughput"}
        plan: Any = graphplan.plan(model, machines=list(budgets), args=inputs, network=network, **how)
        return float(plan.seconds)

    with_host = [{**one, "cpu": "4MiB"} if 0 in one else one for one in machines]
    assert seconds(*with_host[:1], *machines[1:]) <= seconds(*machines) * 1.001
    assert seconds(*with_host) <= seconds(*machines) * 1.001


def test_an_error_names_the_machine() -> None:
    with pytest.raises(graphplan.BudgetError, match=r"machines\[1\]: max_memory is empty"):
        planned([{0: "1MiB"}, {}])


def test_large_infeasible_weight_does_not_exclude_small_ones() -> None:
    """Two small accelerators hold many small weights together, but no weight larger than each."""
    small = (nn.Linear(256, 256) for _ in range(6))
    model = nn.Sequential(nn.Linear(4800, 64), nn.Linear(64, 256), *small)
    machines: list[dict[Any, str]] = [{0: "1MiB", 1: "1MiB"}, {0: "2600KiB"}]
    plan = planned(machines, model=model, x=torch.zeros(8, 4800, device="meta"))
    assert [stage.machine for stage in plan.stages] == [1, 0]
