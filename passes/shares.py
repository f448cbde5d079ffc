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
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphplan.alignment import round_up
from graphplan.device import CPU, DeviceKey, DeviceSpec
from graphplan.graph import Operation
from graphplan.passes.bands import Crowd, find_crowds
from graphplan.passes.evaluate import Problem

__all__ = ["Kind", "Shares", "kinds_of"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices that nothing tells apart."""

    spec: DeviceSpec
    keys: tuple[DeviceKey, ...]


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
    """What shares are made of, and what they cost on each kind of device.

    Attributes:
        kinds: of devices.
        units: operations that are placed as one, in order.
        group: (units,) units that nothing tells apart have one number.
        counts: (groups,) how many units each group has.
        ties: items that are weights which several units read.
        runs: (kinds,) whether such a device may run anything.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph, self.topology = problem, problem.graph, problem.topology
        self.kinds = kinds_of(problem)
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
        self.value_cost: dict[int, float] = {}
        self._arriving: dict[tuple[int, bool, bool], Floats] = {}
        self._read_weights()
        self._read_values()
        self._settle()

    @cached_property
    def _reading(self) -> tuple[Ints, Ints]:
        """The readers of ``needs``, and the items that they read."""
        pairs = np.array(self.needs, dtype=np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    @cached_property
    def crowds(self) -> list[Crowd]:
        """Units that need more together on one device than each by itself."""
        specs = [kind.spec for kind in self.kinds]
        is_host = [self.host in kind.keys for kind in self.kinds]
        return find_crowds(self.graph, self.unit_of, specs, is_host)

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
                item.nbytes, item.streamed = item.nbytes + round_up(weight.nbytes), weight.name
            elif readers:
                index = self._add(_Item(round_up(weight.nbytes), [], weight.name, weight.name))
                self.needs += [(reader, index) for reader in readers]

    def _add(self, item: _Item) -> int:
        self.items.append(item)
        return len(self.items) - 1

    def _fix(self, name: str, home: DeviceKey, readers: Sequence[int]) -> None:
        """A weight whose place is settled: memory there, a copy wherever else it is read."""
        nbytes = self.graph.weights[name].nbytes
        clock, queue = np.zeros(len(self.kinds)), np.zeros(len(self.kinds))
        for row, kind in enumerate(self.kinds):
            if home in kind.keys:
                self._base[row] += round_up(nbytes)
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
        """(kinds,) seconds of bringing a value of so many bytes to such a device."""
        given = maker < 0
        found = self._arriving.get((nbytes, given, returned))
        if found is None:
            found = self._arriving[nbytes, given, returned] = self._arrival_seconds(nbytes, given, returned)
        return found

    def _arrival_seconds(self, nbytes: int, given: bool, returned: bool) -> Floats:
        seconds = np.zeros(len(self.kinds))
        computing = [spec.key for spec in self.topology.devices if spec.computes]
        for row, kind in enumerate(self.kinds):
            if self.host in kind.keys and (given or returned):
                continue  # it is there, or the maker has paid for it
            sources = [self.host] if given else computing
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
        self.value_cost[index] = float(seconds.max(initial=0.0))
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
        self.clock, self.queue = np.zeros((rows, len(self.items))), np.zeros((rows, len(self.items)))
        for row, kind in enumerate(self.kinds):
            seconds = self.problem.clock(kind.spec)
            for index in range(self.units):
                self.clock[row, index] += sum(seconds[name] for name in self.items[index].members)
        for item, clock, queue in self._costs:
            self.clock[:, item] += clock
            self.queue[:, item] += queue
        self.runs = [bool(np.isfinite(clock[: self.units]).any()) for clock in self.clock]
        self.ties = np.array(
            [i for i, item in enumerate(self.items) if item.weight and item.nbytes], dtype=int
        )
        self.aside = self._aside_seconds()
        self.working = self._working_sets()
        self._group_units()

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

    def peer_seconds(self, index: int, row: int) -> float:
        """Seconds on the clock of bringing a weight that several units read from another accelerator."""
        kind, name = self.kinds[row], self.items[index].streamed
        if not kind.spec.is_accelerator or len(self._units_reading(name)) < 2:
            return np.inf
        peers = [s.key for s in self.topology.devices if s.is_accelerator and s.key not in kind.keys[:1]]
        nbytes = self.graph.weights[name].nbytes
        links = (self.topology.link(peer, key) for key in kind.keys for peer in peers if peer != key)
        return min((link.seconds(nbytes) for link in links), default=np.inf)

    @cached_property
    def ties_travel(self) -> bool:
        """Whether shared weights may be brought in two ways, of which ``aside`` knows one."""
        accelerators = sum(len(kind.keys) for kind in self.kinds if kind.spec.is_accelerator)
        shared = any(len(self._units_reading(self.items[i].streamed)) > 1 for i in self.ties)
        return self.problem.offload and self.cpu is not None and accelerators > 1 and shared

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

    # -- what a share has -------------------------------------------------------------------------

    def kept_bytes(self, taken: Bools, aside: Bools) -> float:
        """Bytes of weights that a share keeps."""
        return float(self.nbytes[taken & ~aside].sum())

    def complete(self, units: Bools) -> tuple[Bools, float]:
        """The items of a share that has these units and keeps all their weights, and its bytes."""
        taken = np.zeros(len(self.items), dtype=bool)
        taken[: self.units] = units
        readers, items = self._reading
        np.logical_or.at(taken, items, taken[readers])
        return taken, float(self.nbytes[taken].sum())

    def share_of(
        self, operations: Mapping[str, DeviceKey], homes: Mapping[str, DeviceKey], key: DeviceKey
    ) -> tuple[Bools, Bools]:
        """What a device has of a placement, as (taken, aside)."""
        mine = [operations[item.members[0]] == key for item in self.items[: self.units]]
        taken, _ = self.complete(np.array(mine, dtype=bool))
        aside = np.zeros(len(self.items), dtype=bool)
        for index, item in enumerate(self.items):
            if taken[index] and item.streamed and self.nbytes[index]:
                aside[index] = homes[item.streamed] != key
        return taken, aside


def kinds_of(problem: Problem) -> list[Kind]:
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
