"""Read what a trace may depend on besides weights, inputs and modes: facts by name, and where to reread them.

::

    blocks.1         the class of a submodule         norm.eps       a plain attribute
    head.weight      dtype and shape of a weight      settings.k     an entry of an object or a container
    head.weight.k    an attribute of a parameter
    Block.forward    an attribute of a class          scale          the number of writes to a tensor
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
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
from graphplan.capture.parameter_attributes import attribute_tensors, custom_attributes
from graphplan.capture.thread_patches import unpatched
from graphplan.runtime.fallback.added_hooks import HOOK_TABLES
from graphplan.runtime.fallback.derived_classes import original_class

# `training` and PEFT's adapters are modes, for which there are separate graphs; the rest is torch's or ours
_ADAPTERS = {
    "_disable_adapters",
    "_adapters_disabled",
    "_active_adapter",
    "active_adapter",
    "merged_adapters",
}
# generate() calls it between forward passes; PEFT replaces it while it generates
_GENERATES = {"prepare_inputs_for_generation"}
_LIGHTNINGS = {"_current_fx_name"}  # its trainer names the step here that it runs
_TRLS = {"model_tags"}  # its trainers name themselves here, for the model card
_OURS = {"_graphplan", PATCHED, SERVED_BY}
_IGNORED = {*vars(nn.Module()), *_OURS, *_ADAPTERS, *_GENERATES, *_LIGHTNINGS, *_TRLS}
_LIBRARIES = {"abc", "builtins", "torch", "typing"}
_CLASS_CODE = (FunctionType, classmethod, staticmethod, property, partialmethod, type)
ANY = object()
"""Equals every value: for example the device of a tensor that stands in for a parameter during a call of
``torch.func.functional_call``, on which a trace does not depend."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One property of a model that a trace may have read.

    Attributes:
        value: the object.
        matters: whether it is a change if the fact is new.
        attribute: the name of the fact that contains it, if any: then it is a change if only it is new.
    """

    value: Any
    matters: bool = True
    attribute: str | None = None


class ModelReading:
    """The facts about one module. It does not refer to the module itself, which would be a reference cycle.

    Attributes:
        facts: name, as in messages -> fact.
        attribute_facts: likewise, for attributes of parameters; None while tensors stand in for parameters,
            as in ``torch.func.functional_call``.
        root: the plain attributes of the module itself.
        tables: the dictionaries, containers and class namespaces that hold all other objects.
        keys: the key of each object in its table.
        parts: the submodules.
        children: the tables of submodules.
        weights: the tables of parameters and buffers.
        hooks: the tables of hooks of the submodules.
        namespaces: class -> attributes, of the classes with code of the model.
        containers: name of the fact -> plain container, which is compared as a whole.
        tensors: the tensors that are not weights.
        values: name -> tensor in an attribute of a module, whose values may change.
    """

    def __init__(self, module: nn.Module, left_out: Set[str] = frozenset()) -> None:
        """Read the module, without the attributes that have these names."""
        named = dict(module.named_modules())
        self._left_out = left_out
        self.facts: dict[str, Fact] = {}
        self.attribute_facts: dict[str, Fact] | None = {}
        self.root = {name: value for name, value in vars(module).items() if name not in _IGNORED | left_out}
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
        self.hooks = [vars(part)[name] for part in self.parts for name in HOOK_TABLES if name in vars(part)]
        self.containers: dict[str, Any] = {}
        self.tensors: list[torch.Tensor] = []
        self._first_names: dict[Any, str] = {}  # identity of a weight -> its first name
        tensors = [t for table in self.weights for t in table.values() if t is not None]
        # an attribute may hold weights too, as in nn.LSTM: a write to these is not a change
        self._module_ids, self._known_ids = set(map(id, named.values())), set(map(id, tensors))
        classes = _classes(map(original_class, named.values()))
        self.namespaces = {cls: vars(cls) for cls in classes}
        for path, part in list(named.items())[1:]:  # first: attributes of a module change with it
            self.facts[repr(path)] = Fact(original_class(part))
        for path, part in named.items():
            self._read_part(path, part)
        self._read_weights(named)
        self._read_parameter_attributes(named)
        for path, part in named.items():
            if len(part._modules) > 1:
                order = f"the order in {path!r}" if path else "the order of the submodules"
                self.facts[order] = Fact(tuple(part._modules), matters=False)
        for cls in self.namespaces:
            self._read_class(cls)
        self.values = dict(self._values(named))

    def _read_part(self, path: str, part: nn.Module) -> None:
        prefix = f"{path}." if path else ""
        for name, value in vars(part).items():
            is_own = name not in _IGNORED and prefix + name not in self._left_out
            if is_own and (path or name != "forward"):  # the root's runs around the graphs
                table = vars(part) if path else None
                self._read(prefix + name, value, table, name, matters=hasattr(type(part), name))
        if not path:
            return
        for table_name in HOOK_TABLES:
            hooks = vars(part).get(table_name, {})
            for key, hook in hooks.items():
                self._read(f"{prefix}{table_name}[{key}]", hook, hooks, key, matters=False)

    def _read_weights(self, named: Mapping[str, nn.Module]) -> None:
        for path, part in named.items():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    stays = table is part._buffers or isinstance(tensor, nn.Parameter)
                    self._read_weight(f"{path}.{name}" if path else name, tensor, stays=stays)

    def _read_weight(self, name: str, tensor: torch.Tensor | None, *, stays: bool) -> None:
        self.facts[repr(name)] = Fact(_layout_text(tensor))
        self.facts[f"the device of {name!r}"] = Fact(_device_kind(tensor) if stays else ANY)
        first = name if tensor is None else self._first_names.setdefault(identity(tensor), name)
        if first != name:
            self.facts[f"the memory of {name!r} and {first!r}"] = Fact(True, matters=False)

    def _read_parameter_attributes(self, named: Mapping[str, nn.Module]) -> None:
        facts, self.facts = self.facts, {}
        parameters = {
            f"{path}.{name}" if path else name: parameter
            for path, part in named.items()
            for name, parameter in part._parameters.items()
            if parameter is not None
        }
        attribute_ids = {
            id(table[key]) for p in parameters.values() for _, table, key in attribute_tensors(p)
        }
        self._known_ids |= attribute_ids  # these are weights: a write to them is not a change
        for name, parameter in parameters.items():
            for key, value in custom_attributes(parameter).items():
                self._read(f"{name}.{key}", value, vars(parameter), key, matters=False)
            for inner, table, key in attribute_tensors(parameter):
                self._watch(table, key)
                self._read_weight(f"{name}.{inner}", table[key], stays=True)
        all_parameters = all(isinstance(parameter, nn.Parameter) for parameter in parameters.values())
        self.attribute_facts, self.facts = self.facts if all_parameters else None, facts

    def _read_class(self, cls: type) -> None:
        namespace = self.namespaces[cls]
        for name, value in namespace.items():
            if isinstance(value, _CLASS_CODE) or (is_plain(value) and not name.startswith("__")):
                inherited = any(hasattr(base, name) for base in cls.__bases__)
                self._read(f"{cls.__name__}.{name}", value, namespace, name, matters=inherited)

    def _values(self, named: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of each tensor attribute with memory of its own, whose values may change.

        Tensors that share memory are left out: others would change too, or code may compare them by ``is``.
        """
        objects = (fact.value for fact in chain(self.facts.values(), (self.attribute_facts or {}).values()))
        count = Counter(memory_of(value) for value in objects if isinstance(value, torch.Tensor))
        count.update(memory_of(t) for table in self.weights for t in table.values() if t is not None)
        for path, part in named.items():
            for name, value in vars(part).items():
                full = f"{path}.{name}" if path else name
                is_own = name not in _IGNORED and full not in self._left_out
                if is_own and _is_value(value) and count[memory_of(value)] == 1:
                    yield full, value

    def _read(self, name: str, value: Any, table: Any, key: Any, *, matters: bool) -> None:
        """Add the facts about an attribute and its contents; ``table`` is None if it must not be kept."""
        fact = repr(name)
        self.facts[fact] = Fact(copy.deepcopy(value) if is_container(value) else unpatched(value), matters)
        if table is not None:
            self._watch(table, key)
        contents = data_in(name, value, self._known_ids, self._module_ids)
        self._known_ids |= contents.seen
        for inner, entry_table, entry_key in contents.entries:
            self._watch(entry_table, entry_key)
            self.facts[repr(inner)] = Fact(unpatched(entry_table[entry_key]), attribute=fact)
        for inner, container in contents.containers:
            self.containers[repr(inner)] = container
            self.facts[repr(inner)] = replace(self.facts[repr(inner)], value=copy.deepcopy(container))
        for inner, tensor in contents.tensors:
            self.tensors.append(tensor)
            self.facts[writes_to(inner)] = Fact(tensor._version, attribute=fact)

    def _watch(self, table: Any, key: Any) -> None:
        self.tables.append(table)
        self.keys.append(key)


def writes_to(name: str) -> str:
    """Return the name of the fact that counts the writes to a tensor."""
    return f"the number of writes to {name!r}"


def _is_value(value: Any) -> bool:
    """Whether a value is a writable tensor without custom attributes that requires no gradient."""
    if not isinstance(value, torch.Tensor) or memory_of(value) is None:
        return False
    expanded = any(not step and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
    return not (expanded or value.requires_grad or custom_attributes(value))


def _classes(types: Iterable[type]) -> Iterator[type]:
    """Return these classes and their bases, each once, without those of torch and Python."""
    classes = dict.fromkeys(base for cls in types for base in cls.__mro__)
    return (cls for cls in classes if cls.__module__.partition(".")[0] not in _LIBRARIES)


def _layout_text(tensor: torch.Tensor | None) -> str | None:
    """Return the properties of a weight on which a graph depends, as text."""
    if tensor is None:
        return None
    kind = "tensor" if is_dense(tensor) else type(tensor).__name__
    return f"{tensor.dtype} {kind} of shape {list(tensor.shape)}"


def _device_kind(tensor: torch.Tensor | None) -> str | None:
    """Return the type of device: a new weight that was made on the CPU is a change, and is then moved."""
    if tensor is None:
        return None
    return "the CPU" if tensor.device.type == "cpu" else "an accelerator"
