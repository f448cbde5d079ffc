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
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from graphplan.device import CPU, DeviceKey, DeviceSpec
from graphplan.passes.chain import Chain, Floats
from graphplan.passes.evaluate import Problem
from graphplan.passes.piece_tables import piece_seconds, piece_tables

__all__ = ["Piece", "split"]

_MAX_STATES = 600


@dataclass(frozen=True, slots=True)
class Piece:
    """Operations ``start .. end-1`` on a device; ``excess`` bytes of weights do not fit there."""

    start: int
    end: int
    device: DeviceKey
    excess: int


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
    accelerators = [spec for spec in topology.devices if spec.is_accelerator]
    if not accelerators:
        return None
    cpu = next((s for s in topology.devices if s.device == CPU), None) if use_cpu else None
    home = next((s for s in topology.devices if s.device == CPU), None) if fetch else None
    kinds = _kinds(problem, accelerators, shrink or {})
    spaces = [kind[0].room - (shrink or {}).get(kind[0].key, 0) for kind in kinds]
    # where weights are fetched, or there is a CPU that may have room for all of them, any piece may do
    most = np.inf if cpu is not None or home is not None else max(kind[0].room for kind in kinds)
    tables = piece_tables(chain, limit, most, part_groups=part_groups)
    cuts = tables.cuts
    costs = [
        _by_end(piece_seconds(chain, tables, kind[0], space, problem, home))
        for kind, space in zip(kinds, spaces, strict=True)
    ]
    free = None
    if cpu is not None:
        free = _by_end(piece_seconds(chain, tables, cpu, cpu.room, problem, None))
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
        need = tables.weights[i, j - i - 1] + tables.activations[i, j - i - 1]
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


_Path = list[tuple[int, int, DeviceSpec | None]]


Add = Callable[[Floats, Floats], Floats]


class _Row:
    """The best seconds with which a state reaches each cut, and the piece that ends there then.

    Attributes:
        seconds: (cuts,) infinite where it does not come.
        origin: (cuts,) the number of the state before the piece.
        start: (cuts,) the cut at which the piece starts.
        kind: (cuts,) of its device; -1 for the CPU.
    """

    def __init__(self, cuts: int) -> None:
        self.seconds = np.full(cuts, np.inf)
        self.origin, self.start, self.kind = (np.full(cuts, -1) for _ in range(3))

    def last_piece(self, end: int) -> tuple[int, int, int]:
        """Origin, start and kind of the piece that ends at a cut."""
        return int(self.origin[end]), int(self.start[end]), int(self.kind[end])


def _by_end(seconds: Floats) -> Floats:
    """Seconds of pieces by where they end: of ``w`` columns, ``t`` has those from cut ``end - w + t``."""
    rows, reach = seconds.shape
    padded = np.full((rows + reach, reach), np.inf)
    padded[reach:] = seconds
    down, right = padded.strides
    view = as_strided(padded[:, reach - 1 :], (rows, reach), (down, down - right))
    return np.ascontiguousarray(view)


def _relax(row: _Row, cost: Floats, origin: int, kind: int, into: _Row, add: Add) -> None:
    """Extend ``row`` by one piece."""
    cuts, reach = cost.shape
    there = np.flatnonzero(np.isfinite(row.seconds))
    if not len(there):
        return
    ends = slice(int(there[0]) + 1, min(cuts, int(there[-1]) + reach + 1))
    padded = np.concatenate([np.full(reach, np.inf), row.seconds])
    through = add(sliding_window_view(padded, reach)[ends], cost[ends])
    best = through.argmin(1)
    value = through[np.arange(len(best)), best]
    better = np.flatnonzero(value < into.seconds[ends] - 1e-15)
    end = better + ends.start
    into.seconds[end] = value[better]
    into.origin[end], into.start[end], into.kind[end] = origin, end - reach + best[better], kind


def _by_count(
    costs: list[Floats], kinds: list[list[DeviceSpec]], free: Floats | None, add: Add
) -> _Path | None:
    """States: how many accelerators of each kind are used."""
    m = len(free if free is not None else costs[0])
    states = sorted(product(*(range(len(kind) + 1) for kind in kinds)), key=sum)
    number_of = {state: number for number, state in enumerate(states)}
    table = [_Row(m) for _ in states]
    table[0].seconds[0] = 0.0
    for number, state in enumerate(states):
        if free is not None:
            _relax(table[number], free, number, -1, table[number], add)
        for kind, members in enumerate(kinds):
            if state[kind] < len(members):
                after = tuple(c + (k == kind) for k, c in enumerate(state))
                _relax(table[number], costs[kind], number, kind, table[number_of[after]], add)
    number = min(range(len(states)), key=lambda s: (table[s].seconds[m - 1], sum(states[s])))
    if not np.isfinite(table[number].seconds[m - 1]):
        return None
    path: _Path = []
    j = m - 1
    while j > 0:
        origin, i, kind = table[number].last_piece(j)
        path.append((i, j, None if kind < 0 else kinds[kind][states[number][kind] - 1]))
        number, j = origin, i
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
    costs: list[Floats],
    kinds: list[list[DeviceSpec]],
    accelerators: list[DeviceSpec],
    free: Floats | None,
    add: Add,
) -> _Path | None:
    """States: the last accelerator used, in the caller's order, where their subsets are too many."""
    kind_of = {spec.key: index for index, kind in enumerate(kinds) for spec in kind}
    m, k = len(costs[0]), len(accelerators)
    table = [_Row(m) for _ in range(k + 1)]
    table[0].seconds[0] = 0.0
    for used in range(k + 1):
        if free is not None:
            _relax(table[used], free, used, -1, table[used], add)
        for after in range(used + 1, k + 1):
            kind = kind_of[accelerators[after - 1].key]
            _relax(table[used], costs[kind], used, kind, table[after], add)
    state = min(range(k + 1), key=lambda s: table[s].seconds[m - 1])
    if not np.isfinite(table[state].seconds[m - 1]):
        return None
    path: _Path = []
    j = m - 1
    while j > 0:
        origin, i, kind = table[state].last_piece(j)
        path.append((i, j, None if kind < 0 else accelerators[state - 1]))
        state, j = origin, i
    return list(reversed(path))
