"""Keep saved values of segments in CPU memory between the forward and the backward pass.

A no-op on the CPU stands between the forward and the backward readers of a value, so that the schedule moves
the value there and back. Before and after::

    mm = mm(x, w)                      mm = mm(x, w)
    silu = silu(mm)                    silu = silu(mm)
    ...                                on_cpu = keep_on_cpu(mm)         on the CPU
    f = silu_backward(tangent, mm)     ...
                                       f = silu_backward(tangent, on_cpu)

The backward pass takes views of such values itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from graphplan.capture.captured_graph import Capture
from graphplan.ir.lowered_ops import keep_on_cpu
from graphplan.passes.training.segments import ModuleSegment, saved_nodes, written_nodes
from graphplan.passes.training.weight_views import VIEWS, backward_readers, duplicate_view, view_chain

_SMALLEST = 1 << 10  # bytes of the smallest value that is worth two copies


def offload(capture: Capture, segments: Iterable[ModuleSegment]) -> None:
    """Keep the saved values of these segments of a training step in CPU memory, in place."""
    order = {node: index for index, node in enumerate(capture.graph.nodes)}
    for segment in segments:
        views = _own_views(segment)  # the backward pass takes them by itself
        for view in [node for node in saved_nodes(segment) if node in views]:
            duplicate_view(view, views, order)
        for node in offloadable(segment):
            _keep(capture.graph, node, order)
    capture.graph.lint()


def offloadable(segment: ModuleSegment) -> list[fx.Node]:
    """Return the saved values of a segment, views replaced by bases, that may and should wait on the CPU."""
    written, views = written_nodes(segment.nodes), _own_views(segment)
    bases = dict.fromkeys(view_chain(node, views)[-1] for node in saved_nodes(segment))
    on_cpu = (node for node in bases if node not in written and _nbytes(node) >= _SMALLEST)
    return [node for node in on_cpu if not any(user.op == "output" for user in node.users)]


def _own_views(segment: ModuleSegment) -> set[fx.Node]:
    inside = set(segment.nodes)
    return {node for node in segment.nodes if node.target in VIEWS and node.args[0] in inside}


def _keep(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int]) -> None:
    readers = backward_readers(node)
    forward = [user for user in node.users if not user.meta.get("backward") and user.op != "output"]
    last = max(forward, key=order.__getitem__, default=node)
    with graph.inserting_after(last):
        on_cpu = graph.call_function(keep_on_cpu, (node,))
    on_cpu.meta = {key: value for key, value in node.meta.items() if key != "repeats"}
    order[on_cpu] = order[last]
    for reader in readers:
        reader.replace_input_with(node, on_cpu)


def _nbytes(node: fx.Node) -> int:
    """Return the bytes of a node's value; 0 if its size depends on data."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or has_free_unbacked_symbols(value):
        return 0
    return value.numel() * value.element_size()
