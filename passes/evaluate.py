"""The judge: see :mod:`graphplan.passes.placement.evaluate`."""

from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.problem import Problem

__all__ = ["Evaluation", "Problem", "evaluate"]
