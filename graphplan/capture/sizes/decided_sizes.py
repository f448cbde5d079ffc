"""Sizes that values decide, where a captured graph is traced again: with its gradients, say.

Some the first trace knows, by a guard. An operation that is run again on fake tensors does not::

    first trace    nonzero(mask): (5, 1)         nonzero(other): (u3, 1)
    again          nonzero(mask): (u0, 1)        nonzero(other): (u1, 1)
    here           nonzero(mask): (5, 1)         nonzero(other): (u1, 1), where u1 is u3 of the capture
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    ShapeEnv,
    free_unbacked_symbols,
    has_free_unbacked_symbols,
)
from torch.utils._pytree import tree_leaves

from graphplan._compat.symbolic_sizes import made_as
from graphplan._compat.traced_tensors import untraced
from graphplan.errors import NoGraphError

aten = torch.ops.aten

_BROADCASTING = frozenset(
    {
        *(aten.expand.default, aten.copy_.default, aten.copy.default, aten.masked_select.default),
        *(aten.masked_fill.Scalar, aten.masked_fill.Tensor),
        *(aten.masked_fill_.Scalar, aten.masked_fill_.Tensor),
        *(aten.mse_loss.default, aten.huber_loss.default, aten.smooth_l1_loss.default),
        *(aten.dist.default, aten.linalg_cross.default),
        *(aten.complex.default, aten.polar.default),
    }
)
"""What broadcasts, without a tag that says so."""


class DecidedSizes(fx.Interpreter):
    """Runs a captured graph on fake tensors: sizes that values decide are those of the capture.

    Args:
        module: the captured graph.
        env: of the sizes of the fake tensors.

    Attributes:
        symbols: of sizes that only the data decides: each -> that of the capture.
        known: of the other sizes that values decide: each -> what it is.

    Raises:
        NoGraphError: the capture takes a size that values decide for another one.
    """

    def __init__(self, module: fx.GraphModule, env: ShapeEnv) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors say enough
        self._env = env
        self.symbols: dict[Any, Any] = {}
        self.known: dict[Any, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if n.op == "output":
            return super().run_node(n)
        traced = _sizes(tree_leaves(n.meta.get("val")))
        if any(map(_data_decides, traced)):
            made = super().run_node(n)
            for here, before in zip(_sizes(tree_leaves(made)), traced, strict=True):
                if isinstance(here, torch.SymInt) and isinstance(before, torch.SymInt):
                    self.symbols.setdefault(here.node.expr, before.node.expr)
            return made
        with self._env.ignore_fresh_unbacked_symbols():
            made = super().run_node(n)
        sizes = _sizes(tree_leaves(made))
        if any(map(_data_decides, sizes)):
            for here, decided in zip(sizes, traced, strict=True):
                self._decide(n, here, decided)
        return made

    def _decide(self, node: fx.Node, size: Any, decided: Any) -> None:
        if not _data_decides(size):
            return
        if isinstance(decided, torch.SymInt):
            raise NoGraphError(
                f"values decide how much {node.target} returns, and the code takes it to be {decided}"
            )
        self.known[size.node.expr] = decided
        with untraced():
            torch._check(size == decided)  # also of what the operation has made on its way


def _data_decides(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and has_free_unbacked_symbols(size)


def _sizes(made: Iterable[Any]) -> list[Any]:
    """Of tensors all sizes; numbers as they are."""
    return [size for leaf in made for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]


def refuse_chance(graph: fx.Graph, known: Mapping[Any, Any]) -> None:
    """Raise NoGraphError where an operation would broadcast in calls with other values.

    A trace takes sizes for equal, of which the formulas of gradients then sum over nothing: in
    ``x[mask] * y[~mask]`` eager mode sums the gradient of a single row of ``y`` over the rows of ``x``.

    Args:
        graph: the trace.
        known: symbol of a size that values decide -> what it is in each call that the trace serves.
    """
    for node in graph.nodes:
        for pair in _paired_sizes(node):
            one, other = (made_as(size).xreplace(known) for size in pair)
            if one != other and 1 not in (one, other) and free_unbacked_symbols([one, other]):
                raise NoGraphError(
                    f"values decide sizes of what {node.target} is given, and where one is 1, it broadcasts"
                )


def _paired_sizes(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Sizes that are to be equal, or one of them 1."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target not in _BROADCASTING:
        return
    nodes = [*node.all_input_nodes, *([node] if node.target is aten.expand.default else [])]
    tensors = [one for each in nodes if isinstance(one := each.meta.get("val"), torch.Tensor)]
    for one, other in combinations(tensors, 2):
        yield from zip(reversed(one.shape), reversed(other.shape), strict=False)
