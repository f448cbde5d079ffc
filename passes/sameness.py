"""What is the same in a knapsack: variables of equal costs, tables that are one, and what follows from them.

Stacks of equal layers have thousands of variables, and a dozen kinds of them. Each kind of table is made
once, what is decided by the same table is looked up at once, and steps that repeat themselves are found.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphplan.passes.repeats import Block, find_repeats

if TYPE_CHECKING:
    from graphplan.passes.knapsack import Knapsack

__all__ = ["LookUp", "Sameness", "alike"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LookUp:
    """Variables that one table decides, by the variables in ``scope``.

    Attributes:
        number: of the table.
        variables: (times,) that are decided.
        scope: (axes, times) on which each depends.
    """

    number: int
    variables: Ints
    scope: Ints


class Sameness:
    """Numbers for what is the same.

    Args:
        knapsack: the structure.
        variables: (variables,) a number for those of the same costs.
        tables: one for each scope, the same for the same table.

    Attributes:
        factor: the number of each factor: of the tables, and of what eliminations make of them.
        eliminations: number -> index of the first elimination of its kind, in order.
        steps: number -> index of the first step of its kind.
        step: the number of each step.
        blocks: the steps, and where they repeat themselves.
        look_ups: what the eliminated variables are, in an order in which that is known.
    """

    def __init__(self, knapsack: Knapsack, variables: Sequence[int], tables: Sequence[int]) -> None:
        known: dict[Hashable, int] = {("table", number): number for number in tables}
        self.factor = list(tables)
        self.eliminations: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.step: list[int] = []
        eliminated: list[int] = []
        base = max(tables, default=-1) + 1
        for index, plan in enumerate(knapsack.eliminations):
            key = (plan.pattern, variables[plan.variable], *(self.factor[f] for f in plan.factors))
            number = known.setdefault(key, base + len(known))
            self.eliminations.setdefault(number, index)
            self.factor.append(number)
            eliminated.append(number)
        for index, step in enumerate(knapsack.steps):
            key = (step.pattern, variables[step.variable], *(self.factor[f] for f in step.factors))
            number = known.setdefault(key, base + len(known))
            self.steps.setdefault(number, index)
            self.step.append(number)
        self.blocks: tuple[Block, ...] = find_repeats(self.step)
        self.look_ups = _look_ups(knapsack, eliminated)


def _look_ups(knapsack: Knapsack, numbers: Sequence[int]) -> list[LookUp]:
    """All that one table decides at once: after what it depends on, which was eliminated later."""
    depth: dict[int, int] = {}
    together: dict[tuple[int, int], list[int]] = {}
    for index in reversed(range(len(numbers))):
        plan = knapsack.eliminations[index]
        depth[plan.variable] = 1 + max((depth.get(v, 0) for v in plan.scope), default=0)
        together.setdefault((depth[plan.variable], numbers[index]), []).append(index)
    found = []
    for (_, number), indices in sorted(together.items()):
        plans = [knapsack.eliminations[index] for index in indices]
        variables = np.array([plan.variable for plan in plans], dtype=np.int64)
        scope = np.array([plan.scope for plan in plans], dtype=np.int64).reshape(len(plans), -1)
        found.append(LookUp(number, variables, scope.T))
    return found


def alike(cost: Floats, aside: Floats) -> tuple[int, ...]:
    """(variables,) one number for those of the same (rows, variables) costs."""
    columns = np.ascontiguousarray(np.concatenate([cost, aside]).T)
    known: dict[bytes, int] = {}
    return tuple(known.setdefault(column.tobytes(), len(known)) for column in columns)
