"""Patches that remove work of ``torch.export`` that no capture needs.

This work is half of the time of a Llama export: Python code is compiled for the graph of every pass,
``no_grad`` blocks are split off and put back, each entry of the fake-tensor cache is validated, and tensor
metadata is extracted a second time, with a memory format that nothing reads.
Distributions validate the values of their parameters, which is a data-dependent branch; ``torch.compile``
disables this check, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from graphplan._compat import Replacement, private
from graphplan._compat.export import export_tracer

_TENSOR = torch.tensor


def less_work(
    *, keep_grad: bool, blocks: list[Any], assigned_data: Callable[..., None], on_copy: Callable[[], None]
) -> list[Replacement]:
    """Return the patches to apply during ``torch.export``; the graph stays the same.

    The graph keeps changes of the gradient mode only if ``keep_grad``. It has no autocast blocks: ``blocks``
    lists the open ones, each as (device type, dtype, enabled, ...). ``assigned_data`` is called with the
    tracer, the tensor and the new data in place of an assignment to ``tensor.data``, which no graph records.
    ``on_copy`` is also called where the code calls ``torch.tensor`` on tensors, whose values become
    constants.
    """
    private(Distribution, "_validate_sample", "torch")
    private(FakeTensorMode, "_get_output_info_for_cache_entry", "torch")
    private(proxy_tensor, "_extract_tensor_metadata", "torch")
    mode = private(proxy_tensor, "PreDispatchTorchFunctionMode", "torch")
    amp = torch.amp.autocast_mode
    enter, leave = (private(amp, name, "torch") for name in ("_enter_autocast", "_exit_autocast"))
    read = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # of a C descriptor
    assign = torch.Tensor.data.__set__  # type: ignore[attr-defined]
    set_grad = torch._C._set_grad_enabled

    def omitting(original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the mode that records changes of torch's global state, so that it omits those listed above.

        In the branches of ``torch.cond``, autocast blocks are recorded. In the forward of a
        ``torch.autograd.Function``, the graph records neither that gradients are off nor that they are on
        again: the end of a ``no_grad`` block inside would leave them off for the rest of the graph. So
        setting the gradient mode to its current value is not recorded.
        """

        def function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == assign:
                return assigned_data(self.tracer, *args)
            if func == read:  # the tracer cannot record a read of .data
                return args[0].detach()
            if func is _TENSOR and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args)):
                if _are_numbers(args[0]) and (kwargs or {}).keys() <= {"dtype", "device"}:
                    return torch.stack([number.detach() for number in args[0]]).to(**(kwargs or {}))
                on_copy()
            if func in (enter, leave) and type(self.tracer) is export_tracer():
                if func is enter:
                    blocks.append(args)
                else:
                    blocks.pop()
                return None
            if func is set_grad and not keep_grad:
                return func(*args)
            if func is set_grad and args[0] == torch.is_grad_enabled():
                return None
            return original(self, func, types, args, kwargs)

        return function

    return [
        (fx.GraphModule, "recompile", _when_called),
        (FakeTensorMode, "_get_output_info_for_cache_entry", _tried_once),
        (proxy_tensor, "_extract_tensor_metadata", lambda _original: lambda _result: None),
        (mode, "__torch_function__", omitting),
        (Distribution, "__init__", _unchecked),
        (Distribution, "_validate_sample", lambda _original: lambda _self, _value: None),
    ]


def _are_numbers(values: Any) -> bool:
    """Whether these are 0-dim tensors, which ``torch.tensor`` would read from memory."""
    return isinstance(values, list | tuple) and all(
        isinstance(one, torch.Tensor) and one.dim() == 0 for one in values
    )


def _unchecked(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *sizes: Any, validate_args: bool | None = None, **named: Any) -> None:
        del validate_args
        original(self, *sizes[:2], validate_args=False, **named)  # the third is validate_args

    return init


def _when_called(original: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Make ``GraphModule.recompile`` defer code generation to the first call of the module."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        original(self)
        return self(*args, **kwargs)

    def recompile(self: Any) -> None:
        codegen = self.graph._codegen
        if hasattr(codegen, "pytree_info"):
            self._in_spec, self._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(self).forward = forward

    return recompile


_ALIKE: set[str] = set()
"""Dispatch keys of the fake results whose cache entries have passed validation."""


def _tried_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Validate the fake-tensor cache's entry once per set of dispatch keys.

    Torch rebuilds each result from its cache entry and compares dispatch keys. That is a fifth of a Llama
    trace, and the outcome is the same for all tensors with these keys.
    """

    def info(mode: Any, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
        keys = str(torch._C._dispatch_key_set(output)) if isinstance(output, torch.Tensor) else ""
        is_validated = keys in _ALIKE and not has_free_unbacked_symbols(output)
        if is_validated:
            mode._output_from_cache_entry = lambda *_: output  # hides the method of the class
        try:
            entry = original(mode, state, key, func, args, kwargs, output)
        finally:
            if is_validated:
                del mode._output_from_cache_entry
        if entry.metadata is not None:  # an argument that is returned as it is has none, and is not validated
            _ALIKE.add(keys)
        return entry

    return info
