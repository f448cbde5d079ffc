"""The sizes that a plan counts with, where a trace has symbols for them.

Those of inputs are as large as a graph is to serve. Those that the data decides (how many tokens an expert
is given, how large an image is that a tensor of sizes tells of) are bounded where something is split by
them or chosen by a mask, and otherwise as in the example call, where they come of its inputs alone::

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
from torch.utils import _pytree as pytree

from graphplan.capture.signature import CounterLeaf, TensorLeaf
from graphplan.capture.structure import reached, written_arguments

UNBOUNDED = 1 << 48  # what torch writes for a size without an upper bound is above this
_MOST = 1 << 24  # elements: what decides sizes is computed from little
_CHOICES = frozenset(
    {
        *("aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::where", "aten::masked_select"),
        *("aten::index", "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"),
        *("aten::unique_dim_consecutive", "torchvision::nms"),
    }
)
_HARMLESS = (torch.ops.aten.detach_.default,)


def finite_bound(bound: Any) -> int | None:
    """An upper bound of the tracer's as an int; None where it is none."""
    try:
        number = int(bound)
    except (TypeError, ValueError, OverflowError, AttributeError):  # sympy's infinities raise any
        return None
    return number if number < UNBOUNDED else None


def values_of(graph: fx.Graph) -> dict[str, Any]:
    """Name of each placeholder -> the traced value that it is; None of what is no tensor and no size."""
    return {node.name: node.meta.get("val") for node in graph.find_nodes(op="placeholder")}


def _symbols(val: Any, here: Any) -> Iterator[tuple[Any, Any]]:
    """The symbols that are sizes of a traced tensor, or a traced integer; each with its place in ``here``."""
    yield from _sized(val.shape, here) if isinstance(val, torch.Tensor) else _sized([val], [here])


def _shapes(made: Any) -> Any:
    """The shapes of tensors that a node makes, and the numbers, in order."""
    return [getattr(leaf, "shape", [leaf]) for leaf in pytree.tree_leaves(made)]


def _sized(sizes: Iterable[Any], here: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Those of ``sizes`` that are symbols, each with what stands in its place in ``here``."""
    for size, found in zip(sizes, here, strict=True):
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            yield size.node.expr, found


def largest_sizes(graph: fx.Graph, inputs: Sequence[str], leaves: Sequence[Any]) -> dict[Any, int]:
    """Each symbol of an input's sizes -> the largest that the signature's leaf for it admits."""
    values, found = values_of(graph), dict[Any, int]()
    for name, leaf in zip(inputs, leaves, strict=True):
        if isinstance(leaf, CounterLeaf) and leaf.high < UNBOUNDED:
            bounds: Any = (leaf.low, leaf.high)
        elif isinstance(leaf, TensorLeaf) and leaf.ranges:
            bounds = leaf.ranges
        else:
            continue
        for symbol, range_ in _symbols(values[name], bounds):
            if range_ is not None:
                found[symbol] = max(found.get(symbol, 0), range_[1])
    return found


def sizes_of_call(graph: fx.Graph, inputs: Sequence[str], leaves: Sequence[Any]) -> dict[Any, int]:
    """Each symbol of an input's sizes and strides -> its value in a call with these ``leaves`` as inputs."""
    values, found = values_of(graph), dict[Any, int]()
    for name, leaf in zip(inputs, leaves, strict=True):
        val = values[name]
        if isinstance(val, torch.Tensor) and val.layout is torch.strided:
            found |= {symbol: int(step) for symbol, step in _sized(val.stride(), leaf.stride())}
        found |= {symbol: int(size) for symbol, size in _symbols(val, getattr(leaf, "shape", leaf))}
    return found


def exact_size(size: Any, sizes: Mapping[Any, int]) -> int | None:
    """A size of a trace where its symbols have these values; None where the data decides it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr.xreplace(sizes)
    return int(expression) if isinstance(expression, int) or expression.is_number else None


def with_data_sizes(graph: fx.Graph, sizes: Mapping[Any, int]) -> dict[Any, int]:
    """The sizes, and bounds of those that the data decides.

    What is chosen of a tensor has at most as many elements. Where a tensor is split, each size is at most the
    tensor's own, and their sum is that size: of the tokens of all experts, none has more than there are.
    """
    found = dict(sizes)
    for node, chosen in _choices(graph):
        most = _most_chosen(node, found)
        found |= {} if most is None else dict.fromkeys(chosen, most)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.split_with_sizes.default):
        whole = node.args[0].meta.get("val")
        sections = [getattr(part, "meta", {}).get("val", part) for part in node.args[1]]
        axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        if not isinstance(whole, torch.Tensor) or not any(isinstance(s, torch.SymInt) for s in sections):
            continue
        total = largest_size(whole.shape[axis], found)
        if total is not None:
            parts = [s.node.expr if isinstance(s, torch.SymInt) else s for s in sections]
            found |= {part: min(total, found.get(part, total)) for part in parts if _is_open(part)}
            found[sum(parts)] = total
    return found


def _choices(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[Any]]]:
    """Each node that chooses of a tensor, with the symbols that it decides: no node before it has them."""
    before: set[Any] = set()
    for node in graph.nodes:
        if node.op == "placeholder":  # the gradient of a result: it is given when that has been made
            continue
        new = [symbol for symbol in symbols_of(node) if symbol not in before]
        before.update(new)
        if new and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _CHOICES:
            yield node, new


def _most_chosen(node: fx.Node, sizes: Mapping[Any, int]) -> int | None:
    """How many elements are chosen at most: as many as the mask has, or the tensor; None if that is open."""
    vals = [source.meta.get("val") for source in node.all_input_nodes]
    tensors = [val for val in vals if isinstance(val, torch.Tensor)]
    masks = [tensor for tensor in tensors if tensor.dtype == torch.bool]
    together = node.target is torch.ops.aten.masked_select.default  # which broadcasts the mask and the tensor
    shapes = list[list[int]]()
    for tensor in tensors if together else masks or tensors:
        known = [largest_size(size, sizes) for size in tensor.shape]
        shapes.append([size for size in known if size is not None])
        if len(shapes[-1]) < len(known):
            return None
    if together:
        shapes = [[max(of_axis) for of_axis in zip_longest(*map(reversed, shapes), fillvalue=1)]]
    return max(map(math.prod, shapes), default=None)


def _is_open(expression: Any) -> bool:
    return getattr(expression, "is_symbol", False) and expression.name.startswith("u")


def largest_size(size: Any, sizes: Mapping[Any, int]) -> int | None:
    """As :func:`exact_size`, or the bound of what the data decides; None where that has none."""
    known = exact_size(size, sizes)
    if known is not None:
        return known
    return finite_bound(size.node.shape_env.bound_sympy(size.node.expr.xreplace(sizes)).upper)


def sizes_of_example(
    graph: fx.Graph, values: Mapping[str, Any], inputs: Sequence[str], warn: Callable[[str], None]
) -> dict[Any, int]:
    """Sizes that the data decides, as they are in the example call.

    ``values`` has the placeholders that are known: inputs, constants, buffers. Those of ``inputs`` are other
    values in other calls: then it calls ``warn``.
    """
    deciding = [node for node in graph.nodes if symbols_of(node)]
    wanted = set(reached(deciding, lambda node: node.all_input_nodes))
    known: dict[fx.Node, Any] = {}
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in values:
            known[node] = values[node.name]
        elif node in wanted and all(source in known for source in node.all_input_nodes):
            made = _computed(node, known)
            if made is not None:
                known[node] = made
        if node.name in inputs or varying.intersection(node.all_input_nodes):
            varying.add(node)
    found: dict[Any, int] = {}
    for node in (node for node in deciding if node in known):
        for sizes, here in zip(_shapes(node.meta["val"]), _shapes(known[node]), strict=True):
            found |= {symbol: int(size) for symbol, size in _sized(sizes, here) if _is_open(symbol)}
    counts = {node: known[each] for node in deciding if (each := _counts_of(node)) in known}
    repeated = {node: each for node, each in counts.items() if each.numel() > 1}  # one is for all rows
    for node, each in repeated.items():
        found |= dict.fromkeys(symbols_of(node), int(each.sum()))
    bounded = {symbol for _, chosen in _choices(graph) for symbol in chosen}
    open_ = [node for node in deciding if not bounded.issuperset(symbols_of(node))]
    if any(node in known or node in repeated for node in open_ if node in varying):
        warn(
            "sizes that only the data decides count in the plan as in the example call: calls in which they "
            "are larger may pass its peaks"
        )
    return found


def _counts_of(node: fx.Node) -> Any:
    """How often a node repeats each row of what need not be known; None where it does not."""
    return node.args[1] if node.target is torch.ops.aten.repeat_interleave.self_Tensor else None


def symbols_of(node: fx.Node) -> list[Any]:
    """Symbols that the data decides, of what a node makes: each alone."""
    shapes = _shapes(node.meta.get("val"))
    return [symbol for sizes in shapes for symbol, _ in _sized(sizes, sizes) if _is_open(symbol)]


def _does_more(node: fx.Node) -> bool:
    """Whether an operation writes to what it is given, or draws at random."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in _HARMLESS:
        return False
    written = written_arguments(node.target, node.args, node.kwargs)
    return bool(written) or torch.Tag.nondeterministic_seeded in node.target.tags


def _computed(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """What a node makes of known values; None where it takes too much, or cannot be run by itself."""
    target = node.target
    if node.op != "call_function" or not callable(target) or _does_more(node):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: known[source])
    try:
        with torch.no_grad():
            made = target(*args, **kwargs)
    except Exception:  # an operation may raise anything
        return None
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    return None if any(tensor.numel() > _MOST for tensor in tensors) else made
