"""Uses that a planned training step refuses, with the remedy in the error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shortcuts import short_search
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphplan

ROOMY = 1 << 32
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def placed(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    with short_search():
        return graphplan.partition(model, {"cpu": ROOMY}, (X,), **options)


def penalty(model: nn.Module) -> torch.Tensor:
    """Of the gradient of the input, as a critic of a Wasserstein GAN has it."""
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum()


def test_gradient_penalty_raises() -> None:
    with pytest.raises(RuntimeError, match=r"no second derivatives.*grad=True instead of train=True"):
        penalty(placed(train=True))
    penalty(placed(grad=True)).backward()


@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.parametrize("options", [{}, {"train": True}], ids=str)
def test_torch_func_transforms_require_grad_option(options: dict[str, Any], rows: int) -> None:
    model = placed(**options)
    with pytest.raises(graphplan.GraphplanError, match=r"torch\.func.*grad=True(?! or)") as caught:
        torch.func.grad(lambda x: model(x).sum())(X[:rows])
    assert "give partition train=True" not in str(caught.value)


@pytest.mark.usefixtures("group_of_one")
def test_data_parallel_replicas_raise() -> None:
    replica = DistributedDataParallel(placed(train=True))
    with pytest.raises(graphplan.PlanError, match="grad=True instead of train=True"):
        replica(X)
    with torch.no_grad():
        replica(X)
    replica = DistributedDataParallel(placed(grad=True))
    replica(X).sum().backward()


def test_zero_grad_without_none_raises_if_not_accumulating() -> None:
    model = placed(train=True, accumulate_gradients=False)
    model(X).sum().backward()
    model.zero_grad(set_to_none=False)
    with pytest.raises(graphplan.PlanError, match="without set_to_none=False"):
        model(X)


def test_larger_training_batch_raises_with_remedy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    size = graphplan.plan(model, {0: ROOMY}, (X,), train=True).peak_bytes[0]
    with graphplan.simulate({0: size, "cpu": ROOMY}):
        model = graphplan.partition(model, {0: size}, (X,), train=True)
        with pytest.raises(
            graphplan.InfeasibleError, match="give partition max_batch and max_length"
        ) as caught:
            model(X.repeat(1000, 1))
        assert "calls=" not in str(caught.value)


def test_slow_larger_training_batch_warns_with_remedy() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8))), torch.randn(8, 128)
    size = graphplan.plan(model, {0: ROOMY}, (x,), train=True).peak_bytes[0]
    with graphplan.simulate({0: size}):
        model = graphplan.partition(model, {0: size, "cpu": ROOMY}, (x,), train=True)
        with pytest.warns(graphplan.GraphplanWarning, match="an example of this call, on the same device$"):
            model(x.repeat(4000, 1))
