"""Training resumed from a checkpoint: the optimizer has state before the model is placed."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import graphplan
from graphplan.runtime.module.training.optimizer_states import move_optimizer_states

ROOMY = 1 << 32
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """The losses."""
    found = []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def checkpoint(make: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts of a model and its optimizer after some steps in eager mode."""
    model = fresh()
    optimizer = make(model.parameters())
    train(model, optimizer)
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def now(options: dict[str, Any]) -> nn.Module:
    return graphplan.partition(fresh(), {0: ROOMY}, (X,), **options)


def copied(options: dict[str, Any]) -> nn.Module:
    return copy.deepcopy(now(options))


def at_first_call(options: dict[str, Any]) -> nn.Module:
    return graphplan.partition(fresh(), {0: ROOMY}, **options)


def unpickled(options: dict[str, Any]) -> nn.Module:
    return pickle.loads(pickle.dumps(now(options)))  # type: ignore[no-any-return]


def assigned(options: dict[str, Any]) -> nn.Module:
    placed = now(options)
    placed.load_state_dict(fresh().state_dict(), assign=True)
    return placed


MAKERS: dict[str, Optimizer] = {
    "adamw": ADAMW,
    "fused": functools.partial(ADAMW, fused=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}
PLACES = (at_first_call, unpickled, assigned)
OPTIONS = ({"train": True}, {"grad": True})
RESUMED = [  # every other one, the rest under -m slow
    pytest.param(
        MAKERS[name],
        place,
        options,
        marks=[pytest.mark.slow] * ((one + two + three) % 2),
        id=f"{name}-{place.__name__}-{options}",
    )
    for one, name in enumerate(MAKERS)
    for two, place in enumerate(PLACES)
    for three, options in enumerate(OPTIONS)
]


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.parametrize(("make", "place", "options"), RESUMED)
def test_optimizer_state_moves_with_the_parameters(
    make: Optimizer, place: Callable[[dict[str, Any]], nn.Module], options: dict[str, Any]
) -> None:
    weights, state = checkpoint(make)

    def resumed(model: nn.Module) -> list[float]:
        model.load_state_dict(weights)
        optimizer = make(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(state))
        losses = train(model, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors = {k: v for k, v in optimizer.state[parameter].items() if torch.is_tensor(v)}
                beside = {k for k, v in tensors.items() if v.device == parameter.device}
                assert {k for k, v in tensors.items() if v.dim()} <= beside
                assert parameter.device.type == "cpu" or ("step" in beside) == bool(group.get("fused"))
        return losses

    expected = resumed(fresh())
    with graphplan.simulate({0: ROOMY}):
        assert resumed(place(options)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("place", [now, copied, at_first_call])
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_a_trainer_puts_the_state_on_the_cpu(place: Callable[[dict[str, Any]], nn.Module]) -> None:
    weights, state = checkpoint(ADAMW)

    def resumed(model: nn.Module) -> list[float]:
        model.load_state_dict(weights)
        optimizer = ADAMW(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(state))
        for tensors in optimizer.state.values():  # as lightning does, by its strategy's device
            tensors.update({name: tensor.to("cpu") for name, tensor in tensors.items()})
        return train(model, optimizer)

    expected = resumed(fresh())
    with graphplan.simulate({0: ROOMY}):
        assert resumed(place({"train": True})) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("where", ["cpu", "sim:0"])
@pytest.mark.parametrize(
    "make", [functools.partial(ADAMW, foreach=True), torch.optim.ASGD, torch.optim.NAdam]
)
def test_trainer_puts_state_on_one_of_two_devices(make: Optimizer, where: str) -> None:
    # the step counts stayed there: torch accepts them on the CPU, or on the device of the parameters
    weights, state = checkpoint(make)

    def resumed(model: nn.Module, device: str) -> list[float]:
        model.load_state_dict(weights)
        optimizer = make(model.parameters())
        optimizer.load_state_dict(copy.deepcopy(state))
        for tensors in optimizer.state.values():
            tensors.update({name: tensor.to(device) for name, tensor in tensors.items()})
        losses = train(model, optimizer)
        for parameter, tensors in optimizer.state.items():
            others = {name: tensor.device for name, tensor in tensors.items() if name != "step"}
            assert set(others.values()) == {parameter.device}
            assert tensors["step"].device == torch.device("cpu")
        return losses

    expected = resumed(fresh(), "cpu")
    with graphplan.simulate({0: ROOMY, 1: ROOMY}):
        placed = graphplan.partition(fresh(), {0: "9KiB", 1: "9KiB"}, (X,), train=True)
        assert {str(parameter.device) for parameter in placed.parameters()} == {"sim:0", "sim:1"}
        assert resumed(placed, where) == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*first call:graphplan.GraphplanWarning")
def test_state_of_other_optimizers_is_not_moved() -> None:
    """An optimizer of parameters that are not placed, with state on a device of its own choice."""
    with graphplan.simulate({0: ROOMY}):
        placed = at_first_call({"train": True})
        parameter = nn.Parameter(torch.zeros(4))
        other = torch.optim.SGD([parameter])
        other.state[parameter]["elsewhere"] = torch.zeros(4, device="sim:0")
        train(placed, ADAMW(placed.parameters()))
        parameter.grad = torch.ones(4)
        other.step()
        assert other.state[parameter]["elsewhere"].device == torch.device("sim:0")


class Joined(nn.Linear):
    """Another thread places a model while an optimizer asks for the parameters of this one."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        thread = Thread(target=move_optimizer_states, args=(nn.Identity(),))
        thread.start()
        thread.join()
        return super().parameters(recurse)


def test_models_can_be_placed_while_others_train() -> None:
    model = Joined(4, 4)
    optimizer = torch.optim.SGD([model.weight])
    move_optimizer_states(model)
    optimizer.step()  # "Set changed size during iteration"
