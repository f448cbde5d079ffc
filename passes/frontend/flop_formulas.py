"""FLOPs of one operation: torch's formulas, and formulas for operations that torch's counter lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of one call of ``func`` from the shapes of arguments and result; 0 if unknown."""
    if not isinstance(func, torch._ops.OpOverload):
        return 0  # operations inside a higher-order operation are counted when they run
    custom = _FORMULAS.get(func.name().partition(".")[0])
    if custom is not None:
        return custom(args, out)
    formula = flop_registry.get(func.overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def multiplies(func: Any) -> bool:
    """Whether an operation has a formula: matrix products, convolutions, attention, recurrent layers."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return func.name().partition(".")[0] in _FORMULAS or func.overloadpacket in flop_registry


def _attention(args: tuple[Any, ...], _: Any) -> int:
    """Return the FLOPs of two matrix products per query head; keys and values may have fewer heads."""
    query, key, value = args[:3]
    *heads, length, width = query.shape
    return int(2 * math.prod(heads) * length * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(args: tuple[Any, ...], _: Any) -> int:
    """Count seven products where forward has two: both repeated, scores once more, four for gradients."""
    return _attention(args[1:], None) * 7 // 2


def _product(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Count each element of the first argument with each column of the result: packed or grouped matrices.

    If only one of the two has a dimension for groups, the smaller of two counts is right.
    """
    return int(2 * min(args[0].numel() * out.shape[-1], out.numel() * args[0].shape[-1]))


def _distances(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Count each pair of rows; one batch of rows may be paired with all batches of the other side."""
    return int(2 * out.numel() * args[0].shape[-1])


def _grouped_backward(args: tuple[Any, ...], _: Any) -> int:
    """Count two matrix products: the gradients of the rows and of the matrices."""
    return int(2 * 2 * args[0].numel() * args[3].shape[-1])


def _recurrent(
    weights: Callable[[tuple[Any, ...]], Any], products: int
) -> Callable[[tuple[Any, ...], Any], int]:
    """Return a formula that multiplies each matrix with each token, ``products`` times."""

    def formula(args: tuple[Any, ...], _: Any) -> int:
        tokens = args[0].numel() // args[0].shape[-1]
        return int(2 * products * tokens * sum(w.numel() for w in weights(args) if w.dim() == 2))

    return formula


_FORMULAS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    # torch 2.11 counts no attention whose keys have fewer heads
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "graphplan::scaled_dot_product_attention",
        ),
        _attention,
    ),
    "graphplan::scaled_dot_product_attention_backward": _attention_backward,
    **dict.fromkeys(
        (
            "aten::_grouped_mm",
            "aten::_int_mm",
            "aten::_weight_int8pack_mm",
            "aten::_weight_int4pack_mm",
            "aten::_weight_int4pack_mm_for_cpu",
            "aten::_cdist_backward",
            "transformers::grouped_mm_fallback",
            "bitsandbytes::gemm_4bit",
            "bitsandbytes::int8_linear_matmul",
            "bitsandbytes::int8_scaled_mm",
        ),
        _product,
    ),
    **dict.fromkeys(("aten::_cdist_forward", "aten::_euclidean_dist"), _distances),
    "transformers::grouped_mm_fallback_backward": _grouped_backward,
    # cuDNN takes a list of the weights of all layers, oneDNN the two matrices of one layer
    "aten::_cudnn_rnn": _recurrent(lambda args: args[1], 1),
    "aten::_cudnn_rnn_backward": _recurrent(lambda args: args[1], 2),
    "aten::mkldnn_rnn_layer": _recurrent(lambda args: args[1:3], 1),
    "aten::mkldnn_rnn_layer_backward": _recurrent(lambda args: args[1:3], 2),
}
