"""Copies of models that hold attributes that cannot be copied: a lock, an open file, a generator.

A copy that runs shares such an attribute with the original. A copy that is traced has a stand-in for it,
which raises when it is used: the trace would use it once, and forward passes of the graph never.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from graphplan._compat.bitsandbytes import keep_unpacked
from graphplan.capture.changes.attribute_snapshots import is_iterator
from graphplan.capture.model.function_references import proxies_of, refer_to_copies, shared_with_hooks
from graphplan.capture.parameter_attributes import custom_attributes
from graphplan.capture.structure import leaves_of
from graphplan.errors import CaptureError, NoGraphError
from graphplan.message_text import first_line

PATCHED = "_graphplan_patched"
"""The attribute of a placed module that holds the ``forward`` of the model's instance, if it had one."""

_HOLDS = "Since it has tensors or modules in it, a placed model cannot share it: keep it outside the model"
_placed: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = WeakKeyDictionary()


def register_placed(plain: nn.Module, placed: nn.Module) -> None:
    """Make references to ``placed`` in a copy of ``plain`` refer to that copy."""
    _placed[plain] = weakref.ref(placed)


def trace_patched(module: nn.Module) -> None:
    """Move the instance's own ``forward``, which is traced, so that calls run that of the class."""
    if "forward" in module.__dict__:
        module.__dict__[PATCHED] = module.__dict__.pop("forward")


def copy_to_run(model: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """Return a deep copy that shares uncopyable attributes with the model; ``memo`` as in ``copy.deepcopy``.

    Raises:
        CaptureError: the model, or an attribute that has tensors or modules in it, cannot be copied.
    """
    return _copied(model, memo, lambda _, value: value)[0]


def of_class(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Return a module as an instance of ``cls``: itself, or another object that shares its attributes.

    The latter where Python cannot change its class, as of an abstract base class (``ABC, nn.Module``).
    """
    try:
        module.__class__ = cls
    except TypeError:
        attributes, module = module.__dict__, object.__new__(cls)
        object.__setattr__(module, "__dict__", attributes)
    return module


def copy_to_trace(model: nn.Module, memo: Mapping[int, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return a deep copy with stand-ins for uncopyable attributes, and these attributes by name.

    Iterators have stand-ins, too: each call should take the next item. Otherwise as :func:`copy_to_run`.
    """
    copied, uncopied = _copied(model, memo, _NotCopied)
    for table in map(vars, copied.modules()):
        table.update({name: _NotCopied(name, value) for name, value in table.items() if is_iterator(value)})
    return copied, uncopied


def _copied(model: nn.Module, memo: Mapping[int, Any], stand_in: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a copy, and the attributes that it replaces by ``stand_in(name, value)``."""
    memo = {**memo, **shared_with_hooks(model)}
    try:
        return _deepcopy(model, model, memo), {}
    except Exception as error:  # objects define how they are copied, and may raise anything
        uncopied = _uncopied(model, memo)
        if not uncopied:
            raise CaptureError(f"{type(model).__name__} cannot be copied: {first_line(error)}") from error
    stand_ins = {id(value): stand_in(name, value) for name, value in uncopied.items()}
    return _deepcopy(model, model, {**memo, **stand_ins}), uncopied


def _deepcopy(value: Any, model: nn.Module, memo: Mapping[int, Any]) -> Any:
    """Return a deep copy of a model, or of a value in it."""
    placed = _placed[model]() if model in _placed else None
    parts = list(model.modules())
    if placed is not None:
        parts.append(placed)
    copies = _Memo({**memo, **proxies_of(parts)}, {} if placed is None else {id(placed): id(model)})
    with _WithoutHistory():
        copied = copy.deepcopy(value, copies)
        if value is model:
            keep_unpacked(copied)
            _restore_lost(model, copied, memo, copies)
            _copy_attributes(model, memo, copies)
            refer_to_copies(copied, parts, copies)
    return copied


def _restore_lost(model: nn.Module, copied: nn.Module, memo: Mapping[int, Any], copies_memo: _Memo) -> None:
    """Restore attributes that modules with a ``__deepcopy__`` of their own lose in a copy.

    These are their mode, and the tensors of ``memo``; of a ``GraphModule`` also hooks, and attributes that
    its graph does not read.
    """
    copies = dict(copied.named_modules())
    for path, part in model.named_modules():
        if (part_copy := copies.get(path)) is None:
            continue
        part_copy.training = part.training
        for table, own in ((part_copy._parameters, part._parameters), (part_copy._buffers, part._buffers)):
            for name, tensor in own.items():
                if id(tensor) in memo and name in table and table[name] is not memo[id(tensor)]:
                    table[name] = memo[id(tensor)]
        if isinstance(part, fx.GraphModule):
            own = vars(part).items()
            lost = {name: value for name, value in own if "_hooks" in name or name not in vars(part_copy)}
            part_copy.__dict__.update(copy.deepcopy(lost, copies_memo))
            part_copy.graph = copy.deepcopy(part.graph, copies_memo)


def _copy_attributes(model: nn.Module, memo: Mapping[int, Any], copies: _Memo) -> None:
    """Copy the attributes of parameters to the tensors that stand for these in ``memo``."""
    for parameter in model.parameters():
        stand_in = memo.get(id(parameter), parameter)
        if stand_in is not parameter:
            vars(stand_in).update(copy.deepcopy(custom_attributes(parameter), copies))


class _Memo(dict[Any, Any]):
    """The memo of a deep copy; ``get`` finds the copy of a model also by the id of its placed module."""

    def __init__(self, copies: Mapping[int, Any], model_ids: Mapping[int, int]) -> None:
        super().__init__(copies)
        self._model_ids = model_ids

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._model_ids.get(key, key), default)


class _WithoutHistory(TorchFunctionMode):
    """Copies tensors that autograd computed, which torch refuses to copy, without their history."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _uncopied(model: nn.Module, memo: Mapping[int, Any]) -> dict[str, Any]:
    """Return name -> attribute that cannot be copied."""
    copies = {**memo, **{id(part): part for part in model.modules()}}
    uncopied: dict[str, Any] = {}
    for path, part in model.named_modules():
        parameters = [
            (key, parameter) for key, parameter in part._parameters.items() if parameter is not None
        ]
        custom = {
            f"{key}.{name}": value
            for key, parameter in parameters
            for name, value in custom_attributes(parameter).items()
        }
        for name, value in (vars(part) | custom).items():
            label = f"{path}.{name}" if path else name
            try:
                _deepcopy(value, model, copies)
            except Exception as error:  # objects define how they are copied, and may raise anything
                if any(isinstance(leaf, torch.Tensor | nn.Module) for leaf in leaves_of(value)):
                    raise CaptureError(
                        f"{label!r} of {type(model).__name__} cannot be copied: {first_line(error)}. {_HOLDS}"
                    ) from error
                uncopied[label] = value
    return uncopied


class _NotCopied:
    """Stand-in for an attribute in the copy that is traced; any use raises NoGraphError."""

    def __init__(self, name: str, value: Any) -> None:
        why = "advances" if is_iterator(value) else "cannot be copied"
        kind = type(value).__name__
        self._message = f"forward uses {name!r} ({kind}), which {why}: a graph would not use it in each call"

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NoGraphError(self._message)

    __call__ = __enter__ = __exit__ = __iter__ = __next__ = __len__ = __getitem__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()
