"""What a placed module's graphs were traced from, beside weights, inputs and modes: whether it is still so.

A trace reads the tree of modules, their classes and their plain attributes, and follows shared weights. What
is changed there later makes the graphs stale::

    placed.act = nn.Sigmoid()                  another module
    placed.norm.eps = 1e-3                     a plain attribute
    placed.head.weight = nn.Parameter(...)     a weight that was shared with another module

Each call compares identities, which takes tens of nanoseconds an attribute; only where one differs are values
compared. Hooks that are added to submodules are in no graph: while there are any, calls run module by module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from operator import getitem, is_
from typing import Any

import torch
from torch import nn

from graphplan.capture.model_weights import identity, is_dense
from graphplan.capture.modes import is_plain
from graphplan.runtime.fallback.short_names import original_class
from graphplan.runtime.module.placed_parts import PlacedPart

# `training` and the adapters of PEFT are modes, of which every graph has its own; the rest is torch's or ours
_ADAPTERS = {
    "_disable_adapters",
    "_adapters_disabled",
    "_active_adapter",
    "active_adapter",
    "merged_adapters",
}
_NOT_READ = {*vars(nn.Module()), "_graphplan", "_compiled_call_impl", *_ADAPTERS}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LONGEST = 60  # characters of a value in a message


class ModuleGuard:
    """Notices changes of one module.

    Args:
        module: as its graphs were traced.
    """

    def __init__(self, module: nn.Module) -> None:
        self._facts = _facts(module)
        self._watch = _Watch(module)

    def hooked(self) -> bool:
        """Whether submodules have hooks that they did not have when the graphs were traced."""
        return sum(map(len, self._watch.hooks)) > self._watch.hook_count

    def difference(self, module: nn.Module) -> str | None:
        """What is not as it was when the graphs were traced, for people; None where nothing is."""
        if self._watch.same(module):
            return None
        facts = _facts(module)
        for name, now in facts.items():
            before = self._facts.get(name)
            if before is None and now.matters:
                return f"{name} is new"
            if before is not None and not _equal(before.value, now.value):
                return f"{name} was {_shown(before.value)} and is {_shown(now.value)}"
        for name in self._facts:
            if name not in facts:
                return f"{name} is gone"
        self._watch = _Watch(module)
        return None


@dataclass(frozen=True, slots=True)
class _Fact:
    """One thing that a trace may have read.

    Attributes:
        value: the object.
        matters: whether it counts where it was not there before.
    """

    value: Any
    matters: bool = True


def _facts(module: nn.Module) -> dict[str, _Fact]:
    """Name -> what a trace may have read."""
    found: dict[str, _Fact] = {}
    first: dict[Any, str] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if path:
            found[repr(path)] = _Fact(original_class(part) if isinstance(part, PlacedPart) else type(part))
        for name, value in _own(part).items():
            known = copy.deepcopy(value) if _is_container(value) else value
            found[repr(prefix + name)] = _Fact(known, hasattr(type(part), name))
        hooks = sum(len(vars(part)[name]) for name in _HOOKS) if path else 0
        if hooks:
            found[f"a hook of {path!r}"] = _Fact(hooks, matters=False)
        for name, tensor in chain(part._parameters.items(), part._buffers.items()):
            found[f"the class of {prefix + name!r}"] = _Fact(_kind(tensor))
            other = prefix + name if tensor is None else first.setdefault(identity(tensor), prefix + name)
            if other != prefix + name:
                found[f"the memory of {prefix + name!r} and {other!r}"] = _Fact(True, matters=False)
    return found


class _Watch:
    """The same facts as lists of objects, of which identities are compared."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        self.parts, self.root = parts[1:], _own(module)  # the dictionary of the root itself would be a cycle
        entries = [(vars(part), name) for part in self.parts for name in _own(part)]
        entries += [(part._modules, name) for part in parts for name in part._modules]
        self.tables = [table for table, _ in entries]
        self.names = [name for _, name in entries]
        self.values = [table[name] for table, name in entries]
        self.types = list(map(type, self.parts))
        self.weights: list[dict[str, Any]] = [
            table for part in parts for table in (part._parameters, part._buffers)
        ]
        self.kinds = self._kinds()
        self.sized = [*map(vars, self.parts), *(part._modules for part in parts), *self.weights]
        self.sizes = list(map(len, self.sized))
        self.hooks = [vars(part)[name] for part in self.parts for name in _HOOKS if name in vars(part)]
        self.hook_count = sum(map(len, self.hooks))
        values = (*self.root.values(), *self.values)
        self.containers = [value for value in values if _is_container(value)]
        self.contents = copy.deepcopy(self.containers)
        self.shared = list(_shared_entries(self.weights))

    def _kinds(self) -> list[type]:
        return list(map(type, chain.from_iterable(map(dict.values, self.weights))))

    def same(self, module: nn.Module) -> bool:
        """Whether each entry is the very object that it was; False also where that is not certain."""
        try:
            return (
                all(map(is_, map(getitem, repeat(vars(module)), self.root), self.root.values()))
                and all(map(is_, map(getitem, self.tables, self.names), self.values))
                and list(map(len, self.sized)) == self.sizes
                and list(map(type, self.parts)) == self.types
                and self._kinds() == self.kinds
                and self.containers == self.contents
                and all(one.same() for one in self.shared)
                and sum(map(len, self.hooks)) >= self.hook_count
            )
        except KeyError:
            return False


@dataclass(frozen=True, slots=True)
class _SharedEntry:
    """Two entries of tables of weights that are one weight."""

    table: dict[str, Any]
    name: str
    other_table: dict[str, Any]
    other_name: str

    def same(self) -> bool:
        """Whether they are one weight still."""
        one, other = self.table[self.name], self.other_table[self.other_name]
        return one is other or (one is not None and other is not None and identity(one) == identity(other))


def _shared_entries(tables: list[dict[str, Any]]) -> Iterator[_SharedEntry]:
    first: dict[Any, tuple[dict[str, Any], str]] = {}
    for table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                known = first.setdefault(identity(tensor), (table, name))
                if known[0] is not table or known[1] != name:
                    yield _SharedEntry(table, name, *known)


def _own(part: nn.Module) -> dict[str, Any]:
    """Its plain attributes."""
    return {name: value for name, value in vars(part).items() if name not in _NOT_READ}


def _is_container(value: Any) -> bool:
    """Whether it can be changed in place, and compared."""
    return isinstance(value, list | dict) and is_plain(value)


def _equal(before: Any, now: Any) -> bool:
    if before is now:
        return True
    return is_plain(before) and is_plain(now) and type(before) is type(now) and bool(before == now)


def _kind(tensor: torch.Tensor | None) -> type | None:
    """The class of a weight, one for torch's own."""
    if tensor is None:
        return None
    return torch.Tensor if is_dense(tensor) else type(tensor)


def _shown(value: Any) -> str:
    text = f"a {value.__name__}" if isinstance(value, type) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
