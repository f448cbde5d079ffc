"""Place a call with its weights whole and, where no accelerator holds one of them, in parts: the faster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphplan.errors import InfeasibleError
from graphplan.formulation import Formulation
from graphplan.passes.annotate import Annotator
from graphplan.passes.limits import Limits
from graphplan.passes.oversized import find_oversized, offered_parts
from graphplan.passes.place import sketch
from graphplan.passes.slicing import is_sliceable, slice_weights
from graphplan.settling import Choice, settle
from graphplan.signature import BoundCall

__all__ = ["choose"]

_HOPE = 1.1  # a sketch of more than so many times the seconds of another plan is not worth refining


@dataclass(frozen=True, slots=True)
class _Sketch:
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
    sliced = _best_slicing(formulation, annotator, call) if formulation.committed.homes is None else None
    if sliced is None:
        return settle(formulation, annotator, call, limits)
    whole = None
    if sketch(formulation.constrained(annotator, call)) is not None:
        whole = settle(formulation, annotator, call, limits.until(0.5))
        if whole.seconds * _HOPE < sliced.seconds:
            return whole
    try:
        found = settle(formulation, sliced.annotator, call, limits)
    except InfeasibleError:  # the moves that slicing brings made operations take more
        return whole or settle(formulation, annotator, call, limits)
    return found if whole is None else _faster(whole, found)


def _sliced_as_before(formulation: Formulation, annotator: Annotator) -> Annotator:
    """The capture with the parts that earlier plans have placed, of weights that it can read so."""
    known = formulation.committed.parts
    here = [part for part in known if is_sliceable(annotator.capture, part.weight)]
    return annotator.of(slice_weights(annotator.capture, here)) if here else annotator


def _best_slicing(formulation: Formulation, annotator: Annotator, call: BoundCall | None) -> _Sketch | None:
    """Oversized weights in as many parts as seem best; None where no number of parts would do."""
    wishes, capture, weights = formulation.options.wishes, annotator.capture, annotator.weights
    named = {*wishes.pin, *(name for group in wishes.groups for name in group)}
    oversized = [
        one
        for one in find_oversized(formulation.constrained(annotator, call), named)
        if is_sliceable(capture, one.weight.name) and weights.has_rows(one.weight.name)
    ]
    best: _Sketch | None = None
    for parts in offered_parts(oversized):
        sliced = annotator.of(slice_weights(capture, parts))
        found = sketch(formulation.constrained(sliced, call))
        if found is not None and best is not None and found.seconds >= best.seconds:
            break
        if found is not None:
            best = _Sketch(sliced, found.seconds)
    return best


def _faster(whole: Choice, sliced: Choice) -> Choice:
    """The faster of two placements, with the lower of their bounds, which holds for both graphs."""
    best = min(whole, sliced, key=lambda choice: choice.seconds)
    least = min(whole, sliced, key=lambda choice: choice.solution.lower_bound).solution
    proof = least.proof + (", with weights sliced" if least is sliced.solution else "")
    return replace(best, solution=replace(best.solution, lower_bound=least.lower_bound, proof=proof))
