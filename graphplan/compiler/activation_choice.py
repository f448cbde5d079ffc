"""Keep what a training step saves, compute it again, or move it to CPU memory: the fastest that fits.

Segments are treated whole (:mod:`graphplan.passes.training.segments`), the cheapest of them first
(:mod:`graphplan.passes.training.knapsack`). As many are tried as free the bytes that are lacking, corrected
by the bytes that are lacking then (secant method); and, by a bisection of estimated seconds, between what was
tried. A quick search places each step. Where the accelerators hold the step as it is, nothing else is tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphplan.compiler.compile_state import CompileState, Member
from graphplan.compiler.slicing_choice import place_whole_or_sliced
from graphplan.errors import InfeasibleError
from graphplan.passes.frontend.slicing import copied
from graphplan.passes.placement.driver import probe
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.problem import Problem, cpu_key
from graphplan.passes.placement.residence import reside
from graphplan.passes.training.knapsack import Item, Savings, cheapest, items_of
from graphplan.passes.training.offload import offload
from graphplan.passes.training.recompute import recompute
from graphplan.passes.training.segments import segments_of

_STEPS = 3  # shares that are tried
_EACH_ALONE = "each operation where it takes least, whatever is saved"


def place_step(state: CompileState) -> CompileState:
    """Pass: place the calls; a training step alone with less saved, where that is faster, or fits at all.

    Raises:
        InfeasibleError: no placement fits.
    """
    if len(state.members) > 1 or state.members[0].annotator.capture.step is None:
        return place_whole_or_sliced(state)
    choice = _Choice(state)
    lacking: InfeasibleError | None = None
    for member in choice.members():
        try:
            return choice.with_bound(place_whole_or_sliced(replace(state, members=[member])))
        except InfeasibleError as error:  # the moves that a placement brings made operations take more
            lacking = lacking or error.with_traceback(None)
    assert lacking is not None
    raise lacking


@dataclass
class _Choice:
    """Of how much a step saves.

    Attributes:
        state: with the step as its only member.
        found: share of what could be freed -> seconds that a quick search finds, and the step.
    """

    state: CompileState
    found: dict[float, tuple[float, Member]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.member,) = self.state.members
        self.problem = self._posed(self.member)
        options, topology = self.state.formulation.options, self.problem.topology
        assert options.training is not None
        self.recomputes = options.training.recompute
        self.offloads = options.training.offload_activations and options.constraints.offload
        self.offloads &= cpu_key(topology) is not None
        self.offloads &= any(spec.is_accelerator for spec in topology.devices)

    def members(self) -> list[Member]:
        """Steps to place, those first that a quick search finds the fastest placements of."""
        if self._fits_as_it_is():
            return [self.member]
        items = self._items()
        if items:
            self._search(items)
        found = sorted((one for one in self.found.values() if math.isfinite(one[0])), key=lambda one: one[0])
        if found:
            return [member for _, member in found]
        # the most that the caller allows to free, whose budgets an error is to name
        paths = tuple(item.path for item in items)
        savings = Savings(paths if self.recomputes else (), paths if self.offloads else ())
        return [member_with(self.member, savings)]

    def _items(self) -> list[Item]:
        """What can save less, priced for the fastest accelerator."""
        accelerators = [spec for spec in self.problem.topology.devices if spec.is_accelerator]
        clock = self.problem.clock(max(accelerators or self.problem.topology.devices, key=lambda s: s.flops))
        return items_of(
            segments_of(self.member.annotator.capture),
            self.problem.graph,
            clock.__getitem__ if self.recomputes else None,
            self._copy_seconds if self.offloads else None,
        )

    def _copy_seconds(self, nbytes: int) -> float:
        """Of a value from the accelerator that is nearest to the CPU, and back."""
        topology = self.problem.topology
        cpu, keys = cpu_key(topology), [spec.key for spec in topology.devices if spec.is_accelerator]
        assert cpu is not None
        return min(
            topology.link(k, cpu).seconds(nbytes) + topology.link(cpu, k).seconds(nbytes) for k in keys
        )

    def with_bound(self, state: CompileState) -> CompileState:
        """The placement, with a bound that holds for steps that save less, too: all run these operations."""
        (choice,) = state.choices
        if not (self.recomputes or self.offloads):
            return state
        least = _least_seconds(self.problem)
        if least >= choice.solution.lower_bound:
            return state
        solution = replace(choice.solution, lower_bound=least, proof=_EACH_ALONE)
        return replace(state, choices=[replace(choice, solution=solution)])

    def _fits_as_it_is(self) -> bool:
        """Whether the accelerators hold the step: anything else takes longer."""
        best = self._probe(self.problem)
        self.found[0.0] = (math.inf if best is None else best.seconds), self.member
        if best is None or best.schedule.prefetch_buffers:
            return False
        cpu = cpu_key(self.problem.topology)
        return not any(run.device == cpu for run in best.schedule.runs())

    def _search(self, items: Sequence[Item]) -> None:
        """Try what should be enough, then what it lacks or has too much of, then beside the fastest."""
        whole = sum(item.nbytes for item in items)
        share = self._lacking(self.problem) / whole
        for _ in range(_STEPS):
            share = min(share, 1.0)
            if share <= 0 or share in self.found:
                share = self._between()
            share += self._try(items, share) / whole
        if not any(math.isfinite(seconds) for seconds, _ in self.found.values()):
            self._try(items, 1.0)

    def _between(self) -> float:
        """The middle between the best share and the better one beside it."""
        shares = sorted({*self.found, 1.0})
        seconds = {share: self.found[share][0] if share in self.found else math.inf for share in shares}
        best = min(shares, key=seconds.__getitem__)
        at = shares.index(best)
        beside = shares[max(0, at - 1) : at] + shares[at + 1 : at + 2]
        return (best + min(beside, key=seconds.__getitem__)) / 2

    def _try(self, items: Sequence[Item], share: float) -> int:
        """Find a placement for this share; the bytes that are lacking then, below 0 where some are left."""
        member = member_with(self.member, cheapest(items, share))
        problem = self._posed(member)
        best = self._probe(problem)
        self.found[share] = (math.inf if best is None else best.seconds), member
        return self._lacking(problem)

    def _lacking(self, problem: Problem) -> int:
        """Bytes that all accelerators together lack, were the step on one of them."""
        computing = [spec for spec in problem.topology.devices if spec.computes]
        devices = [spec for spec in computing if spec.is_accelerator] or computing
        roomiest = max(devices, key=lambda spec: spec.room)
        everything = reside(problem, dict.fromkeys(problem.graph.operations, roomiest.key))
        peak = evaluate(problem, everything).memory.peaks[roomiest.key]
        return peak.nbytes - sum(spec.room for spec in devices)

    def _probe(self, problem: Problem) -> Evaluation | None:
        return probe(problem, deadline=self.state.limits.deadline)

    def _posed(self, member: Member) -> Problem:
        return self.state.formulation.constrained(member.annotator, member.call)


def _least_seconds(problem: Problem) -> float:
    """The least time of each operation by itself, with the way of its results to the caller."""
    graph, host = problem.graph, problem.host
    computing = [spec for spec in problem.topology.devices if spec.computes]
    returned = set(graph.outputs) if problem.returns_to_host else set()
    least = 0.0
    for name, operation in graph.operations.items():
        sizes = [graph.values[n].copy_bytes for n in operation.outputs if n in returned]
        least += min(
            problem.clock(spec)[name]
            + sum(problem.topology.link(spec.key, host).seconds(n) for n in sizes if spec.key != host)
            for spec in computing
        )
    return least


def member_with(member: Member, savings: Savings) -> Member:
    """The same call, with less saved."""
    capture = copied(member.annotator.capture)
    segments = segments_of(capture)
    recompute(capture, savings.again, segments)
    offload(capture, savings.offloaded, segments)
    return replace(member, annotator=member.annotator.of(capture))
