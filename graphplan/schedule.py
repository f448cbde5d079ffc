"""The schedule: a placed graph as a list of moves and runs, with nothing implicit.

A schedule is what the lowered module does, step for step, so bytes and seconds are read off it and
off nothing else. Before and after, for two operations on two devices::

    a = linear(x, w)            move x: cpu -> 0
    b = relu(a)                 run a on 0
                                move a: 0 -> 1
                                run b on 1
                                move b: 1 -> cpu      (output)

An *instance* is a value on a device. A value reaches a device at most once, and is dropped there
after its last reader. Devices are keys, as in ``max_memory``; the caller's own device, from which
inputs come and to which outputs return, is ``host``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from graphplan.device import DeviceKey

__all__ = ["Assignment", "Move", "MoveKind", "Run", "Schedule", "Step"]

MoveKind = Literal["activation", "weight", "input", "output", "writeback"]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where each operation runs and each weight lives: what a solver proposes.

    Attributes:
        operations: operation name -> device key.
        weights: weight name -> device key.
    """

    operations: Mapping[str, DeviceKey]
    weights: Mapping[str, DeviceKey]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one value or weight, ``nbytes`` of it, to another device.

    A ``"writeback"`` copies an input that the call has changed into the caller's own tensor.
    """

    value: str
    source: DeviceKey
    destination: DeviceKey
    nbytes: int
    kind: MoveKind


@dataclass(frozen=True, slots=True)
class Run:
    """Run one operation on a device."""

    operation: str
    device: DeviceKey


Step = Move | Run


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of one call.

    Attributes:
        steps: in execution order.
        assignment: the placement that they carry out.
        host: the key (or device name) of the caller's own device.
        returns_to_host: whether outputs are moved back to ``host``.
    """

    steps: tuple[Step, ...]
    assignment: Assignment
    host: DeviceKey
    returns_to_host: bool = True

    def moves(self, *kinds: MoveKind) -> Iterator[Move]:
        """The moves of these kinds, or all, in order."""
        for step in self.steps:
            if isinstance(step, Move) and (not kinds or step.kind in kinds):
                yield step

    def runs(self) -> Iterator[Run]:
        """The runs, in order."""
        for step in self.steps:
            if isinstance(step, Run):
                yield step

    def __str__(self) -> str:
        lines = []
        for step in self.steps:
            if isinstance(step, Run):
                lines.append(f"run {step.operation} on {step.device}")
            else:
                route = f"{step.source} -> {step.destination}"
                lines.append(f"move {step.value}: {route}, {step.nbytes} bytes ({step.kind})")
        return "\n".join(lines)
