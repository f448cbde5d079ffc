"""The overhead benchmark times every form, and none that gives other results."""

from __future__ import annotations

from typing import Any

import pytest
from overhead import EAGER, OURS, Workload, linears, llama, measure, require_equal


@pytest.mark.parametrize(
    "make",
    [lambda: linears(3, 4), pytest.param(lambda: llama(1, 16, tokens=3), marks=pytest.mark.slow)],
)
def test_every_form_is_timed(make: Any) -> None:
    rows = measure(make(), rounds=2)
    assert [row["form"] for row in rows][:2] == [EAGER, OURS]
    assert len(rows) == 4
    assert rows[0]["ratio_of_best"] == 1
    assert all(0 < row["best_ms"] <= row["median_ms"] for row in rows)


def test_a_form_that_differs_is_refused() -> None:
    workload: Workload = linears(2, 4)

    eager = workload.call_of(workload.model)
    with pytest.raises(AssertionError, match="graphplan differs"):
        require_equal({EAGER: eager, OURS: lambda: eager() + 1})
