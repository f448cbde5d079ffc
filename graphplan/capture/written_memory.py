"""Writes of operations: arguments by their schemas, and the memory of nodes in a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphplan._compat.torch import storage_of
from graphplan.capture.structure import leaves_of

aten = torch.ops.aten

_UNDECLARED_WRITERS: dict[Any, str | None] = {
    aten.batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
    aten.native_batch_norm.default: "training",
    aten.cudnn_batch_norm.default: "training",
    aten.miopen_batch_norm.default: "training",
    aten.batch_norm_update_stats.default: None,
    aten.batch_norm_gather_stats.default: None,
    aten.batch_norm_gather_stats_with_counts.default: None,
}
"""Operation that writes to running statistics, undeclared in its schema -> the flag that enables it."""


def named_arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema."""
    return {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of an operation, and items of list arguments, that it writes to.

    They follow from the schema, except for BatchNorm and InstanceNorm, whose schemas do not declare writes.
    """
    is_declared = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
    if not is_declared and func not in _UNDECLARED_WRITERS:
        return []
    arguments = named_arguments(func, args, kwargs)
    if is_declared:
        aliases = {one.name: one.alias_info for one in func._schema.arguments}
        names = [name for name, alias in aliases.items() if alias is not None and alias.is_write]
    else:
        flag = _UNDECLARED_WRITERS[func]
        names = ["running_mean", "running_var"] if flag is None or arguments.get(flag) else []
    return [leaf for name in names for leaf in leaves_of(arguments.get(name)) if leaf is not None]


def memories(*nodes: fx.Node) -> list[int]:
    """Return the memory of each dense tensor that nodes make."""
    leaves = [leaf for node in nodes for leaf in leaves_of(node.meta.get("val"))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [storage_of(tensor) for tensor in tensors if tensor.layout is torch.strided]


def written_memories(node: fx.Node) -> list[int]:
    """Return the memory that the operation of a node writes to."""
    written = written_arguments(node.target, node.args, node.kwargs)
    return memories(*(one for one in written if isinstance(one, fx.Node)))
