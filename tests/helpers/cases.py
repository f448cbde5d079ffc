"""Cases of tests that have several axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(many: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """All pairs of ``many`` and ``few``: one for each of ``many`` always runs, the others are slow tests."""
    others = list(few)
    return [
        pytest.param(one, other, marks=[pytest.mark.slow] * (turn % len(others) != place))
        for turn, one in enumerate(many)
        for place, other in enumerate(others)
    ]
