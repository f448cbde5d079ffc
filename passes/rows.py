"""Linear inequalities, gathered one by one for a sparse matrix."""

from __future__ import annotations

import numpy as np
from scipy.optimize import LinearConstraint
from scipy.sparse import csr_array

__all__ = ["Rows"]


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
