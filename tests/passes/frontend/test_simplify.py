from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import run_placed
from torch import nn

from graphplan import partition, simulate
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.tracing import capture
from graphplan.passes.frontend.simplify import simplify


def calls(model: nn.Module, *args: Any, keep_grad: bool = False) -> list[str]:
    model_copy = ModelCopy(model.eval())
    found = capture(model_copy, model_copy.bind(args, {}), keep_grad=keep_grad)
    simplify(found, keep_grad=keep_grad)
    names = {}
    lines = []
    for node in found.graph.nodes:
        if node.op == "call_function":
            names[node] = f"%{len(lines)}"
            arguments = [names.get(a, getattr(a, "name", a)) for a in node.args]
            lines.append(f"{getattr(node.target, '__name__', node.target)}({', '.join(map(str, arguments))})")
    return lines


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32).contiguous()[:, :].expand(2, 4).reshape(2, 4)
        y = nn.functional.dropout(y, 0.5, self.training)
        y = torch.dropout(torch.dropout(y, 0.5, self.training), p=0.0, train=True)
        unused = y * 3  # noqa: F841  # what is tested
        return y.to(x.device) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_no_ops_checks_and_dead_code_are_removed() -> None:
    assert calls(Noise(), torch.randn(2, 4)) == ["add.Tensor(x, c_lifted_tensor_0)"]


class Casts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float64).to(torch.float32, copy=True)


def test_casts_and_true_copies_stay() -> None:
    assert [line.partition("(")[0] for line in calls(Casts(), torch.randn(2))] == ["to.dtype", "to.dtype"]


class Steps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        y.mul_(3)
        return y + x


def test_states_of_a_mutated_value_have_their_own_names() -> None:
    assert calls(Steps(), torch.randn(2)) == [
        "mul.Tensor(x, 2)",
        "add_.Tensor(%0, 1)",
        "mul_.Tensor(%1, 3)",
        "add.Tensor(%2, x)",
    ]


class Scratch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tensor([1.0, 2.0])
        y.add_(x)
        return y


def test_written_constant_is_copied_in_each_call() -> None:
    assert calls(Scratch(), torch.randn(2))[0] == "clone.default(c_lifted_tensor_0)"


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = torch.tensor([1.0, 2.0, 3.0])
        sums[0] += x.sum()
        return x * sums


def test_constant_written_through_view_is_restored_in_each_call() -> None:
    model, x = Sums(), torch.randn(2, 3)
    with simulate({0: "1MiB"}):
        placed = partition(model, {0: "1MiB"}, (x,))
        for _ in range(3):
            torch.testing.assert_close(placed(x), model(x))


class Sparse(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to_sparse(), x * torch.tensor([1.0, 2.0])


@pytest.mark.filterwarnings("ignore:Sparse. its sizes cannot vary:graphplan.GraphplanWarning")
def test_sparse_result_with_constant() -> None:
    assert calls(Sparse(), torch.randn(2, 2))[-1] == "mul.Tensor(x, c_lifted_tensor_0)"


class Detached(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.detach()


def test_detach_is_kept_with_keep_grad() -> None:
    assert len(calls(Detached(), torch.randn(2))) == 1
    assert len(calls(Detached(), torch.randn(2), keep_grad=True)) == 2


def test_views_may_copy_where_another_device_has_other_strides() -> None:
    # the trace, on the CPU, has no contiguous(): attention's result is dense there after the transpose
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.query(x).view(2, 9, 4, 8).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return mixed.transpose(1, 2).contiguous().view(2, 9, 32)

    model, x = Attends().eval(), torch.randn(2, 9, 32)
    with simulate({0: 1 << 20}) as machine:
        placed = partition(model, {0: 1 << 20}, args=(x,))
        assert torch.allclose(run_placed(machine, placed, (x,)), model(x), atol=1e-6)


class Overwrites(nn.Module):
    """Of a slice that is a copy; of a slice that has been moved, and is dense there, it was a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense, flat = x.contiguous(), x.t().reshape(-1)
        dense.add_(1)
        flat.mul_(2)
        return self.linear(x) + dense + flat.view(16, 4).t()


def test_written_copies_are_explicit_on_every_device() -> None:
    found = calls(Overwrites(), torch.ones(4, 32)[:, ::2])
    assert [text.partition(".")[0] for text in found[:4]] == ["clone", "t", "clone", "reshape"]
    model, whole = Overwrites().eval(), torch.ones(4, 32)
    with torch.no_grad(), simulate({0: 1 << 14}) as machine:
        placed = partition(model, machine.max_memory, (whole[:, ::2],))
        assert torch.allclose(placed(whole[:, ::2]), model(whole[:, ::2]), atol=1e-6)
        assert torch.equal(whole, torch.ones(4, 32))


class Strides(nn.Module):
    """Reads beside a part of a tensor that it has conjugated, and conjugates another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x + 1)
        return (z[:, ::2].conj().as_strided((2, 4), (8, 1)) * (z[:2, :4] * 2).conj()).real


def test_conjugates_whose_memory_is_read_stay_views() -> None:
    model, x = Strides(), torch.randn(4, 8)
    found = calls(model, x)
    assert sum(text.startswith("_conj.") for text in found) == 1
    assert sum(text.startswith("conj_physical.") for text in found) == 1
    with torch.no_grad():
        placed = partition(model, {"cpu": "1GiB"}, (x,))
        torch.testing.assert_close(placed(x), model(x))
