"""Bytes on each device at each step of a schedule: the only place where memory is counted.

At a step, a device holds the weights that reside there, in one allocation, and the prefetch buffer of
streamed weights, both for the whole call; every storage whose last reader has not run yet; and the workspace
of the running operation. A view shares its base's storage and adds none. The caller's inputs stay on the
caller's device throughout. In training, a weight's gradient and optimizer state are there as long as the
weight; the optimizer's update comes after all steps of the schedule. Weights on disk use the system's page
cache and none of the CPU's budget, except for the buffers through which they pass to an accelerator. A part
of a sliced weight takes bytes where the whole resides, and again where a copy of it resides. In a pipeline,
other microbatches in flight hold the values that their forward passes have saved, at each step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import storage_of
from graphplan.devices.topology import CPU, DISK, DeviceKey, DeviceSpec, Topology, round_up
from graphplan.errors import VerificationError
from graphplan.ir.graph import Graph
from graphplan.ir.schedule import STAGED_BYTES, Move, Run, Schedule, Step, Wait, read_in_place
from graphplan.message_text import lines_around


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a device holds, and when.

    Attributes:
        nbytes: weights, activations, copies and workspace, allocator rounding included.
        weights: bytes of resident weights and of the prefetch buffer among them.
        step: index of the schedule's step at which the peak is reached, or -1 before the first.
        operation: the operation that runs or waits for its input at that step.
    """

    nbytes: int
    weights: int
    step: int
    operation: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The peak of each device, and the live bytes during each step if they were asked for.

    ``profile[key][i]`` is the most bytes on ``key`` during step ``i``; empty unless asked for.
    """

    peaks: Mapping[DeviceKey, Peak]
    profile: Mapping[DeviceKey, tuple[int, ...]]


OPTIMIZER = "optimizer"  # the operation of a peak during the optimizer's update
OUTPUT = "output"  # the operation of a peak while the results return to the caller
_TOGETHER = ("cuda", "xpu")  # device types on which optimizers update all parameters at once
_LASTING = 0  # the number of all storages that last for the whole call, which are counted apart


def measure_memory(
    graph: Graph, topology: Topology, schedule: Schedule, *, with_profile: bool = False
) -> Memory:
    """Return the peak of each device, and with ``with_profile`` the live bytes during each step.

    Raises:
        VerificationError: a step reads a value that is not on its device.
    """
    return _Sweep(graph, topology, schedule).memory(with_profile=with_profile)


def saved_bytes(graph: Graph, topology: Topology, schedule: Schedule) -> dict[DeviceKey, int]:
    """Return device -> bytes that the forward pass of a training step leaves for its backward pass.

    Weights, the caller's inputs and results that wait for the caller do not count.
    """
    return _Sweep(graph, topology, schedule).saved()


class _Sweep:
    def __init__(self, graph: Graph, topology: Topology, schedule: Schedule) -> None:
        self.graph, self.schedule = graph, schedule
        self.in_place = list(read_in_place(topology, schedule.assignment))
        self.specs = {spec.key: spec for spec in topology.devices}
        if schedule.host not in self.specs:
            self.specs[schedule.host] = DeviceSpec(
                schedule.host, CPU, 0, flops=1.0, bandwidth=1.0, overhead=0.0
            )
        # device -> name -> number of the storage: objects would keep the garbage collector busy
        self.storage: dict[DeviceKey, dict[str, int]] = defaultdict(dict)
        self.device: list[DeviceKey] = [schedule.host]
        self.nbytes = [0]
        self.born = [-1]
        self.last_use = [-1]
        self.home: dict[str, DeviceKey] = {}
        specs = self.specs
        self.allocated = cache(lambda device, nbytes: specs[device].allocated(nbytes))
        self.resident = self._place_weights()
        self.caller = self._place_inputs()
        self._follow()

    def saved(self) -> dict[DeviceKey, int]:
        """Return device -> bytes of storages that are made in the forward pass and read after it."""
        operations, host = self.graph.operations, self.schedule.host
        forward = [
            index
            for index, step in enumerate(self.schedule.steps)
            if isinstance(step, Run) and not operations[step.operation].backward
        ]
        last = max(forward, default=-1)
        steps = self.schedule.steps
        returns = {i for i, step in enumerate(steps) if isinstance(step, Move) and step.kind == "output"}
        returned = {self.storage[host].get(name) for name in self.graph.outputs}
        saved: dict[DeviceKey, int] = defaultdict(int)
        for number, device in enumerate(self.device):
            is_freed = self.last_use[number] in returns or number in returned
            if self.born[number] <= last < self.last_use[number] and not is_freed:
                saved[device] += self.nbytes[number]
        return dict(saved)

    def _follow(self) -> None:
        for index, step in enumerate(self.schedule.steps):
            if isinstance(step, Move):
                self._move(index, step)
            elif isinstance(step, Run):
                self._operate(index, step)
            elif isinstance(step, Wait):
                self._arrive(step)
        self._hold_outputs()

    def _place_weights(self) -> dict[DeviceKey, int]:
        sizes: dict[DeviceKey, list[int]] = defaultdict(list)
        arenas: dict[DeviceKey, int] = defaultdict(int)
        homes, storage = self.schedule.assignment.weights, self.storage
        for name, weight in self.graph.weights.items():
            key = homes[name]
            whole_key = homes.get(weight.part_of, key)
            is_apart = weight.kind in ("constant", "cache")
            if is_apart or whole_key != key:
                sizes[key].append(weight.nbytes)  # an allocation of its own
            if not is_apart:
                arenas[whole_key] += round_up(weight.nbytes)
            if weight.beside:
                sizes[key] += weight.beside
            # a weight outlives the call, so its storage is counted once, here, and never freed
            storage[key][name] = _LASTING
        self.home.update(homes)
        for name, key in self.in_place:
            storage[key][name] = _LASTING
        for spec in self.specs.values():
            if spec.type == CPU:
                sizes[spec.key] += self._disk_buffers()
        for key, nbytes in arenas.items():
            sizes[key].append(nbytes)
        for buffer in self.schedule.prefetch_buffers:
            sizes[buffer.device].append(buffer.nbytes)
        return {key: self.specs[key].resident(listed) for key, listed in sizes.items()}

    def _disk_buffers(self) -> list[int]:
        """Return the bytes of the two host buffers through which a prefetch buffer's weights on disk pass."""
        largest: dict[DeviceKey, int] = {}
        for load in self.schedule.loads():
            if load.source == DISK:
                largest[load.device] = max(load.nbytes, largest.get(load.device, 0))
        return [2 * min(nbytes, STAGED_BYTES) for nbytes in largest.values()]

    def _place_inputs(self) -> int:
        host, total = self.schedule.host, 0
        for name in self.graph.inputs:
            self.home[name] = host
            self.storage[host][name] = _LASTING
            total += self.specs[host].allocated(self.graph.values[name].nbytes)
        return total

    def _create(self, index: int, name: str, device: DeviceKey, nbytes: int) -> None:
        self.storage[device][name] = len(self.nbytes)
        self.device.append(device)
        self.nbytes.append(self.allocated(device, nbytes))
        self.born.append(index)
        self.last_use.append(index)

    def _use(self, index: int, name: str, device: DeviceKey) -> None:
        storage = self.storage[device].get(name)
        if storage is None:
            raise VerificationError(
                f"step {index} reads {name!r} on {device!r}, where it is not\n"
                + lines_around(str(self.schedule).splitlines(), index)
            )
        self.last_use[storage] = index  # steps come in order

    def _move(self, index: int, step: Move) -> None:
        self._use(index, step.value, step.source)
        if step.kind == "writeback":
            self._use(index, step.value, step.destination)
            return
        # host memory of gradients is kept for the next training step
        stays = step.kind == "gradient" and self.graph.values[step.value].stays
        kept = stays and self.specs[step.destination].type == CPU
        self._create(0 if kept else index, step.value, step.destination, step.nbytes)

    def _arrive(self, step: Wait) -> None:
        for name in self.schedule.segment(step).weights:
            # its bytes are those of its slot, which lasts for the whole call
            self.storage[step.device][name] = _LASTING

    def _operate(self, index: int, step: Run) -> None:
        operation, device = self.graph.operations[step.operation], step.device
        here, values = self.storage[device], self.graph.values
        for name in self.graph.device_inputs[step.operation]:
            if name in here:
                self.last_use[here[name]] = index
            else:
                self._use(index, name, device)
        if operation.host_only:
            for name in operation.inputs:
                if name not in self.graph.not_tensors:
                    self._use(index, name, self.home[name])
        for name in operation.outputs:
            self.home[name] = device
            value = values[name]
            if value.alias_of in here:
                here[name] = here[value.alias_of]
                self._use(index, name, device)
            else:
                self._create(index, name, device, value.nbytes)

    def _hold_outputs(self) -> None:
        end, host = len(self.schedule.steps), self.schedule.host
        for name in self.graph.outputs:
            moved = self.schedule.returns_to_host and name in self.storage[host]
            if not moved and name not in self.home:
                continue  # a host scalar of a hand-built graph
            self._use(end, name, host if moved else self.home[name])
        homes, values = self.schedule.assignment.weights, self.graph.values
        for name in self.graph.values_kept_after_call:
            self._use(end, name, homes.get(values[name].gradient_of, self.home[name]))

    def memory(self, *, with_profile: bool) -> Memory:
        steps, host, resident, caller = self.schedule.steps, self.schedule.host, self.resident, self.caller
        number_of = {key: number for number, key in enumerate(self.specs)}
        count, width = len(number_of), len(steps) + 2
        owner = np.array([number_of[key] for key in self.device[1:]], dtype=np.int64)  # without _LASTING
        nbytes, born, last = (
            np.array(part[1:], dtype=np.int64) for part in (self.nbytes, self.born, self.last_use)
        )
        change = np.zeros(count * width)  # bincount of an empty array returns integers
        change += np.bincount(owner * width + born, nbytes, count * width)
        change -= np.bincount(owner * width + last + 1, nbytes, count * width)
        lasting = np.array([resident.get(k, 0) + (caller if k == host else 0) for k in number_of])
        live = lasting[:, None] + change.reshape(count, width).cumsum(axis=1)[:, : len(steps)]
        active = np.array([number_of[_device_of(step)] for step in steps], dtype=np.int64)
        at = np.arange(len(steps))
        live[active, at] += self._workspaces()
        if self.graph.in_flight > 1:
            saved = self.saved()
            others = np.array([saved.get(key, 0) for key in number_of])
            live += (self.graph.in_flight - 1) * others[:, None]
        acting = np.zeros(live.shape)  # bytes grow only at a device's own steps, so its peak is at one
        acting[active, at] = live[active, at]
        highest = acting.argmax(axis=1) if steps else np.zeros(count, dtype=np.int64)  # the first of equals
        ending = np.bincount(owner, np.where(last == len(steps), nbytes, 0), count)
        stepping = self._step_bytes()
        peaks: dict[DeviceKey, Peak] = {}
        for key, number in number_of.items():
            step, weights = int(highest[number]), resident.get(key, 0)
            peaks[key] = Peak(int(lasting[number]), weights, -1, "")
            if steps and acting[number, step] > lasting[number]:
                peaks[key] = Peak(int(acting[number, step]), weights, step, self._operation_of(step))
            at_end = int(lasting[number] + ending[number]) + stepping.get(key, 0)
            if at_end > peaks[key].nbytes:
                peaks[key] = Peak(at_end, weights, len(steps), OPTIMIZER)
        if not with_profile:
            return Memory(peaks, {})
        return Memory(peaks, {key: tuple(live[n].astype(int).tolist()) for key, n in number_of.items()})

    def _step_bytes(self) -> dict[DeviceKey, int]:
        """Return device -> bytes that an optimizer's step needs there in addition to its state."""
        largest: dict[DeviceKey, int] = defaultdict(int)
        together: dict[DeviceKey, int] = defaultdict(int)
        for weight in self.graph.weights_with_step_memory:
            home = self.schedule.assignment.weights[weight.name]
            if weight.step_bytes:
                largest[home] = max(largest[home], self.allocated(home, weight.step_bytes))
            if weight.together_bytes and steps_together(self.specs[home]):
                together[home] += self.allocated(home, weight.together_bytes)
        return {key: max(largest[key], together[key]) for key in {*largest, *together}}

    def _workspaces(self) -> list[int]:
        """Return for each step the bytes that the allocator takes for an operation's workspace."""
        needs = {key: self.graph.workspaces(spec.type) for key, spec in self.specs.items()}
        return [
            self.allocated(step.device, nbytes)
            if isinstance(step, Run) and (nbytes := needs[step.device].get(step.operation))
            else 0
            for step in self.schedule.steps
        ]

    def _operation_of(self, index: int) -> str:
        """Return the operation that runs at a step, or the first one after it."""
        following = (step.operation for step in self.schedule.steps[index:] if isinstance(step, Run))
        return next(following, OUTPUT)


def _device_of(step: Step) -> DeviceKey:
    return step.destination if isinstance(step, Move) else step.device


def steps_together(spec: DeviceSpec) -> bool:
    """Whether optimizers update all parameters of a device at once if they can: torch's default on GPUs."""
    return spec.type in _TOGETHER


class LiveStorages:
    """Counts the bytes of storages other than those of ``known``.

    ``alive`` are the bytes that were alive after the last operation, ``peak`` the most after any operation.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self.alive = self.peak = 0
        self._known = {storage_of(tensor) for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(self, results: Iterable[torch.Tensor]) -> None:
        """Count the results of an operation."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in results:
            key, storage = storage_of(tensor), tensor.untyped_storage()
            if key not in self._known and key not in self._live:
                self._live[key] = (StorageWeakRef(storage), round_up(storage.nbytes()))
        self.alive = sum(nbytes for _, nbytes in self._live.values())
        self.peak = max(self.peak, self.alive)


class LiveBytes(TorchDispatchMode):
    """Context manager that counts the storages that operations make, while they live.

    Args:
        known: tensors that exist before.
        counts: whether a result is a tensor to count.

    Attributes:
        live: the count.
        within: name of the higher-order operator, such as ``torch.cond``, that is running.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[torch.Tensor], counts: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.live, self._counts = LiveStorages(filter(counts, known)), counts
        self.within: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.within = func.name() if isinstance(func, HigherOrderOperator) else None
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self.within = None
        self.live.count(filter(self._counts, pytree.tree_leaves(out)))
        return out
