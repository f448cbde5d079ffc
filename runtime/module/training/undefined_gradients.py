"""Backward passes of steps in which the loss does not use some results, so that these have no gradient.

Operations that depend on the missing gradients alone are left out, and yield no gradient, as in autograd.
Zeros instead would matter: a weight with a zero gradient still decays, and the logarithm of zero has a NaN
gradient. Before, and without a gradient for ``b``::

    mm = a_gradient @ w           mm = a_gradient @ w
    log = b_gradient / probs
    add = mm + log                clone = mm.clone()
    cat = cat([add, log])         cat = cat([clone, clone.new_zeros(...)])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.sizes.dynamic_sizes import exact_size, sizes_of_call
from graphplan.ir.lowered_ops import add_gradient, gradient_added, gradient_to
from graphplan.runtime.module.code_assembly import backward_code
from graphplan.runtime.module.module_state import Code
from graphplan.runtime.module.program import Program
from graphplan.runtime.module.weight_binding import BoundCode

_SUMS = (torch.add, torch.ops.aten.add.Tensor)


def reduced_backward(
    module: nn.Module,
    program: Program,
    code: Code,
    absent: frozenset[str],
    shapes: Sequence[Any],
    *,
    accumulate: bool,
) -> BoundCode:
    """Return the code of a step's backward pass for calls without gradients at the placeholders ``absent``.

    It is for inputs of these shapes. Without ``accumulate`` it leaves the parameters' gradients as they are.
    """
    names = [node.name for node in program.graph.find_nodes(op="placeholder")]
    inputs = [torch.empty(s, device="meta") if isinstance(s, torch.Size) else s for s in shapes]
    sizes = sizes_of_call(program.graph, names, inputs) if absent else {}
    key = absent, accumulate, tuple(sizes.values())
    if key not in code.reduced:
        assert program.backward is not None
        graph = without_gradients(program.backward.graph, absent, sizes)
        if not accumulate:
            for target in (gradient_added, add_gradient, gradient_to):  # each is read only by the one before
                for node in graph.find_nodes(op="call_function", target=target):
                    graph.erase_node(node)
        code.reduced[key] = backward_code(module, program, code.module, graph)
    return code.reduced[key]


def without_gradients(graph: fx.Graph, absent: Collection[str], sizes: Mapping[Any, int]) -> fx.Graph:
    """Return a copy of a backward pass in which the placeholders ``absent`` are None.

    ``sizes`` maps symbols to sizes. ``graph`` comes from
    :func:`graphplan.passes.lowering.split_step.split_step`.
    """
    copied, env = fx.Graph(), dict[fx.Node, fx.Node]()
    _saved, *tangents = graph.find_nodes(op="placeholder")
    gradients, undefined = set(tangents), {node for node in tangents if node.name in absent}
    for node in graph.nodes:
        sources = [source for source in node.all_input_nodes if source in gradients]
        missing = [source for source in sources if source in undefined]
        present = next((env[source] for source in sources if source not in undefined), None)
        if node.op == "output":
            results = [None if result in undefined else result for result in node.args[0]]
            copied.output(fx.map_arg(tuple(results), env.__getitem__))
            continue
        if sources:
            gradients.add(node)
        if missing and present is None:
            undefined.add(node)
        elif missing and node.target in _SUMS:  # a sum has memory of its own
            env[node] = copied.call_function(torch.clone, (present,))
        else:
            for source in missing:  # becomes zeros on the device of a gradient that is present
                value: Any = _operation_of(source).meta["val"]
                shape, dtype = tuple(exact_size(n, sizes) for n in value.shape), {"dtype": value.dtype}
                env[source] = copied.call_method("new_zeros", (present, shape), dtype)
            env[node] = copied.node_copy(node, env.__getitem__)
    return copied


def _operation_of(node: fx.Node) -> fx.Node:
    """Return the node that computed a value, which may have been moved between devices since."""
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    return node
