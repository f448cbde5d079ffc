"""The plan of several machines as data: a plan for each, and what crosses the network between them.

One microbatch passes the stages in order. With ``m`` of them a batch takes ``sum of stages + (m - 1) *
slowest stage``, where the slowest counts what it receives and sends. In a training step a stage counts
forward and backward, and gradients cross the network too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Literal, Self, TypeVar

from graphplan.devices.topology import CPU, DeviceKey, Link
from graphplan.errors import GraphplanError, PlanError, VerificationError
from graphplan.ir.liveness import saved_bytes
from graphplan.ir.plan_data import PlanData
from graphplan.ir.plan_json import read_plan, write_plan
from graphplan.versioned_json import Format, decode_fields, encode

PipelineSchedule = Literal["gpipe", "1f1b"]
Objective = Literal["latency", "throughput"]
AnyPlan = TypeVar("AnyPlan", bound=PlanData)
Bytes = Mapping[DeviceKey, int]

_FORMAT = Format("graphplan.cluster_plan", 1, "plan of several machines")
_FIGURES = (
    *("machines", "network", "batch", "microbatches", "schedule", "objective"),
    *("lower_bound", "proof"),
)
_OF_STAGES = ("machine", "start", "end", "receives", "sends", "buffer_bytes", "kept_bytes")


def in_flight(schedule: PipelineSchedule, microbatches: int, after: int) -> int:
    """The most microbatches that a stage has run forward, and not yet backward, if so many stages follow it.

    ``"gpipe"``: all go forward before one goes back; ``"1f1b"``: as many as there are stages from it to the
    last.
    """
    return min(microbatches, after + 1) if schedule == "1f1b" else microbatches


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that is sent from one machine to the next, once per microbatch.

    Attributes:
        name: of the value.
        nbytes: of its elements.
        shape: of one microbatch.
        dtype: ``"float32"``, ``"int64"``, ...
    """

    name: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class MachineStage(Generic[AnyPlan]):
    """What one machine runs.

    Attributes:
        machine: its index in ``machines``, which is its rank under torchrun.
        start: position of its first operation in the order of the trace.
        end: position after its last.
        receives: from the machine before.
        sends: to the machine after.
        buffer_bytes: of what is received and returned, of all microbatches: in host memory, where the plan
            withholds them if the CPU has a budget.
        plan: of one microbatch on this machine, in the keys of its own ``max_memory``.
        kept_bytes: of a training step, device -> what the other microbatches in flight have saved there for
            their backward passes, which the plan withholds; and earlier gradients of weights that other
            stages read, which are kept while those of a batch are summed.
    """

    machine: int
    start: int
    end: int
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]
    buffer_bytes: int
    plan: AnyPlan
    kept_bytes: Bytes = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it runs a backward pass."""
        return any(operation.backward for operation in self.plan.graph.operations.values())


@dataclass(frozen=True)
class ClusterPlanData(Generic[AnyPlan]):
    """A placement over several machines, in bytes and seconds.

    Attributes:
        stages: of the machines that are used, in the order in which a microbatch passes them.
        machines: how many there are, used or not.
        network: the link between any two of them.
        batch: rows of the example batch; 0 where it was not divided.
        microbatches: into which a batch is divided.
        schedule: of the microbatches.
        objective: what was minimised: the seconds of one microbatch, or of a batch.
        lower_bound: seconds of a batch that no other cuts into contiguous stages go below.
        proof: what proved the bound.
    """

    stages: tuple[MachineStage[AnyPlan], ...]
    machines: int
    network: Link
    batch: int
    microbatches: int
    schedule: PipelineSchedule
    objective: Objective
    lower_bound: float
    proof: str

    @cached_property
    def trains(self) -> bool:
        """Whether a batch goes forward and backward."""
        return any(stage.trains for stage in self.stages)

    @cached_property
    def transfer_seconds(self) -> tuple[float, ...]:
        """Seconds of the network after each stage, per microbatch, gradients included; 0 after the last."""
        times = 2 if self.trains else 1
        return tuple(
            times * sum(self.network.seconds(one.nbytes) for one in stage.sends) for stage in self.stages
        )

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Seconds that each stage is busy with a microbatch, with what it receives and sends."""
        sent = self.transfer_seconds
        return tuple(
            (sent[index - 1] if index else 0.0) + stage.plan.makespan + sent[index]
            for index, stage in enumerate(self.stages)
        )

    @property
    def latency(self) -> float:
        """Estimated seconds of one microbatch, from the first stage to the last."""
        return sum(stage.plan.makespan for stage in self.stages) + sum(self.transfer_seconds)

    @property
    def makespan(self) -> float:
        """Estimated seconds of a batch."""
        return self.latency + (self.microbatches - 1) * max(self.loads)

    @property
    def bubble(self) -> float:
        """The share of the machines' time in a batch in which they wait for microbatches."""
        whole = len(self.stages) * self.makespan
        return 1.0 - self.microbatches * sum(self.loads) / whole if whole else 0.0

    @property
    def gap(self) -> float:
        """How far above the lower bound the makespan may be, as a fraction of the makespan."""
        return (self.makespan - self.lower_bound) / self.makespan if self.makespan else 0.0

    @property
    def network_bytes(self) -> int:
        """Bytes that cross the network per microbatch."""
        return sum(one.nbytes for stage in self.stages for one in stage.sends)

    @cached_property
    def placement(self) -> dict[str, tuple[tuple[int, DeviceKey], ...]]:
        """Every parameter's and buffer's name -> machine and device; several where stages share it."""
        found: dict[str, tuple[tuple[int, DeviceKey], ...]] = {}
        for stage in self.stages:
            for name, key in stage.plan.placement.items():
                found[name] = (*found.get(name, ()), (stage.machine, key))
        return found

    @property
    def peak_bytes(self) -> dict[int, dict[DeviceKey, int]]:
        """Machine -> device -> the most bytes that it holds: buffers of the network included, and in a
        training step what all microbatches in flight have saved.
        """
        found = {}
        for stage in self.stages:
            peaks = dict(stage.plan.peak_bytes)
            for spec in stage.plan.topology.devices:
                peaks[spec.key] += stage.kept_bytes.get(spec.key, 0)
                if spec.device == CPU:
                    peaks[spec.key] += stage.buffer_bytes
            found[stage.machine] = peaks
        return found

    def stage_of(self, machine: int) -> MachineStage[AnyPlan] | None:
        """What a machine runs; None if it is not used."""
        return next((stage for stage in self.stages if stage.machine == machine), None)

    def verify(self) -> None:
        """Prove the plan from its own data; raise VerificationError if it does not hold."""
        used = [stage.machine for stage in self.stages]
        if not used or len(set(used)) != len(used) or not all(0 <= one < self.machines for one in used):
            raise VerificationError(f"stages are on the machines {used}, of {self.machines}")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if before.sends != after.receives or before.end != after.start:
                raise VerificationError(
                    f"machine {after.machine} does not begin with what machine {before.machine} ends with"
                )
        if self.stages[0].start or self.stages[0].receives or self.stages[-1].sends:
            raise VerificationError("the first stage receives something, or the last one sends something")
        for index, stage in enumerate(self.stages):
            stage.plan.verify()
            self._verify_buffers(stage)
            self._verify_kept(stage, after=len(self.stages) - 1 - index)
        if self.lower_bound > self.makespan * (1 + 1e-9):
            raise VerificationError(
                f"the lower bound, {self.lower_bound} s, is above the makespan, {self.makespan} s"
            )

    def _verify_buffers(self, stage: MachineStage[AnyPlan]) -> None:
        least = self.microbatches * sum(one.nbytes for one in (*stage.receives, *stage.sends))
        if stage.buffer_bytes < least:
            raise VerificationError(
                f"machine {stage.machine} has {stage.buffer_bytes} bytes for what it receives and sends, "
                f"which takes {least}"
            )
        for spec in stage.plan.topology.devices:
            if spec.device == CPU and spec.taken < stage.buffer_bytes:
                raise VerificationError(f"machine {stage.machine} leaves no room for its network buffers")

    def _verify_kept(self, stage: MachineStage[AnyPlan], after: int) -> None:
        if not stage.trains:
            return
        others = in_flight(self.schedule, self.microbatches, after) - 1
        plan = stage.plan
        for key, nbytes in saved_bytes(plan.graph, plan.topology, plan.schedule).items():
            kept = stage.kept_bytes.get(key, 0)
            if kept < others * nbytes:
                raise VerificationError(
                    f"machine {stage.machine} keeps {kept} bytes on device {key!r} for {others} other "
                    f"microbatches in flight, which save {others * nbytes}"
                )
        for spec in plan.topology.devices:
            if spec.taken < stage.kept_bytes.get(spec.key, 0):
                raise VerificationError(
                    f"machine {stage.machine} leaves no room for other microbatches on device {spec.key!r}"
                )

    def to_json(self) -> str:
        """The plan as JSON text; :meth:`from_json` reads it back."""
        figures = {name: encode(getattr(self, name)) for name in _FIGURES}
        stages = [
            {name: encode(getattr(stage, name)) for name in _OF_STAGES}
            | {"plan": json.loads(write_plan(stage.plan))}
            for stage in self.stages
        ]
        return json.dumps({**_FORMAT.head(), **figures, "stages": stages}, indent=1)

    @classmethod
    def _read(cls, kind: type[AnyPlan], text: str) -> Self:
        """The plan that :meth:`to_json` wrote, with plans of a class for the machines.

        Raises:
            PlanError: the text is no such plan, or one that does not hold.
        """
        data = _FORMAT.parse(text)
        try:
            stages = tuple(_read_stage(kind, one) for one in data["stages"])
            made = cls(stages, **decode_fields(cls, _FIGURES, data))
            made.verify()
        except (KeyError, TypeError, ValueError, AttributeError, GraphplanError) as error:
            raise PlanError(f"this plan is damaged: {type(error).__name__}: {error}") from error
        return made


def _read_stage(kind: type[AnyPlan], data: Mapping[str, Any]) -> MachineStage[AnyPlan]:
    plan = read_plan(kind, json.dumps(data["plan"]))
    return MachineStage(plan=plan, **decode_fields(MachineStage, _OF_STAGES, {"kept_bytes": [], **data}))
