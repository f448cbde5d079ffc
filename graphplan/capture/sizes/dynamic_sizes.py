"""The sizes that a plan assumes for the symbols of a trace.

Symbols of input sizes have the largest value that the graph is to serve. Data-dependent symbols (the number
of tokens of an expert, the size of an image given by a tensor of sizes) have a bound if a tensor is split by
them or they count the elements that a mask selects. Else they are as in the example, if its inputs determine
them::

    split(x, [u0, u1])           u0 <= len(x), u1 <= len(x), u0 + u1 == len(x)
    index(x, mask): [u2]         u2 <= len(mask)
    u3 = item(grid[0])           u3 == 4, as in the example
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils import _pytree as pytree

from graphplan.capture.signature import CounterLeaf, TensorLeaf
from graphplan.capture.structure import reachable
from graphplan.capture.written_memory import written_arguments

UNBOUNDED = 1 << 48  # torch's upper bound of an unbounded size is above this
_MAX_ELEMENTS = 1 << 24  # of a tensor that is computed to find sizes; such tensors are small
_SELECTIONS = frozenset(
    {
        *("aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::where", "aten::masked_select"),
        *("aten::index", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"),
        *("aten::unique_dim_consecutive", "torchvision::nms"),
    }
)
_HARMLESS = (torch.ops.aten.detach_.default,)


def finite_bound(bound: Any) -> int | None:
    """Return an upper bound of the tracer as an int; None if it is infinite."""
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):  # sympy's infinities raise any
        return None
    return number if number < UNBOUNDED else None


def values_of(graph: fx.Graph) -> dict[str, Any]:
    """Return name of placeholder -> traced value, None unless it is a tensor or a size."""
    return {node.name: node.meta.get("val") for node in graph.find_nodes(op="placeholder")}


def _shape(value: Any) -> Any:
    """Return the shape of a tensor, or a number as a list of one."""
    return getattr(value, "shape", [value])


def _shapes(result: Any) -> list[Any]:
    """Return the shapes of a node's tensors and numbers, in order."""
    return list(map(_shape, pytree.tree_leaves(result)))


def _symbolic_sizes(sizes: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield those of ``sizes`` that are symbols, each with its entry of ``values``."""
    for size, value in zip(sizes, values, strict=True):
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            yield size.node.expr, value


def largest_sizes(graph: fx.Graph, inputs: Sequence[str], leaves: Sequence[Any]) -> dict[Any, int]:
    """Return symbol of an input's sizes -> largest value that the signature's leaf admits."""
    values, largest = values_of(graph), dict[Any, int]()
    for name, leaf in zip(inputs, leaves, strict=True):
        if isinstance(leaf, CounterLeaf) and leaf.high < UNBOUNDED:
            bounds: Any = [(leaf.low, leaf.high)]
        elif isinstance(leaf, TensorLeaf) and leaf.ranges:
            bounds = leaf.ranges
        else:
            continue
        for symbol, range_ in _symbolic_sizes(_shape(values[name]), bounds):
            if range_ is not None:
                largest[symbol] = max(largest.get(symbol, 0), range_[1])
    return largest


def sizes_of_call(graph: fx.Graph, inputs: Sequence[str], leaves: Sequence[Any]) -> dict[Any, int]:
    """Return symbol of an input's sizes and strides -> value in a call with these ``leaves``."""
    values, known = values_of(graph), dict[Any, int]()
    for name, leaf in zip(inputs, leaves, strict=True):
        val = values[name]
        if isinstance(val, torch.Tensor) and val.layout is torch.strided:
            known |= {symbol: int(step) for symbol, step in _symbolic_sizes(val.stride(), leaf.stride())}
        known |= {symbol: int(size) for symbol, size in _symbolic_sizes(_shape(val), _shape(leaf))}
    return known


def exact_size(size: Any, sizes: Mapping[Any, int]) -> int | None:
    """Return a traced size for these values of its symbols; None if it is data-dependent."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr.xreplace(sizes)
    return int(expression) if isinstance(expression, int) or expression.is_number else None


def with_data_sizes(graph: fx.Graph, sizes: Mapping[Any, int]) -> dict[Any, int]:
    """Return the sizes is_broadcast with bounds of data-dependent sizes.

    A selection has at most as many elements as its tensor. Where a tensor is split, each section has at most
    the tensor's size, and the sections sum to it: no expert gets more tokens than there are.
    """
    bounds = dict(sizes)
    for node, selected in _selections(graph):
        most = _max_selected(node, bounds)
        bounds |= {} if most is None else dict.fromkeys(selected, most)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.split_with_sizes.default):
        whole = node.args[0].meta.get("val")
        sections = [getattr(part, "meta", {}).get("val", part) for part in node.args[1]]
        axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        if not isinstance(whole, torch.Tensor) or not any(isinstance(s, torch.SymInt) for s in sections):
            continue
        total = largest_size(whole.shape[axis], bounds)
        if total is not None:
            parts = [s.node.expr if isinstance(s, torch.SymInt) else s for s in sections]
            bounds |= {
                part: min(total, bounds.get(part, total)) for part in parts if _is_unbacked_symbol(part)
            }
            bounds[sum(parts)] = total
    return bounds


def _selections(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[Any]]]:
    """Yield each node that selects from a tensor, with the symbols that first occur in its result."""
    before: set[Any] = set()
    for node in graph.nodes:
        if node.op == "placeholder":  # the gradient of a result, which exists only after the result
            continue
        new = [symbol for symbol in symbols_of(node) if symbol not in before]
        before.update(new)
        if new and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _SELECTIONS:
            yield node, new


def _max_selected(node: fx.Node, sizes: Mapping[Any, int]) -> int | None:
    """Return the largest number of elements selected, that of the mask or tensor; None if it is unknown."""
    vals = [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [val for val in vals if isinstance(val, torch.Tensor)]
    masks = [tensor for tensor in tensors if tensor.dtype == torch.bool]
    is_broadcast = node.target is torch.ops.aten.masked_select.default  # it broadcasts mask and tensor
    shapes = list[list[int]]()
    for tensor in tensors if is_broadcast else masks or tensors:
        shape = [largest_size(size, sizes) for size in tensor.shape]
        shapes.append([size for size in shape if size is not None])
        if len(shapes[-1]) < len(shape):
            return None
    if is_broadcast:
        shapes = [[max(of_axis) for of_axis in zip_longest(*map(reversed, shapes), fillvalue=1)]]
    return max(map(math.prod, shapes), default=None)


def _is_unbacked_symbol(expression: Any) -> bool:
    return getattr(expression, "is_symbol", False) and has_free_unbacked_symbols(expression)


def largest_size(size: Any, sizes: Mapping[Any, int]) -> int | None:
    """Return :func:`exact_size`, or the upper bound of a data-dependent size; None if it has none."""
    exact = exact_size(size, sizes)
    if exact is not None:
        return exact
    return finite_bound(size.node.shape_env.bound_sympy(size.node.expr.xreplace(sizes)).upper)


def sizes_of_example(
    graph: fx.Graph, values: Mapping[str, Any], inputs: Sequence[str], warn: Callable[[str], None]
) -> dict[Any, int]:
    """Return the data-dependent sizes of the example call.

    ``values`` has the known placeholders: inputs, constants and buffers. Call ``warn`` if unbounded sizes
    depend on the values of ``inputs``, which differ between calls.
    """
    dynamic_nodes = [node for node in graph.nodes if symbols_of(node)]
    needed = set(reachable(dynamic_nodes, lambda node: node.all_input_nodes))
    known: dict[fx.Node, Any] = {}
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in values:
            known[node] = values[node.name]
        elif node in needed and all(source in known for source in node.all_input_nodes):
            value = _evaluate(node, known)
            if value is not None:
                known[node] = value
        if node.name in inputs or varying.intersection(node.all_input_nodes):
            varying.add(node)
    example: dict[Any, int] = {}
    for node in (node for node in dynamic_nodes if node in known):
        for sizes, actual in zip(_shapes(node.meta["val"]), _shapes(known[node]), strict=True):
            example |= {
                symbol: int(size)
                for symbol, size in _symbolic_sizes(sizes, actual)
                if _is_unbacked_symbol(symbol)
            }
    counts = {node: known[each] for node in dynamic_nodes if (each := _counts_of(node)) in known}
    repeated = {node: each for node, each in counts.items() if each.numel() > 1}  # one count is for all rows
    for node, each in repeated.items():
        example |= dict.fromkeys(symbols_of(node), int(each.sum()))
    bounded = {symbol for _, selected in _selections(graph) for symbol in selected}
    unbounded = [node for node in dynamic_nodes if not bounded.issuperset(symbols_of(node))]
    if any(node in known or node in repeated for node in unbounded if node in varying):
        warn(
            "the plan counts data-dependent sizes as they are in the example call: calls in which they are "
            "larger may exceed its peaks"
        )
    return example


def _counts_of(node: fx.Node) -> Any:
    """Return the counts' node of ``repeat_interleave``, whose rows need not be known; None for others."""
    return node.args[1] if node.target is torch.ops.aten.repeat_interleave.self_Tensor else None


def symbols_of(node: fx.Node) -> list[Any]:
    """Return the data-dependent symbols that are sizes or numbers of a node's result by themselves."""
    shapes = _shapes(node.meta.get("val"))
    return [
        symbol
        for sizes in shapes
        for symbol, _ in _symbolic_sizes(sizes, sizes)
        if _is_unbacked_symbol(symbol)
    ]


def _has_side_effects(node: fx.Node) -> bool:
    """Whether an operation writes to its arguments or draws random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in _HARMLESS:
        return False
    written = written_arguments(node.target, node.args, node.kwargs)
    return bool(written) or torch.Tag.nondeterministic_seeded in node.target.tags


def _evaluate(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """Return a node's result from known values; None if it is too large or the node cannot run alone."""
    target = node.target
    if node.op != "call_function" or not callable(target) or _has_side_effects(node):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: known[source])
    try:
        with torch.no_grad():
            result = target(*args, **kwargs)
    except Exception:  # an operation may raise anything
        return None
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return None if any(tensor.numel() > _MAX_ELEMENTS for tensor in tensors) else result
