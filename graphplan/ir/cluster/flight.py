"""The microbatches in flight in a pipeline, by schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graphplan.ir.cluster.interleaved_order import most_in_flight

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]


@dataclass(frozen=True, slots=True)
class Flight:
    """The number of microbatches, their schedule, and the memory that those in flight hold.

    Attributes:
        microbatches: number of microbatches in a batch.
        schedule: ``"gpipe"``: all run forward before one runs backward; ``"1f1b"``: a stage has as many
            in flight as there are stages from it to the last; ``"interleaved"``: as in
            :mod:`graphplan.ir.cluster.interleaved_order`.
        grad: whether activations are kept for a backward pass.
        train: whether the backward pass is planned too.
        machines: for ``"interleaved"``: number of machines, all of which are used.
        stages_per_machine: for ``"interleaved"``.
    """

    microbatches: int = 1
    schedule: PipelineSchedule = "gpipe"
    grad: bool = False
    train: bool = False
    machines: int = 1
    stages_per_machine: int = 1

    def kept(self, after: int) -> int:
        """Return how many microbatches' activations a stage keeps at once, if ``after`` stages follow it."""
        return self.most_in_flight(after) if self.grad else 0

    def most_in_flight(self, after: int) -> int:
        """Return the most microbatches that a stage has run forward, but not yet backward."""
        if self.schedule == "interleaved":
            return most_in_flight(self.machines, self.stages_per_machine, self.microbatches)[-1 - after]
        return min(self.microbatches, after + 1) if self.schedule == "1f1b" else self.microbatches

    @property
    def crossings(self) -> int:
        """How often a tensor crosses a cut: as activation, and in training as gradient."""
        return 2 if self.train else 1
