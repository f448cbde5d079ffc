"""Segments of a training step's forward pass: the layers of a stack, or the model's submodules.

A segment is recomputed, or has its saved values moved to CPU memory, as a whole. Its boundaries are
those of a module, as for ``torch.utils.checkpoint`` on every block. Operations outside of submodules are in
no segment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TypeVar

import torch
from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.passes.frontend.fx_nodes import module_path
from graphplan.passes.frontend.simplify import mutated_arguments

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModuleSegment:
    """Operations of the forward pass that belong to one module.

    Attributes:
        path: path of the module.
        nodes: the operations, in order.
        repeatable: those that can be recomputed: they draw no random numbers, and nothing that they read or
            make is written to. Values that the forward pass reads outside of the segment are excluded: they
            are saved in any case, for the segment that reads them.
    """

    path: str
    nodes: tuple[fx.Node, ...]
    repeatable: frozenset[fx.Node]


def segments_of(capture: Capture) -> list[ModuleSegment]:
    """Return the segments of a capture, in order."""
    forward = [n for n in capture.graph.nodes if n.op == "call_function" and not n.meta.get("backward")]
    written = written_nodes(forward)
    nodes_of: dict[str, list[fx.Node]] = {}
    for node in forward:
        path = segment_path(module_path(node))
        if path:
            nodes_of.setdefault(path, []).append(node)
    return [
        ModuleSegment(path, tuple(nodes), frozenset(_repeatable(nodes, written)))
        for path, nodes in nodes_of.items()
    ]


def _repeatable(nodes: list[fx.Node], written: set[fx.Node]) -> Iterator[fx.Node]:
    inside = set(nodes)
    for node in nodes:
        leaves = any(user not in inside and not user.meta.get("backward") for user in node.users)
        if written.isdisjoint((node, *node.all_input_nodes)) and not leaves and not _draws(node):
            yield node


def evenly_spaced(items: Sequence[_T], count: int) -> list[_T]:
    """Return ``count`` of these items, evenly spaced."""
    total = len(items)
    return [item for i, item in enumerate(items) if (i + 1) * count // total > i * count // total]


def saved_nodes(segment: ModuleSegment) -> list[fx.Node]:
    """Return the nodes of a segment that the backward pass reads."""
    return [node for node in segment.nodes if any(user.meta.get("backward") for user in node.users)]


def written_nodes(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that write in place, and those whose memory, shared with views, is written to."""
    base: Mapping[fx.Node, fx.Node] = {
        node: node.args[0] for node in nodes if is_view(node) and isinstance(node.args[0], fx.Node)
    }

    def root(node: fx.Node) -> fx.Node:
        while node in base:
            node = base[node]
        return node

    writers = [node for node in nodes if mutated_arguments(node)]
    roots = {root(argument) for node in writers for argument in mutated_arguments(node)} | set(writers)
    return roots | {node for node in nodes if root(node) in roots}


def is_view(node: fx.Node) -> bool:
    """Whether a node's memory is its first argument's; schemas of torch's "unsafe" views do not say so."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is getitem
    return target.is_view or "unsafe" in target.__name__


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or may return something else each time."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target.__name__ != "getitem" if callable(target) else True
    return torch.Tag.nondeterministic_seeded in target.tags


def segment_path(path: str) -> str:
    """Return ``model.layers.3.mlp -> model.layers.3``; the first part if no layer is numbered."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return parts[0]
