"""Small models of many transformers architectures, with inputs.

A default configuration is shrunken by attribute name, so an architecture is one line in ``TABLE``:
its classes' stem, the head that is built, the kind of its inputs, and what shrinking by name misses.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embed_dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 64,
    "d_inner": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "d_ff": 64,
    "dense_act_fn": "relu",
    "hidden_dim": 64,
    "ffn_hidden_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_sequence_length": 64,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 16,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 32,
    "state_size": 8,
    "lora_rank": 8,
    "attention_hidden_size": 32,
    "rotary_dim": 4,
}


@dataclass(frozen=True)
class Architecture:
    """One row: ``stem`` + ``head`` is the model's class, ``stem`` + ``Config`` its configuration's."""

    stem: str
    head: str
    kind: str
    extra: dict[str, Any] = field(default_factory=dict)
    config: str = ""

    @property
    def name(self) -> str:
        """The model class's name."""
        return self.stem + self.head

    def build(self, seed: int = 0) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        """A model in eval mode with random weights, and example inputs of batch 2."""
        torch.manual_seed(seed)
        config_class = getattr(transformers, (self.config or self.stem) + "Config")
        config = config_class(**{**_shrunken(config_class), **self.extra})
        with (
            warnings.catch_warnings()
        ):  # MobileBERT, as wide as its bottleneck, has a weight without elements
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            model = getattr(transformers, self.name)(config).eval()
        return model, INPUTS[self.kind](config)


def _shrunken(config_class: type) -> dict[str, Any]:
    default = config_class()
    mapped = getattr(default, "attribute_map", {})
    known = {
        name
        for name in {*vars(default), *mapped}
        if not isinstance(getattr(default, name, None), list | tuple)  # one per stage: not ours to set
    }
    return {name: value for name, value in SMALL.items() if name in known}


def _ids(config: Any, length: int = 9) -> torch.Tensor:
    return torch.randint(3, 100, (2, length))


def _text(config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(config)}


def _encoder(config: Any) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": _ids(config), "attention_mask": mask}


def _seq2seq(config: Any) -> dict[str, torch.Tensor]:
    return {**_encoder(config), "decoder_input_ids": _ids(config, 5)}


def _image(config: Any) -> dict[str, torch.Tensor]:
    size = getattr(config, "image_size", 32)
    side = size if isinstance(size, int) else size[0]
    return {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), side, side)}


def _wave(config: Any) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 1600)}


def _spectrogram(config: Any) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins)}


def _speech(config: Any) -> dict[str, torch.Tensor]:
    frames = 2 * config.max_source_positions
    features = torch.randn(2, config.num_mel_bins, frames)
    return {"input_features": features, "decoder_input_ids": _ids(config, 5)}


def _contrastive(config: Any) -> dict[str, torch.Tensor]:
    pixels = torch.randn(2, 3, config.vision_config.image_size, config.vision_config.image_size)
    return {"input_ids": _ids(config), "pixel_values": pixels}


INPUTS = {
    "text": _text,
    "encoder": _encoder,
    "seq2seq": _seq2seq,
    "image": _image,
    "wave": _wave,
    "spectrogram": _spectrogram,
    "speech": _speech,
    "contrastive": _contrastive,
}

_LM, _BASE, _SEQ = "ForCausalLM", "Model", "ForConditionalGeneration"
_CONV = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
_CONV |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
_STAGES = {"hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1], "embedding_size": 16}
_TOWERS = {
    "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "vocab_size": 120, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                      "image_size": 32, "patch_size": 8},
    "projection_dim": 16,
}  # fmt: skip

TABLE: tuple[Architecture, ...] = (
    # decoders
    Architecture("Llama", _LM, "text", {"tie_word_embeddings": True}),
    Architecture("Mistral", _LM, "text"),
    Architecture("Qwen2", _LM, "text"),
    Architecture("Qwen3", _LM, "text"),
    Architecture("Gemma", _LM, "text"),
    Architecture("Gemma2", _LM, "text"),
    Architecture("Gemma3", _LM, "text", config="Gemma3Text"),
    Architecture("Phi", _LM, "text"),
    Architecture("Phi3", _LM, "text"),
    Architecture("Falcon", _LM, "text"),
    Architecture("GPT2", "LMHeadModel", "text"),
    Architecture("GPTNeo", _LM, "text", {"attention_types": [[["global"], 1], [["local"], 1]]}),
    Architecture("GPTNeoX", _LM, "text"),
    Architecture("GPTJ", _LM, "text"),
    Architecture("GPTBigCode", _LM, "text"),
    Architecture("OPT", _LM, "text"),
    Architecture("Bloom", _LM, "text"),
    Architecture("StableLm", _LM, "text"),
    Architecture("Starcoder2", _LM, "text"),
    Architecture("CodeGen", _LM, "text"),
    Architecture("Cohere", _LM, "text"),
    Architecture("Olmo", _LM, "text"),
    Architecture("Olmo2", _LM, "text"),
    Architecture("Granite", _LM, "text"),
    Architecture("Persimmon", _LM, "text"),
    Architecture("BioGpt", _LM, "text"),
    Architecture("XGLM", _LM, "text", {"attention_heads": 4}),
    Architecture("Helium", _LM, "text"),
    Architecture("Nemotron", _LM, "text"),
    # mixtures of experts
    Architecture("Mixtral", _LM, "text"),
    Architecture("Qwen2Moe", _LM, "text"),
    Architecture("Qwen3Moe", _LM, "text"),
    Architecture("Olmoe", _LM, "text"),
    Architecture("GraniteMoe", _LM, "text"),
    # state-space and recurrent
    Architecture("Mamba", _LM, "text"),
    Architecture("FalconMamba", _LM, "text"),
    Architecture("Mamba2", _LM, "text", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    Architecture("RecurrentGemma", _LM, "text", {"lru_width": 32, "num_hidden_layers": 3}),
    # encoders
    Architecture("Bert", "ForMaskedLM", "encoder"),
    Architecture("Roberta", "ForMaskedLM", "encoder"),
    Architecture("Albert", "ForMaskedLM", "encoder"),
    Architecture("DistilBert", "ForMaskedLM", "encoder"),
    Architecture("Electra", "ForMaskedLM", "encoder"),
    Architecture("Deberta", "ForMaskedLM", "encoder"),
    Architecture("DebertaV2", "ForMaskedLM", "encoder"),
    Architecture("MPNet", "ForMaskedLM", "encoder"),
    Architecture("FNet", "ForMaskedLM", "text"),
    Architecture("MobileBert", "ForMaskedLM", "encoder", {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}),
    Architecture("SqueezeBert", "ForMaskedLM", "encoder"),
    Architecture("RoFormer", "ForMaskedLM", "encoder"),
    Architecture("Ernie", "ForMaskedLM", "encoder"),
    Architecture("ConvBert", "ForMaskedLM", "encoder"),
    Architecture("ModernBert", "ForMaskedLM", "encoder"),
    # encoder-decoders
    Architecture("T5", _SEQ, "seq2seq"),
    Architecture("MT5", _SEQ, "seq2seq"),
    Architecture("UMT5", _SEQ, "seq2seq"),
    Architecture("Bart", _SEQ, "seq2seq"),
    Architecture("MBart", _SEQ, "seq2seq"),
    Architecture("Pegasus", _SEQ, "seq2seq"),
    Architecture("Marian", "MTModel", "seq2seq", {"decoder_vocab_size": 120}),
    Architecture("Blenderbot", _SEQ, "seq2seq"),
    Architecture("M2M100", _SEQ, "seq2seq"),
    # vision
    Architecture("ViT", "ForImageClassification", "image"),
    Architecture("DeiT", "ForImageClassification", "image"),
    Architecture("Beit", "ForImageClassification", "image"),
    Architecture("Swin", "ForImageClassification", "image", {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4}),
    Architecture("Segformer", "ForSemanticSegmentation", "image", {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2], "patch_sizes": [7, 3, 3, 3], "image_size": 32, "decoder_hidden_size": 64}),
    Architecture("ConvNext", "ForImageClassification", "image", {"num_hidden_layers": 4, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 4}),
    Architecture("ResNet", "ForImageClassification", "image", _STAGES),
    Architecture("RegNet", "ForImageClassification", "image", {**_STAGES, "groups_width": 8}),
    Architecture("Dinov2", "ForImageClassification", "image"),
    Architecture("MobileNetV2", "ForImageClassification", "image", {"depth_multiplier": 0.35}),
    Architecture("PoolFormer", "ForImageClassification", "image", {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 4}),
    Architecture("Hiera", "ForImageClassification", "image", {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "image_size": [64, 64], "patch_size": [7, 7]}),
    # audio
    Architecture("Whisper", _SEQ, "speech"),
    Architecture("Wav2Vec2", "ForCTC", "wave", _CONV),
    Architecture("Hubert", "ForCTC", "wave", _CONV),
    Architecture("AST", "ForAudioClassification", "spectrogram", {"max_length": 64}, config="AST"),
    # two towers
    Architecture("CLIP", _BASE, "contrastive", _TOWERS),
    Architecture("Siglip", _BASE, "contrastive", _TOWERS),
)  # fmt: skip
