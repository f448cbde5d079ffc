"""Round robin over accelerators: shares of the order, operations on the CPU, and the gain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import CARD, HOST, stack

from graphplan.devices.topology import CPU, DeviceKey, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.streaming.round_robin import _deficit_round_robin, round_robin

MIB = 1 << 20


def on_cards(graph: Graph, *mib: float, allowed: dict[str, frozenset[DeviceKey]] | None = None) -> Problem:
    cards = [
        replace(CARD, key=i, device=f"sim:{i}", memory=int(one * MIB) + 16384) for i, one in enumerate(mib)
    ]
    return Problem(graph, Topology((*cards, HOST), {}, Link(5e9, 1e-5)), CPU, allowed=allowed or {})


def test_round_robin_starts_at_the_end() -> None:
    found = _deficit_round_robin(np.ones(12), np.array([2.0, 1.0]))
    assert "".join(map(str, found)) == "100100100100"


@given(
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50),
    st.lists(st.floats(1.0, 20.0), min_size=1, max_size=4),
)
def test_round_robin_exceeds_shares_by_at_most_one_turn(sizes: list[float], quantum: list[float]) -> None:
    nbytes = np.array(sizes)
    found = _deficit_round_robin(nbytes, np.array(quantum))
    has = np.array([nbytes[found == one].sum() for one in range(len(quantum))])
    turns = has / quantum
    slack = 1.0 + nbytes.max() / np.array(quantum)
    assert (turns <= turns.min() + 1.0 + slack + slack[turns.argmin()]).all()


def test_round_robin_respects_pins() -> None:
    pins = {"v3": frozenset({1}), "v4": frozenset({CPU}), "v5": frozenset({0})}
    problem = on_cards(stack([MIB] * 8), 2, 2, allowed=pins)
    arrays = Arrays(problem)
    devices = arrays.named(arrays.expand(round_robin(arrays, 2)))
    assert {name: devices[name] for name in pins} == {"v3": 1, "v4": CPU, "v5": 0}


def test_cpu_gathers_from_large_table_and_gpus_compute() -> None:
    graph = stack([16 * MIB, *[MIB] * 12], [1, *[10**9] * 12])
    arrays = Arrays(on_cards(graph, 6, 6))
    devices = list(arrays.named(arrays.expand(round_robin(arrays, 2))).values())
    assert devices[0] == CPU
    assert set(devices[1:]) == {0, 1}


@pytest.mark.slow
def test_two_streaming_gpus_overlap_copies_and_compute() -> None:
    """Where one after the other computes its half, one link is idle, and they take 1.23 times that."""
    sizes = [MIB // 4, MIB // 16, MIB // 16, MIB // 4, MIB, MIB, MIB] * 32
    problem = on_cards(stack(sizes, [50 * one for one in sizes]), *[0.3 * sum(sizes) / MIB] * 2)
    work = sum(problem.clock(problem.topology[0]).values())
    assert place(problem).evaluation.seconds <= 1.1 * work
