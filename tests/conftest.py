from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported is not looked through again after every test


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    gc.collect()  # simulated memory is freed with the last tensor
