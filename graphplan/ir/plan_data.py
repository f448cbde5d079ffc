"""The plan as data: where everything is, what moves, what it costs, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Self

import torch

from graphplan.devices.topology import DeviceKey, Topology
from graphplan.errors import PlanError, VerificationError
from graphplan.ir.constraints import Constraints, did_you_mean, operations_named
from graphplan.ir.cost_model import optimizer_seconds
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.liveness import Memory, Peak, measure_memory
from graphplan.ir.module_map import module_map
from graphplan.ir.remarks import Remarks
from graphplan.ir.schedule import Load, Move, Schedule
from graphplan.ir.schedule_checks import check_schedule
from graphplan.ir.timeline import Timeline, call_seconds, make_timeline
from graphplan.message_text import size_text
from graphplan.warnings import warn

Transfer = Move


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of consecutive operations on one device.

    Attributes:
        index: position among the stages of the forward pass.
        device: key of ``max_memory``.
        operations: names, in order.
    """

    index: int
    device: DeviceKey
    operations: tuple[str, ...]


@dataclass(frozen=True)
class PlanData:
    """A placement of one forward pass, in bytes, seconds and the caller's keys of ``max_memory``.

    Attributes:
        graph: the operations, values and weights that were placed.
        topology: the devices, their budgets and the links between them.
        schedule: every transfer and every operation of one forward pass, in order.
        makespan: estimated seconds of one forward pass.
        lower_bound: seconds below which no placement within the budgets can go; where the accelerators hold
            the model, of those that offload nothing (``proof`` says "without offload"), or of those that
            compute on them alone, with weights streamed or not ("on the accelerators").
        proof: what proved the bound.
        method: how the model was captured.
        constraints: what the caller asked for.
        fixed_weights: weight -> where an earlier plan of the same model, or constant of it, has put it.
        call_weight: the weight of this forward pass among those that were planned together.
        others: the plans of the other example inputs, where several share one placement of weights.
        shared_prefetch_bytes: device -> bytes of the prefetch buffer of other plans of the same model.
        prefetch_limits: device -> bytes that its prefetch buffer may have, where earlier plans limit them.
        streaming: False where weights are copied one by one, for autograd.
    """

    graph: Graph
    topology: Topology
    schedule: Schedule
    makespan: float
    lower_bound: float
    proof: str
    method: str = "export"
    constraints: Constraints = field(default_factory=Constraints)
    fixed_weights: Mapping[str, DeviceKey] = field(default_factory=dict)
    call_weight: float = 1.0
    others: tuple[Self, ...] = ()
    shared_prefetch_bytes: Mapping[DeviceKey, int] = field(default_factory=dict)
    prefetch_limits: Mapping[DeviceKey, int] = field(default_factory=dict)
    streaming: bool = True

    def __getstate__(self) -> dict[str, Any]:
        # without what is cached: torch devices are no names where they are not
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def placement(self) -> dict[str, DeviceKey]:
        """Every parameter's and buffer's name -> the key of the device where it resides."""
        home = self.schedule.assignment.weights
        return {
            name: home[weight.name]
            for weight in self.graph.weights.values()
            if weight.kind in ("parameter", "buffer")
            for name in weight.names or (weight.name,)
        }

    @cached_property
    def parts(self) -> dict[str, DeviceKey]:
        """Every part of a sliced weight (``"lm_head.weight[0:4096]"``) -> where it is read from.

        The weight itself is whole where :attr:`placement` has it; a part on an accelerator is a copy.
        """
        return {part.name: self.schedule.assignment.weights[part.name] for part in self.graph.parts}

    @cached_property
    def devices(self) -> dict[DeviceKey, torch.device]:
        """Each key -> its torch device."""
        return {spec.key: spec.torch_device for spec in self.topology.devices}

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The runs of operations between which the device changes; what runs on the host only is in none."""
        runs = [run for run in self.schedule.runs() if not self.graph.operations[run.operation].host_only]
        grouped = groupby(runs, key=lambda run: run.device)
        return tuple(
            Stage(index, device, tuple(run.operation for run in members))
            for index, (device, members) in enumerate(grouped)
        )

    def device_of(self, name: str) -> DeviceKey:
        """The device of a parameter or buffer (where it resides), operation or module (where it runs).

        Raises:
            PlanError: no such name, or a module that runs on several devices.
        """
        if name in self.placement:
            return self.placement[name]
        found = list(dict.fromkeys(stage.device for stage in self._stages_of(name)))
        if len(found) > 1:
            listed = ", ".join(map(repr, found))
            raise PlanError(f"{name!r} runs on several devices ({listed}): ask for a part of it")
        return found[0]

    def stage_of(self, name: str) -> Stage:
        """The first stage that runs an operation, a module, or an operation that reads a weight.

        Raises:
            PlanError: no such name, or nothing of it runs.
        """
        return next(iter(self._stages_of(name)))

    def _stages_of(self, name: str) -> tuple[Stage, ...]:
        operations = {operation.name for operation in self.operations_of(name)}
        found = tuple(stage for stage in self.stages if operations.intersection(stage.operations))
        if not found:
            hint = did_you_mean(self.graph, name)
            raise PlanError(f"no operation, module or weight named {name!r} runs in this plan{hint}")
        return found

    def operations_of(self, name: str) -> Iterator[Operation]:
        """The operation of this name, or those of a module, or those that read a weight, in order."""
        weight = self.graph.weight_named(name)
        first = "" if weight is None else weight.name
        read = {first, *(part.name for part in self.graph.parts if part.part_of == first)} - {""}
        named = set(operations_named(self.graph, name))
        for operation in self.graph.operations.values():
            if operation.name in named or not read.isdisjoint(operation.inputs):
                yield operation

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Operations that compute something of the forward pass again in the backward pass."""
        return tuple(operation.name for operation in self.graph.operations.values() if operation.repeats)

    @property
    def recompute_seconds(self) -> float:
        """Estimated seconds of what is computed again in the backward pass."""
        again = set(self.recomputed)
        events = self.timeline.events if again else ()
        return sum(event.end - event.start for event in events if event.kind == "run" and event.name in again)

    @cached_property
    def optimizer_seconds(self) -> float:
        """Estimated seconds of the optimizer's step, which follows a training step; not in the makespan."""
        return optimizer_seconds(self.graph, self.topology, self.schedule.assignment.weights)

    @cached_property
    def offloaded_activations(self) -> dict[str, int]:
        """Values that wait in CPU memory for the backward pass -> bytes of each."""
        kept = (operation for operation in self.graph.operations.values() if operation.offloads)
        return {name: self.graph.values[name].copy_bytes for op in kept for name in op.inputs}

    def device_map(self) -> dict[str, DeviceKey]:
        """Module name -> device, as accelerate and transformers read it.

        Modules are named as high up as all of their parameters and buffers share a device. Hooks reach
        modules, not tensors: where this plan has parts of one module on several devices they go where most
        of its bytes are, so that the map may differ from :attr:`placement`. A warning says so where weights
        pass a budget by it; with activations a budget may be passed without.
        """
        entries, gathered, nbytes = module_map(list(self.graph.weights.values()), self.placement)
        for spec in self.topology.devices:
            if gathered and nbytes[spec.key] > spec.room:
                warn(
                    "device_map() keeps modules whole, whose parameters the plan has on several devices: "
                    f"weights on {spec.key!r} take {size_text(nbytes[spec.key])}, and it has "
                    f"{size_text(spec.room)}. Plan with together={gathered}"
                )
        return entries

    # -- what moves -------------------------------------------------------------------------------

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Activations that cross from device to device, once per call each."""
        return tuple(self.schedule.moves("activation"))

    @cached_property
    def streams(self) -> tuple[Transfer | Load, ...]:
        """Copies of weights to where they are used, made at every call.

        A :class:`~graphplan.ir.schedule.Load` copies the weights of one segment, ahead of their use.
        """
        return tuple(self.schedule.weight_copies())

    @property
    def transfer_bytes(self) -> int:
        """Bytes of activations that cross between devices in one call."""
        return sum(move.nbytes for move in self.transfers)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights copied in one call, the gaps between them included."""
        return sum(copy.nbytes for copy in self.streams)

    # -- what it costs ----------------------------------------------------------------------------

    @cached_property
    def timeline(self) -> Timeline:
        """When each operation, move and copy of weights starts and ends, as estimated."""
        return make_timeline(self.graph, self.topology, self.schedule)

    @cached_property
    def memory(self) -> Memory:
        """Peaks, and the live bytes at every step."""
        return measure_memory(self.graph, self.topology, self.schedule, with_profile=True)

    @property
    def peaks(self) -> Mapping[DeviceKey, Peak]:
        """Each device's peak with the operation at which it is reached."""
        return self.memory.peaks

    @cached_property
    def peak_bytes(self) -> dict[DeviceKey, int]:
        """Key -> the most bytes that the device holds during a call, allocator rounding included."""
        return {spec.key: self.peaks[spec.key].nbytes for spec in self.topology.devices}

    @property
    def gap(self) -> float:
        """How far above the lower bound the makespan may be, as a fraction of the makespan."""
        if not self.makespan:
            return 0.0
        return max(0.0, (self.makespan - self.lower_bound) / self.makespan)

    @property
    def calls(self) -> tuple[Self, ...]:
        """The plan of each call that was planned over this placement of weights, this one first."""
        return (self, *self.others)

    @property
    def weighted_makespan(self) -> float:
        """Seconds of all :attr:`calls`, each times its weight: what the placement minimises."""
        return sum(plan.call_weight * plan.makespan for plan in self.calls)

    @property
    def weighted_lower_bound(self) -> float:
        """Weighted seconds below which no placement of all :attr:`calls` can go."""
        return sum(plan.call_weight * plan.lower_bound for plan in self.calls)

    @property
    def activations_known(self) -> bool:
        """False where hooks run what could not be measured: then ``peak_bytes`` counts weights only."""
        return self.graph.shapes_known

    def with_prefetch_buffers(self, sizes: Mapping[DeviceKey, int]) -> Self:
        """The same plan, with prefetch buffers of at least so many bytes: other calls share them."""
        known = {buffer.device: buffer.nbytes for buffer in self.schedule.prefetch_buffers}
        others = tuple(other.with_prefetch_buffers(sizes) for other in self.others)
        larger = {key: nbytes for key, nbytes in sizes.items() if known.get(key, -1) < nbytes}
        if not larger:
            return self if others == self.others else replace(self, others=others)
        return replace(
            self,
            schedule=self.schedule.with_prefetch_buffers(larger, self.topology),
            shared_prefetch_bytes={**self.shared_prefetch_bytes, **larger},
            others=others,
        )

    def remarks(self) -> Remarks:
        """What a page says in words; nothing, where a plan is no more than its data."""
        return Remarks()

    def verify(self) -> None:
        """Prove the plan from its own data; raise VerificationError if it does not hold."""
        self.graph.verify()
        check_schedule(self.graph, self.topology, self.schedule)
        seconds = call_seconds(self.graph, self.topology, self.schedule)
        if not math.isclose(self.makespan, seconds, rel_tol=1e-6, abs_tol=1e-12):
            raise VerificationError(f"the makespan is {self.makespan} s, the schedule takes {seconds} s")
        if self.lower_bound > self.makespan * (1 + 1e-9):
            raise VerificationError(
                f"the lower bound, {self.lower_bound} s, is above the makespan, {self.makespan} s"
            )
        for other in self.others:
            other.verify()
