"""Microbatches on their way through a pipeline, by schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphplan.ir.cluster.interleaved_order import most_in_flight

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True, slots=True)
class Flight:
    """How many microbatches there are, and what each leaves in memory while others are on their way.

    Attributes:
        microbatches: of one batch.
        schedule: ``"gpipe"``: all go forward before one goes back; ``"1f1b"``: a stage has as many on their
            way as there are stages from it to the last; ``"interleaved"``: as
            :mod:`graphplan.ir.cluster.interleaved_order` says.
        grad: whether activations are kept for a backward pass.
        train: whether that is planned too.
        machines: of ``"interleaved"``, which uses all.
        stages_per_machine: likewise.
    """

    microbatches: int = 1
    schedule: PipelineSchedule = "gpipe"
    grad: bool = False
    train: bool = False
    machines: int = 1
    stages_per_machine: int = 1

    def kept(self, after: int) -> int:
        """Microbatches whose activations a stage keeps at once, if so many stages follow it."""
        return self.most_in_flight(after) if self.grad else 0

    def most_in_flight(self, after: int) -> int:
        """The most microbatches that a stage has run forward, and not yet backward."""
        if self.schedule == "interleaved":
            return most_in_flight(self.machines, self.stages_per_machine, self.microbatches)[-1 - after]
        return min(self.microbatches, after + 1) if self.schedule == "1f1b" else self.microbatches

    @property
    def crossings(self) -> int:
        """Times that something crosses a cut: activations forward, their gradients back."""
        return 2 if self.train else 1
