"""Facts about ideals for the latency objective: what is open, how long a step takes, what must follow.

A value is open in an ideal if its group is inside and a user of it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from dnn_ideals import Groups

Progress = Callable[[Iterable[int]], Iterable[int]]


def tails(groups: Groups) -> list[dict[int, float]]:
    """Per value and user in another subgraph, the least time from its start to the end, along the worst path.

    A path pays for each group the CPU's time, or the accelerator's; and the cost of a value when the
    path enters or leaves an accelerator. A subgraph pays at least that.
    """
    n = len(groups)
    out: list[list[int]] = [[] for _ in range(n)]
    for i, home in enumerate(groups.value_group):
        out[home].append(i)
    on_cpu, on_accelerator = np.zeros(n), np.zeros(n)
    tail: list[dict[int, float]] = [{} for _ in groups.value_users]
    for v in reversed(range(n)):
        stay = leave = 0.0
        for i in out[v]:
            cost = groups.value_cost[i]
            for w in groups.value_users[i]:
                elsewhere = min(on_cpu[w], cost + on_accelerator[w])
                tail[i][w] = elsewhere
                stay = max(stay, min(on_accelerator[w], cost + elsewhere))
                leave = max(leave, elsewhere)
        on_cpu[v] = groups.cpu[v] + leave
        on_accelerator[v] = groups.accelerator[v] + stay if groups.supported[v] else np.inf
    return tail


def ancestry(groups: Groups) -> np.ndarray:
    """Row x holds the groups that x needs, directly or not, and x itself."""
    table = np.eye(len(groups), dtype=bool)
    for v, preds in enumerate(groups.predecessors):
        for p in preds:
            table[v] |= table[p]
    return table


def waits(groups: Groups, ancestors: np.ndarray, ideal: np.ndarray, opens: np.ndarray) -> list[np.ndarray]:
    """For each open value, the sets of open values that its users must wait for, as rows of booleans."""
    outside = [np.array([w for w in groups.value_users[u] if not ideal[w]]) for u in opens]
    result = []
    for users in outside:
        sets = np.stack([ancestors[users][:, of].any(axis=1) for of in outside], axis=1)
        result.append(np.unique(sets, axis=0))
    return result


def lift(ready: np.ndarray, sets: list[np.ndarray]) -> None:
    """Raise each time to the earliest at which a user of the value can start anyway; no schedule changes."""
    lifted = [
        np.min([ready[:, needed].max(axis=1) for needed in of], axis=0) if len(of) else ready[:, c]
        for c, of in enumerate(sets)
    ]
    for c, column in enumerate(lifted):
        ready[:, c] = column


class Tables:
    """What is known of each ideal, padded to the widest set of open values."""

    def __init__(self, groups: Groups, ideals: np.ndarray) -> None:
        count, n = ideals.shape
        values = len(groups.value_group)
        incidence = np.zeros((n, values + 1), dtype=np.float32)
        for i, users in enumerate(groups.value_users):
            incidence[list(users), i] = 1
        self.used = (ideals.astype(np.float32) @ incidence).astype(np.int16)
        self.degree = np.array([len(u) for u in groups.value_users] + [0], dtype=np.int16)
        self.has = np.zeros((count, values + 1), dtype=bool)
        self.has[:, :values] = ideals[:, groups.value_group]
        is_open = self.has & (self.used < self.degree)
        self.width = max(1, int(is_open.sum(axis=1).max()))
        self.open = np.full((count, self.width), values)
        self.place = np.full((count, values + 1), -1, dtype=np.int16)
        for j in range(count):
            mine = np.nonzero(is_open[j])[0]
            self.open[j, : len(mine)] = mine
            self.place[j, mine] = np.arange(len(mine))
        self.n_open = is_open.sum(axis=1)
        self.value_cost = np.append(groups.value_cost, 0.0)
        self.open_cost = self.value_cost[self.open]
        self.open_used = np.take_along_axis(self.used, self.open, axis=1)
        self.out_cost = (self.value_cost * is_open).sum(axis=1)
        self.size = ideals @ groups.size
        self.accelerator = ideals @ groups.accelerator
        self.cpu_only = ideals @ (~groups.supported).astype(int)
        packed = np.packbits(ideals, axis=1)
        pad = -packed.shape[1] % 8
        self.words = np.pad(packed, ((0, 0), (0, pad))).view(np.uint64)
        self.count = ideals.sum(axis=1)
        self.ideals = ideals
        self.groups = groups
        self.tail = tails(groups)
        self.ancestors = ancestry(groups)

    def below(self, candidates: np.ndarray, j: int, limit: float) -> np.ndarray:
        """Those candidates that lie within ideal j and from which one step may lead to it."""
        one_fewer = self.count[candidates] == self.count[j] - 1
        candidates = candidates[one_fewer | (self.size[j] - self.size[candidates] <= limit)]
        return candidates[~(self.words[candidates] & ~self.words[j]).any(axis=1)]

    def on_accelerator(self, froms: np.ndarray, j: int, limit: float) -> np.ndarray:
        """Those of ``froms`` from which an accelerator can do all that ideal j adds."""
        fits = self.size[j] - self.size[froms] <= limit
        return froms[fits & (self.cpu_only[j] == self.cpu_only[froms])]

    def waits(self, j: int) -> list[np.ndarray]:
        return waits(self.groups, self.ancestors, self.ideals[j], self.open[j][: self.n_open[j]])

    def after(self, j: int) -> np.ndarray:
        opens = self.open[j][: self.n_open[j]]
        return np.array([max(a for w, a in self.tail[u].items() if not self.ideals[j, w]) for u in opens])

    def touched(self, froms: np.ndarray, j: int) -> np.ndarray:
        return self.used[j][self.open[froms]] > self.open_used[froms]

    def length(self, froms: np.ndarray, j: int) -> np.ndarray:
        """Time of the subgraphs between ideals ``froms`` and j: in, compute, out."""
        still = self.used[j][self.open[froms]] < self.degree[self.open[froms]]
        cost = self.open_cost[froms]
        return (
            self.accelerator[j]
            - self.accelerator[froms]
            + (self.touched(froms, j) * cost).sum(axis=1)
            + self.out_cost[j]
            - (still * cost).sum(axis=1)
        )

    def cpu_length(self, froms: np.ndarray, j: int) -> np.ndarray:
        return self.groups.cpu[(self.ideals[j] & ~self.ideals[froms]).argmax(axis=1)]


def completions(t: Tables, limit: float, accelerators: int, progress: Progress = iter) -> np.ndarray:
    """Per ideal and accelerators left, a lower bound on what follows if all open values are ready at 0.

    By induction from the end: after a step of length c, either every user of an open value must wait
    for what the step made, and c passes before the rest; or the rest may overlap with the step, and
    the larger of the two counts.
    """
    count = len(t.ideals)
    bound = np.full((count, accelerators + 1), np.inf)
    bound[-1] = 0
    for j in progress(range(count - 1, 0, -1)):
        if not np.isfinite(bound[j, -1]):
            continue
        opens = t.open[j][: t.n_open[j]]
        sets = [s for of in t.waits(j) for s in of]
        after = t.after(j)
        cand = t.below(np.arange(j), j, limit)
        smaller = cand[t.count[cand] == t.count[j] - 1]
        cand = t.on_accelerator(cand, j, limit)
        for kind, froms in ((1, cand), (0, smaller)):
            if not len(froms):
                continue
            const = t.length(froms, j) if kind else t.cpu_length(froms, j)
            fresh = ~t.has[froms][:, opens]
            path = np.where(fresh, after, 0.0).max(axis=1, initial=0.0) + const
            behind = np.ones(len(froms), dtype=bool)
            for needed in sets:
                behind &= fresh[:, needed].any(axis=1)
            shift = np.where(behind, const, 0.0)
            follow = bound[j, :-1] if kind else bound[j]
            value = np.maximum(shift[:, None] + follow, path[:, None])
            columns = slice(1, None) if kind else slice(None)
            bound[froms, columns] = np.minimum(bound[froms, columns], value)
    return bound
