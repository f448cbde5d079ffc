"""Private names of bitsandbytes, an optional package, which is not imported: its layers have them."""

from __future__ import annotations

from typing import Any

from torch import nn

_PACKS, _PACKED = "support_avx512bf16_for_cpu", "packing_format_for_cpu"


def settle(model: nn.Module) -> None:
    """Have quantised layers hold what they do after a call on any device, in place.

    A call on a CPU packs 4-bit weights for a kernel there, with scales of 16 bits: ``.cuda()`` undoes that as
    this does. The first call moves the scales of 8-bit weights from the parameter to the layer, and would
    from that of a copy.
    """
    part: Any
    for part in model.modules():
        layer: dict[str, Any] = vars(part)
        weight: Any = part._parameters.get("weight")
        state: Any = getattr(weight, "quant_state", None)
        if _PACKS in layer and getattr(state, _PACKED, False):
            part._save_to_state_dict({}, "", keep_vars=True)  # what is saved is for any device
            if state.absmax.dim() == 2:  # bitsandbytes 0.50 leaves it so unless its scales have scales
                state.absmax = state.absmax.T.reshape(-1).float()
        if getattr(weight, "CB", None) is not None and hasattr(part, "init_8bit_state"):
            part.init_8bit_state()


def keep_unpacked(model: nn.Module) -> None:
    """Have 4-bit layers compute on a CPU as elsewhere."""
    for part in model.modules():
        table: dict[str, Any] = vars(part)
        if _PACKS in table:
            table[_PACKS] = False
