"""Dynamic programming over contiguous segments: the shortest path over cuts of the order.

A state is how many devices of each class are used, and on which the last segment runs; an edge is one
more segment. Segments of a stack of layers are optimal to a tenth of a percent (placement of a chain:
Bokhari, "Partitioning problems in parallel, pipelined, and distributed computing", 1988). Weights that
several operations read are given a home first, one after the other, and their readers go there, as an
embedding that is also the head asks for: A, B, ..., A.

Each arrival is priced at the link from the segment before, inputs at the host's. The tables are close to
exact; :class:`~graphplan.passes.placement.arrays.Arrays` and the evaluator have the last word.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from graphplan.passes.placement.arrays import Arrays, Bools, Floats, Ints
from graphplan.passes.placement.bounds.symmetry import device_classes
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort

Homes = Mapping[str, int]
_State = tuple[tuple[int, ...], int]  # devices used of each class, class of the last; -1 for host and CPU


@dataclass(frozen=True, slots=True)
class Segment:
    """Operations ``start .. end - 1`` on a device; ``excess`` bytes of weights do not fit there."""

    start: int
    end: int
    device: int
    excess: float


@dataclass(frozen=True, slots=True)
class _Tables:
    """Of segments by the cut where they start (rows) and how many cuts later they end (columns).

    Bytes and numbers of arrivals from the host and from earlier segments, bytes of weights, the most bytes
    of activations at once, and the largest bytes of weights that one operation reads.
    """

    host_bytes: Floats
    host_count: Floats
    peer_bytes: Floats
    peer_count: Floats
    weights: Floats
    activations: Floats
    widest: Floats


@dataclass(slots=True)
class _Row:
    """The best seconds with which a state reaches each cut, and the segment that ends there.

    ``number`` counts rows as they are made; ``origin`` is that of the row before the segment.
    """

    number: int
    seconds: Floats
    origin: Ints
    start: Ints


class SegmentDP:
    """Segments of a problem's order.

    Args:
        arrays: of the problem.
        effort: what is charged.
        streaming: whether a segment may keep the excess of its weights in CPU memory.
        use_cpu: whether the CPU may have segments, any number of them.
        slowest: minimise the longest segment instead of the sum.
        in_order: fill classes of devices one after the other. So few states leave work for more cuts, as
            tight budgets ask for.
        loose: minimise the bytes over the budgets, then seconds. A cut may part operations that must share
            a device, and segments hold operations that may not run there; these go where they may afterwards.
    """

    def __init__(
        self,
        arrays: Arrays,
        effort: Effort,
        *,
        streaming: bool = False,
        use_cpu: bool = False,
        slowest: bool = False,
        in_order: bool = False,
        loose: bool = False,
    ) -> None:
        self.arrays, self.effort = arrays, effort
        self.streaming, self.slowest, self.in_order, self.loose = streaming, slowest, in_order, loose
        self.cpu = arrays.cpu if use_cpu else None
        self.classes = [members for members in device_classes(arrays) if arrays.accelerates[members[0]]]
        self._made: dict[frozenset[str], _Tables] = {}
        self._read()
        self.cuts = self._cuts()

    # -- the order -----------------------------------------------------------------------------------

    def _read(self) -> None:
        """Reads in order, with the operation at which each item was last at hand."""
        arrays = self.arrays
        inner = arrays.reader < arrays.count
        items, readers = arrays.item[inner], arrays.reader[inner]
        at = np.where(arrays.source >= 0, arrays.source, -1)
        at[arrays.values :] = -1
        made = np.flatnonzero(at >= 0)
        np.minimum.at(at, items[at[items] >= 0], readers[at[items] >= 0])
        later = made[arrays.source[made] > at[made]]  # in a folded order, what is read before it is made
        items = np.concatenate([items, later])
        readers = np.concatenate([readers, arrays.source[later]])
        order = np.argsort(readers, kind="stable")
        self.read_item, self.read_by = items[order], readers[order]
        previous = np.empty(len(self.read_item), dtype=np.int64)
        for k, (item, reader) in enumerate(zip(self.read_item.tolist(), self.read_by.tolist(), strict=True)):
            previous[k] = at[item]
            at[item] = reader
        self.previous = previous
        self.is_weight = self.read_item >= arrays.values
        fixed = arrays.fixed[self.read_item]
        self.is_fixed = self.is_weight & (fixed >= 0)
        self.last = self._last()

    def _last(self) -> Ints:
        """(items,) the last operation that needs each, views included."""
        arrays = self.arrays
        last = np.full(len(arrays.names), -1)
        np.maximum.at(last, arrays.item, arrays.reader)
        np.maximum.at(last, arrays.looked_at, arrays.looking)
        last = np.maximum(last, arrays.source)
        last[arrays.staying] = arrays.count
        last[[item for item, _ in arrays.written]] = arrays.count
        if arrays.folded:
            last = np.maximum(last, _kept_until(arrays))
        base, levels = arrays.views
        for level in reversed(levels):
            np.maximum.at(last, base[level], last[level])
        found: Ints = np.minimum(last, arrays.count - 1)
        return found

    def _cuts(self) -> Ints:
        """The ends, and positions that fewer bytes cross than their neighbours, spread over the weights."""
        arrays = self.arrays
        allowed = np.ones(arrays.count + 1, dtype=bool)
        for members in () if self.loose else arrays.units:
            allowed[members[0] + 1 : members[-1] + 1] = False
        allowed[[0, -1]] = True
        found = np.flatnonzero(allowed)
        steps = len(self.states_of(self.classes))
        if not self.in_order:
            steps *= len(self.classes) * (1 if self._uniform else len(self.classes))
        visits = (
            PARAMS.segment_share * self.effort.total / (4 if self.streaming or self.cpu is not None else 1)
        )
        limit = int(np.clip(math.sqrt(7.0 * visits / max(1, steps)), 32, PARAMS.segment_cuts))
        self.complete = len(found) <= limit  # whether no cut is left out
        crossing = arrays.crossing[found]
        crossing[[0, -1]] = np.inf
        before, here, after = crossing[:-2], crossing[1:-1], crossing[2:]
        order = np.lexsort((here, (here > before) | (here > after)))
        return spread(found, order, self._progress, limit)

    @cached_property
    def _progress(self) -> Floats:
        """(positions,) share of the weights, and of the operations, that lies before each."""
        arrays = self.arrays
        fresh = self.is_weight & (self.previous < 0)
        nbytes = np.bincount(self.read_by[fresh], arrays.nbytes[self.read_item[fresh]], arrays.count)
        each = nbytes / max(float(nbytes.sum()), 1.0) + 1.0 / arrays.count
        return np.concatenate([[0.0], each.cumsum() / 2])

    def _tables(self, homes: Homes) -> _Tables:
        arrays, cuts, n = self.arrays, self.cuts, self.arrays.count
        decided = np.array([arrays.names[item] in homes for item in self.read_item], dtype=bool)
        mine = self.is_weight & ~decided & ~self.is_fixed
        sizes = np.zeros(len(self.read_item))
        stored = arrays.weight_bytes
        sizes[self.is_weight] = stored[self.read_item[self.is_weight] - arrays.values]
        fresh = mine & (self.previous < 0)
        reach = self._reach(fresh, sizes)
        tables = _Tables(*(np.zeros((len(cuts), reach)) for _ in range(7)))
        made, copied, workspace = arrays.made_bytes, arrays.copied_bytes, arrays.workspace
        spec = self.classes[0][0]
        own = np.flatnonzero(arrays.source[: arrays.values] >= 0)
        own = own[np.argsort(arrays.source[own], kind="stable")]
        birth, death, size = arrays.source[own], self.last[own], made[own, spec]
        copies, until = copied[self.read_item, spec], self.last[self.read_item]
        moved = arrays.nbytes[self.read_item]
        from_host = (~self.is_weight | self.is_fixed) & (self.previous < 0)
        again = ~decided & (self.previous >= 0)
        per_operation = np.bincount(self.read_by[mine], sizes[mine], n)
        ends = np.minimum(np.arange(len(cuts)) + reach, len(cuts) - 1)
        reads = np.searchsorted(self.read_by, cuts)
        births = np.searchsorted(birth, cuts)
        for row in range(len(cuts) - 1):
            start, end, last_row = int(cuts[row]), int(cuts[ends[row]]), ends[row]
            count, at = end - start, cuts[row + 1 : row + 1 + reach] - 1 - start
            columns = slice(0, len(at))
            r, b = slice(reads[row], reads[last_row]), slice(births[row], births[last_row])
            reader, peer = self.read_by[r] - start, again[r] & (self.previous[r] < start)
            for chosen, nbytes, number in (
                (from_host[r], tables.host_bytes, tables.host_count),
                (peer, tables.peer_bytes, tables.peer_count),
            ):
                nbytes[row, columns] = np.bincount(reader[chosen], moved[r][chosen], count).cumsum()[at]
                number[row, columns] = np.bincount(reader[chosen], minlength=count).cumsum()[at]
            read = fresh[r]
            tables.weights[row, columns] = np.bincount(reader[read], sizes[r][read], count).cumsum()[at]
            copy = peer | (~self.is_weight[r] & (self.previous[r] < 0))  # of shared weights too
            change = np.zeros(count + 1)
            change += np.bincount(reader[copy], copies[r][copy], count + 1)
            change -= np.bincount(np.minimum(until[r][copy] + 1 - start, count), copies[r][copy], count + 1)
            change += np.bincount(birth[b] - start, size[b], count + 1)
            change -= np.bincount(np.minimum(death[b] + 1 - start, count), size[b], count + 1)
            live = change.cumsum()[:-1] + workspace[spec, start:end]
            tables.activations[row, columns] = np.maximum.accumulate(live)[at]
            tables.widest[row, columns] = np.maximum.accumulate(per_operation[start:end])[at]
        self.effort.charge(3000.0 * len(cuts))
        return tables

    def _reach(self, fresh: Bools, sizes: Floats) -> int:
        """How many cuts further a segment may end at most, by the bytes of its weights."""
        if self.streaming or self.cpu is not None or self.loose:
            return len(self.cuts) - 1
        nbytes = np.bincount(self.read_by[fresh], sizes[fresh], self.arrays.count)
        total = np.concatenate([[0.0], nbytes.cumsum()])[self.cuts]
        most = max(self.arrays.room[members[0]] for members in self.classes)
        found = np.searchsorted(total, total + most, side="right") - 1 - np.arange(len(self.cuts))
        return max(1, min(int(found.max()), len(self.cuts) - 1))

    # -- homes of shared weights ---------------------------------------------------------------------

    def homes(self) -> Iterator[Homes]:
        """No home decided; and all large shared weights on one device, for one of each class."""
        yield {}
        arrays, large = self.arrays, self.arrays.large_shared
        for members in self.classes if large else ():
            if arrays.nbytes[large].sum() <= arrays.room[members[0]]:
                yield {arrays.names[item]: members[0] for item in large}

    # -- the shortest path ---------------------------------------------------------------------------

    def placements(self, homes: Homes) -> Iterator[tuple[list[Segment], Ints]]:
        """The cheapest segments and their devices; again with margins, while exact peaks pass a budget."""
        margin = np.zeros(self.arrays.computing)
        for attempt in range(1 + PARAMS.retries):
            if attempt and self.effort.over:
                return
            found = self._solve(homes, margin)
            if found is None:
                return
            devices = self.devices(found, homes)
            yield found, devices
            over = np.maximum(0.0, self.arrays.peaks(devices) - self.arrays.room)
            if not over.any() or self.streaming:
                return
            for members in self.classes:
                margin[members] += 1.02 * over[members].max()

    def devices(self, segments: list[Segment], homes: Homes) -> Ints:
        """(operations,) devices."""
        arrays = self.arrays
        found = np.zeros(arrays.count, dtype=np.int64)
        for segment in segments:
            found[segment.start : segment.end] = segment.device
        units = np.array([found[members[-1]] for members in arrays.units], dtype=np.int64)
        for name, device in homes.items():
            units[list(arrays.readers[arrays.item_of[name]])] = device
        return arrays.expand(units)

    @cached_property
    def _uniform(self) -> bool:
        """Whether all links among accelerators are the same, so that it does not matter which was last."""
        used = [d for members in self.classes for d in members]
        arrays = self.arrays
        links = {(arrays.latency[a, b], arrays.per_byte[a, b]) for a in used for b in used if a != b}
        return len(links) <= 1

    @cached_property
    def _slowest(self) -> float:
        """More seconds than a placement takes: so much is a byte over a budget worth."""
        arrays = self.arrays
        each = np.where(np.isfinite(arrays.compute), arrays.compute, 0.0).max(axis=0).sum()
        moves = arrays.latency.max() + arrays.nbytes[arrays.item] * arrays.per_byte.max()
        return float(each + moves.sum())

    def states_of(self, classes: list[list[int]]) -> list[tuple[int, ...]]:
        """How many devices of each of these classes are used, in an order in which one more comes later."""
        return used_devices([*map(len, classes)], 0 if self.in_order else PARAMS.relaxed_states)

    def _solve(self, homes: Homes, margin: Floats) -> list[Segment] | None:
        tables = self._tables_for(homes)
        taken = np.zeros(self.arrays.computing)
        for name, device in homes.items():
            taken[device] += self.arrays.nbytes[self.arrays.item_of[name]]
        free = [[d for d in members if not taken[d]] for members in self.classes]
        # a home is a class of its own, with the last reader
        classes = [members for members in free if members] + [[d] for d in np.flatnonzero(taken).tolist()]
        there = taken + self.arrays.fixed_bytes
        space = self.arrays.room - there - margin
        used = [members[0] for members in classes] + ([] if self.cpu is None else [self.cpu])
        # bytes of each segment beside what is there: weights are in one storage with that
        stored = {d: self.arrays.specs[d].resident_alone(tables.weights + there[d]) for d in used}
        needs = {d: stored[d] - there[d] + tables.activations for d in used}
        costs = [self._seconds(tables, d, needs[d] - space[d], space[d], homes) for d in used]
        on_cpu = None if self.cpu is None else costs.pop()
        path = _ShortestPath(self, classes, costs, on_cpu, tables).run()
        if path is None:
            return None
        found = []
        for i, j, device in path:
            first = device if device in needs else next(m[0] for m in classes if device in m)
            need = needs[first][i, j - i - 1]
            excess = 0.0 if device == self.cpu else max(0.0, float(need - space[device]))
            found.append(Segment(int(self.cuts[i]), int(self.cuts[j]), device, excess))
        return found

    def _tables_for(self, homes: Homes) -> _Tables:
        """Where the homes are does not matter to the tables, only of which weights."""
        names = frozenset(homes)
        if names not in self._made:
            self._made[names] = self._tables(homes)
        return self._made[names]

    def _seconds(self, tables: _Tables, device: int, excess: Floats, space: float, homes: Homes) -> Floats:
        """(rows, columns) of each segment on a device, without what arrives from other segments."""
        arrays, cuts, last = self.arrays, self.cuts, len(self.cuts) - 1
        ends = np.arange(1, len(cuts) + 1)[:, None] + np.arange(tables.weights.shape[1])[None, :]
        exists, ends = ends <= last, np.minimum(ends, last)
        each = arrays.compute[device].copy()
        if self.loose:
            each[~np.isfinite(each)] = 0.0
        for name, home in homes.items():  # the last reader, mostly a head, is where its weight is
            readers = arrays.reader[arrays.item == arrays.item_of[name]]
            if home != device:
                each[readers[readers < arrays.count].max()] = np.inf
        able = np.isfinite(each)
        barred = np.concatenate([[0], (~able).cumsum()])[cuts]
        total = np.concatenate([[0.0], np.where(able, each, 0.0).cumsum()])[cuts]
        host = arrays.host
        seconds = total[ends] - total[:, None]
        seconds += tables.host_count * arrays.latency[host, device]
        seconds += tables.host_bytes * arrays.per_byte[host, device]
        returned = arrays.item[arrays.reader == arrays.count]
        if len(returned) and not self.slowest:  # the last stage of several passes on as the others do
            back = len(returned) * arrays.latency[device, host]
            back += float(arrays.nbytes[returned].sum()) * arrays.per_byte[device, host]
            seconds = seconds + np.where(ends == last, back, 0.0)
        fits = excess <= 0
        if self.streaming and device != self.cpu:
            # the buffers take room of their own, and copies overlap with what is computed
            source = self.cpu if self.cpu is not None else host
            nbytes = excess + 2 * tables.widest
            seconds = np.where(fits, seconds, np.maximum(seconds, nbytes * arrays.per_byte[source, device]))
            fits |= tables.activations + 2 * tables.widest <= space
        elif self.loose:
            seconds = seconds + np.where(fits, 0.0, excess * self._slowest)
            fits |= True
        possible: Floats = np.where(fits & exists & (barred[ends] == barred[:, None]), seconds, np.inf)
        return possible


class _ShortestPath:
    """One run over the states."""

    def __init__(
        self,
        dp: SegmentDP,
        classes: list[list[int]],
        costs: list[Floats],
        on_cpu: Floats | None,
        tables: _Tables,
    ) -> None:
        self.dp, self.classes, self.costs, self.on_cpu, self.tables = dp, classes, costs, on_cpu, tables
        self.cuts = len(dp.cuts)
        self.states = dict.fromkeys(dp.states_of(classes))  # in order
        self.rows: dict[_State, _Row] = {}
        self._by_end: dict[tuple[int, int], Floats] = {}

    def run(self) -> list[tuple[int, int, int]] | None:
        """(first cut, last cut, device) of each segment, in order."""
        start = tuple([0] * len(self.classes))
        self._row((start, -1)).seconds[0] = 0.0
        for state in self.states:
            for last in [*range(len(self.classes)), -1]:  # the CPU, after which others follow, is last
                self._extend(state, last)
        ends = [name for name in self.rows if np.isfinite(self.rows[name].seconds[-1])]
        if not ends:
            return None
        least = min(self.rows[name].seconds[-1] for name in ends)
        equal = [name for name in ends if self.rows[name].seconds[-1] <= least * (1 + ROUNDING)]
        return self._trace(min(equal, key=lambda name: sum(name[0])))

    def _row(self, name: _State) -> _Row:
        if name not in self.rows:
            none = np.full(self.cuts, -1)
            self.rows[name] = _Row(len(self.rows), np.full(self.cuts, np.inf), none, none.copy())
        return self.rows[name]

    def _extend(self, state: tuple[int, ...], last: int) -> None:
        name = state, last
        row = self.rows.get(name)
        if row is None or not np.isfinite(row.seconds).any():
            return
        if self.on_cpu is not None:  # as often as it helps
            self._relax(row, self._cost(last, -1), (state, -1))
        for c, members in enumerate(self.classes):
            after = (*state[:c], state[c] + 1, *state[c + 1 :])
            if state[c] < len(members) and after in self.states:
                self._relax(row, self._cost(last, c), (after, 0 if self.dp._uniform else c))

    def _cost(self, last: int, target: int) -> Floats:
        """Seconds of segments by where they end: of ``w`` columns, ``t`` is from cut ``end - w + t``."""
        key = (last, target) if not self.dp._uniform else (min(last, 0), target)
        if key not in self._by_end:
            base = self.on_cpu if target < 0 else self.costs[target]
            assert base is not None
            latency, per_byte = self._link(last, target)
            seconds = base + self.tables.peer_count * latency + self.tables.peer_bytes * per_byte
            reach = seconds.shape[1]
            padded = np.full((len(seconds) + reach, reach), np.inf)
            padded[reach:] = seconds
            ends = np.arange(len(seconds))[:, None] + np.arange(reach)[None, :]
            self._by_end[key] = padded[ends, reach - 1 - np.arange(reach)[None, :]]
        return self._by_end[key]

    def _link(self, last: int, target: int) -> tuple[float, float]:
        """From the device of the segment before; of the CPU's, as of the host's."""
        arrays, cpu = self.dp.arrays, self.dp.cpu
        here = self.classes[target][0] if target >= 0 else cpu
        assert here is not None
        if last < 0:
            before: int = cpu if cpu is not None else arrays.host
        else:
            peers = [d for d in self.classes[last] if d != here]
            if self.dp._uniform and not peers:
                peers = [d for members in self.classes for d in members if d != here]
            before = peers[0] if peers else here
        return float(arrays.latency[before, here]), float(arrays.per_byte[before, here])

    def _relax(self, row: _Row, cost: Floats, into: _State) -> None:
        """Extend a row by one segment."""
        reach = cost.shape[1]
        there = np.flatnonzero(np.isfinite(row.seconds))
        if not len(there):
            return
        ends = slice(int(there[0]) + 1, min(self.cuts, int(there[-1]) + reach + 1))
        padded = np.concatenate([np.full(reach, np.inf), row.seconds])
        before = sliding_window_view(padded, reach)[ends]
        through = np.maximum(before, cost[ends]) if self.dp.slowest else before + cost[ends]
        self.dp.effort.charge(500.0 + 0.15 * through.size)
        best = through.argmin(1)
        value = through[np.arange(len(best)), best]
        target = self._row(into)
        better = np.flatnonzero(value < target.seconds[ends] * (1 - ROUNDING))
        end = better + ends.start
        target.seconds[end] = value[better]
        target.origin[end] = row.number
        target.start[end] = end - reach + best[better]

    def _trace(self, name: _State) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        end, names = self.cuts - 1, list(self.rows)
        while end > 0:
            row = self.rows[name]
            before, start = names[int(row.origin[end])], int(row.start[end])
            used = [after - earlier for after, earlier in zip(name[0], before[0], strict=True)]
            if any(used):
                c = used.index(1)
                found.append((start, end, self.classes[c][before[0][c]]))
            else:
                assert self.dp.cpu is not None
                found.append((start, end, self.dp.cpu))
            name, end = before, start
        return found[::-1]


def _kept_until(arrays: Arrays) -> Ints:
    """(items,) in a folded order, what comes last while an item waits for the backward pass; -1 for others.

    What the forward pass saves is there while the rest of the segment runs, forward and backward; what is
    computed again, while the operations are that are computed again together.
    """
    found = np.full(len(arrays.names), -1)
    end = np.full(arrays.count, -1)  # operation -> what comes last of a run of repeated ones
    run: list[int] = []
    for index in [*arrays.running.tolist(), None]:
        if index is not None and arrays.operations[index].repeats:
            run.append(index)
        else:
            end[run] = max(run, default=-1)
            run = []
    backward = np.array([operation.backward for operation in arrays.operations])
    end[~backward] = arrays.count
    inner = arrays.reader < arrays.count
    items, readers = arrays.item[inner], arrays.reader[inner]
    saved = np.unique(items[backward[readers] & (arrays.source[items] >= 0) & (items < arrays.values)])
    found[saved] = end[arrays.source[saved]]
    return found


def spread(cuts: Ints, order: Ints, progress: Floats, most: int) -> Ints:
    """So many of these cuts, both ends among them: the best of each stretch of the work, then of all.

    Args:
        cuts: positions.
        order: indices of those between the ends, the best first.
        progress: (positions,) share of the work before each.
        most: cuts; there are half as many stretches.
    """
    inner = cuts[1:-1]
    stretch = np.floor(progress[inner] * (most // 2)).astype(np.int64)
    _, first = np.unique(stretch[order], return_index=True)
    kept = order[np.sort(first)]
    chosen = np.concatenate([kept, order[~np.isin(order, kept)]])[: most - 2]
    return np.concatenate([cuts[:1], np.sort(inner[chosen]), cuts[-1:]])


def used_devices(
    counts: Sequence[int], most: int, order: Iterable[int] | None = None
) -> list[tuple[int, ...]]:
    """How many devices of each class are used, in an order in which one more comes later.

    Where there are more than ``most`` ways, the classes are filled one after the other, in this order.
    """
    if math.prod(count + 1 for count in counts) <= most:
        return sorted(product(*(range(count + 1) for count in counts)), key=sum)
    used = [0] * len(counts)
    found = [tuple(used)]
    for c in range(len(counts)) if order is None else order:
        for _ in range(counts[c]):
            used[c] += 1
            found.append(tuple(used))
    return found
