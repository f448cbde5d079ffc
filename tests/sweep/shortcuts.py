"""Shortcuts for tests that place models many times: trace one once, run each operation once, search less.

What is left out changes neither results nor budgets: a trace does not depend on the devices, nor what an
operation takes on the model, and the search that is skipped only makes a placement that keeps the budgets
faster, and its bound tighter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from graphplan.capture.captured_graph import Capture
from graphplan.compiler import capture_cache
from graphplan.errors import CaptureError
from graphplan.passes.frontend import fake_interpreter
from graphplan.passes.frontend.fake_operation import Effect, run_fake
from graphplan.passes.placement import disk as caller_of_place
from graphplan.passes.placement.certificate import Solution
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.params import Limits

__all__ = ["known_operations", "one_trace", "short_search"]

_FIRST_PLACEMENT = Limits(effort=0.2, proves=False)
_EFFECTS: dict[Any, Effect] = {}  # of operations on fake tensors, of all models of this process


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
def short_search() -> Iterator[None]:
    """The planner stops after its first good placement."""

    def quick(problem: Any, limits: Limits = _FIRST_PLACEMENT, **options: Any) -> Solution:
        return place(problem, replace(_FIRST_PLACEMENT, retries=limits.retries), **options)

    with patch.object(caller_of_place, "place", quick):
        yield


@contextmanager
def known_operations() -> Iterator[None]:
    """An operation of torch is run on fake tensors once in the process for arguments of the same sizes."""

    def run(target: Any, leaves: Any, spec: Any, device: torch.device, mode: Any) -> Effect:
        if getattr(target, "namespace", "") != "aten":
            return run_fake(target, leaves, spec, device, mode)
        kinds = tuple((type(leaf), leaf) for leaf in leaves)  # True == 1 == 1.0
        key = (target, kinds, spec, device, torch.get_default_dtype())
        if key not in _EFFECTS:
            _EFFECTS[key] = run_fake(target, leaves, spec, device, mode)
        return _EFFECTS[key]

    with patch.object(fake_interpreter, "run_fake", run):
        yield
