"""Data-dependent sizes where a captured graph is retraced, as for its gradients.

Some are constants in the first trace, by a guard. An operation that runs again makes symbols for all::

    first trace    nonzero(mask): (5, 1)         nonzero(other): (u3, 1)
    retraced       nonzero(mask): (u0, 1)        nonzero(other): (u1, 1)
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

from graphplan._compat.symbolic_sizes import original_expression
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
"""Operations that broadcast without the tag ``pointwise``."""


class EquatedSizeError(NoGraphError):
    """The code equates a data-dependent size, which ``node`` of the capture computes, with another size."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.node = node


class DecidedSizes(fx.Interpreter):
    """Runs a captured graph on fake tensors, and keeps its data-dependent sizes as in the capture.

    Args:
        module: the captured graph.
        env: the shape environment of the fake tensors.

    Attributes:
        symbols: new symbol -> symbol of the capture, for sizes that are symbols there.
        constants: new symbol -> size, for sizes that are constants in the capture.

    Raises:
        EquatedSizeError: the capture equates a data-dependent size with another symbolic size.
    """

    def __init__(self, module: fx.GraphModule, env: ShapeEnv) -> None:
        super().__init__(module)
        self.extra_traceback = False  # messages are clear without it
        self._env = env
        self.symbols: dict[Any, Any] = {}
        self.constants: dict[Any, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and match its data-dependent sizes with those of the capture."""
        if n.op == "output":
            return super().run_node(n)
        traced = _sizes(tree_leaves(n.meta.get("val")))
        if any(map(_is_unbacked, traced)):
            result = super().run_node(n)
            for new, captured in zip(_sizes(tree_leaves(result)), traced, strict=True):
                if isinstance(new, torch.SymInt) and isinstance(captured, torch.SymInt):
                    self.symbols.setdefault(new.node.expr, captured.node.expr)
            return result
        with self._env.ignore_fresh_unbacked_symbols():
            result = super().run_node(n)
        sizes = _sizes(tree_leaves(result))
        if any(map(_is_unbacked, sizes)):
            for new, captured in zip(sizes, traced, strict=True):
                self._fix_size(n, new, captured)
        return result

    def _fix_size(self, node: fx.Node, size: Any, captured: Any) -> None:
        if not _is_unbacked(size):
            return
        if isinstance(captured, torch.SymInt):
            raise EquatedSizeError(
                f"the output size of {node.target} depends on data, but the code assumes {captured}", node
            )
        self.constants[size.node.expr] = captured
        with untraced():
            torch._check(size == captured)  # also for intermediate results of the operation


def _is_unbacked(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and has_free_unbacked_symbols(size)


def _sizes(results: Iterable[Any]) -> list[Any]:
    """Return all sizes of the tensors, and the numbers, in order."""
    return [size for leaf in results for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]


def require_no_broadcast(graph: fx.Graph, sizes: Mapping[Any, Any]) -> None:
    """Raise NoGraphError if an operation could broadcast in calls with other values.

    The trace assumes that the two sizes are equal, so the gradient formulas do not sum over that axis: in
    ``x[mask] * y[~mask]``, eager mode sums the gradient of a single row of ``y`` over the rows of ``x``.

    Args:
        graph: the trace.
        sizes: symbol of a data-dependent size -> its value in each call that the trace serves.
    """
    for node in graph.nodes:
        for pair in _paired_sizes(node):
            one, other = (original_expression(size).xreplace(sizes) for size in pair)
            if one != other and 1 not in (one, other) and free_unbacked_symbols([one, other]):
                raise NoGraphError(
                    f"input sizes of {node.target} depend on data, and it broadcasts those that are 1"
                )


def _paired_sizes(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs of sizes that must be equal unless one is 1."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()) and node.target not in _BROADCASTING:
        return
    nodes = list(node.all_input_nodes)
    if node.target is aten.expand.default:
        nodes.append(node)
    tensors = [val for one in nodes if isinstance(val := one.meta.get("val"), torch.Tensor)]
    for one, other in combinations(tensors, 2):
        yield from zip(reversed(one.shape), reversed(other.shape), strict=False)
