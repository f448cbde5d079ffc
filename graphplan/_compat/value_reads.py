"""Values of tensors that a trace goes by: those of constants, which it takes for numbers.

``item()`` of an input, a weight or a buffer makes a symbol. Of a tensor that lies in an attribute, or that
the code makes of numbers, the tracer of torch has the value, and what follows is traced for that value alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from graphplan._compat import Replacement, private

_OF_SIZES_BY_VALUES = {
    torch.ops.aten.repeat_interleave.self_Tensor,
    torch.ops.aten.nonzero_numpy.default,
}
"""What makes tensors whose sizes values decide, without a tag that says so."""


def value_reads(
    note: Callable[[], None],
    read: Callable[..., Any],
    make: Callable[..., Any],
    read_all: Callable[..., Any],
) -> list[Replacement]:
    """What to replace while a trace is made.

    ``note`` is called where it goes by the value of a constant. ``read`` is in the place of each operation
    that tells the code a value, with the tracer, what carries it out, the operation and its arguments;
    ``make`` in that of each that makes tensors whose sizes values decide; ``read_all`` in that of ``tolist``,
    with the tracer, the method, which asks for each number, and the tensor.
    """
    private(proxy_tensor, "proxy_call", "torch")

    def proxy_call(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(mode: Any, func: Any, *how: Any) -> Any:
            def carry_out() -> Any:
                result = own(mode, func, *how)
                if type(result) in (bool, int, float, complex):
                    note()
                return result

            if torch.Tag.data_dependent_output in func.tags:
                return read(private(mode, "tracer", "torch"), carry_out, func, *how[-2:])
            if torch.Tag.dynamic_output_shape in func.tags or func in _OF_SIZES_BY_VALUES:
                return make(private(mode, "tracer", "torch"), carry_out, func, *how[-2:])
            return own(mode, func, *how)

        return call

    def noting(own: Callable[..., Any]) -> Callable[..., Any]:
        """A method that reads memory, of which no operation tells."""

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if proxy_tensor.get_proxy_mode() is not None:  # else a question is asked, outside of the trace
                note()
            return own(tensor, *args, **kwargs)

        return call

    def tolist(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor) -> Any:
            mode = proxy_tensor.get_proxy_mode()
            return own(tensor) if mode is None else read_all(private(mode, "tracer", "torch"), own, tensor)

        return call

    return [
        (FakeTensor, "tolist", tolist),
        (proxy_tensor, "proxy_call", proxy_call),
        *((torch.Tensor, name, noting) for name in ("tolist", "new_tensor")),
    ]
