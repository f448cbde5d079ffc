"""A hash of all that determines a trace: attributes, shapes of weights, and the code that runs.

Two processes with the same hash trace the same graph. Attributes are hashed by value, recursively. User code
is hashed by its bytecode, its file, and the globals to which it refers, wherever these are defined. Code of
installed packages is hashed by bytecode, and by the user's patches of the package's modules. For the
model's own classes the globals of their methods are hashed, too, so that a function patched by another
package is noticed. Torch and Python are hashed by their versions, torch also by its patched functions. Code
that is reached through other code is left to :mod:`graphplan.capture.saved.source_files`.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphplan._compat.torch import SERVED_BY
from graphplan.capture.changes.model_functions import EMPTY, content_of
from graphplan.capture.model.model_weights import identity, is_dense
from graphplan.capture.parameter_attributes import custom_attributes
from graphplan.capture.saved.code_objects import (
    code_parts,
    file_of,
    file_of_module,
    function_of,
    globals_of,
    package_of,
)
from graphplan.capture.saved.plain_values import NotSavedError
from graphplan.capture.saved.source_files import state_of
from graphplan.capture.source_lines import is_installed, is_of_versions
from graphplan.capture.structure import CONTAINERS, PLAIN, PLAIN_TYPES

_CONTAINERS = (*CONTAINERS, Mapping)
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_PROCESS_ATTRIBUTES = ("_original_object_hash", "_abc_impl")  # hash of a GenerationConfig; ABC caches
_STATE_HOOKS = re.compile(r"_(load_)?state_dict_\w*hooks$")  # they run only when weights are saved or loaded
_PATCHED_OWNERS = (torch, torch.nn.functional, torch.Tensor, nn.Module)
_HEAP_TYPE = 1 << 9  # CPython's flag of classes defined in Python
_C_CALLABLES = (  # described by their names
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    types.ClassMethodDescriptorType,
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)


class Description:
    """A hash of values that are added one by one.

    Attributes:
        tensors: identities of the tensors whose values are in the hash.
    """

    def __init__(self, weights: Mapping[int, str]) -> None:
        """``weights``: id of a tensor whose values are not hashed -> text to hash for it."""
        self._hash = hashlib.sha256()
        self._weights = weights
        self._seen: dict[Any, int] = {}  # id, alone or with an aspect of the value -> order of its first use
        self._enclosing: set[int] = set()  # ids of the containers that enclose the current value
        self._kept: list[Any] = []  # seen values, kept alive so that no id is reused
        self.tensors: set[Any] = set()

    def digest(self) -> str:
        """Return the hash of all added values."""
        return self._hash.hexdigest()

    def update(self, *texts: object) -> None:
        """Hash texts, each with its length, so that their boundaries count."""
        for text in texts:
            data = text if isinstance(text, bytes) else str(text).encode()
            self._hash.update(b"%d:" % len(data) + data)

    def add(self, value: Any, where: str) -> None:
        """Hash a value; ``where`` names it in messages.

        Raises:
            NotSavedError: the value has a type whose objects cannot be compared.
        """
        plain = next((cls for cls in PLAIN if isinstance(value, cls)), None)
        if isinstance(value, enum.Enum):
            self.update(_name(type(value)), value.name)
        elif plain is not None:
            self.update(_name(type(value)), plain.__repr__(value))
        elif isinstance(value, np.generic | slice):  # NumPy's base class does not show the number
            self.update(type(value).__name__, repr(value))
        elif id(value) in self._enclosing:
            self.update("around")
        elif isinstance(value, _CONTAINERS):  # by value only; their identity does not matter
            self._enclosing.add(id(value))
            self._container(value, where)
            self._enclosing.remove(id(value))
        elif self._is_new(id(value), value):
            self._add_new(value, where)

    def _is_new(self, key: Any, value: Any) -> bool:
        """Whether a value is new under a key; if it is not, hash the number of its first use."""
        if key in self._seen:
            self.update("again", self._seen[key])
            return False
        self._seen[key] = len(self._seen)
        self._kept.append(value)
        return True

    def _add_new(self, value: Any, where: str) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value, where)
        elif isinstance(value, nn.Module):
            self._module(value, where)
        elif isinstance(value, type):
            self.add_class(value)
        elif callable(value) and self._callable(value, where):
            pass
        else:
            self._object(value, where)

    def _container(self, value: Any, where: str) -> None:
        self.update(_name(type(value)), len(value))
        if isinstance(value, Mapping):
            for key, one in value.items():
                self.add(key, f"a key of {where}")
                self.add(one, f"{where}[{key!r}]")
        else:
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            for index, one in enumerate(items):
                self.add(one, f"{where}[{index}]")
        for name, one in getattr(value, "__dict__", {}).items():
            self.update(name)
            self.add(one, f"{where}.{name}")

    def _object(self, value: Any, where: str) -> None:
        if isinstance(value, types.ModuleType | logging.Logger):
            self.update(
                type(value).__name__, value.name if isinstance(value, logging.Logger) else value.__name__
            )
        elif isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
            self.update("slot", value.__name__)
        elif isinstance(value, weakref.ref):
            self.add(value(), where)
        elif isinstance(value, re.Pattern):
            self.update("pattern", value.pattern, value.flags)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self.update("array", value.dtype, value.shape, value.tobytes())
        elif isinstance(value, pytree.TreeSpec):
            self.add((value.type, value.context, value.children()), where)
        elif _is_python_class(type(value)):
            self.add_class(type(value))
            for name, one in _attributes(value):
                self.update(name)
                self.add(one, f"{where}.{name}")
        elif type(value).__module__ in sys.stdlib_module_names and (parts := _pickled_parts(value)):
            self.add(parts, where)
        else:
            raise NotSavedError(f"{where} is an object of {_name(type(value))}, whose value is unknown")

    def _tensor(self, tensor: torch.Tensor, where: str) -> None:
        if id(tensor) in self._weights:
            self.update("weight", self._weights[id(tensor)])
            for name, one in custom_attributes(tensor).items():
                self.update(name)
                self.add(one, f"{where}.{name}")
            return
        if not is_dense(tensor) or tensor.device.type != "cpu":
            raise NotSavedError(f"{where} is a tensor of {type(tensor).__name__} on {tensor.device}")
        self.update("tensor", tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        self.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self.tensors.add(identity(tensor))

    def _module(self, module: nn.Module, where: str) -> None:
        self.add_class(type(module), follow=True)
        for name, value in vars(module).items():
            if name not in (*_MODULE_TABLES, SERVED_BY) and not _STATE_HOOKS.search(name):
                self.update(name)
                self.add(value, f"{where}.{name}")
        for table in _MODULE_TABLES:
            for name, value in vars(module)[table].items():
                self.update(table, name)
                self.add(value, f"{where}.{name}")

    # -- code --------------------------------------------------------------------------------------

    def add_class(self, cls: type, *, follow: bool = False) -> None:
        """Hash the code of a class; if ``follow``, also globals that methods of installed packages use."""
        for one in cls.__mro__:
            if not self._is_new((id(one), follow), one):
                continue
            self.update("class", _name(one))
            file = file_of(one)
            if is_of_versions(file):
                self._replaced(one)
                continue
            self._file(file)
            for name, value in list(vars(one).items()):  # hashing an instance among them may add names
                function = function_of(value)
                if function is not None:
                    self.update(name)
                    self._function(function, f"{_name(one)}.{name}", follow=follow)
                elif not (is_installed(file) or name.startswith("__") or name in _PROCESS_ATTRIBUTES):
                    self.update(name)
                    self.add(value, f"{_name(one)}.{name}")

    def _replaced(self, owner: Any, is_own: Callable[[str], bool] = is_of_versions) -> None:
        """Hash the functions of a class or module that others have patched, that is not ``is_own(file)``."""
        for name, value in list(vars(owner).items()):
            function = function_of(value)
            if function is not None and not is_own(function.__code__.co_filename):
                self.update("replaced", name)
                self._function(function, f"{getattr(owner, '__name__', owner)}.{name}")

    def add_torch(self) -> None:
        """Hash the functions that others have patched in torch."""
        for owner in _PATCHED_OWNERS:
            self._replaced(owner)

    def _callable(self, value: Any, where: str) -> bool:
        """Hash a function of any kind; return whether the value is one."""
        if isinstance(value, types.MethodType):
            self.add(value.__func__, where)
            self.add(value.__self__, where)
        elif isinstance(value, functools.partial):
            for one in (value.func, value.args, value.keywords):
                self.add(one, where)
        elif (function := function_of(value)) is not None:
            self._function(function, where)
        elif isinstance(value, _C_CALLABLES) or _is_numpy_function(value):
            self.update("builtin", getattr(value, "__module__", ""), str(value).partition(" at 0x")[0])
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType):
                self.add(owner, where)
        else:
            return False
        return True

    def _function(self, function: types.FunctionType, where: str, *, follow: bool = False) -> None:
        code = function.__code__
        if not self._is_new((id(function), follow), function):
            return
        self.update("function", function.__module__, function.__qualname__)
        for cell in function.__closure__ or ():
            self._cell(cell, where, code)
        if is_of_versions(code.co_filename):
            return
        self.update(*code_parts(code))
        self._file(code.co_filename)
        if not is_installed(code.co_filename):
            self.add((function.__defaults__, function.__kwdefaults__), f"the defaults of {where}")
            for name, value in globals_of(function):
                self.update(name)
                self.add(value, f"{name}, which {where} refers to,")
        elif follow:
            for name, value in globals_of(function):
                self.update(name)
                self._without_attributes(value)

    def _cell(self, cell: Any, where: str, code: types.CodeType) -> None:
        value = content_of(cell)
        if value is EMPTY:
            return
        function = function_of(value) if callable(value) and not isinstance(value, type) else None
        if function is not None:
            self._function(function, where)
        elif isinstance(value, type) or is_of_versions(code.co_filename):
            self.update("cell", _name(value) if isinstance(value, type) else _name(type(value)))
        elif is_installed(code.co_filename):
            self._without_attributes(value)
        else:
            self.add(value, f"a variable around {where}")

    def _without_attributes(self, value: Any) -> None:
        """Hash a value of an installed package by plain value or code, without its attributes."""
        if type(value) in PLAIN_TYPES:
            self.update(repr(value))
        elif isinstance(value, type):
            self.update(_name(value))
            for function in map(function_of, vars(value).values()):
                if function is not None:
                    self.update(*code_parts(function.__code__))
        elif (function := function_of(value)) is not None:
            self._function(function, function.__qualname__)
        elif isinstance(value, Mapping):
            if isinstance(value, weakref.WeakValueDictionary):  # its items come and go
                return
            for key, one in sorted(value.items(), key=str):
                self.update(key)
                if (function := function_of(one)) is not None:
                    self.update(*code_parts(function.__code__))
        else:
            self.update(_name(type(value)))

    def _file(self, file: str) -> None:
        """Hash a user's file; for a file of an installed package, the user's patches of its modules."""
        package = package_of(file) if is_installed(file) else ""
        if not self._is_new(("file", package or file), file):
            return
        if not package:
            self.update("file", state_of(file))
            return
        for _, module in sorted(sys.modules.copy().items()):  # other threads may import meanwhile
            other = file_of_module(module)
            if other and (other == package or other.startswith(f"{package}/")):
                self._replaced(module, _is_not_user_code)


def _is_not_user_code(file: str) -> bool:
    """Whether code belongs to a package or Python, or was generated."""
    return is_of_versions(file) or is_installed(file) or file.startswith("<")


def _pickled_parts(value: Any) -> tuple[Any, ...] | None:
    """Return the state that pickle would store of an object; None if it cannot be pickled, as a lock."""
    try:
        parts = value.__reduce_ex__(4)
    except TypeError:
        return None
    return parts if isinstance(parts, tuple) else None


def _is_numpy_function(value: Any) -> bool:
    """Whether a value is a C function that NumPy exports by its name, such as ``np.sin``."""
    if type(value).__module__ != "numpy":
        return False
    home = getattr(value, "__module__", "numpy")  # ufuncs of NumPy 1 have none
    return getattr(sys.modules.get(home), getattr(value, "__name__", ""), None) is value


def _is_python_class(cls: type) -> bool:
    """Whether a class and its bases are defined in Python, so that all state is in attributes."""
    return all(one is object or one.__flags__ & _HEAP_TYPE for one in cls.__mro__)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    state = object.__getstate__(value)
    for table in state if isinstance(state, tuple) else (state,):  # (__dict__, slots)
        yield from ((name, one) for name, one in (table or {}).items() if name not in _PROCESS_ATTRIBUTES)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
