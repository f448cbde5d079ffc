"""Well-known models in their true sizes, on the meta device, with example inputs: no download.

Configurations are written out where they differ from the class's defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    DetrConfig,
    DetrForObjectDetection,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model class, its configuration, its inputs and the dtype that it is used in."""

    build_class: Callable[[Any], nn.Module]
    config: Callable[[], PreTrainedConfig]
    inputs: Callable[[], Inputs]
    dtype: torch.dtype = torch.bfloat16

    def build(self) -> nn.Module:
        """The model, without data."""
        with torch.device("meta"):
            return self.build_class(self.config()).to(self.dtype).eval()

    def example(self) -> Inputs:
        """Inputs of its dtype, without data."""
        made = self.inputs()
        return {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in made.items()}


def _ids(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.long, device="meta")


def _text(length: int) -> Callable[[], Inputs]:
    return lambda: {"input_ids": _ids(length)}


def _pixels(side: int, count: int = 1) -> torch.Tensor:
    return torch.zeros(count, 3, side, side, device="meta")


def _image(side: int) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": _pixels(side)}


def _llama() -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        rope_theta=500000.0,
    )


def _mixtral() -> PreTrainedConfig:
    return MixtralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_local_experts=8, vocab_size=32000
    )


def _t5() -> PreTrainedConfig:
    return T5Config(d_model=1024, d_kv=128, d_ff=65536, num_heads=128, num_layers=24, vocab_size=32128)


def _t5_inputs() -> Inputs:
    return {"input_ids": _ids(512), "decoder_input_ids": _ids(64)}


def _whisper() -> PreTrainedConfig:
    return WhisperConfig(
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        num_mel_bins=128,
        vocab_size=51866,
    )


def _whisper_inputs() -> Inputs:
    features = torch.zeros(1, 128, 3000, device="meta")
    return {"input_features": features, "decoder_input_ids": _ids(64)}


def _clip() -> PreTrainedConfig:
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12}
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "image_size": 224,
    }
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=768)


def _clip_inputs() -> Inputs:
    return {"input_ids": _ids(77), "pixel_values": _pixels(224)}


def _segformer() -> PreTrainedConfig:
    return SegformerConfig(
        hidden_sizes=[64, 128, 320, 512], depths=[3, 6, 40, 3], decoder_hidden_size=768, num_labels=150
    )


def _resnet() -> PreTrainedConfig:
    return ResNetConfig(depths=[3, 8, 36, 3])


def _detr() -> PreTrainedConfig:
    return DetrConfig(backbone_config=ResNetConfig(out_features=["stage4"]))


def _gemma() -> PreTrainedConfig:
    return Gemma3TextConfig(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
    )


def _falcon_mamba() -> PreTrainedConfig:
    return FalconMambaConfig(hidden_size=4096, num_hidden_layers=64, vocab_size=65024)


def _qwen_moe() -> PreTrainedConfig:
    return Qwen2MoeConfig(
        hidden_size=2048,
        num_hidden_layers=24,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        vocab_size=151936,
    )


_FLOAT = torch.float32

MODELS: dict[str, Model] = {
    "llama-3-70b": Model(LlamaForCausalLM, _llama, _text(512)),
    "mixtral-8x7b": Model(MixtralForCausalLM, _mixtral, _text(128)),
    "t5-11b": Model(T5ForConditionalGeneration, _t5, _t5_inputs),
    "whisper-large": Model(WhisperForConditionalGeneration, _whisper, _whisper_inputs),
    "clip-l": Model(CLIPModel, _clip, _clip_inputs, _FLOAT),
    "segformer-b5": Model(SegformerForSemanticSegmentation, _segformer, _image(512), _FLOAT),
    "resnet-152": Model(ResNetForImageClassification, _resnet, _image(224), _FLOAT),
    "detr": Model(DetrForObjectDetection, _detr, _image(800), _FLOAT),
    "gemma-3-270m": Model(Gemma3ForCausalLM, _gemma, _text(128)),
    "falcon-mamba-7b": Model(FalconMambaForCausalLM, _falcon_mamba, _text(8)),  # its scan is a step a token
    "qwen-moe": Model(Qwen2MoeForCausalLM, _qwen_moe, _text(128)),
}
