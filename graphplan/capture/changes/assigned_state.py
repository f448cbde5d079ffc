"""State that a model assigns to itself in a forward pass: buffers that the graph writes, and attributes.

Before and after, in the trace of a module's call::

    self.mean = 0.9 * self.mean + x            add = 0.9 * mean + x
                                               copy_ = copy_(mean, add)
    self.scores = q @ k                        mm = q @ k
    return h                                   return h, mm            a placed model stores mm as scores

``torch.export`` writes the buffers of the model itself, but not those of its submodules. Of any other
attribute, a trace reads the tensor from before the trace. So a model has no graph if it depends on a flag
(such as that weights are already scaled) that its previous call assigned, or on a tensor whose shape or type
changes. A table that the first call makes and later calls read is allowed: each call of the graph makes it,
and it is not stored. A second trace, of the next call, distinguishes these cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import is_not
from typing import Any

import torch
from torch import fx, nn

from graphplan._compat.torch import computed_weight
from graphplan.capture.changes.assigned_data import AssignedData
from graphplan.capture.changes.assigned_writes import ASSIGNS
from graphplan.capture.changes.attribute_data import data_in, objects_in
from graphplan.capture.changes.attribute_snapshots import Snapshot, own_attributes, snapshot
from graphplan.capture.changes.program_contents import (
    constants_read,
    operations,
    writes_to_state,
    written_constants,
)
from graphplan.capture.changes.stored_values import can_store, keeps_shape_and_type
from graphplan.capture.structure import (
    Returned,
    Seen,
    Stored,
    StoredAttribute,
    flatten,
    reachable,
    unflatten,
)
from graphplan.capture.value_branches import Branches
from graphplan.errors import NoGraphError

_ABSENT = object()

WRITTEN = "written to in place"


class KeptStateError(NoGraphError):
    """A call assigns attributes that the next one depends on: the model itself must run, not a copy."""


@contextmanager
def restored(tables: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Context manager that restores the entries of tables, and their order, at its exit."""
    before = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, entries in before:
            if list(table) != list(entries) or any(map(is_not, table.values(), entries.values())):
                table.clear()
                table.update(entries)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """An attribute or a buffer that a call has set or deleted."""

    owner: dict[str, Any]  # the table of attributes or buffers
    label: str
    name: str
    before: Any
    tensors: list[torch.Tensor]  # the tensors in ``before``
    after: Any
    is_plain: bool  # whether numbers, texts or flags have changed
    moved: Sequence[torch.Tensor] = ()  # tensors in ``after`` that were not in their places before
    by_hook: bool = False  # as weight_norm's pre-hook computes the weight that the module then reads
    key: StoredAttribute | None = None  # None if it is not an attribute of a module


class AssignedState:
    """Assignments by modules, and by objects in their attributes, in one trace; see the module docstring.

    Attributes:
        stored: attributes of modules in which the call stores tensors, with what it stores.
        others: other attributes of modules that the call sets, with what it sets them to.
        updated: those in ``stored`` that the next call reads.
        growing: lists and dicts in ``stored`` that are longer after each call, with their names.
        makes_tensors: whether the next call may depend on tensors that this one makes.
        reads_values: whether the trace depended on the value of a tensor.
        data: assignments to the ``data`` of tensors.
        branches: branches of the code on values of weights or inputs.
        kept_by_hooks: warnings about hooks that store something outside of the model.
    """

    def __init__(self, model: nn.Module, branches: Branches) -> None:
        self._model = vars(model)
        self._modules = set(map(id, model.modules()))
        self._objects = {id(one): one for one in objects_in(model)}
        self._buffers: dict[int, dict[str, Any]] = {}
        self._attributes: dict[int, dict[str, Snapshot]] = {}
        self._written: dict[tuple[int, str], torch.Tensor] = {}
        self._replaced: dict[tuple[int, str], _Change] = {}
        self._changes: list[_Change] = []
        self._requiring = set[int]()  # ids of the buffers that required a gradient before the call
        self._with_history: list[str] = []
        self._paths = {id(vars(part)): path for path, part in reversed(list(model.named_modules()))}
        self.stored: dict[StoredAttribute, Any] = {}
        self.updated = set[StoredAttribute]()
        self.others: dict[StoredAttribute, Any] = {}
        self.growing: dict[StoredAttribute | None, str] = {}
        self.data = AssignedData(model)
        self.branches = branches
        self.makes_tensors = False
        self.reads_values = False
        self.kept_by_hooks: list[str] = []

    def record_value_read(self) -> None:
        """Record that the trace has read the value of a tensor."""
        self.reads_values = True

    def call(
        self, tracer: Any, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the result of a module's call; at the end of the model's own call, write buffers."""
        if self._buffers or vars(module) is not self._model:  # a part, or the tracer's wrapper of the model
            return forward(*args, **kwargs)
        for part in _modules(module):
            buffers = self._buffers[id(part._buffers)] = dict(part._buffers)
            self._requiring |= {id(x) for x in buffers.values() if x is not None and x.requires_grad}
        for owner in (*_modules(module), *self._objects.values()):
            known = {name: snapshot(value) for name, value in own_attributes(owner).items()}
            self._attributes[id(vars(owner))] = known
        result = forward(*args, **kwargs)
        for part in _modules(module):
            self._write_buffers(tracer.graph, type(part).__name__, part._buffers)
        for owner in (*_modules(module), *self._objects.values()):
            self._record_changes(owner)
        return self._with_stored(result, module)

    def _with_stored(self, result: Any, module: nn.Module) -> Any:
        """Return the result of the model with the tensors that its call stores in attributes of modules.

        Raises:
            KeptStateError: an attribute gets a tensor that one had before the call, as in a list of the last
                two results.
        """
        before = {id(tensor) for one in self._changes for tensor in one.tensors}
        for one in self._changes:
            if one.key and not one.by_hook and not before.isdisjoint(map(id, one.moved)):
                label = f"{one.label}.{one.name}"
                raise KeptStateError(nothing_from_before(label, one.name, "assigned a tensor from before"))
        weights = {
            id(x) for part in _modules(module) for x in (*part._parameters.values(), *part._buffers.values())
        }
        for one in self._changes:
            in_place = one.after is one.before
            if one.key and not one.by_hook and can_store(one.after, weights, in_place=in_place):
                self.stored[one.key] = one.after
            elif one.key and not one.by_hook:
                self.others[one.key] = one.after
        if not self.stored:
            return result
        if isinstance(result, Returned):
            return replace(result, result=Stored(result.result, dict(self.stored)))
        return Stored(result, dict(self.stored))

    @property
    def losses(self) -> list[str]:
        """Assigned attributes that have a gradient, such as auxiliary losses, and are not stored."""
        stored = set(map(id, self.stored.values()))
        return [
            f"{one.label}.{one.name}"
            for one in self._changes
            if not one.by_hook
            and id(one.after) not in stored
            and any(tensor.grad_fn for tensor in self._tensors_in(one.after))
        ]

    def _write_buffers(self, graph: fx.Graph, label: str, table: dict[str, Any]) -> None:
        before = self._buffers.get(id(table), table)  # a module made in the call has no old buffers
        for name in {**before, **table}:
            value, buffer = table.get(name), before.get(name)
            if value is not None and value.requires_grad and id(value) not in self._requiring:
                self._with_history.append(f"{label}.{name}")
            if value is buffer:
                continue
            if buffer is None or value is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                change = _Change(table, label, name, before=buffer, tensors=[], after=value, is_plain=False)
                self._replaced[id(table), name] = change
                continue
            if {buffer.layout, value.layout} != {torch.strided}:
                raise NoGraphError(f"{label}.{name} is assigned a tensor of the layout {value.layout}")
            buffer.copy_(value.detach())
            next(iter(reversed(graph.nodes))).meta[ASSIGNS] = True
            self._written[id(table), name] = value

    def refuse_history(self) -> None:
        """Raise NoGraphError if a call leaves a buffer with a gradient history, which eager keeps."""
        if self._with_history:
            raise NoGraphError(
                f"a call leaves {self._with_history[0]} with a gradient, which eager mode keeps and a graph "
                "does not: assign .detach() of it, if no later backward pass goes through it"
            )

    def assigned(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors that buffers were assigned, under each name of a buffer in the module."""
        return {
            f"{path}.{name}" if path else name: self._written[id(part._buffers), name]
            for path, part in module.named_modules(remove_duplicate=False)
            for name in part._buffers
            if (id(part._buffers), name) in self._written
        }

    def _record_changes(self, owner: Any) -> None:
        attributes, label = vars(owner), type(owner).__name__
        known = self._attributes.get(id(attributes), {})
        for name in {**known, **own_attributes(owner)}:
            before, after = known.get(name, Snapshot(_ABSENT)), attributes.get(name, _ABSENT)
            if not before.matches(after):
                old, new = self._expanded(before), self._expanded(snapshot(after))
                places, path = dict(old.places()), self._paths.get(id(attributes))
                moved = [
                    x
                    for place, x in new.places()
                    if isinstance(x, torch.Tensor) and places.get(place) is not x
                ]
                key = None if path is None else StoredAttribute(path, name, after is before.value)
                change = _Change(
                    attributes,
                    label,
                    name,
                    before=before.value,
                    tensors=_tensors(old),
                    after=after,
                    is_plain=old.plain() != new.plain(),
                    moved=moved,
                    by_hook=_computed_by_hook(attributes, name),
                    key=key,
                )
                self._changes.append(change)

    def _expanded(self, value: Snapshot) -> Snapshot:
        """Return the snapshot with the attributes of all objects in it, including those made in the call."""
        return value.expanded(self._objects | self._new_objects_in(value.value))

    def _new_objects_in(self, value: Any) -> dict[int, Any]:
        """Return id -> object in ``value`` that did not exist before the call."""
        found = data_in("", value, set(self._objects), self._modules).objects
        return {id(one): one for one in found if id(vars(one)) not in self._attributes}

    def _tensors_in(self, value: Any) -> list[torch.Tensor]:
        return _tensors(self._expanded(snapshot(value)))

    def _carried(self, read: list[torch.Tensor]) -> list[_Change]:
        """Return the changes of attributes whose old tensors are among ``read``."""
        return [one for one in self._changes if _share_any(one.tensors, read)]

    @contextmanager
    def after_call(self, program: torch.export.ExportedProgram) -> Iterator[bool]:
        """Context manager in which modules have the attributes after the traced call.

        It yields whether the next call may depend on them.
        """
        carried = self._carried(constants_read(program))
        resized = [one for one in self._changes if len(one.tensors) != len(self._tensors_in(one.after))]
        self.makes_tensors = bool(carried or resized or self._replaced)
        plain = any(one.is_plain for one in self._changes)
        changes = [*self._changes, *self._replaced.values()] if self.makes_tensors or plain else []
        with restored(one.owner for one in changes):
            for one in changes:
                for new in self._new_objects_in(one.after).values():
                    vars(new).update({name: _without_trace(value) for name, value in vars(new).items()})
                if one.after is _ABSENT:
                    one.owner.pop(one.name, None)
                else:
                    one.owner[one.name] = _without_trace(one.after)
            yield bool(changes)

    def require_same_next(
        self,
        traced: torch.export.ExportedProgram,
        next_state: AssignedState,
        next_program: torch.export.ExportedProgram,
    ) -> None:
        """Raise KeptStateError if the next call depends on attributes that this one, ``traced``, assigned.

        ``next_state`` and ``next_program`` are the state and the trace of the next call.
        """
        for key, one in self._replaced.items():
            is_removed = one.before is not None and one.after is None
            if is_removed or key in next_state._replaced or key in next_state._written:
                raise KeptStateError(
                    f"{one.label}.{one.name} is {_shape_text(one.before)} and is assigned "
                    f"{_shape_text(one.after)}: in a graph, a buffer keeps its shape and type"
                )
        read = constants_read(next_program)
        changed = {(id(one.owner), one.name) for one in next_state._changes}
        updates = self._keeping_shape() & next_state._keeping_shape()
        for one in next_state._carried(read) + self._carried(constants_read(traced)):
            is_kept = (id(one.owner), one.name) not in changed and _share_any(
                self._tensors_in(one.owner[one.name]), read
            )
            if one.key in updates:
                self.updated.add(one.key)
            elif not is_kept:  # the first call alone may convert a tensor that later ones read
                label = f"{one.label}.{one.name}"
                raise KeptStateError(nothing_from_before(label, one.name, "read and then assigned"))
        self._store_only_unread(read, next_state)
        written = [next_program.constants[name] for name in written_constants(next_program)]
        for one in self._changes:
            if _share_any(self._tensors_in(one.owner.get(one.name)), written):
                raise KeptStateError(nothing_from_before(f"{one.label}.{one.name}", one.name, WRITTEN))
        plain = [one for one in self._changes if one.is_plain]
        # the next call reads tensors that the first one makes, so that only their writes can be compared
        describe = writes_to_state if self.makes_tensors else operations
        # a call that finds an answer in an attribute does not compute it
        answers, next_answers = self.branches.answers_given, next_state.branches.answers_given
        if plain and (describe(traced) != describe(next_program) or answers != next_answers):
            raise KeptStateError(
                f"a call changes {plain[0].label}.{plain[0].name}, and the next computes something else; a "
                "graph always computes the same. If only the first call differs, call the model before you "
                "place it"
            )

    def _keeping_shape(self) -> set[StoredAttribute]:
        """Return the stored attributes that keep their shape and type, so that a graph can read them."""
        stored = [one for one in self._changes if one.key in self.stored]
        return {one.key for one in stored if one.key and keeps_shape_and_type(one.before, one.after)}

    def _store_only_unread(self, read: list[torch.Tensor], next_state: AssignedState) -> None:
        """Store no table that the next call reads, and nothing that only the first call stores."""
        self.growing = {
            one.key: f"{one.label}.{one.name}"
            for one in next_state._changes
            if one.key in self.stored and len(self._tensors_in(one.after)) > len(one.tensors)
        }
        for one in self._changes:
            if one.key in self.stored:
                is_read = _share_any(self._tensors_in(one.owner.get(one.name)), read)
                is_table = is_read and one.key not in self.updated
                if is_table or one.key not in (*next_state.stored, *self.growing):
                    self.others[one.key] = self.stored.pop(one.key)


def read_and_assigned(attribute: str) -> str:
    """Return the error text for an attribute, by its full name, that the next call reads."""
    return nothing_from_before(attribute, attribute.rpartition(".")[2], "read and then assigned")


def nothing_from_before(label: str, name: str, change: str) -> str:
    """Return the error text for an attribute ``label`` that a call changes, as ``change`` describes."""
    return (
        f"{label} is {change}: a graph keeps nothing from the call before but buffers, and attributes that "
        "keep their shape and type and are assigned tensors without a gradient. Make it a buffer, by "
        f"register_buffer({name!r}, ...)"
    )


def _computed_by_hook(attributes: Mapping[str, Any], name: str) -> bool:
    """Whether a hook of ``torch.nn.utils`` computes an attribute from parameters before each call."""
    return any(computed_weight(hook) == name for hook in attributes.get("_forward_pre_hooks", {}).values())


def _share_any(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return not {id(one) for one in tensors}.isdisjoint(map(id, others))


def _shape_text(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield each module of a tree once; a tracer replaces modules by others with the same attributes."""

    def children(part: nn.Module) -> list[nn.Module]:
        return [child for child in vars(part)["_modules"].values() if child is not None]

    return reachable([module], children, lambda part: id(vars(part)))


def _tensors(value: Snapshot) -> list[torch.Tensor]:
    """Return the tensors of an attribute, by itself or in containers."""
    return [leaf for leaf in value.leaves() if isinstance(leaf, torch.Tensor)]


def _without_trace(tree: Any) -> Any:
    """Return a tree with zeros in place of traced tensors, and numbers in place of symbols."""
    leaves, spec = flatten(tree, Seen())
    return unflatten([_zeros(one) if isinstance(one, torch.Tensor) else _number(one) for one in leaves], spec)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(list(map(_number, tensor.shape)), dtype=tensor.dtype)


def _number(leaf: Any) -> Any:
    """Return the number of a symbol: its hint, or 1 for a data-dependent size."""
    if not isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf
    return leaf.node.hint if leaf.node.has_hint() else leaf.node.pytype(1)
