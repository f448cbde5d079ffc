"""Placements in which devices take turns, so that what one streams hides behind what the others do.

A contiguous piece streams only while it runs and leaves the other copy queues idle. In turns, all queues
are busy for the whole call, at the price of a move of an activation for each turn. How much of the model
each device runs comes of a linear program: what it keeps, what it can stream meanwhile, and the CPU's part.
Before and after, for two accelerators that hold half of eight layers::

    0 0 0 0 1 1 1 1        0 1 1 0 0 1 1 0
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.limits import Limits
from graphplan.passes.master import Fractions, mix_fractions
from graphplan.passes.residence import cpu_key
from graphplan.passes.settings import settled_problems
from graphplan.passes.shares import Shares
from graphplan.passes.spread import fetch_excess

__all__ = ["interleavings", "quick_interleavings"]

Floats = npt.NDArray[np.float64]

_TURNS = (8, 48, 16, 1, 32, 4, 24, 64, 2, 12, 128, 256)  # what helped most often first
_QUICK = (24, 48)  # turns that are tried where there is little time
_WORK = 24_000  # operations in all placements that are tried, where time is not limited
_FEWEST = 4  # placements that are tried in any case
_CUTS = 512  # places where a turn may end
_SPARE = (0.03, 0.1)  # shares of the rooms for rings and activations
_LEAST = 0.01  # part of the model that is worth a turn


def interleavings(problem: Problem, chain: Chain, limits: Limits) -> Iterator[Evaluation]:
    """Placements within the budgets, with more and more turns."""
    if cpu_key(problem.topology) is None or not problem.offload:
        return
    shares = Shares(problem)
    most = max(_FEWEST, _WORK // max(1, len(chain.operations)))
    for parts, turns in islice(_trials(shares), None if limits.deadline is not None else most):
        if limits.over:
            return
        found = fetch_excess(problem, problem.obey(_take_turns(chain, parts, turns)))
        if found is not None and found.feasible:
            yield found


def quick_interleavings(problem: Problem, chain: Chain, limits: Limits) -> Iterator[Evaluation]:
    """Placements within the budgets with a few turns, where the largest weights have the best homes."""
    if cpu_key(problem.topology) is None or not problem.offload:
        return
    settled = []
    for each in settled_problems(problem):
        shares = Shares(each)
        fractions = mix_fractions(shares, shares.room * _SPARE[0])
        parts = {} if fractions is None else _parts(shares, fractions)
        if fractions is not None and len(parts) > 1:
            settled.append((fractions.seconds, parts, each))
    settled.sort(key=lambda one: one[0])
    for turns in _QUICK:
        for _, parts, each in settled:
            if limits.over:
                return
            found = (
                fetch_excess(each, each.obey(_take_turns(chain, parts, turns))) if len(parts) > 1 else None
            )
            if found is not None and found.feasible:
                yield evaluate(problem, found.schedule.assignment)


def _trials(shares: Shares) -> Iterator[tuple[dict[DeviceKey, float], int]]:
    """What part each device has, and in how many turns."""
    for spare in _SPARE:
        fractions = mix_fractions(shares, shares.room * spare)
        parts = {} if fractions is None else _parts(shares, fractions)
        if len(parts) > 1:
            yield from ((parts, turns) for turns in _TURNS)


def _parts(shares: Shares, fractions: Fractions) -> dict[DeviceKey, float]:
    """The part of all weights that each device computes with."""
    by_kind = (fractions.kept + fractions.brought) @ fractions.nbytes
    total = max(float(by_kind.sum()), 1.0)
    return {
        key: float(part) / total / len(kind.keys)
        for kind, part in zip(shares.kinds, by_kind, strict=True)
        for key in kind.keys
        if part > _LEAST * total
    }


def _take_turns(chain: Chain, parts: dict[DeviceKey, float], turns: int) -> dict[str, DeviceKey]:
    """Operation -> device: as many turns of each, backwards every other time."""
    before = np.concatenate([[0.0], np.cumsum(_bytes_read(chain))])
    cuts = np.array([*chain.positions(_CUTS, part_groups=True)], dtype=int)
    at = before[cuts] / max(float(before[-1]), 1.0)
    placed: dict[str, DeviceKey] = {}
    start, done = 0, 0.0
    keys = list(parts)
    for turn in range(turns):
        for key in keys if turn % 2 == 0 else reversed(keys):
            done += parts[key] / turns
            end = int(cuts[np.abs(at - done).argmin()])
            for operation in chain.operations[start:end]:
                placed[operation.name] = key
            start = max(start, end)
    last = keys[-1] if turns % 2 else keys[0]
    for operation in chain.operations[start:]:
        placed[operation.name] = last
    return placed


def _bytes_read(chain: Chain) -> Floats:
    """Bytes of the weights that each operation is the first to read."""
    seen: set[str] = set()
    found = np.zeros(len(chain.operations))
    for index, operation in enumerate(chain.operations):
        for name in operation.inputs:
            weight = chain.graph.weights.get(name)
            if weight is not None and name not in seen:
                seen.add(name)
                found[index] += weight.nbytes
    return found
