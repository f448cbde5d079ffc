"""Which values of attributes a graph can return, for a placed model to store them after the call."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

from graphplan.capture.changes.attribute_snapshots import own_attributes
from graphplan.capture.structure import Seen, flatten, has_tensors, leaf_name

_CONTAINERS = (list, tuple, dict, OrderedDict, deque, namedtuple)
_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = (bool, int, float, str, type(None))
"""Classes of plain values that a graph can return."""


def can_store(value: Any, weights: Container[int], *, in_place: bool) -> bool:
    """Whether a value has tensors of the trace, and consists of these and of plain values.

    Args:
        value: what a call leaves in an attribute.
        weights: the ids of the model's weights: a list of them, as in ``nn.LSTM``, is not stored.
        in_place: whether it was there before, so that plain values in it may be settings that others change.
    """
    leaves, spec = flatten(value, Seen())
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return (
        bool(tensors)
        and all(is_fake(tensor) and id(tensor) not in weights for tensor in tensors)
        and all(isinstance(leaf, _TRACED if in_place else (*_TRACED, *PLAIN)) for leaf in leaves)
        and _has_plain_containers(spec)
    )


def _has_plain_containers(spec: pytree.TreeSpec) -> bool:
    return spec.is_leaf() or (spec.type in _CONTAINERS and all(map(_has_plain_containers, spec.children())))


def attributes_with_tensors(model: nn.Module) -> frozenset[str]:
    """Return the names of the attributes of modules that have tensors; parameters and buffers are none."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, part in model.named_modules()
        for name, value in own_attributes(part).items()
        if has_tensors(value)
    )


def tensors_in_containers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of attributes that are containers of tensors only, by name and position."""
    found = dict[str, torch.Tensor]()
    for path, part in model.named_modules():
        for name, value in own_attributes(part).items():
            if isinstance(value, (list, tuple, dict, deque)):
                leaves, spec = flatten(value, Seen())
                if _has_plain_containers(spec) and all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                    full = f"{path}.{name}" if path else name
                    found |= {leaf_name(full, index): leaf for index, leaf in enumerate(leaves)}
    return found


def keep_shape_and_type(before: Sequence[torch.Tensor], value: Any) -> bool:
    """Whether a tensor, or a container of tensors, has the shapes and types of others, and no gradient.

    Then a graph can read it as input.
    """
    leaves, spec = flatten(value, Seen())
    return (
        len(leaves) == len(before) and _has_plain_containers(spec) and all(map(_keeps_shape, before, leaves))
    )


def _keeps_shape(before: torch.Tensor, after: Any) -> bool:
    if not isinstance(after, torch.Tensor):
        return False
    known = all(isinstance(size, int) for size in after.shape)  # not a size that varies
    return known and (before.shape, before.dtype) == (after.shape, after.dtype) and after.grad_fn is None
