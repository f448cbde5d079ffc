"""Sizes that the values of a call have decided, where its graph is traced again: with its gradients, say.

The first trace knows them, by a guard. An operation that is run again on fake tensors does not::

    first trace    nonzero(mask): (5, 1)
    again          nonzero(mask): (u0, 1)        here (5, 1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, has_free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from graphplan._compat.traced_tensors import current_tracer, with_sizes
from graphplan.capture.sizes.dynamic_sizes import with_known
from graphplan.errors import NoGraphError


class DecidedSizes(fx.Interpreter):
    """Runs a captured graph on fake tensors: sizes that values decide are those of the capture.

    Args:
        module: the captured graph.
        env: of the sizes of the fake tensors.
    """

    def __init__(self, module: fx.GraphModule, env: ShapeEnv) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors say enough
        self._env = env

    def run_node(self, n: fx.Node) -> Any:
        """Run one node.

        Raises:
            NoGraphError: the capture does not know the sizes either.
        """
        with self._env.ignore_fresh_unbacked_symbols():
            made = super().run_node(n)
        tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if not any(map(has_free_unbacked_symbols, tensors)):
            return made
        known = _decided(n, tensors)
        forms = [
            (
                [with_known(size, known) for size in one.shape],
                [with_known(step, known) for step in one.stride()],
            )
            for one in tensors
        ]
        return with_sizes(made, forms, current_tracer())


def _decided(node: fx.Node, tensors: list[torch.Tensor]) -> dict[Any, int]:
    """Symbol of what a node makes -> its value in the capture."""
    known = dict[Any, int]()
    for tensor, traced in zip(tensors, tree_leaves(node.meta["val"]), strict=True):
        sizes: Any = zip(tensor.shape, traced.shape, strict=True)
        for size, decided in sizes:
            if has_free_unbacked_symbols(size):
                if isinstance(decided, torch.SymInt):
                    raise NoGraphError(
                        f"values decide how much {node.target} returns, and a training step is planned for "
                        "sizes that are known: multiply by a mask instead of choosing rows"
                    )
                torch._check(size == decided)  # also of what the operation has made on its way
                known[size.node.expr] = decided
    return known
