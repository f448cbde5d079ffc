"""What ``torch.export`` knows of tensors while it traces."""

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
    """The node that has made a tensor; None for one that is not traced, or without ``constants`` is one."""
    slot = private(proxy_tensor, "get_proxy_slot", "torch")(tensor, tracer, None)
    if slot is None or (private(slot, "constant", "torch") is not None and not constants):
        return None
    return slot.proxy.node


def set_node(tensor: torch.Tensor, node: fx.Node, tracer: Any) -> None:
    """Let the trace take a tensor for what a node has made."""
    track = private(proxy_tensor, "track_tensor_tree", "torch")
    track(tensor, fx.Proxy(node, tracer), constant=None, tracer=tracer)


def taken_for(tensor: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """A fake tensor that the trace in progress takes for what it was given."""
    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None
    node = node_of(given, mode.tracer)
    assert node is not None
    set_node(tensor, node, mode.tracer)
    node.meta["val"] = tensor
    return tensor


def constant_of(node: fx.Node, tracer: Any) -> torch.Tensor | None:
    """The tensor with values that a node stands for; None where it stands for anything else."""
    if node.op != "get_attr":
        return None
    found = getattr(tracer.root, str(node.target), None)
    return found if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor) else None


def is_made_in_code(node: fx.Node) -> bool:
    """Whether a constant was made where it is used, as by ``torch.tensor(2.0)``, and not before."""
    aten = torch.ops.aten
    return all(user.target in (aten.lift_fresh.default, aten.lift_fresh_copy.default) for user in node.users)


def new_constant(tensor: torch.Tensor, tracer: Any) -> str:
    """Keep a tensor with values beside the trace, under a name that is returned."""
    name: str = private(tracer, "get_fresh_qualname", "torch")("_tensor_constant")
    setattr(tracer.root, name, tensor)
    return name


def with_sizes(made: Any, forms: Sequence[tuple[Any, Any]], tracer: Any) -> Any:
    """What the trace takes for the tensors that an operation has made; their sizes and strides are known.

    ``forms`` has these of each, in order.
    """
    leaves, spec = tree_flatten(made)
    nodes = [node_of(leaf, tracer) for leaf in leaves]
    with untraced():
        known = [
            fake_tensor(private(leaf, "fake_mode", "torch"), *form, 0, leaf.dtype, leaf.device, None)
            for leaf, form in zip(leaves, forms, strict=True)
        ]
    for node, tensor in zip(nodes, known, strict=True):
        assert node is not None
        set_node(tensor, node, tracer)
        node.meta["val"] = tensor
    found = tree_unflatten(known, spec)
    for node in {node if spec.is_leaf() else node.all_input_nodes[0] for node in nodes if node is not None}:
        node.meta["val"] = found
        node.meta.pop("unbacked_bindings", None)
    return found


@contextmanager
def untraced() -> Iterator[None]:
    """A block in which nothing is traced."""
    without_modes = private(_python_dispatch, "_disable_current_modes", "torch")
    with without_modes(), torch._C.DisableTorchFunction():
        yield


def fake_like(tensor: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """In an untraced block: a fake tensor like another, over memory of its own, or that of ``base``.

    Fake operations that do the same take five times as long.
    """
    mode, place = (
        private(tensor, "fake_mode", "torch"),
        (tensor.size(), tensor.stride(), tensor.storage_offset()),
    )
    return fake_tensor(mode, *place, tensor.dtype, tensor.device, base)


def fake_tensor(
    mode: FakeTensorMode,
    size: Sequence[Any],
    stride: Sequence[Any],
    offset: Any,
    dtype: torch.dtype,
    device: torch.device,
    base: torch.Tensor | None,
) -> torch.Tensor:
    """A fake tensor over memory of its own, or that of ``base``."""
    if base is None:
        made = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    else:
        made = torch.empty(0, dtype=dtype, device="meta")
        made.set_(base.untyped_storage(), offset, size, stride)
    return FakeTensor(mode, made, device)
