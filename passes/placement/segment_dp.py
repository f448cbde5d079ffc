"""Dynamic programming over contiguous segments: the shortest path over cuts of the order.

A state is the number of used devices of each class and the class of the last segment; an edge is one more
segment. For a stack of layers this is optimal to a tenth of a percent (placement of a chain: Bokhari,
"Partitioning problems in parallel, pipelined, and distributed computing", 1988). Large shared weights are
given a home first and their readers are placed there, as an embedding that is also the head needs.

A value from an earlier segment is priced at the link from the segment before, an input at the host's link.
The tables are close to exact; :class:`~graphplan.passes.placement.arrays.Arrays` and the evaluator decide.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Generic, TypeVar

import numpy as np

from graphplan.passes.placement.arrays import Arrays, Floats, Ints
from graphplan.passes.placement.bounds.symmetry import device_classes
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort

Homes = Mapping[str, int]
State = TypeVar("State", bound=Hashable)
_Used = tuple[tuple[int, ...], int]  # used devices of each class, class of the last; -1 for host and CPU


@dataclass(frozen=True, slots=True)
class Segment:
    """Operations ``start .. end - 1`` on a device; ``excess`` bytes of weights do not fit there."""

    start: int
    end: int
    device: int
    excess: float


@dataclass(frozen=True, slots=True)
class _Tables:
    """Tables of segments by the cuts where they start (rows) and end (columns).

    They hold bytes and numbers of values copied from the host and from earlier segments, bytes of weights,
    peak bytes of activations, and the most bytes of weights that one operation reads.
    """

    host_bytes: Floats
    host_count: Floats
    peer_bytes: Floats
    peer_count: Floats
    weights: Floats
    activations: Floats
    max_weight_bytes: Floats


@dataclass(slots=True)
class _Row:
    """(cuts,) the least cost of paths to each cut, and of each path's last edge the row and cut before it.

    ``number`` counts rows in the order of creation.
    """

    number: int
    cost: Floats
    origin: Ints
    cut: Ints


class CutPaths(Generic[State]):
    """Shortest paths over cuts, each with a state: the devices that the segments so far use.

    Args:
        start: the state of the empty path.
        at: the cut where it is.
        cuts: number of cuts.
        bottleneck: whether to minimise the largest cost of an edge, instead of the sum.
    """

    def __init__(self, start: State, at: int, cuts: int, *, bottleneck: bool = False) -> None:
        self._cuts, self._joined = cuts, np.maximum if bottleneck else np.add
        self.rows: dict[State, _Row] = {}
        self._row(start).cost[at] = 0.0

    def _row(self, state: State) -> _Row:
        if state not in self.rows:
            none = np.full(self._cuts, -1)
            self.rows[state] = _Row(len(self.rows), np.full(self._cuts, np.inf), none, none.copy())
        return self.rows[state]

    def extend(self, state: State, into: State, costs: Floats) -> None:
        """Extend the paths of a state by an edge, given (cuts after, cuts before) costs."""
        row, target = self.rows[state], self._row(into)
        through = self._joined(row.cost, costs)
        best = through.argmin(1)
        cost = through[np.arange(len(best)), best]
        better = np.flatnonzero(cost < target.cost * (1 - ROUNDING))
        target.cost[better] = cost[better]
        target.origin[better], target.cut[better] = row.number, best[better]

    def edges(self, state: State, cut: int) -> Iterator[tuple[State, State, int, int]]:
        """Yield the edges of the path to a cut, the last first: states before and after, cuts likewise."""
        states = list(self.rows)
        while (origin := int(self.rows[state].origin[cut])) >= 0:
            before, earlier = states[origin], int(self.rows[state].cut[cut])
            yield before, state, earlier, cut
            state, cut = before, earlier


class SegmentDP:
    """Finds placements that are contiguous segments of a problem's order.

    Args:
        arrays: arrays of the problem.
        effort: the effort to charge.
        streaming: whether a segment may keep the excess of its weights in CPU memory.
        use_cpu: whether the CPU may run segments, any number of them.
        slowest: minimise the longest segment instead of the sum.
        in_order: fill device classes one after the other: fewer states leave work for more cuts, which
            tight budgets need.
        minimise_excess: minimise the bytes over the budgets, then seconds. A cut may separate operations
            that must share a device, and a segment may hold operations that may not run there; they are
            moved afterwards.
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
        minimise_excess: bool = False,
    ) -> None:
        self.arrays, self.effort = arrays, effort
        self.streaming, self.slowest = streaming, slowest
        self.in_order, self.minimise_excess = in_order, minimise_excess
        self.cpu = arrays.cpu if use_cpu else None
        self.classes = [members for members in device_classes(arrays) if arrays.accelerates[members[0]]]
        self._tables_by_homes: dict[frozenset[str], _Tables] = {}
        self._read()
        self.cuts = self._cuts()

    # -- the order -----------------------------------------------------------------------------------

    def _read(self) -> None:
        """List the reads in order, each with the operation that made or last read its item before."""
        arrays = self.arrays
        inner = arrays.reader < arrays.count
        items, readers = arrays.item[inner], arrays.reader[inner]
        latest = np.where(arrays.source >= 0, arrays.source, -1)
        latest[arrays.values :] = -1
        tensors = np.flatnonzero(latest >= 0)
        np.minimum.at(latest, items[latest[items] >= 0], readers[latest[items] >= 0])
        later = tensors[arrays.source[tensors] > latest[tensors]]  # read before it is made, in a folded order
        items = np.concatenate([items, later])
        readers = np.concatenate([readers, arrays.source[later]])
        order = np.argsort(readers, kind="stable")
        self.read_item, self.read_by = items[order], readers[order]
        previous = np.empty(len(self.read_item), dtype=np.int64)
        for k, (item, reader) in enumerate(zip(self.read_item.tolist(), self.read_by.tolist(), strict=True)):
            previous[k] = latest[item]
            latest[item] = reader
        self.previous = previous
        self.is_weight = self.read_item >= arrays.values
        fixed = arrays.fixed[self.read_item]
        self.is_fixed = self.is_weight & (fixed >= 0)
        self.last = self._last()

    def _last(self) -> Ints:
        """(items,) the last operation that needs each item or a view of it."""
        arrays = self.arrays
        last = np.full(len(arrays.names), -1)
        np.maximum.at(last, arrays.item, arrays.reader)
        np.maximum.at(last, arrays.size_item, arrays.size_reader)
        last = np.maximum(last, arrays.source)
        last[arrays.live_at_end] = arrays.count
        last[[item for item, _ in arrays.written]] = arrays.count
        if arrays.folded:
            last = np.maximum(last, _saved_until(arrays))
        base, levels = arrays.views
        for level in reversed(levels):
            np.maximum.at(last, base[level], last[level])
        clipped: Ints = np.minimum(last, arrays.count - 1)
        return clipped

    def _cuts(self) -> Ints:
        """Return both ends, and positions that fewer bytes cross than their neighbours, spread evenly."""
        arrays = self.arrays
        allowed = np.ones(arrays.count + 1, dtype=bool)
        for members in () if self.minimise_excess else arrays.units:
            allowed[members[0] + 1 : members[-1] + 1] = False
        allowed[[0, -1]] = True
        positions = np.flatnonzero(allowed)
        steps = len(self.states_of(self.classes))
        if not self.in_order:
            steps *= len(self.classes) * (1 if self._uniform else len(self.classes))
        visits = (
            PARAMS.segment_share * self.effort.total / (4 if self.streaming or self.cpu is not None else 1)
        )
        limit = int(np.clip(math.sqrt(7.0 * visits / max(1, steps)), 32, PARAMS.segment_cuts))
        self.complete = len(positions) <= limit  # whether no cut is left out
        crossing = arrays.crossing[positions]
        crossing[[0, -1]] = np.inf
        left, inner, right = crossing[:-2], crossing[1:-1], crossing[2:]
        order = np.lexsort((inner, (inner > left) | (inner > right)))
        return choose_cuts(positions, order, self._progress, limit)

    @cached_property
    def _progress(self) -> Floats:
        """(positions,) share of the weights, activations and operations before each, with equal weight."""
        arrays = self.arrays
        fresh = self.is_weight & (self.previous < 0)
        weights = np.bincount(self.read_by[fresh], arrays.nbytes[self.read_item[fresh]], arrays.count)
        made = np.flatnonzero(arrays.source[: arrays.values] >= 0)
        activations = np.bincount(arrays.source[made], arrays.made_bytes[made].max(axis=1), arrays.count)
        parts = np.stack([weights, activations, np.ones(arrays.count)])
        shares: Floats = (parts / np.maximum(parts.sum(axis=1, keepdims=True), 1.0)).mean(axis=0)
        return np.concatenate([[0.0], shares.cumsum()])

    def _tables(self, homes: Homes) -> _Tables:
        arrays, cuts, n = self.arrays, self.cuts, self.arrays.count
        decided = np.array([arrays.names[item] in homes for item in self.read_item], dtype=bool)
        undecided = self.is_weight & ~decided & ~self.is_fixed
        sizes = np.zeros(len(self.read_item))
        sizes[self.is_weight] = arrays.weight_bytes[self.read_item[self.is_weight] - arrays.values]
        fresh = undecided & (self.previous < 0)
        tables = _Tables(*(np.zeros((len(cuts), len(cuts))) for _ in range(7)))
        device = self.classes[0][0]
        made = np.flatnonzero(arrays.source[: arrays.values] >= 0)
        made = made[np.argsort(arrays.source[made], kind="stable")]
        birth, death, size = arrays.source[made], self.last[made], arrays.made_bytes[made, device]
        copies, until = arrays.copied_bytes[self.read_item, device], self.last[self.read_item]
        moved, ones = arrays.nbytes[self.read_item], np.ones(len(self.read_item))
        from_host = (~self.is_weight | self.is_fixed) & (self.previous < 0)
        is_reread = ~decided & (self.previous >= 0)
        per_operation = np.bincount(self.read_by[undecided], sizes[undecided], n)
        reads = np.searchsorted(self.read_by, cuts)
        births = np.searchsorted(birth, cuts)
        for row in range(len(cuts) - 1):
            start, columns = int(cuts[row]), slice(row + 1, None)
            count, at = n - start, cuts[columns] - 1 - start
            r, b = slice(reads[row], None), slice(births[row], None)
            reader, peer = self.read_by[r] - start, is_reread[r] & (self.previous[r] < start)
            for table, chosen, amounts in (
                (tables.host_bytes, from_host[r], moved),
                (tables.host_count, from_host[r], ones),
                (tables.peer_bytes, peer, moved),
                (tables.peer_count, peer, ones),
                (tables.weights, fresh[r], sizes),
            ):
                table[row, columns] = np.bincount(reader[chosen], amounts[r][chosen], count).cumsum()[at]
            is_copied = peer | (~self.is_weight[r] & (self.previous[r] < 0))  # copies of shared weights too
            change = np.zeros(count + 1)
            change += np.bincount(reader[is_copied], copies[r][is_copied], count + 1)
            change -= np.bincount(
                np.minimum(until[r][is_copied] + 1 - start, count), copies[r][is_copied], count + 1
            )
            change += np.bincount(birth[b] - start, size[b], count + 1)
            change -= np.bincount(np.minimum(death[b] + 1 - start, count), size[b], count + 1)
            live = change.cumsum()[:-1] + arrays.workspace[device, start:n]
            tables.activations[row, columns] = np.maximum.accumulate(live)[at]
            tables.max_weight_bytes[row, columns] = np.maximum.accumulate(per_operation[start:])[at]
        self.effort.charge(3000.0 * len(cuts))
        return tables

    # -- homes of shared weights ---------------------------------------------------------------------

    def homes(self) -> Iterator[Homes]:
        """Yield no homes; then all large shared weights on one device, for one device of each class.

        Without accelerators there are no segments, and nothing is yielded.
        """
        arrays, large = self.arrays, self.arrays.large_shared
        if self.classes:
            yield {}
        if not large:
            return
        for members in self.classes:
            if arrays.nbytes[large].sum() <= arrays.room[members[0]]:
                yield {arrays.names[item]: members[0] for item in large}

    # -- the shortest path ---------------------------------------------------------------------------

    def placements(self, homes: Homes) -> Iterator[tuple[list[Segment], Ints]]:
        """Yield the cheapest segments and their devices; with margins while exact peaks exceed a budget."""
        margin = np.zeros(self.arrays.computing)
        for attempt in range(1 + PARAMS.retries):
            if attempt and self.effort.over:
                return
            segments = self._solve(homes, margin)
            if segments is None:
                return
            devices = self.devices(segments, homes)
            yield segments, devices
            over = np.maximum(0.0, self.arrays.peaks(devices) - self.arrays.room)
            if not over.any() or self.streaming:
                return
            for members in self.classes:
                margin[members] += 1.02 * over[members].max()

    def devices(self, segments: list[Segment], homes: Homes) -> Ints:
        """(operations,) devices of these segments, readers of weights with a home moved there."""
        arrays = self.arrays
        device_of = np.zeros(arrays.count, dtype=np.int64)
        for segment in segments:
            device_of[segment.start : segment.end] = segment.device
        units = np.array([device_of[members[-1]] for members in arrays.units], dtype=np.int64)
        for name, device in homes.items():
            units[list(arrays.readers[arrays.item_of[name]])] = device
        return arrays.expand(units)

    @cached_property
    def _uniform(self) -> bool:
        """Whether all links among accelerators are equal: the class of the last segment does not matter."""
        used = [d for members in self.classes for d in members]
        arrays = self.arrays
        links = {(arrays.latency[a, b], arrays.per_byte[a, b]) for a in used for b in used if a != b}
        return len(links) <= 1

    @cached_property
    def _price_over_budget(self) -> float:
        """Seconds that no placement exceeds: the price of one byte over a budget."""
        arrays = self.arrays
        compute = np.where(np.isfinite(arrays.compute), arrays.compute, 0.0).max(axis=0).sum()
        moves = arrays.latency.max() + arrays.nbytes[arrays.item] * arrays.per_byte.max()
        return float(compute + moves.sum())

    def states_of(self, classes: list[list[int]]) -> list[tuple[int, ...]]:
        """Return the states of these classes: see :func:`used_devices`."""
        return used_devices([*map(len, classes)], 0 if self.in_order else PARAMS.relaxed_states)

    def _solve(self, homes: Homes, margin: Floats) -> list[Segment] | None:
        tables = self._tables_for(homes)
        home_bytes = np.zeros(self.arrays.computing)
        for name, device in homes.items():
            home_bytes[device] += self.arrays.nbytes[self.arrays.item_of[name]]
        free = [[d for d in members if not home_bytes[d]] for members in self.classes]
        # a home is a class of its own: it runs the last reader
        classes = [members for members in free if members] + [
            [d] for d in np.flatnonzero(home_bytes).tolist()
        ]
        resident = home_bytes + self.arrays.fixed_bytes
        space = self.arrays.room - resident - margin
        used = [members[0] for members in classes] + ([] if self.cpu is None else [self.cpu])
        # bytes that each segment adds: its weights share a storage with the resident ones
        stored = {d: self.arrays.specs[d].resident_alone(tables.weights + resident[d]) for d in used}
        needs = {d: stored[d] - resident[d] + tables.activations for d in used}
        costs = [self._seconds(tables, d, needs[d] - space[d], space[d], homes) for d in used]
        path = _ShortestPath(self, classes, costs, tables).run()
        if path is None:
            return None
        segments = []
        for i, j, device in path:
            first = device if device in needs else next(m[0] for m in classes if device in m)
            nbytes = needs[first][i, j]
            excess = 0.0 if device == self.cpu else max(0.0, float(nbytes - space[device]))
            segments.append(Segment(int(self.cuts[i]), int(self.cuts[j]), device, excess))
        return segments

    def _tables_for(self, homes: Homes) -> _Tables:
        """Return the tables for these homes: they depend only on which weights have a home."""
        names = frozenset(homes)
        if names not in self._tables_by_homes:
            self._tables_by_homes[names] = self._tables(homes)
        return self._tables_by_homes[names]

    def _seconds(self, tables: _Tables, device: int, excess: Floats, space: float, homes: Homes) -> Floats:
        """(cuts, cuts) seconds of each segment on a device, without copies from other segments."""
        arrays, cuts, number = self.arrays, self.cuts, np.arange(len(self.cuts))
        exists = number > number[:, None]
        compute = arrays.compute[device].copy()
        if self.minimise_excess:
            compute[~np.isfinite(compute)] = 0.0
        for name, home in homes.items():  # the last reader, mostly a head, runs where its weight resides
            readers = arrays.reader[arrays.item == arrays.item_of[name]]
            if home != device:
                compute[readers[readers < arrays.count].max()] = np.inf
        allowed = np.isfinite(compute)
        forbidden = np.concatenate([[0], (~allowed).cumsum()])[cuts]
        total = np.concatenate([[0.0], np.where(allowed, compute, 0.0).cumsum()])[cuts]
        host = arrays.host
        seconds = total - total[:, None]
        seconds += tables.host_count * arrays.latency[host, device]
        seconds += tables.host_bytes * arrays.per_byte[host, device]
        returned = arrays.item[arrays.reader == arrays.count]
        if len(returned) and not self.slowest:  # no stage is charged for the results that it passes on
            returning = len(returned) * arrays.latency[device, host]
            seconds[:, -1] += returning + float(arrays.nbytes[returned].sum()) * arrays.per_byte[device, host]
        fits = excess <= 0
        if self.streaming and device != self.cpu:
            # prefetch buffers take room of their own; copies overlap with computation
            source = self.cpu if self.cpu is not None else host
            nbytes = excess + 2 * tables.max_weight_bytes
            seconds = np.where(fits, seconds, np.maximum(seconds, nbytes * arrays.per_byte[source, device]))
            fits |= tables.activations + 2 * tables.max_weight_bytes <= space
        elif self.minimise_excess:
            seconds = seconds + np.where(fits, 0.0, excess * self._price_over_budget)
            fits |= True
        possible: Floats = np.where(fits & exists & (forbidden == forbidden[:, None]), seconds, np.inf)
        return possible


class _ShortestPath:
    """One run of the dynamic program over its states.

    Args:
        dp: the problem.
        classes: the devices of each class.
        costs: seconds of segments on each class; at the end, those on the CPU if it may run segments.
        tables: tables of segments.
    """

    def __init__(self, dp: SegmentDP, classes: list[list[int]], costs: list[Floats], tables: _Tables) -> None:
        self.dp, self.classes, self.costs, self.tables = dp, classes, costs, tables
        self._edges: dict[tuple[int, int], Floats] = {}

    def run(self) -> list[tuple[int, int, int]] | None:
        """Return (first cut, last cut, device) of each segment in order; None if no path exists."""
        end, states = len(self.dp.cuts) - 1, dict.fromkeys(self.dp.states_of(self.classes))  # an ordered set
        start: _Used = tuple([0] * len(self.classes)), -1
        paths = CutPaths(start, 0, end + 1, bottleneck=self.dp.slowest)
        for used in product(states, (*range(len(self.classes)), -1)):  # the others extend into the CPU, -1
            for into, costs in self._extensions(used, states) if used in paths.rows else ():
                self.dp.effort.charge(500.0 + 0.15 * costs.size)
                paths.extend(used, into, costs)
        found = {used: row.cost[end] for used, row in paths.rows.items() if np.isfinite(row.cost[end])}
        if not found:
            return None
        shortest = min(found.values()) * (1 + ROUNDING)
        best = min((used for used in found if found[used] <= shortest), key=lambda used: sum(used[0]))
        return [
            (first, last, self._device(before, after))
            for (before, _), (after, _), first, last in [*paths.edges(best, end)][::-1]
        ]

    def _extensions(self, used: _Used, states: Container[tuple[int, ...]]) -> Iterator[tuple[_Used, Floats]]:
        """Yield the states with one more segment, and its costs."""
        state, last = used
        if self.dp.cpu is not None:  # the CPU may have any number of segments
            yield (state, -1), self._cost(last, -1)
        for c, members in enumerate(self.classes):
            after = (*state[:c], state[c] + 1, *state[c + 1 :])
            if state[c] < len(members) and after in states:
                yield (after, 0 if self.dp._uniform else c), self._cost(last, c)

    def _cost(self, last: int, target: int) -> Floats:
        """(cuts, cuts) seconds of segments by where they end and start."""
        key = (last, target) if not self.dp._uniform else (min(last, 0), target)
        if key not in self._edges:
            latency, per_byte = self._link(last, target)
            peers = self.tables.peer_count * latency + self.tables.peer_bytes * per_byte
            self._edges[key] = np.ascontiguousarray((self.costs[target] + peers).T)
        return self._edges[key]

    def _link(self, last: int, target: int) -> tuple[float, float]:
        """Return latency and seconds per byte from the segment before; -1 is the CPU, or the host."""
        arrays, cpu = self.dp.arrays, self.dp.cpu
        device = self.classes[target][0] if target >= 0 else cpu
        assert device is not None
        if last < 0:
            source: int = cpu if cpu is not None else arrays.host
        else:
            peers = [d for d in self.classes[last] if d != device]
            if self.dp._uniform and not peers:
                peers = [d for members in self.classes for d in members if d != device]
            source = peers[0] if peers else device
        return float(arrays.latency[source, device]), float(arrays.per_byte[source, device])

    def _device(self, before: tuple[int, ...], after: tuple[int, ...]) -> int:
        """Return the device of the segment between two states: the CPU if they use the same others."""
        for c, members in enumerate(self.classes):
            if after[c] > before[c]:
                return members[before[c]]
        assert self.dp.cpu is not None
        return self.dp.cpu


def _saved_until(arrays: Arrays) -> Ints:
    """(items,) in a folded order, the last operation while an item waits for the backward pass, else -1.

    Saved values are live while the rest of the segment runs, forward and backward. Recomputed values are live
    while the operations that are recomputed together run.
    """
    until = np.full(len(arrays.names), -1)
    end = np.full(arrays.count, -1)  # operation -> the last of its run of repeated operations
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
    until[saved] = end[arrays.source[saved]]
    return until


def choose_cuts(cuts: Ints, order: Ints, progress: Floats, limit: int) -> Ints:
    """Return at most ``limit`` cuts, both ends among them: the best of each stretch of work, then of all.

    Args:
        cuts: positions.
        order: indices of the cuts between the ends, the best first.
        progress: (positions,) share of the work before each.
        limit: number of cuts to return; there are half as many stretches.
    """
    inner = cuts[1:-1]
    stretch = np.floor(progress[inner] * (limit // 2)).astype(np.int64)
    _, first = np.unique(stretch[order], return_index=True)
    best = order[np.sort(first)]
    chosen = np.concatenate([best, order[~np.isin(order, best)]])[: limit - 2]
    return np.concatenate([cuts[:1], np.sort(inner[chosen]), cuts[-1:]])


def used_devices(
    counts: Sequence[int], max_states: int, order: Iterable[int] | None = None
) -> list[tuple[int, ...]]:
    """Return the numbers of used devices of each class; each follows those with one device fewer.

    If there are more than ``max_states`` states, the classes are filled one after the other, in ``order``.
    """
    if math.prod(count + 1 for count in counts) <= max_states:
        return sorted(product(*(range(count + 1) for count in counts)), key=sum)
    used = [0] * len(counts)
    states = [tuple(used)]
    for c in range(len(counts)) if order is None else order:
        for _ in range(counts[c]):
            used[c] += 1
            states.append(tuple(used))
    return states
