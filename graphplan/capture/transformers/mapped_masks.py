"""Masks that transformers makes by ``torch.vmap`` over a function of four indices.

A model that defines itself which tokens attend to each other (Gemma3: those of one image) has such masks. A
trace enters and leaves ``vmap`` by calls that no plan can keep. Here the indices are tensors that broadcast,
as in transformers' own exporters::

    eager     vmap(... vmap(sees, (None, None, None, 0)) ...)(batch, heads, queries, keys)
    here      sees(batch[:, None, None, None], ..., keys[None, None, None, :])

Both are equal if ``sees`` is elementwise and indexes only single elements, which its traced nodes show. For
any other function the mask is made as in eager mode, and the trace is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from graphplan._compat.traced_tensors import node_of

aten = torch.ops.aten

_ELEMENTWISE = {aten.__and__, aten.__or__, aten.__xor__, aten.to}
"""Elementwise operations without the tag ``pointwise``: torch tags no composite operations."""

_NUMBERS = {aten.new_zeros, aten.new_ones, aten.new_full}
"""Operations whose results do not depend on input values; 0-dim results do not depend on sizes either."""


def broadcasting(original: Callable[..., Any], looked_up: Callable[[], Any]) -> Callable[..., Any]:
    """Replace ``vmap``, which needs the mode ``looked_up``, by broadcasting where both are equal."""

    def expansion(sees: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def mask(*positions: torch.Tensor) -> torch.Tensor:
            result = _broadcast(sees, positions)
            if result is None:
                with looked_up():
                    return original(sees)(*positions)  # type: ignore[no-any-return]
            return result

        return mask

    return expansion


def _broadcast(sees: Callable[..., torch.Tensor], positions: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Return the mask; None if broadcasting may make another one, or outside a trace."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    axes = range(len(positions))
    along = [
        place[tuple(slice(None) if i == axis else None for i in axes)] for axis, place in enumerate(positions)
    ]
    last = next(iter(reversed(mode.tracer.graph.nodes)))
    result = sees(*along)
    derived = {node_of(place, mode.tracer) for place in along}
    if not _is_elementwise(_nodes_after(last), derived) or (
        result.ndim and node_of(result, mode.tracer) not in derived
    ):
        return None
    return result.expand(*(place.shape[0] for place in positions))


def _nodes_after(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _is_elementwise(nodes: Iterable[fx.Node], positions: set[fx.Node | None]) -> bool:
    """Whether each result computed from ``positions`` uses one element of each; add the results to them."""
    for node in nodes:
        value, others = node.meta.get("val"), [one for one in node.all_input_nodes if one not in positions]
        if len(others) == len(node.all_input_nodes) or not isinstance(value, torch.Tensor):
            continue  # does not depend on positions, or is a size
        operation = getattr(node.target, "overloadpacket", None)
        if operation in _NUMBERS and not value.ndim:
            continue
        sizes = [getattr(one.meta.get("val"), "ndim", 0) for one in others]
        if operation is aten.index:
            fits = sizes == [len(node.args[1])] and None not in node.args[1]  # type: ignore[arg-type, operator]
        else:
            pointwise = operation in _ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
            fits = pointwise and not any(sizes)
        if not fits:
            return False
        positions.add(node)
    return True
