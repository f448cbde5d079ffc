"""Mixed-integer programs whose bounds are proven by weak duality, computed here.

HiGHS solves the linear relaxations, but its optimum is not trusted. Any duals of the right signs prove a
bound, however they were found::

    min c x  over  A x <= b,  E x = e,  low <= x <= high
        >=  y b + z e + sum over j of min(r_j low_j, r_j high_j),   r = c - A'y - E'z,   y <= 0

(HiGHS' own mixed-integer cuts have cut off optima: ERGO-Code/HiGHS issues 1725 and 2173.) Branch and bound is
best bound first, on the integer variable that the duals weigh most (Land and Doig, "An automatic method of
solving discrete programming problems", 1960).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack
from scipy.sparse import eye_array as identity

from graphplan.passes.placement.arrays import Bools, Floats
from graphplan.passes.placement.params import PARAMS, ROUNDING, Effort

_INTEGRALITY_TOL = 1e-6  # a value that differs less from an integer counts as integer
_FEASIBILITY_TOL = 1e-6  # infeasible if the least violation, summed over rows, is proven to be above this

Terms = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of branch and bound: bound by duals, solution, weight of each variable in the duals, limits."""

    bound: float
    values: Floats
    weight: Floats
    low: Floats
    high: Floats


class LinearProgram:
    """Variables with limits, inequality and equality rows; the objective is to minimise one variable."""

    def __init__(self) -> None:
        self.low: list[float] = []
        self.high: list[float] = []
        self.integer: list[bool] = []
        self._rows: dict[bool, list[tuple[Terms, float]]] = {False: [], True: []}

    def variable(self, high: float, *, low: float = 0.0, integer: bool = False) -> int:
        """Add a variable and return its index. Limits are finite, so that all duals prove a finite bound."""
        self.low.append(low)
        self.high.append(high)
        self.integer.append(integer)
        return len(self.low) - 1

    def at_most(self, terms: Terms, limit: float) -> None:
        """Add the row ``sum of value * variable <= limit``."""
        self._rows[False].append((terms, limit))

    def at_least(self, terms: Terms, limit: float) -> None:
        """Add the row ``sum of value * variable >= limit``."""
        self.at_most([(variable, -value) for variable, value in terms], -limit)

    def equal(self, terms: Terms, value: float) -> None:
        """Add the row ``sum of value * variable == value``."""
        self._rows[True].append((terms, value))

    def freeze(self) -> None:
        """Build ``A_ub x <= b_ub`` and ``A_eq x == b_eq``; no row can be added afterwards."""
        self._a_ub, self._b_ub = self._matrix(self._rows[False])
        self._a_eq, self._b_eq = self._matrix(self._rows[True])
        self.entries = self._a_ub.nnz + self._a_eq.nnz

    def _matrix(self, rows: list[tuple[Terms, float]]) -> tuple[csr_array, Floats]:
        data, columns, starts = list[float](), list[int](), [0]
        for terms, _ in rows:
            columns += [variable for variable, _ in terms]
            data += [value for _, value in terms]
            starts.append(len(data))
        matrix = csr_array((data, columns, starts), shape=(len(rows), len(self.low)))
        return matrix, np.array([limit for _, limit in rows])

    def solve(self, objective: int, low: Floats, high: Floats, effort: Effort) -> Node | None:
        """Solve the linear relaxation within these limits; return None if it is proven infeasible.

        If HiGHS gives up, or the effort is too small, the bound is minus infinity.
        """
        unknown = Node(-np.inf, np.round(low), np.zeros(len(low)), low, high)
        iteration_visits = 0.05 * self.entries  # most programs need about one iteration for each row
        if iteration_visits * (len(self._b_ub) + len(self._b_eq)) > effort.visits:
            return unknown
        cost = np.zeros(len(low))
        cost[objective] = 1.0
        options: dict[str, float | bool] = {"presolve": False}
        if effort.seconds_left is not None:
            options["time_limit"] = max(0.01, effort.seconds_left)
        solution = linprog(
            cost,
            A_ub=self._a_ub,
            b_ub=self._b_ub,
            A_eq=self._a_eq,
            b_eq=self._b_eq,
            bounds=np.column_stack([low, high]),
            method="highs",
            options=options,
        )
        effort.charge(20_000.0 + iteration_visits * solution.nit)
        if solution.status == 2 and self._is_infeasible(low, high, options):
            return None
        if solution.status != 0:
            return unknown
        y_ub = np.minimum(solution.ineqlin.marginals, 0.0)
        y_eq = solution.eqlin.marginals
        bound = self._proven(cost, y_ub, y_eq, low, high)
        weight = abs(self._a_ub).T @ -y_ub + abs(self._a_eq).T @ np.abs(y_eq)
        return Node(bound, np.asarray(solution.x), np.asarray(weight), low, high)

    def _is_infeasible(self, low: Floats, high: Floats, options: dict[str, float | bool]) -> bool:
        """Whether the duals of the program of least violation prove that every point violates a row."""
        inequalities, equalities, variables = len(self._b_ub), len(self._b_eq), len(low)
        slacks = inequalities + 2 * equalities
        solution = linprog(
            np.concatenate([np.zeros(variables), np.ones(slacks)]),
            A_ub=hstack([self._a_ub, -identity(inequalities), csr_array((inequalities, 2 * equalities))]),
            b_ub=self._b_ub,
            A_eq=hstack(
                [
                    self._a_eq,
                    csr_array((equalities, inequalities)),
                    identity(equalities),
                    -identity(equalities),
                ]
            ),
            b_eq=self._b_eq,
            bounds=[*zip(low, high, strict=True), *[(0.0, None)] * slacks],
            method="highs",
            options={**options, "presolve": True},
        )
        if solution.status != 0:
            return False
        y_ub = np.clip(solution.ineqlin.marginals, -1.0, 0.0)
        y_eq = np.clip(solution.eqlin.marginals, -1.0, 1.0)
        return self._proven(np.zeros(variables), y_ub, y_eq, low, high) > _FEASIBILITY_TOL

    def _proven(self, cost: Floats, y_ub: Floats, y_eq: Floats, low: Floats, high: Floats) -> float:
        """Return the bound of these duals by weak duality, less an allowance for rounding."""
        reduced = cost - self._a_ub.T @ y_ub - self._a_eq.T @ y_eq
        terms = np.concatenate(
            [y_ub * self._b_ub, y_eq * self._b_eq, np.minimum(reduced * low, reduced * high)]
        )
        return float(terms.sum() - ROUNDING * np.abs(terms).sum())


def branch_and_bound(program: LinearProgram, objective: int, target_bound: float, effort: Effort) -> float:
    """Return a lower bound of the objective variable.

    Args:
        program: the program, whose integer variables are branched on.
        objective: the objective variable.
        target_bound: a bound that needs no improvement.
        effort: the effort to charge; the search also ends after ``milp_nodes`` linear programs that raise the
            bound by less than the share ``negligible`` of the distance to the target.
    """
    program.freeze()
    integer: Bools = np.array(program.integer, dtype=bool)
    low, high = np.array(program.low), np.array(program.high)
    root = program.solve(objective, low, high, effort)
    if root is None:
        return np.inf
    order, solved, checkpoint = count(), 0, (0, root.bound)
    heap = [(root.bound, next(order), root)]
    while heap and heap[0][0] < target_bound and not effort.over:
        bound, _, node = heap[0]
        if solved - checkpoint[0] >= PARAMS.milp_nodes:
            if bound - checkpoint[1] < PARAMS.negligible * (target_bound - bound):
                break
            checkpoint = solved, bound
        fraction = np.abs(node.values - np.round(node.values))
        score = np.where(integer & (fraction > _INTEGRALITY_TOL), fraction * (node.weight + ROUNDING), 0.0)
        if not score.any():  # all integer, or HiGHS gave up: the bound cannot be raised
            break
        heapq.heappop(heap)
        for limits in _split(node, int(score.argmax())):
            solved += 1
            child = program.solve(objective, *limits, effort)
            if child is not None:
                heapq.heappush(heap, (max(bound, child.bound), next(order), child))
    return heap[0][0] if heap else np.inf


def _split(node: Node, index: int) -> list[tuple[Floats, Floats]]:
    new_high, new_low = node.high.copy(), node.low.copy()
    new_high[index] = np.floor(node.values[index])
    new_low[index] = new_high[index] + 1.0
    return [(node.low, new_high), (new_low, node.high)]
