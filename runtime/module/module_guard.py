"""Detect changes of a placed module that make its graphs stale.

A trace depends on the tree of modules, their classes, their plain attributes, and which weights are shared.
Later changes of these make the graphs stale::

    placed.act = nn.Sigmoid()                  another module
    placed.norm.eps = 1e-3                     a plain attribute
    placed.head.weight = nn.Parameter(...)     a weight that was shared with another module

Each call compares identities, which takes tens of nanoseconds per attribute. Values are compared only if an
identity differs. Graphs do not call hooks that are added to submodules: while there are any, calls run module
by module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import chain, repeat
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import global_hooks
from graphplan.capture.changes.attribute_data import is_container, is_plain
from graphplan.capture.changes.attribute_snapshots import snapshot
from graphplan.capture.model.model_copy import require_own_tensors
from graphplan.capture.model.model_weights import identity
from graphplan.runtime.module.model_reading import ANY, Fact, ModelReading, writes_to

_MOST_CHARACTERS = 60  # of a value in a message
_shape, _version = attrgetter("shape"), attrgetter("_version")


class ModuleGuard:
    """Detects changes of one module since its graphs were traced; created when they were.

    Attributes:
        values: name -> tensor attribute whose values may change, as last seen.
        stored: names of attributes in which calls store tensors, which are left out.
    """

    def __init__(self, module: nn.Module, stored: Set[str] = frozenset()) -> None:
        self.stored = stored
        self._adopt(_IdentityCheck(module, stored))

    def _adopt(self, check: _IdentityCheck) -> None:
        reading = check.reading
        self._facts, self._attribute_facts = reading.facts, reading.attribute_facts
        self.values = reading.values
        self._check = check

    def has_untraced_hooks(self, traced: int) -> bool:
        """Whether submodules have more than ``traced`` hooks, or there are global module hooks."""
        hooked = any(self._check.reading.hooks)  # faster than a count, as most tables are empty
        return (hooked and self._check.hook_count() > traced) or any(global_hooks())

    @property
    def parts(self) -> list[nn.Module]:
        """The submodules; others of the same classes may have replaced traced ones without a difference."""
        return self._check.reading.parts

    def is_unchanged(self, module: nn.Module) -> bool:
        """Whether nothing has changed since the last reading; False also if that is uncertain."""
        return self._check.is_unchanged(module)

    def accept(self, module: nn.Module) -> None:
        """Compare later states with the present one."""
        if not self._check.is_unchanged(module):
            self._adopt(_IdentityCheck(module, self.stored))

    def leave_out(self, module: nn.Module, stored: Set[str]) -> None:
        """Leave out the attributes with these names, in place of others before."""
        if stored != self.stored:
            self.stored = stored
            self._adopt(_IdentityCheck(module, stored))

    def difference(self, module: nn.Module, *, values_may_change: bool = False) -> str | None:
        """Return a description of the first change since the graphs were traced; None if there is none.

        If ``values_may_change``, the tensors in ``values`` may be replaced and written to. Raise CaptureError
        if another library has taken over the tensors of a submodule.
        """
        require_own_tensors(module)
        check = _IdentityCheck(module, self.stored)
        reading, known = check.reading, self.values
        values = {n: t for n, t in reading.values.items() if n in known and _is_alike(known[n], t)}
        of_values = (
            {fact for name in values for fact in (repr(name), writes_to(name))} if values_may_change else ()
        )
        facts = {name: fact for name, fact in self._facts.items() if name not in of_values}
        facts |= {name: fact for name, fact in reading.facts.items() if name in of_values}
        change = _difference(facts, reading.facts)
        if change is None and self._attribute_facts is not None and reading.attribute_facts is not None:
            change = _difference(self._attribute_facts, reading.attribute_facts)
        if change is None:
            self._facts, self.values = facts, values
            self._check = check
        return change


class _IdentityCheck:
    """A reading of a module, and the objects that were read, to compare identities."""

    def __init__(self, module: nn.Module, stored: Set[str]) -> None:
        self.reading = reading = ModelReading(module, stored)
        self._values = list(map(getitem, reading.tables, reading.keys))
        self._types = list(map(type, reading.parts))
        hooks = set(map(id, reading.hooks))  # their tables may grow without a change
        sized: tuple[Any, ...] = (*map(vars, reading.parts), *reading.children, *reading.weights)
        sized += (*reading.tables, *reading.namespaces.values())
        by_id = {id(table): table for table in sized}
        sized = tuple(table for key, table in by_id.items() if key not in hooks)
        self._sized = [table for table in sized if table]
        self._empty = [table for table in sized if not table]
        self._sizes, self._root_size = list(map(len, self._sized)), len(vars(module))
        self._order = list(chain.from_iterable(reading.children))
        weights = chain.from_iterable(map(dict.values, reading.weights))
        self._tensors = [tensor for tensor in weights if tensor is not None]
        self._shapes = list(map(_shape, self._tensors))
        self._versions = list(map(_version, reading.tensors))
        facts = reading.facts | (reading.attribute_facts or {})
        self._contents = [facts[name].value for name in reading.containers]
        self._shared = list(_shared(self._tensors))

    def hook_count(self) -> int:
        """Return the present number of hooks of submodules."""
        return sum(map(len, self.reading.hooks))

    def is_unchanged(self, module: nn.Module) -> bool:
        """Whether each entry is the same object as before; False also if that is uncertain."""
        reading = self.reading
        try:
            return (
                all(map(is_, map(getitem, repeat(vars(module)), reading.root), reading.root.values()))
                and all(map(is_, map(getitem, reading.tables, reading.keys), self._values))
                and len(vars(module)) == self._root_size
                and not any(self._empty)
                and list(map(len, self._sized)) == self._sizes
                and list(map(type, reading.parts)) == self._types
                and list(chain.from_iterable(reading.children)) == self._order
                and list(map(_shape, self._tensors)) == self._shapes
                and list(map(_version, reading.tensors)) == self._versions
                and list(reading.containers.values()) == self._contents
                and all(identity(first) == identity(second) for first, second in self._shared)
            )
        except (KeyError, IndexError):
            return False


def _difference(before: Mapping[str, Fact], current: Mapping[str, Fact]) -> str | None:
    for name, fact in current.items():
        known = before.get(name)
        if known is None and (fact.matters if fact.attribute is None else fact.attribute in before):
            return f"{name} is new"
        if known is not None and not _equal(known.value, fact.value):
            was, current_text = _value_text(known.value), _value_text(fact.value)
            return f"{name} was {was} and is {'another' if was == current_text else current_text}"
    gone = next((name for name in before if name not in current), None)
    return None if gone is None else f"{gone} is gone"


def _is_alike(before: torch.Tensor, current: torch.Tensor) -> bool:
    return (before.dtype, before.shape) == (current.dtype, current.shape)


def _shared(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (earlier, later) for each tensor object that is one weight with an earlier object."""
    first: dict[Any, torch.Tensor] = {}
    for tensor in tensors:
        known = first.setdefault(identity(tensor), tensor)
        if known is not tensor:
            yield known, tensor


def _equal(before: Any, current: Any) -> bool:
    if before is current or before is ANY or current is ANY:
        return True
    comparable = type(before) is type(current) and all(
        is_plain(v) or is_container(v) for v in (before, current)
    )
    # 1 == 1.0 == True and 0.0 == -0.0, which code distinguishes
    return comparable and bool(before == current) and snapshot(before).plain() == snapshot(current).plain()


def _value_text(value: Any) -> str:
    text = f"a {value.__name__}" if isinstance(value, type) else repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
