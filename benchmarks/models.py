"""Well-known models in their true sizes, on the meta device, with example inputs: no download.

Configurations list the values that differ from the class's defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers as hf
from torch import nn

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A model class with its configuration, example inputs and usual dtype."""

    build_class: Callable[[Any], nn.Module]
    config: Callable[[], hf.PreTrainedConfig]
    inputs: Callable[[], Inputs]
    dtype: torch.dtype = torch.bfloat16

    def build(self) -> nn.Module:
        """Return the model on the meta device."""
        with torch.device("meta"):
            return self.build_class(self.config()).to(self.dtype).eval()

    def example(self) -> Inputs:
        """Return inputs on the meta device, floating-point ones in the model's dtype."""
        with torch.device("meta"):
            inputs = self.inputs()
        return {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in inputs.items()}


def _ids(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.long)


def _text(length: int) -> Callable[[], Inputs]:
    return lambda: {"input_ids": _ids(length)}


def _image(side: int) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": torch.zeros(1, 3, side, side)}


def llama_of(
    wide: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int, **more: Any
) -> partial[hf.LlamaConfig]:
    """Return a maker of Llama configurations; ``heads`` and ``keys`` count query and key-value heads."""
    return partial(
        hf.LlamaConfig,
        hidden_size=wide,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        **more,
    )


def llama_8b(layers: int = 32, vocabulary: int = 128256, **more: Any) -> partial[hf.LlamaConfig]:
    """Return a maker of configurations of Llama 3 8B, or a variant."""
    return llama_of(4096, 14336, layers, 32, 8, vocabulary, **more)


def llama_by_gpu(config: Callable[[], hf.LlamaConfig]) -> nn.Module:
    """Return a Llama in bfloat16 on the CPU with random weights from seed 0, made on the GPU for speed."""
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        return hf.LlamaForCausalLM._from_config(config(), dtype=torch.bfloat16).cpu()


LLAMA_70B = llama_of(8192, 28672, 80, 64, 8, 128256, rope_theta=500000.0)
_T5 = partial(hf.T5Config, d_model=1024, d_kv=128, d_ff=65536, num_heads=128, num_layers=24)
_WHISPER = partial(
    hf.WhisperConfig,
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
_CLIP = partial(
    hf.CLIPConfig,
    text_config={"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    vision_config={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
    projection_dim=768,
)
_SEGFORMER = partial(
    hf.SegformerConfig,
    hidden_sizes=[64, 128, 320, 512],
    depths=[3, 6, 40, 3],
    decoder_hidden_size=768,
    num_labels=150,
)
_GEMMA = partial(
    hf.Gemma3TextConfig,
    hidden_size=640,
    intermediate_size=2048,
    num_hidden_layers=18,
    num_attention_heads=4,
    num_key_value_heads=1,
    vocab_size=262144,
)
_FALCON_MAMBA = partial(hf.FalconMambaConfig, hidden_size=4096, num_hidden_layers=64, vocab_size=65024)


def _detr() -> hf.PreTrainedConfig:
    return hf.DetrConfig(backbone_config=hf.ResNetConfig(out_features=["stage4"]))


def _t5_inputs() -> Inputs:
    return {"input_ids": _ids(512), "decoder_input_ids": _ids(64)}


def _whisper_inputs() -> Inputs:
    return {"input_features": torch.zeros(1, 128, 3000), "decoder_input_ids": _ids(64)}


_FLOAT = torch.float32

_QWEN_30B = partial(
    hf.Qwen3MoeConfig,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    vocab_size=151936,
)
PROMPT = 512
"""Tokens of the prompts of ``GENERATORS``."""

GENERATORS: dict[str, Model] = {
    "llama-3-8b": Model(hf.LlamaForCausalLM, llama_8b(), _text(PROMPT)),
    "llama-3-70b": Model(hf.LlamaForCausalLM, LLAMA_70B, _text(PROMPT)),
    "qwen3-30b-a3b": Model(hf.Qwen3MoeForCausalLM, _QWEN_30B, _text(PROMPT)),
    "gpt-oss-120b": Model(hf.GptOssForCausalLM, hf.GptOssConfig, _text(PROMPT)),
}
MODELS: dict[str, Model] = {
    "llama-3-70b": Model(hf.LlamaForCausalLM, LLAMA_70B, _text(512)),
    "mixtral-8x7b": Model(hf.MixtralForCausalLM, hf.MixtralConfig, _text(128)),
    "t5-11b": Model(hf.T5ForConditionalGeneration, _T5, _t5_inputs),
    "whisper-large": Model(hf.WhisperForConditionalGeneration, _WHISPER, _whisper_inputs),
    "clip-l": Model(hf.CLIPModel, _CLIP, lambda: _text(77)() | _image(224)(), _FLOAT),
    "segformer-b5": Model(hf.SegformerForSemanticSegmentation, _SEGFORMER, _image(512), _FLOAT),
    "resnet-152": Model(
        hf.ResNetForImageClassification, partial(hf.ResNetConfig, depths=[3, 8, 36, 3]), _image(224), _FLOAT
    ),
    "detr": Model(hf.DetrForObjectDetection, _detr, _image(800), _FLOAT),
    "gemma-3-270m": Model(hf.Gemma3ForCausalLM, _GEMMA, _text(128)),
    "falcon-mamba-7b": Model(hf.FalconMambaForCausalLM, _FALCON_MAMBA, _text(8)),  # a scan step a token
    "qwen-moe": Model(hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig, _text(128)),
}
