"""The least latency over chains of ideals: a dynamic program with Pareto labels.

A label of an ideal says how many accelerators were used, when each value that is still needed is
ready, and the least total latency that can follow. One label dominates another if it is no worse in
all of them; with no label dropped otherwise, the result is optimal over the given ideals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dnn_ideals import Groups

EPS = 1e-9


@dataclass(frozen=True)
class Chain:
    """A result: the steps (groups, on an accelerator or not), its latency, whether it is exact over the ideals."""

    steps: tuple[tuple[tuple[int, ...], bool], ...]
    latency: float
    exact: bool
    labels: int
    lower: float = 0.0


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
        on_accelerator[v] = groups.accelerator[v] + stay
    return tail


def completions(groups: Groups, t: _Tables, limit: float, accelerators: int, progress=None) -> np.ndarray:
    """Per ideal and number of accelerators left, a lower bound on what follows if all open values are ready at 0.

    By induction from the end: after a step of length c, either every user of an open value must wait
    for what the step made, and c passes before the rest; or the rest may overlap with the step, and
    the larger of the two counts.
    """
    ideals, count = t.ideals, len(t.ideals)
    bound = np.full((count, accelerators + 1), np.inf)
    bound[-1] = 0
    sequence = range(count - 1, 0, -1)
    for j in progress(sequence) if progress else sequence:
        if not np.isfinite(bound[j, -1]):
            continue
        opens = t.open[j][: t.n_open[j]]
        sets = [s for of in t.waits(j) for s in of]
        after = t.after(j)
        cand = t.below(np.arange(j), j, limit)
        smaller = cand[t.count[cand] == t.count[j] - 1]
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


class _Tables:
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
        packed = np.packbits(ideals, axis=1)
        pad = -packed.shape[1] % 8
        self.words = np.pad(packed, ((0, 0), (0, pad))).view(np.uint64)
        self.count = ideals.sum(axis=1)
        self.ideals = ideals
        self.groups = groups
        self.tail = tails(groups)
        self.ancestors = ancestry(groups)

    def below(self, candidates: np.ndarray, j: int, limit: float) -> np.ndarray:
        """Those candidates that are within ideal j, at most ``limit`` bytes smaller."""
        candidates = candidates[self.size[j] - self.size[candidates] <= limit]
        return candidates[~(self.words[candidates] & ~self.words[j]).any(axis=1)]

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
            self.accelerator[j] - self.accelerator[froms]
            + (self.touched(froms, j) * cost).sum(axis=1)
            + self.out_cost[j] - (still * cost).sum(axis=1)
        )

    def cpu_length(self, froms: np.ndarray, j: int) -> np.ndarray:
        return self.groups.cpu[(self.ideals[j] & ~self.ideals[froms]).argmax(axis=1)]


def solve(
    groups: Groups,
    ideals: np.ndarray,
    limit: float,
    accelerators: int,
    upper: float = np.inf,
    width: int | None = None,
    progress=None,
) -> Chain | None:
    """The best chain below ``upper``; None if there is none (a proof, if ``width`` dropped nothing).

    At most ``width`` labels are kept per ideal and number of accelerators.
    """
    t = _Tables(groups, ideals)
    count = len(ideals)
    rest = completions(groups, t, limit, accelerators, progress)
    cap = 1024
    ready = np.zeros((cap, t.width + 1))  # last column: the padding
    bound = np.zeros(cap)
    used = np.zeros(cap, dtype=np.int16)
    of = np.zeros(cap, dtype=np.int64)
    parent = np.full(cap, -1, dtype=np.int64)
    total = 1
    live = np.zeros(count, dtype=bool)
    live[0] = True
    first = np.zeros(count, dtype=np.int64)
    last = np.zeros(count, dtype=np.int64)
    last[0] = 1
    exact = True
    lower = float(rest[0, -1])
    goal = upper - EPS
    sequence = range(1, count)
    for j in progress(sequence) if progress else sequence:
        cand = np.nonzero(live[:j])[0]
        cand = t.below(cand, j, limit)
        smaller = cand[t.count[cand] == t.count[j] - 1]
        parts = []
        sets, after = t.waits(j), t.after(j)
        for kind, froms in ((1, cand), (0, smaller)):
            if not len(froms):
                continue
            touched = t.touched(froms, j)
            const = t.length(froms, j) if kind else t.cpu_length(froms, j)
            n_labels = last[froms] - first[froms]
            row = np.repeat(np.arange(len(froms)), n_labels)
            label = np.arange(n_labels.sum()) - np.repeat(np.cumsum(n_labels) - n_labels, n_labels) + np.repeat(first[froms], n_labels)
            if kind:
                keep = used[label] < accelerators
                row, label = row[keep], label[keep]
            if not len(label):
                continue
            finish = (ready[label][:, :-1] * touched[row]).max(axis=1) + const[row]
            new_bound = np.maximum(bound[label], finish)
            keep = new_bound < goal
            row, label, finish, new_bound = row[keep], label[keep], finish[keep], new_bound[keep]
            opens = t.open[j][: t.n_open[j]]
            new = np.empty((len(label), len(opens)))
            src = froms[row]
            for c, u in enumerate(opens):
                where = t.place[src, u]
                new[:, c] = np.where(t.has[src, u], ready[label, where], finish)
            if len(opens):
                lift(new, sets)
                np.maximum(new_bound, (new + after).max(axis=1), out=new_bound)
                left = accelerators - used[label] - kind
                np.maximum(new_bound, new.min(axis=1) + rest[j, left], out=new_bound)
            keep = new_bound < goal
            parts.append((new[keep], new_bound[keep], used[label[keep]] + kind, label[keep]))
        if not parts:
            continue
        new = np.concatenate([p[0] for p in parts])
        nb = np.concatenate([p[1] for p in parts])
        nk = np.concatenate([p[2] for p in parts])
        npar = np.concatenate([p[3] for p in parts])
        if not len(nb):
            continue
        keep, whole = pareto(np.column_stack([nk, nb, new]), width)
        exact &= whole
        m = len(keep)
        while total + m > cap:
            cap *= 2
            ready = np.resize(ready, (cap, t.width + 1))
            bound, used, of, parent = (np.resize(a, cap) for a in (bound, used, of, parent))
        s = slice(total, total + m)
        ready[s] = 0
        ready[s, : new.shape[1]] = new[keep]
        bound[s], used[s], of[s], parent[s] = nb[keep], nk[keep], j, npar[keep]
        first[j], last[j] = total, total + m
        live[j] = True
        total += m
    if not live[count - 1]:
        return None if exact else Chain((), np.inf, False, total)
    mine = np.arange(first[-1], last[-1])
    label = int(mine[np.argmin(bound[mine])])
    best = float(bound[label])
    steps = []
    while parent[label] >= 0:
        p = int(parent[label])
        added = tuple(int(v) for v in np.nonzero(ideals[of[label]] & ~ideals[of[p]])[0])
        steps.append((added, bool(used[label] > used[p])))
        label = p
    return Chain(tuple(reversed(steps)), best, exact, total, lower)


def ancestry(groups: Groups) -> np.ndarray:
    """Row x holds the groups that x needs, directly or not, and x itself."""
    table = np.eye(len(groups), dtype=bool)
    for v, preds in enumerate(groups.predecessors):
        for p in preds:
            table[v] |= table[p]
    return table


def waits(groups: Groups, ancestors: np.ndarray, ideal: np.ndarray, opens: np.ndarray) -> list[np.ndarray]:
    """For each open value, the sets of open values that each of its users must wait for, as rows of booleans."""
    outside = [np.array([w for w in groups.value_users[u] if not ideal[w]]) for u in opens]
    result = []
    for users in outside:
        sets = np.stack([ancestors[users][:, of].any(axis=1) for of in outside], axis=1)
        result.append(np.unique(sets, axis=0))
    return result


def lift(ready: np.ndarray, sets: list[np.ndarray]) -> None:
    """Raise each time to the earliest at which a user of the value can start anyway; no schedule changes by it."""
    lifted = [
        np.min([ready[:, needed].max(axis=1) for needed in of], axis=0) if len(of) else ready[:, c]
        for c, of in enumerate(sets)
    ]
    for c, column in enumerate(lifted):
        ready[:, c] = column


def pareto(rows: np.ndarray, width: int | None) -> tuple[np.ndarray, bool]:
    """Rows that no other row is at most equal to in all columns; the first column is the accelerators used."""
    order = np.lexsort((rows[:, 1:].sum(axis=1), rows[:, 1], rows[:, 0]))
    left = rows[order]
    index = order
    keep = []
    per: dict[float, int] = {}
    whole = True
    while len(left):
        head = left[0]
        if width is not None and per.get(head[0], 0) >= width:
            whole = False
            rest = left[:, 0] != head[0]
        else:
            keep.append(index[0])
            per[head[0]] = per.get(head[0], 0) + 1
            rest = (left < head - EPS).any(axis=1)
        left, index = left[rest], index[rest]
    return np.array(keep), whole
