"""Devices, random placements and the best of all placements, on the planner's flat arrays."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from random_problems import Parameters, random_instance

from graphplan.devices.topology import CPU, DeviceSpec, Link, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight
from graphplan.passes.placement.arrays import Arrays, Ints
from graphplan.passes.placement.params import PARAMS, Effort
from graphplan.passes.placement.problem import Problem

CARD = DeviceSpec(0, "cuda:0", 1 << 30, 1e12, 1e11, 4e-6)
HOST = DeviceSpec(CPU, CPU, 1 << 34, 1e11, 2e10, 20e-6)


def equal_cards(count: int, *others: DeviceSpec, memory: int = 1 << 30, kind: str = "cuda") -> Topology:
    """Identical GPUs, and other devices."""
    specs = [replace(CARD, key=key, device=f"{kind}:{key}", memory=memory) for key in range(count)]
    return Topology((*specs, *others), {}, Link(5e9, 1e-5))


def cards(count: int, *others: DeviceSpec, memory: int = 1 << 30) -> Topology:
    """Identical GPUs with links of their own, and other devices."""
    links = {(a, b): Link(1e9 * (1 + a + 2 * b), 1e-6) for a in range(count) for b in range(count) if a != b}
    return replace(equal_cards(count, *others, memory=memory), links=links)


def random_units(arrays: Arrays, draw: random.Random) -> Ints | None:
    """A device for each macro-operation that it may run on."""
    found = []
    for members in arrays.units:
        able = np.flatnonzero(np.isfinite(arrays.compute[:, members]).all(axis=1))
        if not len(able):
            return None
        near = [found[-1]] if found and found[-1] in able and draw.random() < 0.5 else able.tolist()
        found.append(draw.choice(near))
    return np.array(found, dtype=np.int64)


def random_homes(arrays: Arrays, devices: Ints, draw: random.Random) -> Ints:
    """Homes of some shared weights: where some reader runs."""
    chosen = np.full(len(arrays.names), -1)
    for item in arrays.shared:
        if draw.random() < 0.5:
            readers = arrays.reader[arrays.item == item]
            chosen[item] = draw.choice(devices[readers[readers < arrays.count]].tolist())
    return chosen


# no CPU, so that nothing can be streamed
RESIDENT: Mapping[str, float] = {"equal cards": 2, "mixed cards": 2, "one card": 0.3}


def resident_problems(
    parameters: Parameters, seeds: int, max_placements: int = 5000
) -> Iterator[tuple[Arrays, Problem]]:
    """Random problems without the CPU with so few placements that all can be tried."""
    parameters = replace(parameters, devices=RESIDENT)
    for seed in range(seeds):
        problem = random_instance(seed, parameters).problem
        arrays = Arrays(problem)
        if (
            len(arrays.units)
            and arrays.computing ** (len(arrays.units) + len(arrays.shared)) <= max_placements
        ):
            yield arrays


def all_placements(arrays: Arrays) -> Iterator[tuple[Ints, Ints]]:
    """All devices of operations and homes of shared weights."""
    devices_of_units = [
        np.flatnonzero(np.isfinite(arrays.compute[:, members]).all(axis=1)) for members in arrays.units
    ]
    homes = list(itertools.product(range(arrays.computing), repeat=len(arrays.shared)))
    for units in itertools.product(*devices_of_units):
        devices = arrays.expand(np.array(units, dtype=np.int64))
        for home in homes:
            chosen = np.full(len(arrays.names), -1)
            chosen[arrays.shared] = home
            yield devices, chosen


def best_of_all(arrays: Arrays, *, budgets: bool = True) -> float:
    """Seconds of the fastest placement without streaming; infinite where none is within the budgets."""
    best = math.inf
    for devices, chosen in all_placements(arrays):
        seconds = arrays.seconds(devices, chosen)
        if seconds < best and (not budgets or arrays.fits(devices, chosen)):
            best = seconds
    return best


def ample(visits: float = 1e9) -> Effort:
    """Effort that does not run out."""
    return Effort(visits)


@contextmanager
def steered(module: ModuleType, **params: int) -> Iterator[None]:
    """Let the search of one module have these parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PARAMS", replace(PARAMS, **params))
        yield


def stack(
    sizes: list[int], flops: list[int] | int = 10**7, *, activation: int = 512, head: str | None = None
) -> Graph:
    """Operations in a row, each with its weight; ``head`` is read by the last one too."""
    costs = [flops] * len(sizes) if isinstance(flops, int) else flops
    weights = [Weight(f"w{i}", nbytes) for i, nbytes in enumerate(sizes)]
    values, operations, last = [Value("x", activation, activation)], [], "x"
    for i, cost in enumerate(costs):
        tied = (head,) if head is not None and i == len(sizes) - 1 else (f"w{i}",)
        values.append(Value(f"v{i}", activation, activation))
        operations.append(Operation(f"v{i}", "f", (last, *tied), (f"v{i}",), (), cost, 1))
        last = f"v{i}"
    read = {name for operation in operations for name in operation.inputs}
    return Graph(operations, values, [w for w in weights if w.name in read], ["x"], [last])
