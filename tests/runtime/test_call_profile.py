"""A measured call compared with the estimated one, on simulated devices."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from plans import budgets_of, llama
from shortcuts import short_search
from test_formats import check_collection, check_node_data, check_trace

import graphplan
from graphplan import Plan
from graphplan.runtime.profile.call_profile import Profile, _Mark, _MeasuredSpan


@pytest.fixture(scope="module")
def profile() -> Profile:
    model, inputs = llama(1)
    with graphplan.simulate(budgets_of(model, 0.5)) as machine, short_search():
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs, pin={"lm_head": 1})
        plain = placed(**inputs).logits
        found = placed.profile(**inputs)
        assert torch.equal(placed(**inputs).logits, plain)
    assert isinstance(found, Profile)
    return found


@pytest.mark.slow
def test_every_step_is_measured_once(profile: Profile) -> None:
    plan = profile.plan
    free = {e.name for e in plan.timeline.events if e.kind == "run" and e.start == e.end}
    for kind in ("run", "move", "load"):
        estimated = [(e.name, e.device) for e in plan.timeline.events if e.kind == kind]
        measured = [(e.name, e.device) for e in profile.timeline.events if e.kind == kind]
        unmeasured = {name for name, _ in estimated} - {name for name, _ in measured}
        assert unmeasured <= free  # two equal views are one in the code
        assert measured == [item for item in estimated if item[0] not in unmeasured]
    assert plan.streamed_bytes > 0
    assert plan.transfer_bytes > 0


def test_measured_times_do_not_overlap(profile: Profile) -> None:
    events = profile.timeline.events
    assert all(0 <= a.start <= a.end <= b.start <= b.end for a, b in itertools.pairwise(events))
    assert events[-1].end <= profile.seconds


def test_measured_peaks_are_within_the_estimates(profile: Profile) -> None:
    plan = profile.plan
    assert set(profile.peak_bytes) == {0, 1}
    for key, nbytes in profile.peak_bytes.items():
        assert 0 < nbytes <= plan.peak_bytes[key] <= plan.topology[key].memory


def test_summary_shows_estimated_and_measured(profile: Profile) -> None:
    text = str(profile)
    assert "estimated" in text
    assert "measured" in text
    assert len(text.splitlines()) == 4 + len(profile.plan.topology.devices)


def test_profile_files_are_valid(profile: Profile, tmp_path: Path) -> None:
    profile.save_trace(tmp_path / "trace.json")
    events = check_trace((tmp_path / "trace.json").read_text(encoding="utf-8"))
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {1, 2}
    profile.save_model_explorer(tmp_path / "plan.json")
    graph = check_collection(json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")))
    data = json.loads((tmp_path / "plan.measured.json").read_text(encoding="utf-8"))
    assert len(check_node_data(data, graph)) == len([e for e in profile.timeline.events if e.kind == "run"])
    profile.save_html(tmp_path / "plan.html", title="Measured")
    assert '"measured":{' in (tmp_path / "plan.html").read_text(encoding="utf-8")
    profile.save_svg(tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").count("measured peak") == 2


def test_profiled_plan_equals_the_running_plan(profile: Profile) -> None:
    profile.plan.verify()
    assert Plan.from_json(profile.plan.to_json()) == profile.plan


def test_profiling_positional_calls_and_results() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
    x = torch.ones(2, 8)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,))
    found = placed.profile(x)
    assert [e.name for e in found.timeline.events if e.kind == "run"] == list(placed.plan.graph.operations)
    assert found.peak_bytes == {}
    assert "-" in found.summary()


def test_profiling_does_not_run_backward_of_other_models() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, self.linear(x)

    x = torch.ones(2, 8)
    trained = graphplan.partition(torch.nn.Linear(8, 8), {"cpu": "1GiB"}, (x,), train=True)
    placed = graphplan.partition(Both().eval(), {"cpu": "1GiB"}, (x,))
    made = trained(x)
    with torch.no_grad():
        placed.profile(made)
    assert all(parameter.grad is None for parameter in trained.parameters())
    made.sum().backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())


def test_operation_seconds_exclude_the_markers(profile: Profile) -> None:
    took = {e.name: e.end - e.start for e in profile.timeline.events if e.kind == "run"}
    seconds = profile.measured.operation_seconds
    assert seconds.keys() == took.keys()
    assert all(0 <= seconds[name] <= took[name] for name in took)  # equal where other work delayed both


@pytest.mark.parametrize(("told", "left"), [(3.5, 1.5), (2.0, 1.5), (0.9, 2.0)])
def test_markers_are_not_subtracted_on_lagging_devices(told: float, left: float) -> None:
    # it began at 1 s; the host had enqueued all of the operation by then, or had not
    start, end = _Mark(lambda: 1.0, 0.5), _Mark(lambda: 3.0, told)
    assert _MeasuredSpan("run", "op", 0, start, end).without(0.5) == left
    assert _MeasuredSpan("run", "op", 0, start, end).without(9.0) == (0.0 if told > 1 else 2.0)
