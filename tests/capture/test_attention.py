"""Attention of training steps, as one operation in each direction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from builders import largest_difference
from cases import in_turn
from torch import nn
from torch.nn import functional

import graphplan
from graphplan.ir.graph import Graph


class Attention(nn.Module):
    """Attention with options of its caller; queries are scaled by a parameter."""

    def __init__(self, sizes: Sequence[int] = (), **options: Any) -> None:
        super().__init__()
        self.scale, self.options = nn.Parameter(torch.tensor(1.5, dtype=torch.float64)), options
        self.bias = nn.Parameter(torch.randn(sizes, dtype=torch.float64)) if sizes else None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        mask = self.bias if mask is None else mask
        found = functional.scaled_dot_product_attention(query * self.scale, key, value, mask, **self.options)
        return found.sin().mean()


def heads(*shapes: Sequence[int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


DROPS = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.Sigmoid()).double()
SAME = [(2, 4, 6, 8)] * 3
CASES: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {
    "plain": ({}, heads(*SAME)),
    "causal": ({"is_causal": True}, heads(*SAME)),
    "scaled": ({"scale": 0.3}, heads(*SAME)),
    "bool mask": ({}, [*heads(*SAME), torch.ones(6, 6, dtype=torch.bool).tril()]),
    "float mask": ({}, [*heads(*SAME), torch.randn(2, 1, 6, 6, dtype=torch.float64)]),
    "fewer heads": ({"enable_gqa": True}, heads((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))),
    "other lengths": ({}, heads((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8))),
    "wider values": ({}, heads((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 12))),
    "one head": ({}, heads((2, 6, 8), (2, 6, 8), (2, 6, 8))),
    "two batches": ({}, heads(*[(2, 3, 4, 6, 8)] * 3)),
    "without a batch": ({}, heads(*[(6, 8)] * 3)),
    "one batch of queries": ({}, heads((1, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8))),
    "one head of queries": ({}, heads((2, 1, 6, 8), (2, 4, 6, 8), (1, 4, 6, 8))),
    "queries without a batch": ({}, heads((6, 8), (2, 4, 6, 8), (2, 4, 6, 8))),
    "fewer heads, one batch": (
        {"enable_gqa": True},
        heads((1, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
    ),
    "heads side by side": ({}, [t.transpose(1, 2).detach().requires_grad_() for t in heads(*SAME)]),
}


def step(model: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The result, and the gradients of the parameter and of the inputs."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
    result = model(*inputs)
    result.backward()
    return [result, *(p.grad for p in model.parameters()), *(t.grad for t in inputs)]


@pytest.mark.parametrize(("name", "simulated"), in_turn(CASES, [False, True]))
def test_results_and_gradients_are_those_of_eager(name: str, simulated: bool) -> None:
    options, given = CASES[name]
    model = Attention(**options)
    expected = step(copy.deepcopy(model), given)
    with graphplan.simulate({0: "1MiB"}) as machine:
        budgets = machine.max_memory if simulated else {"cpu": "1GiB"}
        placed = graphplan.partition(model, budgets, tuple(given), train=True)
        for found, one in zip(step(placed, given), expected, strict=True):
            assert (found is None) == (one is None)
            if found is not None and one is not None:
                assert largest_difference(found.cpu(), one) < 1e-9
        kinds = [operation.type for operation in placed.plan.graph.operations.values()]
        assert kinds.count("scaled_dot_product_attention") == 1
        assert kinds.count("scaled_dot_product_attention_backward") == 1
        if simulated:
            assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


def require_steps_of_eager(model: nn.Module, given: Sequence[torch.Tensor], atol: float) -> None:
    placed = graphplan.partition(copy.deepcopy(model), {"cpu": "1GiB"}, tuple(given), train=True)
    torch.manual_seed(1)
    expected = step(model, given)
    torch.manual_seed(1)
    for found, one in zip(step(placed, given), expected, strict=True):
        assert (found is None) == (one is None)
        if found is not None and one is not None:
            assert largest_difference(found, one) <= atol


@pytest.mark.parametrize("name", CASES)
def test_attention_with_dropout_draws_as_in_eager_mode(name: str) -> None:
    options, given = CASES[name]
    require_steps_of_eager(Attention(dropout_p=0.3, **options), given, 1e-9)


class Dropped(nn.Module):
    """Dropout of a transformed input."""

    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.transform = nn.Parameter(torch.tensor(1.5)), transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.transform(x * self.scale), 0.1).square().sum()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": torch.sin,
    "transposed": lambda x: x.transpose(1, 3),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "bfloat16": lambda x: x.bfloat16(),
    "float16": lambda x: x.half(),
    "one number": torch.sum,
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_draws_as_in_eager_mode(layout: str) -> None:
    torch.manual_seed(0)
    require_steps_of_eager(Dropped(LAYOUTS[layout]), [torch.randn(2, 4, 5, 6)], 1e-4)


def test_encoder_layer_draws_as_in_eager_mode() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(0), nn.Linear(2 * 5 * 16, 1), nn.Flatten(0))
    require_steps_of_eager(model, [torch.randn(2, 5, 16)], 1e-4)


def graph_of(model: nn.Module, given: Sequence[torch.Tensor]) -> Graph:
    # outside of a simulation, device 0 is a GPU
    return graphplan.plan(model, {0: "8GiB"}, tuple(given), train=True).graph


def test_saved_attention_tensors_are_linear_in_length() -> None:
    made = {length: graph_of(Attention(), heads(*[(1, 2, length, 16)] * 3)) for length in (128, 1024)}
    largest = {length: max(v.nbytes for v in graph.values.values()) for length, graph in made.items()}
    assert largest[1024] == 8 * largest[128]


@pytest.mark.parametrize("model", [Attention(dropout_p=0.1), Attention((6, 6))])
def test_dropout_and_trained_masks_are_written_out(model: nn.Module) -> None:
    kinds = {operation.type for operation in graph_of(model, heads(*SAME)).operations.values()}
    assert "_safe_softmax" in kinds
    assert not any("attention" in kind for kind in kinds)


@pytest.mark.parametrize("model", [Attention(dropout_p=0.1), DROPS])
def test_saved_dropout_masks_have_one_byte_an_element(model: nn.Module) -> None:
    given = heads(*SAME) if isinstance(model, Attention) else heads((32, 32))
    graph = graph_of(model, given)
    backward = [operation for operation in graph.operations.values() if operation.backward]
    read = {graph.root(name) for operation in backward for name in operation.inputs}
    masks = [value for value in graph.values.values() if value.name in read and value.dtype == "bool"]
    assert any(value.nbytes for value in masks)
    drawn = [op for op in graph.operations.values() if "bernoulli" in op.type]
    assert {graph.values[name].dtype for op in drawn for name in op.outputs} == {"bool"}


def test_backward_attention_flops_include_recomputed_forward() -> None:
    operations = graph_of(Attention(), heads(*SAME)).operations.values()
    flops = {op.type: op.flops for op in operations if "attention" in op.type}
    product = 2 * 2 * 4 * 6 * 6 * 8
    assert flops["scaled_dot_product_attention"] == 2 * product
    assert flops["scaled_dot_product_attention_backward"] == 7 * product
