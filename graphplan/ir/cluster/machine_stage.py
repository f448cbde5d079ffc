"""The placed stage of a machine: consecutive operations of a model that runs on several machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from graphplan.devices.topology import CPU, DeviceKey, DeviceSpec
from graphplan.ir.cluster.pipeline_order import StageSeconds
from graphplan.ir.liveness import saved_bytes
from graphplan.ir.plan_data import PlanData

AnyPlan = TypeVar("AnyPlan", bound=PlanData)
Bytes = Mapping[DeviceKey, int]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor that is sent from one machine to the next, once per microbatch.

    Attributes:
        name: name of the value.
        nbytes: bytes of its elements.
        shape: for one microbatch.
        dtype: ``"float32"``, ``"int64"``, ...
    """

    name: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class MachineStage(Generic[AnyPlan]):
    """A stage: the operations of one machine, or some of them if machines have several stages.

    Attributes:
        machine: its index in ``machines``, which is its rank under torchrun.
        start: position of its first operation in the order of the trace.
        end: position after its last.
        receives: tensors from the stage before.
        sends: tensors to the stage after.
        buffer_bytes: network buffers of all microbatches, for receiving and sending: in host memory,
            where the plan withholds them if the CPU has a budget.
        plan: plan of one microbatch on this machine, with the keys of its own ``max_memory``; its peaks count
            the other microbatches in flight.
        beside_bytes: device -> bytes that the plan withholds for the machine's other stages.
    """

    machine: int
    start: int
    end: int
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]
    buffer_bytes: int
    plan: AnyPlan
    beside_bytes: Bytes = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether it runs a backward pass."""
        return self.plan.graph.trains

    @property
    def kept_bytes(self) -> dict[DeviceKey, int]:
        """In a training step, device -> bytes that the other microbatches in flight have saved."""
        others = self.plan.graph.in_flight - 1
        saved = saved_bytes(self.plan.graph, self.plan.topology, self.plan.schedule) if others else {}
        return {key: others * nbytes for key, nbytes in saved.items() if nbytes}

    def held_bytes(self, spec: DeviceSpec) -> int:
        """Return the most bytes that the stage holds on a device of its machine."""
        buffers = self.buffer_bytes if spec.device == CPU else 0
        return self.plan.peak_bytes[spec.key] + buffers


def stage_seconds(plan: PlanData, transfer: float, *, trains: bool) -> StageSeconds:
    """Return the seconds of a microbatch in a stage, as its plan estimates them.

    Args:
        plan: plan of the stage.
        transfer: seconds of the transfer to the stage after.
        trains: whether the batch runs backward too, even if this stage does not.
    """
    whole, operations = plan.makespan, plan.graph.operations
    if not trains:
        return StageSeconds(whole, None, transfer)
    if not plan.graph.trains:
        return StageSeconds(whole, 0.0, transfer)
    runs = (event for event in plan.timeline.events if event.kind == "run")
    forward = next(event.start for event in runs if operations[event.name].backward)
    return StageSeconds(forward, whole - forward, transfer)
