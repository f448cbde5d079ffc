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

from graphplan._compat.traced_tensors import current_tracer, with_sizes
from graphplan.capture.sizes.dynamic_sizes import with_known

_SIZED = (torch.Tensor, torch.SymInt)


class DecidedSizes(fx.Interpreter):
    """Runs a captured graph on fake tensors: sizes that values decide are those of the capture.

    Args:
        module: the captured graph.
        env: of the sizes of the fake tensors.

    Attributes:
        symbols: of sizes that only the data decides: each -> that of the capture.
    """

    def __init__(self, module: fx.GraphModule, env: ShapeEnv) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors say enough
        self._env = env
        self.symbols: dict[Any, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        traced = tree_leaves(n.meta.get("val"))
        if any(isinstance(leaf, _SIZED) and has_free_unbacked_symbols(leaf) for leaf in traced):
            made = super().run_node(n)
            for here, before in zip(_sizes(tree_leaves(made)), _sizes(traced), strict=True):
                if isinstance(here, torch.SymInt) and isinstance(before, torch.SymInt):
                    self.symbols.setdefault(here.node.expr, before.node.expr)
            return made
        with self._env.ignore_fresh_unbacked_symbols():
            made = super().run_node(n)
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if not any(map(has_free_unbacked_symbols, tensors)):
            return made
        known = _decided(tensors, traced)
        forms = [
            (
                [with_known(size, known) for size in one.shape],
                [with_known(step, known) for step in one.stride()],
            )
            for one in tensors
        ]
        return with_sizes(made, forms, current_tracer())


def _decided(tensors: Iterable[torch.Tensor], traced: Iterable[torch.Tensor]) -> dict[Any, int]:
    """Symbol of a size -> its value in the capture."""
    known = dict[Any, int]()
    for size, decided in zip(_sizes(tensors), _sizes(traced), strict=True):
        if has_free_unbacked_symbols(size):
            torch._check(size == decided)  # also of what the operation has made on its way
            known[size.node.expr] = int(decided)
    return known


def _sizes(made: Iterable[Any]) -> list[Any]:
    """Of tensors all sizes; numbers as they are."""
    return [size for leaf in made for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))]
