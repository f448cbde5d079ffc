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


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::_thnn_fused_gru_cell``: the new hidden state, and what its gradient would need."""
    reset_in, update_in, new_in = _biased(input_gates, input_bias).chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (reset_in + reset_hidden).sigmoid(), (update_in + update_hidden).sigmoid()
    new = (new_in + reset * new_hidden).tanh()
    result = new + update * (hidden - new)
    return result, torch.cat([reset, update, new, hidden, new_hidden], 1)


def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


WITHOUT_CPU_KERNEL: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_gru_cell.default: _gru_cell,
}
"""Operation -> what does the same on the CPU."""
