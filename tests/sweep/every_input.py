"""Inputs for any transformers model, made from the arguments of its ``forward``: for the sweep."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["inputs_of"]

BATCH, TOKENS = 2, 9


def inputs_of(model: PreTrainedModel, config: Any) -> Iterator[dict[str, Any]]:
    """Named arguments that the model may run with, the most telling first."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    torch.manual_seed(2)
    for base in (*_seen(model, parameters, config), *_mains(main, parameters, config)):
        yield from _completed(base, parameters, config)
    dummies = getattr(model, "dummy_inputs", None)
    if isinstance(dummies, Mapping) and dummies:
        yield dict(dummies)


def _seen(model: PreTrainedModel, parameters: Mapping[str, Any], config: Any) -> Iterator[dict[str, Any]]:
    """Text with an image among it, for as many tokens as the model makes of one."""
    token = _config_int(config, ("image_token_id", "image_token_index"))
    features_of = getattr(model, "get_image_features", None)
    if token is None or features_of is None or "input_ids" not in parameters:
        return
    for pixels in (*_patches(parameters, config), *({"pixel_values": one} for one in _images(config, 2))):
        try:
            with torch.no_grad():
                found = features_of(**pixels)
        except Exception:  # models run code of their own
            continue
        found = getattr(found, "pooler_output", None) if isinstance(found, dict) else found
        rows = sum(t.numel() // t.shape[-1] for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor))
        if not rows or rows % BATCH or rows > 1200:
            continue
        ids = torch.cat([_ids(config, 3), torch.full((BATCH, rows // BATCH), token), _ids(config, 4)], 1)
        more = {"mm_token_type_ids": (ids == token).int()} if "mm_token_type_ids" in parameters else {}
        mask = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in parameters else {}
        yield {"input_ids": ids, **mask, **more, **pixels}


def _patches(parameters: Mapping[str, Any], config: Any) -> Iterator[dict[str, Any]]:
    """Images as rows of patches, and how many there are along each side."""
    patch = _config_int(config, ("patch_size", "spatial_patch_size"))
    if patch is None or not {"image_grid_thw", "grid_thw"} & set(parameters):
        return
    channels = _config_int(config, ("in_channels", "in_chans", "num_channels")) or 3
    depth = _config_int(config, ("temporal_patch_size",)) or 1
    for side in (4, 8):
        grid = torch.tensor([[1, side, side]] * BATCH)
        rows = torch.randn(BATCH * side * side, channels * depth * patch * patch)
        if "grid_thw" in parameters:
            name = "hidden_states" if "hidden_states" in parameters else "pixel_values"
            yield {name: rows, "grid_thw": grid}
        else:
            yield {"pixel_values": rows, "image_grid_thw": grid}


def _mains(main: str, parameters: Mapping[str, Any], config: Any) -> Iterator[dict[str, Any]]:
    if "grid_thw" in parameters:
        yield from _patches(parameters, config)
    if "pixel_values" in parameters and "input_ids" in parameters:
        for pixels in _images(config, 2):
            yield {"input_ids": _ids(config), "pixel_values": pixels}
    if "input_features" in parameters and "input_ids" in parameters and main == "input_ids":
        for features in _features(config):
            yield {"input_ids": _ids(config), "input_features": features}
    if main == "input_ids" or "input_ids" in parameters:
        yield {"input_ids": _ids(config)}
    if "pixel_values" in parameters:
        for pixels in _images(config, 6):
            yield {"pixel_values": pixels}
    if "pixel_values_videos" in parameters:
        side = _side(config)
        frames = _config_int(config, ("frames_per_clip", "num_frames")) or 4
        yield {"pixel_values_videos": torch.randn(BATCH, frames, 3, side, side)}
    if "input_values" in parameters:
        for values in _sounds(config):
            yield {"input_values": values}
    if "input_features" in parameters:
        for features in _features(config):
            yield {"input_features": features}
    if "latents" in parameters:
        yield {"latents": torch.randn(BATCH, _config_int(config, ("hidden_size",)) or 32, 8)}
    if "query_embeds" in parameters:
        width = _config_int(config, ("hidden_size",)) or 32
        seen = _config_int(config, ("encoder_hidden_size",)) or width
        yield {
            "query_embeds": torch.randn(BATCH, 8, width),
            "encoder_hidden_states": torch.randn(BATCH, 6, seen),
        }
    if "past_values" in parameters:
        yield from _series(config)


def _completed(base: dict[str, Any], parameters: Mapping[str, Any], config: Any) -> Iterator[dict[str, Any]]:
    """With what else the arguments ask for."""
    named: dict[str, Any] = {}
    if "decoder_input_ids" in parameters:
        named["decoder_input_ids"] = _ids(config, 5)
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in base:
            made = _required(name, config)
            if made is not None:
                named.setdefault(name, made)
    if "bbox" in parameters:
        named["bbox"] = torch.randint(0, 100, (BATCH, TOKENS, 1)).repeat(1, 1, 4)
    if "input_ids" in base and "attention_mask" in parameters and set(base) == {"input_ids"}:
        mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
        mask[1, 6:] = 0
        yield {**base, "attention_mask": mask, **named}
    yield {**base, **named}
    if named:
        yield base


def _required(name: str, config: Any) -> Any:
    if name.endswith("input_ids") or name in ("text_input_ids", "cond_input_ids"):
        return _ids(config)
    if name in ("bbox",):
        return None
    if name == "inputs_embeds":
        return torch.randn(BATCH, TOKENS, _config_int(config, ("hidden_size", "d_model")) or 32)
    if name.endswith("attention_mask") or name == "mask":
        return torch.ones(BATCH, TOKENS, dtype=torch.long)
    if name == "cu_seqlens":
        return None
    if name.endswith("pixel_values"):
        return next(_images(config, 1))
    return None


def _ids(config: Any, length: int = TOKENS) -> torch.Tensor:
    vocabulary = _config_int(config, ("vocab_size", "text_vocab_size")) or 100
    return torch.randint(3, max(4, min(95, vocabulary - 1)), (BATCH, length))


def _config_int(config: Any, wanted: tuple[str, ...]) -> int | None:
    for one in _configs(config):
        for name in wanted:
            value = getattr(one, name, None)
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                return int(value[0])
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configs(value)


def _side(config: Any) -> int:
    return _config_int(config, ("image_size", "img_size", "input_size", "crop_size")) or 64


def _images(config: Any, most: int) -> Iterator[torch.Tensor]:
    channels = _config_int(config, ("num_channels", "in_channels", "in_chans", "input_channels")) or 3
    frames = _config_int(config, ("num_frames", "frames_per_clip", "num_image_frames"))
    sides = list(dict.fromkeys((_side(config), 64, 128, 224)))
    made = []
    for side in sides:
        if frames:
            made.append((BATCH, frames, channels, side, side))
        made.append((BATCH, channels, side, side))
    made.append((BATCH, 2, channels, sides[0], sides[0]))  # pairs
    for shape in made[:most]:
        yield torch.randn(shape)
    patch = _config_int(config, ("patch_size",))
    if patch and most > 2:
        yield torch.randn(BATCH, 16, channels * patch * patch)


def _sounds(config: Any) -> Iterator[torch.Tensor]:
    mel = _config_int(config, ("num_mel_bins", "n_mels", "feature_size"))
    if mel:
        yield torch.randn(BATCH, _config_int(config, ("max_length",)) or 64, mel)
    for shape in ((BATCH, 1600), (BATCH, 1, 1600), (BATCH, 16000), (BATCH, 1, 6400)):
        yield torch.randn(shape)


def _features(config: Any) -> Iterator[torch.Tensor]:
    mel = _config_int(
        config, ("num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim")
    )
    mel = mel or _config_int(config, ("feature_projection_input_dim",)) or 80
    frames = 2 * (_config_int(config, ("max_source_positions",)) or 32)
    for shape in ((BATCH, mel, frames), (BATCH, frames, mel), (BATCH, 100, mel), (BATCH, mel, 3000)):
        if shape[1] * shape[2] < 400_000:
            yield torch.randn(shape)


def _series(config: Any) -> Iterator[dict[str, Any]]:
    context = _config_int(config, ("context_length",)) or 32
    lags = max(getattr(config, "lags_sequence", None) or [0])
    length, ahead = context + lags, getattr(config, "prediction_length", None) or 1
    channels = getattr(config, "num_input_channels", 1) or 1
    features = getattr(config, "num_time_features", 0) or 0
    shape = (BATCH, length, channels) if channels > 1 or not lags else (BATCH, length)
    yield {
        "past_values": torch.randn(shape),
        "past_time_features": torch.randn(BATCH, length, features),
        "past_observed_mask": torch.ones(shape),
        "future_time_features": torch.randn(BATCH, ahead, features),
    }
    yield {"past_values": torch.randn(BATCH, context, channels)}
    yield {"past_values": torch.randn(BATCH, context), "freq": torch.zeros(BATCH, 1, dtype=torch.long)}
