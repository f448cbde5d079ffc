"""Private attributes of PEFT layers; the package is optional and is not imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def is_adapted(part: Any) -> bool:
    """Whether a module is a PEFT layer (``peft.tuners.tuners_utils.BaseTunerLayer``)."""
    return all(hasattr(part, name) for name in ("_disable_adapters", "_active_adapter", "merged_adapters"))


def adapters_of(layer: Any) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Return whether a layer's adapters are off, which are active, and which are merged into its weights."""
    active = layer._active_adapter
    names = (active,) if isinstance(active, str) else tuple(active)
    return bool(layer._disable_adapters), names, tuple(layer.merged_adapters)


def set_adapters(layer: Any, off: bool, active: Sequence[str], merged: Sequence[str]) -> None:
    """Set the state that :func:`adapters_of` reads. PEFT's own setters would change ``requires_grad``."""
    vars(layer).update(_disable_adapters=off, _active_adapter=list(active), merged_adapters=list(merged))
