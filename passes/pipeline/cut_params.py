"""Parameters of the search for cuts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineParams:
    """Limits and tolerances of the search for cuts.

    Attributes:
        cuts: most candidate positions: those that few bytes cross, spread over the work.
        states: most states of the dynamic program; if there are more, classes are filled one by one.
        cells: most states of the dynamic program times stretches: with many classes of machines there are
            fewer candidates.
        limits: number of limits on the slowest stage that are tried.
        tolerance: relative; pipelines whose estimates differ by less count as equal.
        rounds: most searches for cuts whose stages are placed, each with estimates corrected by the last.
        worth: relative; estimates are about a percent off, so pipelines that differ by less count as equal:
            for latency the most even one is taken, and searches end if no other promises to save more.
        refusals: most searches whose stages do not fit, as long as no fitting stages were found.
        growth: factor of each increase of budgets, for the error that names sufficient ones.
        growths: most such increases.
        searches: most of these for which stages are searched, as their budgets seem sufficient.
        bisections: steps of the bound on the slowest stage.
        lack: factor on the estimated bytes of a stage whose share of a machine was too small.
        time_share: part of the caller's remaining time limit for the placement of one stage.
        shares: number of equal parts of a machine's budgets, which are divided among its stages.
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
