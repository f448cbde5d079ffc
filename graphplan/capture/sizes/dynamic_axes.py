"""The dynamic axes of a call's arguments, the role of each, and a trace's guards on them."""

from __future__ import annotations

import math
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphplan._compat.export import conditions_of
from graphplan.capture.signature import Guard
from graphplan.capture.structure import flatten_with_path, node_of_class

BATCH, LENGTH, SIZE = "batch", "length", "size"
Roles = Mapping[int, str]
"""Axis -> ``"batch"``, ``"length"`` or ``"size"``; for an integer, axis 0 is the integer itself."""

_TOKENS = re.compile(r"(input_ids|attention_mask|position_ids|token_type_ids|token_types|padding_mask)$")
_LABELS = re.compile(r"(labels?|(start|end)_positions)$")
_STATES = re.compile(r"(embeds|encoder_outputs|hidden_states?)$")


def text_roles(name: str, leaf: Any, batch: int | None, *, sizes: bool = False) -> Roles:
    """Return the dynamic axes of an argument of a transformers model; those of other sizes if ``sizes``."""
    if not isinstance(leaf, torch.Tensor) or not leaf.dim():
        return {}
    roles = dict.fromkeys(range(leaf.dim() if sizes else 0), SIZE)
    if batch is not None:
        roles |= _text_axes(name, leaf, batch)
    return {axis: role for axis, role in roles.items() if role == BATCH or leaf.shape[axis] != 1}


def _text_axes(name: str, leaf: torch.Tensor, batch: int) -> dict[int, str]:
    labels, roles = _LABELS.search(name) is not None, dict[int, str]()
    if leaf.dim() >= (1 if labels else 2) and leaf.shape[0] == batch:
        roles[0] = BATCH
    if (_TOKENS.search(name) or labels) and leaf.dim() == 2:
        roles[1] = LENGTH
    elif _TOKENS.search(name) and leaf.dim() == 4:
        roles |= {2: LENGTH, 3: LENGTH}
    elif _STATES.search(name) and leaf.dim() == 3:
        roles[1] = LENGTH
    elif name == "cache_position":
        roles[0] = LENGTH
    return roles


def plain_roles(leaves: Sequence[Any], *, sizes: bool, ones: bool) -> list[Roles]:
    """Return the dynamic axes of the leaves of any model's call.

    These are the batch and length axes, and all others if ``sizes``; axes of size 1 only if ``ones``. The
    batch is the first size of the first tensor. The length is axis 1 of tokens ``(batch, length)`` and of
    features ``(batch, length, features)``.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    batch = tensors[0].shape[0] if tensors else None
    all_roles = [_plain_roles(leaf, batch) for leaf in leaves]
    return [
        {
            axis: role
            for axis, role in roles.items()
            if (sizes or role != SIZE) and (ones or leaf.shape[axis] != 1)
        }
        for leaf, roles in zip(leaves, all_roles, strict=True)
    ]


def _plain_roles(leaf: Any, batch: int | None) -> Roles:
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return {}
    roles = dict.fromkeys(range(leaf.dim()), SIZE)
    if roles and leaf.shape[0] == batch:
        roles[0] = BATCH
    real = leaf.is_floating_point() or leaf.is_complex()
    if leaf.dim() == (3 if real else 2):
        roles[1] = LENGTH
    return roles


def shapes_for(value: Any, roles: Iterator[Roles]) -> Any:
    """Return the ``dynamic_shapes`` of one argument, from the roles of its leaves."""
    auto = torch.export.Dim.AUTO
    if isinstance(value, torch.Tensor):
        return dict.fromkeys(next(roles), auto) or None
    node = node_of_class(type(value))
    if node is None:
        return auto if next(roles) else None
    children, keys = node.flatten_fn(value)
    parts = [shapes_for(child, roles) for child in children]
    of_its_class = isinstance(value, tuple) or type(value) in (dict, OrderedDict, defaultdict, deque)
    return node.unflatten_fn(parts, keys) if of_its_class else parts


def written_guard(text: str, code: str) -> Guard:
    """Return a guard that evaluates Python code of the tracer over ``v``, the leaves of a call."""
    return Guard(text, eval(f"lambda v: {code}", {"math": math, "torch": torch}), code)


def conditions(program: torch.export.ExportedProgram, arguments: Mapping[str, Any]) -> tuple[Guard, ...]:
    """Return the trace's size guards as one guard over the leaves of ``arguments``, by traced name."""
    texts = list(dict.fromkeys(conditions_of(program)))
    leaves = enumerate(flatten_with_path(arguments))
    paths = {f"L{pytree.keystr(path)}": f"v[{index}]" for index, (path, _) in leaves}
    longest_first = sorted(paths, key=len, reverse=True)
    codes = []
    for text in texts:
        for path in longest_first:
            text = text.replace(path, paths[path])
        codes.append(text)
    return all_of(texts, codes)


def all_of(texts: Sequence[str], codes: Sequence[str]) -> tuple[Guard, ...]:
    """Return one guard for all conditions, or none: ``texts`` are for messages, ``codes`` are evaluated."""
    code = " and ".join(f"({one})" for one in codes)  # from the tracer: only sizes and numbers
    return (written_guard("sizes do not fulfil " + " and ".join(texts), code),) if codes else ()
