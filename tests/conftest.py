"""What all tests share.

Where they run in parallel, the process that hands them out reads this before it starts the others: what takes
seconds to import is imported where it is used.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

gc.disable()  # until all is imported
SEARCH_LITTLE = {"api", "capture", "cli", "integrations", "passes/frontend", "report", "runtime"}
SEARCH_LITTLE |= {f"passes/placement/test_{name}.py" for name in ("constrain", "disk")}
SEARCH_LITTLE |= {"compiler/test_saved_captures.py"}


def pytest_configure(config: pytest.Config) -> None:
    """Key 0 is of a card that nobody has, with budgets of kilobytes; what is about real ones is asked for."""
    asked = str(config.getoption("markexpr"))
    if "gpu" not in asked or "not gpu" in asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest comes first, so that no other worker waits for it at the end."""
    items.sort(key=lambda item: (item.path.name != "test_ranks.py", len(item.path.parts)))


def pytest_collection_finish() -> None:
    _leave_out_torchs_trace_log()
    gc.set_threshold(50_000, 20, 50)  # a trace makes many objects, few of them in cycles
    gc.enable()
    _collect()


def _leave_out_torchs_trace_log() -> None:
    """pytest would hear it, as it does not propagate, and torch.export would format a stack for each line."""
    trace_log = logging.getLogger("torch.__trace")
    trace_log.handlers.clear()
    trace_log.propagate = True


def _collect() -> None:
    """Free what nothing refers to. What stays is mostly what was imported: it is not looked through again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    import torch

    torch.manual_seed(0)
    yield
    _collect()  # simulated memory is freed with the last tensor


@pytest.fixture(autouse=True)
def _little_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is placed runs alike however long the planner searched: most quick tests wait for little of it."""
    path = request.node.path.relative_to(Path(__file__).parent)
    little = any(path.is_relative_to(one) for one in SEARCH_LITTLE)
    full = any(request.node.get_closest_marker(name) for name in ("full_search", "gpu", "slow"))
    from shortcuts import shortest_search

    with nullcontext() if full or not little else shortest_search():
        yield


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone, which ends after what refers to it.

    A reducer of ``DistributedDataParallel`` that goes last waits for the group's threads while it holds the
    interpreter's lock, and one of these may wait for that: no signal ends it, and so no time limit.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()
