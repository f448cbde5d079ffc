"""Masks that transformers makes by ``torch.vmap``, of a function of four numbers.

A model that says itself which tokens see each other (Gemma3: those of one image) has such masks. A trace
enters and leaves ``vmap`` by calls that no plan can keep. Here the numbers are tensors that are broadcast, as
in transformers' own exporters::

    eager     vmap(... vmap(sees, (None, None, None, 0)) ...)(batch, heads, queries, keys)
    here      sees(batch[:, None, None, None], ..., keys[None, None, None, :])

Both are the same where ``sees`` computes element by element, and looks up single elements: what it traces
shows that. A mask of any other function is made as in eager, and its trace is refused.
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
"""Beside the operations that torch has tagged: it tags none that are composed of others."""

_NUMBERS = {aten.new_zeros, aten.new_ones, aten.new_full}
"""Operations whose results depend on none of their inputs' values and, where they are numbers, sizes."""


def broadcasting(own: Callable[..., Any], looked_up: Callable[[], Any]) -> Callable[..., Any]:
    """What makes masks, by broadcasting where that is the same as ``vmap``, whose mode ``looked_up`` is."""

    def expansion(sees: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def mask(*positions: torch.Tensor) -> torch.Tensor:
            made = _broadcast(sees, positions)
            if made is None:
                with looked_up():
                    return own(sees)(*positions)  # type: ignore[no-any-return]
            return made

        return mask

    return expansion


def _broadcast(sees: Callable[..., torch.Tensor], positions: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """The mask; None where broadcasting may make another one, and where nothing is traced."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    axes = range(len(positions))
    along = [
        place[tuple(slice(None) if i == axis else None for i in axes)] for axis, place in enumerate(positions)
    ]
    last = next(iter(reversed(mode.tracer.graph.nodes)))
    made = sees(*along)
    known = {node_of(place, mode.tracer) for place in along}
    if not _is_elementwise(_nodes_after(last), known) or (
        made.ndim and node_of(made, mode.tracer) not in known
    ):
        return None
    return made.expand(*(place.shape[0] for place in positions))


def _nodes_after(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _is_elementwise(nodes: Iterable[fx.Node], positions: set[fx.Node | None]) -> bool:
    """Whether each value that comes of ``positions``, to which it is added, comes of one element of each."""
    for node in nodes:
        value, others = node.meta.get("val"), [one for one in node.all_input_nodes if one not in positions]
        if len(others) == len(node.all_input_nodes) or not isinstance(value, torch.Tensor):
            continue  # comes of none of them, or is a size
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
