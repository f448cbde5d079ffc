"""Masks of transformers in a trace, so that the graph computes as eager mode.

Without padding, ``create_causal_mask`` returns no mask and relies on causal attention. Attention that is not
causal (PaliGemma's, the text tower of aimv2) then sees every token. In a trace the values of the padding are
unknown, the mask is always made, and the same attention becomes causal: a wrong result without an error. Here
such attention gets a mask that gives eager mode's result in both cases::

    eager     mask = None if all(padding) else causal & padding
    trace     mask = causal & padding
    here      mask = causal & padding | all(padding)

If there is certainly no padding, because the call has no mask and the model computes the positions itself,
there is no mask in the trace, either: attention without a mask has faster kernels, and needs no quadratic
memory.

A model that defines itself which tokens attend to each other (Gemma3: those of one image) makes its mask by
``torch.vmap`` over a function of four indices. A trace enters and leaves ``vmap`` by calls that no plan can
keep. Here the indices are tensors that broadcast, as in transformers' own exporters::

    eager     vmap(... vmap(sees, (None, None, None, 0)) ...)(batch, heads, queries, keys)
    here      sees(batch[:, None, None, None], ..., keys[None, None, None, :])

Both are equal if ``sees`` is elementwise and indexes only single elements, which its traced nodes show. For
any other function the mask is made as in eager mode, and the trace is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphplan._compat.torch import storage_of
from graphplan._compat.traced_tensors import node_of
from graphplan._compat.transformers import functions_of_masks, local_entries
from graphplan.capture.thread_patches import Patch, patched

aten = torch.ops.aten

_KEEPING = (aten.add.Tensor, aten.expand.default, aten.unsqueeze.default)
"""Operations that keep positions consecutive, if their other arguments are numbers."""

_ELEMENTWISE = {aten.__and__, aten.__or__, aten.__xor__, aten.to}
"""Elementwise operations without the tag ``pointwise``: torch tags no composite operations."""

_CONSTANT_MAKERS = {aten.new_zeros, aten.new_ones, aten.new_full}
"""Operations whose results do not depend on input values; 0-dim results do not depend on sizes either."""


@dataclass(frozen=True, slots=True)
class _MaskInputs:
    """The values by which eager mode decides whether to skip a mask.

    Attributes:
        padding: the padding mask of transformers, or None.
        q_length: the number of queries.
        kv_length: the number of keys.
        q_offset: the position of the first query.
        kv_offset: the position of the first key.
        window: the window of a sliding layer.
        packed: the index of each token's packed sequence; None if the decision does not use it.
    """

    padding: torch.Tensor | None
    q_length: Any
    kv_length: Any
    q_offset: Any
    kv_offset: Any
    window: Any = None
    packed: torch.Tensor | None = None

    def is_skipped(self) -> Any:
        """Return whether eager mode skips the mask: True, False, or a 0-dim bool tensor."""
        if self.window is not None and self.kv_length >= self.window:
            return False
        if self.q_length == 1 or self.kv_length == self.q_length:
            padding = self._padding()
            unpadded = True if padding is None else padding.all()
            return _logical_and(unpadded, None if self.packed is None else (self.packed[:, -1] == 0).all())
        starts = self.q_offset == 0  # a tensor for a static cache
        if starts is False or self.packed is not None:
            return False
        padding = self._padding()
        if padding is None:
            return starts
        ends = _logical_and(padding[:, : self.q_length].all(), (~padding[:, self.q_length :]).all())
        return _logical_and(ends, starts if isinstance(starts, torch.Tensor) else None)

    @property
    def is_needless(self) -> bool:
        """Whether eager mode skips the mask for all sizes and values."""
        if self.padding is not None or self.packed is not None or isinstance(self.q_offset, torch.Tensor):
            return False
        if self.window is not None and not statically_known_true(self.kv_length < self.window):
            return False
        return statically_known_true(self.kv_length == self.q_length)

    def _padding(self) -> torch.Tensor | None:
        if self.padding is None or self.padding.shape[-1] <= self.kv_length:
            return self.padding
        return self.padding[:, torch.arange(self.kv_length, device=self.padding.device) + self.kv_offset]


def _logical_and(a: Any, b: torch.Tensor | None) -> Any:
    if b is None:
        return a
    return b if a is True else a & b


@dataclass
class _Masks:
    """The masks of a trace by their storage, since a layer may get a view of one."""

    by_storage: dict[int, tuple[torch.Tensor, _MaskInputs]] = field(default_factory=dict)
    requests: list[_MaskInputs] = field(default_factory=list)

    def record(self, mask: Any, inputs: _MaskInputs | None) -> None:
        """Record the values by which eager mode may skip this mask."""
        if isinstance(mask, torch.Tensor) and inputs is not None:
            self.by_storage[storage_of(mask)] = mask, inputs

    def for_any_token(self, mask: Any) -> Any:
        """Return the mask that gives eager mode's result in attention that is not causal."""
        entry = self.by_storage.get(storage_of(mask)) if isinstance(mask, torch.Tensor) else None
        if entry is None or mask.dtype != torch.bool:
            return mask
        skipped = entry[1].is_skipped()
        if isinstance(skipped, torch.Tensor):
            return mask | skipped
        return None if skipped else mask


@contextmanager
def masks_as_in_eager() -> Iterator[None]:
    """Context manager that gives a trace of a transformers model the masks of eager mode."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # optional package
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # optional package

    masks = _Masks()
    causal, bidirectional, packed, separated, combined, expansion, indexing = functions_of_masks()
    looked_up = getattr(*indexing)  # makes tensor[index] an operation that vmap supports
    with patched(
        (*causal, lambda original: _recording_request(original, masks)),
        (*bidirectional, _skipping_bidirectional),
        (*packed, _unless_consecutive),
        (*separated, _marking_packed),
        (*combined, _combining),
        (*expansion, lambda original: _broadcasting(original, looked_up)),
        (*indexing, lambda _: nullcontext),
        _entry(ALL_MASK_ATTENTION_FUNCTIONS, lambda original: _recording_masks(original, masks)),
        _entry(ALL_ATTENTION_FUNCTIONS, lambda original: _with_eager_masks(original, masks)),
    ):
        yield


def _entry(table: Any, factory: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """Return a patch of the entry for torch's attention in a transformers table."""
    original = table["sdpa"]
    return Patch(local_entries(table), "sdpa", original, factory(original))


def _recording_request(original: Callable[..., bool], masks: _Masks) -> Callable[..., bool]:
    def ignore(padding_mask: Any, *sizes: Any, **named: Any) -> bool:
        inputs = _MaskInputs(padding_mask, *sizes, **named)
        masks.requests.append(inputs)
        return inputs.is_needless or original(padding_mask, *sizes, **named)

    return ignore


def _skipping_bidirectional(original: Callable[..., bool]) -> Callable[..., bool]:
    def ignore(padding_mask: Any, kv_length: Any, window: Any = None) -> bool:
        is_full = window is None or statically_known_true(kv_length < window)
        return (padding_mask is None and is_full) or original(padding_mask, kv_length, window)

    return ignore


def _unless_consecutive(original: Callable[..., Any]) -> Callable[..., Any]:
    def texts(position_ids: torch.Tensor) -> Any:
        return None if _is_consecutive(position_ids) else original(position_ids)

    return texts


def _is_consecutive(positions: torch.Tensor) -> bool:
    """Whether the trace shows that positions are consecutive, that is made by ``torch.arange``."""
    mode = get_proxy_mode()
    node = None if mode is None else node_of(positions, mode.tracer)
    while node is not None and node.target in _KEEPING:
        source, *others = node.args
        values = [one.meta.get("val") for one in others if isinstance(one, fx.Node)]
        only_numbers = not any(isinstance(value, torch.Tensor) for value in values)
        node = source if isinstance(source, fx.Node) and only_numbers else None
    return node is not None and node.target in (aten.arange.default, aten.arange.start)


def _marking_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the mask function of packed sequences: a trace treats every unpadded text as packed."""

    def function(packed: torch.Tensor) -> Any:
        sees = original(packed)
        sees.packed = packed
        return sees

    return function


def _combining(original: Callable[..., Any]) -> Callable[..., Any]:
    def join(*functions: Any) -> Any:
        sees = original(*functions)
        for function in functions:
            if hasattr(function, "packed"):
                sees.packed = function.packed
        return sees

    return join


def _recording_masks(original: Callable[..., Any], masks: _Masks) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        masks.requests.clear()
        result = original(*args, **kwargs)
        packed = getattr(kwargs.get("mask_function"), "packed", None)
        if packed is not None:
            q_length, kv_length = kwargs["q_length"], kwargs["kv_length"]
            offsets = kwargs["q_offset"], kwargs["kv_offset"]
            window = kwargs.get("local_size")
            masks.record(result, _MaskInputs(None, q_length, kv_length, *offsets, window, packed))
        elif masks.requests:
            masks.record(result, masks.requests[-1])
        return result

    return mask


def _with_eager_masks(original: Callable[..., Any], masks: _Masks) -> Callable[..., Any]:
    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # a causal module passes is_causal=False where it has a mask, which eager mode would skip
        causal = kwargs.get("is_causal") or getattr(module, "is_causal", kwargs.get("is_causal") is None)
        if not causal and query.shape[2] != 1:
            attention_mask = masks.for_any_token(attention_mask)
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def _broadcasting(original: Callable[..., Any], looked_up: Callable[[], Any]) -> Callable[..., Any]:
    """Replace ``vmap``, which needs the mode ``looked_up``, by broadcasting where both are equal."""

    def expansion(sees: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def mask(*positions: torch.Tensor) -> torch.Tensor:
            result = _broadcast(sees, positions)
            if result is None:
                with looked_up():
                    return original(sees)(*positions)  # type: ignore[no-any-return]
            return result

        return mask

    return expansion


def _broadcast(sees: Callable[..., torch.Tensor], positions: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Return the mask; None if broadcasting may make another one, or outside a trace."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    axes = range(len(positions))
    indices = [
        position[tuple(slice(None) if i == axis else None for i in axes)]
        for axis, position in enumerate(positions)
    ]
    last = next(iter(reversed(mode.tracer.graph.nodes)))
    result = sees(*indices)
    derived = {node_of(position, mode.tracer) for position in indices}
    if not _is_elementwise(_nodes_after(last), derived) or (
        result.ndim and node_of(result, mode.tracer) not in derived
    ):
        return None
    return result.expand(*(position.shape[0] for position in positions))


def _nodes_after(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _is_elementwise(nodes: Iterable[fx.Node], positions: set[fx.Node | None]) -> bool:
    """Whether each result computed from ``positions`` uses one element of each; add the results to them."""
    for node in nodes:
        value, others = node.meta.get("val"), [one for one in node.all_input_nodes if one not in positions]
        if len(others) == len(node.all_input_nodes) or not isinstance(value, torch.Tensor):
            continue  # does not depend on positions, or is a size
        operation = getattr(node.target, "overloadpacket", None)
        if operation in _CONSTANT_MAKERS and not value.ndim:
            continue
        sizes = [getattr(one.meta.get("val"), "ndim", 0) for one in others]
        if operation is aten.index:
            fits = sizes == [len(node.args[1])] and None not in node.args[1]  # type: ignore[arg-type, operator]
        else:
            pointwise = operation in _ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
            fits = pointwise and not any(sizes)
        if not fits:
            return False
        positions.add(node)
    return True
