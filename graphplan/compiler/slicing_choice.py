"""Place a call with its weights whole and, where no accelerator holds one of them, in parts: the faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphplan.compiler.compile_state import CompileState, Member, in_parts
from graphplan.compiler.fixed_point import place_calls
from graphplan.compiler.formulation import Formulation
from graphplan.compiler.oversized_weights import find_oversized, offered_parts
from graphplan.errors import InfeasibleError, readable_bytes
from graphplan.passes.frontend.slicing import is_sliceable
from graphplan.passes.placement.driver import probe
from graphplan.passes.placement.problem import cpu_key

_CROWDED = 0.4  # of what an accelerator has for a weight: larger ones are sliced where nothing fits whole
_HOPE = 1.1  # a probe of more than so many times the seconds of another plan is not worth refining


@dataclass(frozen=True, slots=True)
class _Probed:
    """A call in some slices, and the seconds of a placement of it that was found without much work."""

    state: CompileState
    seconds: float


def reuse_slices(state: CompileState) -> CompileState:
    """Pass: weights that an earlier plan has sliced are in the same parts again."""
    return replace(state, members=[_sliced_as_before(state.formulation, one) for one in state.members])


def place_whole_or_sliced(state: CompileState) -> CompileState:
    """Pass: place the calls; one alone with its oversized weights in parts, where that is faster.

    Raises:
        InfeasibleError: no placement fits.
    """
    if len(state.members) > 1 or state.formulation.committed.homes is not None:
        return place_calls(state)  # later plans find weights in the parts that they have
    sliced = _best_slicing(state)
    if sliced is None:
        return _whole_or_crowded(state)
    whole = None
    if probe(state.formulation.constrained(state.members[0].annotator, state.members[0].call)) is not None:
        whole = place_calls(replace(state, limits=state.limits.until(0.5)))
        if whole.choices[0].seconds * _HOPE < sliced.seconds:
            return whole
    try:
        found = place_calls(sliced.state)
    except InfeasibleError:  # the moves that slicing brings made operations take more
        return whole or place_calls(state)
    return found if whole is None else _faster(whole, found)


def _whole_or_crowded(state: CompileState) -> CompileState:
    """Place the weights whole; where that fails, those in parts that leave nothing for the rest."""
    try:
        return place_calls(state)
    except InfeasibleError as error:
        sliced = _best_slicing(state, share=_CROWDED)
        if sliced is None:
            raise _with_hint(state, error) from None
    return place_calls(sliced.state)


def _sliced_as_before(formulation: Formulation, member: Member) -> Member:
    """The capture with the parts that earlier plans have placed, of weights that it can read so."""
    capture = member.annotator.capture
    here = [part for part in formulation.committed.parts if is_sliceable(capture, part.weight)]
    return in_parts(member, here) if here else member


def _best_slicing(state: CompileState, *, share: float = 1.0) -> _Probed | None:
    """Oversized weights in as many parts as seem best; None where no number of parts would do."""
    formulation, (member,) = state.formulation, state.members
    capture, weights = member.annotator.capture, member.annotator.weights
    problem = formulation.constrained(member.annotator, member.call)
    oversized = [
        one
        for one in find_oversized(problem, _named(formulation), share=share)
        if is_sliceable(capture, one.weight.name) and weights.has_rows(one.weight.name)
    ]
    best: _Probed | None = None
    for parts in offered_parts(oversized):
        sliced = in_parts(member, parts)
        found = probe(formulation.constrained(sliced.annotator, member.call))
        if found is not None and best is not None and found.seconds >= best.seconds:
            break
        if found is not None:
            best = _Probed(replace(state, members=[sliced]), found.seconds)
    return best


def _with_hint(state: CompileState, error: InfeasibleError) -> InfeasibleError:
    """The error, and where a weight that no accelerator holds could be sliced, if it might not be here."""
    (member,) = state.members
    problem = state.formulation.constrained(member.annotator, member.call)
    rooms = [spec.room for spec in problem.topology.devices if spec.is_accelerator]
    if not rooms or (problem.offload and cpu_key(problem.topology) is not None):
        return error
    weights = problem.graph.weights.values()
    large = [w for w in weights if w.nbytes > max(rooms) and is_sliceable(member.annotator.capture, w.name)]
    if not large:
        return error
    return InfeasibleError(
        f"{error}. {large[0].name!r} ({readable_bytes(large[0].nbytes)}) is larger than what any accelerator "
        "may hold. It can be computed in slices if the whole may reside on the CPU: add a budget for 'cpu' "
        "to max_memory, and leave out offload=False",
        needed=error.needed,
        available=error.available,
        operation=error.operation,
        device=error.device,
    )


def _named(formulation: Formulation) -> set[str]:
    constraints = formulation.options.constraints
    return {*constraints.pin, *(name for group in constraints.groups for name in group)}


def _faster(whole: CompileState, sliced: CompileState) -> CompileState:
    """The faster of two placements, with the lower of their bounds, which holds for both graphs."""
    best = min(whole, sliced, key=lambda state: state.choices[0].seconds)
    least = min(whole, sliced, key=lambda state: state.choices[0].solution.lower_bound)
    bound = least.choices[0].solution
    proof = bound.proof + (", with weights sliced" if least is sliced else "")
    solution = replace(best.choices[0].solution, lower_bound=bound.lower_bound, proof=proof)
    return replace(best, choices=[replace(best.choices[0], solution=solution)])
