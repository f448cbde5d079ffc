"""The campaigns that ``tests/campaigns/reliability.py`` runs in full and the tests in part."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import faults
import torch
from plan_fuzz import check_plan
from random_modules import check_module
from trained_modules import check_training

import graphplan


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
        gc.freeze()  # what torch has traced stays, and is not looked through again after every case
        counts = {"cases": 1, "placed": int(found.placed), "calls": found.calls}
        counts |= {"calls_measured": found.measured, "calls_exact_to_the_byte": found.exact}
        total.add(Tally(Counter(counts), found.violations, found.difference))
    return total


def trained_modules(seeds: range) -> Tally:
    total = Tally()
    for seed in seeds:
        found = check_training(seed)
        gc.freeze()
        counts = {"cases": 1, "placed": int(found.placed), "steps": found.calls}
        total.add(Tally(Counter(counts), found.violations, found.difference))
    return total


def damaged_plans(seeds: range) -> Tally:
    total = Tally()
    for seed in seeds:
        read, problem = check_plan(seed)
        total.add(Tally(Counter({"cases": 1, "read": int(read)}), [problem] if problem else []))
    return total


def until_done(name: str, check: Callable[[int], tuple[bool, str | None]], step: int = 1) -> Tally:
    """Inject a fault at each place in turn, until there is none left."""
    total = Tally()
    hit, at = True, 1
    while hit:
        hit, problem = check(at)
        total.violations += [f"{name} {at}: {problem}"] if problem else []
        total.counts[name] += hit
        at += step
    return total


def refused_allocations(seeds: range) -> Tally:
    """Every allocation of calls and of loading, whatever the seeds."""
    total = Tally()
    for name, wide, warm in (("call", False, True), ("other call", True, True), ("first call", True, False)):
        total.add(until_done(name, partial(faults.check_refused_call, wide=wide, warm=warm)))
    total.add(until_done("placing", partial(faults.check_refused_loading, checkpoint=None)))
    with TemporaryDirectory() as folder:
        total.add(until_done("loading", partial(faults.check_refused_loading, checkpoint=Path(folder))))
    return total


def damaged_checkpoints(seeds: range) -> Tally:
    total = Tally()
    for seed in seeds:
        kind, step = faults.CHECKPOINT_CASES[seed]
        problem = faults.check_checkpoint(kind, step)
        total.add(Tally(Counter({kind: 1}), [problem] if problem else []))
    if 0 in seeds:
        total.add(until_done("read error", faults.check_read_error))
        found = [faults.check_mapped(kind) for kind in ("truncated", "overwritten", "replaced")]
        total.add(Tally(Counter({"changed while mapped": len(found)}), [text for text in found if text]))
    return total


def interrupted_calls(seeds: range, step: int = 1) -> Tally:
    """Every line of a streamed call of each structure, whatever the seeds."""
    total, model = Tally(), faults.Blocks().eval()
    with torch.no_grad(), graphplan.simulate(faults.BUDGETS) as machine:
        placed = faults.streamed(model)
        placed(faults.X, True)
        before = faults.taken(machine)
        for wide in (False, True):
            check = partial(faults.check_interrupted, placed, model, wide=wide)
            total.add(until_done("lines", check, step))
        if (after := faults.taken(machine)) != before:
            total.violations.append(f"{before} became {after}")
    return total


def many_calls(seeds: range) -> Tally:
    return Tally(Counter({"calls": len(seeds)}), faults.check_many_calls(len(seeds), seeds.start))


def many_threads(seeds: range) -> Tally:
    """Eight threads on a placed module and its copies; as many calls of each as there are seeds."""
    model = faults.Blocks().eval()
    with torch.no_grad(), graphplan.simulate(faults.BUDGETS):
        found = faults.check_threads(faults.streamed(model), model, 8, len(seeds))
    return Tally(Counter({"threads": 8, "calls": 8 * len(seeds)}), found)


CAMPAIGNS = {
    "random_modules": Campaign(
        "random modules (in place, views, ties, buffers, modes) in random budgets: equal to eager within "
        "1e-5, peaks within the plan's and the budgets, copies the plan's, nothing left on the devices",
        random_modules,
        10_000,
        50,
    ),
    "trained_modules": Campaign(
        "random modules that are trained for three steps, planned or by autograd, by SGD, Adam and AdamW: "
        "results, gradients, buffers and parameters within 1e-6 of eager's in float64",
        trained_modules,
        2_000,
        25,
    ),
    "damaged_plans": Campaign(
        "plan JSON damaged at random: PlanError, or a plan that verifies and is written and read the same",
        damaged_plans,
        10_000,
        500,
    ),
    "refused_allocations": Campaign(
        "every allocation on a simulated device refused in turn, in calls of known and new structures, while "
        "placing and loading: the error names device and bytes, nothing is left, the next call is right",
        refused_allocations,
        1,
        1,
    ),
    "damaged_checkpoints": Campaign(
        "checkpoints with one fault, and reads that fail: CheckpointError, the model as before; it "
        "can be loaded once the fault is gone",
        damaged_checkpoints,
        len(faults.CHECKPOINT_CASES),
        25,
    ),
    "interrupted_calls": Campaign(
        "KeyboardInterrupt and ValueError in turn at every line of generated code and of the runtime that a "
        "streamed call runs: the next calls of both structures are right, bytes as before",
        interrupted_calls,
        1,
        1,
    ),
    "many_calls": Campaign(
        "calls of a small Llama with two adapters, of changing batch, length, adapter and mode: equal to "
        "eager within 1e-5, bytes on the devices flat but for new structures",
        many_calls,
        1_000,
        1_000,
    ),
    "many_threads": Campaign(
        "eight threads on a placed module that streams weights and on its copies: equal to eager within 1e-5",
        many_threads,
        200,
        200,
    ),
}
