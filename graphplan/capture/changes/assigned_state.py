"""State that a model assigns to its attributes in a forward pass: a graph returns the tensors.

Before and after, in the trace of a module's call::

    self.scores = q @ k                        mm = q @ k
    return h                                   return h, mm            a placed model stores mm as scores

A trace reads the tensors of attributes from before the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import computed_weight
from graphplan.capture.changes.assigned_buffers import AssignedBuffers
from graphplan.capture.changes.assigned_data import AssignedData
from graphplan.capture.changes.attribute_data import data_in, objects_in
from graphplan.capture.changes.attribute_snapshots import Snapshot, own_attributes, restored, snapshot
from graphplan.capture.changes.kept_state import KeptStateError
from graphplan.capture.changes.program_contents import constants_read
from graphplan.capture.changes.stored_values import PLAIN, can_store, keep_shape_and_type
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

_ABSENT = object()


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """An attribute that a call has set or deleted.

    Attributes:
        owner: the table of attributes.
        name: the attribute.
        label: the class of the object with the attribute, and its name.
        before: the value before the call.
        tensors: the tensors in ``before``.
        after: the value after the call.
        made: the tensors in ``after``.
        is_plain: whether numbers, texts or flags have changed.
        moved: tensors in ``after`` that were not in their places before.
        by_hook: whether a hook computes it, as weight_norm's does the weight that the module then reads.
        key: the attribute of a module; None for one of another object.
    """

    owner: dict[str, Any]
    name: str
    label: str
    before: Any
    tensors: list[torch.Tensor]
    after: Any
    made: list[torch.Tensor]
    is_plain: bool
    moved: Sequence[torch.Tensor]
    by_hook: bool
    key: StoredAttribute | None

    @property
    def keeps_structure(self) -> bool:
        """Whether the value is a tensor, as before, or a container with as many items or the same keys."""
        if isinstance(self.before, torch.Tensor):
            return isinstance(self.after, torch.Tensor)
        return type(self.before) is type(self.after) and not self.is_plain

    @property
    def is_switched(self) -> bool:
        """Whether there are tensors only after the call, or only before it."""
        return bool(self.tensors) != bool(self.made)

    @property
    def now(self) -> Any:
        """The present value; None without one."""
        return self.owner.get(self.name)


class AssignedState:
    """Assignments by modules, and by objects in their attributes, in one trace.

    Attributes:
        changes: the attributes that the call has set or deleted.
        buffers: assignments to buffers.
        stored: attributes of modules in which the call stores tensors, with what it stores.
        others: other attributes of modules that the call sets, with what it sets them to.
        updated: those that this call or the next reads, and that change.
        settings: attributes of which the call changes numbers, texts or flags.
        serves_next: whether the next call, which finds other attributes with tensors, is the same.
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
        self._attributes: dict[int, dict[str, Snapshot]] = {}
        self._paths = {id(vars(part)): path for path, part in reversed(list(model.named_modules()))}
        self.changes: list[Change] = []
        self.buffers = AssignedBuffers()
        self.stored: dict[StoredAttribute, Any] = {}
        self.updated = set[StoredAttribute | None]()
        self.others: dict[StoredAttribute, Any] = {}
        self.growing: dict[StoredAttribute | None, str] = {}
        self.data = AssignedData(model)
        self.branches = branches
        self.makes_tensors = False
        self.settings: list[str] = []
        self.serves_next = True
        self.reads_values = False
        self.kept_by_hooks: list[str] = []

    def record_value_read(self) -> None:
        """Record that the trace has read the value of a tensor."""
        self.reads_values = True

    def call(
        self, tracer: Any, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the result of a module's call; at the end of the model's own call, write buffers."""
        is_part = vars(module) is not self._model  # or the tracer's wrapper of the model
        if is_part or self.buffers.is_recorded:
            return forward(*args, **kwargs)
        self.buffers.record(_modules(module))
        for owner in (*_modules(module), *self._objects.values()):
            known = {name: snapshot(value) for name, value in own_attributes(owner).items()}
            self._attributes[id(vars(owner))] = known
        result = forward(*args, **kwargs)
        for part in _modules(module):
            self.buffers.write(tracer.graph, type(part).__name__, part._buffers)
        for owner in (*_modules(module), *self._objects.values()):
            self._record_changes(owner)
        return self._with_stored(result, module)

    def _with_stored(self, result: Any, module: nn.Module) -> Any:
        """Return the result of the model with the tensors that its call stores in attributes of modules.

        Raises:
            KeptStateError: an attribute gets a tensor that one had before the call, as in a list of the last
                two results.
        """
        before = {id(tensor) for one in self.changes for tensor in one.tensors}
        for one in self.changes:
            if one.key and not one.by_hook and not before.isdisjoint(map(id, one.moved)):
                raise KeptStateError.of(one.label, "assigned a tensor from before")
        weights = {
            id(x) for part in _modules(module) for x in (*part._parameters.values(), *part._buffers.values())
        }
        for one in self.changes:
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
            one.label
            for one in self.changes
            if not one.by_hook and id(one.after) not in stored and any(tensor.grad_fn for tensor in one.made)
        ]

    def _record_changes(self, owner: Any) -> None:
        attributes = vars(owner)
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
                change = Change(
                    attributes,
                    name,
                    f"{type(owner).__name__}.{name}",
                    before=before.value,
                    tensors=_tensors(old),
                    after=after,
                    made=_tensors(new),
                    is_plain=old.plain() != new.plain(),
                    moved=moved,
                    by_hook=_computed_by_hook(attributes, name),
                    key=key,
                )
                self.changes.append(change)

    def _expanded(self, value: Snapshot) -> Snapshot:
        """Return the snapshot with the attributes of all objects in it, including those made in the call."""
        return value.expanded(self._objects | self._new_objects_in(value.value))

    def _new_objects_in(self, value: Any) -> dict[int, Any]:
        """Return id -> object in ``value`` that did not exist before the call."""
        found = data_in("", value, set(self._objects), self._modules).objects
        return {id(one): one for one in found if id(vars(one)) not in self._attributes}

    def tensors_in(self, value: Any) -> list[torch.Tensor]:
        """Return the tensors of a value, and of the attributes of objects in it."""
        return _tensors(self._expanded(snapshot(value)))

    def carried(self, read: list[torch.Tensor]) -> list[Change]:
        """Return the changes of attributes whose old tensors are among ``read``."""
        return [one for one in self.changes if share_any(one.tensors, read)]

    @property
    def keeping_shape(self) -> set[StoredAttribute]:
        """The stored attributes that keep their shape and type, so that a graph can read them."""
        return {
            one.key
            for one in self.changes
            if one.key and one.key in self.stored
            if one.keeps_structure and keep_shape_and_type(one.tensors, one.after)
        }

    @property
    def switched(self) -> set[StoredAttribute]:
        """The attributes that have stored tensors only after the call, or tensors only before it."""
        return {
            one.key
            for one in self.changes
            if one.key
            and not one.by_hook
            and one.is_switched
            and (one.key in self.stored or isinstance(one.after, PLAIN))
        }

    @property
    def reshaped(self) -> set[StoredAttribute]:
        """The stored attributes whose tensors have other shapes or types after the call than before it."""
        both = (one for one in self.changes if one.key in self.stored and one.tensors and one.made)
        return {
            one.key
            for one in both
            if one.key and list(map(_shape_and_type, one.tensors)) != list(map(_shape_and_type, one.made))
        }

    @contextmanager
    def after_call(self, program: torch.export.ExportedProgram, *, settings: bool = True) -> Iterator[bool]:
        """Context manager in which modules have the attributes after the traced call.

        It yields whether the next call may depend on them. Without ``settings``, only tensors differ from
        before the call, as for a placed model: not numbers, texts and flags.
        """
        carried = self.carried(constants_read(program))
        resized = [one for one in self.changes if len(one.tensors) != len(one.made)]
        replaced, known = self.buffers.replaced, self.switched | self.keeping_shape | self.reshaped
        self.makes_tensors = bool(replaced) or any(one.key not in known for one in carried + resized)
        matters = carried or resized or self.reshaped or any(one.is_plain for one in self.changes)
        changes = [
            (one.owner, one.name, one.after)
            for one in self.changes
            if matters and (settings or one.is_switched or not one.is_plain)
        ]
        changes += [(one.table, name, one.after) for (_, name), one in replaced.items()]
        with restored(owner for owner, _, _ in changes):
            for owner, name, after in changes:
                for new in self._new_objects_in(after).values():
                    vars(new).update({key: _without_trace(value) for key, value in vars(new).items()})
                if after is _ABSENT:
                    owner.pop(name, None)
                else:
                    owner[name] = _without_trace(after)
            yield bool(changes)


def share_any(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two lists have a tensor in common."""
    return not {id(one) for one in tensors}.isdisjoint(map(id, others))


def _computed_by_hook(attributes: Mapping[str, Any], name: str) -> bool:
    """Whether a hook of ``torch.nn.utils`` computes an attribute from parameters before each call."""
    return any(computed_weight(hook) == name for hook in attributes.get("_forward_pre_hooks", {}).values())


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


def _shape_and_type(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, *map(_number, tensor.shape)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(list(map(_number, tensor.shape)), dtype=tensor.dtype)


def _number(leaf: Any) -> Any:
    """Return the number of a symbol: its hint, or 1 for a data-dependent size."""
    if not isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf
    return leaf.node.hint if leaf.node.has_hint() else leaf.node.pytype(1)
