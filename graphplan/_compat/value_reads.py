"""Interception of reads of tensor values in a trace.

``item()`` of an input, a weight or a buffer makes a symbol. Torch's tracer knows the value of a constant (a
tensor in an attribute, or one made from numbers in the code), and specializes the trace to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from graphplan._compat import Replacement, private

_UNTAGGED_DYNAMIC_SHAPES = {
    torch.ops.aten.repeat_interleave.self_Tensor,
    torch.ops.aten.nonzero_numpy.default,
}
"""Operations whose output sizes depend on values but that lack the tag ``dynamic_output_shape``."""


def value_reads(
    on_constant: Callable[[], None],
    read_value: Callable[..., Any],
    run_dynamic: Callable[..., Any],
    read_list: Callable[..., Any],
) -> list[Replacement]:
    """Return the patches to apply during a trace.

    ``on_constant`` is called where the trace specializes to the value of a constant. ``read_value`` replaces
    operations that return a value to the code; it gets the tracer, a function that runs the operation, the
    operation, its args and its kwargs. ``run_dynamic`` likewise replaces operations whose output sizes depend
    on values. ``read_list`` replaces ``tolist``; it gets the tracer, the original method and the tensor.
    """
    private(proxy_tensor, "proxy_call", "torch")

    def proxy_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(mode: Any, func: Any, *arguments: Any) -> Any:
            def run() -> Any:
                result = original(mode, func, *arguments)
                if type(result) in (bool, int, float, complex):
                    on_constant()
                return result

            if torch.Tag.data_dependent_output in func.tags:
                return read_value(private(mode, "tracer", "torch"), run, func, *arguments[-2:])
            if torch.Tag.dynamic_output_shape in func.tags or func in _UNTAGGED_DYNAMIC_SHAPES:
                return run_dynamic(private(mode, "tracer", "torch"), run, func, *arguments[-2:])
            return original(mode, func, *arguments)

        return call

    def reporting(original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that reads memory without an operation."""

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if proxy_tensor.get_proxy_mode() is not None:  # None where graphplan computes outside the trace
                on_constant()
            return original(tensor, *args, **kwargs)

        return call

    def tolist(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor) -> Any:
            mode = proxy_tensor.get_proxy_mode()
            if mode is None:
                return original(tensor)
            return read_list(private(mode, "tracer", "torch"), original, tensor)

        return call

    return [
        (FakeTensor, "tolist", tolist),
        (proxy_tensor, "proxy_call", proxy_call),
        *((torch.Tensor, name, reporting) for name in ("tolist", "new_tensor")),
    ]
