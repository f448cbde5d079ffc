"""The checks of random placements detect defects that would make bounds false."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from placement_api import Problem, place
from placement_checks import Effort, violations
from placements import HOST, equal_cards, stack
from random_problems import TINY, random_instance

from graphplan.devices.topology import CPU, DeviceKey, Link, Topology
from graphplan.passes.placement import driver, resident
from graphplan.passes.placement.arrays import Arrays, Ints
from graphplan.passes.placement.bounds import symmetry
from graphplan.passes.placement.bounds.label_dp import LabelSearchResult, search_labels
from graphplan.passes.placement.bounds.milp import _Class, _PlacementProgram, bound_by_classes
from graphplan.passes.placement.bounds.relaxation import Relaxation
from graphplan.passes.placement.certificate import Bound, Solution, certify
from graphplan.passes.placement.evaluate import Evaluation

MIB = 1 << 20
QUICK = Effort(placements=1000, steps=20, restricted=0)
SCALE = 1.02
Patch = pytest.MonkeyPatch
Mutate = Callable[[Patch], None]


def scale_every_bound(patch: Patch) -> None:
    def scaled(evaluation: Evaluation, bound: Bound) -> Solution:
        return certify(evaluation, replace(bound, seconds=bound.seconds * SCALE))

    patch.setattr(driver, "certify", scaled)


def scale_the_relaxation(patch: Patch) -> None:
    improve = Relaxation.improve

    def scaled(self: Relaxation, *args: Any, **kwargs: Any) -> None:
        before = self.bound
        improve(self, *args, **kwargs)
        if self.bound > before:
            self.bound *= SCALE

    patch.setattr(Relaxation, "improve", scaled)


def scale_the_labels(patch: Patch) -> None:
    def scaled(*args: Any, **kwargs: Any) -> LabelSearchResult:
        found = search_labels(*args, **kwargs)
        return replace(found, bound=found.bound * SCALE)

    patch.setattr(resident, "search_labels", scaled)


def scale_the_integer_program(patch: Patch) -> None:
    def scaled(*args: Any, **kwargs: Any) -> float:
        return bound_by_classes(*args, **kwargs) * SCALE

    patch.setattr(driver, "bound_by_classes", scaled)


SCALED: dict[str, Mutate] = {
    "every bound": scale_every_bound,
    "Lagrangian relaxation": scale_the_relaxation,
    "labels": scale_the_labels,
    "integer program": scale_the_integer_program,
}


@pytest.mark.parametrize("which", SCALED)
def test_slightly_false_bound_is_detected(which: str, monkeypatch: Patch) -> None:
    problems = [(seed, random_instance(seed, TINY).problem) for seed in (6, 7, 9)]  # quick ones
    assert not [text for seed, problem in problems for text in violations(problem, place, seed, QUICK)]
    SCALED[which](monkeypatch)
    wrong = [text for seed, problem in problems for text in violations(problem, place, seed, QUICK)]
    assert any(text.startswith(("bound", "raised: GraphplanWarning")) for text in wrong)


def ignore_links_among_peers(patch: Patch) -> None:
    """Devices that differ only by a link to another one, neither the host's nor the CPU's, are exchanged."""
    exchangeable = symmetry._exchangeable

    def ignoring(arrays: Arrays, one: int, other: int, *rest: Any) -> bool:
        latency, per_byte = arrays.latency, arrays.per_byte
        peers = [d for d, spec in enumerate(arrays.specs) if spec.is_accelerator]
        among = np.ix_(peers, peers)
        arrays.latency, arrays.per_byte = latency.copy(), per_byte.copy()
        arrays.latency[among] = arrays.per_byte[among] = 0.0
        try:
            return exchangeable(arrays, one, other, *rest)
        finally:
            arrays.latency, arrays.per_byte = latency, per_byte

    patch.setattr(symmetry, "_exchangeable", ignoring)


def ignore_own_weights(patch: Patch) -> None:
    """Operations of one clock and window are of one class, whatever weights only they read."""
    group = _PlacementProgram._group

    def ignoring(self: _PlacementProgram, window: Ints) -> list[_Class]:
        merged: dict[object, _Class] = {}
        for each in group(self, window):
            clock = self.frontier.clock[:, each.units[0]].tobytes()
            key = each.window, clock, each.shared
            known = merged.get(key)
            units = each.units if known is None else tuple(sorted(known.units + each.units))
            merged[key] = replace(each if known is None else known, units=units)
        return list(merged.values())

    patch.setattr(_PlacementProgram, "_group", ignoring)


def near_pair() -> Problem:
    """Three equal cards, of which the last two are close to each other; two hold the model."""
    graph = stack([MIB] * 6, 10**8, activation=64 << 10)
    near, far = Link(100e9, 2e-6), Link(1e9, 1e-3)
    links: dict[tuple[DeviceKey, DeviceKey], Link] = {(1, 2): near, (0, 1): far, (0, 2): far}
    return Problem(graph, replace(equal_cards(3, memory=4 * MIB, kind="sim"), links=links), CPU)


def different_weights() -> Problem:
    """Operations that differ by the weights that only they read; the fast card holds some of them."""
    fast, slow = equal_cards(2, kind="sim").devices
    devices = replace(fast, memory=5 * MIB + (64 << 10)), replace(slow, flops=2e11)
    return Problem(stack([4 * MIB, *[MIB] * 5], 10**9), Topology(devices), CPU)


def different_weights_streamed() -> Problem:
    """The same on one card and the CPU: a stack, so that the order is one window."""
    graph = stack([MIB, 4 * MIB, *[MIB] * 22], 10**7)
    return Problem(graph, equal_cards(1, HOST, memory=12 * MIB, kind="sim"), CPU)


CLASSES: dict[str, tuple[Mutate, Problem]] = {
    "links among peers": (ignore_links_among_peers, near_pair()),
    "own weights": (ignore_own_weights, different_weights()),
    "own weights, streamed": (ignore_own_weights, different_weights_streamed()),
}


@pytest.mark.parametrize("ignored", CLASSES)
def test_too_coarse_classes_are_detected(ignored: str, monkeypatch: Patch) -> None:
    mutate, problem = CLASSES[ignored]
    assert not violations(problem, place, effort=QUICK)
    mutate(monkeypatch)
    wrong = violations(problem, place, effort=QUICK)
    assert any(text.startswith(("bound", "raised: GraphplanWarning")) for text in wrong), wrong
