"""Gradients on the CPU of weights that an accelerator trains."""

from __future__ import annotations

import gc

import pytest
import torch
from builders import largest_difference
from torch import nn

import graphplan
from graphplan.runtime.memory.gradient_copies import GradientCopies


def test_buffer_is_reused_once_the_gradient_is_freed() -> None:
    copies, parameter = GradientCopies(), nn.Parameter(torch.zeros(3, 5).t())
    addresses = []
    for value in range(3):
        parameter.grad = copies.copied(torch.full((5, 3), float(value)), parameter)
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.eq(value).all()
        addresses.append(parameter.grad.data_ptr())
        parameter.grad = None
    assert len(set(addresses)) == 1
    parameter.grad = copies.copied(torch.ones(5, 3), parameter)
    kept, parameter.grad = parameter.grad[1:], None  # a view has the memory, too
    parameter.grad = copies.copied(torch.full((5, 3), 2.0), parameter)
    assert kept.eq(1).all()
    assert parameter.grad.eq(2).all()


def test_shared_memory_gradient_buffer_is_not_reused() -> None:
    copies, parameter = GradientCopies(), nn.Parameter(torch.zeros(4))
    parameter.grad = copies.copied(torch.ones(4), parameter).share_memory_()  # as a queue does
    address = parameter.grad.data_ptr()
    parameter.grad = None
    assert copies.copied(torch.ones(4), parameter).data_ptr() != address


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_gradients_of_one_and_zero_elements(shape: tuple[int, ...]) -> None:
    copies, parameter = GradientCopies(), nn.Parameter(torch.zeros(shape))
    for _ in range(2):
        parameter.grad = copies.copied(torch.ones(shape), parameter)
        assert copies.copied(torch.ones(shape), parameter).equal(torch.ones(shape))
        assert parameter.grad.equal(torch.ones(shape))
        parameter.grad = None


def test_input_gradients_alone_allocate_no_weight_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    x = torch.randn(16, 64, requires_grad=True)
    with graphplan.simulate({0: "140KiB", "cpu": "8MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), train=True)
        copies = placed._graphplan.gradients
        torch.autograd.grad(placed(x).sum(), x)
        assert len(copies._first) == 0
        placed(x).sum().backward()
        assert len(copies._first) > 0


def test_accumulated_gradients_share_one_buffer() -> None:
    copies = GradientCopies()
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in SIZES]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    addresses = set()
    for value, parameter in enumerate((*parameters, *parameters)):
        found = copies.copied(torch.full_like(parameter, value), parameter)
        assert found.eq(value).all()
        addresses.add(found.data_ptr())
        del found
    assert len(addresses) == 2  # of the first, and of a larger one


SIZES = ((7, torch.bfloat16), (5, torch.float32), (3, torch.float16))


def test_buffer_is_freed_with_its_parameter() -> None:
    copies, parameter = GradientCopies(), nn.Parameter(torch.zeros(4))
    parameter.grad = copies.copied(torch.ones(4), parameter)
    assert len(copies._first) == 1
    del parameter
    gc.collect()
    assert len(copies._first) == 0


def test_cpu_weights_accumulate_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    x = torch.randn(16, 64)
    with graphplan.simulate({0: "140KiB", "cpu": "8MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), train=True)
        assert {p.device.type for p in placed.parameters()} == {"cpu", "sim"}
        held = []
        for turn in range(4):
            for each in (placed, model):
                if turn != 1:  # the second adds up
                    each.zero_grad(set_to_none=True)
                each(x * (1 + turn)).square().mean().backward()
            gradients = [p.grad.cpu().clone() for p in placed.parameters() if p.grad is not None]
            expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            assert largest_difference(gradients, expected) < 1e-6
            pairs = zip((p.grad for p in placed.parameters()), expected, strict=True)
            held.append(
                [(found, one) for found, one in pairs if found is not None and found.device.type == "cpu"]
            )
        for found, one in (*held[1], *held[2]):  # those that the caller has are its own
            assert largest_difference(found, one) < 1e-6
