"""A placement as one share per device: what each share costs, and how large it is, device by device.

The seconds of a placement are those of each device's operations plus those of the copies that arrive
there, so they are a sum over devices once it is settled what each runs: only that every operation runs
once ties the shares together. That makes a placement a choice of one column per device, and the best
column for given prices a knapsack (Dantzig and Wolfe, "Decomposition Principle for Linear Programs",
1960). Everything here leans to the cheap side, so what it says is a lower bound of what the evaluator
says: of activations, only what one operation needs at once is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from graphplan.device import CPU, DeviceKey, DeviceSpec
from graphplan.graph import Operation
from graphplan.passes.bands import Crowd, find_crowds, make_bands
from graphplan.passes.evaluate import Problem
from graphplan.passes.knapsack import Chosen, Knapsack, Step

__all__ = ["Kind", "Prices", "Shares"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_UNITS = 3000  # parts of the largest budget at most
_ROUGH_UNITS = 300  # likewise where nothing is to be proven
_LOSS = 1e-3  # share of the weights' bytes that coarser units may fail to see
_STATES = 1 << 18  # numbers per row that one step of the knapsack may touch
_NOT_TAKEN = np.array([[0.0, 0.0], [np.inf, 0.0]])  # the first needs the second


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices that nothing tells apart."""

    spec: DeviceSpec
    keys: tuple[DeviceKey, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """Multipliers of the constraints that tie the shares together.

    Attributes:
        cover: (groups,) seconds paid for running an operation of each group.
        compute: weight of the clock of operations and moves.
        copies: (kinds,) weight of each kind's copy queue; with ``compute``, and each times the number
            of its devices, they add up to 1.
        unique: (items,) seconds asked for keeping a weight that several operations read.
        limited: (kinds, groups) seconds paid beside, where a kind has to run more or less of a group.
        constant: seconds that these limits add to the bound.
    """

    cover: Floats
    compute: float
    copies: Floats
    unique: Floats
    limited: Floats
    constant: float


@dataclass(slots=True)
class _Rows:
    """Seconds per kind (rows) and item, to be weighed by either clock."""

    clock: Floats
    queue: Floats


@dataclass(slots=True)
class _Item:
    """A variable of the knapsack: a unit of operations, a weight, or a value at hand."""

    nbytes: int = 0
    members: list[str] = field(default_factory=list)
    weight: str = ""
    streamed: str = ""  # the weight that may be streamed instead of taking up memory


class Shares:
    """The knapsack of each kind of device, with its costs.

    Attributes:
        kinds: of devices.
        units: operations that are placed as one, in order.
        group: (units,) units that nothing tells apart have one number.
        counts: (groups,) how many units each group has.
        ties: items that are weights which several units read.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph, self.topology = problem, problem.graph, problem.topology
        self.kinds = _kinds(problem)
        self.count_of = np.array([len(kind.keys) for kind in self.kinds])
        self.host = problem.host
        self.cpu = next((s for s in self.topology.devices if s.type == CPU), None)
        self.items: list[_Item] = []
        self.unit_of: dict[str, int] = {}
        self._make_units()
        self.units = len(self.items)
        self._base = np.zeros(len(self.kinds))
        self._costs: list[tuple[int, Floats, Floats]] = []  # item, clock and queue per kind
        self.tables: dict[tuple[int, int], Floats] = {}
        self.needs: list[tuple[int, int]] = []
        self._value_cost: dict[int, float] = {}
        self._read_weights()
        self._read_values()
        self._settle()

    # -- what is in a share -----------------------------------------------------------------------

    def _make_units(self) -> None:
        group = {name: members for members in self.graph.together for name in members}
        for name, operation in self.graph.operations.items():
            if operation.host_only or name in self.unit_of:
                continue
            index = len(self.items)
            members = [m for m in sorted(group.get(name, {name}), key=self._position) if self._moves(m)]
            self.items.append(_Item(members=members))
            self.unit_of.update(dict.fromkeys(members, index))

    def _position(self, name: str) -> int:
        if not hasattr(self, "_index"):
            self._index = {name: i for i, name in enumerate(self.graph.operations)}
        return self._index[name]

    def _moves(self, name: str) -> bool:
        return not self.graph.operations[name].host_only

    def _units_reading(self, name: str) -> list[int]:
        readers = self.graph.consumers.get(name, ())
        return list(dict.fromkeys(self.unit_of[r] for r in readers if r in self.unit_of))

    def _read_weights(self) -> None:
        for weight in self.graph.weights.values():
            readers = self._units_reading(weight.name)
            if not weight.nbytes:
                continue
            fixed = self.problem.fixed_weights.get(weight.name)
            if fixed is not None:
                self._fix(weight.name, fixed, readers)
            elif len(readers) == 1 and not (self.problem.offload and self.items[readers[0]].nbytes):
                item = self.items[readers[0]]
                item.nbytes, item.streamed = item.nbytes + self._rounded(weight.nbytes), weight.name
            elif readers:
                index = self._add(_Item(self._rounded(weight.nbytes), [], weight.name, weight.name))
                self.needs += [(reader, index) for reader in readers]

    def _add(self, item: _Item) -> int:
        self.items.append(item)
        return len(self.items) - 1

    @staticmethod
    def _rounded(nbytes: int) -> int:
        return -(-nbytes // 512) * 512

    def _fix(self, name: str, home: DeviceKey, readers: Sequence[int]) -> None:
        """A weight whose place is settled: memory there, a copy wherever else it is read."""
        nbytes = self.graph.weights[name].nbytes
        clock, queue = np.zeros(len(self.kinds)), np.zeros(len(self.kinds))
        for row, kind in enumerate(self.kinds):
            if home in kind.keys:
                self._base[row] += self._rounded(nbytes)
                continue
            clock[row], queue[row] = self._copy_seconds(name, kind.spec, [home])
        if len(readers) == 1:
            self._costs.append((readers[0], clock, queue))
        elif readers:
            index = self._add(_Item(weight=name))
            self._costs.append((index, clock, queue))
            self.needs += [(reader, index) for reader in readers]

    def _copy_seconds(self, name: str, spec: DeviceSpec, sources: Sequence[DeviceKey]) -> tuple[float, float]:
        """Seconds of bringing a weight at every call: on the clock of moves, or on the copy queue."""
        nbytes = self.graph.weights[name].nbytes
        best = min((self.topology.link(s, spec.key).seconds(nbytes) for s in sources), default=np.inf)
        streams = (
            self.cpu is not None
            and self.cpu.key in sources
            and spec.is_accelerator
            and self.problem.streams
            and name in self.graph.streamable
        )
        if not streams:
            return best, 0.0
        assert self.cpu is not None
        return 0.0, nbytes / self.topology.link(self.cpu.key, spec.key).bandwidth

    def _read_values(self) -> None:
        """Copies of values: one to each device that reads one which it has not made."""
        bundles: dict[tuple[int, tuple[int, ...]], Floats] = defaultdict(lambda: np.zeros(len(self.kinds)))
        for name, value in self.graph.values.items():
            if not value.is_tensor:
                continue
            maker = self.unit_of.get(self.graph.producer.get(name, ""), -1)
            if maker < 0 and name not in self.graph.inputs:
                continue
            readers = tuple(unit for unit in self._units_reading(name) if unit != maker)
            returned = name in self.graph.outputs and self.problem.returns_to_host
            if returned and maker >= 0:
                clock = np.array([self._return_seconds(kind, value.copy_bytes) for kind in self.kinds])
                self._costs.append((maker, clock, np.zeros(len(self.kinds))))
            if readers:
                bundles[maker, readers] += self._arrivals(value.copy_bytes, maker, returned)
        for (maker, readers), seconds in bundles.items():
            self._bundle(maker, readers, seconds)

    def _return_seconds(self, kind: Kind, nbytes: int) -> float:
        if self.host in kind.keys:
            return 0.0
        return min(self.topology.link(key, self.host).seconds(nbytes) for key in kind.keys)

    def _arrivals(self, nbytes: int, maker: int, returned: bool) -> Floats:
        seconds = np.zeros(len(self.kinds))
        computing = [spec.key for spec in self.topology.devices if spec.computes]
        for row, kind in enumerate(self.kinds):
            if self.host in kind.keys and (maker < 0 or returned):
                continue  # it is there, or the maker has paid for it
            sources = [self.host] if maker < 0 else computing
            links = [self.topology.link(s, key) for key in kind.keys for s in sources if s != key]
            seconds[row] = min((link.seconds(nbytes) for link in links), default=0.0)
        return seconds

    def _bundle(self, maker: int, readers: tuple[int, ...], seconds: Floats) -> None:
        """Values of one maker and the same readers travel alike."""
        nothing = np.zeros(len(self.kinds))
        if maker < 0 and len(readers) == 1:
            self._costs.append((readers[0], seconds, nothing))
            return
        if len(readers) == 1:
            self._pair(maker, readers[0], seconds)
            return
        index = self._add(_Item())
        self._value_cost[index] = float(seconds.max(initial=0.0))
        if maker < 0:
            self._costs.append((index, seconds, nothing))
        else:
            self._pair(maker, index, seconds)
        self.needs += [(reader, index) for reader in readers]

    def _pair(self, maker: int, reader: int, seconds: Floats) -> None:
        """Seconds where the reader is here and the maker is not."""
        scope, table = (maker, reader), np.zeros((len(self.kinds), 2, 2))
        table[:, 0, 1] = seconds
        self.tables[scope] = self.tables.get(scope, 0.0) + table

    # -- arrays -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        rows = len(self.kinds)
        self.room = np.array([kind.spec.room for kind in self.kinds], dtype=float) - self._base
        self.nbytes = np.array([item.nbytes for item in self.items], dtype=np.int64)
        total = float(self.nbytes.sum())
        self.unit = _unit(self.nbytes, min(total, float(self.room.max(initial=1.0))))
        self.sizes = self.nbytes // self.unit
        self.clock, self.queue = np.zeros((rows, len(self.items))), np.zeros((rows, len(self.items)))
        for row, kind in enumerate(self.kinds):
            for index in range(self.units):
                operations = (self.graph.operations[name] for name in self.items[index].members)
                self.clock[row, index] += sum(self.problem.seconds(op, kind.spec) for op in operations)
        for item, clock, queue in self._costs:
            self.clock[:, item] += clock
            self.queue[:, item] += queue
        self.ties = np.array(
            [i for i, item in enumerate(self.items) if item.weight and item.nbytes], dtype=int
        )
        self.aside = self._aside_seconds()
        self.working = self._working_sets()
        self._group_units()
        self._build()

    def _aside_seconds(self) -> _Rows:
        """Seconds of bringing a weight at every call instead of keeping it."""
        shape = (len(self.kinds), len(self.items))
        aside = _Rows(np.full(shape, np.inf), np.full(shape, np.inf))
        keys = [spec.key for spec in self.topology.devices if spec.computes]
        for index, item in enumerate(self.items):
            if not item.streamed or not self.graph.weights[item.streamed].fetchable:
                continue
            tied = bool(item.weight) and len(self._units_reading(item.streamed)) > 1
            for row, kind in enumerate(self.kinds):
                sources = [k for k in keys if k not in kind.keys or len(kind.keys) > 1]
                if not self.problem.offload:
                    sources = [k for k in sources if self.topology[k].is_accelerator] if tied else []
                elif not tied:
                    sources = [k for k in sources if self.cpu is not None and k == self.cpu.key]
                if kind.spec.is_accelerator or tied:
                    clock, queue = self._copy_seconds(item.streamed, kind.spec, sources)
                    aside.clock[row, index], aside.queue[row, index] = clock, queue
        return aside

    def _working_sets(self) -> Ints:
        """(kinds, units) bytes that a unit needs at least beside the weights, while it runs."""
        found = np.zeros((len(self.kinds), self.units), dtype=np.int64)
        for row, kind in enumerate(self.kinds):
            for index in range(self.units):
                members = (self.graph.operations[name] for name in self.items[index].members)
                found[row, index] = max(self._needs_of(operation, kind) for operation in members)
        return found

    def _needs_of(self, operation: Operation, kind: Kind) -> int:
        graph, spec = self.graph, kind.spec
        roots: dict[str, int] = {}
        for name in operation.inputs:
            value = graph.values.get(name)
            root = graph.root(name)
            if value is None or not value.is_tensor or root in graph.weights:
                continue
            if root in graph.inputs and self.host in kind.keys:
                continue
            held = max(graph.values[root].nbytes, graph.values[root].copy_bytes)
            roots[root] = max(roots.get(root, 0), min(value.copy_bytes, held))
        made = [graph.values[name].nbytes for name in operation.outputs]
        parts = [*roots.values(), *made, operation.workspace_on(spec.type)]
        return sum(spec.allocated(nbytes) for nbytes in parts if nbytes)

    def _group_units(self) -> None:
        """Units with the same costs and sizes share a price: a stack of equal layers has few."""
        known: dict[bytes, int] = {}
        self.group = np.zeros(self.units, dtype=np.int64)
        for index in range(self.units):
            key = b"".join(
                np.ascontiguousarray(part).tobytes()
                for part in (
                    self.clock[:, index].round(12),
                    self.queue[:, index],
                    self.aside.queue[:, index],
                    self.nbytes[index : index + 1],
                )
            )
            self.group[index] = known.setdefault(key, len(known))
        self.counts = np.bincount(self.group, minlength=len(known))

    def _build(self) -> None:
        """Set the knapsack up, leaving out cheap values where the states would be too many."""
        specs = [kind.spec for kind in self.kinds]
        is_host = [self.host in kind.keys for kind in self.kinds]
        crowds = find_crowds(self.graph, self.unit_of, specs, is_host)
        self.bands = make_bands(self.working, crowds, self.nbytes[: self.units], self.room)
        self.row_kind = np.array([band.kind for band in self.bands], dtype=np.int64)
        self._barred = np.array([self.working[band.kind] > band.high for band in self.bands])
        self._crowds = self._counted(crowds)
        total = float(self.nbytes.sum())
        rooms = np.array([min(self.room[band.kind] - band.low, total) for band in self.bands])
        capacities = np.floor(rooms / self.unit).astype(np.int64)
        top = max(1, int(capacities.max(initial=0)) + 1)
        limit = max(3, int(np.log2(_STATES / top)))
        dropped: set[int] = set()
        while True:
            kept = [pair for pair in self.tables if not dropped & set(pair)]
            needs = [pair for pair in self.needs if not dropped & set(pair)]
            scopes = [*kept, *needs, *(crowd.units for crowd in self._crowds)]
            self.knapsack = Knapsack(self.sizes, scopes, capacities)
            wide = _widest(self.knapsack.steps, limit)
            if not wide or not self._narrow(wide, limit, dropped):
                break
        self._kept, self._kept_needs = kept, needs
        # sizes to the nearest coarse unit: over many weights, what is lost and gained is the same
        self.coarse = self.unit * max(1, top // _ROUGH_UNITS)
        nearest = np.rint(self.nbytes / self.coarse).astype(np.int64)
        self.rough = Knapsack(nearest, scopes, np.floor(rooms / self.coarse).astype(np.int64))
        self._refusals = [self._refusal(crowd) for crowd in self._crowds]
        self._maker, self._reader = np.array(kept, dtype=np.int64).reshape(len(kept), 2).T
        apart = [self.tables[pair][:, 0, 1] for pair in kept]
        self._apart = np.array(apart, dtype=float).reshape(len(kept), len(self.kinds)).T

    def _narrow(self, wide: Sequence[tuple[int, ...]], limit: int, dropped: set[int]) -> bool:
        """Leave out what opens too many variables at once: crowds, then cheap values, then cheap pairs."""
        open_ = {variable for frontier in wide for variable in frontier}
        narrower = [crowd for crowd in self._crowds if open_.isdisjoint(crowd.units)]
        if len(narrower) < len(self._crowds):
            self._crowds = narrower
            return True
        before = len(dropped), len(self.tables)
        for frontier in wide:
            values = sorted((v for v in frontier if v in self._value_cost), key=self._value_cost.__getitem__)
            dropped.update(values[: len(frontier) - limit])
            if not values:
                self._drop_pairs(frontier, len(frontier) - limit)
        return before != (len(dropped), len(self.tables))

    def _counted(self, crowds: Sequence[Crowd]) -> list[Crowd]:
        """Those that some band refuses though it has all of their units one by one."""
        return [
            crowd
            for crowd in crowds
            if any(
                crowd.nbytes[band.kind] > band.high
                and max(self.working[band.kind][unit] for unit in crowd.units) <= band.high
                for band in self.bands
            )
        ]

    def _refusal(self, crowd: Crowd) -> Floats:
        """The table that keeps a crowd out of the bands that have no room for it."""
        table = np.zeros((len(self.bands), *(2,) * len(crowd.units)))
        refused = np.array([crowd.nbytes[band.kind] > band.high for band in self.bands])
        table.reshape(len(self.bands), -1)[:, -1] = np.where(refused, np.inf, 0.0)
        return table

    def _drop_pairs(self, frontier: Sequence[int], excess: int) -> None:
        open_ = set(frontier)
        touching = [pair for pair in self.tables if open_ & set(pair)]
        touching.sort(key=lambda pair: float(self.tables[pair].max()))
        for pair in touching[: max(1, excess)]:
            del self.tables[pair]

    # -- solving ----------------------------------------------------------------------------------

    def work(self, *, rough: bool) -> int:
        """Numbers that :meth:`best` touches."""
        return (self.rough if rough else self.knapsack).work

    def best(
        self, prices: Prices, gone: Bools, margin: Floats, *, exact: bool, rough: bool = False
    ) -> Chosen:
        """The cheapest share of each kind and band at these prices.

        Args:
            prices: multipliers.
            gone: (units,) those that may not be in a share.
            margin: (kinds,) bytes that a share leaves free beyond what it must.
            exact: in double precision, as a proof needs it.
            rough: with coarse units of capacity, which may lack or waste some bytes.
        """
        rows = self.row_kind
        with np.errstate(invalid="ignore"):  # 0 x infinity, where an operation may not run
            clock, queue = self.clock[rows] * prices.compute, self.queue[rows]
        weight = prices.copies[rows][:, None]
        cost = clock + queue * weight
        cost[:, : self.units] -= (prices.cover + prices.limited[rows])[:, self.group]
        cost[:, : self.units][self._barred | gone[None, :]] = np.inf
        with np.errstate(invalid="ignore"):
            aside = self.aside.clock[rows] * prices.compute + self.aside.queue[rows] * weight
        aside = np.where(np.isnan(aside), np.inf, aside) - prices.unique[None, :]
        cost = cost + prices.unique[None, :]
        tables = [self.tables[pair][rows] * prices.compute for pair in self._kept]
        tables += [_NOT_TAKEN[None]] * len(self._kept_needs)
        tables += self._refusals
        less = np.ceil(margin[rows] / (self.coarse if rough else self.unit)).astype(np.int64)
        dtype = np.float64 if exact else np.float32
        return (self.rough if rough else self.knapsack).solve(cost, aside, tables, less, dtype)

    def clock_seconds(self, kind: int, taken: Bools, aside: Bools) -> float:
        """Seconds of a share on the clock of operations and moves."""
        seconds = float(self.clock[kind][taken].sum() + self.aside.clock[kind][aside].sum())
        arrives = taken[self._reader] & ~taken[self._maker]
        return seconds + float(self._apart[kind][arrives].sum())

    def queue_seconds(self, kind: int, taken: Bools, aside: Bools) -> float:
        """Seconds of a share on the copy queue."""
        return float(self.queue[kind][taken].sum() + self.aside.queue[kind][aside].sum())

    def kept_bytes(self, taken: Bools, aside: Bools) -> float:
        """Bytes of weights that a share keeps."""
        return float(self.nbytes[taken & ~aside].sum())

    def fits(self, kind: int, taken: Bools, aside: Bools, margin: Floats) -> bool:
        """Whether a device has room for a share, as far as the knapsacks know."""
        needs = self.kept_bytes(taken, aside) + self.activation_bytes(kind, taken)
        return bool(needs <= self.room[kind] - margin[kind])

    def activation_bytes(self, kind: int, taken: Bools) -> float:
        """Bytes for activations that a share needs at least beside its weights."""
        mine = taken[: self.units]
        needs = float(self.working[kind][mine].max(initial=0))
        for crowd in self._crowds:
            if crowd.nbytes[kind] > needs and mine[list(crowd.units)].all():
                needs = float(crowd.nbytes[kind])
        return needs

    def complete(self, units: Bools) -> tuple[Bools, float]:
        """The items of a share that has these units and keeps all their weights, and its bytes."""
        taken = np.zeros(len(self.items), dtype=bool)
        taken[: self.units] = units
        for reader, index in self.needs:
            taken[index] |= taken[reader]
        return taken, float(self.nbytes[taken].sum())

    def share_of(
        self, operations: Mapping[str, DeviceKey], homes: Mapping[str, DeviceKey], key: DeviceKey
    ) -> tuple[Bools, Bools]:
        """What a device has of a placement, as (taken, aside)."""
        mine = [operations[item.members[0]] == key for item in self.items[: self.units]]
        taken, _ = self.complete(np.array(mine, dtype=bool))
        aside = np.zeros(len(self.items), dtype=bool)
        for index, item in enumerate(self.items):
            if taken[index] and item.streamed and self.sizes[index]:
                aside[index] = homes[item.streamed] != key
        return taken, aside


def _widest(steps: Sequence[Step], limit: int) -> list[tuple[int, ...]]:
    """What is open where more is than may be: the most of each stretch of such steps."""
    found: list[tuple[int, ...]] = []
    inside = False
    for step in steps:
        open_ = (*step.frontier, step.variable)
        if len(open_) <= limit:
            inside = False
        elif not inside:
            found.append(open_)
            inside = True
        elif len(open_) > len(found[-1]):
            found[-1] = open_
    return found


def _kinds(problem: Problem) -> list[Kind]:
    """Devices that nothing tells apart, together."""
    rules = list(dict.fromkeys(problem.allowed.values()))
    pinned = {problem.host, *problem.fixed_weights.values()}
    kinds: dict[object, list[DeviceSpec]] = {}
    for spec in problem.topology.devices:
        if not spec.computes:
            continue
        key = (
            spec.room,
            spec.flops,
            spec.bandwidth,
            spec.overhead,
            spec.type,
            problem.topology.link(CPU, spec.key),
            tuple(spec.key in rule for rule in rules),
            spec.key if spec.key in pinned else None,
        )
        kinds.setdefault(key, []).append(spec)
    return [Kind(specs[0], tuple(spec.key for spec in specs)) for specs in kinds.values()]


def _unit(nbytes: Ints, room: float) -> int:
    """Bytes of a unit of capacity: as large as loses nothing of the large weights, if that is possible."""
    sizes, counts = np.unique(nbytes[nbytes > 0], return_counts=True)
    least = max(1, int(room / _UNITS))
    if not len(sizes):
        return least
    total = float((sizes * counts).sum())
    heavy = sizes[np.argsort(-(sizes * counts))][:12]
    candidates = {least}
    for size in heavy:
        candidates.update(int(size // k) for k in range(1, max(1, int(size // least)) + 1))
    lost = {c: float(((sizes % c) * counts).sum()) / total for c in candidates if c >= least}
    allowed = min(lost.values()) + _LOSS
    return max(c for c, share in lost.items() if share <= allowed)
