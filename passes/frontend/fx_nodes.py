"""Nodes of an fx graph: arguments, target and module of one; and new ones with a fake value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx


def argument_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that are nodes, in order, with repetitions."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    return nodes


def is_tensor_node(node: fx.Node) -> bool:
    """Whether the traced value of a node is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def target_name(target: str | Callable[..., Any]) -> str:
    """Return a readable name of a node's target."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        packet, overload = target._overloadpacket, target._overloadname
        name = packet.__name__ if overload == "default" else f"{packet.__name__}.{overload}"
        return name if target.namespace in ("aten", "graphplan") else f"{target.namespace}::{name}"
    return getattr(target, "__name__", str(target))


def module_path(node: fx.Node) -> str:
    """Return the path of the calling module (``"model.layers.3.mlp"``); empty if the trace has none."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0] if isinstance(entry, tuple) else str(entry)
    return ".".join(part.partition("@")[0] for part in path.split("."))


def emit(
    graph: fx.Graph,
    origin: fx.Node,
    name: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> fx.Node:
    """Create an operation in the module of ``origin``, with its fake value."""
    node = graph.create_node("call_function", target, args, dict(kwargs or {}), name)
    node.meta = {key: value for key, value in origin.meta.items() if key != "val"}
    fake_args, fake_kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node
