"""Shortcuts for tests that place one model many times: trace it once, search less.

What is left out changes neither results nor budgets: a trace does not depend on the devices, and the search
that is skipped only makes a placement that keeps the budgets faster, and its bound tighter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from graphplan.capture.captured_graph import Capture
from graphplan.compiler import capture_cache
from graphplan.errors import CaptureError
from graphplan.passes.placement import disk as caller_of_place
from graphplan.passes.placement import driver
from graphplan.passes.placement.certificate import Solution
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.params import PARAMS, Limits

__all__ = ["one_trace", "short_search", "shortest_search"]

_EASY = replace(PARAMS, least_visits=500_000, visits_per_operation=5_000, advice_effort=0.5)


@contextmanager
def one_trace() -> Iterator[None]:
    """Calls of one structure, with the same values, of one model are traced once: give no other model."""
    known: dict[Any, Capture | CaptureError] = {}
    trace = capture_cache.capture

    def remembered(model_copy: Any, call: Any, dynamic_shapes: Any = None, **options: bool) -> Capture:
        spec = None if call is None else str(call.spec)
        key = (model_copy.entry, model_copy.modes, tuple(sorted(options.items())), spec)
        if key not in known:
            try:
                known[key] = trace(model_copy, call, dynamic_shapes, **options)
            except CaptureError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, CaptureError):
            raise found
        return copy.copy(found)

    with patch.object(capture_cache, "capture", remembered):
        yield


@contextmanager
def short_search(effort: float = 0.2) -> Iterator[None]:
    """The planner stops after its first good placement, or this share of the default work."""

    def quick(problem: Any, limits: Limits = Limits(), **options: Any) -> Solution:  # noqa: B008  # frozen
        first = Limits(effort=effort, proves=False, caller_retries=limits.caller_retries)
        return place(problem, first, **options)

    with patch.object(caller_of_place, "place", quick):
        yield


@contextmanager
def shortest_search() -> Iterator[None]:
    """It looks less far for a placement at all, and for budgets that would do: for what is easily found."""
    with short_search(0.02), patch.object(driver, "PARAMS", _EASY):
        yield
