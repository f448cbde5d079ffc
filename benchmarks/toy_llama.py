"""A toy Llama whose time is dispatch, and any such model under accelerate's hooks, all on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import cpu_offload, dispatch_model
from torch import nn


def toy_llama(layers: int, hidden: int = 64, **more: Any) -> Any:
    """Many small layers; ``more`` for its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        **more,
    )
    return LlamaForCausalLM(config).eval()


def llama_parts(layers: int) -> tuple[str, ...]:
    """The modules that a device map of it names."""
    blocks = (f"model.layers.{i}" for i in range(layers))
    return "model.embed_tokens", *blocks, "model.norm", "model.rotary_emb", "lm_head"


@dataclass(frozen=True)
class Hooked:
    """Copies of a model that accelerate's hooks run: each module where its weights are, or fetched to it."""

    dispatched: nn.Module
    offloaded: nn.Module


def hooked(model: nn.Module, parts: Sequence[str]) -> Hooked:
    """Both; ``parts`` are the modules that a device map names."""
    places = dict.fromkeys(parts, "cpu")
    return Hooked(
        dispatch_model(copy.deepcopy(model), places, main_device="cpu", force_hooks=True),
        cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu")),
    )
