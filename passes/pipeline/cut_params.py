"""The numbers that steer the search for cuts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineParams:
    """How far the search for cuts goes.

    Attributes:
        cuts: candidate positions, at most; those that few bytes cross, spread over the work.
        states: of the dynamic program; where there are more, machines are used in the order given.
        cells: states of the dynamic program times stretches, at most: with many classes of machines there are
            fewer candidates.
        limits: limits on the slowest stage that are tried.
        tolerance: relative; pipelines whose estimates differ by less are not told apart.
        rounds: times that cuts are searched with what placements have shown.
        worth: relative; pipelines that differ by less are alike to estimates, which are a percent or so off:
            for latency the evenest is taken, and placements end where no other promises more.
        refusals: likewise of a training step, as long as no stages were found that fit.
        growth: by which budgets grow in turn, for the error that names some that would do.
        growths: times that they grow, at most.
        searches: of these, that seem enough and are searched for stages, at most.
        bisections: of the bound on the slowest stage.
        lack: by which the bytes grow that a stage is estimated to need, where its share was too little.
        time_share: part of what is left of a caller's time limit that the placement of one stage gets.
        shares: parts of the budgets of a machine, which are divided among its stages.
    """

    cuts: int = 400
    states: int = 5_000
    cells: int = 60_000_000
    limits: int = 24
    tolerance: float = 1e-4
    rounds: int = 5
    worth: float = 0.005
    refusals: int = 20
    growth: float = 1.2
    growths: int = 40
    searches: int = 8
    bisections: int = 40
    lack: float = 1.05
    time_share: float = 0.125
    shares: int = 256


PARAMS = PipelineParams()
