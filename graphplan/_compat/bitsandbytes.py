"""Private attributes of bitsandbytes layers; the package is optional and is not imported here."""

from __future__ import annotations

from typing import Any

from torch import nn

_PACKS, _PACKED = "support_avx512bf16_for_cpu", "packing_format_for_cpu"


def prepare_quantized(model: nn.Module) -> None:
    """Put quantized layers, in place, into the state in which a forward pass on any device leaves them.

    A forward pass on a CPU packs 4-bit weights for a CPU kernel, with 16-bit scales. This undoes the packing,
    as ``.cuda()`` does. The first forward pass moves the scales of 8-bit weights from the parameter to the
    layer; this moves them now, so that the pass of a copy does not.
    """
    part: Any
    for part in model.modules():
        layer: dict[str, Any] = vars(part)
        weight: Any = part._parameters.get("weight")
        state: Any = getattr(weight, "quant_state", None)
        if _PACKS in layer and getattr(state, _PACKED, False):
            part._save_to_state_dict({}, "", keep_vars=True)  # unpacks: a state dict is for any device
            if state.absmax.dim() == 2:  # bitsandbytes 0.50 restores only doubly quantized scales
                state.absmax = state.absmax.T.reshape(-1).float()
        if getattr(weight, "CB", None) is not None and hasattr(part, "init_8bit_state"):
            part.init_8bit_state()


def keep_unpacked(model: nn.Module) -> None:
    """Stop 4-bit layers from packing their weights on a CPU, so that they compute as on other devices."""
    for part in model.modules():
        table: dict[str, Any] = vars(part)
        if _PACKS in table:
            table[_PACKS] = False
