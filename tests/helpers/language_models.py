"""Tiny transformers models of many families, with random weights, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
BOTH_SIDES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
WINDOW: dict[str, Any] = {**TEXT, "sliding_window": 16}
DECODERS = ("llama", "gpt2", "gemma2", "gemma3", "mistral", "qwen2_moe", "mixtral")
FAMILIES = (*DECODERS, "mamba", "t5", "bart", "whisper", "llava")


def build(family: str) -> Any:
    """A model of the family, or a Llama or T5 of one layer; the same weights each time."""
    import transformers

    torch.manual_seed(0)
    made = _BUILDERS[family](transformers)
    return made.eval()


def _gpt2(t: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0))


def _gemma3(t: Any) -> Any:
    layers = ["sliding_attention", "full_attention"]
    return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**WINDOW, head_dim=8, layer_types=layers))


def _qwen2_moe(t: Any) -> Any:
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4}
    return t.Qwen2MoeForCausalLM(t.Qwen2MoeConfig(**TEXT, **experts, num_experts_per_tok=2))


def _mamba(t: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    return t.MambaForCausalLM(t.MambaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=None))


def _t5(t: Any, layers: int = 2) -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    sizes["num_layers"] = layers
    tokens = {"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes, **tokens))


def _whisper(t: Any) -> Any:
    sizes = {"num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 256}
    both = {name: value for name, value in BOTH_SIDES.items() if name != "forced_eos_token_id"}
    quiet = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return t.WhisperForConditionalGeneration(t.WhisperConfig(**both, **sizes, **quiet))


def _llava(t: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = t.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = t.LlamaConfig(**TEXT)
    parts = {"vision_config": vision, "text_config": text}
    config = t.LlavaConfig(**parts, image_token_id=5, vision_feature_select_strategy="default")
    return t.LlavaForConditionalGeneration(config)


_BUILDERS: dict[str, Any] = {
    "short llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**{**TEXT, "num_hidden_layers": 1})),
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**TEXT)),
    "gpt2": _gpt2,
    "gemma2": lambda t: t.Gemma2ForCausalLM(t.Gemma2Config(**WINDOW, head_dim=8)),
    "gemma3": _gemma3,
    "mistral": lambda t: t.MistralForCausalLM(t.MistralConfig(**WINDOW)),
    "qwen2_moe": _qwen2_moe,
    "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**TEXT, num_local_experts=4)),
    "mamba": _mamba,
    "t5": _t5,
    "short t5": lambda t: _t5(t, 1),
    "bart": lambda t: t.BartForConditionalGeneration(t.BartConfig(**BOTH_SIDES, max_position_embeddings=512)),
    "whisper": _whisper,
    "llava": _llava,
}


CACHE_NAMES = ("past_key_values", "cache")  # of the argument, before transformers 5.24 and since


def inputs_of(family: str, batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """What ``generate`` takes."""
    draw = torch.Generator().manual_seed(length)
    if family == "whisper":
        return {"input_features": torch.randn(batch, 16, 60, generator=draw)}
    ids = torch.randint(6, VOCABULARY, (batch, length), generator=draw)
    if family == "llava":
        ids[:, 1:5] = 5
        return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16, generator=draw)}
    return {"input_ids": ids}


def padded_inputs(family: str) -> dict[str, torch.Tensor]:
    """Two texts of which one is shorter."""
    ids = inputs_of(family)["input_ids"]
    mask = torch.ones_like(ids)
    if family in ("t5", "bart"):
        mask[0, -3:] = 0
    else:
        mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def example_of(family: str) -> dict[str, torch.Tensor]:
    """A call of the model itself."""
    inputs = inputs_of(family)
    if family in ("t5", "bart", "whisper"):
        inputs["decoder_input_ids"] = torch.full((2, 1), 0 if family == "t5" else 2)
    return inputs
