"""Weights move if they leave no room for a later call."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from contextvars import copy_context
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from faults import refuse
from language_models import build, inputs_of
from torch import nn

import graphplan
from graphplan.capture.model.model_weights import is_wrapper
from graphplan.compiler.pipeline import Compiler
from graphplan.passes.placement import driver, infeasible

MOVED = "so weights are moved"


def layers(width: int = 64, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))).eval()


def spare(model: nn.Module, rows: int = 16) -> int:
    """A budget for the weights and a few rows."""
    return bytes_of(model) + 3 * 4 * 64 * rows


def same(model: nn.Module, placed: Any, *rows: int) -> None:
    for count in rows:
        x = torch.randn(count, 64)
        with torch.no_grad():
            assert largest_difference(placed(x), model(x)) < 1e-5


def test_a_call_without_room_moves_weights_once() -> None:
    model = layers()
    with graphplan.simulate({0: spare(model), "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),), cpu_compute=False)
        assert set(placed.plan.placement.values()) == {0}
        with torch.no_grad():  # what weights hold now is what moves
            for part in (model, placed):
                part[2][0].weight.mul_(2)
        machine.reset_peaks()
        with pytest.warns(graphplan.GraphplanWarning, match=MOVED):
            same(model, placed, 100)
        assert "cpu" in placed.plan.placement.values()
        same(model, placed, 4, 100, 128)
        assert machine.peak_bytes(0) <= machine.max_memory[0]
        assert isinstance(placed[0][0].weight, nn.Parameter)


def test_two_parameters_over_one_memory_move_as_one_weight() -> None:
    model = layers()
    model[2][0].weight = nn.Parameter(model[0][0].weight.data)
    with graphplan.simulate({0: spare(model), "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),), cpu_compute=False)
        with pytest.warns(graphplan.GraphplanWarning, match=MOVED):
            same(model, placed, 128)
        with torch.no_grad():
            for part in (model, placed):
                part[0][0].weight.mul_(2)
        same(model, placed, 4, 128)
        assert torch.equal(placed[2][0].weight.cpu(), model[2][0].weight)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_move_releases_its_inputs() -> None:
    model = layers()
    with torch.no_grad(), graphplan.simulate({0: spare(model), "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),), cpu_compute=False)
        x = torch.randn(100, 64)
        gone = weakref.ref(x)
        placed(x)
        del x
        gc.collect()
        assert "cpu" in placed.plan.placement.values()
        assert gone() is None


def test_interrupted_move_is_retried() -> None:
    model = layers()
    with graphplan.simulate({0: spare(model), "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),), cpu_compute=False)
        state = placed._graphplan
        find = state.move

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        state.move = interrupted
        with pytest.raises(KeyboardInterrupt):
            placed(torch.randn(100, 64))
        assert state.move is interrupted
        state.move = find
        with pytest.warns(graphplan.GraphplanWarning, match=MOVED):
            same(model, placed, 100)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_move_out_of_memory_loses_nothing_and_is_retried() -> None:
    """Each allocation of a move and of its call fails, one in each call."""
    model, x, at, hit = layers(), torch.randn(100, 64), 0, True
    with graphplan.simulate({0: spare(model), "cpu": "1GiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),), cpu_compute=False)
        while hit:
            at += 1
            hit, problem = refuse(machine, at, lambda: placed(x))
            assert problem is None
            for name, weight in placed.state_dict().items():
                assert torch.equal(weight.cpu(), model.state_dict()[name])
        assert at > 3
        gc.collect()
        machine.reset_peaks()
        same(model, placed, 100, 4)
        assert "cpu" in placed.plan.placement.values()
        assert machine.peak_bytes(0) <= machine.max_memory[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_move_waits_for_calls_of_other_threads() -> None:
    model, inside, go_on = layers(), threading.Event(), threading.Event()
    order: list[str] = []
    with graphplan.simulate({0: spare(model), "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),), cpu_compute=False)

        def call() -> None:
            with placed._graphplan.run_lock:
                inside.set()
                assert go_on.wait(60)
                assert set(placed.plan.placement.values()) == {0}
                order.append("call")

        def move() -> None:
            same(model, placed, 100)
            order.append("move")

        threads = [threading.Thread(target=copy_context().run, args=(one,)) for one in (call, move)]
        threads[0].start()
        assert inside.wait(60)
        threads[1].start()
        threads[1].join(3)  # until it waits
        go_on.set()
        for thread in threads:
            thread.join(60)
        assert order == ["call", "move"]
        assert "cpu" in placed.plan.placement.values()


def test_weights_move_between_accelerators() -> None:
    model = layers()
    with graphplan.simulate({0: spare(model), 1: spare(model)}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),), pin={"0": 0})
        with pytest.warns(graphplan.GraphplanWarning, match=MOVED):
            same(model, placed, 80)
        assert placed.plan.placement["0.0.weight"] == 0
        assert set(placed.plan.placement.values()) == {0, 1}


class ListsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.rnn, self.out = nn.Linear(64, 256), nn.GRU(64, 64, batch_first=True), nn.Linear(64, 64)
        self.listed = [self.out.weight]
        vars(self.up)["bare"] = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.rnn(x[:, None])[0][:, 0] @ self.listed[0] @ vars(self.up)["bare"]
        return y + torch.relu(self.up(x)).sum(1, keepdim=True) + self.out(x)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_weights_in_module_lists_move_too() -> None:
    """Recurrent layers keep weights in lists; those left behind would hold memory of their device."""
    model = ListsWeights().eval()
    with graphplan.simulate({0: spare(model), "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(1, 64),), cpu_compute=False)
        assert set(placed.plan.placement.values()) == {0}
        same(model, placed, 1, 16, 1)
        assert "cpu" in placed.plan.placement.values()
        assert placed.listed[0] is vars(placed.up)["bare"] is placed.out.weight
        same(model, graphplan.unplace(placed), 1)


def test_infeasible_sizes_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, searched = layers(), list[int]()
    own = Compiler._place

    def counted(compiler: Compiler, members: Any, limits: Any) -> Any:
        searched.append(max(members[0].annotator.capture.sizes.values()))
        return own(compiler, members, limits)

    monkeypatch.setattr(Compiler, "_place", counted)
    with graphplan.simulate({0: bytes_of(model) + 12_000}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),))
        same(model, placed, *range(17, 20))
    assert searched == [4, 32, 21, 17, 18, 19]


class Text(nn.Module):
    """Reads token ids; has a method of which no call is planned at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids))

    def score(self, input_ids: torch.Tensor) -> torch.Tensor:
        return 2 * self.head(self.embed(input_ids))


def test_scarce_room_is_kept_for_length_not_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, searched = Text().eval(), list[list[int]]()
    own = Compiler._place

    def counted(compiler: Compiler, members: Any, limits: Any) -> Any:
        (leaf,) = members[0].annotator.capture.signature.leaves
        searched.append([most for _, most in leaf.ranges])
        return own(compiler, members, limits)

    monkeypatch.setattr(Compiler, "_place", counted)
    with graphplan.simulate({0: bytes_of(model) + 650_000}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, args=(torch.ones(2, 4, dtype=torch.long),))
        for length in (100, 101, 125):
            ids = torch.ones(10, length, dtype=torch.long)
            assert largest_difference(placed.score(ids), model.score(ids)) < 1e-5
    assert searched == [[2, 4], [10, 128], [10, 125]]


def test_infeasible_call_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sought = layers(), list[bool]()

    def smallest_budgets(*given: Any, closely: bool) -> Any:
        sought.append(closely)
        return infeasible.smallest_budgets(*given, closely=closely)

    monkeypatch.setattr(driver, "smallest_budgets", smallest_budgets)
    with graphplan.simulate({0: spare(model)}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),))
        homes = [weight.data_ptr() for weight in placed.parameters()]
        for _ in range(2):
            with pytest.raises(graphplan.InfeasibleError, match=r"inputs \(.* \(4000, 64\)\).*calls="):
                placed(torch.randn(4000, 64))
            same(model, placed, 4, 8)
        assert homes == [weight.data_ptr() for weight in placed.parameters()]
    assert sought.count(True) == 2  # by bisection for the errors that are read alone


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_infeasible_call_does_not_block_later_moves() -> None:
    model = layers()
    with graphplan.simulate({0: spare(model), "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(torch.randn(4, 64),), cpu_compute=False)
        with pytest.raises(graphplan.InfeasibleError):
            placed(torch.randn(4000, 64))
        same(model, placed, 100)
        assert "cpu" in placed.plan.placement.values()
        with pytest.raises(graphplan.InfeasibleError):
            placed(torch.randn(4000, 64))
        same(model, placed, 4, 100)


@pytest.mark.parametrize("kept", ["grad", "plan"])
def test_weights_fixed_by_plan_or_autograd_do_not_move(kept: str) -> None:
    model, example = layers(), (torch.randn(4, 64),)
    with graphplan.simulate({0: 2 * spare(model)}) as machine:
        plan = graphplan.plan(model, machine.max_memory, example)
        options: dict[str, Any] = {"plan": plan} if kept == "plan" else {"grad": True}
        placed = graphplan.partition(model, machine.max_memory, example, **options)
        assert placed._graphplan.move is None


def test_copies_and_threads_run_during_a_move() -> None:
    model = layers()
    with graphplan.simulate({0: 3 * spare(model)}):
        budgets = {0: spare(model), "cpu": "1GiB"}
        placed = graphplan.partition(model, budgets, args=(torch.randn(4, 64),), cpu_compute=False)
        other = copy.deepcopy(placed)
        failed, done = list[BaseException](), threading.Event()

        def call() -> None:
            try:
                while not done.wait(0.01):  # between calls, for the one that moves
                    same(model, placed, 4)
            except BaseException as error:  # reported below
                failed.append(error)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            with pytest.warns(graphplan.GraphplanWarning, match=MOVED):
                same(model, placed, 100)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not failed
        assert {weight.device.type for weight in other.parameters()} == {"sim"}
        same(model, other, 4)


@pytest.mark.slow
def test_a_long_text_moves_weights_with_room_to_grow() -> None:
    model, inputs = build("gpt2"), inputs_of("gpt2", 1, 8)
    with graphplan.simulate({0: bytes_of(model) + 24_000, "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        with pytest.warns(graphplan.GraphplanWarning, match=MOVED) as said:
            found = placed.generate(**inputs, max_new_tokens=300, do_sample=False)
        assert torch.equal(found, model.generate(**inputs, max_new_tokens=300, do_sample=False))
        assert sum(MOVED in str(one.message) for one in said) <= 3  # the room doubles: 80, 160, 320 tokens
        assert machine.peak_bytes(0) <= machine.max_memory[0]


def test_a_simulated_tensor_wraps_nothing() -> None:
    with graphplan.simulate({0: 1 << 20}):
        assert not is_wrapper(torch.zeros(4, device="sim:0"))
