"""What a trace of a model may have read beside weights, inputs and modes: by name, and where to look again.

::

    blocks.1         the class of a submodule         norm.eps       a plain attribute
    head.weight      the form of a weight             settings.k     what lies in an object or a container
    head.weight.k    what is noted on a parameter
    Block.forward    an attribute of a class          scale          how often a tensor was written to
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partialmethod
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import SERVED_BY
from graphplan.capture.changes.attribute_data import data_in, is_container, is_plain
from graphplan.capture.model.model_weights import identity, is_dense, memory_of
from graphplan.capture.model.shared_attributes import PATCHED
from graphplan.capture.parameter_notes import noted_tensors, notes_of
from graphplan.capture.thread_patches import unpatched
from graphplan.runtime.fallback.short_names import original_class

# `training` and the adapters of PEFT are modes, of which every graph has its own; the rest is torch's or ours
_ADAPTERS = {
    "_disable_adapters",
    "_adapters_disabled",
    "_active_adapter",
    "active_adapter",
    "merged_adapters",
}
# what generate() calls between forward passes: PEFT sets another for its time
_GENERATES = {"prepare_inputs_for_generation"}
_OURS = {"_graphplan", PATCHED, SERVED_BY}
_NOT_READ = {*vars(nn.Module()), *_OURS, *_ADAPTERS, *_GENERATES}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = {"abc", "builtins", "torch", "typing"}
_OF_CLASSES = (FunctionType, classmethod, staticmethod, property, partialmethod)
ANY = object()
"""Equals every value: where a tensor is that stands for a parameter for a time, as in
``torch.func.functional_call``, is nothing that a trace has read."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that a trace may have read.

    Attributes:
        value: the object.
        matters: whether it counts where it was not there before.
        attribute: the name of the fact in which it lies; what is new there counts unless that is new too.
    """

    value: Any
    matters: bool = True
    attribute: str | None = None


class ModelReading:
    """What is read of one module. It does not hold on to the module itself, which would be a cycle.

    Attributes:
        facts: by name, for people.
        notes: likewise, of what is noted on parameters; None where tensors stand for these for a time, as in
            ``torch.func.functional_call``.
        root: the plain attributes of the module.
        tables: what holds all else: dictionaries of modules, containers, namespaces of classes.
        keys: of these, there.
        parts: the submodules.
        children: the tables of submodules.
        weights: the tables of parameters and buffers.
        hooks: the tables of hooks of the submodules.
        namespaces: of the classes with code of the model.
        containers: plain ones by the names of their facts, which are compared whole.
        tensors: those that are no weights.
        values: attributes of modules that are tensors, and of which others may take the places.
    """

    def __init__(self, module: nn.Module) -> None:
        named = dict(module.named_modules())
        self.facts: dict[str, Fact] = {}
        self.notes: dict[str, Fact] | None = {}
        self.root = {name: value for name, value in vars(module).items() if name not in _NOT_READ}
        self.tables: list[Any] = []
        self.keys: list[Any] = []
        self.parts = list(named.values())[1:]
        self.children = [part._modules for part in named.values()]
        self.weights: list[dict[str, Any]] = [
            table for part in named.values() for table in (part._parameters, part._buffers)
        ]
        for table in (*self.children, *self.weights):
            for key in table:
                self._watch(table, key)
        self.hooks = [vars(part)[name] for part in self.parts for name in _HOOKS if name in vars(part)]
        self.containers: dict[str, Any] = {}
        self.tensors: list[torch.Tensor] = []
        self._first: dict[Any, str] = {}  # the names of weights by what they are
        tensors = [one for table in self.weights for one in table.values() if one is not None]
        # weights that lie in an attribute too, as nn.LSTM's do: a write to them is no change
        self._model, self._known = set(map(id, named.values())), set(map(id, tensors))
        classes = _classes(map(original_class, named.values()))
        self.namespaces = {cls: vars(cls) for cls in classes}
        for path, part in named.items():
            self._read_part(path, part)
        self._read_weights(named)
        self._read_notes(named)
        for path, part in named.items():
            if len(part._modules) > 1:
                order = f"the order in {path!r}" if path else "the order of the submodules"
                self.facts[order] = Fact(tuple(part._modules), matters=False)
        for cls in self.namespaces:
            self._read_class(cls)
        self.values = dict(self._values(named))

    def _read_part(self, path: str, part: nn.Module) -> None:
        prefix = f"{path}." if path else ""
        if path:
            self.facts[repr(path)] = Fact(original_class(part))
        for name, value in vars(part).items():
            if name not in _NOT_READ and (path or name != "forward"):  # whose own runs around the graphs
                table = vars(part) if path else None
                self._read(prefix + name, value, table, name, matters=hasattr(type(part), name))
        for table_name in _HOOKS if path else ():
            hooks = vars(part).get(table_name, {})
            for number, hook in hooks.items():
                self._read(f"{prefix}{table_name}[{number}]", hook, hooks, number, matters=False)

    def _read_weights(self, named: Mapping[str, nn.Module]) -> None:
        for path, part in named.items():
            for table in (part._parameters, part._buffers):
                for own, tensor in table.items():
                    stays = table is part._buffers or isinstance(tensor, nn.Parameter)
                    self._read_weight(f"{path}.{own}" if path else own, tensor, stays=stays)

    def _read_weight(self, name: str, tensor: torch.Tensor | None, *, stays: bool) -> None:
        self.facts[repr(name)] = Fact(_form(tensor))
        self.facts[f"the device of {name!r}"] = Fact(_place(tensor) if stays else ANY)
        other = name if tensor is None else self._first.setdefault(identity(tensor), name)
        if other != name:
            self.facts[f"the memory of {name!r} and {other!r}"] = Fact(True, matters=False)

    def _read_notes(self, named: Mapping[str, nn.Module]) -> None:
        weights, self.facts = self.facts, {}
        parameters = {
            f"{path}.{own}" if path else own: one
            for path, part in named.items()
            for own, one in part._parameters.items()
            if one is not None
        }
        noted = {id(table[key]) for one in parameters.values() for _, table, key in noted_tensors(one)}
        self._known |= noted  # these are weights: a write to them is no change
        for name, one in parameters.items():
            for key, value in notes_of(one).items():
                self._read(f"{name}.{key}", value, vars(one), key, matters=False)
            for inner, table, key in noted_tensors(one):
                self._watch(table, key)
                self._read_weight(f"{name}.{inner}", table[key], stays=True)
        stay = all(isinstance(one, nn.Parameter) for one in parameters.values())
        self.notes, self.facts = self.facts if stay else None, weights

    def _read_class(self, cls: type) -> None:
        namespace = self.namespaces[cls]
        for name, value in namespace.items():
            if isinstance(value, _OF_CLASSES) or (is_plain(value) and not name.startswith("__")):
                inherited = any(hasattr(base, name) for base in cls.__bases__)
                self._read(f"{cls.__name__}.{name}", value, namespace, name, matters=inherited)

    def _values(self, named: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Those whose memory nothing else has: that would have other values too, or code tells by ``is``."""
        held = (fact.value for fact in chain(self.facts.values(), (self.notes or {}).values()))
        count = Counter(memory_of(one) for one in held if isinstance(one, torch.Tensor))
        count.update(memory_of(one) for table in self.weights for one in table.values() if one is not None)
        for path, part in named.items():
            for name, one in vars(part).items():
                if name not in _NOT_READ and _is_value(one) and count[memory_of(one)] == 1:
                    yield f"{path}.{name}" if path else name, one

    def _read(self, name: str, value: Any, table: Any, key: Any, *, matters: bool) -> None:
        """An attribute, of a dictionary that may be held, and what is in it."""
        fact = repr(name)
        self.facts[fact] = Fact(copy.deepcopy(value) if is_container(value) else unpatched(value), matters)
        if table is not None:
            self._watch(table, key)
        found = data_in(name, value, self._known, self._model)
        self._known |= found.seen
        for inner, held, own in found.entries:
            self._watch(held, own)
            self.facts[repr(inner)] = Fact(unpatched(held[own]), attribute=fact)
        for inner, container in found.containers:
            self.containers[repr(inner)] = container
            self.facts[repr(inner)] = replace(self.facts[repr(inner)], value=copy.deepcopy(container))
        for inner, tensor in found.tensors:
            self.tensors.append(tensor)
            self.facts[writes_to(inner)] = Fact(tensor._version, attribute=fact)

    def _watch(self, table: Any, key: Any) -> None:
        self.tables.append(table)
        self.keys.append(key)


def writes_to(name: str) -> str:
    """The name of the fact how often a tensor was written to."""
    return f"the number of writes to {name!r}"


def _is_value(value: Any) -> bool:
    """Whether it is a tensor that has a form, and values that can be written to, and nothing else."""
    if not isinstance(value, torch.Tensor) or memory_of(value) is None:
        return False
    expanded = any(not step and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
    return not (expanded or value.requires_grad or notes_of(value))


def _classes(of: Iterable[type]) -> Iterator[type]:
    """All classes that have code of the model, each once."""
    found = dict.fromkeys(base for cls in of for base in cls.__mro__)
    return (cls for cls in found if cls.__module__.partition(".")[0] not in _LIBRARIES)


def _form(tensor: torch.Tensor | None) -> str | None:
    """What a graph takes for granted of a weight."""
    if tensor is None:
        return None
    kind = "tensor" if is_dense(tensor) else type(tensor).__name__
    return f"{tensor.dtype} {kind} of shape {list(tensor.shape)}"


def _place(tensor: torch.Tensor | None) -> str | None:
    """A new weight that was made on the CPU is moved to its place."""
    if tensor is None:
        return None
    return "the CPU" if tensor.device.type == "cpu" else "an accelerator"
