"""What kernels take beside their results on cards: measured once for each distinct operation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.tracing import capture
from graphplan.devices.topology import DeviceSpec, Topology
from graphplan.passes.frontend import kernel_workspace
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.kernel_workspace import KernelBench
from graphplan.passes.frontend.simplify import simplify
from graphplan.passes.frontend.tensor_meta import TensorMeta, describe

HIDDEN = 4096
CPU = torch.device("cpu")
aten = torch.ops.aten


class Told(KernelBench):
    """Convolutions take so much; counts what it was asked."""

    def __init__(self) -> None:
        super().__init__(Topology(()))
        self.asked: list[Any] = []

    def workspace(self, target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, results: int) -> int:
        self.asked.append(target)
        return HIDDEN if target is aten.conv1d.default else 0


def test_the_graph_has_what_was_measured() -> None:
    model = nn.Sequential(*(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3)), nn.ReLU()).eval()
    model_copy, bench = ModelCopy(model), Told()
    made = capture(model_copy, model_copy.bind((torch.ones(2, 4, 8),), {}))
    simplify(made)
    graph = Annotator(made, model_copy.weights, ("cpu", "cuda"), bench).graph()
    taken = {name: one.workspace_on("cuda") for name, one in graph.operations.items()}
    assert [nbytes for name, nbytes in taken.items() if name.startswith("conv")] == [HIDDEN] * 3
    assert taken["relu"] == 0
    assert all(one.workspace_on("cpu") == 0 for one in graph.operations.values())
    assert bench.asked.count(aten.conv1d.default) == 1  # the three are alike


@pytest.fixture
def bench(monkeypatch: Any) -> KernelBench:
    """Of a card on which each kernel takes its results and ``HIDDEN`` bytes; the CPU stands in for it."""
    steps = itertools.accumulate(itertools.cycle((0, 2048 + HIDDEN)))
    monkeypatch.setattr(kernel_workspace._Kernels, "_allocated", lambda _: next(steps))
    made = KernelBench(Topology((DeviceSpec(0, "cuda:0", 1 << 20, 1e12, 1e11, 4e-6),)))
    made._before = {CPU: 0}
    monkeypatch.setattr(made, "_left", lambda _: 1 << 20)
    return made


def measured(bench: KernelBench, target: Any, *args: Any) -> int:
    leaves, spec = pytree.tree_flatten((args, {}))
    metas = [describe(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    results = sum(leaf.copy_bytes for leaf in metas if isinstance(leaf, TensorMeta))
    return bench.workspace(target, metas, spec, results)


def test_results_are_no_workspace(bench: KernelBench) -> None:
    assert measured(bench, aten.cumsum.default, torch.ones(4, 128), 1) == HIDDEN


def test_what_an_operation_is_made_of_counts_while_it_lives(bench: KernelBench) -> None:
    # the square, 2048 bytes, lives while its sum is made
    assert measured(bench, aten.mse_loss.default, torch.ones(4, 128), torch.ones(4, 128), 0) >= HIDDEN


def test_what_has_no_room_or_may_refuse_zeros_is_not_run(bench: KernelBench, monkeypatch: Any) -> None:
    assert measured(bench, aten.multinomial.default, torch.ones(4, 128), 1) == 0
    assert measured(bench, aten.bmm.default, torch.ones(2, 3), torch.ones(2, 3)) == 0  # it fails there too
    monkeypatch.setattr(bench, "_left", lambda _: 100)
    assert measured(bench, aten.cumsum.default, torch.ones(4, 128), 1) == 0


def test_without_a_card_nothing_is_measured() -> None:
    assert measured(KernelBench(Topology(())), aten.cumsum.default, torch.ones(4, 128), 1) == 0
