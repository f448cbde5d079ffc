"""Fused recurrent cells on the CPU: torch takes them on every accelerator, and has none for the CPU."""

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
    """``aten::_thnn_fused_lstm_cell``: the new hidden state, the new cell, the activated gates."""
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    enter, forget, candidate, leave = gates.chunk(4, 1)
    activated = torch.cat([enter.sigmoid(), forget.sigmoid(), candidate.tanh(), leave.sigmoid()], 1)
    enter, forget, candidate, leave = activated.chunk(4, 1)
    new_cell = forget * cell + enter * candidate
    return leave * new_cell.tanh(), new_cell, activated


def _lstm_cell_backward(
    of_hidden: torch.Tensor | None,
    of_cell: torch.Tensor | None,
    cell: torch.Tensor,
    new_cell: torch.Tensor,
    activated: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``aten::_thnn_fused_lstm_cell_backward_impl``: the gradients of the gates, the cell and the bias."""
    enter, forget, candidate, leave = activated.chunk(4, 1)
    shown = new_cell.tanh()
    of_hidden = torch.zeros_like(cell) if of_hidden is None else of_hidden
    through = of_hidden * leave * (1 - shown**2)
    through = through if of_cell is None else through + of_cell
    gates = (
        through * candidate * _slope(enter),
        through * cell * _slope(forget),
        through * enter * (1 - candidate**2),
        of_hidden * shown * _slope(leave),
    )
    of_gates = torch.cat(gates, 1)
    return of_gates, through * forget, of_gates.sum(0) if has_bias else None


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
    reset, update = (reset_in + reset_hidden).sigmoid(), (update_in + update_hidden).sigmoid()
    new = (new_in + reset * new_hidden).tanh()
    result = new + update * (hidden - new)
    return result, torch.cat([reset, update, new, hidden, new_hidden], 1)


def _gru_cell_backward(
    of_hidden: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """``aten::_thnn_fused_gru_cell_backward``: the gradients of both gates, the state and both biases."""
    reset, update, new, hidden, new_hidden = workspace.chunk(5, 1)
    of_new = of_hidden * (1 - update) * (1 - new**2)
    of_reset = of_new * new_hidden * _slope(reset)
    of_update = of_hidden * (hidden - new) * _slope(update)
    of_input = torch.cat([of_reset, of_update, of_new], 1)
    of_gates = torch.cat([of_reset, of_update, of_new * reset], 1)
    biases = (of_input.sum(0), of_gates.sum(0)) if has_bias else (None, None)
    return of_input, of_gates, of_hidden * update, *biases


def _slope(activated: torch.Tensor) -> torch.Tensor:
    """Of the sigmoid, where it gave this."""
    return activated * (1 - activated)


def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


WITHOUT_CPU_KERNEL: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
}
"""Operation -> what does the same on the CPU."""
