"""A problem as flat arrays: exact seconds and peaks of placements in which nothing is streamed.

A placement is a vector of devices and is evaluated in a fraction of a millisecond; the evaluator writes a
schedule and takes milliseconds. Items can be copied: tensors that operations make, inputs, weights.
An item has one source, and costs one copy for each further device that reads it::

    seconds = sum over operations of compute[device, operation]
            + sum over items, and devices that read them elsewhere, of latency + bytes / bandwidth

The results equal the evaluator's (tests/passes/placement/test_arrays.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphplan.devices.topology import DeviceKey, DeviceSpec, round_up
from graphplan.ir.graph_elements import Operation
from graphplan.ir.liveness import steps_together
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.folding import fold, folded_order
from graphplan.passes.placement.params import PARAMS
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import (
    assign_weights,
    fill,
    place_host_scalars,
    siblings,
    unread_weights,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Arrays:
    """Flat arrays of a problem.

    Args:
        problem: the problem.
        folded: whether operations are in the order of :mod:`graphplan.passes.placement.folding`.

    Attributes:
        keys: device keys: devices that compute first, then the others, the host last if it is none of these.
        specs: specs of the devices that compute.
        accelerates: (devices that compute,) whether each is an accelerator.
        cpu: index of the CPU; None if it does not compute.
        host: index of the caller's device.
        running: (operations,) indices of operations in the order of execution.
        compute: (devices that compute, operations) seconds, infinite where an operation may not run.
        latency: (devices, devices) seconds from row to column.
        per_byte: (devices, devices) seconds per byte.
        names: names of items: tensors first, then weights.
        values: number of items that are tensors.
        nbytes: (items,) bytes of a copy.
        source: (items,) the operation that makes a tensor, or the first that reads a weight; -1 for fixed
            items.
        fixed: (items,) device of inputs and of weights with a fixed home, else -1.
        item, reader: (reads,) pairs; the reader ``count`` stands for the end, on the host.
        made_bytes: (items, devices) bytes that an allocator takes for an item where it is made; 0 for views.
        copied_bytes: (items, devices) bytes that an allocator takes for a copy.
        workspace: (devices that compute, operations + 1) bytes that each operation takes while it runs.
        units: the operations of each macro-operation, in order; those that make host scalars are in none.
        readers: item -> the macro-operations that read it, in order.
        shared: weights without a fixed home that several macro-operations read.
    """

    def __init__(self, problem: Problem, *, folded: bool = False) -> None:
        self.problem, self.graph, self.folded = problem, problem.graph, folded
        topology = problem.topology
        self.specs: list[DeviceSpec] = topology.computing
        self.keys: list[DeviceKey] = [spec.key for spec in self.specs]
        self.computing = len(self.keys)
        self.accelerates: Bools = np.array([spec.is_accelerator for spec in self.specs], dtype=bool)
        self.cpu = next(iter(np.flatnonzero(~self.accelerates).tolist()), None)
        self.keys += [spec.key for spec in topology.devices if not spec.computes]
        if problem.host not in self.keys:
            self.keys.append(problem.host)
        self.number = {key: d for d, key in enumerate(self.keys)}
        self.host = self.number[problem.host]
        order = folded_order(self.graph) if folded else list(self.graph.operations)
        self.operations = [self.graph.operations[name] for name in order]
        self.count = len(self.operations)
        self.index = {operation.name: i for i, operation in enumerate(self.operations)}
        self.running = np.array([self.index[name] for name in self.graph.operations], dtype=np.int64)
        clocks = [problem.clock(spec) for spec in self.specs]
        self.compute = np.array([[clock[name] for name in order] for clock in clocks]).reshape(
            self.computing, self.count
        )
        self._read_links()
        self._list_items()
        self._list_reads()
        self._add_write_backs()
        self._allocations: dict[tuple[str, int], int] = {}
        self._count_bytes()
        self.units = self._make_units()
        self.readers = self._find_readers()
        free = [v for v in range(self.values, len(self.names)) if self.fixed[v] < 0]
        self.shared = [v for v in free if len(self.readers.get(v, ())) > 1]
        self.room = np.array([float(spec.room) for spec in self.specs])

    @classmethod
    def of_search(cls, problem: Problem) -> Arrays:
        """Return the arrays that placements are searched on: those of a training step are folded."""
        folded = problem.graph.trains
        return cls(fold(problem) if folded else problem, folded=folded)

    def _read_links(self) -> None:
        count, topology = len(self.keys), self.problem.topology
        self.latency, self.per_byte = np.zeros((count, count)), np.zeros((count, count))
        for a, source in enumerate(self.keys):
            for b, target in enumerate(self.keys):
                if a != b:
                    link = topology.link(source, target)
                    self.latency[a, b], self.per_byte[a, b] = link.latency, 1.0 / link.bandwidth

    def _list_items(self) -> None:
        graph, outputs = self.graph, set(self.graph.outputs)
        tensors = [value for value in graph.values.values() if value.is_tensor]
        fixed, sibling_of = self.problem.fixed_weights, siblings(self.problem)
        weights = [
            w
            for w in graph.weights.values()
            if graph.readers.get(w.name) or w.name in outputs or w.name in fixed or w.name in sibling_of
        ]
        cpu = self.problem.topology.cpu
        self.unread = unread_weights(self.problem)
        self.tensors, self.weights, self.values = tensors, weights, len(tensors)
        self.names = [value.name for value in tensors] + [weight.name for weight in weights]
        self.item_of = {name: v for v, name in enumerate(self.names)}
        self.nbytes = np.array([v.copy_bytes for v in tensors] + [w.nbytes for w in weights], dtype=float)
        self.source = np.full(len(self.names), -1)
        self.returned_weights = list[int]()  # returned, unread weights, whose home is chosen here
        self.fixed = np.full(len(self.names), -1)
        for v, value in enumerate(tensors):
            maker = graph.producer.get(value.name)
            if maker is None:
                self.fixed[v] = self.host
            else:
                self.source[v] = self.index[maker]
        for v, weight in enumerate(weights, self.values):
            home, readers = self.problem.fixed_weights.get(weight.name), graph.readers.get(weight.name)
            if home is not None:
                self.fixed[v] = self.number[home]
            elif readers:
                self.source[v] = self.index[readers[0]]
            elif weight.name in sibling_of:
                first = sibling_of[weight.name]
                if first in fixed:
                    self.fixed[v] = self.number[fixed[first]]
                else:
                    self.source[v] = self.index[graph.readers[first][0]]
            else:  # returned and unread: close to the caller
                self.fixed[v] = self._nearest(float(weight.nbytes)) if cpu is None else self.number[cpu]
                self.returned_weights.append(v)

    def _nearest(self, nbytes: float) -> int:
        """Return the device with the fastest copy to the host; among equals, that with most room."""
        seconds = self.latency[:, self.host] + nbytes * self.per_byte[:, self.host]
        return min(range(self.computing), key=lambda d: (seconds[d], -self.specs[d].room))

    def _list_reads(self) -> None:
        reads, size_reads = list[tuple[int, int]](), list[tuple[int, int]]()
        for i, operation in enumerate(self.operations):
            target = size_reads if operation.host_only else reads
            target += [(self.item_of[name], i) for name in operation.inputs if name in self.item_of]
        if self.problem.returns_to_host:
            returned = [n for n in self.graph.outputs if n in self.item_of]
            reads += [(self.item_of[name], self.count) for name in dict.fromkeys(returned)]
        # a gradient is moved to its parameter's device as soon as it is made
        pairs = [(self.item_of[v.name], self.item_of[v.gradient_of]) for v in self.tensors if v.gradient_of]
        self.item, self.reader = np.array(reads, dtype=np.int64).reshape(-1, 2).T
        # reads by operations that only read sizes
        self.size_item, self.size_reader = np.array(size_reads, dtype=np.int64).reshape(-1, 2).T
        self.gradient, self.parameter = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    def _add_write_backs(self) -> None:
        """Charge the copy back of each input that the pass changes to the first operation that changes it."""
        self.written: list[tuple[int, int]] = []
        for name in self.graph.changed_inputs:
            first = next(
                i
                for i, op in enumerate(self.operations)
                if any(self.graph.root(m) == name for m in op.mutates)
            )
            item = self.item_of[name]
            self.compute[:, first] += self.copy_seconds(item)[: self.computing, self.host]
            self.written.append((item, first))

    def copy_seconds(self, item: int) -> Floats:
        """(devices, devices) seconds of a copy of an item, from row to column."""
        seconds: Floats = self.latency + self.nbytes[item] * self.per_byte
        return seconds

    def _make_units(self) -> list[list[int]]:
        self.unit_of = np.full(self.count, -1)
        units: list[list[int]] = []
        for i, operation in enumerate(self.operations):
            if operation.host_only or self.unit_of[i] >= 0:
                continue
            names = self.graph.group_of.get(operation.name, frozenset({operation.name}))
            members = sorted(self.index[name] for name in names)
            members = [m for m in members if not self.operations[m].host_only]
            self.unit_of[members] = len(units)
            units.append(members)
        return units

    def unit_seconds(self) -> Floats:
        """(devices that compute, macro-operations) seconds, infinite where one may not run."""
        each = [self.compute[:, members].sum(axis=1) for members in self.units]
        return np.array(each).T.reshape(self.computing, len(self.units))

    def _find_readers(self) -> dict[int, tuple[int, ...]]:
        readers: dict[int, dict[int, None]] = {}
        for item, reader in zip(self.item.tolist(), self.reader.tolist(), strict=True):
            if reader < self.count:
                readers.setdefault(item, {})[int(self.unit_of[reader])] = None
        return {item: tuple(units) for item, units in readers.items()}

    @cached_property
    def crossing(self) -> Floats:
        """(positions,) bytes of tensors that are made before a position and read after it, or in reverse."""
        last, inner = self.source.copy(), self.reader < self.count
        first = self.source.copy()
        np.maximum.at(last, self.item[inner], self.reader[inner])
        np.minimum.at(first, self.item[inner], self.reader[inner])
        tensors = np.flatnonzero((self.source[: self.values] >= 0) & (last > first)[: self.values])
        change = np.zeros(self.count + 2)
        np.add.at(change, first[tensors] + 1, self.nbytes[tensors])
        np.add.at(change, last[tensors] + 1, -self.nbytes[tensors])
        return change.cumsum()[: self.count + 1]

    # -- placements ---------------------------------------------------------------------------------

    def homes(self, devices: Ints, chosen: Ints | None = None) -> Ints:
        """(items,) the device of each item's source.

        Args:
            devices: (operations,) device indices.
            chosen: (items,) decided homes; -1 where the first reader decides.
        """
        home: Ints = np.where(self.fixed >= 0, self.fixed, devices[self.source])
        return home if chosen is None else np.where((chosen >= 0) & (self.fixed < 0), chosen, home)

    def seconds(self, devices: Ints, chosen: Ints | None = None) -> float:
        """Return the estimated seconds of a forward pass."""
        where, home = np.append(devices, self.host), self.homes(devices, chosen)
        target, source = where[self.reader], home[self.item]
        moved = target != source
        gradient_moves = home[self.parameter] != home[self.gradient]
        copies = np.unique(
            np.concatenate([self.item[moved], self.gradient[gradient_moves]]) * len(self.keys)
            + np.concatenate([target[moved], home[self.parameter[gradient_moves]]])
        )
        item, target = np.divmod(copies, len(self.keys))
        source = home[item]
        moves = self.latency[source, target] + self.nbytes[item] * self.per_byte[source, target]
        return float(self.compute[devices, np.arange(self.count)].sum() + moves.sum())

    def _allocated(self, spec: DeviceSpec, nbytes: int) -> int:
        size = spec.type, nbytes
        allocated = self._allocations.get(size)
        if allocated is None:
            allocated = self._allocations[size] = spec.allocated(nbytes) if nbytes else 0
        return allocated

    def _least_held(self, name: str) -> int:
        """Return the least bytes that a device holds where a value is read: its storage, or a base's copy."""
        values, smallest = self.graph.values, self.graph.values[name].copy_bytes
        while (base := values[name].alias_of) is not None and base in values:
            name = base
            smallest = min(smallest, values[name].copy_bytes)
        return smallest if name in self.graph.inputs else min(smallest, values[name].nbytes)

    @cached_property
    def working_sets(self) -> Floats:
        """(devices that compute, macro-operations) least bytes of the neediest operation, weights excluded.

        They are inputs, outputs, workspace, and copies of weights that are fixed elsewhere.
        """
        largest = np.zeros((self.computing, len(self.units)))
        for unit, members in enumerate(self.units):
            for i in members:
                np.maximum(largest[:, unit], self._working_set(self.operations[i]), out=largest[:, unit])
        return largest

    def _working_set(self, operation: Operation) -> Floats:
        """(devices that compute,) least bytes of an operation: see :attr:`working_sets`."""
        graph, fixed = self.graph, self.problem.fixed_weights
        outputs = [graph.values[name].nbytes for name in operation.outputs]
        read: dict[str, int] = {}
        copied: list[tuple[DeviceKey, int]] = []
        for name in operation.inputs:
            value, root = graph.values.get(name), graph.root(name)
            if value is None and name in fixed:
                copied.append((fixed[name], graph.weights[name].nbytes))
            elif value is not None and value.is_tensor and root not in graph.weights:
                read[root] = max(read.get(root, 0), self._least_held(name))
        total = np.zeros(self.computing)
        for spec, same_type in self._device_types:
            sizes = [*read.values(), *outputs, operation.workspace_on(spec.type)]
            total[same_type] = sum(self._allocated(spec, nbytes) for nbytes in sizes)
            for home, nbytes in copied:
                total[same_type & self._copies_from[home]] += self._allocated(spec, nbytes)
        if self.host < self.computing:  # inputs are there in any case, and counted apart
            spec = self.specs[self.host]
            inputs = [nbytes for name, nbytes in read.items() if name in graph.inputs]
            total[self.host] -= sum(self._allocated(spec, nbytes) for nbytes in inputs)
        return total

    @cached_property
    def _device_types(self) -> list[tuple[DeviceSpec, Bools]]:
        """One spec of each device type, and the mask of its devices: allocators of one type round alike."""
        spec_of = {spec.type: spec for spec in reversed(self.specs)}
        types = np.array([spec.type for spec in self.specs])
        return [(spec, types == device_type) for device_type, spec in spec_of.items()]

    @cached_property
    def _copies_from(self) -> dict[DeviceKey, Bools]:
        """Home of fixed weights -> mask of devices that copy them; prefetch buffers copy from CPU memory."""
        cpu, homes = self.problem.topology.cpu, set(self.problem.fixed_weights.values())
        return {
            home: np.array(
                [home != spec.key and not (home == cpu and spec.is_accelerator) for spec in self.specs]
            )
            for home in homes
        }

    def _count_bytes(self) -> None:
        self.made_bytes, self.copied_bytes = np.zeros((2, len(self.names), len(self.keys)))
        self.workspace = np.zeros((self.computing, self.count + 1))
        sizes = self.nbytes.astype(np.int64).tolist()
        for spec, same_type in self._device_types:
            made = [self._allocated(spec, value.nbytes) for value in self.tensors]
            copied = [self._allocated(spec, nbytes) for nbytes in sizes]
            workspace = [operation.workspace_on(spec.type) for operation in self.operations]
            for d in np.flatnonzero(same_type):
                self.made_bytes[: self.values, d], self.copied_bytes[:, d] = made, copied
                self.workspace[d, :-1] = [self._allocated(spec, nbytes) for nbytes in workspace]

    @cached_property
    def views(self) -> tuple[Ints, list[Ints]]:
        """(items,) base of each view, else -1; and the views at each depth of views of views."""
        base, depth = np.full(len(self.names), -1), np.zeros(len(self.names), dtype=np.int64)
        for v, value in enumerate(self.tensors):
            if value.alias_of in self.item_of and self.source[v] >= 0:
                base[v] = self.item_of[value.alias_of]
                depth[v] = depth[base[v]] + 1
        return base, [np.flatnonzero(depth == level) for level in range(1, int(depth.max(initial=0)) + 1)]

    @cached_property
    def live_at_end(self) -> Ints:
        """Tensors that are still live at the end on the device where they are made."""
        items = [self.item_of[value.name] for value in self.tensors if value.stays and not value.gradient_of]
        if not self.problem.returns_to_host:
            items += [self.item_of[name] for name in self.graph.outputs if name in self.item_of]
        return np.array(items, dtype=np.int64)

    @cached_property
    def _returned(self) -> Ints:
        """Instances of results that wait for the caller on its device."""
        items = [self.item_of[name] for name in self.graph.outputs if name in self.item_of]
        return np.array(items, dtype=np.int64) * len(self.keys) + self.host

    @cached_property
    def _is_cpu(self) -> Bools:
        return np.array([key == self.problem.topology.cpu for key in self.keys], dtype=bool)

    @cached_property
    def gradients_live_at_end(self) -> Bools:
        """(gradients,) whether each is still live at the end, where its parameter resides."""
        return np.array([self.tensors[item].stays for item in self.gradient], dtype=bool)

    def peaks(self, devices: Ints, chosen: Ints | None = None) -> Floats:
        """(devices that compute,) peak bytes."""
        total = self.read_peaks(devices, chosen)
        if self.unread:
            extra = np.zeros(len(self.keys))
            sizes = {weight.name: weight.held_bytes for weight in self.unread}
            home = self.homes(devices, chosen)
            for name, key in self._fill(total, home).items():
                extra[self.number[key]] += round_up(sizes[name])
            total += self.resident(home, extra) - self.resident(home)
        return total

    @cached_property
    def _time(self) -> Ints:
        """(operations + 1,) step of each operation; at the end, the step after which results return."""
        time = np.full(self.count + 1, self.count)
        time[self.running] = np.arange(self.count)
        backward = [i for i, operation in enumerate(self.operations) if operation.backward]
        time[self.count] = time[backward].min(initial=self.count)
        return time

    @cached_property
    def _timed_reads(self) -> tuple[Ints, Ints, Ints]:
        """(reads,) items, readers and their steps, in order of execution."""
        order = np.argsort(self._time[self.reader], kind="stable")
        return self.item[order], self.reader[order], self._time[self.reader[order]]

    def read_peaks(self, devices: Ints, chosen: Ints | None) -> Floats:
        """(devices that compute,) peak bytes without unread weights."""
        width, end, time = len(self.keys), self.count, self._time
        home = self.homes(devices, chosen)
        born, last = self._lifetimes(devices, home)
        nbytes = self.copied_bytes.copy()
        items = np.arange(len(self.names))
        nbytes[items, home] = self.made_bytes[items, home]
        live = np.flatnonzero((born >= 0) & (nbytes.ravel() > 0))
        live = live[live % width < self.computing]
        device, size = live % width, nbytes.ravel()[live]
        allocated, freed = np.zeros((2, self.computing, end + 2))
        np.add.at(allocated, (device, born[live]), size)
        np.add.at(freed, (device, last[live] + 1), size)
        live_bytes = (allocated - freed).cumsum(axis=1)[:, : end + 1]
        acting = devices[self.running][None, :] == np.arange(self.computing)[:, None]
        acting = np.concatenate([acting, np.zeros((self.computing, 1), dtype=bool)], axis=1)
        if self.host < self.computing:
            acting[self.host, time[end]] = True
        # a copy is live from its move on, which is a step of the target device
        busy = np.concatenate([self.workspace[:, self.running], self.workspace[:, end:]], axis=1)
        peaks: Floats = np.where(acting, live_bytes + busy, 0.0).max(axis=1)
        self._count_gradients(peaks, live_bytes - freed[:, 1:], home)
        if self.graph.in_flight > 1:
            saved = (born[live] < time[end]) & (last[live] >= time[end])
            saved &= ~np.isin(live, self._returned)
            others = np.bincount(device[saved], size[saved], self.computing)
            peaks += (self.graph.in_flight - 1) * others
        if self._optimizer_bytes.any() or self.gradients_live_at_end.any():
            peaks = np.maximum(peaks, live_bytes[:, end] + self._optimizer_peak(home))
        return peaks + self.resident(home)

    def _lifetimes(self, devices: Ints, home: Ints) -> tuple[Ints, Ints]:
        """(items * devices,) steps at which each instance is made, and at which it is last needed.

        It is made at -1 if it has no storage that is allocated during the pass: weights, inputs, views.
        """
        width, end, time = len(self.keys), self.count, self._time
        where = np.append(devices, self.host)
        item, reader, read_time = self._timed_reads
        target, returned = where[reader], reader == end
        moved = target != home[item]
        instance = item * width + target
        born, last = np.full(len(self.names) * width, -1), np.full(len(self.names) * width, -2)
        born[instance[::-1]] = read_time[::-1]  # a copy is made right before its first reader
        last[instance] = read_time
        last[instance[returned]] = end
        at_home = np.arange(len(self.names)) * width + home
        born[at_home] = np.where(self.fixed >= 0, -1, time[self.source])
        born[at_home[self.values :]] = -1  # weights are always live
        np.maximum.at(last, self.size_item * width + home[self.size_item], time[self.size_reader])
        # results are moved before anything else runs, also those that the backward pass reads there
        with_results = (born[instance] == time[end]) & np.isin(instance, instance[returned])
        leaves = born[instance] - (returned | with_results)
        np.maximum.at(last, item[moved] * width + home[item[moved]], leaves[moved])
        last[at_home[self.live_at_end]] = end
        gradient, goal = (
            self.gradient[self.gradients_live_at_end],
            home[self.parameter[self.gradients_live_at_end]],
        )
        copied = gradient * width + goal
        # gradients in CPU memory stay allocated between training steps
        born[copied] = np.where(self._is_cpu[goal], 0, time[self.source[gradient]])
        born[at_home[gradient]] = time[self.source[gradient]]
        last[copied] = end
        for written, operation in self.written:
            last[written * width + devices[operation]] = end
        last = np.maximum(last, born)
        base, levels = self.views
        root = np.arange(len(last))
        for level in levels:
            root[at_home[level]] = root[base[level] * width + home[level]]
        for level in reversed(levels):
            np.maximum.at(last, root[at_home[level]], last[at_home[level]])
        born[root != np.arange(len(last))] = -1
        return born, last

    def _count_gradients(self, peaks: Floats, between: Floats, home: Ints) -> None:
        """Raise peaks to those of gradients from other devices: they are added before anything else runs.

        Args:
            peaks: (devices that compute,), raised in place.
            between: (devices that compute, operations + 1) live bytes after each operation.
            home: (items,) device of each item's source.
        """
        target = home[self.parameter]
        arrives = (target != home[self.gradient]) & (target < self.computing)
        item, target = self.gradient[arrives], target[arrives]
        nbytes = between[target, self._time[self.source[item]]]
        nbytes += np.where(self.gradients_live_at_end[arrives], 0.0, self.copied_bytes[item, target])
        np.maximum.at(peaks, target, nbytes)

    @cached_property
    def _optimizer_bytes(self) -> Floats:
        """(2, devices that compute, weights) bytes that the optimizer takes in addition to its state.

        Row 0: where it updates weights one by one. Row 1: each weight's share where it updates all at once.
        """
        alone = [[self._allocated(s, w.step_bytes) for w in self.weights] for s in self.specs]
        together = [
            [self._allocated(s, w.together_bytes) if steps_together(s) else 0 for w in self.weights]
            for s in self.specs
        ]
        return np.array([alone, together]).reshape(2, self.computing, len(self.weights))

    def _optimizer_peak(self, home: Ints) -> Floats:
        """(devices that compute,) peak bytes of the optimizer for the weights that reside there."""
        resides = home[self.values :] == np.arange(self.computing)[:, None]
        alone, together = self._optimizer_bytes * resides
        return np.asarray(np.maximum(alone.max(axis=1, initial=0.0), together.sum(axis=1)))

    @cached_property
    def _separate(self) -> Bools:
        """(weights,) whether each has a storage of its own: constants, caches, parts of sliced weights."""
        return np.array(
            [bool(w.part_of) or w.kind in ("constant", "cache") for w in self.weights], dtype=bool
        )

    @cached_property
    def _arena_bytes(self) -> Floats:
        return np.array([float(round_up(w.nbytes)) for w in self.weights])

    @cached_property
    def copies(self) -> Ints:
        """(weights,) copies of each if it is streamed: if folded, one in each pass that reads it."""
        if not self.folded:
            return np.ones(len(self.weights), dtype=np.int64)
        operations, readers = self.graph.operations, self.graph.readers
        passes = [{operations[r].backward for r in readers.get(w.name, ())} for w in self.weights]
        return np.array([max(1, len(reading)) for reading in passes], dtype=np.int64)

    @cached_property
    def weight_bytes(self) -> Floats:
        """(weights,) bytes where each resides, with its gradient and optimizer state."""
        return np.array([float(sum(map(round_up, (w.nbytes, *w.beside)))) for w in self.weights])

    @cached_property
    def large_shared(self) -> list[int]:
        """Shared weights of at least the share ``negligible`` of all weight bytes."""
        threshold = max(1.0, PARAMS.negligible * float(self.weight_bytes.sum()))
        return [item for item in self.shared if self.stored_bytes([item]) >= threshold]

    def stored_bytes(self, items: Sequence[int]) -> float:
        """Return the bytes of these weights where they reside, with gradients and optimizer state."""
        return float(sum(self.weight_bytes[item - self.values] for item in items))

    def slot_bytes(self, item: int) -> float:
        """Return the bytes of a weight in a slot of a prefetch buffer."""
        return float(self._arena_bytes[item - self.values])

    @cached_property
    def _input_bytes(self) -> Floats:
        """(devices that compute,) bytes of the caller's inputs."""
        total = np.zeros(self.computing)
        if self.host < self.computing:
            spec, values = self.specs[self.host], self.graph.values
            total[self.host] = sum(spec.allocated(values[name].nbytes) for name in self.graph.inputs)
        return total

    def resident(self, home: Ints, extra: Floats | None = None) -> Floats:
        """(devices that compute,) bytes of resident weights, prefetch buffers of other plans, and inputs.

        Args:
            home: (items,) device of each item's source.
            extra: (devices,) bytes of further weights in the same storages.
        """
        where, total = home[self.values :], self._input_bytes.copy()
        stored = np.zeros(len(self.keys)) if extra is None else extra.copy()
        stored += np.bincount(where[~self._separate], self._arena_bytes[~self._separate], len(self.keys))
        for d, spec in enumerate(self.specs):
            separate = np.flatnonzero(self._separate & (where == d)).tolist()
            buffer = self.problem.prefetch_bytes.get(spec.key)
            sizes = [self.weights[w].nbytes for w in separate]
            if buffer:
                sizes.append(buffer)
            for w in self._with_training_state:
                if where[w] == d:
                    sizes += self.weights[w].beside
            total[d] += spec.resident([int(stored[d]), *sizes])
        return total

    @cached_property
    def _with_training_state(self) -> list[int]:
        return [w for w, weight in enumerate(self.weights) if weight.beside]

    @cached_property
    def fixed_bytes(self) -> Floats:
        """(devices that compute,) least bytes of every placement: fixed weights, buffers, inputs.

        Bytes that an allocator takes beyond whole 512s depend on the other allocations, and are left out.
        """
        home = self.fixed[self.values :].copy()
        home[[v - self.values for v in self.returned_weights]] = -1
        counted = np.bincount(home[home >= 0], self.weight_bytes[home >= 0], len(self.keys))
        total: Floats = counted[: self.computing] + self.allocated_buffers + self._input_bytes
        return total

    @cached_property
    def allocated_buffers(self) -> Floats:
        """(devices that compute,) bytes of the prefetch buffers that plans of other passes have allocated."""
        return np.array([float(self.problem.prefetch_bytes.get(spec.key, 0)) for spec in self.specs])

    def fits(self, devices: Ints, chosen: Ints | None = None) -> bool:
        """Whether every budget is kept."""
        return bool((self.peaks(devices, chosen) <= self.room).all())

    def _fill(self, peaks: Floats, home: Ints) -> dict[str, DeviceKey]:
        """Return the homes of unread weights, given peaks with the resident bytes of ``home``."""
        free = self.room[: self.computing] - peaks + self.resident(home)
        keys = [spec.key for spec in self.specs]

        def left(placed: Mapping[DeviceKey, int], nbytes: int) -> dict[DeviceKey, float]:
            extra = np.array([placed.get(key, 0) + nbytes for key in self.keys], dtype=float)
            return dict(zip(keys, (free - self.resident(home, extra)).tolist(), strict=True))

        return fill(self.unread, self.problem.topology.cpu, left)

    # -- to and from assignments --------------------------------------------------------------------

    @cached_property
    def can_run(self) -> Bools:
        """(devices that compute, macro-operations) whether all of its operations may run there."""
        finite = [np.isfinite(self.compute[:, members]).all(axis=1) for members in self.units]
        return np.array(finite, dtype=bool).reshape(len(self.units), self.computing).T

    @cached_property
    def lacks_room(self) -> bool:
        """Whether nothing fits, for a simple reason.

        Beside the weights that fit no other device, a weight or a macro-operation without its weights fits no
        device, or the results do not fit the caller's.
        """
        free = self.room - self.fixed_bytes
        able = self.weight_bytes <= free[:, None]
        places, decided = able.sum(axis=0), self.fixed[self.values :] >= 0
        only = (places == 1) & ~decided
        free -= np.bincount(able.argmax(axis=0)[only], self.weight_bytes[only], self.computing)
        fits = self.can_run & (self.working_sets <= free[:, None])
        results = self._result_bytes > free[self.host] if self.host < self.computing else False
        return bool(
            (free < 0).any() or not (places[~decided] > 0).all() or not fits.any(axis=0).all() or results
        )

    @cached_property
    def _result_bytes(self) -> int:
        """The least bytes that the results take on the caller's device, in addition to inputs and weights."""
        if not self.problem.returns_to_host:
            return 0
        nbytes: dict[str, int] = {}
        for name in self.graph.outputs:
            root = self.graph.root(name)
            if name in self.graph.values and root not in self.graph.weights and root not in self.graph.inputs:
                nbytes[root] = max(nbytes.get(root, 0), self._least_held(name))
        return sum(nbytes.values())

    def expand(self, units: Ints) -> Ints:
        """(operations,) devices, from those of macro-operations; host scalars run where their inputs are.

        A macro-operation that may not run on its device goes to the first device on which it may.
        """
        misplaced = ~self.can_run[units, np.arange(len(units))] & self.can_run.any(axis=0)
        units = np.where(misplaced, self.can_run.argmax(axis=0), units)
        placed = {
            self.operations[i].name: self.keys[d]
            for members, d in zip(self.units, units.tolist(), strict=True)
            for i in members
        }
        keys = self.problem.on_allowed_devices(place_host_scalars(self.graph, placed))
        return np.array([self.number[keys[operation.name]] for operation in self.operations], dtype=np.int64)

    def named(self, devices: Ints) -> dict[str, DeviceKey]:
        """Return operation -> the caller's key of its device."""
        return {op.name: self.keys[d] for op, d in zip(self.operations, devices.tolist(), strict=True)}

    def assignment(self, devices: Ints, chosen: Ints | None = None) -> Assignment:
        """Return the placement as an assignment for the evaluator."""
        homes: dict[str, DeviceKey] = {}
        if self.unread:
            homes = self._fill(self.read_peaks(devices, chosen), self.homes(devices, chosen))
        homes |= {self.names[v]: self.keys[self.fixed[v]] for v in self.returned_weights}
        if chosen is not None:
            decided = np.flatnonzero((chosen >= 0) & (self.fixed < 0))
            homes |= {self.names[v]: self.keys[chosen[v]] for v in decided if v >= self.values}
        return assign_weights(self.problem, self.named(devices), homes=homes)

    def devices(self, assignment: Assignment) -> Ints:
        """(operations,) devices of an assignment."""
        indices = [self.number[assignment.operations[operation.name]] for operation in self.operations]
        return np.array(indices, dtype=np.int64)
