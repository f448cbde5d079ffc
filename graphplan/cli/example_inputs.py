"""Example inputs of a transformers model, made of its configuration, without data.

Text takes ``(batch, length)`` token ids; images, spectrograms and sound the sizes that the configuration
says.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from graphplan.errors import InputError

_TOKENS = 512  # where the caller gives no length, or fewer where the model takes fewer
_SAMPLES = 16000  # of sound: a second, as most models are trained
_SIDE = 224  # of an image whose configuration does not say

Inputs = dict[str, torch.Tensor]


def example_inputs(model: Any, batch: int, length: int | None) -> Inputs:
    """Named inputs on the meta device, of the model's dtype where they are no token ids.

    Args:
        model: a ``PreTrainedModel``.
        batch: sequences, images or recordings.
        length: tokens of a text or samples of a recording; None for 512 tokens, or as many as the model
            takes if these are fewer, and for 16,000 samples.
    """
    config, main = model.config, model.main_input_name
    taken = inspect.signature(model.forward).parameters
    towers = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")
    makers = {
        "input_ids": lambda: _tokens(config, batch, length),
        "pixel_values": lambda: _image(config, batch, model.dtype),
        "input_values": lambda: _sound(config, batch, length, model.dtype),
        "input_features": lambda: _spectrogram(config, batch, model.dtype),
    }
    if main not in makers:
        raise InputError(
            f"{type(model).__name__} takes {main!r}, for which graphplan has no example input: write a "
            "factory that returns (model, inputs) and give it as package.module:factory"
        )
    names = ["input_ids", "pixel_values"] if towers else [main]
    made = {name: makers[name]() for name in names if name in taken}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in taken:
        made["decoder_input_ids"] = _tokens(config, batch, length, "max_target_positions")
    return made


def _tokens(config: Any, batch: int, length: int | None, limit: str = "") -> torch.Tensor:
    text = config.get_text_config()
    limits = (getattr(text, name, None) for name in (limit, "max_position_embeddings", "n_positions") if name)
    most = next((found for found in limits if isinstance(found, int) and found > 0), _TOKENS)
    return torch.zeros(batch, length or min(most, _TOKENS), dtype=torch.long, device="meta")


def _image(config: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or _SIDE
    if isinstance(size, dict):
        size = (size.get("height", _SIDE), size.get("width", _SIDE))
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(vision, "num_channels", 3)
    return torch.zeros(batch, channels, height, width, dtype=dtype, device="meta")


def _sound(config: Any, batch: int, length: int | None, dtype: torch.dtype) -> torch.Tensor:
    shape: tuple[int, ...] = (batch, length or _SAMPLES)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram by another name
        shape = (batch, config.max_length, config.num_mel_bins)
    return torch.zeros(shape, dtype=dtype, device="meta")


def _spectrogram(config: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    if not (hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")):
        raise InputError(
            f"{type(config).__name__} does not say how long its input_features are: write a factory that "
            "returns (model, inputs) and give it as package.module:factory"
        )
    frames = 2 * config.max_source_positions  # a convolution halves them first
    return torch.zeros(batch, config.num_mel_bins, frames, dtype=dtype, device="meta")
