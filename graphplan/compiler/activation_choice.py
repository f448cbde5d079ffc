"""Keep what a training step saves, compute it again, or move it to CPU memory: the fastest that fits.

Segments are treated whole (:mod:`graphplan.passes.training.segments`), and shares of them, spread evenly, are
tried by a quick search each. Where the accelerators hold the step as it is, nothing else is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphplan.compiler.compile_state import CompileState, Member
from graphplan.compiler.slicing_choice import place_whole_or_sliced
from graphplan.errors import InfeasibleError
from graphplan.passes.frontend.slicing import copied
from graphplan.passes.placement.driver import probe
from graphplan.passes.placement.evaluate import Evaluation
from graphplan.passes.placement.problem import cpu_key
from graphplan.passes.training.offload import offload
from graphplan.passes.training.recompute import recompute
from graphplan.passes.training.segments import segments_of, spread

_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the segments


@dataclass(frozen=True, slots=True)
class Savings:
    """What a step does to save less: paths of the segments that it computes again, and that it offloads."""

    again: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


def place_step(state: CompileState) -> CompileState:
    """Pass: place the calls; a training step alone with less saved, where that is faster, or fits at all.

    Raises:
        InfeasibleError: no placement fits.
    """
    if len(state.members) > 1 or state.members[0].annotator.capture.step is None:
        return place_whole_or_sliced(state)
    found = sorted(_probed(state), key=lambda one: one[0])
    lacking: InfeasibleError | None = None
    for _, member in found:
        try:
            placed = place_whole_or_sliced(replace(state, members=[member]))
            return placed if member is state.members[0] else _bound_of_variant(placed)
        except InfeasibleError as error:  # the moves that a placement brings made operations take more
            lacking = lacking or error
    if lacking is not None:
        raise lacking
    return _bound_of_variant(place_whole_or_sliced(replace(state, members=[_smallest(state)])))


def _bound_of_variant(state: CompileState) -> CompileState:
    """The placement, whose bound holds for steps that recompute and offload the same, and says so."""
    (choice,) = state.choices
    proof = f"{choice.solution.proof}, of steps that save the same"
    return replace(state, choices=[replace(choice, solution=replace(choice.solution, proof=proof))])


def _probed(state: CompileState) -> Iterator[tuple[float, Member]]:
    """Seconds that a quick search finds, of each way that fits."""
    (member,) = state.members
    best = _probe(state, member)
    if best is not None:
        yield best.seconds, member
        if not best.schedule.prefetch_buffers and not _computes_on_cpu(state, best):
            return  # the accelerators hold it: anything else takes longer
    for ways in _ways(state, member):
        for savings in ways:
            other = member_with(member, savings)
            found = _probe(state, other)
            if found is None:
                break  # a smaller share saves less
            yield found.seconds, other


def _probe(state: CompileState, member: Member) -> Evaluation | None:
    problem = state.formulation.constrained(member.annotator, member.call)
    return probe(problem, deadline=state.limits.deadline)


def _computes_on_cpu(state: CompileState, found: Evaluation) -> bool:
    cpu = cpu_key(state.formulation.topology)
    return any(run.device == cpu for run in found.schedule.runs())


def _ways(state: CompileState, member: Member) -> Iterator[list[Savings]]:
    """Savings to try, each list from the most to the least."""
    training, topology = state.formulation.options.training, state.formulation.topology
    assert training is not None
    segments = segments_of(member.annotator.capture)
    constraints = state.formulation.options.constraints
    offloads = training.offload_activations and cpu_key(topology) is not None and constraints.offload
    offloads &= any(spec.is_accelerator for spec in topology.devices)
    shares = [tuple(one.path for one in spread(segments, share)) for share in _SHARES]
    shares = [share for share in dict.fromkeys(shares) if share]
    if training.recompute:
        yield [Savings(again=share) for share in shares]
    if offloads:
        yield [Savings(offloaded=share) for share in shares]
    if training.recompute and offloads and shares:  # what is read by those that are computed again
        yield [Savings(again=shares[0], offloaded=shares[0])]


def _smallest(state: CompileState) -> Member:
    """The step with the most savings that the caller allows, whose budgets an error is to name."""
    (member,) = state.members
    ways = list(_ways(state, member))
    return member_with(member, ways[-1][0]) if ways else member


def member_with(member: Member, savings: Savings) -> Member:
    """The same call, with less saved."""
    capture = copied(member.annotator.capture)
    segments = segments_of(capture)
    recompute(capture, savings.again, segments)
    offload(capture, savings.offloaded, segments)
    return replace(member, annotator=member.annotator.of(capture))
