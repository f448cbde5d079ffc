"""The minimum cut between an accelerator and the CPU is the fastest assignment without budgets."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from placements import CARD, HOST
from random_problems import TINY, random_instance

from graphplan.devices.topology import CPU, Link, Topology
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.streaming.min_cut import accelerated

SLOW = Link(1e9, 1e-5)  # so slow that copies decide


@pytest.mark.parametrize("seed", range(30))
def test_cut_is_fastest_assignment(seed: int) -> None:
    graph = random_instance(seed, replace(TINY, operations=(2, 9), shared=0.0)).problem.graph
    arrays = Arrays(Problem(graph, Topology((CARD, HOST), {}, SLOW), CPU))
    assert not arrays.shared  # whose homes the cut does not decide
    count = len(arrays.units)
    for able in (np.ones(count, dtype=bool), np.arange(count) % 3 > 0):
        found = np.where(accelerated(arrays, np.zeros(count, dtype=np.int64), able), 0, 1)
        assert able[found == 0].all()
        every = (np.array(devices) for devices in product((0, 1), repeat=count))
        least = min(arrays.seconds(arrays.expand(one)) for one in every if able[one == 0].all())
        assert arrays.seconds(arrays.expand(found)) == pytest.approx(least, rel=1e-6)
