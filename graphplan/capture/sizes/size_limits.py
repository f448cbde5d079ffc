"""The largest batch and length for which a plan reserves memory.

A trace serves all sizes; memory does not. Each plan is for sizes up to a bound: the caller's ``max_batch``
and ``max_length``, else the sizes of the example, or the next power of two for later calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphplan.capture.captured_graph import Capture
from graphplan.capture.signature import BoundCall, CounterLeaf, TensorLeaf
from graphplan.capture.sizes.dynamic_axes import BATCH, LENGTH, SIZE
from graphplan.capture.sizes.dynamic_sizes import UNBOUNDED, largest_sizes, with_data_sizes
from graphplan.errors import InputError, LimitError

_MIN_GROWTH = 8  # tokens by which a plan at least exceeds a growing text if memory is short
_MIN_LENGTH = 64  # tokens for which a plan is at least made while a text grows


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """The caller's limits.

    Attributes:
        max_batch: sequences in one call, including beams, or None.
        max_length: tokens of a sequence, including those in the cache, or None.
    """

    max_batch: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_length"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value > 0):
                raise InputError(f"{name} must be a positive integer or None, not {value!r}")

    @property
    def has_limit(self) -> bool:
        """Whether there is a limit."""
        return self.max_batch is not None or self.max_length is not None

    def largest(self, role: str, size: int, ahead: float) -> int:
        """Return the size for which a plan is made.

        Args:
            role: a role as in :data:`graphplan.capture.sizes.dynamic_axes.Roles`.
            size: the size in the call.
            ahead: how far to plan ahead: 1 for the next power of two, which for a length is always above
                ``size``; less for this fraction of ``size`` more; 0 for ``size`` itself.

        Raises:
            LimitError: the call is larger than the caller's limit.
        """
        limit = {BATCH: self.max_batch, LENGTH: self.max_length}.get(role)
        if limit is not None:
            if size > limit:
                name, unit = ("max_batch", "sequences") if role == BATCH else ("max_length", "tokens")
                raise LimitError(
                    f"a call of {size} {unit} exceeds {name}={limit}, for which memory was planned: "
                    f"partition the model with a larger {name}"
                )
            return limit
        if not ahead or size < 1:
            return size
        if ahead < 1:
            return size + max(int(size * ahead), _MIN_GROWTH if role == LENGTH else 1)
        return max(_MIN_LENGTH, 1 << size.bit_length()) if role == LENGTH else 1 << (size - 1).bit_length()


def bounded(
    capture: Capture, call: BoundCall, size_limits: SizeLimits, ahead: float, *, grows: bool = False
) -> Capture:
    """Return the capture, traced for all sizes, with the sizes bounded to those of a plan.

    ``ahead`` is as in :meth:`SizeLimits.largest`. It applies to batches and images only if ``grows``, that is
    if the call has outgrown the bounds of smaller ones before it.

    Raises:
        LimitError: the call is larger than the caller's limit.
    """
    if not any(capture.roles):
        return replace(capture, sizes=with_data_sizes(capture.graph, capture.sizes))
    sizes = _sizes(capture, call)
    longest = size_limits.largest(LENGTH, sizes.longest, ahead)
    batch_ahead = ahead if grows else 0.0
    batch = size_limits.largest(BATCH, sizes.batch, batch_ahead)
    leaves = []
    for index, (leaf, roles) in enumerate(zip(capture.signature.leaves, capture.roles, strict=True)):
        current = {axis: _size(call.leaves[index], axis) for axis in roles}
        own_length = max((current[axis] for axis, role in roles.items() if role == LENGTH), default=1)
        length = longest
        if index in sizes.states:
            length = max(longest - sizes.new, 1)
        elif size_limits.max_length is None and not ahead:  # lengths may differ, as of encoder and decoder
            length = own_length
        if index in sizes.encoded:  # max_length does not apply to these
            length = max(length, own_length)
        limits = {
            axis: {BATCH: batch, LENGTH: length}.get(role)
            or size_limits.largest(role, current[axis], batch_ahead)
            for axis, role in roles.items()
        }
        leaves.append(_with_limits(leaf, limits))
    signature = replace(capture.signature, leaves=tuple(leaves))
    traced = [None if index is None else leaves[index] for index in capture.order]
    growth = -(-batch // sizes.batch) * -(-longest // sizes.longest)
    bounds = {
        **capture.sizes,
        **largest_sizes(capture.graph, capture.inputs, _added(capture, call, growth)),
        **largest_sizes(capture.graph, capture.inputs, traced),
    }
    return replace(capture, signature=signature, sizes=with_data_sizes(capture.graph, bounds))


def exceeds_slightly(call: BoundCall, capture: Capture) -> bool:
    """Whether a call exceeds the bounds of a capture by a few tokens, as a text that grows does."""
    growth = {BATCH: 0, LENGTH: 0, SIZE: 0}
    # the capture of a stage has no roles
    for current, leaf, roles in zip(call.leaves, capture.signature.leaves, capture.roles, strict=False):
        for axis, role in roles.items():
            growth[role] = max(growth[role], _size(current, axis) - _high(leaf, axis))
    return not growth[BATCH] and 0 < max(growth.values()) <= _MIN_GROWTH


def _high(leaf: object, axis: int) -> int:
    """Return the largest size that a signature's leaf allows along an axis."""
    if isinstance(leaf, CounterLeaf):
        return leaf.high
    bounds = leaf.ranges[axis] if isinstance(leaf, TensorLeaf) and axis < len(leaf.ranges) else None
    return UNBOUNDED if bounds is None else bounds[1]


def _added(capture: Capture, call: BoundCall, growth: int) -> list[TensorLeaf | None]:
    """Return the leaves that the exporter adds to a call, with sizes that may grow as the call's own do."""
    leaves = capture.signature.traced(call).leaves
    return [
        TensorLeaf(leaf.dtype, tuple(leaf.shape), tuple((0, size * growth) for size in leaf.shape))
        if index is None and isinstance(leaf, torch.Tensor)
        else None
        for index, leaf in zip(capture.order, leaves, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of one call.

    Attributes:
        longest: its longest length.
        batch: its largest batch.
        new: the number of new tokens.
        states: leaves that hold past tokens.
        encoded: leaves with results of an encoder, whose positions need not be tokens.
    """

    longest: int
    batch: int
    new: int
    states: frozenset[int]
    encoded: frozenset[int]


def _sizes(capture: Capture, call: BoundCall) -> _Sizes:
    leaves = enumerate(zip(call.leaves, capture.roles, strict=True))
    counters = {
        index for index, (leaf, roles) in leaves if isinstance(leaf, int) and LENGTH in roles.values()
    }
    states = frozenset(capture.states.values()) | counters
    encoded = _encoded(capture, call)
    largest = {BATCH: 1, LENGTH: 1, SIZE: 1}
    past, new = 0, 1
    for index, (leaf, roles) in enumerate(zip(call.leaves, capture.roles, strict=True)):
        for axis, role in roles.items():
            size = _size(leaf, axis)
            if role == LENGTH and index in encoded:
                continue
            largest[role] = max(largest[role], size)
            if role == LENGTH and (index in states or isinstance(leaf, int)):
                past = max(past, size)
        if capture.signature.names[index] in _NEW and not isinstance(leaf, int):
            new = int(leaf.shape[1])
    longest = max(largest[LENGTH], past + new if past else new)
    return _Sizes(longest, largest[BATCH], new, states, encoded)


def _encoded(capture: Capture, call: BoundCall) -> frozenset[int]:
    """Return the leaves of an encoder: its results, their mask, and cache tensors of the same length."""
    names = capture.signature.names
    results = [i for i, name in enumerate(names) if name.startswith(_ENCODED) and capture.roles[i]]
    lengths = {_size(call.leaves[i], axis) for i in results for axis in _length_axes(capture, i)}
    states = [
        index
        for index in capture.states.values()
        if any(_size(call.leaves[index], axis) in lengths for axis in _length_axes(capture, index))
    ]
    masks = [names.index(_ENCODER_MASK)] if results and _ENCODER_MASK in names else []
    return frozenset((*results, *masks, *states))


def _length_axes(capture: Capture, index: int) -> list[int]:
    return [axis for axis, role in capture.roles[index].items() if role == LENGTH]


_ENCODED = ("encoder_outputs", "encoder_hidden_states")
_ENCODER_MASK = "attention_mask"  # in a call with encoder results; Whisper's counts audio frames
_NEW = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")


def _size(leaf: Any, axis: int) -> int:
    """Return the size of a tensor along an axis, or the value of a counter."""
    return leaf if isinstance(leaf, int) else int(leaf.shape[axis])


def _with_limits(leaf: object, limits: Mapping[int, int]) -> object:
    """Return a signature's leaf with its ranges cut at the limits; ``limits`` is axis -> limit."""
    if isinstance(leaf, CounterLeaf):
        return replace(leaf, high=max(leaf.low, min(leaf.high, limits[0]))) if limits else leaf
    if not isinstance(leaf, TensorLeaf):
        return leaf
    ranges = list(leaf.ranges)
    for axis, limit in limits.items():
        bounds = ranges[axis] if axis < len(ranges) else None
        if bounds is not None:
            high = limit if bounds[1] >= UNBOUNDED else min(bounds[1], limit)
            ranges[axis] = (bounds[0], max(bounds[0], high))
    return replace(leaf, ranges=tuple(ranges))
