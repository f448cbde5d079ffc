"""Output shapes of recurrent layers for traces with a dynamic length.

A graph has ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as one operation each. Torch finds their output shapes by
decomposition into time steps, which fixes the length; here they are computed from the input shapes. A trace
below autograd, for models that compute gradients in ``forward``, contains the time steps themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from graphplan._compat.torch import forget_kernels
from graphplan.capture.thread_patches import Patch

_LAYERS = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]


def lengths_vary() -> list[Patch]:
    """Return the patches to apply during a trace."""
    for layer in _LAYERS:
        forget_kernels(layer)
    return [
        Patch(layer.py_kernels, key, kernel, functools.partial(_computed, kernel))
        for layer in _LAYERS
        for key, kernel in layer.py_kernels.items()
    ]


def _computed(kernel: Callable[..., Any], *args: Any) -> Any:
    """Return the results of a layer: torch's own where a trace records its time steps, else their shapes."""
    return kernel(*args) if get_proxy_mode() is not None else _shaped(*args)


def _shaped(
    sequence: torch.Tensor,
    hidden: Any,
    _weights: Any,
    _biases: bool,
    _layers: int,
    _dropout: float,
    _train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    states = hidden if isinstance(hidden, list | tuple) else [hidden]
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    steps, batch = sequence.shape[:2][::-1] if batch_first else sequence.shape[:2]
    outputs = sequence.new_empty((steps, batch, width))
    return outputs.transpose(0, 1) if batch_first else outputs, *map(torch.empty_like, states)
