"""Cases of tests that have several axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(many: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """Each of the many with each of the few: with one of these, in turn, at every change; the rest slow."""
    others = list(few)
    return [
        pytest.param(one, other, marks=[pytest.mark.slow] * (turn % len(others) != place))
        for turn, one in enumerate(many)
        for place, other in enumerate(others)
    ]
