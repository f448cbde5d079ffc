"""Keep what a training step saves, compute it again, or move it to CPU memory: the fastest that fits.

Segments (:mod:`graphplan.passes.training.segments`) save less in whole or in part. The step as it is, and the
one that computes every block again, are tried first, the latter unless its operations alone take longer than
what is known. Then the cheapest segments save less (:mod:`graphplan.passes.training.knapsack`): as many as
free the bytes that are lacking (false position), else a count beside the best one (golden-section search).
A quick search places each step. Where accelerators hold the step as it is, near to the least time of its
operations, nothing else is tried; where that is far, with less saved it may fit the fastest of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from graphplan.compiler.compile_state import Choice, CompileState, Member, Trial, with_optimizer
from graphplan.compiler.fixed_point import place_calls
from graphplan.compiler.slicing_choice import place_whole_or_sliced
from graphplan.errors import InfeasibleError
from graphplan.passes.frontend.slicing import copied
from graphplan.passes.placement.certificate import Bound, Scope, certify
from graphplan.passes.placement.driver import accelerators_alone, attempt, probe
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.params import PARAMS
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device
from graphplan.passes.training.knapsack import Item, Savings, cheapest, enough, freed, items_of, ordered
from graphplan.passes.training.offload import offload
from graphplan.passes.training.recompute import recompute
from graphplan.passes.training.segments import segments_of

_STEPS = 4  # counts of segments that are tried beside none and all
_NEAR = 0.05  # relative: a step that fits as it is, so near to the least time, is not tried with less saved
_GOLDEN = 0.382  # share of a gap, of golden-section search
_EACH_ALONE = "each operation where it takes least, whatever is saved"


def place_step(state: CompileState) -> list[Choice]:
    """Pass: place the calls; a training step alone with less saved, where that is faster, or fits at all.

    Raises:
        InfeasibleError: no placement fits.
    """
    if len(state.members) > 1 or state.members[0].annotator.capture.step is None:
        return place_whole_or_sliced(state)
    choice = _Choice(state)
    lacking: InfeasibleError | None = None
    for trial in choice.trials():
        try:
            return choice.placed(trial)
        except InfeasibleError as error:  # the moves that a placement brings made operations take more
            lacking = lacking or error.with_traceback(None)
    assert lacking is not None
    raise lacking


@dataclass
class _Choice:
    """Of how much a step saves.

    Attributes:
        state: with the step as its only member.
        tried: how many segments save less -> the trial.
        devices: that should hold the step: the accelerators, or the fastest where all hold it as it is.
    """

    state: CompileState
    tried: dict[int, Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.member,) = self.state.members
        self.problem = self._posed(self.member)
        self.least = _least_seconds(self.problem)
        self.devices = self.problem.topology.accelerators or self.problem.topology.computing
        options, topology = self.state.formulation.options, self.problem.topology
        assert options.training is not None
        self.recomputes = options.training.recompute
        able = topology.cpu is not None and bool(topology.accelerators)
        self.offloads = able and options.training.offload_activations and options.constraints.offload

    def trials(self) -> list[Trial]:
        """Steps to place, the fastest first."""
        self._tried(0, self.member, self.problem)
        if self._resides:
            whole = self.tried[0]
            if whole.found is not None and whole.found.seconds <= (1 + _NEAR) * sum(self.least.values()):
                return [whole]
            most = max(spec.flops for spec in self.devices)
            self.devices = [spec for spec in self.devices if spec.flops == most]
        items = self._items()
        if items:
            self._search(items)
        alone = [] if self._resides else self._searched_alone()
        trials = [*self.tried.values(), *alone]
        found = sorted((one for one in trials if one.found), key=lambda one: one.seconds)
        if found:
            return found
        # the most that the caller allows to free, whose budgets an error is to name
        paths = tuple(dict.fromkeys(item.path for item in items))
        savings = Savings(again=paths if self.recomputes else (), offloaded=paths if self.offloads else ())
        return [Trial(member_with(self.member, savings), None)]

    def placed(self, trial: Trial) -> list[Choice]:
        """The placement of a trial, or one that a search of all operations finds faster.

        Raises:
            InfeasibleError: it does not fit with the moves that it brings.
        """
        state, bound = replace(self.state, members=[trial.member]), self.bound
        if trial.found is None or not self.large or not bound.seconds:
            choice = self._with_bound(*place_whole_or_sliced(state))
            if trial.found is None or with_optimizer(choice.solution.evaluation) <= trial.seconds:
                return [choice]
            bound = choice.solution.bound
        return place_calls(state, [certify(trial.found, bound)])

    @property
    def large(self) -> bool:
        """Whether the default effort does not grow with the operations any more: a quick search is all."""
        operations = self.problem.graph.operations
        return self.state.limits.deadline is None and PARAMS.visits(len(operations)) >= PARAMS.most_visits

    @cached_property
    def bound(self) -> Bound:
        """One that holds for steps that save less, too, if there may be any: all run these operations."""
        if not (self.recomputes or self.offloads):
            return Bound()
        return Bound(sum(self.least.values()), _EACH_ALONE, Scope.ANY)

    def _items(self, *, offloads: bool = True) -> list[Item]:
        """What can save less, priced for the fastest accelerator."""
        accelerators = self.problem.topology.accelerators
        clock = self.problem.clock(max(accelerators or self.problem.topology.devices, key=lambda s: s.flops))
        return items_of(
            segments_of(self.member.annotator.capture),
            self.problem.graph,
            clock.__getitem__ if self.recomputes else None,
            self._copy_seconds if self.offloads and offloads else None,
        )

    def _copy_seconds(self, nbytes: int) -> float:
        """Of a value from the accelerator that is nearest to the CPU, and back."""
        topology = self.problem.topology
        cpu, keys = topology.cpu, [spec.key for spec in topology.accelerators]
        assert cpu is not None
        return min(
            topology.link(k, cpu).seconds(nbytes) + topology.link(cpu, k).seconds(nbytes) for k in keys
        )

    def _with_bound(self, choice: Choice) -> Choice:
        """The placement, with the lower of its bound and the one that holds for steps that save less."""
        if not self.bound.seconds or self.bound.seconds >= choice.solution.bound.seconds:
            return choice
        return replace(choice, solution=replace(choice.solution, bound=self.bound))

    @property
    def _resides(self) -> bool:
        """Whether the fastest that was found keeps everything on the accelerators."""
        best = min(self.tried.values(), key=lambda trial: trial.seconds).found
        if best is None or best.schedule.prefetch_buffers:
            return False
        cpu = self.problem.topology.cpu
        return not any(run.device == cpu for run in best.schedule.runs())

    def _worth(self, items: Sequence[Item]) -> int:
        """How many of the cheapest may be faster than the step as it is, by its operations alone."""
        most, seconds = 0, sum(self.least.values())
        for item in ordered(items):
            seconds += item.seconds
            if seconds >= self.tried[0].seconds:
                break
            most += 1
        return most

    def _search(self, items: Sequence[Item]) -> None:
        """Try every block, then as many as should be enough, and what lies beside the best of these.

        All segments, too, where the accelerators do not hold the step with every block: others may free more.
        Of a large step that streams weights, whose trials take long, not these, and fewer counts. Where one
        on the accelerators alone is the fastest, others are placed there, as without CPU memory.
        """
        most, streams = len(items), self.tried[0].found is not None
        savings, again = self.every_block()
        lacking = {0: self._lacking(self.problem)}
        if again and sum(self.least.values()) + again < self.tried[0].seconds:
            lacking[most] = self._try(most, savings)
        if not self._resides and (not streams or (most in self.tried and not self.large)):
            lacking[most] = self._try(most, cheapest(items, most))
        if lacking.get(most, 0) > 0 and not any(trial.found for trial in self.tried.values()):
            return
        worth = self._worth(items)
        for _ in range(self._steps(streams=streams, may_fit=0 < _enough(items, lacking) <= worth)):
            seconds = {count: trial.seconds for count, trial in self.tried.items()}
            count = next_count(seconds, _enough(items, lacking), worth)
            if count in self.tried:
                break
            lacking[count] = self._try(count, cheapest(items, count))

    def _steps(self, *, streams: bool, may_fit: bool) -> int:
        """How many counts are tried: of a large step that streams, one where no count may end that."""
        if streams and self.large and not self._resides:
            return _STEPS // 2 if may_fit else 1
        return _STEPS

    def _searched_alone(self) -> list[Trial]:
        """A full search of the accelerators alone for what computes most again, if that may be faster.

        The quick search may find it only with CPU memory: no plan is to be slower for more memory.
        """
        items = self._items(offloads=False)
        seconds = sum(self.least.values()) + sum(item.seconds for item in items)
        known = min(trial.seconds for trial in self.tried.values())
        if not items or seconds >= known or math.isinf(known):  # where nothing is known, all are searched
            return []
        member = member_with(self.member, cheapest(items, len(items)))
        alone = accelerators_alone(self._posed(member))
        solution = None if alone is None else attempt(alone, self.state.limits, None)
        return [] if solution is None else [Trial(member, solution.evaluation)]

    def every_block(self) -> tuple[Savings, float]:
        """The layers of stacks, each computed again, as torch.utils.checkpoint on each; the seconds at least.

        Where no layer is numbered, all submodules; none where that is forbidden.
        """
        segments = segments_of(self.member.annotator.capture) if self.recomputes else []
        numbered = [segment for segment in segments if segment.path.rpartition(".")[2].isdigit()]
        blocks = items_of(numbered or segments, self.problem.graph, self.least.__getitem__, None)
        paths = dict.fromkeys(block.path for block in blocks)
        return Savings(again=tuple(paths)), sum(block.seconds for block in blocks)

    def _try(self, count: int, savings: Savings) -> int:
        """Find a placement for so many segments; the bytes that lack then, below 0 if some are left."""
        member = member_with(self.member, savings)
        problem = self._posed(member)
        self._tried(count, member, problem)
        return self._lacking(problem)

    def _tried(self, count: int, member: Member, problem: Problem) -> None:
        if self.tried and self._resides:
            problem = accelerators_alone(problem) or problem
        trial = Trial(member, probe(problem, deadline=self.state.limits.deadline, climbs=True))
        self.tried[count] = min(trial, self.tried.get(count, trial), key=lambda one: one.seconds)

    def _lacking(self, problem: Problem) -> int:
        """Bytes that the devices that should hold the step lack together, were it on one of them."""
        roomiest = max(self.devices, key=lambda spec: spec.room)
        peak = evaluate(problem, on_one_device(problem, roomiest.key)).peak(roomiest.key)
        return peak.nbytes - sum(spec.room for spec in self.devices)

    def _posed(self, member: Member) -> Problem:
        return self.state.formulation.constrained(member.annotator, member.call)


def next_count(seconds: Mapping[int, float], guess: int, most: int) -> int:
    """The guess where it is beside the best count, else a count from there to the more promising side.

    Args:
        seconds: of the counts that were tried, 0 among them; infinite where nothing fits, as with too few.
        guess: how many should do.
        most: how many may be worth it.

    Returns:
        one that was tried where none is left; the guess where nothing fits, since CPU memory may lack too.

    Source: golden-section search (Kiefer, 1953), of a function that falls and then rises.
    """
    counts = sorted({*seconds, most} if most > max(seconds) else seconds)
    best = min(counts, key=lambda count: seconds.get(count, math.inf))
    at = counts.index(best)
    beside = counts[max(0, at - 1) : at] + counts[at + 1 : at + 2]
    near = min([best, *beside]) <= guess <= max([best, *beside])
    if math.isinf(seconds.get(best, math.inf)) or (near and guess not in seconds):
        return guess
    lacks = {count for count in seconds if math.isinf(seconds[count])}
    left = [count for count in beside if abs(count - best) > 1 or count not in seconds]
    side = min(left, key=lambda count: 0.0 if count in lacks else seconds.get(count, math.inf), default=best)
    step = (side - best) * _GOLDEN
    return best + (math.ceil(step) if step > 0 else math.floor(step))


def _enough(items: Sequence[Item], lacking: Mapping[int, int]) -> int:
    """How many of the cheapest items should do, by the bytes that lack with some counts; 0 if none may."""
    known = {len(items): lacking[0] - freed(items, len(items)), **lacking}
    if known[len(items)] > 0:
        return 0
    counts = sorted(known)
    nbytes = np.interp(0, [-known[count] for count in counts], [freed(items, count) for count in counts])
    return enough(items, float(nbytes))


def _least_seconds(problem: Problem) -> dict[str, float]:
    """The least time of each operation by itself, with the way of its results to the caller."""
    graph, host = problem.graph, problem.host
    computing = problem.topology.computing
    returned = set(graph.outputs) if problem.returns_to_host else set()
    least = dict[str, float]()
    for name, operation in graph.operations.items():
        sizes = [graph.values[n].copy_bytes for n in operation.outputs if n in returned]
        least[name] = min(
            problem.clock(spec)[name]
            + sum(problem.topology.link(spec.key, host).seconds(n) for n in sizes if spec.key != host)
            for spec in computing
        )
    return least


def member_with(member: Member, savings: Savings) -> Member:
    """The same call, with less saved."""
    capture = copied(member.annotator.capture)
    segments = segments_of(capture)
    again = {*savings.selectively, *savings.again}
    recompute(capture, (one for one in segments if one.path in again), savings.selectively)
    offload(capture, (one for one in segments if one.path in savings.offloaded))
    return replace(member, annotator=member.annotator.of(capture))
