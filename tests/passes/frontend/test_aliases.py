"""Operations that writes tie to one device, and placed models that see every write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference, run_placed
from cases import in_turn
from test_annotate import graph_of
from torch import nn
from transformers import DynamicCache

import graphplan
from graphplan import Graph, Operation, Value
from graphplan.passes.frontend.aliases import find_together


class InPlaceChain(nn.Module):
    """Only results are read after each write: nothing needs to stay together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for layer in self.layers:
            x += layer(x)
            x.relu_()
        return x


class OldView(nn.Module):
    """A view taken before a write is read after it, across layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        first = y[0]
        z = self.b(y)
        y.mul_(2)
        return self.c(z) + first


class WriteThrough(nn.Module):
    """The base is read after a write through its view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        view = y.view(-1)
        z = self.b(y)
        view[:8] = 0
        return self.c(z + y)


class Cached(nn.Module):
    """A cache that the caller owns is updated in place by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor, caches: list[torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            cache.index_copy_(0, at, layer(x))
            x = x + cache.sum(0)
        return x


class Counter(nn.Module):
    """Buffers that a call writes to, one of them through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("history", torch.zeros(4, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = self.a(x)
        self.history[0].copy_(y[0])
        return self.b(y) + self.history.sum(0) + self.calls


def inputs_of(model: nn.Module) -> tuple[Any, ...]:
    x = torch.randn(3, 64)
    if isinstance(model, Cached):
        return x, [torch.zeros(8, 64) for _ in model.layers], torch.tensor([2, 3, 4])
    return (x,)


def test_writes_read_only_through_results_colocate_nothing() -> None:
    assert graph_of(InPlaceChain(), torch.randn(3, 64)).together == ()


@pytest.mark.parametrize("model", [OldView(), WriteThrough()])
def test_read_through_alias_after_write_colocates_operations(model: nn.Module) -> None:
    (group,) = graph_of(model, torch.randn(3, 64)).together
    assert any("mul_" in name or "fill_" in name or "copy_" in name for name in group)
    assert "add" in group  # which reads the older name
    assert "linear_1" not in group  # which reads it before the write


def test_as_strided_is_colocated_with_producer_of_storage() -> None:
    made, view = Operation("made", "f", ("x",), ("made",)), Operation("view", "t", ("made",), ("view",))
    values = [Value("x", 64), Value("made", 64), Value("view", 0, alias_of="made"), Value("window", 64)]
    for source, groups in (("view", [{"made", "window"}]), ("made", [])):  # a copy of all has its strides
        window = Operation("window", "as_strided", (source,), ("window",))
        graph = Graph([made, view, window], values, inputs=("x",), outputs=("window",))
        assert find_together(graph, ()) == groups


def test_cache_colocates_only_its_own_layer() -> None:
    model = Cached()
    graph = graph_of(model, *inputs_of(model))
    assert len(graph.together) == 4
    assert len(graph.changed_inputs) == 4


@pytest.mark.parametrize(
    ("model", "budgets"),
    in_turn(
        [InPlaceChain, OldView, WriteThrough, Cached, Counter],
        [{0: 0.62, 1: 0.62}, {0: 0.62, "cpu": 4.0}, {0: 0.62, 1: 0.62, "cpu": 4.0}],
    ),
)
def test_placed_models_see_every_write(model: type[nn.Module], budgets: dict[Any, float]) -> None:
    original = model()
    inputs = inputs_of(original)
    ours, theirs = (torch.utils._pytree.tree_map(torch.clone, inputs) for _ in range(2))
    size = bytes_of(original)
    with graphplan.simulate({k: int(v * size) + 8192 for k, v in budgets.items()}) as machine:
        placed = graphplan.partition(original, machine.max_memory, args=inputs)
        assert len({stage.device for stage in placed.plan.stages}) > 1 or placed.plan.streams
        for _ in range(3):
            result = run_placed(machine, placed, ours)
            assert largest_difference(result, original(*theirs)) < 1e-5
            assert largest_difference(ours, theirs) < 1e-5
        buffers = {name: tensor.cpu() for name, tensor in placed.named_buffers()}
        assert largest_difference(buffers, dict(original.named_buffers())) < 1e-5


class TrainedNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def test_batch_norm_updates_its_buffers_in_train_mode() -> None:
    original = TrainedNorms().train()
    x = torch.randn(8, 64)
    size = bytes_of(original)
    with graphplan.simulate({0: int(0.7 * size) + 16384, 1: int(0.7 * size) + 16384}) as machine:
        placed = graphplan.partition(original, machine.max_memory, args=(x,))
        untouched = {n: b.clone() for n, b in original.named_buffers()}
        for _ in range(2):
            run_placed(machine, placed, (x,))
        assert largest_difference(dict(original.named_buffers()), untouched) == 0  # the caller's own
        original(x), original(x)
        assert (
            largest_difference(
                {n: b.cpu() for n, b in placed.named_buffers()}, dict(original.named_buffers())
            )
            < 1e-5
        )
        assert int(placed.body[0][1].num_batches_tracked) == 2
        placed.eval()
        assert largest_difference(placed(x), original.eval()(x)) < 1e-5


def test_written_cpu_buffer_is_copied_from_caller() -> None:
    original = Counter()
    placed = graphplan.partition(original, {"cpu": "1GiB"}, args=(torch.randn(3, 64),))
    placed(torch.randn(3, 64))
    assert int(original.calls) == 0
    assert int(placed.calls) == 1
    assert placed.a.weight.data_ptr() == original.a.weight.data_ptr()  # read only, so shared


class WritesToResult(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = x * 2
        view = a.view(-1)
        view += a.mean()
        return (view.view(64, 24) * 1 + torch.arange(24, device=x.device) * 0.01) * 3, a


@pytest.mark.parametrize("budget", range(13_000, 19_000, 1_000))
def test_result_written_through_view_is_not_stale(budget: int) -> None:
    model, x = WritesToResult(), torch.randn(64, 24)
    with graphplan.simulate({0: budget, "cpu": 1 << 20}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (x,))
        assert largest_difference(placed(x), model(x)) < 1e-5


class WritesToNewCache(nn.Module):
    """The tensor of a cache is written to through a view, and not read again."""

    def forward(self, x: torch.Tensor) -> DynamicCache:
        keys, cache = x * 2, DynamicCache()
        cache.update(keys, keys + 1, 0)
        cache.layers[0].keys = keys
        keys[:, :, :1] = x[:, :, 1:2]
        return cache


def test_returned_cache_tensor_colocates_its_writers() -> None:
    graph = graph_of(WritesToNewCache(), torch.randn(1, 2, 3, 4))
    (group,) = [group for group in graph.together if "copy_" in group]
    assert "mul" in group  # on whose device the cache is returned
