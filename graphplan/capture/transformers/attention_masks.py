"""Masks that transformers leaves out in eager and keeps in a trace: the graph does what eager does.

``create_causal_mask`` makes no mask where no token is padded, and lets attention be causal by itself.
Attention that is not (PaliGemma's, the text tower of aimv2) then sees every token. In a trace the values of
the padding are not known, the mask is always made, and the same attention is causal: another result, and no
error. Here such attention is given the mask that has eager's result in both cases::

    eager     mask = None if all(padding) else causal & padding
    trace     mask = causal & padding
    here      mask = causal & padding | all(padding)

Where there is no padding for certain, since the call has no mask and the model makes the positions itself,
there is no mask here either: attention that is causal by itself, or that sees every token, has faster
kernels, and no square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from graphplan.capture.transformers.mapped_masks import broadcasting

aten = torch.ops.aten

_KEEPING = (aten.add.Tensor, aten.expand.default, aten.unsqueeze.default)
"""Operations after which positions still follow one another, if what is added is a number."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What eager looks at before it leaves a mask out.

    Attributes:
        padding: which tokens are none, as transformers has it; None where none is.
        q_length: tokens that ask.
        kv_length: tokens that are asked.
        q_offset: where the first of those that ask is.
        kv_offset: where the first that is asked is.
        window: of a sliding layer.
        packed: to which of several texts in a row each token belongs; None where that is not looked at.
    """

    padding: torch.Tensor | None
    q_length: Any
    kv_length: Any
    q_offset: Any
    kv_offset: Any
    window: Any = None
    packed: torch.Tensor | None = None

    def answer(self) -> Any:
        """Whether eager leaves the mask out: True, False, or a tensor of one truth value."""
        if self.window is not None and self.kv_length >= self.window:
            return False
        if self.q_length == 1 or self.kv_length == self.q_length:
            padding = self._padding()
            unpadded = True if padding is None else padding.all()
            return _both(unpadded, None if self.packed is None else (self.packed[:, -1] == 0).all())
        starts = self.q_offset == 0  # of a static cache a tensor
        if starts is False or self.packed is not None:
            return False
        padding = self._padding()
        if padding is None:
            return starts
        ends = _both(padding[:, : self.q_length].all(), (~padding[:, self.q_length :]).all())
        return _both(ends, starts if isinstance(starts, torch.Tensor) else None)

    @property
    def is_needless(self) -> bool:
        """Whether eager leaves the mask out for certain, whatever the sizes and values are."""
        if self.padding is not None or self.packed is not None or isinstance(self.q_offset, torch.Tensor):
            return False
        if self.window is not None and not statically_known_true(self.kv_length < self.window):
            return False
        return statically_known_true(self.kv_length == self.q_length)

    def _padding(self) -> torch.Tensor | None:
        if self.padding is None or self.padding.shape[-1] <= self.kv_length:
            return self.padding
        return self.padding[:, torch.arange(self.kv_length, device=self.padding.device) + self.kv_offset]


def _both(a: Any, b: torch.Tensor | None) -> Any:
    if b is None:
        return a
    return b if a is True else a & b


@dataclass
class _Masks:
    """The masks of a trace, by their memory: a layer may be given a view of one."""

    made: dict[int, tuple[torch.Tensor, _Question]] = field(default_factory=dict)
    asked: list[_Question] = field(default_factory=list)

    def note(self, mask: Any, question: _Question | None) -> None:
        """Remember that eager may leave this one out."""
        if isinstance(mask, torch.Tensor) and question is not None:
            self.made[storage_of(mask)] = mask, question

    def for_any_token(self, mask: Any) -> Any:
        """The mask that has eager's result where attention is not causal."""
        known = self.made.get(storage_of(mask)) if isinstance(mask, torch.Tensor) else None
        if known is None or mask.dtype != torch.bool:
            return mask
        ignored = known[1].answer()
        if isinstance(ignored, torch.Tensor):
            return mask | ignored
        return None if ignored else mask


@contextmanager
def masks_as_in_eager() -> Iterator[None]:
    """Inside, a trace of a transformers model has the masks that eager has."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # optional package
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # optional package

    masks = _Masks()
    ignored, both_ways, found, packed, joined, expansion, indexing = functions_of_masks()
    looked_up = getattr(*indexing)  # as operations that vmap knows: tensor[number] asks for the number
    with patched(
        (*ignored, lambda own: _asking(own, masks)),
        (*both_ways, _asking_both_ways),
        (*found, _finding),
        (*packed, _keeping_apart),
        (*joined, _joining),
        (*expansion, lambda own: broadcasting(own, looked_up)),
        (*indexing, lambda _: nullcontext),
        _entry(ALL_MASK_ATTENTION_FUNCTIONS, lambda own: _making(own, masks)),
        _entry(ALL_ATTENTION_FUNCTIONS, lambda own: _attending(own, masks)),
    ):
        yield


def _entry(table: Any, factory: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """A patch of torch's attention in a table of transformers."""
    own = table["sdpa"]
    return Patch(local_entries(table), "sdpa", own, factory(own))


def _asking(own: Callable[..., bool], masks: _Masks) -> Callable[..., bool]:
    def ignore(padding_mask: Any, *sizes: Any, **named: Any) -> bool:
        question = _Question(padding_mask, *sizes, **named)
        masks.asked.append(question)
        return question.is_needless or own(padding_mask, *sizes, **named)

    return ignore


def _asking_both_ways(own: Callable[..., bool]) -> Callable[..., bool]:
    def ignore(padding_mask: Any, kv_length: Any, window: Any = None) -> bool:
        near = window is None or statically_known_true(kv_length < window)
        return (padding_mask is None and near) or own(padding_mask, kv_length, window)

    return ignore


def _finding(own: Callable[..., Any]) -> Callable[..., Any]:
    def texts(position_ids: torch.Tensor) -> Any:
        return None if _counts_on(position_ids) else own(position_ids)

    return texts


def _counts_on(positions: torch.Tensor) -> bool:
    """Whether each is the one after the last, as the trace shows: ``torch.arange`` has made them."""
    mode = get_proxy_mode()
    node = None if mode is None else node_of(positions, mode.tracer)
    while node is not None and node.target in _KEEPING:
        source, *others = node.args
        values = [one.meta.get("val") for one in others if isinstance(one, fx.Node)]
        alone = not any(isinstance(value, torch.Tensor) for value in values)
        node = source if isinstance(source, fx.Node) and alone else None
    return node is not None and node.target in (aten.arange.default, aten.arange.start)


def _keeping_apart(own: Callable[..., Any]) -> Callable[..., Any]:
    """In a trace every text that has positions, and no padding, is taken for several in a row."""

    def function(packed: torch.Tensor) -> Any:
        made = own(packed)
        made.packed = packed
        return made

    return function


def _joining(own: Callable[..., Any]) -> Callable[..., Any]:
    def join(*functions: Any) -> Any:
        made = own(*functions)
        for function in functions:
            if hasattr(function, "packed"):
                made.packed = function.packed
        return made

    return join


def _making(own: Callable[..., Any], masks: _Masks) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        masks.asked.clear()
        made = own(*args, **kwargs)
        packed = getattr(kwargs.get("mask_function"), "packed", None)
        if packed is not None:
            q_length, kv_length = kwargs["q_length"], kwargs["kv_length"]
            offsets = kwargs["q_offset"], kwargs["kv_offset"]
            window = kwargs.get("local_size")
            masks.note(made, _Question(None, q_length, kv_length, *offsets, window, packed))
        elif masks.asked:
            masks.note(made, masks.asked[-1])
        return made

    return mask


def _attending(own: Callable[..., Any], masks: _Masks) -> Callable[..., Any]:
    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        # a module that is causal says that it is not where it has a mask, which eager would leave out
        causal = kwargs.get("is_causal") or getattr(module, "is_causal", kwargs.get("is_causal") is None)
        if not causal and query.shape[2] != 1:
            attention_mask = masks.for_any_token(attention_mask)
        return own(module, query, key, value, attention_mask, *args, **kwargs)

    return attention
