"""Copies of models that hold what cannot be copied: a lock, an open file, a generator.

A copy that runs shares such an attribute with the original. A copy that is traced has a stand-in for it,
which refuses to be used: a trace would do once, at its time, what each call is to do.
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
from graphplan.capture.parameter_notes import notes_of
from graphplan.capture.structure import leaves_of
from graphplan.errors import CaptureError, NoGraphError
from graphplan.message_text import first_line

PATCHED = "_graphplan_patched"
"""The attribute of a placed module with the ``forward`` of the model's own instance, if it had one."""

_HOLDS = "Since it has tensors or modules in it, a placed model cannot share it: keep it outside the model"
_placed: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = WeakKeyDictionary()


def stands_for(plain: nn.Module, placed: nn.Module) -> None:
    """Have what refers to ``placed`` refer, in a copy of ``plain``, to that copy."""
    _placed[plain] = weakref.ref(placed)


def trace_patched(module: nn.Module) -> None:
    """Keep the ``forward`` that a model's instance has, which is traced, and have the class's be called."""
    if "forward" in module.__dict__:
        module.__dict__[PATCHED] = module.__dict__.pop("forward")


def copy_to_run(model: nn.Module, memo: Mapping[int, Any]) -> nn.Module:
    """A deep copy that shares with the model what cannot be copied; ``memo`` is as in ``copy.deepcopy``.

    Raises:
        CaptureError: something that has tensors or modules in it cannot be copied.
    """
    return _copied(model, memo, lambda _, value: value)[0]


def of_class(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A module as one of another class: itself, or another object over its attributes.

    The latter where Python cannot change its class, as that of an abstract base class (``ABC, nn.Module``).
    """
    try:
        module.__class__ = cls
    except TypeError:
        attributes, module = module.__dict__, object.__new__(cls)
        object.__setattr__(module, "__dict__", attributes)
    return module


def copy_to_trace(model: nn.Module, memo: Mapping[int, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A deep copy without what cannot be copied, and that by name; otherwise as :func:`copy_to_run`.

    It is without iterators too, of which each call is to take the next.
    """
    made, shared = _copied(model, memo, _NotCopied)
    for table in map(vars, made.modules()):
        table.update({name: _NotCopied(name, value) for name, value in table.items() if is_iterator(value)})
    return made, shared


def _copied(model: nn.Module, memo: Mapping[int, Any], instead: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A copy, and the attributes in whose place it has ``instead`` of their names and values."""
    memo = {**memo, **shared_with_hooks(model)}
    try:
        return _deepcopy(model, model, memo), {}
    except Exception as error:  # what objects do when they are copied is theirs
        found = _uncopied(model, memo)
        if not found:
            raise CaptureError(f"{type(model).__name__} cannot be copied: {first_line(error)}") from error
    stand_ins = {id(value): instead(name, value) for name, value in found.items()}
    return _deepcopy(model, model, {**memo, **stand_ins}), found


def _deepcopy(value: Any, model: nn.Module, memo: Mapping[int, Any]) -> Any:
    """A copy of a model, or of what is in it."""
    placed = _placed[model]() if model in _placed else None
    parts = [*model.modules(), *([] if placed is None else [placed])]
    known = _Memo({**memo, **proxies_of(parts)}, {} if placed is None else {id(placed): id(model)})
    with _WithoutHistory():
        made = copy.deepcopy(value, known)
        if value is model:
            keep_unpacked(made)
            _make_alike(model, made, memo, known)
            _copy_notes(model, memo, known)
            refer_to_copies(made, parts, known)
    return made


def _make_alike(model: nn.Module, made: nn.Module, memo: Mapping[int, Any], known: _Memo) -> None:
    """Give modules that make themselves anew when they are copied what they lack then.

    Their mode, and the tensors of ``memo``; a ``GraphModule`` also its hooks, and attributes that its graph
    does not read.
    """
    copies = dict(made.named_modules())
    for path, part in model.named_modules():
        if (mine := copies.get(path)) is None:
            continue
        mine.training = part.training
        for table, own in ((mine._parameters, part._parameters), (mine._buffers, part._buffers)):
            for name, tensor in own.items():
                if id(tensor) in memo and name in table and table[name] is not memo[id(tensor)]:
                    table[name] = memo[id(tensor)]
        if isinstance(part, fx.GraphModule):
            own = vars(part).items()
            lost = {name: value for name, value in own if "_hooks" in name or name not in vars(mine)}
            mine.__dict__.update(copy.deepcopy(lost, known))
            mine.graph = copy.deepcopy(part.graph, known)


def _copy_notes(model: nn.Module, memo: Mapping[int, Any], known: _Memo) -> None:
    """Give what stands for parameters copies of what is noted on these."""
    for parameter in model.parameters():
        stand_in = memo.get(id(parameter), parameter)
        if stand_in is not parameter:
            vars(stand_in).update(copy.deepcopy(notes_of(parameter), known))


class _Memo(dict[Any, Any]):
    """That of a copy, by which a model is found also where its placed one is asked for."""

    def __init__(self, known: Mapping[int, Any], own: Mapping[int, int]) -> None:
        super().__init__(known)
        self._own = own

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        return super().get(self._own.get(key, key), default)


class _WithoutHistory(TorchFunctionMode):
    """Copies tensors that were computed with gradients, which torch refuses to copy, as values alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _uncopied(model: nn.Module, memo: Mapping[int, Any]) -> dict[str, Any]:
    """Name -> attribute that cannot be copied."""
    known = {**memo, **{id(part): part for part in model.modules()}}
    found: dict[str, Any] = {}
    for path, part in model.named_modules():
        noted = [(key, notes_of(one)) for key, one in part._parameters.items() if one is not None]
        notes = {f"{key}.{name}": note for key, each in noted for name, note in each.items()}
        for name, value in (vars(part) | notes).items():
            where = f"{path}.{name}" if path else name
            try:
                _deepcopy(value, model, known)
            except Exception as error:  # as above
                if any(isinstance(leaf, torch.Tensor | nn.Module) for leaf in leaves_of(value)):
                    raise CaptureError(
                        f"{where!r} of {type(model).__name__} cannot be copied: {first_line(error)}. {_HOLDS}"
                    ) from error
                found[where] = value
    return found


class _NotCopied:
    """Stands for an attribute in the copy that is traced; whatever is done with it is an error."""

    def __init__(self, name: str, value: Any) -> None:
        why = "goes on" if is_iterator(value) else "cannot be copied"
        kind = type(value).__name__
        self._said = f"forward uses {name!r} ({kind}), which {why}: a graph would not do it in each call"

    def _refuse(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NoGraphError(self._said)

    __call__ = __enter__ = __exit__ = __iter__ = __next__ = __len__ = __getitem__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()
