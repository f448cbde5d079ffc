"""Fused recurrent cells on the CPU: torch takes them on every accelerator, and has none for the CPU.

A forward pass leaves its gates: torch's differentiable backward passes of cells, which run on every device,
start from them.
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
    """``aten::_thnn_fused_lstm_cell``: the new hidden state, the new cell, the gates."""
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    enter, forget, candidate, leave = gates.chunk(4, 1)
    new_cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
    return leave.sigmoid() * new_cell.tanh(), new_cell, gates


def _lstm_cell_backward(
    of_hidden: torch.Tensor | None,
    of_cell: torch.Tensor | None,
    cell: torch.Tensor,
    new_cell: torch.Tensor,
    gates: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``aten::_thnn_fused_lstm_cell_backward_impl``: the gradients of the gates, the cell and the bias."""
    of_gates, _, of_cell, *_ = aten._thnn_differentiable_lstm_cell_backward(
        of_hidden, of_cell, gates, torch.zeros_like(gates), None, None, cell, new_cell
    )
    return of_gates, of_cell, of_gates.sum(0) if has_bias else None


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::_thnn_fused_gru_cell``: the new hidden state, and what its gradient needs."""
    reset_in, update_in, new_in = _biased(input_gates, input_bias).chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = reset_in + reset_hidden, update_in + update_hidden
    new = (new_in + reset.sigmoid() * new_hidden).tanh()
    return new + update.sigmoid() * (hidden - new), torch.cat([reset, update, new_in, hidden, new_hidden], 1)


def _gru_cell_backward(
    of_hidden: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """``aten::_thnn_fused_gru_cell_backward``: the gradients of both gates, the state and both biases."""
    reset, update, new_in, hidden, new_hidden = workspace.chunk(5, 1)
    given, zeros = torch.cat([reset, update, new_in], 1), torch.zeros_like(reset)
    of_input, of_gates, of_state, *_ = aten._thnn_differentiable_gru_cell_backward(
        of_hidden, given, torch.cat([zeros, zeros, new_hidden], 1), hidden, None, None
    )
    biases = (of_input.sum(0), of_gates.sum(0)) if has_bias else (None, None)
    return of_input, of_gates, of_state, *biases


def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


WITHOUT_CPU_KERNEL: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""Operation -> what does the same on the CPU."""
