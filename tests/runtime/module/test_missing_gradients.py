"""A call that expects gradients from a module placed without them warns; other calls do not."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import graphplan

CPU = {"cpu": "1GiB"}
X = torch.ones(2, 8)


class Scored(nn.Module):
    """A model that returns a loss if it is called with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(x)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


INPUTS: dict[str, Any] = {"x": X, "labels": torch.tensor([0, 1])}


def quiet(placed: nn.Module, **inputs: Any) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found: dict[str, torch.Tensor] = placed(**inputs)
    return found


def test_loss_in_training_mode_warns() -> None:
    placed = graphplan.partition(Scored(), CPU, kwargs=INPUTS)
    with pytest.warns(
        graphplan.GraphplanWarning, match=r"returns a loss: backward\(\) will fail.*train=True"
    ):
        loss = placed(**INPUTS)["loss"]
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
    quiet(placed, **INPUTS)  # once


def test_loss_of_a_later_structure_warns() -> None:
    placed = graphplan.partition(Scored(), CPU, kwargs={"x": X})
    quiet(placed, x=X)
    with pytest.warns(graphplan.GraphplanWarning, match="returns a loss"):
        placed(**INPUTS)


@pytest.mark.filterwarnings("ignore:.*has no example inputs")
@pytest.mark.parametrize("late", [False, True])
def test_call_after_train_warns(late: bool) -> None:
    placed = graphplan.partition(Scored().eval(), CPU, **({} if late else {"kwargs": {"x": X}}))
    assert placed.train() is placed
    assert placed.head.training
    with pytest.warns(graphplan.GraphplanWarning, match=r"train\(\) was called"):
        placed(x=X)


def test_input_that_requires_gradients_warns() -> None:
    placed = graphplan.partition(Scored().eval(), CPU, kwargs={"x": X})
    with pytest.warns(graphplan.GraphplanWarning, match="an input requires them"):
        placed(x=X.clone().requires_grad_())
    quiet(placed, x=X.clone().requires_grad_())


def test_invalid_call_without_graph_raises_without_gradient_warning() -> None:
    class ByValue(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.detach().numpy().sum() > 0)

    with pytest.warns(graphplan.GraphplanWarning, match="module by module"):
        placed: Any = graphplan.partition(ByValue(8, 8), CPU, (X,))
    for dimensions in range(3, 7):  # calls of new structures, until none is traced any more
        placed(X.view(*[1] * (dimensions - 2), 2, 8))
    assert placed._graphplan.untraced.tries == 0
    x = X.clone().requires_grad_()
    with pytest.raises(graphplan.InputError, match="do not fit"):
        quiet(placed, x=x, y=x)
    with pytest.warns(graphplan.GraphplanWarning, match="an input requires them"):
        placed(x)


def test_inference_calls_do_not_warn() -> None:
    placed = graphplan.partition(Scored(), CPU, kwargs={"x": X})
    quiet(placed, x=X)  # a new module is in training mode
    placed.train().eval()
    quiet(placed, **INPUTS)
    placed.train()
    with torch.no_grad():
        quiet(placed, **INPUTS)
    frozen = graphplan.partition(Scored().requires_grad_(False), CPU, kwargs=INPUTS)
    quiet(frozen.train(), **INPUTS)


def steps(placed: nn.Module, head: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for _ in range(count):
        head(placed(x=X)["logits"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("training", [True, False])
def test_step_over_parameters_without_gradients_warns_once(training: bool) -> None:
    placed, head = graphplan.partition(Scored().train(training), CPU, kwargs={"x": X}), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*placed.parameters(), *head.parameters()], lr=0.1)
    with pytest.warns(graphplan.GraphplanWarning, match="of Scored, and changes none.*train=True") as caught:
        steps(placed, head, optimizer)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_step_after_another_optimizer_warns() -> None:
    placed, head = graphplan.partition(Scored(), CPU, kwargs={"x": X}), nn.Linear(4, 1)
    own = torch.optim.SGD(placed.parameters(), lr=0.1)
    head(placed(x=X)["logits"]).sum().backward()
    torch.optim.SGD(head.parameters(), lr=0.1).step()
    with pytest.warns(graphplan.GraphplanWarning, match="changes none"):
        own.step()


def test_steps_that_need_no_gradients_do_not_warn() -> None:
    placed, head = graphplan.partition(Scored(), CPU, kwargs={"x": X}), nn.Linear(4, 1)
    both = torch.optim.SGD([*placed.parameters(), *head.parameters()], lr=0.1)
    trained = graphplan.partition(Scored(), CPU, kwargs={"x": X}, grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            placed(x=X)
        both.step()
        placed(x=X)
        placed.head.weight.square().sum().backward()  # a penalty
        both.step()
        steps(placed, head, torch.optim.SGD(head.parameters(), lr=0.1))  # a reference model
        steps(placed.requires_grad_(False), head, both)
        steps(trained, head, torch.optim.SGD([*trained.parameters(), *head.parameters()], lr=0.1))


def test_called_model_is_freed() -> None:
    placed = graphplan.partition(Scored(), CPU, kwargs={"x": X})
    placed(x=X)
    reference = weakref.ref(placed)
    del placed
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("how", ["grad", "train"])
def test_model_with_gradients_does_not_warn(how: str) -> None:
    placed = graphplan.partition(Scored(), CPU, kwargs=INPUTS, **{how: True})
    quiet(placed.train(), **INPUTS)["loss"].backward()
    assert placed.head.weight.grad is not None


def test_torch_func_transforms_raise() -> None:
    placed = graphplan.partition(Scored().eval(), CPU, kwargs={"x": X})
    with pytest.raises(graphplan.PlanError, match=r"torch\.func would take them for zero: give partition"):
        torch.func.grad(lambda x: placed(x=x)["logits"].sum())(X)


def jvp_of(model: nn.Module) -> None:
    torch.func.jvp(lambda x: model(x=x)["logits"], (X,), (X,))


def forward_mode(model: nn.Module) -> None:
    with torch.autograd.forward_ad.dual_level():
        model(x=torch.autograd.forward_ad.make_dual(X, X))


@pytest.mark.parametrize("use", [jvp_of, forward_mode])
def test_training_step_raises_for_other_gradients(use: Any) -> None:
    placed = graphplan.partition(Scored(), CPU, kwargs={"x": X}, train=True)
    with pytest.raises(graphplan.PlanError, match="grad=True instead of train=True"):
        use(placed)
    with torch.autograd.forward_ad.dual_level():  # nothing of the model has a tangent
        assert placed(x=X)["logits"].requires_grad
