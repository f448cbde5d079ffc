"""The least latency over chains of ideals: a dynamic program with Pareto labels.

A label of an ideal says how many accelerators were used, when each open value is ready, and a time
that the whole must take at least. A label that is no better than another in any of them is dropped.
With none dropped otherwise, the result is optimal over the given ideals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dnn_ideals import Groups
from dnn_tables import Progress, Tables, completions, lift

EPS = 1e-9


@dataclass(frozen=True)
class Step:
    """Groups added to an ideal: one subgraph on an accelerator, or one group on the CPU."""

    groups: tuple[int, ...]
    on_accelerator: bool


@dataclass(frozen=True)
class Chain:
    """The best chain; without steps, nothing was found and nothing proven."""

    steps: tuple[Step, ...]
    latency: float
    exact: bool


@dataclass
class _Batch:
    """New labels of one ideal, a row each."""

    ready: np.ndarray
    bound: np.ndarray
    used: np.ndarray
    parent: np.ndarray


class _Labels:
    """All labels, in growing arrays; those of one ideal are neighbours."""

    def __init__(self, ideals: int, width: int) -> None:
        self.ready = np.zeros((1024, width))
        self.bound = np.zeros(1024)
        self.used = np.zeros(1024, dtype=np.int16)
        self.of = np.zeros(1024, dtype=np.int64)
        self.parent = np.full(1024, -1, dtype=np.int64)
        self.first = np.zeros(ideals, dtype=np.int64)
        self.last = np.zeros(ideals, dtype=np.int64)
        self.last[0] = self.total = 1

    def of_ideals(self, ideals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The labels of some ideals, and for each the position of its ideal among ``ideals``."""
        counts = self.last[ideals] - self.first[ideals]
        row = np.repeat(np.arange(len(ideals)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self.first[ideals], counts) + within, row

    def add(self, j: int, new: _Batch, keep: np.ndarray) -> None:
        end = self.total + len(keep)
        while end > len(self.bound):
            for name in ("ready", "bound", "used", "of", "parent"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        rows = slice(self.total, end)
        self.ready[rows, : new.ready.shape[1]] = new.ready[keep]
        self.bound[rows], self.used[rows] = new.bound[keep], new.used[keep]
        self.of[rows], self.parent[rows] = j, new.parent[keep]
        self.first[j], self.last[j] = self.total, end
        self.total = end


def solve(
    groups: Groups,
    ideals: np.ndarray,
    limit: float,
    accelerators: int,
    upper: float = np.inf,
    width: int | None = None,
    most: int | None = None,
    rest: np.ndarray | None = None,
    progress: Progress = iter,
) -> Chain | None:
    """The best chain of a latency below ``upper``; None proves that there is none.

    At most ``width`` labels are kept per ideal and number of accelerators, and the program gives up
    above ``most`` labels in all; then nothing is proven. ``rest`` are its completions, if at hand.
    """
    tables = Tables(groups, ideals)
    if rest is None:
        rest = completions(tables, limit, accelerators)
    labels = _Labels(len(ideals), tables.width)
    exact = True
    for j in progress(range(1, len(ideals))):
        live = tables.below(np.nonzero(labels.last[:j])[0], j, limit)
        previous = live[tables.count[live] == tables.count[j] - 1]
        several = tables.on_accelerator(live, j, limit)
        batches = [
            _extend(tables, labels, rest, j, froms, on_accelerator, accelerators, upper - EPS)
            for froms, on_accelerator in ((several, True), (previous, False))
            if len(froms)
        ]
        if not batches:
            continue
        new = _Batch(
            *(np.concatenate([getattr(b, n) for b in batches]) for n in ("ready", "bound", "used", "parent"))
        )
        if len(new.bound):
            keep, whole = pareto(np.column_stack([new.used, new.bound, new.ready]), width)
            exact &= whole
            labels.add(j, new, keep)
        if most is not None and labels.total > most:
            return Chain((), np.inf, False)
    if not labels.last[-1]:
        return None if exact else Chain((), np.inf, False)
    return _trace(ideals, labels, exact)


def _extend(
    tables: Tables,
    labels: _Labels,
    rest: np.ndarray,
    j: int,
    froms: np.ndarray,
    on_accelerator: bool,
    accelerators: int,
    goal: float,
) -> _Batch:
    """The labels that one step makes of those of the ideals ``froms``, if they can end below ``goal``."""
    touched = tables.touched(froms, j)
    length = tables.length(froms, j) if on_accelerator else tables.cpu_length(froms, j)
    label, row = labels.of_ideals(froms)
    if on_accelerator:
        free = labels.used[label] < accelerators
        label, row = label[free], row[free]
    finish = (labels.ready[label] * touched[row]).max(axis=1) + length[row]
    bound = np.maximum(labels.bound[label], finish)
    good = bound < goal
    label, row, finish, bound = label[good], row[good], finish[good], bound[good]
    source = froms[row]
    opens = tables.open[j][: tables.n_open[j]]
    ready = np.empty((len(label), len(opens)))
    for c, u in enumerate(opens):
        kept = labels.ready[label, tables.place[source, u]]
        ready[:, c] = np.where(tables.has[source, u], kept, finish)
    used = labels.used[label] + np.int16(on_accelerator)
    if len(opens):
        lift(ready, tables.waits(j))
        path = (ready + tables.after(j)).max(axis=1)
        bound = np.max([bound, path, ready.min(axis=1) + rest[j, accelerators - used]], axis=0)
    good = bound < goal
    return _Batch(ready[good], bound[good], used[good], label[good])


def _trace(ideals: np.ndarray, labels: _Labels, exact: bool) -> Chain:
    label = int(labels.first[-1] + np.argmin(labels.bound[labels.first[-1] : labels.last[-1]]))
    value = float(labels.bound[label])
    steps = []
    while labels.parent[label] >= 0:
        before = int(labels.parent[label])
        added = np.nonzero(ideals[labels.of[label]] & ~ideals[labels.of[before]])[0]
        steps.append(Step(tuple(int(v) for v in added), bool(labels.used[label] > labels.used[before])))
        label = before
    return Chain(tuple(reversed(steps)), value, exact)


def pareto(rows: np.ndarray, width: int | None) -> tuple[np.ndarray, bool]:
    """Rows that no other is at most equal to in all columns, and whether ``width`` dropped none of them.

    Width counts the rows of one value of the first column, the accelerators used.
    """
    index = np.lexsort((rows[:, 1:].sum(axis=1), rows[:, 1], rows[:, 0]))
    left = rows[index]
    keep: list[int] = []
    kept: dict[float, int] = {}
    whole = True
    while len(left):
        head = left[0]
        if width is not None and kept.get(head[0], 0) >= width:
            whole = False
            rest = left[:, 0] != head[0]
        else:
            keep.append(int(index[0]))
            kept[head[0]] = kept.get(head[0], 0) + 1
            rest = (left < head - EPS).any(axis=1)
        left, index = left[rest], index[rest]
    return np.array(keep), whole
