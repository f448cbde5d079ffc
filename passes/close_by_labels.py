"""Close the gap by labels: a search of every part, made wider where that promises to end it."""

from __future__ import annotations

import numpy as np

from graphplan.passes.incumbent import Incumbent
from graphplan.passes.labels import Found, Labels
from graphplan.passes.limits import Limits
from graphplan.passes.parts import Part
from graphplan.passes.shares import Shares

__all__ = ["search_labels", "search_wider"]

_PROOF = "labels over the fine graph"
_FIRST = 300  # labels kept between two steps, at first
_SECOND = 20_000
_TRAIL = 100_000_000  # labels that a search may remember, 5 bytes each
_WORK = 4_000_000  # labels that a search may make without being asked for time
_PREPARED = 4000  # operations times devices that a second prepares for a search, about
_STARTING = 0.5  # of the time, for few labels
_PROMISING = 0.9  # of what is left then, for more
_PROGRESS = 0.5  # of the way to the end that a search must have come to be made wider
_ROOM_TRIES = 3  # searches with more room left free


def search_labels(incumbent: Incumbent, shares: Shares, parts: list[Part]) -> None:
    """Look for placements, few labels at a time and then more."""
    limits = incumbent.limits.until(_STARTING)
    devices = sum(len(kind.keys) for kind in shares.kinds)
    hurried = limits.left is not None and shares.units * devices * len(parts) > _PREPARED * limits.left
    if incumbent.done or hurried or not all(part.suits_labels for part in parts):
        return
    near: Part | None = None
    for part in parts:
        if part.bound >= incumbent.enough:
            continue
        part.prepare_labels(incumbent.enough, limits.deadline, near)
        near = part
        if limits.over:
            return
    incumbent.raise_bound(min(part.bound for part in parts), _PROOF)
    frontiers = [part.labels.frontier for part in parts if part.labels is not None]
    choices = max((len(frontier.steps) * frontier.count for frontier in frontiers), default=1)
    _search(incumbent, parts, _FIRST, limits)
    progress = [part.progress(incumbent.enough) for part in parts if part.bound < incumbent.enough]
    if min(progress, default=1.0) >= _PROGRESS:  # else a part would hold back the bound of all
        width = max(_FIRST, min(_SECOND, _WORK // choices))
        _search(incumbent, parts, width, incumbent.limits.until(_PROMISING))


def search_wider(incumbent: Incumbent, parts: list[Part]) -> None:
    """Search with ever more labels, as long as there is time."""
    steps = max((len(part.labels.frontier.steps) for part in parts if part.labels is not None), default=1)
    width = 4 * _FIRST
    while parts and width * steps <= _TRAIL and not incumbent.done:
        _search(incumbent, parts, width, incumbent.limits)
        width *= 4


def _search(incumbent: Incumbent, parts: list[Part], width: int, limits: Limits) -> None:
    """Those with the lowest bound first."""
    for part in sorted(parts, key=lambda part: part.bound):
        if incumbent.done or limits.over:
            return
        found = part.search(below=incumbent.enough, width=width, deadline=limits.deadline)
        if found is not None and found.devices:
            _take(incumbent, part, found, width, limits)
        incumbent.raise_bound(min(part.bound for part in parts), _PROOF)


def _take(incumbent: Incumbent, part: Part, found: Found, width: int, limits: Limits) -> None:
    """Judge what labels have found; where a device is too full, look again with so much more free."""
    assert part.labels is not None
    onward, frontier = part.labels.onward, part.labels.frontier
    margin = np.zeros(frontier.count)
    for _ in range(_ROOM_TRIES):
        evaluation = incumbent.evaluate(part.shares, found.devices, within=part.problem)
        if evaluation.feasible:
            break
        margin += [1.05 * evaluation.excess.get(key, 0) for key in frontier.devices]
        careful = Labels(onward, frontier.evenly(margin))
        again = careful.search(below=incumbent.enough, width=width, deadline=limits.deadline)
        if again is None or not again.devices:
            break
        found = again
    if not evaluation.feasible or evaluation.seconds < incumbent.best.seconds:
        incumbent.polish(evaluation, briefly=True)
