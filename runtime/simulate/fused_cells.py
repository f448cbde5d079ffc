"""Fused recurrent cells on the CPU: torch uses these operations on accelerators, and has no CPU kernels.

The forward pass returns its gates, from which torch's differentiable backward passes of the cells compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``aten::_thnn_fused_lstm_cell``: return the new hidden state, the new cell state and the gates."""
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    input_gate, forget_gate, candidate, output_gate = gates.chunk(4, 1)
    new_cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
    return output_gate.sigmoid() * new_cell.tanh(), new_cell, gates


def _lstm_cell_backward(
    grad_hidden: torch.Tensor | None,
    grad_cell: torch.Tensor | None,
    cell: torch.Tensor,
    new_cell: torch.Tensor,
    gates: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``aten::_thnn_fused_lstm_cell_backward_impl``: return the gradients of the gates, cell and bias."""
    grad_gates, _, grad_cell, *_ = aten._thnn_differentiable_lstm_cell_backward(
        grad_hidden, grad_cell, gates, torch.zeros_like(gates), None, None, cell, new_cell
    )
    return grad_gates, grad_cell, grad_gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::_thnn_fused_gru_cell``: return the new hidden state, and a workspace for the backward pass."""
    reset_in, update_in, new_in = _biased(input_gates, input_bias).chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = reset_in + reset_hidden, update_in + update_hidden
    new = (new_in + reset.sigmoid() * new_hidden).tanh()
    return new + update.sigmoid() * (hidden - new), torch.cat([reset, update, new_in, hidden, new_hidden], 1)


def _gru_cell_backward(
    grad_hidden: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """``aten::_thnn_fused_gru_cell_backward``: return the gradients of both gates, state and biases."""
    reset, update, new_in, hidden, new_hidden = workspace.chunk(5, 1)
    input_gates, zeros = torch.cat([reset, update, new_in], 1), torch.zeros_like(reset)
    grad_input_gates, grad_hidden_gates, grad_state, *_ = aten._thnn_differentiable_gru_cell_backward(
        grad_hidden, input_gates, torch.cat([zeros, zeros, new_hidden], 1), hidden, None, None
    )
    biases = (grad_input_gates.sum(0), grad_hidden_gates.sum(0)) if has_bias else (None, None)
    return grad_input_gates, grad_hidden_gates, grad_state, *biases


def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


WITHOUT_CPU_KERNEL: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""Operation -> the same operation on the CPU."""
