"""Simplify a captured graph: remove assertions, and operations that return their input unchanged.

Before and after::

    _assert_tensor_metadata(x, ...)
    y = to.dtype(x, float32)          # x is float32      z = mul(x, w)
    z = mul(y, w)

``view`` becomes ``reshape``, and each state of a mutated value is read by the name of the operation
that made it::

    a = add_(x, 1)                                        a = add_(x, 1)
    b = mul(x, w)                                         b = mul(a, w)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from graphplan._compat.torch import storage_of
from graphplan.capture.captured_graph import Capture
from graphplan.capture.structure import attribute_and_leaf
from graphplan.capture.written_memory import named_arguments, written_arguments

aten = torch.ops.aten

_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
    torch._check,
}
_INT_MAX = (1 << 63) - 1


def simplify(capture: Capture, *, keep_grad: bool = False) -> None:
    """Simplify the captured graph in place.

    Args:
        capture: the capture, whose graph is changed.
        keep_grad: keep ``detach``, which matters to autograd only.
    """
    graph = capture.graph
    drop_checks(graph)
    _fold_lifted_constants(graph)
    folds = _FOLDS if keep_grad else {**_FOLDS, **dict.fromkeys(_DETACHES, lambda _: True)}
    step = capture.step  # its gradients are known by their names
    _fold(graph, folds, () if step is None else {*step.gradients, *step.input_gradients})
    _let_views_copy(graph)
    written = {storage_of(_val(argument)) for node in graph.nodes for argument in mutated_arguments(node)}
    _keep_copies(graph, written)
    _conjugate_at_once(graph, written)
    _copy_windows(capture)
    _copy_stored_views(capture)
    _name_states(graph)
    _share_sizes(graph)
    interface = ("placeholder", "output")
    graph.eliminate_dead_code(lambda n: n.op in interface or bool(mutated_arguments(n)) or _has_effects(n))
    graph.lint()


def _share_sizes(graph: fx.Graph) -> None:
    """Compute equal sizes once: the backward pass would keep a tensor only to read its size."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if isinstance(value := _val(node), torch.SymInt):
            known = first.setdefault(value.node.expr, node)
            if known is not node:
                node.replace_all_uses_with(known)


def drop_checks(graph: fx.Graph) -> None:
    """Remove the trace's assertions, which mention its devices and sizes."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CHECKS and not node.users:
            graph.erase_node(node)


def _fold_lifted_constants(graph: fx.Graph) -> None:
    """Drop copies of lifted constants, except of those that are written to or returned."""
    changed = [*graph.output_node().all_input_nodes, *chain(*map(mutated_arguments, graph.nodes))]
    tensors = [value for value in map(_val, changed) if isinstance(value, torch.Tensor)]
    memories = {storage_of(value) for value in tensors if value.layout is torch.strided}
    for node in list(graph.nodes):
        if node.target is not aten.lift_fresh_copy.default:
            continue
        if storage_of(_val(node)) in memories:  # the caller may write to the result
            node.target = aten.clone.default
            continue
        aliases = [node, *(user for user in node.users if user.target is aten.detach_.default)]
        for alias in sorted(aliases, reverse=True):
            alias.replace_all_uses_with(node.args[0])
            graph.erase_node(alias)


def _val(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _same_type(node: fx.Node) -> bool:
    source, result = _val(node.args[0]), _val(node)
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = named_arguments(node.target, node.args, node.kwargs)
    if arguments.get("copy") or arguments.get("memory_format") not in (None, torch.preserve_format):
        return False
    return source is not None and result is not None and bool(source.dtype == result.dtype)


def _whole_slice(node: fx.Node) -> bool:
    arguments = (*node.args[2:], *(None,) * (5 - len(node.args)))
    start, end, step = arguments[:3]
    return start in (None, 0) and end in (None, _INT_MAX) and step in (None, 1)


def _same_shape(node: fx.Node) -> bool:
    source, result = _val(node.args[0]), _val(node)
    if source is None or result is None or source.dim() != result.dim():
        return False
    # strides are not compared: those of the trace may differ from a later call's, or a GPU kernel's
    return all(bool(statically_known_true(a == b)) for a, b in zip(source.shape, result.shape, strict=True))


def _drops_nothing(node: fx.Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = named_arguments(node.target, node.args, node.kwargs)
    return arguments["train"] is False or bool(arguments["p"] == 0)


_DETACHES = (aten.detach.default, aten.detach_.default, aten.alias.default)
_FOLDS: dict[Any, Callable[[fx.Node], bool]] = {
    **dict.fromkeys((aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other), _same_type),
    aten.slice.Tensor: _whole_slice,
    **dict.fromkeys(
        (aten.expand.default, aten.view.default, aten.reshape.default, aten.squeeze.dim), _same_shape
    ),
    aten.dropout.default: _drops_nothing,  # from torch.dropout; a trace has no other dropout without effect
}
"""Operation -> whether a node of it returns its first argument unchanged."""


def _fold(graph: fx.Graph, folds: Mapping[Any, Callable[[fx.Node], bool]], excluded: Collection[str]) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.name in excluded:
            continue
        returns_argument = folds.get(node.target)
        if returns_argument is None or not isinstance(node.args[0], fx.Node) or not returns_argument(node):
            continue
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _let_views_copy(graph: fx.Graph) -> None:
    """Replace ``view`` by ``reshape``, which copies where ``view`` would raise.

    A trace omits a ``contiguous()`` that the CPU's kernels make needless; other kernels may need it.
    """
    for node in graph.nodes:
        if node.op == "call_function" and node.target is aten.view.default:
            node.target = aten.reshape.default


_MAY_COPY = (aten.contiguous.default, aten.reshape.default, aten.flatten.using_ints)
"""Operations that copy if strides require it; strides differ after a move, or from another kernel."""


def _keep_copies(graph: fx.Graph, written: set[int]) -> None:
    """Make copies of the trace explicit where the copy or its source is written to."""
    if not written:
        return
    for node in graph.nodes:
        if node.target not in _MAY_COPY:
            continue
        source, result = _val(node.args[0]), _val(node)
        if storage_of(source) == storage_of(result) or written.isdisjoint(map(storage_of, (source, result))):
            continue
        if node.target is aten.contiguous.default:
            node.target, node.kwargs = (
                aten.clone.default,
                {"memory_format": torch.contiguous_format, **node.kwargs},
            )
            continue
        with graph.inserting_before(node), result.fake_mode:
            copied = graph.call_function(
                aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
            )
            copied.meta = {**node.meta, "val": result.view(source.shape)}
        node.replace_input_with(node.args[0], copied)


# lazy views -> the operations that compute them
_LAZY = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}


def _conjugate_at_once(graph: fx.Graph, written: set[int]) -> None:
    """Replace lazy conjugates and negatives by copies of known size: most kernels that read them copy.

    Those whose memory is written to, or read by ``as_strided``, stay views.
    """
    strided = {storage_of(_val(node)) for node in graph.nodes if node.target is aten.as_strided.default}
    shared = written | strided
    for node in list(graph.nodes):
        if node.target not in _LAZY:
            continue
        argument = node.args[0]
        if isinstance(argument, complex):  # of the code, in a formula of autograd
            for reader in list(node.users):
                reader.replace_input_with(node, argument.conjugate())
            graph.erase_node(node)
        elif storage_of(_val(node)) not in shared:
            node.target = _LAZY[node.target]


def _copy_windows(capture: Capture) -> None:
    """Copy returned windows of caches that would keep a whole prompt in memory."""
    for window in [capture.outputs[position] for position in capture.kept]:
        if not isinstance(window, fx.Node) or window.target is not aten.slice.Tensor:
            continue
        value = _val(window)
        if free_unbacked_symbols(value):  # unknown sizes, as all such windows have with torch 2.11
            continue
        whole, part = value.untyped_storage().nbytes(), value.numel() * value.element_size()
        if not statically_known_true(whole <= 2 * part):  # one token more than the window is not worth a copy
            with capture.graph.inserting_after(window), value.fake_mode:
                copied = capture.graph.call_function(aten.clone.default, (window,))
                copied.meta = {**window.meta, "val": value.clone()}
            capture.graph.output_node().replace_input_with(window, copied)


def _copy_stored_views(capture: Capture) -> None:
    """Copy stored views of weights and constants, and stored tensors that the next call reads if not dense.

    The memory of a weight may be a prefetch buffer, and what is read is copied to a constant of the graph.
    """
    graph, output = capture.graph, capture.graph.output_node()
    read = {attribute_and_leaf(name)[0] for name in (capture.attributes or {}).values()}
    values = [_val(node) for node in graph.find_nodes(op="placeholder") if node.name in capture.weights]
    weights = {storage_of(value) for value in values if value.layout is torch.strided}
    flat = list(cast("tuple[Any, ...]", output.args[0]))
    for position, attribute in capture.stored.items():
        node = flat[position]
        value: Any = _val(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            continue
        if storage_of(value) in weights or (str(attribute) in read and not value.is_contiguous()):
            dense: Any = {"memory_format": torch.contiguous_format}
            with graph.inserting_before(output), value.fake_mode:  # type: ignore[attr-defined]  # of a fake
                flat[position] = graph.call_function(aten.clone.default, (node,), dense)
                flat[position].meta = {**node.meta, "val": value.clone(**dense)}
    output.args = (tuple(flat),)


_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a node writes to."""
    if node.target is _GRAD_MODE:
        return _mutated_inside(node)
    if node.target in (aten.detach_.default, aten.lift_fresh_copy.default):
        return []
    written = written_arguments(node.target, node.args, node.kwargs)
    return [argument for argument in written if isinstance(argument, fx.Node)]


def _mutated_inside(block: fx.Node) -> list[fx.Node]:
    """Return the arguments of a ``set_grad_enabled`` block whose memory its operations write to."""
    _, inner, *arguments = block.args
    assert isinstance(inner, fx.Node)
    assert block.graph.owning_module is not None
    graph = cast(fx.GraphModule, block.graph.owning_module.get_submodule(str(inner.target))).graph
    values = [_val(written) for node in graph.nodes for written in mutated_arguments(node)]
    memories = {storage_of(value) for value in values}
    pairs = zip(arguments, graph.find_nodes(op="placeholder"), strict=True)
    return [
        argument
        for argument, placeholder in pairs
        if isinstance(argument, fx.Node)
        and isinstance(_val(placeholder), torch.Tensor)
        and storage_of(_val(placeholder)) in memories
    ]


def _name_states(graph: fx.Graph) -> None:
    """Let nodes that read a mutated value after the mutation read the mutation's result."""
    for node in filter(_returns_first, graph.nodes):
        target = node.args[0]
        for user in [user for user in target.users if user > node]:
            user.replace_input_with(target, node)


def _returns_first(node: fx.Node) -> bool:
    """Whether a node writes to its first argument, and only to it, and returns it."""
    mutated = mutated_arguments(node)
    if len(mutated) != 1 or not node.args or node.args[0] is not mutated[0]:
        return False
    returns = cast(torch._ops.OpOverload, node.target)._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def _has_effects(node: fx.Node) -> bool:
    """Whether a node may have effects that its schema does not show."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in ("aten", "prim", "prims")
    return isinstance(node.target, torch._ops.HigherOrderOperator)
