"""Choose which activations a training step saves, recomputes or moves to CPU memory: the fastest that fits.

A segment (:mod:`graphplan.passes.training.segments`) saves less in whole or in part. Two steps are tried
first: the step that saves everything, and the step that recomputes every block, unless its operations alone
take longer than the first. Then the cheapest segments save less (:mod:`graphplan.passes.training.knapsack`):
as many as free the missing bytes (false position), or a count next to the best one (golden-section search).
A quick search places each step. If the accelerators hold the step that saves everything, in little more than
the least time of its operations, nothing else is tried; else it may fit the fastest of them with less saved.
If they hold neither that nor the step that recomputes every block, a loss over large logits is computed in
parts from then on (:mod:`graphplan.passes.training.loss_parts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from graphplan.compiler.compile_state import Choice, CompileState, Trial, with_optimizer
from graphplan.compiler.fixed_point import place_calls
from graphplan.compiler.formulation import Member
from graphplan.compiler.slicing_choice import names_in_constraints, place_whole_or_sliced
from graphplan.errors import InfeasibleError
from graphplan.passes.frontend.slicing import copied
from graphplan.passes.placement.certificate import Bound, Scope, certify
from graphplan.passes.placement.driver import accelerators_alone, attempt, probe
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.params import PARAMS
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import on_one_device
from graphplan.passes.training.knapsack import (
    Item,
    Savings,
    cheapest,
    count_to_free,
    freed_bytes,
    items_of,
    sorted_by_price,
)
from graphplan.passes.training.loss_parts import LossParts, count_parts, loss_in_parts
from graphplan.passes.training.offload import offload
from graphplan.passes.training.recompute import recompute
from graphplan.passes.training.segments import segments_of

_STEPS = 4  # counts of segments to try besides none and all
_NEAR = 0.05  # relative: a step this near to the least time is not tried with less saved
_GOLDEN = 0.382  # golden-section search: fraction of the interval to step
_EACH_ALONE = "each operation where it takes least, whatever is saved"


def place_step(state: CompileState) -> list[Choice]:
    """Pass: place the calls; a single training step saves less if only that fits, or if it is faster.

    Raises:
        InfeasibleError: no placement fits.
    """
    if len(state.members) > 1 or state.members[0].annotator.capture.step is None:
        return place_whole_or_sliced(state)
    search = _SavingsSearch(state)
    failure: InfeasibleError | None = None
    for trial in search.trials():
        try:
            placed = search.place(trial)
        except InfeasibleError as error:  # with its transfers, operations need more memory
            failure = failure or error.with_traceback(None)
            continue
        return search.faster_with_whole_loss(trial, placed)
    assert failure is not None
    raise failure


class _SavingsSearch:
    """The search for the values that a training step, the only member of the state, saves.

    Attributes:
        tried: number of segments that save less -> its trial.
        missing: the same number -> bytes that its step lacks, as in :meth:`_missing_bytes`.
        fastest: operation -> its seconds on its fastest device.
        whole: trials with the loss as it is, if it is computed in parts.
        devices: devices that should hold the step: all accelerators, or the fastest if all hold it unchanged.
    """

    def __init__(self, state: CompileState) -> None:
        self.state, (self.member,) = state, state.members
        self.tried: dict[int, Trial] = {}
        self.missing: dict[int, int] = {}
        self.whole: list[Trial] = []
        self.problem = self.state.formulation.constrained(self.member)
        self.fastest = _least_seconds(self.problem)
        self.least_seconds = sum(self.fastest.values())
        options, topology = state.formulation.options, self.problem.topology
        assert options.training is not None
        self.devices = topology.accelerators or topology.computing
        self.recomputes = options.training.recompute
        able = topology.cpu is not None and bool(topology.accelerators)
        self.offloads = able and options.training.offload_activations and options.constraints.offload

    def trials(self) -> list[Trial]:
        """Return the steps to place, the fastest first."""
        self.tried[0] = self._probed(self.member, self.problem)
        if self._resides:
            if self._is_near:
                return [self.tried[0]]
            fastest = max(spec.flops for spec in self.devices)
            self.devices = [spec for spec in self.devices if spec.flops == fastest]
        elif self.recomputes and not self._is_near:
            self._compute_loss_in_parts()
        items = self._items()
        if items and not (self._resides and self._is_near):
            self._search(items)
        trials = list(self.tried.values())
        if not self._resides:
            trials += self._searched_alone()
        # quick searches do not tell apart what is nearer: a loss in parts, with its own time, must be faster
        seconds = [(trial.seconds * (1 + _NEAR if self.whole else 1), trial) for trial in trials]
        seconds += [(trial.seconds, trial) for trial in self.whole]
        feasible = [trial for _, trial in sorted(seconds, key=lambda pair: pair[0]) if trial.evaluation]
        if feasible:
            return feasible
        # nothing fits: save as little as the caller allows, so that the error names the smallest budgets
        paths = tuple(dict.fromkeys(item.path for item in items))
        savings = Savings(fully=paths if self.recomputes else (), offloaded=paths if self.offloads else ())
        return [Trial(member_with(self.member, savings), None)]

    def place(self, trial: Trial) -> list[Choice]:
        """Return the trial's quick placement, or that of a full search if it is faster.

        Raises:
            InfeasibleError: the step does not fit once its transfers are counted.
        """
        state = replace(self.state, members=[trial.member])
        if trial.evaluation is not None and self.large and self.bound.seconds:
            return place_calls(state, [certify(trial.evaluation, self.bound)])
        (choice,) = place_whole_or_sliced(state)
        if 0 < self.bound.seconds < choice.solution.bound.seconds:  # the latter is of this step alone
            choice = choice.with_bound(self.bound)
        if trial.evaluation is None or with_optimizer(choice.solution.evaluation) <= trial.seconds:
            return [choice]
        return place_calls(state, [certify(trial.evaluation, choice.solution.bound)])

    @property
    def large(self) -> bool:
        """Whether the default effort is at its maximum, without a deadline: the quick search must suffice."""
        operations = self.problem.graph.operations
        return self.state.limits.deadline is None and PARAMS.visits(len(operations)) >= PARAMS.most_visits

    @cached_property
    def bound(self) -> Bound:
        """A lower bound that also holds for steps that save less, if allowed: all run these operations."""
        if not (self.recomputes or self.offloads):
            return Bound()
        return Bound(self.least_seconds, _EACH_ALONE, Scope.ANY)

    def faster_with_whole_loss(self, trial: Trial, placed: list[Choice]) -> list[Choice]:
        """Return the placement of the trial, or, if the step is not large, a faster one with a whole loss."""
        best = min(self.whole, key=lambda other: other.seconds, default=None)
        if best is None or best.evaluation is None or self.large or any(trial is one for one in self.whole):
            return placed
        with suppress(InfeasibleError):
            other = self.place(best)
            return min(placed, other, key=lambda choices: with_optimizer(choices[0].solution.evaluation))
        return placed

    def _compute_loss_in_parts(self) -> None:
        """Compute the loss in parts from here on, unless every block recomputed suffices."""
        count = count_parts(self.member.annotator.capture, names_in_constraints(self.state.formulation))
        member = with_loss_in_parts(self.member, LossParts(count, self.offloads))
        if member is self.member:
            return
        self._try_every_block(len(self._items()))
        if self._resides:
            return
        self.whole = list(self.tried.values())
        self.member, self.problem = member, self.state.formulation.constrained(member)
        self.fastest = _least_seconds(self.problem)
        self.tried, self.missing = {0: self._probed(member, self.problem)}, {}

    def _try_every_block(self, count: int) -> None:
        savings, seconds = self.every_block()
        if seconds and self.least_seconds + seconds < self.tried[0].seconds:
            self._try(count, savings)

    def _items(self, *, offloads: bool = True) -> list[Item]:
        """Return the options to save less, priced for the fastest accelerator."""
        accelerators = self.problem.topology.accelerators
        clock = self.problem.clock(max(accelerators or self.problem.topology.devices, key=lambda s: s.flops))
        return items_of(
            segments_of(self.member.annotator.capture),
            self.problem.graph,
            clock.__getitem__ if self.recomputes else None,
            self._copy_seconds if self.offloads and offloads else None,
        )

    def _copy_seconds(self, nbytes: int) -> float:
        """Return the seconds to copy a value to the CPU and back, over the fastest link."""
        topology = self.problem.topology
        cpu, keys = topology.cpu, [spec.key for spec in topology.accelerators]
        assert cpu is not None
        return min(
            topology.link(k, cpu).seconds(nbytes) + topology.link(cpu, k).seconds(nbytes) for k in keys
        )

    @property
    def _best(self) -> Trial:
        """The fastest trial so far; one without a placement if nothing fits."""
        return min(self.tried.values(), key=lambda trial: trial.seconds)

    @property
    def _is_near(self) -> bool:
        """Whether the step that saves everything takes little more than the least time of its operations."""
        evaluation = self.tried[0].evaluation
        return evaluation is not None and evaluation.seconds <= (1 + _NEAR) * self.least_seconds

    @property
    def _resides(self) -> bool:
        """Whether the fastest trial so far keeps everything on the accelerators."""
        best, cpu = self._best.evaluation, self.problem.topology.cpu
        if best is None or best.schedule.prefetch_buffers:
            return False
        return not any(run.device == cpu for run in best.schedule.runs())

    def _useful_count(self, items: Sequence[Item]) -> int:
        """Return the number of cheapest items with which the step may be faster than the unchanged one."""
        count, seconds = 0, self.least_seconds
        for item in sorted_by_price(items):
            seconds += item.seconds
            if seconds >= self.tried[0].seconds:
                break
            count += 1
        return count

    def _search(self, items: Sequence[Item]) -> None:
        """Recompute every block; then try the count that should fit, and counts next to the best one.

        Try all segments too if the accelerators do not hold the step with every block recomputed: others may
        free more. A large step that streams weights has slow trials: it skips these, and tries fewer counts.
        Once the fastest trial is on the accelerators alone, further trials use no CPU memory either.
        """
        segment_count, streams = len(items), self.tried[0].evaluation is not None
        self.missing[0] = self._missing_bytes(self.problem)
        if segment_count not in self.tried:
            self._try_every_block(segment_count)
        if not self._resides and (not streams or (segment_count in self.tried and not self.large)):
            self._try(segment_count, cheapest(items, segment_count))
        if self.missing.get(segment_count, 0) > 0 and self._best.evaluation is None:
            return
        useful, tries = self._useful_count(items), _STEPS
        if streams and self.large and not self._resides:
            ends_streaming = 0 < self._guess(items) <= useful
            tries = _STEPS // 2 if ends_streaming else 1
        for _ in range(tries):
            seconds = {count: trial.seconds for count, trial in self.tried.items()}
            count = next_count(seconds, self._guess(items), useful)
            if count in self.tried:
                break
            self._try(count, cheapest(items, count))

    def _searched_alone(self) -> list[Trial]:
        """Place the step that recomputes most by a full search without the CPU, if that may be faster.

        The quick search may find only placements that use the CPU; more memory must not make a plan slower.
        """
        items = self._items(offloads=False)
        seconds = self.least_seconds + sum(item.seconds for item in items)
        known = self._best.seconds
        if not items or seconds >= known or math.isinf(known):  # if no trial fits, place() searches in full
            return []
        member = member_with(self.member, cheapest(items, len(items)))
        alone = accelerators_alone(self.state.formulation.constrained(member))
        solution = None if alone is None else attempt(alone, self.state.limits, None)
        return [] if solution is None else [Trial(member, solution.evaluation)]

    def every_block(self) -> tuple[Savings, float]:
        """Return the savings that recompute each numbered layer, and their least seconds.

        This is torch.utils.checkpoint on each layer; on each submodule if no layer is numbered. Nothing is
        recomputed if the caller forbids it.
        """
        segments = segments_of(self.member.annotator.capture) if self.recomputes else []
        numbered = [segment for segment in segments if segment.path.rpartition(".")[2].isdigit()]
        blocks = items_of(numbered or segments, self.problem.graph, self.fastest.__getitem__, None)
        paths = dict.fromkeys(block.path for block in blocks)
        return Savings(fully=tuple(paths)), sum(block.seconds for block in blocks)

    def _guess(self, items: Sequence[Item]) -> int:
        """Return how many of the cheapest items should free enough, by interpolation; 0 if all do not."""
        freed = self.problem.graph.in_flight * freed_bytes(items, len(items))
        missing = {len(items): self.missing[0] - freed, **self.missing}
        if missing[len(items)] > 0:
            return 0
        counts = sorted(missing)
        nbytes = np.interp(
            0, [-missing[count] for count in counts], [freed_bytes(items, count) for count in counts]
        )
        return count_to_free(items, float(nbytes))

    def _try(self, count: int, savings: Savings) -> None:
        """Probe the step with these savings, of so many segments."""
        member = member_with(self.member, savings)
        problem = self.state.formulation.constrained(member)
        trial = self._probed(member, problem)
        self.tried[count] = min(trial, self.tried.get(count, trial), key=lambda candidate: candidate.seconds)
        self.missing[count] = self._missing_bytes(problem)

    def _probed(self, member: Member, problem: Problem) -> Trial:
        if self.tried and self._resides:
            problem = accelerators_alone(problem) or problem
        return Trial(member, probe(problem, deadline=self.state.limits.deadline, climbs=True))

    def _missing_bytes(self, problem: Problem) -> int:
        """Return the bytes by which the step's peak on one device exceeds the room of all ``devices``."""
        roomiest = max(self.devices, key=lambda spec: spec.room)
        peak = evaluate(problem, on_one_device(problem, roomiest.key)).peak(roomiest.key)
        return peak.nbytes - sum(spec.room for spec in self.devices)


def next_count(seconds: Mapping[int, float], guess: int, largest: int) -> int:
    """Return the guess if it is next to the best count, else a count towards the more promising side.

    Args:
        seconds: count that was tried (0 is one) -> seconds; infinite where nothing fits, as with too few.
        guess: count that should free enough bytes.
        largest: largest count that may be faster.

    Returns:
        a count that was tried if none is left; the guess if nothing fits, since CPU memory may lack too.

    Source: golden-section search (Kiefer, 1953), of a function that falls and then rises.
    """
    counts = sorted({*seconds, largest} if largest > max(seconds) else seconds)
    best = min(counts, key=lambda count: seconds.get(count, math.inf))
    index = counts.index(best)
    neighbours = counts[max(0, index - 1) : index] + counts[index + 1 : index + 2]
    guess_near = min([best, *neighbours]) <= guess <= max([best, *neighbours])
    if math.isinf(seconds.get(best, math.inf)) or (guess_near and guess not in seconds):
        return guess
    lacks = {count for count in seconds if math.isinf(seconds[count])}
    sides = [count for count in neighbours if abs(count - best) > 1 or count not in seconds]
    side = min(sides, key=lambda count: 0.0 if count in lacks else seconds.get(count, math.inf), default=best)
    step = (side - best) * _GOLDEN
    return best + (math.ceil(step) if step > 0 else math.floor(step))


def _least_seconds(problem: Problem) -> dict[str, float]:
    """Return each operation's least seconds on any device, its results' transfer to the caller included."""
    graph, host = problem.graph, problem.host
    computing = problem.topology.computing
    returned = set(graph.outputs) if problem.returns_to_host else set()
    seconds = dict[str, float]()
    for name, operation in graph.operations.items():
        sizes = [graph.values[n].copy_bytes for n in operation.outputs if n in returned]
        seconds[name] = min(
            problem.clock(spec)[name]
            + sum(problem.topology.link(spec.key, host).seconds(n) for n in sizes if spec.key != host)
            for spec in computing
        )
    return seconds


def with_loss_in_parts(member: Member, parts: LossParts) -> Member:
    """Return the same call, its loss computed in parts if it can be."""
    annotator = member.annotator
    capture = loss_in_parts(annotator.capture, parts)
    return member if capture is annotator.capture else replace(member, annotator=annotator.of(capture))


def member_with(member: Member, savings: Savings) -> Member:
    """Return the same call with these savings, if there are any: segments recomputed or offloaded."""
    if savings == Savings():
        return member
    capture = copied(member.annotator.capture)
    segments = segments_of(capture)
    recomputed = {*savings.selectively, *savings.fully}
    recompute(capture, (segment for segment in segments if segment.path in recomputed), savings.selectively)
    offload(capture, (segment for segment in segments if segment.path in savings.offloaded))
    return replace(member, annotator=member.annotator.of(capture))
