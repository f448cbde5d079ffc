"""What one node of an fx graph says of itself: its target, its module, what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def argument_nodes(node: fx.Node) -> list[fx.Node]:
    """Its arguments that are nodes, in order, each as often as it is given."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def is_tensor_node(node: fx.Node) -> bool:
    """Whether its traced value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def target_name(target: str | Callable[..., Any]) -> str:
    """What it calls, for people."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        packet, overload = target._overloadpacket, target._overloadname
        name = packet.__name__ if overload == "default" else f"{packet.__name__}.{overload}"
        return name if target.namespace in ("aten", "graphplan") else f"{target.namespace}::{name}"
    return getattr(target, "__name__", str(target))


def module_path(node: fx.Node) -> str:
    """The module that called it (``"model.layers.3.mlp"``); empty where the trace does not say."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0] if isinstance(entry, tuple) else str(entry)
    return ".".join(part.partition("@")[0] for part in path.split("."))
