"""Linear inequalities, gathered one by one for a sparse matrix, and what HiGHS makes of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint
from scipy.sparse import csr_array

from graphplan.passes.quiet import milp

__all__ = ["Rows"]

Floats = npt.NDArray[np.float64]


class Rows:
    """Rows of a sparse matrix with their limits."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.columns: list[int] = []
        self.rows: list[int] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        row = len(self.low)
        for column, value in terms:
            self.rows.append(row)
            self.columns.append(column)
            self.data.append(value)
        self.low.append(low)
        self.high.append(high)

    def constraint(self, variables: int) -> LinearConstraint:
        shape = (len(self.low), variables)
        matrix = csr_array((self.data, (self.rows, self.columns)), shape=shape)
        return LinearConstraint(matrix, np.array(self.low), np.array(self.high))

    def propose(
        self, variable: int, high: Floats, integer: Floats, *, gap: float, nodes: int, seconds: float | None
    ) -> Floats | None:
        """(variables,) values with which HiGHS makes one of them small; None where it finds none.

        Its own bound is not to be trusted: see ``branch_and_bound``.

        Args:
            variable: to be as small as possible.
            high: (variables,) upper limits; the lower ones are 0.
            integer: (variables,) 1 for those that are whole.
            gap: relative gap at which to stop.
            nodes: branches to look at.
            seconds: of clock, or None.
        """
        objective = np.zeros(len(high))
        objective[variable] = 1.0
        options: dict[str, float | int | bool] = {"mip_rel_gap": gap, "node_limit": nodes}
        if seconds is not None:
            options["time_limit"] = seconds
        found: Floats | None = milp(
            objective,
            constraints=self.constraint(len(high)),
            bounds=Bounds(np.zeros(len(high)), high),
            integrality=integer,
            options=options,
        ).x
        return found
