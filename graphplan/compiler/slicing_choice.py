"""Place a call with its weights whole and, where no accelerator holds one of them, in parts: the faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphplan.capture.signature import BoundCall
from graphplan.compiler.fixed_point import Choice, solve
from graphplan.compiler.formulation import Formulation
from graphplan.compiler.oversized_weights import find_oversized, offered_parts
from graphplan.errors import InfeasibleError, readable_bytes
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.slicing import is_sliceable, slice_weights
from graphplan.passes.placement.driver import probe
from graphplan.passes.placement.limits import Limits
from graphplan.passes.placement.problem import cpu_key

__all__ = ["choose"]

_CROWDED = 0.4  # of what an accelerator has for a weight: larger ones are sliced where nothing fits whole
_HOPE = 1.1  # a probe of more than so many times the seconds of another plan is not worth refining


@dataclass(frozen=True, slots=True)
class _Probed:
    """A capture, annotated, and the seconds of a placement of it that was found without much work."""

    annotator: Annotator
    seconds: float


def choose(formulation: Formulation, annotator: Annotator, call: BoundCall | None) -> Choice:
    """Place a call; weights that an earlier plan has sliced are in the same parts again.

    Raises:
        InfeasibleError: no placement fits.
    """
    annotator = _sliced_as_before(formulation, annotator)
    limits = Limits.within(formulation.options.time_limit)
    first = formulation.committed.homes is None  # later plans find weights in the parts that they have
    sliced = _best_slicing(formulation, annotator, call) if first else None
    if sliced is None:
        try:
            return solve(formulation, annotator, call, limits)
        except InfeasibleError as error:
            # a weight may fit by itself, and leave nothing for the rest
            sliced = _best_slicing(formulation, annotator, call, share=_CROWDED) if first else None
            if sliced is None:
                raise _with_hint(formulation, annotator, call, error) from None
        return solve(formulation, sliced.annotator, call, limits)
    whole = None
    if probe(formulation.constrained(annotator, call)) is not None:
        whole = solve(formulation, annotator, call, limits.until(0.5))
        if whole.seconds * _HOPE < sliced.seconds:
            return whole
    try:
        found = solve(formulation, sliced.annotator, call, limits)
    except InfeasibleError:  # the moves that slicing brings made operations take more
        return whole or solve(formulation, annotator, call, limits)
    return found if whole is None else _faster(whole, found)


def _sliced_as_before(formulation: Formulation, annotator: Annotator) -> Annotator:
    """The capture with the parts that earlier plans have placed, of weights that it can read so."""
    known = formulation.committed.parts
    here = [part for part in known if is_sliceable(annotator.capture, part.weight)]
    return annotator.of(slice_weights(annotator.capture, here)) if here else annotator


def _best_slicing(
    formulation: Formulation, annotator: Annotator, call: BoundCall | None, *, share: float = 1.0
) -> _Probed | None:
    """Oversized weights in as many parts as seem best; None where no number of parts would do."""
    capture, weights = annotator.capture, annotator.weights
    oversized = [
        one
        for one in find_oversized(formulation.constrained(annotator, call), _named(formulation), share=share)
        if is_sliceable(capture, one.weight.name) and weights.has_rows(one.weight.name)
    ]
    best: _Probed | None = None
    for parts in offered_parts(oversized):
        sliced = annotator.of(slice_weights(capture, parts))
        found = probe(formulation.constrained(sliced, call))
        if found is not None and best is not None and found.seconds >= best.seconds:
            break
        if found is not None:
            best = _Probed(sliced, found.seconds)
    return best


def _with_hint(
    formulation: Formulation, annotator: Annotator, call: BoundCall | None, error: InfeasibleError
) -> InfeasibleError:
    """The error, and where a weight that no accelerator holds could be sliced, if it might not be here."""
    problem = formulation.constrained(annotator, call)
    rooms = [spec.room for spec in problem.topology.devices if spec.is_accelerator]
    if not rooms or (problem.offload and cpu_key(problem.topology) is not None):
        return error
    weights = problem.graph.weights.values()
    large = [w for w in weights if w.nbytes > max(rooms) and is_sliceable(annotator.capture, w.name)]
    if not large:
        return error
    return InfeasibleError(
        f"{error}. {large[0].name!r} ({readable_bytes(large[0].nbytes)}) is larger than what any accelerator "
        "may hold: it is computed in slices where the whole may live on the CPU, which takes a budget for "
        "'cpu' in max_memory, and not offload=False",
        needed=error.needed,
        available=error.available,
        operation=error.operation,
        device=error.device,
    )


def _named(formulation: Formulation) -> set[str]:
    constraints = formulation.options.constraints
    return {*constraints.pin, *(name for group in constraints.groups for name in group)}


def _faster(whole: Choice, sliced: Choice) -> Choice:
    """The faster of two placements, with the lower of their bounds, which holds for both graphs."""
    best = min(whole, sliced, key=lambda choice: choice.seconds)
    least = min(whole, sliced, key=lambda choice: choice.solution.lower_bound).solution
    proof = least.proof + (", with weights sliced" if least is sliced.solution else "")
    return replace(best, solution=replace(best.solution, lower_bound=least.lower_bound, proof=proof))
