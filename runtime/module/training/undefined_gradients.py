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
    """The code of a step's backward pass where no gradient comes to these of its placeholders.

    It is for inputs of these shapes. Without ``accumulate`` it leaves the parameters' gradients as they are.
    """
    names = [node.name for node in program.graph.find_nodes(op="placeholder")]
    given = [torch.empty(one, device="meta") if isinstance(one, torch.Size) else one for one in shapes]
    sizes = sizes_of_call(program.graph, names, given) if absent else {}
    key = absent, accumulate, tuple(sizes.values())
    if key not in code.reduced:
        assert program.backward is not None
        graph = without_gradients(program.backward.graph, absent, sizes)
        if not accumulate:
            for target in (gradient_added, add_gradient, gradient_to):  # each for the one before alone
                for node in graph.find_nodes(op="call_function", target=target):
                    graph.erase_node(node)
        code.reduced[key] = backward_code(module, program, code.module, graph)
    return code.reduced[key]


def without_gradients(graph: fx.Graph, absent: Collection[str], sizes: Mapping[Any, int]) -> fx.Graph:
    """A copy of a backward pass for placeholders of these names that will be None.

    ``sizes`` are those of symbols. ``graph`` is as
    :func:`graphplan.passes.lowering.split_step.split_step` makes it.
    """
    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    _saved, *tangents = graph.find_nodes(op="placeholder")
    gradients, undefined = set(tangents), {node for node in tangents if node.name in absent}
    for node in graph.nodes:
        of = [source for source in node.all_input_nodes if source in gradients]
        lacking = [source for source in of if source in undefined]
        beside = next((env[source] for source in of if source not in undefined), None)
        if node.op == "output":
            results = [None if result in undefined else result for result in node.args[0]]
            made.output(fx.map_arg(tuple(results), env.__getitem__))
            continue
        if of:
            gradients.add(node)
        if lacking and beside is None:
            undefined.add(node)
        elif lacking and node.target in _SUMS:  # memory of its own, as that of the sum
            env[node] = made.call_function(torch.clone, (beside,))
        else:
            for source in lacking:  # zeros in its place, on the device of another
                value: Any = _operation_of(source).meta["val"]
                shape, dtype = tuple(exact_size(n, sizes) for n in value.shape), {"dtype": value.dtype}
                env[source] = made.call_method("new_zeros", (beside, shape), dtype)
            env[node] = made.node_copy(node, env.__getitem__)
    return made


def _operation_of(node: fx.Node) -> fx.Node:
    """What made a value that may have been moved since."""
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    return node
