"""What ``torch.export`` does beside tracing that no capture needs.

It is half of the time of a Llama's export: Python code is compiled for every graph that a pass makes,
``no_grad`` blocks are split off and put back, what the cache of fake results notes is tried each time, and
each result is described twice, the second time with a memory format that nothing reads.
Distributions check the values of their parameters, on which no trace can branch; ``torch.compile`` too leaves
that out.
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
    *, keep_grad: bool, blocks: list[Any], assigned_data: Callable[..., None], copied: Callable[[], None]
) -> list[Replacement]:
    """What to replace while ``torch.export`` is at work; the graph is the same.

    Changes of the gradient mode are left in it only if ``keep_grad``. Blocks of autocast are not: those that
    the model's code is in are in ``blocks``, each as (type of device, dtype, enabled, ...). Where the code
    assigns the ``data`` of a tensor, of which no graph knows, ``assigned_data`` is called instead, with the
    tracer, the tensor and the other; where it calls ``torch.tensor`` of tensors, whose values are in the
    graph then, ``copied`` is called too.
    """
    private(Distribution, "_validate_sample", "torch")
    private(FakeTensorMode, "_get_output_info_for_cache_entry", "torch")
    private(proxy_tensor, "_extract_tensor_metadata", "torch")
    mode = private(proxy_tensor, "PreDispatchTorchFunctionMode", "torch")
    amp = torch.amp.autocast_mode
    enter, leave = (private(amp, name, "torch") for name in ("_enter_autocast", "_exit_autocast"))
    read = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # of a descriptor in C
    assign = torch.Tensor.data.__set__  # type: ignore[attr-defined]
    set_grad = torch._C._set_grad_enabled

    def writing(own: Callable[..., Any]) -> Callable[..., Any]:
        """The mode that writes changes of torch's state into the graph, but for these.

        In branches, blocks of autocast are written. In the forward of a ``torch.autograd.Function`` no graph
        says that gradients are off, nor that they are on again: the end of a ``no_grad`` block in there would
        leave them off for the rest of the graph. So what is set already is not set.
        """

        def function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == assign:
                return assigned_data(self.tracer, *args)
            if func == read:  # the tracer would not know what that is
                return args[0].detach()
            if func is _TENSOR and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args)):
                if _are_numbers(args[0]) and (kwargs or {}).keys() <= {"dtype", "device"}:
                    return torch.stack([number.detach() for number in args[0]]).to(**(kwargs or {}))
                copied()
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
            return own(self, func, types, args, kwargs)

        return function

    return [
        (fx.GraphModule, "recompile", _when_called),
        (FakeTensorMode, "_get_output_info_for_cache_entry", _tried_once),
        (proxy_tensor, "_extract_tensor_metadata", lambda _own: lambda _result: None),
        (mode, "__torch_function__", writing),
        (Distribution, "__init__", _unchecked),
        (Distribution, "_validate_sample", lambda _own: lambda _self, _value: None),
    ]


def _are_numbers(values: Any) -> bool:
    """Whether these are tensors without axes, of whose values torch makes a tensor by their memory."""
    return isinstance(values, list | tuple) and all(
        isinstance(one, torch.Tensor) and one.dim() == 0 for one in values
    )


def _unchecked(own: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *sizes: Any, validate_args: bool | None = None, **named: Any) -> None:
        del validate_args
        own(self, *sizes[:2], validate_args=False, **named)  # a third would be it

    return init


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
