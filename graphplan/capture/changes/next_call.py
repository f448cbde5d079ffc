"""Whether the graph of a call serves the next call too, which finds what the first has assigned.

A graph reads nothing that its last call has assigned, but for buffers, and for attributes that keep their
shape and type. So two calls are traced, the second with zeros in what the first has assigned:

- If the second reads something else that the first assigns, the model has no graph. The exception is a table
  that the first makes and the second only reads: each call of the graph makes it, and it is not stored.
- If the second differs because an attribute has a tensor now, or none any more, or one of another shape, it
  gets a graph of its own::

    if self.hidden is None:                    in the first graph only
        self.hidden = torch.zeros_like(x)
    self.hidden = self.cell(x, self.hidden)    the second graph reads ``hidden``
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import torch

from graphplan.capture.changes.assigned_state import AssignedState, share_any
from graphplan.capture.changes.kept_state import READ_AND_ASSIGNED, WRITTEN, KeptStateError
from graphplan.capture.changes.program_contents import (
    constants_read,
    operations,
    writes_to_state,
    written_constants,
)
from graphplan.capture.structure import StoredAttribute


@dataclass(frozen=True)
class TracedCall:
    """The program of a traced call, and what the model has assigned to itself."""

    state: AssignedState
    program: torch.export.ExportedProgram

    @cached_property
    def read(self) -> list[torch.Tensor]:
        """The tensors, other than weights and buffers, that results depend on."""
        return constants_read(self.program)


def compare_with_next(call: TracedCall, following: TracedCall) -> None:
    """Record in the state of a call what the next one reads of it, and whether its graph serves both.

    The modules have the attributes after the first call.

    Raises:
        KeptStateError: the next call depends on attributes that this one has assigned.
    """
    state, after = call.state, following.state
    _refuse_replaced_buffers(state, after)
    tables = _tables(call, following)
    switched = state.switched - tables
    if any((key in state.stored) != (key in after.stored) for key in switched):
        state.serves_next = False
    changed = switched | state.reshaped - tables
    _refuse_reads(call, following, changed)
    _refuse_writes(call, following)
    state.growing = {
        one.key: one.label
        for one in after.changes
        if one.key in state.stored and len(one.made) > len(one.tensors)
    }
    for key in state.stored.keys() - {*after.stored, *state.growing, *switched}:  # tables, conversions
        state.others[key] = state.stored.pop(key)
    state.settings = [one.label for one in state.changes if one.is_plain and one.key not in switched]
    exact = state.serves_next and not state.makes_tensors and not tables
    if (state.settings or changed) and not _are_alike(call, following, exact=exact):
        _refuse_settings(state)
        state.serves_next = False


def require_independent(call: TracedCall, following: TracedCall, without: TracedCall) -> None:
    """Raise KeptStateError if the next call depends on numbers, texts or flags that this one changes.

    ``without`` is the next call without these changes: a placed model does not make them.
    """
    if operations(following.program, ()) != operations(without.program, ()):
        _refuse_settings(call.state)


def _refuse_replaced_buffers(state: AssignedState, after: AssignedState) -> None:
    for key, one in state.buffers.replaced.items():
        is_removed = one.before is not None and one.after is None
        if is_removed or key in after.buffers.replaced or key in after.buffers.written:
            raise KeptStateError(f"{one.text}: in a graph, a buffer keeps its shape and type")


def _tables(call: TracedCall, following: TracedCall) -> set[StoredAttribute | None]:
    """Return the attributes in which the first call stores new tensors, and which the next only reads."""
    state = call.state
    first_only = (state.switched | state.reshaped) & state.stored.keys() - following.state.stored.keys()
    changes = (one for one in state.changes if one.key in first_only)
    return {one.key for one in changes if share_any(state.tensors_in(one.now), following.read)}


def _refuse_reads(call: TracedCall, following: TracedCall, changed: Set[StoredAttribute | None]) -> None:
    """Raise KeptStateError if a call reads what another assigns, unless its graph can, or serves it alone.

    ``changed`` are the attributes that have tensors only before or after the call, or of another shape.
    """
    state, after = call.state, following.state
    assigned = {(id(one.owner), one.name) for one in after.changes}
    updates = state.keeping_shape & after.keeping_shape
    with_gradients = {one.key for one in state.changes if any(tensor.grad_fn for tensor in one.made)}
    alone = changed - (after.stored.keys() - after.keeping_shape) - with_gradients
    for one in after.carried(following.read) + state.carried(call.read):
        is_kept = (id(one.owner), one.name) not in assigned and share_any(
            state.tensors_in(one.now), following.read
        )
        if one.key in updates:
            state.updated.add(one.key)
        elif one.key in alone:
            state.serves_next = False
            if one.key not in state.stored:  # this call reads it, and sets it to None
                state.updated.add(one.key)
        elif not is_kept:  # the first call alone may convert a tensor that later ones read
            raise KeptStateError.of(one.label, READ_AND_ASSIGNED)


def _refuse_writes(call: TracedCall, following: TracedCall) -> None:
    program = following.program
    written = [program.constants[name] for name in written_constants(program)]
    for one in call.state.changes:
        if share_any(call.state.tensors_in(one.now), written):
            raise KeptStateError.of(one.label, WRITTEN)


def _refuse_settings(state: AssignedState) -> None:
    if state.settings:
        raise KeptStateError(
            f"a call changes {state.settings[0]}, and the next computes something else; a graph always "
            "computes the same. If only the first call differs, call the model before you place it"
        )


def _are_alike(call: TracedCall, following: TracedCall, *, exact: bool) -> bool:
    """Whether the calls are the same; unless ``exact``, the next may read tensors that the first makes."""
    # a call that finds an answer in an attribute does not compute it
    if call.state.branches.answers_given != following.state.branches.answers_given:
        return False
    if not exact:
        return writes_to_state(call.program) == writes_to_state(following.program)
    first, second = (operations(one.program, _updated(one, call)) for one in (call, following))
    return first == second


def _updated(call: TracedCall, first: TracedCall) -> list[torch.Tensor]:
    """Return the tensors before a call of attributes that each call updates."""
    return [x for one in call.state.changes if one.key in first.state.updated for x in one.tensors]
