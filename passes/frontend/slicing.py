"""Slice operations whose weight fits no device: one for each part of the weight's rows, then joined.

The parts are rows, so they are contiguous in memory and can be streamed as they are. Before and after,
for a ``linear`` (a convolution by its output channels, a product with a transposed weight alike)::

    y = linear(x, w, b)              y_rows_0 = linear(x, w[0:512], b[0:512])
                                     y_rows_512 = linear(x, w[512:1000], b[512:1000])
                                     y_joined = cat([y_rows_0, y_rows_512], -1)

and for an ``embedding``, where an index that is out of range stays an error::

    y = embedding(w, i)              y_rows_0 = embedding(w[0:512], clamp(i, max=511))
                                     y_rows_512 = embedding(w[512:1000], clamp(i - 512, min=0))
                                     y_joined = where(i >= 512, y_rows_512, y_rows_0)

Each row is computed from the same numbers as before; nothing is summed that was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphplan._compat.torch import symbolic_kernels
from graphplan.capture.captured_graph import Capture, Part
from graphplan.devices.machine import suspended
from graphplan.passes.frontend.fx_nodes import emit

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Rule:
    """Positions of the weight and the bias among the arguments; dimension of the outputs of the rows."""

    weight: int
    bias: int | None
    dimension: int


_RULES: dict[Any, _Rule] = {
    aten.linear.default: _Rule(1, 2, -1),
    aten.conv1d.default: _Rule(1, 2, -2),
    aten.conv1d.padding: _Rule(1, 2, -2),
    aten.conv2d.default: _Rule(1, 2, -3),
    aten.conv2d.padding: _Rule(1, 2, -3),
    aten.conv3d.default: _Rule(1, 2, -4),
    aten.conv3d.padding: _Rule(1, 2, -4),
}
_GROUPS = 6  # position of ``groups`` in a convolution; a linear layer has none
_PRODUCTS: dict[Any, _Rule] = {  # products with a transposed weight
    aten.matmul.default: _Rule(1, None, -1),
    aten.mm.default: _Rule(1, None, -1),
    aten.addmm.default: _Rule(2, 0, -1),
}
_TRANSPOSITIONS = {aten.t.default, aten.transpose.int, aten.numpy_T.default, aten.mT.default}


def is_sliceable(capture: Capture, weight: str) -> bool:
    """Whether every operation that reads a weight, given by its first name, can read it in parts."""
    placeholders = _placeholders(capture, weight)
    readers = [(node, user) for node in placeholders for user in node.users]
    return bool(readers) and all(_reads_rows(node, user) for node, user in readers)


def slice_weights(capture: Capture, parts: Iterable[Part]) -> Capture:
    """Return a copy of a capture that reads weights in parts.

    Args:
        capture: the capture, which is not changed.
        parts: all rows of each weight to slice, in order; each is :func:`is_sliceable`.
    """
    sliced = copied(capture)
    parts_of: dict[str, list[Part]] = {}
    for part in parts:
        parts_of.setdefault(part.weight, []).append(part)
    with suspended(), symbolic_kernels(), torch.no_grad():
        for weight, rows in parts_of.items():
            _Slicer(sliced, weight, rows).run()
    sliced.graph.lint()
    return sliced


def _placeholders(capture: Capture, weight: str) -> list[fx.Node]:
    """Return the placeholders of a weight: one for each of its names that is read."""
    placeholders = capture.graph.find_nodes(op="placeholder")
    return [node for node in placeholders if capture.weights.get(node.name) == weight]


def _reads_rows(source: fx.Node, user: fx.Node) -> bool:
    if user.op != "call_function":
        return False
    if user.target is aten.embedding.default:
        return _is_argument(user, source, 0)
    if user.target in _RULES:
        groups = user.args[_GROUPS] if len(user.args) > _GROUPS else user.kwargs.get("groups", 1)
        return bool(groups == 1) and _is_argument(user, source, 1)
    if user.target in _TRANSPOSITIONS:
        products = [_PRODUCTS.get(product.target) for product in user.users]
        return _is_matrix(source) and all(
            rule is not None and _is_argument(product, user, rule.weight)
            for product, rule in zip(user.users, products, strict=True)
        )
    return False


def _is_argument(node: fx.Node, argument: fx.Node, position: int) -> bool:
    """Whether a node has an argument at this position, and nowhere else."""
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    times = sum(leaf is argument for leaf in leaves)
    keyword = "weight" in node.kwargs or "bias" in node.kwargs
    return times == 1 and not keyword and len(node.args) > position and node.args[position] is argument


def _is_matrix(node: fx.Node) -> bool:
    # of a matrix, all transpositions but the trivial one are the same
    users_swap = all(
        user.target is not aten.transpose.int or user.args[1] % 2 != user.args[2] % 2  # type: ignore[operator]
        for user in node.users
    )
    return node.meta["val"].dim() == 2 and users_swap


def copied(capture: Capture) -> Capture:
    """Return a capture with a copy of the graph, whose nodes have the same names."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in capture.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].name = node.name  # fx renames an input that has the name of a builtin
    module = fx.GraphModule(capture.module, graph)
    return replace(capture, module=module, weights=dict(capture.weights), parts=dict(capture.parts))


class _Slicer:
    """Rewrites all readers of one weight."""

    def __init__(self, capture: Capture, weight: str, parts: Sequence[Part]) -> None:
        self.capture, self.graph, self.parts = capture, capture.graph, parts
        self.sources = _placeholders(capture, weight)

    def run(self) -> None:
        with self.sources[0].meta["val"].fake_mode:
            rows = self._placeholders_of_parts()
            for source in self.sources:
                for user in list(source.users):
                    with self.graph.inserting_before(user):
                        self._rewrite(user, rows)
                del self.capture.weights[source.name]
                self.graph.erase_node(source)

    def _placeholders_of_parts(self) -> list[fx.Node]:
        source, placeholders = self.sources[0], []
        with self.graph.inserting_before(source):
            for part in self.parts:
                node = self.graph.placeholder(f"{source.name}_rows_{part.start}")
                node.meta = dict(source.meta)
                whole = source.meta["val"]
                node.meta["val"] = whole.new_empty((part.stop - part.start, *whole.shape[1:]))
                self.capture.weights[node.name] = part.name
                self.capture.parts[part.name] = part
                placeholders.append(node)
        return placeholders

    def _rewrite(self, user: fx.Node, rows: Sequence[fx.Node]) -> None:
        if user.target is aten.embedding.default:
            self._embedding(user, rows)
        elif user.target in _RULES:
            self._product(user, _RULES[user.target], rows)
        else:
            transposed = [
                self._emit(user, f"rows_{part.start}", user.target, (row, *user.args[1:]))
                for row, part in zip(rows, self.parts, strict=True)
            ]
            for product in list(user.users):
                with self.graph.inserting_before(product):
                    self._product(product, _PRODUCTS[product.target], transposed)
            self.graph.erase_node(user)

    def _product(self, node: fx.Node, rule: _Rule, rows: Sequence[fx.Node]) -> None:
        """Split an operation each of whose outputs depends on one row of the weight."""
        pieces = []
        for row, part in zip(rows, self.parts, strict=True):
            args = list(node.args)
            args[rule.weight] = row
            if rule.bias is not None and len(args) > rule.bias:
                args[rule.bias] = self._bias(node, args[rule.bias], part)
            pieces.append(self._emit(node, f"rows_{part.start}", node.target, tuple(args), node.kwargs))
        self._replace(node, self._emit(node, "joined", aten.cat.default, (pieces, rule.dimension)))

    def _bias(self, node: fx.Node, bias: Any, part: Part) -> Any:
        """Return the slice of a bias for a part; the whole bias if it is the same for all rows."""
        if not isinstance(bias, fx.Node) or bias.meta["val"].shape[-1] != self.parts[-1].stop:
            return bias
        arguments = (bias, -1, part.start, part.stop)
        return self._emit(node, f"bias_{part.start}", aten.slice.Tensor, arguments)

    def _embedding(self, node: fx.Node, rows: Sequence[fx.Node]) -> None:
        indices, last = node.args[1], self.parts[-1]
        joined: fx.Node | None = None
        for row, part in zip(rows, self.parts, strict=True):
            start = part.start
            local = self._emit(node, f"from_{start}", aten.sub.Tensor, (indices, start)) if start else indices
            # an index out of range of the whole weight stays out of range, and raises
            bounds = (0 if start else None, None if part is last else part.stop - start - 1)
            inside = self._emit(node, f"inside_{start}", aten.clamp.default, (local, *bounds))
            embedded = self._emit(node, f"rows_{start}", aten.embedding.default, (row, inside))
            if joined is None:
                joined = embedded
                continue
            is_later = self._emit(node, f"is_from_{start}", aten.ge.Scalar, (indices, start))
            mask = self._emit(node, f"mask_{start}", aten.unsqueeze.default, (is_later, -1))
            joined = self._emit(node, f"joined_{start}", aten.where.self, (mask, embedded, joined))
        assert joined is not None
        self._replace(node, joined)

    def _replace(self, node: fx.Node, joined: fx.Node) -> None:
        node.replace_all_uses_with(joined)
        self.graph.erase_node(node)

    def _emit(
        self, origin: fx.Node, suffix: str, target: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> fx.Node:
        return emit(self.graph, origin, f"{origin.name}_{suffix}", target, args, kwargs)
