"""All placements of a graph of a dozen operations, enumerated without the solver, in two ways.

``Space`` lists all placements of any problem and judges them by the evaluator alone. ``Brute`` is for larger
plain graphs. All prefixes of placements are kept side by side in arrays, one row each, and grown by one
operation at a time: its device, and the home of each weight that it is the first to read. A row is dropped
only where no placement that begins like it is below ``upper`` seconds and within the budgets:

- its clock, with copies of weights from the CPU that wait for nothing but the copy before, plus the fastest
  seconds of each operation that is left, is not below ``upper``;
- weights that reside on a device take more than its room, alone or with the tensors of one operation.

The evaluator judges the remaining rows in the order of these clocks, until they reach the best found. A
prefetch buffer may have any number of slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
from placement_api import Evaluation, Problem, evaluate
from random_problems import groups_of

from graphplan.devices.topology import CPU, DISK, DeviceKey, round_up
from graphplan.ir.cost_model import move_seconds, operation_seconds
from graphplan.ir.graph_elements import Operation
from graphplan.ir.schedule import Assignment

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLACK = 1e-9  # of seconds, relative: sums in another order


@dataclass
class Rows:
    """Prefixes, one a row.

    Attributes:
        device: (rows, operations) index of the key on which each runs.
        home: (rows, weights) index of the key where it resides.
        present: (rows, values and weights, keys) whether the device holds it or has held it.
        clock: (rows,) seconds.
        copies: (rows, keys) seconds at which the copies to it are done.
        weight_bytes: (rows, keys) bytes of weights.
    """

    device: Ints
    home: Ints
    present: npt.NDArray[np.bool_]
    clock: Floats
    copies: Floats
    weight_bytes: Ints

    def take(self, selected: npt.NDArray[np.generic]) -> Rows:
        """Some of the rows, copied."""
        return Rows(*(getattr(self, column.name)[selected] for column in fields(self)))

    @classmethod
    def concatenate(cls, parts: Sequence[Rows]) -> Rows:
        """The rows of all parts."""
        columns = ([getattr(part, column.name) for part in parts] for column in fields(cls))
        return cls(*(np.concatenate(arrays) for arrays in columns))


class Brute:
    """All placements of a problem on some of its devices.

    Args:
        problem: every weight of its graph is read, no operation makes views or changes its inputs.
        keys: devices that operations may run on.
        stream: whether weights may reside on the CPU if no reader runs there.
        anywhere: whether those with several readers may reside on any device, else only with a reader.
    """

    def __init__(
        self, problem: Problem, keys: Sequence[DeviceKey], *, stream: bool, anywhere: bool = True
    ) -> None:
        graph = problem.graph
        assert set(graph.weights) <= set(graph.consumers)
        assert not any(value.alias_of for value in graph.values.values())
        self.problem, self.keys, self.stream, self.anywhere = problem, list(keys), stream, anywhere
        self.specs = [problem.topology[key] for key in keys]
        self.order = list(graph.operations.values())
        self.step = {name: i for i, name in enumerate(graph.operations)}
        self.weights = list(graph.weights)
        self.index = {name: i for i, name in enumerate([*graph.values, *self.weights])}
        self.seconds = [[operation_seconds(o, spec) for spec in self.specs] for o in self.order]
        self.remaining_seconds = [
            sum(min(row) for row in self.seconds[i:]) for i in range(len(self.order) + 1)
        ]

    def best_below(self, upper: float) -> Evaluation | None:
        """The fastest placement below so many seconds, if there is any."""
        rows, limit = self._start(), upper * (1 - SLACK)
        for step in range(len(self.order)):
            rows = self._grow(rows, step, limit)
        rows = self._finish(rows, limit)
        best: Evaluation | None = None
        for row in np.argsort(rows.clock, kind="stable"):
            if best is not None and rows.clock[row] >= best.seconds * (1 - SLACK):
                break
            for found in self._judge(rows, int(row)):
                if (
                    found.feasible
                    and found.seconds < limit
                    and (best is None or found.seconds < best.seconds)
                ):
                    best = found
        return best

    def _start(self) -> Rows:
        present = np.zeros((1, len(self.index), len(self.keys)), dtype=bool)
        if self.problem.host in self.keys:
            for name in self.problem.graph.inputs:
                present[0, self.index[name], self.keys.index(self.problem.host)] = True
        shape = (1, len(self.keys))
        return Rows(
            np.zeros((1, len(self.order)), dtype=np.int64),
            np.zeros((1, len(self.weights)), dtype=np.int64),
            present,
            np.zeros(1),
            np.zeros(shape),
            np.zeros(shape, dtype=np.int64),
        )

    # -- one operation ------------------------------------------------------------------------------------

    def _grow(self, rows: Rows, step: int, limit: float) -> Rows:
        operation = self.order[step]
        seen = {name for earlier in self.order[:step] for name in earlier.inputs}
        new = [name for name in dict.fromkeys(operation.inputs) if name in self.weights and name not in seen]
        grown = []
        for device in range(len(self.keys)):
            for homes in itertools.product(*(self._homes(name, device) for name in new)):
                made = rows.take(np.arange(len(rows.clock)))
                made.device[:, step] = device
                for name, home in zip(new, homes, strict=True):
                    self._place_weight(made, name, home)
                grown.append(self._run(made, operation, step, device, limit))
        return Rows.concatenate(grown)

    def _homes(self, name: str, device: int) -> list[int]:
        """Where its first reader runs, or wherever a later one may, or the CPU."""
        shared = len(self.problem.graph.consumers[name]) > 1
        return [
            home
            for home, key in enumerate(self.keys)
            if home == device or shared or (self.stream and key == CPU)
        ]

    def _place_weight(self, rows: Rows, name: str, home: int) -> None:
        rows.home[:, self.weights.index(name)] = home
        rows.present[:, self.index[name], home] = True
        rows.weight_bytes[:, home] += round_up(self.problem.graph.weights[name].nbytes)

    def _run(self, rows: Rows, operation: Operation, step: int, device: int, limit: float) -> Rows:
        graph, spec = self.problem.graph, self.specs[device]
        held = np.zeros(len(rows.clock), dtype=np.int64)
        arrived = np.zeros(len(rows.clock))
        for name in dict.fromkeys(operation.inputs):
            missing = ~rows.present[:, self.index[name], device]
            if name in graph.values:
                held += spec.allocated(graph.values[name].nbytes)
                rows.clock += np.where(missing, self._move_seconds(rows, name, spec.key), 0.0)
            else:
                self._copy_weight(rows, name, missing, device, arrived)
                held += np.where(missing, round_up(graph.weights[name].nbytes), 0)
            rows.present[:, self.index[name], device] = True
        rows.clock = np.maximum(rows.clock, arrived) + self.seconds[step][device]
        for name in operation.outputs:
            held += spec.allocated(graph.values[name].nbytes)
            rows.present[:, self.index[name], device] = True
        room = np.array([spec.room for spec in self.specs])
        fits = (rows.weight_bytes <= room).all(axis=1) & (rows.weight_bytes[:, device] + held <= spec.room)
        return rows.take(fits & (rows.clock + self.remaining_seconds[step + 1] < limit))

    def _move_seconds(self, rows: Rows, name: str, destination: DeviceKey) -> Floats:
        graph, topology = self.problem.graph, self.problem.topology
        nbytes = graph.values[name].copy_bytes
        if name not in graph.producer:
            return np.full(len(rows.clock), topology.link(self.problem.host, destination).seconds(nbytes))
        table = np.array([topology.link(key, destination).seconds(nbytes) for key in self.keys])
        return table[rows.device[:, self.step[graph.producer[name]]]]

    def _copy_weight(
        self, rows: Rows, name: str, missing: npt.NDArray[np.bool_], device: int, arrived: Floats
    ) -> None:
        """Copies of weights: from another accelerator on the clock, from the CPU on the copy queue."""
        topology, nbytes = self.problem.topology, self.problem.graph.weights[name].nbytes
        home = rows.home[:, self.weights.index(name)]
        for source, key in enumerate(self.keys):
            copied = missing & (home == source)
            if source == device or not copied.any():
                continue
            link = topology.link(key, self.keys[device])
            if key == CPU and self.specs[device].is_accelerator:
                # merged segments share a latency: only that of the first is certain
                start = np.maximum(rows.copies[copied, device], link.latency)
                rows.copies[copied, device] = start + nbytes / link.bandwidth
                arrived[copied] = np.maximum(arrived[copied], rows.copies[copied, device])
            else:
                rows.clock[copied] += link.seconds(nbytes)

    def _finish(self, rows: Rows, limit: float) -> Rows:
        """Outputs return; a weight resides with a reader or on the CPU, unless it may reside anywhere."""
        host = self.problem.host
        for name in self.problem.graph.outputs:
            if not self.problem.returns_to_host:
                break
            seconds = self._move_seconds(rows, name, host)
            missing = np.ones(len(rows.clock), dtype=bool)
            if host in self.keys:
                missing = ~rows.present[:, self.index[name], self.keys.index(host)]
            rows.clock += np.where(missing, seconds, 0.0)
        sound = rows.clock < limit
        for i, name in enumerate([] if self.anywhere else self.weights):
            readers = [self.step[reader] for reader in self.problem.graph.consumers[name]]
            with_reader = (rows.device[:, readers] == rows.home[:, i : i + 1]).any(axis=1)
            cpu = self.keys.index(CPU) if self.stream and CPU in self.keys else -1
            sound &= with_reader | (rows.home[:, i] == cpu)
        return rows.take(sound)

    # -- judging ------------------------------------------------------------------------------------------

    def _judge(self, rows: Rows, row: int) -> Iterator[Evaluation]:
        operations = {o.name: self.keys[d] for o, d in zip(self.order, rows.device[row], strict=True)}
        homes = {name: self.keys[d] for name, d in zip(self.weights, rows.home[row], strict=True)}
        yield from with_all_depths(self.problem, Assignment(operations, homes))


def with_all_depths(problem: Problem, assignment: Assignment) -> Iterator[Evaluation]:
    """The placement with prefetch buffers of any number of slots."""
    found = evaluate(problem, assignment)
    yield found
    prefetch_buffers = {buffer.device: len(buffer.segments) for buffer in found.schedule.prefetch_buffers}
    for counts in itertools.product(*(range(1, segments + 1) for segments in prefetch_buffers.values())):
        if any(count > 2 for count in counts) or found.excess:
            slots = dict(zip(prefetch_buffers, counts, strict=True))
            yield evaluate(problem, replace(assignment, slots=slots))


# -- the same by the evaluator alone, for graphs of any kind ----------------------------------------------


@dataclass(frozen=True)
class Space:
    """The placements of a problem among which a bound holds.

    A weight that one group of operations reads resides with the group; on the CPU too, if offload is
    allowed and it may be streamed. One that several groups read resides on any device, without offload on an
    accelerator or where a reader runs; an unread one, anywhere. Pinned weights reside where they are pinned.
    With a disk, parameters that may be streamed may be there as well.

    Args:
        problem: any.
        alone: without offload: the CPU runs only operations that must, and holds only pinned weights for
            accelerators. Nothing is on disk.
    """

    problem: Problem
    alone: bool

    @cached_property
    def accelerators(self) -> frozenset[DeviceKey]:
        return frozenset(spec.key for spec in self.problem.topology.devices if spec.is_accelerator)

    @cached_property
    def offloads(self) -> bool:
        return self.problem.offload and not self.alone and CPU in self.problem.topology

    @cached_property
    def groups(self) -> dict[tuple[str, ...], tuple[DeviceKey, ...]]:
        """Operations that are placed as one -> the devices that they may run on."""
        return {group: self._devices(group) for group in groups_of(self.problem.graph)}

    @cached_property
    def sizes(self) -> dict[str, tuple[DeviceKey, ...]]:
        """The operations that only make sizes, which take no time on any device."""
        operations = self.problem.graph.operations.values()
        return {o.name: self._devices([o.name]) for o in operations if o.host_only}

    def _devices(self, group: Iterable[str]) -> tuple[DeviceKey, ...]:
        keys = frozenset(self.keys)
        rule = keys.intersection(*(self.problem.allowed.get(name, keys) for name in group))
        if self.accelerators and not (self.problem.offload and not self.alone):
            rule = (rule & self.accelerators) or rule
        return tuple(key for key in self.keys if key in rule)

    def homes(self, name: str, operations: Mapping[str, DeviceKey]) -> tuple[DeviceKey, ...]:
        """The devices where a weight may reside with these operations."""
        graph, keys = self.problem.graph, self.keys
        readers = dict.fromkeys(operations[reader] for reader in graph.readers.get(name, ()))
        if name in self.problem.fixed_weights:
            return (self.problem.fixed_weights[name],)
        disk = (DISK,) if name in self.mappable else ()
        if not readers:
            return (*keys, *disk)
        if name in self.shared:
            anywhere = self.offloads or not self.accelerators
            devices = (key for key in keys if anywhere or key in self.accelerators or key in readers)
            return (*devices, *disk)
        cpu = (CPU,) if self.offloads and name in graph.streamable else ()
        return tuple(dict.fromkeys((*readers, *cpu, *disk)))

    @cached_property
    def keys(self) -> tuple[DeviceKey, ...]:
        return tuple(spec.key for spec in self.problem.topology.computing)

    @cached_property
    def mappable(self) -> frozenset[str]:
        """The weights that may be on disk."""
        graph, fixed = self.problem.graph, self.problem.fixed_weights
        if self.alone or DISK not in self.problem.topology:
            return frozenset()
        names = graph.streamable - fixed.keys()
        return frozenset(n for n in names if graph.weights[n].kind == "parameter" and graph.weights[n].nbytes)

    @cached_property
    def shared(self) -> frozenset[str]:
        """The weights that several groups read."""
        graph = self.problem.graph
        number = {name: i for i, group in enumerate(self.groups) for name in group}
        return frozenset(w for w in graph.weights if len({number[r] for r in graph.readers.get(w, ())}) > 1)

    @cached_property
    def count(self) -> int:
        """Upper limit on the number of placements, buffers of other depths not counted."""
        graph = self.problem.graph
        placements = math.prod(len(devices) for devices in self.groups.values())
        for name in graph.weights.keys() - self.problem.fixed_weights.keys():
            if name in self.shared or not graph.readers.get(name):
                homes = len(self.keys if self.offloads else self.accelerators) or 1
            else:
                homes = 1 + bool(self.offloads and self.accelerators and name in graph.streamable)
            placements *= homes + (name in self.mappable)
        return placements

    def objection(self, assignment: Assignment) -> str | None:
        """Return why an assignment is not in the space; None if it is."""
        for group, devices in self.groups.items():
            found = {assignment.operations[name] for name in group}
            if len(found) > 1:
                return f"{group} are on {found}"
            if not found <= set(devices):
                return f"{group} are on {found}, allowed are {devices}"
        for name in self.problem.graph.weights:
            home, homes = assignment.weights[name], self.homes(name, assignment.operations)
            if home not in homes:
                return f"{name} resides on {home!r}, allowed are {homes}"
        return None

    def best(self, start: Evaluation | None = None) -> Evaluation | None:
        """The fastest placement; ``start`` if none is faster, None if none is within the budgets."""
        best = start
        for operations, seconds in self._by_compute():
            if best is not None and seconds >= best.seconds:
                break
            if any(room < 0 for room in self._rooms(operations, {}).values()):
                continue
            homes = [self.homes(name, operations) for name in self.problem.graph.weights]
            for chosen in itertools.product(*homes):
                weights = dict(zip(self.problem.graph.weights, chosen, strict=True))
                if any(room < 0 for room in self._rooms(operations, weights).values()):
                    continue
                found = evaluate(self.problem, Assignment(operations, weights))
                lower_bound = self._without_weights(found)
                if best is not None and lower_bound >= best.seconds:
                    break  # whatever the homes are
                for trial in with_slots(self.problem, found, best):
                    if trial.feasible and (best is None or trial.seconds < best.seconds):
                        best = trial
        return best

    def _by_compute(self) -> Iterator[tuple[dict[str, DeviceKey], float]]:
        """Devices of all operations, and the seconds that these compute; the fastest first."""
        problem = self.problem
        clocks = {spec.key: problem.clock(spec) for spec in problem.topology.devices}
        options = [
            [(sum(clocks[key][name] for name in group), group, key) for key in devices]
            for group, devices in self.groups.items()
        ]
        combinations = [
            (sum(part[0] for part in combination), combination) for combination in itertools.product(*options)
        ]
        sizes = {name: devices[0] for name, devices in self.sizes.items()}
        for seconds, combination in sorted(combinations, key=lambda combination: combination[0]):
            # sums in another order differ by roundings
            yield {n: key for _, group, key in combination for n in group} | sizes, seconds * (1 - SLACK)

    def _rooms(
        self, operations: Mapping[str, DeviceKey], weights: Mapping[str, DeviceKey]
    ) -> dict[DeviceKey, int]:
        """The free bytes of each budget, given the weights whose homes are decided."""
        rooms = {spec.key: spec.room for spec in self.problem.topology.devices}
        for name, weight in self.problem.graph.weights.items():
            homes = (weights[name],) if weights else self.homes(name, operations)
            if len(homes) == 1:
                rooms[homes[0]] -= weight.nbytes
        return rooms

    def _without_weights(self, found: Evaluation) -> float:
        """Least seconds of the same operations over all homes of weights."""
        clocks = {spec.key: self.problem.clock(spec) for spec in self.problem.topology.devices}
        runs = sum(clocks[run.device][run.operation] for run in found.schedule.runs())
        kinds = ("activation", "input", "output", "writeback")
        moves = sum(
            move_seconds(move, self.problem.topology)
            for move in found.schedule.moves(*kinds)
            if move.value not in self.problem.graph.weights
        )
        return (runs + moves) * (1 - SLACK)


def with_slots(problem: Problem, found: Evaluation, best: Evaluation | None) -> Iterator[Evaluation]:
    """A placement, and the same with one, two, three slots and as many as there are segments."""
    yield found
    prefetch_buffers = {buffer.device: len(buffer.segments) for buffer in found.schedule.prefetch_buffers}
    if not prefetch_buffers or not problem.streaming:
        return
    copied = sum(move_seconds(move, problem.topology) for move in found.schedule.moves())
    computed = sum(problem.clock(problem.topology[r.device])[r.operation] for r in found.schedule.runs())
    if best is not None and (copied + computed) * (1 - SLACK) >= best.seconds:
        return
    depths = [
        sorted({count for count in (1, 2, 3) if count < segments} | {segments})
        for segments in prefetch_buffers.values()
    ]
    for counts in itertools.product(*depths):
        slots = dict(zip(prefetch_buffers, counts, strict=True))
        yield evaluate(problem, replace(found.schedule.assignment, slots=slots))
