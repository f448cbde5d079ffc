"""Assignments to the ``data`` of weights: graphs write them if nothing else owns the assigned tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from builders import largest_difference
from torch import nn

import graphplan

Forward = Callable[["Assigning", torch.Tensor], torch.Tensor]
X = torch.randn(8, 16)


class Assigning(nn.Module):
    def __init__(self, body: Forward) -> None:
        super().__init__()
        self.linear, self.other, self.body = nn.Linear(16, 16), nn.Linear(16, 16), body
        self.register_buffer("mean", torch.zeros(16))
        self.plain = torch.zeros(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


def renorm(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    model.linear.weight.data = torch.renorm(model.linear.weight.data, 2, 0, 0.5)
    return model.linear(x)


def itself(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    weight = model.linear.weight.data
    weight.clamp_(-0.1, 0.1)
    model.linear.weight.data = weight
    return model.linear(x)


def twice(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    model.mean.data = x.mean(0)
    y = x + model.mean
    model.mean.data = y.mean(0)
    return model.linear(x) + model.mean


def after_a_read(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    y = model.linear(x)
    model.linear.weight.data = model.linear.weight.data * 0.9
    return y


def of_another_weight(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    model.linear.weight.data = model.other.weight.data
    return model.linear(x)


def of_an_activation(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.data = x + 1
    return model.linear(y)


def of_an_input(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    model.mean.data = x[0]
    return model.linear(x) + model.mean


def of_another_shape(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    model.mean.data = x * 2
    return model.linear(x) + model.mean


def of_an_attribute(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    model.plain.data = x.mean(0)
    return model.linear(x) + model.plain


def written_where_it_was_made(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(0)
    model.mean.data = mean
    mean += 1
    return model.linear(x) + model.mean


def written_where_it_is(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(0)
    model.mean.data = mean
    model.mean += 1
    return model.linear(x) + mean


def read_where_it_was(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    before = model.mean[:8]
    model.mean.data = x.mean(0)
    return model.linear(x) + before.sum()


def assigned_again(model: Assigning, x: torch.Tensor) -> torch.Tensor:
    before = model.linear.weight.data
    model.linear.weight.data = before * 0.5
    y = model.linear(x)
    model.linear.weight.data = before
    return y


@pytest.mark.parametrize("options", [{}, {"grad": True}, {"train": True}], ids=str)
@pytest.mark.parametrize("body", [renorm, itself, twice, after_a_read])
def test_weights_are_written(body: Forward, options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    eager = Assigning(body)
    placed = graphplan.partition(copy.deepcopy(eager), {"cpu": "1GiB"}, (X,), strict=True, **options)
    for _ in range(2):
        x = torch.randn(8, 16)
        expected, found = eager(x), placed(x)
        assert largest_difference(found, expected) < 1e-6
        if options:
            expected.sum().backward()
            found.sum().backward()
            assert largest_difference(placed.linear.weight.grad, eager.linear.weight.grad) < 1e-5
    for name, value in eager.state_dict().items():
        assert torch.equal(placed.state_dict()[name], value)


@pytest.mark.parametrize(
    "body", [of_another_weight, of_an_activation, of_an_input, of_another_shape, of_an_attribute]
)
def test_assigned_data_with_another_owner_raises(body: Forward) -> None:
    with pytest.raises(graphplan.CaptureError, match=r"assigns the \.data of a tensor"):
        graphplan.plan(Assigning(body), {"cpu": "1GiB"}, (X,))


@pytest.mark.parametrize("body", [written_where_it_was_made, written_where_it_is])
def test_write_after_data_assignment_raises(body: Forward) -> None:
    with pytest.raises(graphplan.CaptureError, match="writes to it afterwards"):
        graphplan.plan(Assigning(body), {"cpu": "1GiB"}, (X,))


@pytest.mark.parametrize("body", [read_where_it_was, assigned_again])
def test_read_of_previous_data_raises(body: Forward) -> None:
    with pytest.raises(graphplan.CaptureError, match="reads its previous memory"):
        graphplan.plan(Assigning(body), {"cpu": "1GiB"}, (X,))
