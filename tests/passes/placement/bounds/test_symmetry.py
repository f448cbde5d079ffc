"""Devices are exchangeable only if no property distinguishes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import chain
from placements import HOST, equal_cards

from graphplan.devices.topology import CPU, DeviceKey, Link
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds.symmetry import device_classes
from graphplan.passes.placement.problem import Problem

OTHER = Link(7e9, 1e-5)


def problem() -> Problem:
    """Two cards that are equal, a smaller one, and the CPU."""
    topology = equal_cards(3, HOST)
    first, second, third, cpu = topology.devices
    return Problem(
        chain(4), replace(topology, devices=(first, second, replace(third, memory=1 << 29), cpu)), CPU
    )


def classes(of: Problem) -> list[list[DeviceKey]]:
    arrays = Arrays(of)
    return [[arrays.keys[d] for d in members] for members in device_classes(arrays)]


def linked(*pairs: tuple[DeviceKey, DeviceKey], link: Link = OTHER) -> Callable[[Problem], Problem]:
    def change(of: Problem) -> Problem:
        default = of.topology.default_link
        links = {(b, a): default for a, b in pairs} | dict.fromkeys(pairs, link)
        return replace(of, topology=replace(of.topology, links=links))

    return change


def first_card(**facts: Any) -> Callable[[Problem], Problem]:
    def change(of: Problem) -> Problem:
        card, *others = of.topology.devices
        return replace(of, topology=replace(of.topology, devices=(replace(card, **facts), *others)))

    return change


def rules(**facts: Any) -> Callable[[Problem], Problem]:
    return lambda of: replace(of, **facts)


DIFFERENCES = {
    "link to a peer": linked((0, 2)),
    "link from a peer": linked((2, 0)),
    "latency to a peer": linked((0, 2), link=Link(5e9, 2e-5)),
    "link between the two, one way": linked((0, 1)),
    "link to the host": linked((0, CPU)),
    "link from the host": linked((CPU, 0)),
    "budget": first_card(memory=(1 << 30) - 512),
    "reserve": first_card(reserve=512),
    "FLOP/s": first_card(flops=2e12),
    "bandwidth": first_card(bandwidth=1e9),
    "overhead": first_card(overhead=5e-6),
    "allocator": first_card(device="sim:0"),
    "pinned weight": rules(fixed_weights={"w1": 0}),
    "pinned operation": rules(allowed={"v1": frozenset({0})}),
    "operation that may not": rules(allowed={"v1": frozenset({1, 2, CPU})}),
    "prefetch buffers that exist": rules(prefetch_bytes={0: 4096}),
    "limit of prefetch buffers": rules(prefetch_limits={0: 4096}),
    "the caller's device": rules(host=0),
}


def test_identical_gpus_are_one_class() -> None:
    assert classes(problem()) == [[0, 1], [2], [CPU]]


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_difference_separates_two_gpus(difference: str) -> None:
    assert classes(DIFFERENCES[difference](problem())) == [[0], [1], [2], [CPU]]


def test_properties_shared_by_both_devices_keep_one_class() -> None:
    both = linked((0, 2), (1, 2), (0, CPU), (1, CPU))(problem())
    both = replace(both, prefetch_bytes={0: 4096, 1: 4096}, allowed={"v1": frozenset({0, 1})})
    assert classes(both) == [[0, 1], [2], [CPU]]


def test_two_linked_pairs_are_two_classes() -> None:
    near = {(0, 1): OTHER, (2, 3): OTHER}
    four = Problem(chain(4), replace(equal_cards(4), links=near), CPU)
    assert classes(four) == [[0, 1], [2, 3]]
    assert classes(replace(four, topology=replace(four.topology, links={(0, 1): OTHER}))) == [[0, 1], [2, 3]]
    buffer = {(0, 1): OTHER, (1, 2): OTHER, (2, 3): OTHER, (3, 0): OTHER}
    assert classes(replace(four, topology=replace(four.topology, links=buffer))) == [[0, 2], [1, 3]]
