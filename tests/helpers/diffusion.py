"""Small pipelines of diffusers with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

__all__ = ["flux", "flux_inputs", "stable_diffusion"]


def stable_diffusion(folder: Path) -> Any:
    """A text encoder, a U-Net and an autoencoder. ``folder`` takes the files of the tokenizer."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    )
    config = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=54,
        bos_token_id=52,
        eos_token_id=53,
        max_position_embeddings=16,
    )
    pipe = diffusers.StableDiffusionPipeline(
        unet=unet.eval(),
        vae=_autoencoder(4).eval(),
        text_encoder=CLIPTextModel(config).eval(),
        tokenizer=_tokenizer(folder),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux() -> Any:
    """A transformer and an autoencoder; the texts come encoded."""
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    pipe = diffusers.FluxPipeline(
        transformer=transformer.eval(),
        vae=_autoencoder(4).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux_inputs() -> dict[str, Any]:
    """Of one image."""
    draw = torch.Generator().manual_seed(1)
    return {
        "prompt_embeds": torch.randn(1, 8, 32, generator=draw),
        "pooled_prompt_embeds": torch.randn(1, 32, generator=draw),
        "height": 16,
        "width": 16,
    }


def _autoencoder(channels: int) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=[32, 64],
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=channels,
        shift_factor=0.0,
    )


def _tokenizer(folder: Path) -> CLIPTokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
