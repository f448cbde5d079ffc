"""Exact placement of a sequence onto devices, each accelerator one contiguous piece of it.

Dynamic programming over (which accelerators are used, where the sequence is cut). Accelerators of one
kind are interchangeable, so only how many are used matters; the CPU may be used any number of times.
A piece that is too large for its accelerator may keep the excess of its weights in CPU memory and
stream them at each call, which then takes the longer of copying and computing. The tables are close to
the evaluator, which has the last word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from graphplan.device import CPU, DeviceKey, DeviceSpec
from graphplan.passes.chain import Chain, Floats, Ints
from graphplan.passes.evaluate import Problem

__all__ = ["Piece", "split"]

_MAX_STATES = 600
_BLOCK = 64  # cuts at which pieces end that are looked at together


@dataclass(frozen=True, slots=True)
class Piece:
    """Operations ``start .. end-1`` on a device; ``excess`` bytes of weights do not fit there."""

    start: int
    end: int
    device: DeviceKey
    excess: int


@dataclass(frozen=True, slots=True)
class _Tables:
    """For cuts ``i < j``: what the piece between them reads from outside and needs.

    ``arriving`` and ``arrivals`` are bytes and number of values (and weights used before) copied in,
    ``weights`` and ``activations`` bytes, ``widest`` the largest weights of one operation.
    """

    arriving: Floats
    arrivals: Floats
    weights: Floats
    activations: Floats
    widest: Floats


def split(
    chain: Chain,
    problem: Problem,
    *,
    use_cpu: bool,
    fetch: bool,
    part_groups: bool = False,
    balance: bool = False,
    limit: int = 400,
    shrink: dict[DeviceKey, int] | None = None,
) -> list[Piece] | None:
    """The cheapest pieces, or None where no split fits.

    Args:
        chain: what to split.
        problem: whose devices to use, and where operations may run.
        use_cpu: whether operations may run on the CPU.
        fetch: whether weights may stay on the CPU and be fetched.
        part_groups: whether cuts may fall inside groups that must stay together (the caller mends it).
        balance: make the longest piece as short as can be, instead of the sum of all.
        limit: most positions at which to consider a cut.
        shrink: device -> bytes to leave free, after the evaluator found a split too large.
    """
    topology = problem.topology
    cuts = chain.positions(limit, part_groups=part_groups)
    tables = _tables(chain, cuts)
    accelerators = [spec for spec in topology.devices if spec.is_accelerator]
    if not accelerators:
        return None
    cpu = next((s for s in topology.devices if s.device == CPU), None) if use_cpu else None
    home = next((s for s in topology.devices if s.device == CPU), None) if fetch else None
    kinds = _kinds(problem, accelerators, shrink or {})
    spaces = [kind[0].room - (shrink or {}).get(kind[0].key, 0) for kind in kinds]
    costs = [
        _Costs.of(_piece_seconds(chain, cuts, tables, kind[0], space, problem, home))
        for kind, space in zip(kinds, spaces, strict=True)
    ]
    free = None
    if cpu is not None:
        free = _Costs.of(_piece_seconds(chain, cuts, tables, cpu, cpu.room, problem, None))
    states = 1
    for kind in kinds:
        states *= len(kind) + 1
    ordered = states > _MAX_STATES
    add: Add = np.maximum if balance else np.add
    path = _in_order(costs, kinds, accelerators, free, add) if ordered else _by_count(costs, kinds, free, add)
    if path is None:
        return None
    pieces = []
    for i, j, spec in path:
        spec = cpu if spec is None else spec
        assert spec is not None
        need = tables.weights[i, j] + tables.activations[i, j]
        room = spec.room - (shrink or {}).get(spec.key, 0)
        excess = 0 if spec is cpu else max(0, int(need - room))
        pieces.append(Piece(int(cuts[i]), int(cuts[j]), spec.key, excess))
    return pieces


def _kinds(
    problem: Problem, accelerators: list[DeviceSpec], shrink: dict[DeviceKey, int]
) -> list[list[DeviceSpec]]:
    """Accelerators that nothing tells apart, together, in the caller's order."""
    kinds: dict[object, list[DeviceSpec]] = {}
    rules = list(dict.fromkeys(problem.allowed.values()))
    pinned = set(problem.fixed_weights.values())
    for spec in accelerators:
        speed = (spec.flops, spec.bandwidth, spec.overhead, spec.type)
        links = problem.topology.link(CPU, spec.key)
        may = tuple(spec.key in rule for rule in rules)
        own = spec.key if spec.key in pinned else None
        key = (spec.room, *speed, links, shrink.get(spec.key), may, own)
        kinds.setdefault(key, []).append(spec)
    return list(kinds.values())


def _tables(chain: Chain, cuts: Ints) -> _Tables:
    m, n = len(cuts), chain.count
    shape = (m, m)
    tables = _Tables(*(np.zeros(shape) for _ in range(5)))
    values, weights = chain.value_reads, chain.weight_reads
    birth, death, size = chain.storages
    per_operation = _sums(weights.reader, weights.nbytes, n)
    # reads and births come in the order of operations
    starts = [np.searchsorted(places, cuts[:-1]) for places in (values.reader, weights.reader, birth)]
    for row, (start, v, w, b) in enumerate(zip(cuts[:-1], *starts, strict=True)):
        count, ends, columns = n - start, cuts[row + 1 :] - 1 - start, slice(row + 1, None)
        outside = values.previous[v:] < start
        reader, nbytes = values.reader[v:][outside] - start, values.nbytes[v:][outside]
        arriving = _sums(reader, nbytes, count + 1)
        before, mine = weights.previous[w:], weights.reader[w:] - start
        fresh, again = before < start, (before >= 0) & (before < start)
        change = arriving + _sums(birth[b:] - start, size[b:], count + 1)
        change -= _sums(death[b:] + 1 - start, size[b:], count + 1)
        change -= _sums(values.until[v:][outside] + 1 - start, nbytes, count + 1)
        arrivals = np.bincount(reader, minlength=count)
        if again.any():
            arriving[:-1] += _sums(mine[again], weights.nbytes[w:][again], count)
            arrivals += np.bincount(mine[again], minlength=count)
        live = np.cumsum(change)[:-1] + chain.workspace[start:]
        tables.arriving[row, columns] = np.cumsum(arriving)[ends]
        tables.arrivals[row, columns] = np.cumsum(arrivals)[ends]
        tables.weights[row, columns] = np.cumsum(_sums(mine[fresh], weights.nbytes[w:][fresh], count))[ends]
        tables.activations[row, columns] = np.maximum.accumulate(live)[ends]
        tables.widest[row, columns] = np.maximum.accumulate(per_operation[start:])[ends]
    return tables


def _sums(places: Ints, amounts: Ints, count: int) -> Floats:
    """The sum of the amounts at each place; of none too, which `bincount` would count in integers."""
    return np.bincount(places, amounts, count).astype(np.float64, copy=False)


def _piece_seconds(
    chain: Chain,
    cuts: Ints,
    tables: _Tables,
    spec: DeviceSpec,
    space: int,
    problem: Problem,
    home: DeviceSpec | None,
) -> Floats:
    """Seconds of each piece on a device, infinite where it does not fit."""
    each = np.array([problem.seconds(op, spec) for op in chain.operations])
    barred = np.concatenate([[0], np.cumsum(np.isinf(each))])
    total = np.concatenate([[0.0], np.cumsum(np.where(np.isinf(each), 0.0, each))])
    topology = problem.topology
    links = [topology.link(other.key, spec.key) for other in topology.devices if other is not spec]
    latency = max((link.latency for link in links), default=0.0)
    bandwidth = min((link.bandwidth for link in links), default=np.inf)
    seconds = total[cuts][None, :] - total[cuts][:, None]
    seconds = np.where(barred[cuts][None, :] > barred[cuts][:, None], np.inf, seconds)
    seconds = seconds + tables.arrivals * latency + tables.arriving / bandwidth
    excess = tables.weights + tables.activations - space
    fits = excess <= 0
    if home is not None:
        link = topology.link(home.key, spec.key)
        fetched = excess + 2 * tables.widest  # the ring takes room of its own
        mean = max(1.0, float(np.mean(chain.weight_reads.nbytes)) if len(chain.weight_reads.nbytes) else 1.0)
        price = fetched / link.bandwidth + np.ceil(fetched / mean) * link.latency
        # all weights may be away, but the activations and one operation's weights must fit
        possible = tables.activations + 2 * tables.widest <= space
        seconds = np.where(fits, seconds, np.where(possible, np.maximum(seconds, price), np.inf))
    else:
        seconds = np.where(fits, seconds, np.inf)
    seconds[np.tril_indices(len(cuts))] = np.inf
    return seconds


_Path = list[tuple[int, int, DeviceSpec | None]]


_Back = list[tuple[object, int, int] | None]
Add = Callable[[Floats, Floats], Floats]


@dataclass(frozen=True, slots=True)
class _Row:
    """The best seconds with which a state reaches each cut, and the step by which it did."""

    seconds: Floats
    back: _Back

    @classmethod
    def empty(cls, size: int) -> _Row:
        return cls(np.full(size, np.inf), [None] * size)


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds of each piece on a kind of device; most are infinite, since a device holds a few of many cuts.

    Attributes:
        seconds: (cuts, cuts) from a cut to another.
        reach: for each block of cuts, from where pieces that end there may come, as a range.
    """

    seconds: Floats
    reach: list[tuple[int, int]]

    @classmethod
    def of(cls, seconds: Floats) -> _Costs:
        reach = []
        for start in range(0, len(seconds), _BLOCK):
            rows = np.flatnonzero(np.isfinite(seconds[:, start : start + _BLOCK]).any(axis=1))
            reach.append((int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0))
        return cls(seconds, reach)


def _relax(row: _Row, cost: _Costs, origin: object, kind: int, into: _Row, add: Add) -> None:
    """Extend ``row`` by one piece."""
    for number, (low, high) in enumerate(cost.reach):
        start = number * _BLOCK
        block = slice(start, start + _BLOCK)
        if low == high or not np.isfinite(row.seconds[low:high]).any():
            continue
        through = add(row.seconds[low:high, None], cost.seconds[low:high, block])
        arg = through.argmin(0)
        value = through[arg, np.arange(through.shape[1])]
        for j in np.nonzero(value < into.seconds[block] - 1e-15)[0]:
            into.seconds[start + j] = value[j]
            into.back[start + j] = (origin, low + int(arg[j]), kind)


def _by_count(
    costs: list[_Costs], kinds: list[list[DeviceSpec]], free: _Costs | None, add: Add
) -> _Path | None:
    """States: how many accelerators of each kind are used."""
    m = len((free if free is not None else costs[0]).seconds)
    states = sorted(product(*(range(len(kind) + 1) for kind in kinds)), key=sum)
    table = {state: _Row.empty(m) for state in states}
    table[states[0]].seconds[0] = 0.0
    for state in states:
        if free is not None:
            before = _Row(table[state].seconds.copy(), [])
            _relax(before, free, state, -1, table[state], add)
        for kind, members in enumerate(kinds):
            if state[kind] < len(members):
                after = tuple(c + (k == kind) for k, c in enumerate(state))
                _relax(table[state], costs[kind], state, kind, table[after], add)
    end = min(states, key=lambda s: (table[s].seconds[m - 1], sum(s)))
    if not np.isfinite(table[end].seconds[m - 1]):
        return None
    path: _Path = []
    state, j = end, m - 1
    while j > 0:
        step = table[state].back[j]
        assert step is not None
        origin, i, kind = step
        assert isinstance(origin, tuple)
        path.append((i, j, None if kind < 0 else kinds[kind][state[kind] - 1]))
        state, j = origin, i
    return _caller_order(list(reversed(path)), kinds)


def _caller_order(path: _Path, kinds: list[list[DeviceSpec]]) -> _Path:
    """Give equal accelerators out in the caller's order."""
    waiting = {id(spec): iter(kind) for kind in kinds for spec in kind[:1]}
    first = {spec.key: kind[0] for kind in kinds for spec in kind}
    renamed: _Path = []
    for i, j, spec in path:
        renamed.append((i, j, None if spec is None else next(waiting[id(first[spec.key])])))
    return renamed


def _in_order(
    costs: list[_Costs],
    kinds: list[list[DeviceSpec]],
    accelerators: list[DeviceSpec],
    free: _Costs | None,
    add: Add,
) -> _Path | None:
    """States: the last accelerator used, in the caller's order, where their subsets are too many."""
    kind_of = {spec.key: index for index, kind in enumerate(kinds) for spec in kind}
    m, k = len(costs[0].seconds), len(accelerators)
    table = [_Row.empty(m) for _ in range(k + 1)]
    table[0].seconds[0] = 0.0
    for used in range(k + 1):
        if free is not None:
            _relax(_Row(table[used].seconds.copy(), []), free, used, -1, table[used], add)
        for after in range(used + 1, k + 1):
            kind = kind_of[accelerators[after - 1].key]
            _relax(table[used], costs[kind], used, kind, table[after], add)
    state = min(range(k + 1), key=lambda s: table[s].seconds[m - 1])
    if not np.isfinite(table[state].seconds[m - 1]):
        return None
    path: _Path = []
    j = m - 1
    while j > 0:
        step = table[state].back[j]
        assert step is not None
        origin, i, kind = step
        path.append((i, j, None if kind < 0 else accelerators[state - 1]))
        assert isinstance(origin, int)
        state, j = origin, i
    return list(reversed(path))
