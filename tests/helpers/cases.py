"""Cases of tests that have several axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(many: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """Each of ``many`` with each of ``few``: one combination each at every change, the others as slow tests."""
    others = list(few)
    return [
        pytest.param(one, other, marks=[pytest.mark.slow] * (turn % len(others) != place))
        for turn, one in enumerate(many)
        for place, other in enumerate(others)
    ]
