"""Values of tensors that a trace goes by: those of constants, which it takes for numbers.

``item()`` of an input, a weight or a buffer makes a symbol. Of a tensor that lies in an attribute, or that
the code makes of numbers, the tracer of torch has the value, and what follows is traced for that value alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor

from graphplan._compat import Replacement, private


def value_reads(note: Callable[[], None], read: Callable[..., Any]) -> list[Replacement]:
    """What to replace while a trace is made.

    ``note`` is called where it goes by the value of a constant. ``read`` is in the place of each operation
    that tells the code a value, with the tracer, what carries it out, the operation and its arguments.
    """
    private(proxy_tensor, "proxy_call", "torch")

    def proxy_call(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(mode: Any, func: Any, *how: Any) -> Any:
            def carry_out() -> Any:
                result = own(mode, func, *how)
                if type(result) in (bool, int, float, complex):
                    note()
                return result

            if torch.Tag.data_dependent_output not in func.tags:
                return own(mode, func, *how)
            return read(private(mode, "tracer", "torch"), carry_out, func, *how[-2:])

        return call

    def noting(own: Callable[..., Any]) -> Callable[..., Any]:
        """A method that reads memory, of which no operation tells."""

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note()
            return own(tensor, *args, **kwargs)

        return call

    return [
        (proxy_tensor, "proxy_call", proxy_call),
        *((torch.Tensor, name, noting) for name in ("tolist", "new_tensor")),
    ]
