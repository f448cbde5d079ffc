"""What ``torch.export`` does beside tracing that no capture needs. Tested with torch 2.13.

It is half of the time of a Llama's export: Python code is compiled for every graph that a pass makes,
``no_grad`` blocks are split off and put back, and sizes are computed anew, symbol by symbol, in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor, sym_node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, has_free_unbacked_symbols

from graphplan._compat import Replacement, private

_TESTED = "2.13"

_OF_TWO_SIZES = ("add", "sub", "mul", "eq", "ne", "gt", "ge", "lt", "le", "sym_max")


def less_work(*, keep_grad: bool) -> list[Replacement]:
    """What to replace while ``torch.export`` is at work; the graph is the same.

    Changes of the gradient mode are left in it only if ``keep_grad``.
    """
    found: list[Replacement] = [(fx.GraphModule, "recompile", _when_called)]
    sizes = private(sym_node, "SymNode", "torch", _TESTED)
    if hasattr(ShapeEnv(), "_replacements_version_counter"):  # torch 2.11 does not say what it has replaced
        known = [name for name in _OF_TWO_SIZES if private(sizes, name, "torch", _TESTED)]
        found += [(sizes, name, _remembered) for name in known]
        found.append((sizes, "maybe_as_int", _number))
    private(proxy_tensor, "_extract_tensor_metadata", "torch", _TESTED)
    found.append((proxy_tensor, "_extract_tensor_metadata", lambda _: _nothing))
    private(FakeTensorMode, "_get_output_info_for_cache_entry", "torch", _TESTED)
    found.append((FakeTensorMode, "_get_output_info_for_cache_entry", _tried_once))
    mode = private(proxy_tensor, "PreDispatchTorchFunctionMode", "torch", _TESTED)
    changes = _with_changes_of_grad_mode if keep_grad else _without_grad_mode
    found.append((mode, "__torch_function__", changes))
    return found


def _when_called(own: Callable[[Any], Any]) -> Callable[[Any], None]:
    """``GraphModule.recompile`` that leaves the code to the first call of the module."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own(self)
        return self(*args, **kwargs)

    def recompile(self: Any) -> None:
        codegen = self.graph._codegen
        if hasattr(codegen, "pytree_info"):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(self).forward = forward

    return recompile


def _without_grad_mode(own: Callable[..., Any]) -> Callable[..., Any]:
    """The mode that writes ``set_grad_enabled`` into the graph, without that."""

    def function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            return func(*args)
        return own(self, func, types, args, kwargs)

    return function


def _with_changes_of_grad_mode(own: Callable[..., Any]) -> Callable[..., Any]:
    """The mode, without ``set_grad_enabled`` to what is set.

    In the forward of a ``torch.autograd.Function`` no graph says that gradients are off, nor that they are on
    again: the end of a ``no_grad`` block in there would leave them off for the rest of the graph.
    """

    def function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and args[0] == torch.is_grad_enabled():
            return None
        return own(self, func, types, args, kwargs)

    return function


def _remembered(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An operation of two sizes that is computed once; its results are objects of their own."""
    tracing = proxy_tensor.get_proxy_mode
    known: dict[Any, tuple[Any, Any, Any]] = {}  # with the operands, so that no other has their id

    def operation(a: Any, b: Any) -> Any:
        if tracing() is not None:  # it goes into the graph
            return own(a, b)
        x, y, env = a._expr, b._expr, a.shape_env
        key = (id(x), id(y), id(env), env._replacements_version_counter, a.pytype, b.pytype)
        entry = known.get(key)
        if entry is None:
            entry = known[key] = x, y, own(a, b)
        return _twin(entry[2])

    return operation


def _twin(size: Any) -> Any:
    """As ``copy.copy``, which takes four times as long; a Llama of 126 layers asks for half a million."""
    made = object.__new__(type(size))
    made.__dict__.update(size.__dict__)
    return made


def _number(own: Callable[[Any], int | None]) -> Callable[[Any], int | None]:
    """Whether a size is a number, and which, looked up once."""
    known: dict[Any, tuple[Any, int | None]] = {}

    def maybe_as_int(size: Any) -> int | None:
        expression, env = size._expr, size.shape_env
        if env is None:
            return own(size)
        key = (id(expression), id(env), env._replacements_version_counter)
        found = known.get(key)
        if found is None:
            found = known[key] = size, own(size)
        return found[1]

    return maybe_as_int


_ALIKE: set[str] = set()
"""The keys of fake results of which such notes have made the like."""


def _tried_once(own: Callable[..., Any]) -> Callable[..., Any]:
    """What the cache of fake results notes of one, which makes another tensor of the note and compares keys.

    That is a fifth of a Llama's trace, and tells the same of all tensors that have these keys.
    """

    def info(mode: Any, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
        keys = str(torch._C._dispatch_key_set(output)) if isinstance(output, torch.Tensor) else ""
        known = keys in _ALIKE and not has_free_unbacked_symbols(output)
        if known:
            mode._output_from_cache_entry = lambda *_: output  # in the place of the class's
        try:
            found = own(mode, state, key, func, args, kwargs, output)
        finally:
            if known:
                del mode._output_from_cache_entry
        if found.metadata is not None:  # not what is returned as it was given, which is not tried
            _ALIKE.add(keys)
        return found

    return info


def _nothing(*_: Any, **__: Any) -> None:
    """In the place of a second description of each tensor, beside ``meta["val"]``."""
