"""The plan as data: the device of everything, transfers, memory, time, and how close to optimal it is."""

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
    """Consecutive operations on one device.

    Attributes:
        index: position among the stages of the forward pass.
        device: key of ``max_memory``.
        operations: their names, in order.
    """

    index: int
    device: DeviceKey
    operations: tuple[str, ...]


@dataclass(frozen=True)
class PlanData:
    """A placement of one forward pass or training step, in bytes, seconds and the caller's device keys.

    Attributes:
        graph: the operations, values and weights that were placed.
        topology: the devices, their budgets and the links between them.
        schedule: every transfer and every operation of one forward pass, in order.
        makespan: estimated seconds of one forward pass.
        lower_bound: seconds that no placement within the budgets is faster than. If the accelerators hold the
            model, it holds only for placements that offload nothing (``proof`` says "without offload"), or
            that compute on them alone, with weights streamed or not ("on the accelerators").
        proof: the method that proved the bound.
        method: how the model was captured.
        constraints: the caller's constraints.
        fixed_weights: weight or constant -> device on which an earlier plan of the same model has put it.
        call_weight: the weight of this forward pass among those that were planned together.
        others: the plans of the other example inputs, if several share one placement of weights.
        shared_prefetch_bytes: device -> bytes of the prefetch buffer of other plans of the same model.
        prefetch_limits: device -> most bytes of its prefetch buffer, if earlier plans limit it.
        streaming: False if weights are copied one by one, for autograd.
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
        # without cached properties: torch devices may not exist where the plan is unpickled
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def placement(self) -> dict[str, DeviceKey]:
        """Name of each parameter and buffer -> key of the device where it resides."""
        home = self.schedule.assignment.weights
        return {
            name: home[weight.name]
            for weight in self.graph.weights.values()
            if weight.kind in ("parameter", "buffer")
            for name in weight.names or (weight.name,)
        }

    @cached_property
    def parts(self) -> dict[str, DeviceKey]:
        """Each part of a sliced weight (``"lm_head.weight[0:4096]"``) -> device from which it is read.

        The whole weight resides where :attr:`placement` says; a part on an accelerator is a copy.
        """
        return {part.name: self.schedule.assignment.weights[part.name] for part in self.graph.parts}

    @cached_property
    def devices(self) -> dict[DeviceKey, torch.device]:
        """Device key -> torch device."""
        return {spec.key: spec.torch_device for spec in self.topology.devices}

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages: runs of operations on one device. Operations that run on the host only are in none."""
        runs = [run for run in self.schedule.runs() if not self.graph.operations[run.operation].host_only]
        grouped = groupby(runs, key=lambda run: run.device)
        return tuple(
            Stage(index, device, tuple(run.operation for run in members))
            for index, (device, members) in enumerate(grouped)
        )

    def device_of(self, name: str) -> DeviceKey:
        """Return the device where a parameter or buffer resides, or where an operation or module runs.

        Raises:
            PlanError: no such name, or a module that runs on several devices.
        """
        if name in self.placement:
            return self.placement[name]
        devices = list(dict.fromkeys(stage.device for stage in self._stages_of(name)))
        if len(devices) > 1:
            listed = ", ".join(map(repr, devices))
            raise PlanError(f"{name!r} runs on several devices ({listed}): ask for a part of it")
        return devices[0]

    def stage_of(self, name: str) -> Stage:
        """Return the first stage that runs an operation, part of a module, or a reader of a weight.

        Raises:
            PlanError: no such name, or nothing of it runs.
        """
        return next(iter(self._stages_of(name)))

    def _stages_of(self, name: str) -> tuple[Stage, ...]:
        operations = {operation.name for operation in self.operations_of(name)}
        stages = tuple(stage for stage in self.stages if operations.intersection(stage.operations))
        if operations and not stages:
            raise PlanError(f"{name!r} computes only numbers, on no device of the plan")
        if not stages:
            hint = did_you_mean(self.graph, name)
            raise PlanError(f"no operation, module or weight named {name!r} runs in this plan{hint}")
        return stages

    def operations_of(self, name: str) -> Iterator[Operation]:
        """Yield the operation of this name, those of a module, or the readers of a weight, in order."""
        weight = self.graph.weight_named(name)
        first = "" if weight is None else weight.name
        names = {first, *(part.name for part in self.graph.parts if part.part_of == first)} - {""}
        named = set(operations_named(self.graph, name))
        for operation in self.graph.operations.values():
            if operation.name in named or not names.isdisjoint(operation.inputs):
                yield operation

    @cached_property
    def recomputed(self) -> tuple[str, ...]:
        """Operations of the backward pass that recompute one of the forward pass."""
        return tuple(operation.name for operation in self.graph.operations.values() if operation.repeats)

    @property
    def recompute_seconds(self) -> float:
        """Estimated seconds of the recomputation in the backward pass."""
        again = set(self.recomputed)
        events = self.timeline.events if again else ()
        return sum(event.end - event.start for event in events if event.kind == "run" and event.name in again)

    @cached_property
    def optimizer_seconds(self) -> float:
        """Estimated seconds of the optimizer's step, which follows a training step; not in the makespan."""
        return optimizer_seconds(self.graph, self.topology, self.schedule.assignment.weights)

    @cached_property
    def offloaded_activations(self) -> dict[str, int]:
        """Value that waits in CPU memory for the backward pass -> its bytes."""
        graph = self.graph
        kept = (operation for operation in graph.operations.values() if graph.saves_on_cpu(operation))
        return {name: graph.values[name].copy_bytes for op in kept for name in op.inputs}

    def device_map(self) -> dict[str, DeviceKey]:
        """Return module name -> device, in the format of accelerate and transformers.

        An entry names the outermost module whose parameters and buffers all share a device. Hooks act on
        modules, not tensors: if the plan has a module's own tensors on several devices, they go where most of
        its bytes are, so the map may differ from :attr:`placement`. A warning says if the weights then pass a
        budget; with activations, a budget may be passed without a warning.
        """
        entries, gathered, nbytes = module_map(list(self.graph.weights.values()), self.placement)
        for spec in self.topology.devices:
            if gathered and nbytes[spec.key] > spec.room:
                warn(
                    "device_map() has one device for each module, and the plan has the parameters of some "
                    f"modules on several: weights on {spec.key!r} take {size_text(nbytes[spec.key])}, more "
                    f"than its budget of {size_text(spec.room)}. Plan with together={gathered}"
                )
        return entries

    # -- transfers --------------------------------------------------------------------------------

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Transfers of activations between devices, each once per call."""
        return tuple(self.schedule.moves("activation"))

    @cached_property
    def streams(self) -> tuple[Transfer | Load, ...]:
        """Copies of weights to where they are used, at every call.

        A :class:`~graphplan.ir.schedule.Load` prefetches the weights of one segment.
        """
        return tuple(self.schedule.weight_copies())

    @property
    def transfer_bytes(self) -> int:
        """Bytes of activations that are transferred between devices in one call."""
        return sum(move.nbytes for move in self.transfers)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights streamed in one call, the gaps between them included."""
        return sum(copy.nbytes for copy in self.streams)

    # -- time and memory --------------------------------------------------------------------------

    @cached_property
    def timeline(self) -> Timeline:
        """The estimated start and end of each operation, transfer and copy of weights."""
        return make_timeline(self.graph, self.topology, self.schedule)

    @cached_property
    def memory(self) -> Memory:
        """The peak of each device, and the live bytes at every step."""
        return measure_memory(self.graph, self.topology, self.schedule, with_profile=True)

    @property
    def peaks(self) -> Mapping[DeviceKey, Peak]:
        """Device key -> its peak, with the operation at which it is reached."""
        return self.memory.peaks

    @cached_property
    def peak_bytes(self) -> dict[DeviceKey, int]:
        """Device key -> the most bytes that it holds during a call, allocator rounding included."""
        return {spec.key: self.peaks[spec.key].nbytes for spec in self.topology.devices}

    @property
    def gap(self) -> float:
        """How far the makespan is above the lower bound, as a fraction of the makespan."""
        if not self.makespan:
            return 0.0
        return max(0.0, (self.makespan - self.lower_bound) / self.makespan)

    @property
    def calls(self) -> tuple[Self, ...]:
        """The plans of all calls that share this placement of weights, this one first."""
        return (self, *self.others)

    @property
    def weighted_makespan(self) -> float:
        """Seconds of all :attr:`calls`, each times its weight: the objective of the placement."""
        return sum(plan.call_weight * plan.makespan for plan in self.calls)

    @property
    def weighted_lower_bound(self) -> float:
        """Lower bound on the weighted seconds of any placement of all :attr:`calls`."""
        return sum(plan.call_weight * plan.lower_bound for plan in self.calls)

    @property
    def activations_known(self) -> bool:
        """Whether activations were measured; if not, ``peak_bytes`` counts weights only."""
        return self.graph.shapes_known

    def with_prefetch_buffers(self, sizes: Mapping[DeviceKey, int]) -> Self:
        """Return the same plan with prefetch buffers of at least so many bytes, as other calls share them."""
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
        """Return the remarks of a report page; none for plain plan data."""
        return Remarks()

    def verify(self) -> None:
        """Prove the plan from its own data; raise VerificationError if it does not hold."""
        self.graph.verify()
        check_schedule(self.graph, self.topology, self.schedule)
        seconds = call_seconds(self.graph, self.topology, self.schedule)
        if not math.isclose(self.makespan, seconds, rel_tol=1e-6, abs_tol=1e-12):
            raise VerificationError(f"the makespan is {self.makespan} s, but the schedule takes {seconds} s")
        if self.lower_bound > self.makespan * (1 + 1e-9):
            raise VerificationError(
                f"the lower bound, {self.lower_bound} s, is above the makespan, {self.makespan} s"
            )
        for other in self.others:
            other.verify()
