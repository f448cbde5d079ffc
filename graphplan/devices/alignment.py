"""The step in which allocators hand out memory, and to which weights are laid out."""

from __future__ import annotations

__all__ = ["ALIGNMENT", "round_up"]

ALIGNMENT = 512  # bytes; CUDA's caching allocator has no smaller step


def round_up(nbytes: int) -> int:
    """The fewest whole steps, in bytes, that hold ``nbytes``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
