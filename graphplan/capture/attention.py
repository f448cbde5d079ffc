"""Attention of a training step as one forward and one backward operation, whatever device it runs on.

A trace of autograd would have the kernel of the device that it is made on, or the decomposed attention, which
saves tensors of the length squared. Here both operations run torch's own attention, with the kernel that it
chooses for the device they run on; the backward operation runs the forward pass again and differentiates it::

    eager      out, logsumexp = flash_attention(q, k, v)         saved: q, k, v, out, logsumexp
    here       out = graphplan.scaled_dot_product_attention(q, k, v, mask, ...)        saved: q, k, v, mask
               dq, dk, dv = graphplan.scaled_dot_product_attention_backward(grad, q, k, v, mask, ...)

Attention is decomposed if it has dropout, since a second run would draw other random numbers, or a mask that
requires a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphplan.warnings import unwarned

aten = torch.ops.aten

_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float? scale, bool grouped"
_LIBRARY = torch.library.Library("graphplan", "FRAGMENT")
_NAME = "scaled_dot_product_attention"
_LIBRARY.define(f"{_NAME}({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"{_NAME}_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")

attention = torch.ops.graphplan.scaled_dot_product_attention.default
"""The result (batch, ..., queries, value size) of ``scaled_dot_product_attention``.

Batches and heads are broadcast.
"""

attention_backward = torch.ops.graphplan.scaled_dot_product_attention_backward.default
"""The gradients by query, key and value."""


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def attend(*arguments: Any) -> torch.Tensor:
    """Run :data:`attention`."""
    return _by_position(_attention(*arguments))


def attend_backward(grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Run :data:`attention_backward`."""
    inputs = tuple(tensor.detach().requires_grad_() for tensor in arguments[:3])
    with torch.enable_grad():
        output = _attention(*inputs, *arguments[3:])
    return tuple(map(_by_position, torch.autograd.grad(output, inputs, grad)))


def _by_position(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the heads of each position adjacent in memory, as fused kernels return it."""
    if tensor.dim() < 4:
        return tensor.contiguous()
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


RUNS: dict[Any, Callable[..., Any]] = {attention: attend, attention_backward: attend_backward}
"""Operation -> the function that runs it; autograd does not record what it calls."""


def _empty_like(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    return _by_position(tensor.new_empty(shape or tensor.shape))


def _fake_output(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    _causal: bool,
    _scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    heads = query.shape[-3:-2] if grouped else ()  # key and value have as many once they are repeated
    batches = [(*tensor.shape[: -2 - len(heads)], *heads) for tensor in (query, key, value)]
    return _empty_like(query, *torch.broadcast_shapes(*batches), query.shape[-2], value.shape[-1])


def _fake_gradients(_grad: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    return tuple(map(_empty_like, arguments[:3]))


for _operation, _run in RUNS.items():
    _LIBRARY.impl(_operation, _run, "CompositeExplicitAutograd")
torch.library.register_fake(attention, _fake_output, lib=_LIBRARY)
torch.library.register_fake(attention_backward, _fake_gradients, lib=_LIBRARY)


class _Attention(torch.autograd.Function):
    """Both operations as an autograd function."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        tensors, ctx.options = arguments[:4], arguments[4:]
        ctx.save_for_backward(*tensors)
        output: torch.Tensor = attention(*arguments)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *attention_backward(*grads, *ctx.saved_tensors, *ctx.options), None, None, None, None


@contextmanager
def on_any_device() -> Iterator[None]:
    """Context manager in which autograd records only operations that all devices have."""
    # oneDNN's LSTM leaves a result undefined, which a graph cannot pass to the backward pass
    flags = torch.backends.mkldnn.flags(enabled=False)
    with unwarned("TF32 acceleration"), flags, sdpa_kernel(SDPBackend.MATH):  # the flags warn of Intel's GPUs
        yield


class FusedAttention(fx.Interpreter):
    """Runs a captured graph with autograd; its attention is one operation in each direction."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        run = _differentiable if target is aten.scaled_dot_product_attention.default else target
        return super().call_function(run, args, kwargs)


def kept(values: torch.Tensor, p: float) -> torch.Tensor:
    """Return whether dropout keeps each value, from the same random numbers as torch's own dropout.

    Autograd saves one byte for each, as for a GPU's kernel; torch's formula for the CPU saves the factors.
    Numbers are drawn in the order of the memory; in that of the dimensions if sizes depend on data.
    """
    like, dims = torch.empty_like(values, dtype=torch.bool), range(values.dim())
    if has_free_unbacked_symbols(like):
        return torch.bernoulli(like, 1 - p)
    order = sorted(dims, key=like.stride().__getitem__, reverse=True)
    return torch.bernoulli(like.permute(order), 1 - p).permute(sorted(dims, key=order.__getitem__))


def _differentiable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if 0 < dropout_p < 1:
        dtype = query.dtype
        if dtype in (torch.float16, torch.bfloat16):  # as torch's own formula
            query, key, value = query.float(), key.float(), value.float()
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, -math.inf)
            attn_mask = attn_mask.to(query.dtype)
        _, weights = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        result: torch.Tensor = weights * kept(weights, dropout_p) @ (value / (1 - dropout_p))
        return result.to(dtype)
    if dropout_p or (attn_mask is not None and attn_mask.requires_grad):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    output: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]  # of torch
        query, key, value, attn_mask, is_causal, scale, enable_gqa
    )
    return output
