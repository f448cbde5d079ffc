"""Compute a cross-entropy loss over large logits in parts of their rows, forward and backward.

The logits of all rows, their logarithms and gradients are often the largest values of a step by far. Those of
a part are freed at once, and computed again in the backward pass. Before and after::

    logits = mm(x, w)                                   for each part of the rows of x and target:
    logp = _log_softmax(logits)                             logits = mm(x_rows, w)
    loss, count = nll_loss_forward(logp, target)            logp = _log_softmax(logits)
    ...                                                     loss, count = nll_loss_forward(logp, target_rows)
                                                        loss = sum(losses) / sum(counts)
                                                        ...
    g = nll_loss_backward(tangent, logp, target)        for each part: logits and logp again, then
    g = _log_softmax_backward_data(g, logp)                 g = nll_loss_backward(tangent, logp, target_rows)
    x_gradient = mm(g, w)                                   g = _log_softmax_backward_data(g, logp)
    w_gradient = mm(t(g), x)                                mm(g, w) is a part of x_gradient,
                                                            mm(t(g), x_rows) a summand of w_gradient

Sums of parts in half precision are summed in float32. Logits that are a result as well are joined.

Source: the fused linear cross-entropy of Hsu et al., "Liger Kernel" (2024). That computes gradients in the
forward pass, which a planned step cannot: the gradient of the loss is not known yet.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphplan._compat.torch import symbolic_kernels
from graphplan.capture.captured_graph import Capture
from graphplan.capture.sizes.dynamic_sizes import largest_size
from graphplan.devices.machine import suspended
from graphplan.ir.graph import Graph
from graphplan.ir.lowered_ops import keep_on_cpu
from graphplan.passes.frontend.fx_nodes import emit
from graphplan.passes.frontend.simplify import mutated_arguments
from graphplan.passes.frontend.slicing import copied
from graphplan.passes.training.segments import is_view, written_nodes
from graphplan.passes.training.weight_views import duplicate_weight_views

aten = torch.ops.aten

_MEAN, _SUM = 1, 2  # torch's numbers of reductions
_MOST = 64  # parts, at most, as of a weight: with more, overheads of small operations add up
_PRODUCTS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}  # position of x
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default}
_AXIS: dict[Any, int] = {aten._log_softmax.default: 1, aten._log_softmax_backward_data.default: 2}
_PART = "loss_part_"


@dataclass(frozen=True, slots=True)
class LossParts:
    """The number of parts of a loss, and whether those that are results are joined on the CPU."""

    count: int = 1
    on_cpu: bool = False


def loss_in_parts(capture: Capture, parts: LossParts) -> Capture:
    """Return a copy of a training step that computes the loss of its largest logits in parts.

    The capture itself is returned if that is one part, or if it has no such loss.
    """
    if parts.count < 2 or _found(capture) is None:
        return capture
    changed = copied(capture)
    loss = _found(changed)
    assert loss is not None
    mode = _value(loss.logp).fake_mode
    env = mode.shape_env  # its symbols must stay those of the inputs
    with (
        suspended(),
        symbolic_kernels(),
        torch.no_grad(),
        mode,
        env.suppress_guards() if env else nullcontext(),
    ):
        _Splitter(changed.graph, loss, parts).run()
    duplicate_weight_views(changed)
    changed.graph.lint()
    return changed


def count_parts(capture: Capture, named: Collection[str]) -> int:
    """Return into how many parts to cut the loss, so that no value of it is larger than all other values.

    It stays whole if one of its operations is in ``named``.
    """
    loss = _found(capture)
    if loss is None:
        return 1
    replaced = {*loss.forward, loss.nll, *loss.backward}
    if any(node.name in named for node in replaced):
        return 1
    parted = replaced.difference(loss.joined, loss.summed)
    sizes = {n: _nbytes(n, capture.sizes) for n in capture.graph.nodes if n.op == "call_function"}
    largest = max(nbytes for node, nbytes in sizes.items() if node in parted)
    other = max((nbytes for node, nbytes in sizes.items() if node not in parted), default=0)
    rows = largest_size(_value(loss.logp).shape[0], capture.sizes)
    return min(math.ceil(largest / max(other, 1)), rows or 1, _MOST)


def planned_parts(graph: Graph) -> LossParts:
    """Return the parts of the loss in a planned graph."""
    on_cpu = any(one.offloads and not graph.saves_on_cpu(one) for one in graph.operations.values())
    return LossParts(max(1, sum(name.startswith(_PART) for name in graph.operations)), on_cpu)


def _nbytes(node: Any, sizes: Mapping[Any, int]) -> int:
    """Return the most bytes of a node's value; 0 if it has no memory of its own, or unknown bytes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or is_view(node):
        return 0
    return (largest_size(value.numel(), sizes) or 0) * value.element_size()


@dataclass(frozen=True, slots=True)
class _Loss:
    """A cross-entropy loss, and what is computed row by row of its logits.

    Attributes:
        nll: the mean or the sum of the negative logarithms of the targets' probabilities.
        forward: the matrix product, and what follows it row by row, in order; the last is ``logp``.
        backward: what reads these in the backward pass, in order: gradients row by row, and both of the next.
        joined: products of gradients with a weight.
        summed: sums over the rows of gradients, or of their products with other rows.
    """

    nll: fx.Node
    forward: list[fx.Node]
    backward: list[fx.Node]
    joined: list[fx.Node]
    summed: list[fx.Node]

    @property
    def logp(self) -> fx.Node:
        """Logarithms of the probabilities: rows x vocabulary."""
        return self.forward[-1]


def _found(capture: Capture) -> _Loss | None:
    """Return the loss of the largest logits; None if it cannot be computed in parts."""
    graph = capture.graph
    losses = graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default)
    if not losses:
        return None
    nll = max(losses, key=lambda node: _nbytes(node.args[0], capture.sizes))
    shape = _value(nll.args[0]).shape
    if len(shape) != 2 or not isinstance(shape[1], int) or nll.args[3] not in (_MEAN, _SUM):
        return None
    if nll.args[3] == _MEAN and _value(nll.args[0]).dtype == torch.float16:  # sums of parts may overflow
        return None
    nodes, forward = list(graph.nodes), _forward(nll)
    if forward is None:
        return None
    loss = _backward(nodes, _Loss(nll, forward, [], [], []))
    if loss is None:
        return None
    groups = ([*forward, nll], loss.backward)
    read = {one for group in groups for node in group for one in (node, *node.all_input_nodes)}
    if not read.isdisjoint(written_nodes([node for node in nodes if node.op == "call_function"])):
        return None
    return None if any(_hoisted(nodes, group) is None for group in groups) else loss


def _forward(nll: fx.Node) -> list[fx.Node] | None:
    """Return the nodes from the matrix product to the argument of a loss; None if others are between."""
    node = nll.args[0]
    assert isinstance(node, fx.Node)
    shape, chain = _value(node).shape, [node]
    while node.target not in _PRODUCTS:
        inputs = [one for one in node.all_input_nodes if _has_numel(one, math.prod(shape))]
        if len(inputs) != 1 or not _is_by_row(node, inputs, shape):
            return None
        (node,) = inputs
        chain.append(node)
    if node.target is aten.addmm.default and _value(node.args[0]).dim() > 1:  # what is added has rows
        return None
    return chain[::-1]


def _backward(nodes: Sequence[fx.Node], loss: _Loss) -> _Loss | None:
    """Add the nodes of the backward pass that read the rows of a loss; None if they cannot be parted."""
    shape = _value(loss.logp).shape
    rows, transposed, gradients = set(loss.forward), set[fx.Node](), set[fx.Node]()
    for node in nodes:
        inputs = [one for one in node.all_input_nodes if one in rows or one in transposed]
        if not inputs or (not node.meta.get("backward") and gradients.isdisjoint(inputs)):
            continue
        loss.backward.append(node)
        is_product = node.target is aten.mm.default and len(inputs) == 1
        if transposed.isdisjoint(inputs) and _is_by_row(node, inputs, shape):
            rows.add(node)
            gradients.add(node)
        elif node.target is aten.t.default and inputs[0] in rows:
            transposed.add(node)
        elif is_product and inputs[0] in rows and node.args[0] is inputs[0]:
            loss.joined.append(node)
        elif (is_product and (node.args[0] in transposed or node.args[1] in rows)) or (
            transposed.isdisjoint(inputs) and _is_sum_of_rows(node)
        ):
            loss.summed.append(node)
        else:
            return None
    return loss


def _value(node: Any) -> Any:
    """Return the fake value of a node."""
    return node.meta["val"]


def _has_numel(node: fx.Node, numel: Any) -> bool:
    """Whether a node's value is a tensor of so many elements."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and statically_known_true(value.numel() == numel)


def _is_by_row(node: fx.Node, inputs: Sequence[fx.Node], shape: torch.Size) -> bool:
    """Whether each row of a node is computed from the same row of ``inputs``, and of nothing else by row."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if not all(_has_numel(one, math.prod(shape)) for one in (node, *inputs)):
        return False
    if any(_value(one).shape[-1] != shape[1] for one in (node, *inputs)):
        return False
    if target in _RESHAPES:
        return True
    if target is aten.nll_loss_backward.default:
        return node.args[4] in (_MEAN, _SUM)  # else the gradient of the loss has rows
    if target in _AXIS:
        return node.args[_AXIS[target]] in (-1, _value(node).dim() - 1)
    others = [_value(one) for one in node.all_input_nodes if one not in inputs]
    # a part has two dimensions
    whole = all((other.numel() == 1 and other.dim() < 3) or other.shape == shape[1:] for other in others)
    return whole and (target is aten._to_copy.default or torch.Tag.pointwise in target.tags)


def _is_sum_of_rows(node: fx.Node) -> bool:
    if node.target is not aten.sum.dim_IntList:
        return False
    rows, dims, *_ = node.args
    rank, summed = _value(rows).dim(), cast("list[int]", dims)
    return {dim % rank for dim in summed} == set(range(rank - 1))


def _hoisted(nodes: Sequence[fx.Node], group: Sequence[fx.Node]) -> list[fx.Node] | None:
    """Return the nodes between the first and the last of a group that do not depend on it, in order.

    None if the group reads what depends on it outside of it, or if one of those nodes writes in place.
    """
    inside, dependent, free = set(group), set(group), list[fx.Node]()
    for node in nodes[nodes.index(group[0]) : nodes.index(group[-1])] if group else ():
        reads = dependent.intersection(node.all_input_nodes)
        if node in inside:
            if not reads <= inside:
                return None
        elif reads:
            dependent.add(node)
        elif mutated_arguments(node):
            return None
        else:
            free.append(node)
    return free if not group or dependent.intersection(group[-1].all_input_nodes) <= inside else None


class _Splitter:
    """Rewrites one loss."""

    def __init__(self, graph: fx.Graph, loss: _Loss, parts: LossParts) -> None:
        self.graph, self.loss, self.parts = graph, loss, parts
        self.bounds: dict[Any, list[Any]] = {}
        self.inside = {*loss.forward, loss.nll, *loss.backward}
        self.mark: dict[str, Any] = {}  # of the nodes of the pass that is written

    def run(self) -> None:
        loss = self.loss
        for group in ([*loss.forward, loss.nll], loss.backward):
            for node in _hoisted(list(self.graph.nodes), group) or ():
                group[0].prepend(node)
        with self.graph.inserting_before(loss.forward[0]):
            self._compute_loss()
        gradients = dict[str, fx.Node]()
        if loss.backward:
            self.mark = {"backward": True}
            with self.graph.inserting_before(loss.backward[0]):
                gradients = self._compute_gradients()
        for node in (*loss.backward[::-1], *loss.nll.users, loss.nll, *loss.forward[::-1]):
            self.graph.erase_node(node)
        for name, node in gradients.items():  # the step knows gradients by their names
            node.name = name

    def _compute_loss(self) -> None:
        """Compute the loss in parts, and join rows that others read."""
        nll = self.loss.nll
        logp, target, weight, reduction, ignore_index = cast("tuple[Any, ...]", nll.args)
        read = {node: list[fx.Node]() for node in self.loss.forward if not self.inside.issuperset(node.users)}
        totals = dict[int, fx.Node]()  # of the losses, and of the weights of the targets
        for i in range(self.parts.count):
            pieces = self._forward_pieces(i)
            arguments = (pieces[logp], self._slice(nll, target, i), weight, _SUM, ignore_index)
            part = self._emit(nll, f"{_PART}{i}", nll.target, arguments)
            for index in (0, 1):
                piece = self._emit(nll, f"{nll.name}_{index}_part_{i}", getitem, (part, index))
                totals[index] = self._add(nll, totals.get(index), piece)
            for node, parts in read.items():
                piece = pieces[node]
                if self.parts.on_cpu:  # right away: it would wait on its device for the last one
                    piece = self._emit(node, f"{node.name}_kept_{i}", keep_on_cpu, (piece,))
                parts.append(piece)
        dtype = _value(logp).dtype
        if reduction == _MEAN:
            totals[0] = self._emit(nll, "loss_mean", aten.div.Tensor, (totals[0], totals[1]))
        for user in nll.users:
            user.replace_all_uses_with(self._cast(nll, totals[cast(int, user.args[1])], dtype))
        for node, parts in read.items():
            node.replace_all_uses_with(self._joined(node, parts), lambda user: user not in self.inside)

    def _compute_gradients(self) -> dict[str, fx.Node]:
        """Compute the gradients in parts; return those of all rows by the names that they had."""
        loss = self.loss
        joined = {node: list[fx.Node]() for node in loss.joined}
        totals = dict[fx.Node, fx.Node]()
        for i in range(self.parts.count):
            pieces = self._forward_pieces(i)
            for node in loss.backward:
                pieces[node] = self._piece(i, node, pieces)
            for node, parts in joined.items():
                parts.append(pieces[node])
            for node in loss.summed:
                totals[node] = self._add(node, totals.get(node), pieces[node])
        gradients = {node: self._joined(node, parts) for node, parts in joined.items()}
        for node, total in totals.items():
            gradients[node] = self._shaped(node, self._cast(node, total, _value(node).dtype))
        for node, gradient in gradients.items():
            node.replace_all_uses_with(gradient)
        return {node.name: gradient for node, gradient in gradients.items()}

    def _forward_pieces(self, i: int) -> dict[fx.Node, fx.Node]:
        """Compute a part of the rows of the forward pass, once more in the backward pass."""
        pieces = dict[fx.Node, fx.Node]()
        for node in self.loss.forward:
            pieces[node] = self._piece(i, node, pieces)
        return pieces

    def _piece(self, i: int, node: fx.Node, pieces: dict[fx.Node, fx.Node]) -> fx.Node:
        """Compute a part of the rows of a node, or a summand, of the ``pieces`` of its inputs."""
        args: list[Any] = list(node.args)
        if node.target in _RESHAPES:
            return pieces[args[0]]
        if node is self.loss.forward[0]:
            x = _PRODUCTS[node.target]
            args[x] = self._slice(node, args[x], i)
        elif node.target is aten.mm.default and node in self.loss.summed:
            other = 1 if args[0] in pieces else 0
            args[other] = self._slice(node, args[other], i, 1 - other)
        elif node.target is aten.nll_loss_backward.default:
            args[2] = self._slice(node, args[2], i)
        elif node.target in _AXIS:
            args[_AXIS[node.target]] = 1
        elif node.target is aten.sum.dim_IntList:
            args[1] = [0]
        new_args, kwargs = fx.map_arg((tuple(args), node.kwargs), lambda one: pieces.get(one, one))
        forward = self.mark and not node.meta.get("backward")
        piece = self._emit(
            node, f"{node.name}_{'again' if forward else 'part'}_{i}", node.target, new_args, kwargs
        )
        if forward:
            piece.meta |= {"forward": f"{node.name}_part_{i}", "repeats": f"{node.name}_part_{i}"}
        return piece

    def _slice(self, reader: fx.Node, node: Any, i: int, dimension: int = 0) -> fx.Node:
        arguments = (node, dimension, *self._bounds(reader, node, dimension)[i : i + 2])
        return self._emit(reader, f"{node.name}_rows_{i}", aten.slice.Tensor, arguments)

    def _bounds(self, reader: fx.Node, node: fx.Node, dimension: int) -> list[Any]:
        """Return the first row of each part, and the number of rows; a part has ``(rows + i) // count``."""
        key, count = (node, dimension, *self.mark), self.parts.count
        if key not in self.bounds:
            rows = _value(node).shape[dimension]
            if not isinstance(rows, int):
                rows = self._emit(reader, f"{node.name}_size", aten.sym_size.int, (node, dimension))
            bounds = self.bounds[key] = [0]
            for i in range(count):
                more = self._number(
                    reader, operator.floordiv, self._number(reader, operator.add, rows, i), count
                )
                bounds.append(self._number(reader, operator.add, bounds[-1], more))
        return self.bounds[key]

    def _number(self, reader: fx.Node, function: Any, a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return function(a, b)
        return self._emit(reader, function.__name__, function, (a, b))

    def _add(self, node: fx.Node, total: fx.Node | None, piece: fx.Node) -> fx.Node:
        if total is not None:
            return self._emit(node, f"{node.name}_sum", aten.add.Tensor, (total, piece))
        dtype = _value(piece).dtype
        return self._cast(node, piece, torch.promote_types(dtype, torch.float32))

    def _cast(self, origin: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        if _value(node).dtype == dtype:
            return node
        return self._emit(origin, f"{node.name}_cast", aten._to_copy.default, (node,), {"dtype": dtype})

    def _joined(self, node: fx.Node, parts: list[fx.Node]) -> fx.Node:
        return self._shaped(node, self._emit(node, f"{node.name}_joined", aten.cat.default, (parts,)))

    def _shaped(self, node: fx.Node, value: fx.Node) -> fx.Node:
        source, shape = node, list(_value(node).shape)
        if len(shape) == _value(value).dim():
            return value
        while not all(isinstance(size, int) for size in shape):  # symbolic sizes are arguments of a reshape
            if len(source.args) > 1 and source.target in _RESHAPES:
                shape = cast("list[Any]", source.args[1])
                break
            source = next(one for one in source.all_input_nodes if one in self.inside)
        return self._emit(node, f"{node.name}_shaped", aten.reshape.default, (value, shape))

    def _emit(
        self, origin: fx.Node, name: str, target: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> fx.Node:
        node = emit(self.graph, origin, name, target, args, kwargs)
        node.meta |= self.mark
        return node
