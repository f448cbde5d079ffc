"""Access to the tensors and nodes of a trace of ``torch.export`` while it is in progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphplan._compat import private


def node_of(tensor: torch.Tensor, tracer: Any, *, constants: bool = False) -> fx.Node | None:
    """Return the node of a tensor; None if it is not traced, or is a constant and ``constants`` is false."""
    slot = private(proxy_tensor, "get_proxy_slot", "torch")(tensor, tracer, None)
    if slot is None or (private(slot, "constant", "torch") is not None and not constants):
        return None
    return slot.proxy.node


def set_node(tensor: torch.Tensor, node: fx.Node, tracer: Any) -> None:
    """Make the trace treat a tensor as the result of a node."""
    track = private(proxy_tensor, "track_tensor_tree", "torch")
    track(tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)


def substitute_fake(tensor: torch.Tensor, replaced: torch.Tensor) -> torch.Tensor:
    """Make the current trace use the fake ``tensor`` in place of ``replaced``, and return ``tensor``."""
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None
    node = node_of(replaced, mode.tracer)
    assert node is not None
    set_node(tensor, node, mode.tracer)
    node.meta["val"] = tensor
    return tensor


def constant_of(node: fx.Node, tracer: Any) -> torch.Tensor | None:
    """Return the real tensor of a constant's node; None for other nodes."""
    if node.op != "get_attr":
        return None
    constant = getattr(tracer.root, str(node.target), None)
    return constant if isinstance(constant, torch.Tensor) and not isinstance(constant, FakeTensor) else None


def is_made_in_code(node: fx.Node) -> bool:
    """Whether a constant is created where the code uses it, as by ``torch.tensor(2.0)``."""
    aten = torch.ops.aten
    return all(user.target in (aten.lift_fresh.default, aten.lift_fresh_copy.default) for user in node.users)


def new_constant(tensor: torch.Tensor, tracer: Any) -> str:
    """Add a real tensor to the trace as a constant, and return its name."""
    name: str = private(tracer, "get_fresh_qualname", "torch")("_tensor_constant")
    setattr(tracer.root, name, tensor)
    return name


def with_sizes(results: Any, layouts: Sequence[tuple[Any, Any]], tracer: Any) -> Any:
    """Return an operation's results with known sizes and strides; the trace uses them from here on.

    ``layouts`` has the size and stride of each tensor in ``results``, in order.
    """
    leaves, spec = tree_flatten(results)
    nodes = [node_of(leaf, tracer) for leaf in leaves]
    with untraced():
        resized = [
            fake_tensor(private(leaf, "fake_mode", "torch"), *layout, 0, leaf.dtype, leaf.device, None)
            for leaf, layout in zip(leaves, layouts, strict=True)
        ]
    for node, tensor in zip(nodes, resized, strict=True):
        assert node is not None
        set_node(tensor, node, tracer)
        node.meta["val"] = tensor
    result = tree_unflatten(resized, spec)
    for node in {node if spec.is_leaf() else node.all_input_nodes[0] for node in nodes if node is not None}:
        node.meta["val"] = result
        node.meta.pop("unbacked_bindings", None)
    return result


@contextmanager
def untraced() -> Iterator[None]:
    """Context manager in which nothing is traced."""
    without_modes = private(_python_dispatch, "_disable_current_modes", "torch")
    with without_modes(), torch._C.DisableTorchFunction():
        yield


def fake_like(tensor: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """Return a fake tensor like another, over new memory or that of ``base``; call it in :func:`untraced`.

    The equivalent fake operations take five times as long.
    """
    layout = tensor.size(), tensor.stride(), tensor.storage_offset()
    return fake_tensor(private(tensor, "fake_mode", "torch"), *layout, tensor.dtype, tensor.device, base)


def fake_tensor(
    mode: FakeTensorMode,
    size: Sequence[Any],
    stride: Sequence[Any],
    offset: Any,
    dtype: torch.dtype,
    device: torch.device,
    base: torch.Tensor | None,
) -> torch.Tensor:
    """Return a fake tensor over new memory, or over that of ``base``."""
    if base is None:
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    else:
        meta = torch.empty(0, dtype=dtype, device="meta")
        meta.set_(base.untyped_storage(), offset, size, stride)
    return FakeTensor(mode, meta, device)
