"""Stages of training steps beside the microbatches in flight."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import graphplan
from graphplan.compiler.cluster.stage_compiler import withholding
from graphplan.compiler.cluster.stage_step import plan_step
from graphplan.devices.topology import DeviceSpec, Topology

GB = 10**9
MACHINE = Topology(
    (DeviceSpec(0, "cuda", 10 * GB, 1.0, 1.0, 0.0), DeviceSpec("cpu", "cpu", 99 * GB, 1.0, 1.0, 0.0))
)


def planned(kept: Mapping[Any, int]) -> Any:
    return SimpleNamespace(
        topology=withholding(MACHINE, kept), peak_bytes={0: 6 * GB, "cpu": 0}, makespan=1.0
    )


def nothing_beside(kept: Mapping[Any, int]) -> Any:
    if kept:
        raise graphplan.InfeasibleError(
            "the nearest needs 14.0 GB on device 0",
            needed={0: 14 * GB},
            available={0: 10 * GB},
            device=0,
        )
    return planned(kept)


def test_an_error_names_the_device_the_bytes_needed_and_those_there() -> None:
    with (
        patch("graphplan.compiler.cluster.stage_step.kept_bytes", lambda *_: {0: 8 * GB, "cpu": GB}),
        pytest.raises(
            graphplan.InfeasibleError, match=r"3 other microbatches.* on device 0: the nearest"
        ) as found,
    ):
        plan_step(nothing_beside, 3, frozenset())
    error = found.value
    assert (error.device, error.needed[0], error.available[0]) == (0, 14 * GB, 10 * GB)


def test_an_error_names_them_where_every_plan_saves_more_than_was_withheld() -> None:
    kept = iter(range(8, 99))
    with (
        patch("graphplan.compiler.cluster.stage_step.kept_bytes", lambda *_: {0: next(kept) * GB}),
        pytest.raises(graphplan.InfeasibleError, match=r"device 0 needs .* and may hold") as found,
    ):
        plan_step(planned, 3, frozenset())
    error = found.value
    assert (error.device, error.needed[0], error.available[0]) == (0, 19 * GB, 10 * GB)
