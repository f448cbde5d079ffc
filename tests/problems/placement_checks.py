"""Checks that every solution must pass: no false bound, no plan that breaks a rule.

A bound is compared with every known placement: the best of all where all can be tried, those of a
random walk from the plan, and the plans of restricted problems. A restricted problem pins operations and
weights, leaves devices out or has smaller budgets, so each of its placements is one of the free problem.
"""

from __future__ import annotations

import math
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from brute import Space
from placement_api import Evaluation, Problem, Scope, Solution, evaluate
from random_problems import restrict

from graphplan.devices.topology import CPU, DISK, DeviceKey
from graphplan.errors import InfeasibleError, VerificationError
from graphplan.ir.schedule import Assignment
from graphplan.ir.schedule_checks import check_schedule

__all__ = ["FULL", "Effort", "Findings", "inspect", "sound", "violations"]

TIGHT = 1 + 1e-9  # sums in another order

Place = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of trials for one problem.

    Attributes:
        placements: most placements of a problem for which all are tried.
        steps: steps of the random walk.
        restricted: number of derived problems that are placed too.
        place_twice: whether to place it twice, and compare.
    """

    placements: int = 20_000
    steps: int = 60
    restricted: int = 2
    place_twice: bool = False


FULL = Effort()


@dataclass(slots=True)
class Findings:
    """The findings about one problem.

    Attributes:
        violations: texts of violated rules, each with its kind before the colon.
        solution: the planner's solution; None if it found none.
        complete: whether all placements were tried.
        best: the fastest known placement in the space of the bound.
        source: how that placement was found.
    """

    violations: list[str] = field(default_factory=list)
    solution: Solution | None = None
    complete: bool = False
    best: Evaluation | None = None
    source: str = "the plan"

    @property
    def ratio(self) -> float | None:
        """Seconds of the plan over those of the fastest placement known."""
        if self.solution is None or self.best is None:
            return None
        seconds, best = self.solution.evaluation.seconds, self.best.seconds
        return seconds / best if best else (1.0 if not seconds else math.inf)

    @property
    def gap(self) -> float | None:
        """The share of the plan's seconds above its bound."""
        if self.solution is None:
            return None
        seconds = self.solution.evaluation.seconds
        return 1 - self.solution.bound.seconds / seconds if seconds else 0.0


def violations(problem: Problem, place: Place, seed: int = 0, effort: Effort = FULL) -> list[str]:
    """Return the violations of a problem's solution; none for a sound planner."""
    return inspect(problem, place, seed, effort).violations


def inspect(problem: Problem, place: Place, seed: int = 0, effort: Effort = FULL) -> Findings:
    """Place a problem, and check the solution.

    Args:
        problem: any problem.
        place: the planner, without a time limit, as it is called twice.
        seed: seed of all draws.
        effort: the number of trials.
    """
    return _Inspection(problem, place, random.Random(f"checks of {seed}"), effort).run()


class _Inspection:
    def __init__(self, problem: Problem, place: Place, draw: random.Random, effort: Effort) -> None:
        self.problem, self.place, self.draw, self.effort = problem, place, draw, effort
        self.found = Findings()
        self.whole, self.plain = Space(problem, alone=False), Space(problem, alone=True)
        self.space = self.whole  # of the bound

    def run(self) -> Findings:
        try:
            solution = self._call(self.problem)
        except InfeasibleError as error:
            self._check_infeasible(error)
            return self.found
        if solution is None:
            return self.found
        self.found.solution = solution
        self.space = self._space_of(solution)
        self.found.violations += sound(self.problem, self.space, solution)
        if self.found.violations:
            return self.found
        self.found.best = solution.evaluation
        self._try_all()
        self._walk()
        for _ in range(self.effort.restricted):
            self._restrict()
        if self.effort.place_twice:
            self._place_again()
        return self.found

    def _call(self, problem: Problem, text: str = "") -> Solution | None:
        """The planner's solution; None if it warns or raises another error."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a bound above a plan is warned of
                return self.place(problem)
        except InfeasibleError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}, {where.name}"
            self._add_violation(f"raised: {type(error).__name__}{text}: {error} ({place})")
            return None

    def _add_violation(self, text: str) -> None:
        self.found.violations.append(text)

    def _offer(self, found: Evaluation | None, source: str) -> None:
        """Compare the bound with a placement."""
        solution = self.found.solution
        if found is None or not found.feasible or solution is None:
            return
        assignment = found.schedule.assignment
        if self.space is self.whole and self._without_offload(found) and not self._plan_is_plain:
            self._add_violation(f"offload: though {source} fits the accelerators, in {found.seconds:.6g} s")
        if self.space.objection(assignment) is not None:
            return
        assert self.found.best is not None
        if found.seconds < self.found.best.seconds:
            self.found.best, self.found.source = found, source
        if solution.bound.seconds > found.seconds * TIGHT:
            self._add_violation(
                f"bound: {solution.bound.seconds:.6g} s ({solution.bound.text}), {source} takes "
                f"{found.seconds:.6g} s, the plan {solution.evaluation.seconds:.6g} s"
            )

    def _space_of(self, solution: Solution) -> Space:
        """The placements for which a bound of the problem holds."""
        scope = solution.bound.scope
        if scope is Scope.WITHOUT_OFFLOAD:
            return self.plain
        return bounded(self.problem, solution) if scope is Scope.ON_ACCELERATORS else self.whole

    @property
    def _plan_is_plain(self) -> bool:
        assert self.found.solution is not None
        return self._without_offload(self.found.solution.evaluation)

    def _without_offload(self, found: Evaluation) -> bool:
        """Whether a placement is on accelerators alone, if there are any."""
        return bool(self.plain.accelerators) and self.plain.objection(found.schedule.assignment) is None

    # -- every placement ----------------------------------------------------------------------------------

    def _spaces(self) -> list[Space]:
        """The space without offload comes first, as its placements are preferred."""
        return [self.plain, self.whole] if self.plain.accelerators else [self.whole]

    def _try_all(self) -> None:
        for space in self._spaces():
            if space.count > self.effort.placements:
                continue
            known = self.found.best if space is self.space else None
            best = space.best(known)
            self._offer(best, "the best of all")
            self.found.complete |= space is self.space

    def _check_infeasible(self, error: InfeasibleError) -> None:
        """Check the planner's claim that no placement fits."""
        for space in self._spaces():
            if space.count <= self.effort.placements:
                self.found.best = self.found.best or space.best()
                self.found.complete = space is self.whole or space.count == self.whole.count
        if self.found.best is None and not self.found.complete:
            self.found.best = least_excess(self.whole, self.draw, 4 * self.effort.steps)
        if self.found.best is not None:
            self._add_violation(f"infeasible: but one placement fits, in {self.found.best.seconds:.6g} s")
        topology = self.problem.topology
        if not error.needed:
            return
        if all(error.needed.get(spec.key, 0) <= spec.memory for spec in topology.devices):
            self._add_violation(f"needed: {error.needed} is not more than there is")
        enlarged = replace(self.problem, topology=topology.with_memory(error.needed))
        try:
            solution = self._call(enlarged, ", with the budgets that are needed")
        except InfeasibleError:
            self._add_violation(f"needed: {error.needed} do not")
            return
        if solution is None:
            return
        space = bounded(enlarged, solution)
        self.found.violations += [f"needed, {text}" for text in sound(enlarged, space, solution)]

    # -- some of them -------------------------------------------------------------------------------------

    def _walk(self) -> None:
        """Make random changes, and keep those that take no longer."""
        assert self.found.best is not None
        now = self.found.best
        for _ in range(self.effort.steps):
            neighbour = evaluate(self.problem, changed(self.space, now.schedule.assignment, self.draw))
            if neighbour.feasible and neighbour.seconds <= now.seconds:
                now = neighbour
        self._offer(now, "a random walk")

    def _restrict(self) -> None:
        """The plan of a problem with further rules, and its bound against the plan of the free one."""
        text, restricted = restriction(self.problem, self.space, self._best_assignment, self.draw)
        if restricted is None:
            return
        try:
            solution = self._call(restricted, f", with {text}")
        except InfeasibleError:
            return
        if solution is None:
            return
        space = bounded(restricted, solution)
        wrong = sound(restricted, space, solution)
        self.found.violations += [f"{violation} (with {text})" for violation in wrong]
        if wrong:
            return
        assignment = solution.evaluation.schedule.assignment
        self._offer(evaluate(self.problem, assignment), f"the plan with {text}")
        assert self.found.best is not None
        for known in (self.found.best, self.found.solution.evaluation if self.found.solution else None):
            assert known is not None
            other = evaluate(restricted, known.schedule.assignment)
            if not other.feasible or space.objection(other.schedule.assignment) is not None:
                continue
            if solution.bound.seconds > other.seconds * TIGHT:
                self._add_violation(
                    f"bound: {solution.bound.seconds:.6g} s ({solution.bound.text}) with {text}, "
                    f"{self.found.source} takes {other.seconds:.6g} s"
                )

    @property
    def _best_assignment(self) -> Assignment:
        assert self.found.best is not None
        return self.found.best.schedule.assignment

    def _place_again(self) -> None:
        assert self.found.solution is not None
        second, first = self._call(self.problem, ", the second time"), self.found.solution
        if second is None:
            return
        if second.evaluation.schedule.assignment != first.evaluation.schedule.assignment:
            self._add_violation("determinism: another plan the second time")
        elif second.bound != first.bound:
            self._add_violation("determinism: another bound the second time")


def bounded(problem: Problem, solution: Solution) -> Space:
    """The placements that the scope of a solution's bound covers."""
    if solution.bound.scope is Scope.ON_ACCELERATORS:
        alone = Space(problem, alone=True)
        rules = {name: frozenset(keys) for group, keys in alone.groups.items() for name in group}
        rules |= {name: frozenset(keys) for name, keys in alone.sizes.items()}
        return Space(replace(problem, allowed=rules), alone=False)
    return Space(problem, alone=solution.bound.scope is Scope.WITHOUT_OFFLOAD)


def sound(problem: Problem, space: Space, solution: Solution) -> list[str]:
    """The violations of a solution by itself.

    Args:
        problem: the placed problem.
        space: the placements that the scope of its bound covers.
        solution: the planner's solution.
    """
    found, bound, wrong = solution.evaluation, solution.bound.seconds, []
    if not found.feasible:
        wrong.append(f"feasible: {found.seconds} s, over by {dict(found.excess)}")
    if evaluate(problem, found.schedule.assignment) != found:
        wrong.append("evaluation: differs from the evaluator's for its assignment")
    if (objection := space.objection(found.schedule.assignment)) is not None:
        wrong.append(f"rules: {objection}")
    if not (math.isfinite(bound) and 0 <= bound <= found.seconds * TIGHT):
        wrong.append(f"bound: {bound} s of a plan of {found.seconds} s ({solution.bound.text})")
    try:
        check_schedule(problem.graph, problem.topology, found.schedule)
    except VerificationError as error:
        wrong.append(f"schedule: {error}")
    return wrong


def changed(space: Space, assignment: Assignment, draw: random.Random) -> Assignment:
    """A few operations in a row, one operation or one weight elsewhere; the slots as by default."""
    groups = list(space.groups)
    operations, weights = dict(assignment.operations), dict(assignment.weights)
    slots = assignment.slots
    change = draw.random()
    if groups and change < 0.7:
        first = draw.randrange(len(groups))
        count = 1 if change < 0.35 else draw.randint(1, max(1, len(groups) // 3))
        key = draw.choice(space.keys)
        for group in groups[first : first + count]:
            if key in space.groups[group]:
                operations.update(dict.fromkeys(group, key))
    elif weights and change < 0.95:
        name = draw.choice(list(weights))
        weights[name] = draw.choice(space.homes(name, operations))
    else:
        slots = {key: draw.randint(1, 4) for key in space.accelerators}
    for name, home in weights.items():
        homes = space.homes(name, operations)
        stayed = home in homes and (name in space.shared or home in (CPU, DISK))
        weights[name] = home if stayed else homes[0]
    return Assignment(operations, weights, slots)


def least_excess(space: Space, draw: random.Random, steps: int) -> Evaluation | None:
    """A placement within the budgets, found by random changes that reduce the excess."""
    operations = {name: devices[0] for group, devices in space.groups.items() for name in group}
    operations.update({name: devices[0] for name, devices in space.sizes.items()})
    weights = {name: space.homes(name, operations)[0] for name in space.problem.graph.weights}
    now = evaluate(space.problem, Assignment(operations, weights))
    for _ in range(steps):
        if now.feasible:
            return now
        neighbour = evaluate(space.problem, changed(space, now.schedule.assignment, draw))
        if sum(neighbour.excess.values()) <= sum(now.excess.values()):
            now = neighbour
    return now if now.feasible else None


# -- restricted problems ----------------------------------------------------------------------------------


def restriction(
    problem: Problem, space: Space, known: Assignment, draw: random.Random
) -> tuple[str, Problem | None]:
    """A restricted problem, whose placements are also those of the free one, and a text of its restrictions.

    Args:
        problem: the free problem.
        space: its placements.
        known: one of them, from which some pins are taken.
        draw: random numbers.
    """
    kinds = [_fewer_devices, _pins, _homes, _smaller_budgets, _no_offload]
    for make in draw.sample(kinds, len(kinds)):
        for text, restricted in make(problem, space, known, draw):
            return text, restricted
    return "nothing", None


_Restricted = Iterator[tuple[str, Problem | None]]


def _fewer_devices(problem: Problem, space: Space, known: Assignment, draw: random.Random) -> _Restricted:
    """Operations on some devices only, unless they may not run there."""
    keys = space.keys
    if len(keys) > 1:
        some = frozenset(draw.sample(keys, draw.randint(1, len(keys) - 1)))
        rules = {name: some for group, devices in space.groups.items() if some & {*devices} for name in group}
        yield f"operations on {sorted(map(str, some))}", restrict(problem, rules)


def _pins(problem: Problem, space: Space, known: Assignment, draw: random.Random) -> _Restricted:
    """Some groups pinned, to their devices or to others."""
    rules: dict[str, frozenset[DeviceKey]] = {}
    groups = [group for group, devices in space.groups.items() if devices]
    if not groups:
        return
    for group in draw.sample(groups, draw.randint(1, max(1, len(groups) // 3))):
        key = known.operations[group[0]] if draw.random() < 0.5 else draw.choice(space.groups[group])
        rules.update(dict.fromkeys(group, frozenset({key})))
    yield f"{len(rules)} operations pinned", restrict(problem, rules)


def _homes(problem: Problem, space: Space, known: Assignment, draw: random.Random) -> _Restricted:
    """Some weights pinned; one that a single group reads with that group, or on the CPU."""
    graph = problem.graph
    names = [name for name in graph.weights if name not in problem.fixed_weights and graph.readers.get(name)]
    if not names:
        return
    homes: dict[str, DeviceKey] = {}
    rules: dict[str, frozenset[DeviceKey]] = {}
    for name in draw.sample(names, draw.randint(1, max(1, len(names) // 3))):
        options = space.homes(name, known.operations)
        homes[name] = known.weights[name] if draw.random() < 0.5 else draw.choice(options)
        if name not in space.shared and homes[name] == known.operations[graph.readers[name][0]]:
            rules.update(dict.fromkeys(graph.readers[name], frozenset({homes[name]})))
    yield f"{len(homes)} weights pinned", restrict(problem, rules, homes)


def _smaller_budgets(problem: Problem, space: Space, known: Assignment, draw: random.Random) -> _Restricted:
    """Less memory on some devices."""
    memory = {
        spec.key: int(spec.memory * draw.uniform(0.5, 0.97))
        for spec in problem.topology.devices
        if draw.random() < 0.6
    }
    yield "smaller budgets", replace(problem, topology=problem.topology.with_memory(memory))


def _no_offload(problem: Problem, space: Space, known: Assignment, draw: random.Random) -> _Restricted:
    """On accelerators alone, apart from pins."""
    if problem.offload and space.accelerators and CPU in problem.topology:
        rules = {
            name: space.accelerators
            for group, devices in space.groups.items()
            if space.accelerators & {*devices}
            for name in group
        }
        restricted = restrict(problem, rules)
        yield "offload=False", None if restricted is None else replace(restricted, offload=False)
