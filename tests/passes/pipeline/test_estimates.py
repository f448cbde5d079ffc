"""Estimates of stretches between cuts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphplan
from graphplan.devices.topology import Link
from graphplan.ir.cluster.flight import Flight
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.estimates import Estimates

WIDTHS = (8, 8, 512, 8, 8)  # few bytes, many, few


def test_refused_stretch_allows_longer_ones_with_smaller_buffers() -> None:
    layers = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(WIDTHS)))
    plan = graphplan.plan(layers, {"cpu": "1GiB"}, args=(torch.ones(64, 8),))
    machine = plan.topology
    cuts = np.arange(len(WIDTHS))
    found = Estimates(Boundaries(plan.graph), cuts, [machine], Link(1e9, 0.0), Flight(4))
    assert np.isfinite(found.seconds()[0][0, 1:]).all()
    found.refused.add((0, 0, 2, 0))  # it returns 512 numbers a row
    ends = np.isfinite(found.seconds()[0][0, 1:])
    assert ends.tolist() == [True, False, True, True]
    found.refused.add((0, 0, 1, 0))
    assert not np.isfinite(found.seconds()[0][0, 1:4]).any()


@pytest.mark.parametrize("host", ["cpu", "cpu:0"])
def test_stage_receives_and_sends_over_different_links(host: str) -> None:
    layers = nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(WIDTHS)))
    plan = graphplan.plan(layers, {0: "1MiB", host: "1GiB"}, args=(torch.ones(64, 8),))
    cuts = np.arange(len(WIDTHS))
    slow, fast = Link(1e3, 0.0), Link(1e9, 0.0)

    def seconds(to_device: Link, to_host: Link) -> Any:
        machine = replace(plan.topology, links={(host, 0): to_device, (0, host): to_host})
        return Estimates(Boundaries(plan.graph), cuts, [machine], Link(1e9, 0.0), Flight(4)).seconds()[0]

    # 64 rows of 8 numbers in, of 512 out
    assert seconds(slow, fast)[1, 2] < 64 * 8 * 4 / 1e3 * 1.1
    assert seconds(fast, slow)[1, 2] > 64 * 512 * 4 / 1e3


def test_placed_stretch_scales_operations_and_not_transfers() -> None:
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    plan = graphplan.plan(layers, {0: "1GiB", "cpu": "1GiB"}, args=(torch.ones(64, 512),))
    estimates = Estimates(Boundaries(plan.graph), np.arange(9), [plan.topology], Link(1e9, 0.0), Flight())
    before = estimates.seconds()[0]
    layer = before[2, 4] - before[2, 3]
    assert layer < 0.2 * before[2, 3]  # the rest is transfers from and to the host
    estimates.exact[0, 0, 8] = before[0, 8] + 16 * layer  # each layer takes three times as long
    estimates.calibrate()
    assert estimates.seconds()[0][2, 3] == pytest.approx(before[2, 3] + 2 * layer)


def test_number_of_candidates_is_limited() -> None:
    plan = graphplan.plan(nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), args=(torch.ones(64, 8),))
    boundaries = Boundaries(plan.graph)
    progress = np.linspace(0.0, 1.0, len(plan.graph.operations) + 1)
    progress[-2] = 1.0  # the last operation is free
    for most in range(3, 12):
        found = boundaries.candidates(most, progress)
        assert len(found) == min(most, len(boundaries.allowed))
        assert {found[0], found[-1]} == {0, len(plan.graph.operations)}
