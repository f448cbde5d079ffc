"""Example inputs of a transformers model, made from its configuration, without data.

Text inputs are (batch, length) token ids; images, spectrograms and audio have the sizes of the configuration.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from graphplan.errors import InputError

_TOKENS = 512  # default length, or less if the model accepts less
_SAMPLES = 16000  # audio samples: a second at the usual rate
_SIDE = 224  # pixels of an image side, if the configuration has no size

Inputs = dict[str, torch.Tensor]


def example_inputs(model: Any, batch: int, length: int | None) -> Inputs:
    """Return name -> input on the meta device, in the model's dtype except for token ids.

    Args:
        model: a ``PreTrainedModel``.
        batch: number of sequences, images or recordings.
        length: number of tokens or audio samples; None for 512 tokens, or fewer if the model accepts fewer,
            and for 16,000 samples.

    Raises:
        InputError: graphplan has no example for the model's main input.
    """
    config, main_name = model.config, model.main_input_name
    parameters = inspect.signature(model.forward).parameters
    has_towers = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")
    makers = {
        "input_ids": lambda: _tokens(config, batch, length),
        "pixel_values": lambda: _image(config, batch, model.dtype),
        "input_values": lambda: _audio(config, batch, length, model.dtype),
        "input_features": lambda: _spectrogram(config, batch, model.dtype),
    }
    if main_name not in makers:
        raise InputError(
            f"{type(model).__name__} takes {main_name!r}, for which graphplan has no example input: write a "
            "factory that returns (model, inputs) and give it as package.module:factory"
        )
    names = ["input_ids", "pixel_values"] if has_towers else [main_name]
    inputs = {name: makers[name]() for name in names if name in parameters}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _tokens(config, batch, length, "max_target_positions")
    return inputs


def _tokens(config: Any, batch: int, length: int | None, limit: str = "") -> torch.Tensor:
    text = config.get_text_config()
    limits = (getattr(text, name, None) for name in (limit, "max_position_embeddings", "n_positions") if name)
    most = next((value for value in limits if isinstance(value, int) and value > 0), _TOKENS)
    return torch.zeros(batch, length or min(most, _TOKENS), dtype=torch.long, device="meta")


def _image(config: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or _SIDE
    if isinstance(size, dict):
        size = (size.get("height", _SIDE), size.get("width", _SIDE))
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(vision, "num_channels", 3)
    return torch.zeros(batch, channels, height, width, dtype=dtype, device="meta")


def _audio(config: Any, batch: int, length: int | None, dtype: torch.dtype) -> torch.Tensor:
    shape: tuple[int, ...] = (batch, length or _SAMPLES)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # in fact a spectrogram
        shape = (batch, config.max_length, config.num_mel_bins)
    return torch.zeros(shape, dtype=dtype, device="meta")


def _spectrogram(config: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    if not (hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")):
        raise InputError(
            f"{type(config).__name__} does not say how long its input_features are: write a factory that "
            "returns (model, inputs) and give it as package.module:factory"
        )
    frames = 2 * config.max_source_positions  # a first convolution halves their number
    return torch.zeros(batch, config.num_mel_bins, frames, dtype=dtype, device="meta")
