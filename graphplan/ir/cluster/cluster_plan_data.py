"""The plan of several machines as data: a plan for each, and the values that cross the network.

A microbatch passes the stages in order. In a training step gradients return. A batch is simulated action by
action, in the order of its schedule: :mod:`graphplan.ir.cluster.pipeline_order`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Literal, Self

from graphplan.devices.topology import CPU, DeviceKey, DeviceSpec, Link
from graphplan.errors import GraphplanError, PlanError, VerificationError
from graphplan.ir.cluster.flight import Flight
from graphplan.ir.cluster.machine_stage import AnyPlan, MachineStage, stage_seconds
from graphplan.ir.cluster.pipeline_order import (
    PipelineSchedule,
    StageSeconds,
    TimedAction,
    play,
    rounds_divide,
)
from graphplan.ir.plan_json import decode_plan, encode_plan
from graphplan.versioned_json import Format, decode_fields, encode_fields, fields_but

Objective = Literal["latency", "throughput"]

_FORMAT = Format("graphplan.cluster_plan", 3, "plan of several machines")
_OF_STAGES = fields_but(MachineStage, "plan")


@dataclass(frozen=True)
class ClusterPlanData(Generic[AnyPlan]):
    """A placement over several machines, in bytes and seconds.

    Attributes:
        stages: stages of the machines that are used, in the order in which a microbatch passes them;
            interleaved, all machines have equally many, and take turns.
        machines: number of machines, used or not.
        network: the link between any two machines.
        batch: rows of the example batch; 0 if it was not divided.
        microbatches: number of microbatches of a batch.
        schedule: schedule of the microbatches.
        objective: the seconds of one microbatch (latency) or of a batch (throughput) were minimised.
        lower_bound: on the ``seconds`` of any cuts into contiguous stages.
        proof: the method that proved the bound.
        results_on_all: whether all machines have room for the results.
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
    results_on_all: bool = False

    @cached_property
    def trains(self) -> bool:
        """Whether a batch goes forward and backward."""
        return any(stage.trains for stage in self.stages)

    @cached_property
    def transfer_seconds(self) -> tuple[float, ...]:
        """Seconds of the network after each stage, per microbatch, gradients included; 0 after the last."""
        sent = (sum(self.network.seconds(one.nbytes) for one in stage.sends) for stage in self.stages)
        return tuple(self.flight.crossings * seconds for seconds in sent)

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Seconds that each stage is busy with a microbatch, transfers in and out included."""
        sent = self.transfer_seconds
        return tuple(
            (sent[index - 1] if index else 0.0) + stage.plan.makespan + sent[index]
            for index, stage in enumerate(self.stages)
        )

    @property
    def latency(self) -> float:
        """Estimated seconds of one microbatch, from the first stage to the last."""
        return sum(stage.plan.makespan for stage in self.stages) + sum(self.transfer_seconds)

    @cached_property
    def flight(self) -> Flight:
        """The microbatches and their schedule."""
        each = len(self.stages) // self.machines if self.schedule == "interleaved" else 1
        return Flight(
            self.microbatches,
            self.schedule,
            grad=self.trains,
            train=self.trains,
            machines=self.machines,
            stages_per_machine=max(1, each),
            results_on_all=self.results_on_all,
        )

    @cached_property
    def stage_seconds(self) -> tuple[StageSeconds, ...]:
        """Estimated seconds of a microbatch in each stage, forward and backward."""
        crossings = self.flight.crossings
        return tuple(
            stage_seconds(stage.plan, sent / crossings, trains=self.trains)
            for stage, sent in zip(self.stages, self.transfer_seconds, strict=True)
        )

    @cached_property
    def timed_actions(self) -> tuple[TimedAction, ...]:
        """The estimated times at which machines run their stages in a batch."""
        return tuple(play(self.flight.order(len(self.stages)), self.stage_seconds))

    @cached_property
    def forward_actions(self) -> tuple[TimedAction, ...]:
        """The estimated times of a batch that only runs forward."""
        forward = [replace(one, backward=None) for one in self.stage_seconds]
        return tuple(play(self.flight.order(len(forward)), forward))

    @property
    def makespan(self) -> float:
        """Estimated seconds of a batch."""
        return max(one.end for one in self.timed_actions)

    @property
    def seconds(self) -> float:
        """The objective value: the estimated seconds of one microbatch, or of a batch."""
        return self.latency if self.objective == "latency" else self.makespan

    @property
    def used(self) -> list[int]:
        """The machines that have stages, in the order in which a microbatch passes them first."""
        return list(dict.fromkeys(stage.machine for stage in self.stages))

    @property
    def shares(self) -> dict[int, tuple[float, float, float]]:
        """Machine -> the shares of a batch in which it computes, in which it transfers, in which it waits."""
        shares, each = {}, self.makespan / self.microbatches or 1.0
        for machine in self.used:
            own = [index for index, stage in enumerate(self.stages) if stage.machine == machine]
            computes = sum(self.stages[index].plan.makespan for index in own) / each
            busy = sum(self.loads[index] for index in own) / each
            shares[machine] = computes, busy - computes, round(1.0 - busy, 9) + 0.0  # not -0.0
        return shares

    @property
    def bubble(self) -> float:
        """The share of the machines' time in a batch in which they wait for microbatches."""
        return sum(waits for _, _, waits in self.shares.values()) / len(self.used)

    @property
    def gap(self) -> float:
        """How far ``seconds`` may be above the least possible, as a fraction of ``seconds``."""
        return (self.seconds - self.lower_bound) / self.seconds if self.seconds else 0.0

    @property
    def network_bytes(self) -> int:
        """Bytes that cross the network per microbatch."""
        return sum(one.nbytes for stage in self.stages for one in stage.sends)

    @cached_property
    def placement(self) -> dict[str, tuple[tuple[int, DeviceKey], ...]]:
        """Name of each parameter and buffer -> its machines and devices; several if stages share it."""
        places: dict[str, tuple[tuple[int, DeviceKey], ...]] = {}
        for stage in self.stages:
            for name, key in stage.plan.placement.items():
                places[name] = (*places.get(name, ()), (stage.machine, key))
        return places

    @property
    def peak_bytes(self) -> dict[int, dict[DeviceKey, int]]:
        """Machine -> device -> the most bytes that it holds.

        Network buffers are included, and in a training step the values saved by microbatches in flight.
        Several stages of a machine count as if all were at their peaks at once.
        """
        return {
            machine: {
                spec.key: sum(stage.held_bytes(spec) for stage in self.stages_of(machine))
                for spec in self.stages_of(machine)[0].plan.topology.devices
            }
            for machine in self.used
        }

    def stages_of(self, machine: int) -> tuple[MachineStage[AnyPlan], ...]:
        """Return the stages of a machine; none if it is not used."""
        return tuple(stage for stage in self.stages if stage.machine == machine)

    def verify(self) -> None:
        """Prove the plan from its own data; raise VerificationError if it does not hold."""
        self._verify_machines()
        if self.microbatches < 1 or self.batch % self.microbatches:
            raise VerificationError(f"{self.microbatches} microbatches do not divide a batch of {self.batch}")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if before.sends != after.receives or before.end != after.start:
                raise VerificationError(
                    f"machine {after.machine} does not continue where machine {before.machine} ends"
                )
        if self.stages[0].start or self.stages[0].receives or self.stages[-1].sends:
            raise VerificationError("the first stage receives something, or the last one sends something")
        for index, stage in enumerate(self.stages):
            stage.plan.verify()
            self._verify_buffers(stage)
            self._verify_in_flight(stage, after=len(self.stages) - 1 - index)
        for machine in self.used:
            self._verify_shares(self.stages_of(machine))
        if self.lower_bound > self.seconds * (1 + 1e-9):
            raise VerificationError(
                f"the lower bound, {self.lower_bound} s, is above the {self.objective}, {self.seconds} s"
            )

    def _verify_machines(self) -> None:
        """Raise unless stages are on known machines: one on each that is used; interleaved, all in turn."""
        used = [stage.machine for stage in self.stages]
        valid = bool(used) and len(set(used)) == len(used) and all(0 <= one < self.machines for one in used)
        if self.schedule == "interleaved":
            turns, rest = divmod(len(used), max(1, self.machines))
            valid = turns > 1 and not rest and used == list(range(self.machines)) * turns
            valid = valid and rounds_divide(self.machines, self.microbatches)
        if not valid:
            raise VerificationError(f"stages are on the machines {used}, of {self.machines}")

    def _verify_shares(self, stages: tuple[MachineStage[AnyPlan], ...]) -> None:
        """Raise unless the stages of a machine together keep its budgets."""
        for spec in stages[0].plan.topology.devices:
            room, held = _room(stages[0], spec), sum(stage.held_bytes(spec) for stage in stages)
            if held > room and len(stages) > 1:
                raise VerificationError(
                    f"the stages of machine {stages[0].machine} hold {held} bytes on device {spec.key!r}, "
                    f"which has {room}"
                )

    def _verify_buffers(self, stage: MachineStage[AnyPlan]) -> None:
        needed = self.microbatches * sum(one.nbytes for one in (*stage.receives, *stage.sends))
        if stage.buffer_bytes < needed:
            raise VerificationError(
                f"machine {stage.machine} has {stage.buffer_bytes} bytes for receiving and sending, "
                f"which takes {needed}"
            )
        for spec in stage.plan.topology.devices:
            if spec.device == CPU and spec.taken < stage.buffer_bytes:
                raise VerificationError(f"machine {stage.machine} leaves no room for its network buffers")

    def _verify_in_flight(self, stage: MachineStage[AnyPlan], after: int) -> None:
        planned, most = stage.plan.graph.in_flight, self.flight.most_in_flight(after)
        if stage.trains and planned < most:
            raise VerificationError(
                f"machine {stage.machine} has room for {planned} microbatches in flight, and {self.schedule} "
                f"has {most}"
            )

    def to_json(self) -> str:
        """Return the plan as JSON text; :meth:`from_json` reads it back."""
        figures = encode_fields(self, fields_but(ClusterPlanData, "stages"))
        stages = [
            {**encode_fields(stage, _OF_STAGES), "plan": encode_plan(stage.plan)} for stage in self.stages
        ]
        return json.dumps({**_FORMAT.head(), **figures, "stages": stages}, indent=1)

    @classmethod
    def _read(cls, kind: type[AnyPlan], text: str) -> Self:
        """Return the plan that :meth:`to_json` wrote, with machines' plans of class ``kind``.

        Raises:
            PlanError: the text is not such a plan, or its checks fail.
        """
        data = _FORMAT.parse(text)
        try:
            plans = [decode_plan(kind, one["plan"]) for one in data["stages"]]
            others = [decode_fields(MachineStage, _OF_STAGES, one) for one in data["stages"]]
            stages = tuple(MachineStage(plan=plan, **own) for plan, own in zip(plans, others, strict=True))
            cluster_plan = cls(stages, **decode_fields(cls, fields_but(ClusterPlanData, "stages"), data))
            cluster_plan.verify()
        except (KeyError, TypeError, ValueError, AttributeError, GraphplanError) as error:
            raise PlanError(f"this plan is damaged: {type(error).__name__}: {error}") from error
        return cluster_plan


def _room(stage: MachineStage[Any], spec: DeviceSpec) -> int:
    """Return the bytes of a device that a machine's stages may use together, whatever each plan withholds."""
    for_stages = stage.buffer_bytes if spec.device == CPU else 0
    for_stages += stage.beside_bytes.get(spec.key, 0)
    return spec.memory - spec.withheld + for_stages
