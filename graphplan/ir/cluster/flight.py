"""The microbatches in flight in a pipeline, by schedule."""

from __future__ import annotations

from dataclasses import dataclass

from graphplan.ir.cluster.pipeline_order import Order, PipelineSchedule, most_in_flight, pipeline_order


@dataclass(frozen=True, slots=True)
class Flight:
    """The number of microbatches, their schedule, and the memory that those in flight hold.

    Attributes:
        microbatches: number of microbatches in a batch.
        schedule: ``"gpipe"``: all run forward before one runs backward; ``"1f1b"``: a stage has as many
            in flight as there are stages from it to the last; ``"interleaved"``: as in
            :mod:`graphplan.ir.cluster.pipeline_order`.
        grad: whether activations are kept for a backward pass.
        train: whether the backward pass is planned too.
        machines: number of machines; ``"interleaved"`` uses all of them.
        stages_per_machine: for ``"interleaved"``.
        results_on_all: whether all machines get the results.
    """

    microbatches: int = 1
    schedule: PipelineSchedule = "gpipe"
    grad: bool = False
    train: bool = False
    machines: int = 1
    stages_per_machine: int = 1
    results_on_all: bool = False

    def kept_microbatches(self, after: int) -> int:
        """Return how many microbatches' activations a stage keeps at once, if ``after`` stages follow it."""
        return self.most_in_flight(after) if self.grad else 0

    def most_in_flight(self, after: int) -> int:
        """Return the most microbatches that a stage has run forward, but not yet backward."""
        counts = most_in_flight(self.schedule, self.machines, self.stages_per_machine, self.microbatches)
        return counts[-1 - after]

    def order(self, stages: int) -> Order:
        """Return the actions of each machine that has one of so many stages, in order."""
        machines = stages // self.stages_per_machine
        return pipeline_order(self.schedule, machines, self.stages_per_machine, self.microbatches)

    @property
    def crossings(self) -> int:
        """How often a tensor crosses a cut: as activation, and in training as gradient."""
        return 2 if self.train else 1
