"""Memory reserved for CUDA and PyTorch, on mocked GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import KIB, largest_difference
from torch import nn

import graphplan
from graphplan.api.plan_options import PlanOptions
from graphplan.devices.max_memory import read_max_memory

MIB = 1 << 20
FREE = 1024 * MIB
DRIVER = 448 * MIB
LT = MIB  # the workspace of cuBLASLt


@pytest.fixture
def card(monkeypatch: Any) -> Any:
    """A GPU with 1 GiB free, 5 MiB of which PyTorch has in its cache."""
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda _: "some card",
        "mem_get_info": lambda _: (FREE - 5 * MIB, 2 * FREE),
        "memory_reserved": lambda _: 7 * MIB,
        "memory_allocated": lambda _: 2 * MIB,
        "get_device_capability": lambda _: (9, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size", raising=False)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def room(memory: int, **options: Any) -> int:
    return read_max_memory({"cuda:0": memory}, **options)["cuda:0"].room


def test_cublas_workspace_depends_on_compute_capability(card: Any) -> None:
    assert room(FREE) == FREE - DRIVER - LT - 32 * MIB
    assert room(FREE // 2) == FREE // 2 - LT - 32 * MIB
    card.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert room(FREE) == FREE - DRIVER - LT - 8 * MIB - 128 * KIB


def test_backward_pass_counts_a_second_workspace(card: Any) -> None:
    workspace = LT + 32 * MIB
    assert room(FREE, grad=True) == FREE - DRIVER - 2 * workspace
    for options, count in ({}, 1), ({"train": True}, 2):
        topology = PlanOptions(**options).topology({"cuda:0": FREE})
        assert topology["cuda:0"].room == FREE - DRIVER - count * workspace


def test_workspace_size_from_environment_is_counted(card: Any) -> None:
    card.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert room(FREE) == FREE - DRIVER - LT - 8 * MIB - 128 * KIB


def test_room_is_capped_at_free_memory(card: Any) -> None:
    card.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    assert room(2 * FREE) == FREE - DRIVER - LT - MIB
    assert room(FREE // 2) == FREE // 2 - LT - MIB


def test_reserve_is_subtracted_in_addition_to_workspace(card: Any) -> None:
    assert room(FREE, reserve=3 * MIB) == FREE - DRIVER - LT - 35 * MIB


def test_absent_gpu_is_not_queried() -> None:
    assert read_max_memory({"cuda:7": FREE})["cuda:7"].room == FREE


def test_full_device_leaves_room_for_the_workspace() -> None:
    workspace, x = 8192, torch.ones(2, 32)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))).eval()
    with torch.no_grad(), graphplan.simulate({0: 30_000, "cpu": MIB}, workspace=workspace) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        assert placed.plan.peak_bytes[0] > 30_000 - 2 * workspace
        machine.reset_peaks()
        assert largest_difference(placed(x), model(x)) < 1e-6
        assert machine.peak_bytes(0) == placed.plan.peak_bytes[0] + workspace


def test_budget_in_infeasible_error_includes_the_workspace() -> None:
    model, x = nn.Linear(64, 64), torch.ones(2, 64)
    with graphplan.simulate({0: 1 << 20}, workspace=8192):
        with pytest.raises(graphplan.InfeasibleError) as caught:
            graphplan.plan(model, {0: 20_000}, (x,))
        assert graphplan.plan(model, caught.value.needed, (x,)).peak_bytes[0] + 8192 <= caught.value.needed[0]
