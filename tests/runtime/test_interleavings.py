"""No interleaving of CUDA's streams shows a reader other bytes than its own: growth, streams, the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from builders import largest_difference
from interleavings import GARBAGE, Recorder, Step, explore, recording
from torch import nn

import graphplan
from graphplan.runtime.memory.copy_queues import CudaQueues
from graphplan.runtime.weights.weight_streams import ModuleStreams

WIDTH = 16
X = torch.ones(2, WIDTH)
BUDGETS = {0: 1 << 20, "cpu": 1 << 30}
NAMES = ("a", "b", "wide")


class Growing(nn.Module):
    """Two layers that are streamed; a wide call needs a larger slot."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wide = nn.Linear(WIDTH, 8 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        return self.wide(self.a(x)) if wide else self.b(self.a(x))


@pytest.fixture
def machine() -> Iterator[Any]:
    with torch.no_grad(), graphplan.simulate(BUDGETS) as found:
        yield found


def placed_and_recorded(recorder: Recorder) -> Any:
    """A placed module whose streams are CUDA's, as far as anyone can tell."""
    pin = {f"{name}.weight": "cpu" for name in NAMES}
    placed: Any = graphplan.partition(Growing().eval(), BUDGETS, (X,), pin=pin, cpu_compute=False)
    state = placed._graphplan
    state.codes.clear()
    state.streams = ModuleStreams(CudaQueues)
    return placed


def run(machine: Any, calls: list[tuple[str, bool]], *, drop: bool = False) -> list[Step]:
    """What is enqueued by calls on these streams, of either structure."""
    with recording(machine) as recorder:
        placed = placed_and_recorded(recorder)
        eager = graphplan.unplace(placed)
        for stream, wide in calls:
            recorder.current = stream
            assert largest_difference(placed(X, wide), eager(X, wide)) < 1e-5
        if drop:
            del placed
            gc.collect()
            recorder.garbage(len(recorder.buffers) - 1)
    assert sum(step.kind == "read" for step in recorder.steps) >= 2 * len(calls)
    return recorder.steps


@pytest.mark.parametrize(
    "calls",
    [
        [("work 0", False), ("work 0", False)],
        [("work 0", False), ("work 1", False)],
        [("work 0", False), ("work 0", True)],
        [("work 0", False), ("work 1", True)],
        [("work 0", False), ("work 1", False), ("work 0", True)],
        [("work 0", False), ("work 1", True), ("work 0", False)],
    ],
    ids=lambda calls: " ".join(f"{stream[-1]}{'w' if wide else 'n'}" for stream, wide in calls),
)
def test_every_interleaving_reads_the_right_bytes(machine: Any, calls: list[tuple[str, bool]]) -> None:
    assert explore(run(machine, calls)) is None


def test_module_freed_while_its_work_runs(machine: Any) -> None:
    assert explore(run(machine, [("work 0", False), ("work 1", False)], drop=True)) is None


def test_buffer_grown_on_another_stream(machine: Any) -> None:
    with recording(machine) as recorder:
        placed = placed_and_recorded(recorder)
        placed(X)
        placed._graphplan.codes.clear()
        (storage,) = placed._graphplan.streams.storages.values()
        recorder.current = "work 1"
        storage.grow(2 * storage.bytes.numel())
        recorder.current = "work 0"
        placed(X)
    assert explore(recorder.steps) is None


@pytest.mark.parametrize("method", ["copies_wait", "work_waits", "copies_wait_for_all_work", "synchronize"])
def test_missing_wait_is_detected(machine: Any, method: str) -> None:
    calls = [("work 0", False), ("work 1", False), ("work 0", True)]
    with patch.object(CudaQueues, method, lambda *_: None):
        assert explore(run(machine, calls)) is not None


def test_early_load_is_detected() -> None:
    write, wait = Step("write", "copies", 1, end=4), Step("wait", "work", 2)
    early = [write, Step("record", "copies", 2), wait, Step("read", "work", end=4)]
    assert explore(early) is None
    assert "sees" in str(explore([*early, Step("write", "copies", GARBAGE, end=4)]))
