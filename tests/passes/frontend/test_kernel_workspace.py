"""Workspaces of kernels on GPUs, measured once for each distinct operation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import graphplan
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
    """A bench on which convolutions need a fixed workspace; it counts its requests."""

    def __init__(self) -> None:
        super().__init__(Topology(()))
        self.asked: list[Any] = []

    def workspace(self, target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, results: int) -> int:
        self.asked.append(target)
        return HIDDEN if target is aten.conv1d.default else 0


def test_graph_has_measured_workspaces() -> None:
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
    """A bench on which each kernel allocates its results and ``HIDDEN`` bytes; the CPU stands in for it."""
    steps = itertools.accumulate(itertools.cycle((0, 2048 + HIDDEN)))
    monkeypatch.setattr(kernel_workspace._Kernels, "_allocated", lambda _: next(steps))
    monkeypatch.setattr(torch.random, "fork_rng", lambda *_, **__: nullcontext())
    made = KernelBench(Topology(()))
    made._room = {CPU: 1 << 20}
    monkeypatch.setattr(made, "_left", made._room.get)
    return made


def measured(bench: KernelBench, target: Any, *args: Any) -> int:
    leaves, spec = pytree.tree_flatten((args, {}))
    metas = [describe(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    results = sum(leaf.copy_bytes for leaf in metas if isinstance(leaf, TensorMeta))
    return bench.workspace(target, metas, spec, results)


def test_results_do_not_count_as_workspace(bench: KernelBench) -> None:
    assert measured(bench, aten.cumsum.default, torch.ones(4, 128), 1) == HIDDEN


def test_intermediate_tensors_count_as_workspace_while_alive(bench: KernelBench) -> None:
    # two of its three kernels make temporaries of 2048 bytes; one of them lives while the other is made
    linear, square = torch.ones(4, 128), torch.ones(128, 128)
    assert measured(bench, aten.linear.default, linear, square) == HIDDEN
    assert measured(bench, aten.glu.default, torch.ones(4, 256)) == HIDDEN
    assert measured(bench, aten.cosine_similarity.default, linear, linear) > 2048 + HIDDEN


def test_large_or_value_dependent_operations_are_not_run(bench: KernelBench) -> None:
    assert measured(bench, aten.multinomial.default, torch.ones(4, 128), 1) == 0
    assert measured(bench, aten.bmm.default, torch.ones(2, 3), torch.ones(2, 3)) == 0  # it fails there too
    assert measured(bench, aten.index_select.default, torch.ones(0, 3), 0, torch.zeros(1).long()) == 0
    bench._room[CPU] = 100
    assert measured(bench, aten.cumsum.default, torch.ones(4, 128), 1) == 0


def test_out_of_memory_during_measurement_warns(bench: KernelBench, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kernel_workspace, "_zeros", full)
    with pytest.warns(graphplan.GraphplanWarning, match="aten.cumsum.* no memory is free .*give a reserve"):
        assert measured(bench, aten.cumsum.default, torch.ones(4, 128), 1) == 0


@torch.library.custom_op("graphplan_tests::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("it is the caller's, and was not asked to run")


def test_custom_operations_are_not_run(bench: KernelBench) -> None:
    assert measured(bench, torch.ops.graphplan_tests.noted.default, torch.ones(4, 128)) == 0


def test_one_gpu_of_each_type_is_measured(monkeypatch: Any) -> None:
    names = ["H200", "H200", "T4", "T4"]
    answers = {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 4,
        "get_device_name": lambda card: names[card.index],
        "memory_allocated": lambda _: 1000,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)

    def warm(card: torch.device) -> None:
        if card.index == 2:
            raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(kernel_workspace, "_warm", warm)
    card = DeviceSpec(0, "cuda:1", 1 << 20, 1e12, 1e11, 4e-6)
    specs = [
        replace(card, key=index, device=f"cuda:{index}", memory=index << 20) for index in (1, 0, 2, 3, 7)
    ]
    with pytest.warns(graphplan.GraphplanWarning, match="device 2 .*full.*give a reserve"):
        made = KernelBench(Topology((*specs, replace(card, key="cpu", device="cpu"))))
    assert made._room == {torch.device("cuda", 1): 1 << 20, torch.device("cuda", 3): 3 << 20}


def test_without_gpu_nothing_is_measured() -> None:
    assert measured(KernelBench(Topology(())), aten.cumsum.default, torch.ones(4, 128), 1) == 0
