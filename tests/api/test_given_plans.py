"""A given plan is carried out without a search, or an error names the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphplan
from graphplan.passes.frontend.fake_interpreter import Interpreter
from graphplan.passes.frontend.fake_operation import Effect
from graphplan.passes.placement import driver


def stack(width: int = 64, depth: int = 4) -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))
    ).eval()


X = torch.randn(2, 64)
BUDGETS: dict[str, dict[Any, Any]] = {
    "two devices": {0: "40KiB", 1: "48KiB"},
    "weight streaming": {0: "56KiB", "cpu": "1MiB"},
    "the CPU computes": {0: "24KiB", "cpu": "1MiB"},
}


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def search(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be searched for")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "attempt", search)
        yield


@pytest.mark.parametrize("budgets", BUDGETS.values(), ids=list(BUDGETS))
@pytest.mark.parametrize("stored", [False, True])
def test_placement_equals_the_given_plan(
    budgets: dict[Any, Any], stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack()
    with graphplan.simulate(budgets) as machine:
        plan = graphplan.plan(model, machine.max_memory, (X,))
        given: Any = plan
        if stored:
            given = tmp_path / "plan.json"
            plan.save_json(given)
        monkeypatch.setattr(driver, "attempt", None)
        placed = graphplan.partition(model, args=(X,), plan=given)
        assert placed.plan == plan
        torch.testing.assert_close(placed(X), model(X))


@pytest.mark.usefixtures("no_search")
def test_larger_budgets_are_accepted_and_smaller_ones_raise() -> None:
    model = stack()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        made = plan_of(model, BUDGETS["two devices"])
        placed = graphplan.partition(model, machine.max_memory, (X,), plan=made)
        assert placed.plan.schedule == made.schedule
        assert placed.plan.lower_bound == 0.0
        with pytest.raises(graphplan.PlanError, match=r"takes .* on device 1, where max_memory leaves 16"):
            graphplan.partition(model, {0: "40KiB", 1: "16KiB"}, (X,), plan=made)


def plan_of(model: nn.Module, budgets: dict[Any, Any], **options: Any) -> graphplan.Plan:
    """A plan that is made with the real search."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(driver, "attempt", ATTEMPT)
        return graphplan.plan(model, budgets, (X,), **options)


ATTEMPT = driver.attempt


@pytest.mark.usefixtures("no_search")
@pytest.mark.parametrize(
    ("model", "x", "said"),
    [
        (stack(depth=5), X, "only the model has the weight '8.bias'"),
        (
            stack(width=32),
            torch.randn(2, 32),
            r"'0.weight' is float32\[64, 64\] in the plan, and float32\[32",
        ),
        (stack(), torch.randn(3, 64), r"its input 'input' is float32\[2, 64\], not float32\[3, 64\]"),
    ],
)
def test_plan_of_another_graph_raises(model: nn.Module, x: torch.Tensor, said: str) -> None:
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        made = plan_of(stack(), BUDGETS["two devices"])
        before = [p.device for p in model.parameters()]
        with pytest.raises(graphplan.PlanError, match=said):
            graphplan.partition(model, machine.max_memory, (x,), plan=made)
        assert [p.device for p in model.parameters()] == before


class Waves(nn.Module):
    """The same operations, wired in two ways."""

    def __init__(self, turned: bool = False, both: bool = False) -> None:
        super().__init__()
        self.turned, self.both = turned, both

    def forward(self, x: torch.Tensor) -> Any:
        a, b = x + 1, x * 2
        found = b.sin() - a.cos() if self.turned else a.sin() - b.cos()
        return (found, a) if self.both else found


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Waves(turned=True), "'sin' reads add, but mul in the model"),
        (Waves(both=True), "its results are sub, but those of the model are sub, add"),
    ],
)
def test_same_operations_wired_differently_raise(model: nn.Module, said: str) -> None:
    plan = graphplan.plan(Waves(), {"cpu": "1MiB"}, (X,))
    with pytest.raises(graphplan.PlanError, match=said):
        graphplan.partition(model, None, (X,), plan=plan)


def test_input_of_another_dtype_raises() -> None:
    plan = graphplan.plan(Waves(), {"cpu": "1MiB"}, (X,))
    with pytest.raises(graphplan.PlanError, match=r"'x' is float32\[2, 64\], not float64\[2, 64\]"):
        graphplan.partition(Waves(), None, (X.double(),), plan=plan)


def test_optimizer_with_other_state_raises() -> None:
    how: Any = {"args": (X,), "train": True}
    plan = graphplan.plan(stack(), {"cpu": "1MiB"}, optimizer=torch.optim.AdamW, **how)
    with pytest.raises(
        graphplan.PlanError, match=r"takes \d+ bytes with gradients and optimizer state, but \d+ in the"
    ):
        graphplan.partition(stack(), None, plan=plan, optimizer=torch.optim.SGD, **how)


def test_optimizer_with_equal_state_is_accepted() -> None:
    how: Any = {"args": (X,), "train": True}
    plan = graphplan.plan(stack(), {"cpu": "1MiB"}, optimizer_bytes_per_element=4, **how)
    momentum = partial(torch.optim.SGD, momentum=0.9)
    placed: Any = graphplan.partition(stack(), None, plan=plan, optimizer=momentum, **how)
    assert placed.plan.peak_bytes == plan.peak_bytes
    assert placed.plan.optimizer_seconds == plan.optimizer_seconds


def test_other_devices_options_and_unreadable_files_raise(tmp_path: Path) -> None:
    model = stack()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        made = graphplan.plan(model, machine.max_memory, (X,))
        with pytest.raises(
            graphplan.PlanError, match=r"for the devices \[0, 1\], but max_memory names \[0\]"
        ):
            graphplan.partition(model, {0: "1MiB"}, (X,), plan=made)
        with pytest.raises(graphplan.InputError, match="carried out as it is"):
            graphplan.partition(model, args=(X,), plan=made, pin={"0": 1})
        with pytest.raises(graphplan.PlanError, match="cannot be read"):
            graphplan.partition(model, args=(X,), plan=tmp_path / "none.json")
        with pytest.raises(graphplan.InputError, match="must be a graphplan"):
            graphplan.partition(model, args=(X,), plan=3)
        with pytest.raises(graphplan.PlanError, match="of 1 example calls, not of 2"):
            graphplan.partition(model, plan=made, calls=[((X,), {}), ((torch.randn(5, 64),), {})])


@pytest.mark.slow
def test_several_calls_and_slices() -> None:
    model = stack()
    examples = [((X,), {}), ((torch.randn(64, 64),), {})]
    with graphplan.simulate({0: "40KiB", 1: "120KiB", "cpu": "1MiB"}) as machine:
        made = graphplan.plan(model, machine.max_memory, calls=examples, weights=[3.0, 1.0])
        placed = graphplan.partition(model, plan=made, calls=examples, weights=[3.0, 1.0])
        assert [one.schedule for one in placed.plans] == [one.schedule for one in made.calls]
        for (x,), _ in examples:
            torch.testing.assert_close(placed(x), model(x))
    large = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 16)).eval()
    x = torch.randn(2, 16)
    with graphplan.simulate({0: "24KiB", "cpu": "1MiB"}) as machine:
        made = graphplan.plan(large, machine.max_memory, (x,), cpu_compute=False)
        assert made.parts
        placed = graphplan.partition(large, args=(x,), plan=made)
        assert placed.plan.parts == made.parts
        torch.testing.assert_close(placed(x), large(x))


def test_unpickled_module_does_not_need_the_given_plan() -> None:
    model = stack()
    with graphplan.simulate(BUDGETS["two devices"]) as machine:
        made = graphplan.plan(model, machine.max_memory, (X,))
        placed = graphplan.partition(model, args=(X,), plan=made)
        larger = torch.randn(4, 64)
        torch.testing.assert_close(placed(larger), model(larger))
        assert len(placed.plans) == 2
        assert placed.plans[1].placement == made.placement
        assert replace(made, makespan=0.0) != made


@pytest.mark.parametrize("there", [0, 4096])
def test_workspaces_may_differ_from_those_planned(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.ReLU()).eval(), torch.randn(2, 4, 8)
    measure = Interpreter._measure

    def taking(nbytes: int) -> None:
        def measured(*args: Any) -> dict[str, Effect]:
            effects = measure(*args)
            return {
                kind: replace(one, workspace=dict.fromkeys(one.workspace, nbytes))
                for kind, one in effects.items()
            }

        monkeypatch.setattr(Interpreter, "_measure", measured)

    taking(there)
    plan = graphplan.plan(model, {"cpu": "1MiB"}, (x,))
    taking(4096 - there)
    placed = graphplan.partition(model, args=(x,), plan=plan)
    assert torch.equal(placed(x), model(x))
    assert {one.workspace_on("cpu") for one in placed.plan.graph.operations.values()} == {4096}
    with pytest.raises(graphplan.PlanError, match="max_memory leaves"):
        graphplan.partition(model, {"cpu": 4096}, (x,), plan=plan)


def test_plan_for_real_devices_raises_on_simulated_ones() -> None:
    plan = graphplan.plan(stack(), {0: "1MiB"}, (X,))
    with (
        graphplan.simulate({0: "1MiB"}),
        pytest.raises(
            graphplan.DeviceError, match=r"cuda:0.* is not here.*make plans to carry out there too$"
        ),
    ):
        graphplan.partition(stack(), args=(X,), plan=plan)
