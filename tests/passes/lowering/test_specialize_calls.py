"""Lowered code calls builtins that are equivalent to the traced overloads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import graphplan
from graphplan.passes.lowering.specialize_calls import BUILTINS, METHODS, specialize_calls

aten = torch.ops.aten
A, B = torch.rand(2, 3, 4) + 0.1, torch.rand(2, 3, 4) + 0.1
SQUARE, INTS, FLAGS = torch.rand(3, 3), torch.tensor([[1, 0], [2, 1]]), torch.rand(2, 3, 4) > 0.5
IMAGE, KERNEL = torch.rand(1, 4, 6, 6), torch.rand(2, 4, 3, 3)
STATS = (torch.rand(4), torch.rand(4), torch.zeros(4), torch.ones(4))

_UNARY = (
    "abs ceil clone cos erf exp floor log logical_not neg reciprocal relu rsqrt sigmoid sin sqrt "
    "square tanh hardswish silu elu hardtanh leaky_relu softplus argmax "
)
SAMPLES: dict[Any, list[tuple[Any, ...]]] = {
    **{getattr(aten, name).default: [(A,)] for name in _UNARY.split()},
    **{getattr(aten, name).default: [(A, B)] for name in ("maximum", "minimum", "logical_and", "logical_or")},
    **{getattr(aten, n).Tensor: [(A, B), (A, 2), (A, 0.5)] for n in ["add", "sub", "mul", "div"]},
    **{getattr(aten, name).Tensor: [(A, B)] for name in ["le", "lt", "ge", "gt", "eq", "ne"]},
    **{getattr(aten, name).Scalar: [(A, 1), (A, 0.5)] for name in ["le", "lt", "ge", "gt", "eq", "ne"]},
    aten.bitwise_and.Tensor: [(FLAGS, FLAGS)],
    aten.bitwise_or.Tensor: [(FLAGS, FLAGS)],
    aten.bitwise_not.default: [(FLAGS,)],
    aten.addmm.default: [(SQUARE, SQUARE, SQUARE)],
    aten.baddbmm.default: [(torch.rand(2, 3, 3), A, B.transpose(1, 2))],
    aten.batch_norm.default: [
        (IMAGE, *STATS, False, 0.1, 1e-5, True),
        (IMAGE, *STATS, True, 0.1, 1e-5, False),
    ],
    aten.bmm.default: [(A, B.transpose(1, 2))],
    aten.cat.default: [([A, B],), ([A, B], -1)],
    aten.stack.default: [([A, B],), ([A, B], 1)],
    aten.chunk.default: [(A, 2), (A, 2, -1)],
    aten.clamp.default: [(A, 0.2), (A, None, 0.8), (A, 0.2, 0.8)],
    aten.conv1d.default: [(A, torch.rand(5, 3, 2)), (A, torch.rand(5, 3, 2), None, [2], [1])],
    aten.conv2d.default: [(IMAGE, KERNEL), (IMAGE, KERNEL, torch.rand(2), [2, 2], [1, 1], [1, 1], 1)],
    aten.cumsum.default: [(A, 1)],
    aten.dropout.default: [(A, 0.5, True), (A, 0.5, False)],
    aten.embedding.default: [(SQUARE, INTS), (SQUARE, INTS, 0), (SQUARE, INTS, -1, False, False)],
    aten.flatten.using_ints: [(A,), (A, 1), (A, 0, 1)],
    aten.gather.default: [(SQUARE, 1, INTS)],
    aten.group_norm.default: [(IMAGE, 2), (IMAGE, 2, *STATS[:2], 1e-6)],
    aten.index_select.default: [(A, 1, torch.tensor([0, 2]))],
    aten.layer_norm.default: [(A, [4]), (A, [4], *STATS[:2], 1e-6), (A, [4], None, None, 1e-5)],
    aten.rms_norm.default: [(A, [4]), (A, [4], STATS[0], 1e-6)],
    aten.log_softmax.int: [(A, -1), (A, 1, torch.float64)],
    aten.softmax.int: [(A, -1), (A, 1, torch.float64)],
    aten.masked_fill.Scalar: [(A, FLAGS, -1), (A, FLAGS, 0.5)],
    aten.masked_fill.Tensor: [(A, FLAGS, torch.tensor(2.0))],
    aten.matmul.default: [(A, B.transpose(1, 2)), (A, STATS[0])],
    aten.max_pool2d.default: [(IMAGE, [2, 2]), (IMAGE, [3, 3], [2, 2], [1, 1])],
    aten.avg_pool2d.default: [(IMAGE, [2, 2]), (IMAGE, [3, 3], [2, 2], [1, 1], False, True)],
    aten.adaptive_avg_pool2d.default: [(IMAGE, [1, 1])],
    aten.mean.dim: [(A, [-1]), (A, [-1], True), (A, [0, 1])],
    aten.sum.dim_IntList: [(A, [-1]), (A, [-1], True)],
    aten.mm.default: [(SQUARE, SQUARE)],
    aten.pow.Tensor_Scalar: [(A, 2), (A, 0.5)],
    aten.pow.Tensor_Tensor: [(A, B)],
    aten.select.int: [(A, 1, 0), (A, -1, -1)],
    aten.split_with_sizes.default: [(A, [1, 2], 1)],
    aten.squeeze.dim: [(A[:1], 0), (A, 0)],
    aten.transpose.int: [(A, 1, 2), (A, 0, -1)],
    aten.tril.default: [(SQUARE,), (SQUARE, 1)],
    aten.triu.default: [(SQUARE,), (SQUARE, 1)],
    aten.unbind.int: [(A,), (A, 1)],
    aten.unsqueeze.default: [(A, 0), (A, -1)],
    aten.where.self: [(FLAGS, A, B)],
    aten.linear.default: [(A, torch.rand(5, 4)), (A, torch.rand(5, 4), torch.rand(5))],
    aten.gelu.default: [(A,), (A, {"approximate": "tanh"})],
    aten.scaled_dot_product_attention.default: [
        (A, B, B),
        (A, B, B, None, 0.0, True),
        (A, A, A, {"scale": 0.5}),
    ],
    aten.view.default: [(A, [6, 4]), (A, [2, -1])],
    aten.reshape.default: [(A, [6, 4]), (A, [-1])],
    aten.expand.default: [(A[:1], [2, 3, 4]), (A[:1], [5, -1, 3, 4])],
    aten.permute.default: [(A, [0, 2, 1])],
}
SAMPLES[aten.add.Tensor].append((A, B, {"alpha": 2}))
SAMPLES[aten.div.Tensor].append((A, SQUARE[0, 0]))


class Recorder(TorchDispatchMode):
    """Records the dispatched operators, and all arguments that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        self.calls.append((func, [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in leaves]))
        return func(*args, **(kwargs or {}))


def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    copies = pytree.tree_map_only(torch.Tensor, torch.clone, args)
    with torch.no_grad(), Recorder() as recorder:
        return function(*copies, **kwargs), recorder.calls


def graph_of(target: Any, sample: tuple[Any, ...]) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph that makes this call, on placeholders for its tensors."""
    graph, tensors = fx.Graph(), []
    kwargs = sample[-1] if isinstance(sample[-1], dict) else {}

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = leaf
        return node

    args = pytree.tree_map(place, tuple(a for a in sample if not isinstance(a, dict)))
    graph.output(graph.call_function(target, args, kwargs))
    specialize_calls(graph)
    return fx.GraphModule(nn.Module(), graph), tensors


def test_every_replacement_has_a_sample() -> None:
    assert set(SAMPLES) == {*BUILTINS, *METHODS}


@pytest.mark.parametrize("target", [*BUILTINS, *METHODS], ids=str)
def test_replacements_dispatch_to_the_same_operation(target: Any) -> None:
    for sample in SAMPLES[target]:
        kwargs = sample[-1] if isinstance(sample[-1], dict) else {}
        args = tuple(a for a in sample if not isinstance(a, dict))
        module, tensors = graph_of(target, sample)
        (call,) = [n for n in module.graph.nodes if n.op.startswith("call")]
        assert not isinstance(call.target, torch._ops.OpOverload)
        expected, before = run(target, args, kwargs)
        result, after = run(module.forward, tuple(tensors), {})
        assert after == before
        assert largest_difference(pytree.tree_leaves(result), pytree.tree_leaves(expected)) == 0


class Views(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a, b = x[:, 1:3].unsqueeze(1), y.transpose(0, 1)
        return (a * b + (a + b)).reshape(-1, 2).to(torch.float64)


def lines(model: nn.Module, *args: Any, **options: Any) -> list[str]:
    placed = graphplan.partition(model.eval(), {"cpu": "1GiB"}, args, **options)
    code = placed.code.split("):\n", 1)[1]
    return [line.partition(";")[0].strip() for line in code.splitlines() if line.strip()]


def test_the_code_of_a_model() -> None:
    assert lines(Views(), torch.rand(4, 4), torch.rand(2, 4)) == [
        "slice_2 = x.narrow(1, 1, 2)",
        "unsqueeze = torch.unsqueeze(slice_2, 1)",
        "transpose = torch.transpose(y, 0, 1)",
        "mul = torch.mul(unsqueeze, transpose)",
        "add = torch.add(unsqueeze, transpose)",
        "add_1 = torch.add(mul, add)",
        "reshape = add_1.reshape(-1, 2)",
        "to = reshape.to(torch.float64)",
        "return (to,)",
    ]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.slice.Tensor, (0, 1, 9)),  # past the end: narrow would refuse
        (aten.slice.Tensor, (0, -2, None)),
        (aten.slice.Tensor, (0, 0, 2, 2)),
        (aten.mean.dim, (None,)),
        (aten.to.dtype, (torch.float64, False, True)),
    ],
)
def test_unusual_arguments(target: Any, args: tuple[Any, ...]) -> None:
    module, tensors = graph_of(target, (SQUARE, *args))
    assert torch.equal(module(*tensors), target(SQUARE, *args))


def test_slices_unsupported_by_narrow_are_unchanged() -> None:
    module, _ = graph_of(aten.slice.Tensor, (SQUARE, 0, 1, 9))
    assert "aten.slice" in module.code


def test_comparison_with_number_is_unchanged() -> None:
    module, _ = graph_of(aten.le.Tensor, (SQUARE, 2))
    assert "aten.le" in module.code


def test_call_with_leading_number_is_unchanged() -> None:
    graph = fx.Graph()
    size = graph.placeholder("size")
    size.meta["val"] = 3
    graph.output(graph.call_function(aten.add.Tensor, (size, 1)))
    specialize_calls(graph)
    assert any(node.target is aten.add.Tensor for node in graph.nodes)
