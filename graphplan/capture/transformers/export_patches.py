"""Corrections of the replacement code of transformers' exporters, so that it computes the same as the model.

Vision encoders attend within each image: they split the tokens in a data-dependent loop. The exporters' trace
replacement code, which assumes that all images have one size, and omits the norms of queries and keys that
one layer projects together. Both give wrong results without an error. Here a mask separates images of several
sizes, and the norms are computed::

    eager      cat([attend(image) for image in split(tokens)])
    exporter   attend(tokens.unflatten(0, (images, -1)))
    here       the same if the images of the example have one size, which is checked at each call; else
               attend(tokens, mask=same_image)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphplan._compat.transformers import vision_stand_in
from graphplan.capture.thread_patches import patched
from graphplan.errors import CaptureError


def segment_bounds(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the arguments with segment bounds, if the exporter has computed any."""
    return tuple(
        name
        for name, value in inputs.items()
        if name.startswith("cu_") and name.endswith("seqlens") and isinstance(value, torch.Tensor)
    )


def have_equal_lengths(bounds: torch.Tensor) -> bool:
    """Whether all segments have one length."""
    lengths = bounds.diff()
    return not lengths.numel() or bool((lengths == lengths[0]).all())


@contextmanager
def segments_as_in_eager(*, uniform: bool) -> Iterator[None]:
    """Context manager that corrects the exporters' attention of vision encoders.

    ``uniform`` says whether all segments of a call have one length.
    """
    exporter, name = vision_stand_in()
    original = getattr(exporter, name)

    def forward(module: Any, hidden_states: Any, cu_seqlens: Any, *args: Any, **kwargs: Any) -> Any:
        with _with_norms(module):
            if uniform or (isinstance(cu_seqlens.shape[0], int) and cu_seqlens.shape[0] == 2):
                return original(module, hidden_states, cu_seqlens, *args, **kwargs)
            with _separated(cu_seqlens, hidden_states.shape[-2]):
                return original(module, hidden_states, cu_seqlens[[0, -1]], *args, **kwargs)

    with patched((exporter, name, lambda _: forward)):
        yield


@contextmanager
def _separated(bounds: torch.Tensor, length: int) -> Iterator[None]:
    """Context manager that masks attention between segments."""
    position = torch.arange(length, device=bounds.device)
    segment = (position[:, None] >= bounds[None, 1:]).sum(-1)
    mask = segment[:, None] == segment[None, :]
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Any:
        return original(*args, attn_mask=mask, **kwargs)

    with patched((functional, "scaled_dot_product_attention", lambda _: attention)):
        yield


@contextmanager
def _with_norms(module: Any) -> Iterator[None]:
    """Context manager that applies the norms of queries and keys that one layer projects together."""
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in ("qkv", "q_norm", "k_norm")):
        yield
        return

    def norm(_projection: nn.Module, _inputs: Any, projected: torch.Tensor) -> torch.Tensor:
        query, key, value = projected.unflatten(-1, (3, module.num_heads, -1)).unbind(-3)
        parts = (module.q_norm(query), module.k_norm(key), value)
        return torch.stack(parts, -3).flatten(-3)

    hook = module.qkv.register_forward_hook(norm)
    try:
        yield
    finally:
        hook.remove()


Forwards = Mapping[type[nn.Module], Callable[..., Any]]


def forwards_of(module: nn.Module) -> Forwards:
    """Return the ``forward`` of each module class of a model."""
    return {type(part): type(part).forward for part in module.modules()}


def require_all_weights_read(module: nn.Module, original: Forwards, traced: Forwards, read: set[str]) -> None:
    """Raise CaptureError if replacement code does not read all weights of the module that it replaces.

    ``original`` and ``traced`` are the model's own and the traced ``forward`` functions; ``read`` has the
    names of the weights that the trace reads, one name each.
    """
    tensors = _named(module)
    read_ids = {id(tensors[name]) for name in read if name in tensors}
    for path, part in module.named_modules():
        if original[type(part)] is traced[type(part)]:
            continue
        missing = [name for name, tensor in _named(part).items() if id(tensor) not in read_ids]
        if missing and len(missing) < len(_named(part)):  # if all are missing, it was not called
            raise CaptureError(
                f"the code that transformers.exporters traces for {path!r} ({type(part).__name__}) does not "
                f"read its {missing[0]!r}"
            )


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
