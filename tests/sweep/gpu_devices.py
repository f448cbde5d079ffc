"""A GPU of this machine in place of simulated accelerators: for the sweep."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sweep_one import Devices

from graphplan.devices.cuda_memory import unavailable_bytes

__all__ = ["gpu"]


@dataclass(slots=True)
class _Measured:
    """Budgets, and the bytes that are allocated on the GPU beside what was there before."""

    max_memory: dict[Any, int]
    before: int
    transfers: None = None

    def reset_peaks(self) -> None:
        """Start measuring again."""
        torch.cuda.reset_peak_memory_stats(0)

    def peak_bytes(self, _index: int) -> int:
        """The most bytes since."""
        torch.cuda.synchronize(0)
        return torch.cuda.max_memory_allocated(0) - self.before


@contextmanager
def _measured(budgets: dict[Any, int]) -> Iterator[_Measured]:
    torch.backends.cudnn.allow_tf32 = False  # results are held against those of the CPU
    warm = torch.ones(64, 64, device="cuda:0")
    (warm @ warm).sum().item()  # libraries take their workspaces once
    torch.nn.functional.linear(warm, warm, warm[0]).sum().item()
    del warm
    gc.collect()
    torch.cuda.empty_cache()
    yield _Measured(budgets, torch.cuda.memory_allocated(0))


def gpu() -> Devices:
    """The first GPU."""
    return Devices(_measured, close=1e-3, beside=unavailable_bytes(0, 0))
