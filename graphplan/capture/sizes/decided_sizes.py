"""Sizes that values decide, where a captured graph is traced again: with its gradients, say.

Some the first trace knows, by a guard. An operation that is run again on fake tensors does not::

    first trace    nonzero(mask): (5, 1)         nonzero(other): (u3, 1)
    again          nonzero(mask): (u0, 1)        nonzero(other): (u1, 1)
    here           nonzero(mask): (5, 1)         nonzero(other): (u1, 1), where u1 is u3 of the capture
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, has_free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from graphplan._compat.traced_tensors import untraced
from graphplan.errors import NoGraphError


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
        if any(map(_is_open, traced)):
            made = super().run_node(n)
            for here, before in zip(_sizes(tree_leaves(made)), traced, strict=True):
                if isinstance(here, torch.SymInt) and isinstance(before, torch.SymInt):
                    self.symbols.setdefault(here.node.expr, before.node.expr)
            return made
        with self._env.ignore_fresh_unbacked_symbols():
            made = super().run_node(n)
        sizes = _sizes(tree_leaves(made))
        if any(map(_is_open, sizes)):
            for here, decided in zip(sizes, traced, strict=True):
                self._decide(n, here, decided)
        return made

    def _decide(self, node: fx.Node, size: Any, decided: Any) -> None:
        if not _is_open(size):
            return
        if isinstance(decided, torch.SymInt):
            raise NoGraphError(
                f"values decide how much {node.target} returns, and the code takes it to be {decided}"
            )
        self.known[size.node.expr] = decided
        with untraced():
            torch._check(size == decided)  # also of what the operation has made on its way


def _is_open(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and has_free_unbacked_symbols(size)


def _sizes(made: Iterable[Any]) -> list[Any]:
    """Of tensors all sizes; numbers as they are."""
    return [size for leaf in made for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
