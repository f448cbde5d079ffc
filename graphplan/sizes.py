"""Sizes that vary: the largest that each symbol of a trace may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from graphplan.signature import CounterLeaf, TensorLeaf

__all__ = ["UNBOUNDED", "finite_bound", "largest_sizes"]

UNBOUNDED = 1 << 48  # what torch writes for a size without an upper bound is above this


def finite_bound(bound: Any) -> int | None:
    """An upper bound of the tracer's as an int; None where it is none."""
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):  # sympy's infinities raise any
        return None
    return number if number < UNBOUNDED else None


def largest_sizes(graph: fx.Graph, inputs: Sequence[str], leaves: Sequence[Any]) -> dict[Any, int]:
    """Each symbol of an input's sizes -> the largest that the signature's leaf for it admits."""
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    found: dict[Any, int] = {}

    def note(size: Any, largest: int) -> None:
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            found[size.node.expr] = max(found.get(size.node.expr, 0), largest)

    for name, leaf in zip(inputs, leaves, strict=True):
        val = nodes[name].meta.get("val")
        if isinstance(leaf, CounterLeaf):
            note(val, leaf.high)
        elif isinstance(leaf, TensorLeaf) and isinstance(val, torch.Tensor):
            for size, bounds in zip(val.shape, leaf.ranges, strict=False):
                if bounds is not None:
                    note(size, bounds[1])
    return found
