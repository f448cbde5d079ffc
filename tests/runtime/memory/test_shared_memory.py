"""Models whose tensors share memory or are sparse equal eager mode."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import nn

import graphplan

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
BUDGETS: list[dict[Any, Any]] = [
    {"cpu": "1MiB"},
    {0: "1MiB"},
    {0: "1MiB", 1: "1MiB"},
    {0: 2600, "cpu": "1MiB"},
]


class Views(nn.Module):
    """Writes to a buffer, and reads a part of it under another name; or the other way round."""

    def __init__(self, registered: bool, writes_part: bool) -> None:
        super().__init__()
        self.writes_part, self.linear = writes_part, nn.Linear(16, 16)
        self.register_buffer("table", torch.zeros(4, 16))
        if registered:
            self.register_buffer("row", self.table[1])
        else:
            self.row = self.table[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes_part:
            self.row.add_(1)
            return self.linear(x) + self.table
        self.table.add_(1)
        return self.linear(x) + self.row


def reloaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("budgets", BUDGETS, ids=str)
@pytest.mark.parametrize("writes_part", [True, False])
@pytest.mark.parametrize("registered", [True, False])
def test_views_of_a_written_buffer_run_module_by_module(
    registered: bool, writes_part: bool, budgets: dict[Any, Any]
) -> None:
    model = Views(registered, writes_part)
    eager, other = copy.deepcopy(model), copy.deepcopy(model)
    with graphplan.simulate({0: "8MiB", 1: "8MiB", "cpu": "8MiB"}), torch.no_grad():
        with pytest.warns(
            graphplan.GraphplanWarning, match=r"writes to .*shares memory with .*\n.*runs module by module"
        ):
            placed = graphplan.partition(model, budgets, (X,))
        first = copy.deepcopy(placed), reloaded(placed)  # what pickle alone writes has no views, in eager too
        for _ in range(3):
            assert largest_difference(placed(X), eager(X)) < 1e-6
        for again in first:
            fresh = copy.deepcopy(other)
            for _ in range(3):
                assert largest_difference(again(X), fresh(X)) < 1e-6
    with pytest.raises(graphplan.NoGraphError, match="shares memory"):
        graphplan.plan(model, budgets, (X,))


def test_later_write_to_a_shared_buffer_raises() -> None:
    class Later(Views):
        def forward(self, x: torch.Tensor, write: bool = False) -> torch.Tensor:
            return super().forward(x) if write else self.linear(x) + self.row

    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(Later(True, False), machine.max_memory, (X,))
        with pytest.raises(graphplan.CaptureError, match="writes to 'table', which shares memory with 'row'"):
            placed(X, write=True)


class Parts(nn.Module):
    """Two names of one tensor, until one or both are assigned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(16, 16), kind
        self.register_buffer("now", torch.ones(16))
        self.register_buffer("first", self.now if kind != "of a parameter" else self.linear.bias.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x) + self.first
        self.first = h.detach().mean(0)
        if self.kind == "other values":
            self.now = self.first + 1
        return h + self.now


@pytest.mark.parametrize("kind", ["one", "other values", "of a parameter"])
@torch.no_grad()
def test_assigned_shared_buffer_runs_module_by_module(kind: str) -> None:
    model = Parts(kind)
    eager = copy.deepcopy(model)
    with pytest.warns(graphplan.GraphplanWarning, match=r"are one buffer until .*\n.*runs module by module"):
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    for _ in range(3):
        assert largest_difference(placed(X), eager(X)) < 1e-5


class Sparse(nn.Module):
    def __init__(self, layout: str, parameter: bool) -> None:
        super().__init__()
        dense = (torch.rand(16, 16, generator=torch.Generator().manual_seed(3)) > 0.7).float()
        found = getattr(dense, layout)()
        if parameter:
            self.adjacency = nn.Parameter(found, requires_grad=False)
        else:
            self.register_buffer("adjacency", found)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sparse.mm(self.adjacency, self.first(x).t()).t())


_EACH_ANEW = "its sizes cannot vary"


@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_weights(layout: str, parameter: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR")
        model = Sparse(layout, parameter)
    with torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match=_EACH_ANEW):
            placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
        assert largest_difference(placed(X), model(X)) < 1e-6
        with graphplan.simulate({0: "1MiB"}):
            with (
                pytest.warns(graphplan.GraphplanWarning, match="'adjacency' stay on the CPU"),
                pytest.warns(graphplan.GraphplanWarning, match=_EACH_ANEW),
            ):
                placed = graphplan.partition(model, {0: "1MiB", "cpu:0": "1MiB"}, (X,))
            with pytest.warns(graphplan.GraphplanWarning):
                planned = graphplan.plan(model, {0: "1MiB", "cpu:0": "1MiB"}, (X,))
            assert planned.placement == placed.plan.placement
            assert placed.plan.placement["adjacency"] == "cpu:0"
            assert placed.plan.placement["first.weight"] == 0
            assert largest_difference(placed(X), model(X)) < 1e-6
        for function in (graphplan.partition, graphplan.plan):
            with graphplan.simulate({0: "1MiB"}), pytest.raises(graphplan.DeviceError, match="sparse"):
                function(model, {0: "1MiB"}, (X,))
