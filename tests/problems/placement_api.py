"""The planner under test by random placements: the only module that imports it."""

from __future__ import annotations

from graphplan.passes.placement.certificate import Bound, Scope, Solution
from graphplan.passes.placement.disk import place_or_map
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.problem import Problem

__all__ = ["Bound", "Evaluation", "Problem", "Scope", "Solution", "evaluate", "place", "place_or_map"]
