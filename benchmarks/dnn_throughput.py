"""Placements of the least largest load, contiguous or not: annealing from a start, and a lower bound.

A move of a group changes the loads of two devices only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from dnn_slices import Parts
from dnn_workload import Workload, throughput

RUNS = (2, 4, 8, 16, 32)


class _State:
    """Loads that follow moves of groups."""

    def __init__(self, workload: Workload, parts: Parts, devices: Sequence[int]) -> None:
        self.cores, self.limit = workload.cores, workload.limit
        self.count = workload.accelerators + workload.cores
        self.device = [d if d >= 0 else workload.accelerators - 1 - d for d in devices]
        self.k = workload.accelerators
        self.cpu, self.accelerator = parts.cpu.tolist(), parts.accelerator.tolist()
        self.size, self.supported = parts.size.tolist(), parts.supported.tolist()
        self.cost = parts.cost.tolist()
        self.whole = [len(a) for a in parts.joined]
        self.joined = parts.joined
        self.around: list[list[int]] = [[] for _ in range(len(parts))]
        for i, groups in enumerate(parts.joined):
            for g in groups:
                self.around[g].append(i)
        self.within = [[0] * self.count for _ in parts.joined]
        for i, groups in enumerate(parts.joined):
            for g in groups:
                self.within[i][self.device[g]] += 1
        self.used = [0.0] * self.count
        self.load = [0.0] * self.count
        for g, d in enumerate(self.device):
            self.used[d] += self.size[g]
            self.load[d] += self.accelerator[g] if d < self.k else self.cpu[g]
        for i, row in enumerate(self.within):
            for d in range(self.k):
                if 0 < row[d] < self.whole[i]:
                    self.load[d] += self.cost[i]

    def fits(self, g: int, b: int) -> bool:
        return b >= self.k or (self.supported[g] and self.used[b] + self.size[g] <= self.limit)

    def after(self, g: int, b: int) -> tuple[float, float]:
        """Loads of the group's device and of ``b`` if the group moved there."""
        a = self.device[g]
        of_a, of_b = self.load[a], self.load[b]
        of_a -= self.accelerator[g] if a < self.k else self.cpu[g]
        of_b += self.accelerator[g] if b < self.k else self.cpu[g]
        for i in self.around[g]:
            row, whole = self.within[i], self.whole[i]
            if a < self.k:
                if row[a] == whole:
                    of_a += self.cost[i]
                elif row[a] == 1:
                    of_a -= self.cost[i]
            if b < self.k:
                if row[b] == whole - 1:
                    of_b -= self.cost[i] if row[b] else 0.0
                elif row[b] == 0:
                    of_b += self.cost[i]
        return of_a, of_b

    def move(self, g: int, b: int) -> None:
        a = self.device[g]
        self.load[a], self.load[b] = self.after(g, b)
        for i in self.around[g]:
            self.within[i][a] -= 1
            self.within[i][b] += 1
        self.used[a] -= self.size[g]
        self.used[b] += self.size[g]
        self.device[g] = b

    def devices(self) -> tuple[int, ...]:
        return tuple(d if d < self.k else self.k - 1 - d for d in self.device)


def anneal(
    workload: Workload, parts: Parts, devices: Sequence[int], tries: int, seed: int, warmth: float
) -> tuple[int, ...]:
    """Simulated annealing over moves and exchanges of groups; never worse than ``devices``.

    ``warmth`` is the first temperature as a share of the largest load.
    """
    rng = random.Random(seed)
    state = _State(workload, parts, devices)
    best, best_load = state.devices(), max(state.load)
    for step in range(tries):
        heat = best_load * warmth * (1 - step / tries) ** 2 + 1e-12
        before = sum(math.exp(min(50.0, (x - best_load) / heat)) for x in state.load)
        undo = _propose(state, rng)
        after = sum(math.exp(min(50.0, (x - best_load) / heat)) for x in state.load)
        if undo and after > before and rng.random() >= (before / after) ** 2:
            for g, a in reversed(undo):
                state.move(g, a)
        elif undo and max(state.load) < best_load - 1e-12:
            best, best_load = state.devices(), max(state.load)
    placement = parts.spread(best, len(workload))
    before = throughput(workload, parts.spread(devices, len(workload)))
    return best if throughput(workload, placement) <= before else tuple(devices)


def _propose(state: _State, rng: random.Random) -> list[tuple[int, int]]:
    """One move, an exchange of two groups, or a move of a run of the order; returned is what undoes it."""
    g = rng.randrange(len(state.device))
    a = state.device[g]
    if state.around[g] and rng.random() < 0.7:
        other = rng.choice(state.joined[rng.choice(state.around[g])])
        b = state.device[other]
    else:
        b = rng.randrange(state.count)
    if a == b or not state.fits(g, b):
        return []
    undo = [(g, a)]
    state.move(g, b)
    kind = rng.random()
    if kind < 0.3:
        for h in range(g + 1, min(len(state.device), g + rng.choice(RUNS))):
            if state.device[h] == a and state.fits(h, b):
                undo.append((h, a))
                state.move(h, b)
    elif kind < 0.6:
        h = rng.randrange(len(state.device))
        if state.device[h] == b and h != g and state.fits(h, a):
            undo.append((h, b))
            state.move(h, a)
    return undo


def lower_bound(workload: Workload, parts: Parts) -> float:
    """A load that some device must reach, whatever the placement.

    For a target T, groups whose CPU time is above T must be on accelerators. T is impossible if
    the work does not fit into T on every device even when groups may be split (those that the CPU
    slows least go there first), or if some accelerator must take q groups whose q least add up to
    more. Bisection gives the largest T that is shown to be impossible. Transfers count as free.
    """
    low, high = 0.0, float(parts.accelerator.sum() + parts.cpu.sum())
    for _ in range(100):
        middle = (low + high) / 2
        if _impossible(workload, parts, middle):
            low = middle
        else:
            high = middle
    return low


def _impossible(workload: Workload, parts: Parts, target: float) -> bool:
    k, room = workload.accelerators, workload.cores * target
    tied = parts.cpu > target
    if (tied & ~parts.supported).any():
        return True
    left = float(parts.accelerator[tied].sum())
    loose = np.nonzero(~tied)[0]
    gain = parts.accelerator[loose] / np.maximum(parts.cpu[loose], 1e-300)
    for g in loose[np.argsort(-gain, kind="stable")]:
        share = min(1.0, room / parts.cpu[g]) if parts.cpu[g] > 0 else 1.0
        room -= share * parts.cpu[g]
        left += (1 - share) * parts.accelerator[g]
    if left > k * target:
        return True
    heavy = np.sort(parts.accelerator[tied])[::-1]
    for q in range(1, len(heavy) // k + 2):
        top = k * (q - 1) + 1
        if top <= len(heavy) and heavy[top - q : top].sum() > target:
            return True
    return False
