"""A backward pass to some of whose results no gradient comes, because no loss is made of them.

What would be computed of these gradients alone is left out, so that it leaves no gradients, as in autograd,
where zeros would: of weights that decay, and of logarithms of zero, whose gradients are no numbers. Before,
and without a gradient by ``b``::

    mm = a_gradient @ w           mm = a_gradient @ w
    log = b_gradient / probs
    add = mm + log                clone = mm.clone()
    cat = cat([add, log])         cat = cat([clone, clone.new_zeros(...)])
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from graphplan.runtime.module.code_assembly import backward_code
from graphplan.runtime.module.module_state import Code
from graphplan.runtime.module.program import Program
from graphplan.runtime.module.weight_binding import BoundCode

_SUMS = (torch.add, torch.ops.aten.add.Tensor)


def reduced_backward(module: nn.Module, program: Program, code: Code, absent: frozenset[str]) -> BoundCode:
    """The code of a step's backward pass where no gradient comes to these of its placeholders."""
    if absent not in code.reduced:
        assert program.backward is not None
        graph = without_gradients(program.backward.graph, absent)
        code.reduced[absent] = backward_code(module, program, code.module, graph)
    return code.reduced[absent]


def without_gradients(graph: fx.Graph, absent: Collection[str]) -> fx.Graph:
    """The graph of a backward pass, as :func:`graphplan.passes.lowering.split_step.split_step` makes it.

    Args:
        graph: which stays as it is.
        absent: names of the placeholders that will be None.
    """
    return _Reduced(graph, absent).made


class _Reduced:
    def __init__(self, graph: fx.Graph, absent: Collection[str]) -> None:
        self.made = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.gradients: set[fx.Node] = set()
        self.undefined: set[fx.Node] = set()
        _saved, *tangents = graph.find_nodes(op="placeholder")
        self.gradients.update(tangents)
        self.undefined.update(node for node in tangents if node.name in absent)
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        of = [source for source in node.all_input_nodes if source in self.gradients]
        defined = [source for source in of if source not in self.undefined]
        if node.op == "output":
            results = [None if result in self.undefined else result for result in node.args[0]]  # type: ignore[union-attr]  # a tuple
            self.made.output(fx.map_arg(tuple(results), self.env.__getitem__))
            return
        if of:
            self.gradients.add(node)
        if of and not defined:
            self.undefined.add(node)
        elif len(defined) == len(of):
            self.env[node] = self.made.node_copy(node, self.env.__getitem__)
        elif node.target in _SUMS:  # memory of its own, as that of the sum
            self.env[node] = self.made.call_function(torch.clone, (self.env[defined[0]],))
        else:
            self.env[node] = self.made.node_copy(
                node, lambda source: self._defined(source, self.env[defined[0]])
            )

    def _defined(self, source: fx.Node, beside: fx.Node) -> fx.Node:
        """A gradient, or zeros in the place of one that is not defined, on the device of another."""
        if source not in self.undefined:
            return self.env[source]
        value: Any = _operation_of(source).meta["val"]
        return self.made.call_method("new_zeros", (beside, tuple(value.shape)), {"dtype": value.dtype})


def _operation_of(node: fx.Node) -> fx.Node:
    """What made a value that may have been moved since."""
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    return node
