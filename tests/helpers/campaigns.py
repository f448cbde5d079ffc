"""The campaigns that ``benchmarks/reliability.py`` runs in full and the tests in part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from plan_fuzz import check_plan
from random_modules import check_module


@dataclass
class Tally:
    """What came of some cases.

    Attributes:
        counts: how often what was seen.
        violations: what must not be, each with its seed.
        difference: the largest from eager.
    """

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    difference: float = 0.0

    def add(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.violations += other.violations
        self.difference = max(self.difference, other.difference)


@dataclass(frozen=True)
class Campaign:
    """A kind of case.

    Attributes:
        what: it tries and asks for.
        run: the cases of some seeds.
        cases: of the full campaign.
        piece: cases that one process takes at once.
    """

    what: str
    run: Callable[[range], Tally]
    cases: int
    piece: int


def random_modules(seeds: range) -> Tally:
    total = Tally()
    for seed in seeds:
        found = check_module(seed)
        counts = {"cases": 1, "placed": int(found.placed), "calls": found.calls}
        counts |= {"calls_measured": found.measured, "calls_exact_to_the_byte": found.exact}
        total.add(Tally(Counter(counts), found.violations, found.difference))
    return total


def damaged_plans(seeds: range) -> Tally:
    total = Tally()
    for seed in seeds:
        read, problem = check_plan(seed)
        total.add(Tally(Counter({"cases": 1, "read": int(read)}), [problem] if problem else []))
    return total


CAMPAIGNS = {
    "random_modules": Campaign(
        "random modules (in place, views, ties, buffers, modes) in random budgets: equal to eager within "
        "1e-5, peaks within the plan's and the budgets, copies the plan's, nothing left on the devices",
        random_modules,
        10_000,
        50,
    ),
    "damaged_plans": Campaign(
        "plan JSON damaged at random: PlanError, or a plan that verifies and is written and read the same",
        damaged_plans,
        10_000,
        500,
    ),
}
