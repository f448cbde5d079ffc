"""Training steps of transformers architectures, shrunken, and of plain modules, beside eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import TABLE, Architecture
from plain_modules import PLAIN
from shortcuts import short_search
from torch import nn
from training_steps import ROOMY, check_training, needed

ADAMW = torch.optim.AdamW
SAMPLE = (
    "Llama", "GPT2", "Mixtral", "Gemma3", "OPT", "Bert", "T5", "Whisper", "ViT", "ResNet", "CLIP", "Bloom",
    "GPTNeoX",
)  # fmt: skip
QUICK = {"Llama", "Mixtral", "Bert", "ResNet", "convnet", "unet", "gru", "tied", "detach"}
# random choices of which layers run, or what is masked, decide what they compute in train mode
UNTRACED = ("M2M100", "Wav2Vec2", "Hubert")
# a single layer's weights or activations are most of the step, so that two devices of 0.65 do not hold it
UNDIVIDED = ("RecurrentGemma", "MobileNetV2", "Hiera", "drop", "tied", "detach", "unused")


def budgets_of(size: int, configuration: int) -> dict[Any, int]:
    """Half, and 0.7, of what a step takes with the CPU, and two devices of 0.65."""
    shares = ({0: 0.5}, {0: 0.7}, {0: 0.65, 1: 0.65})[configuration]
    budgets: dict[Any, int] = {key: int(share * size) for key, share in shares.items()}
    return budgets if len(shares) > 1 else {**budgets, "cpu": ROOMY}


def slow(values: tuple[Any, ...], is_slow: bool) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow] if is_slow else [])


def check(name: str, model: nn.Module, inputs: dict[str, Any], configurations: tuple[int, ...]) -> None:
    with short_search():
        size = needed(model, inputs, optimizer=ADAMW)
        for configuration in configurations:
            if configuration < 2 or name not in UNDIVIDED:
                check_training(model, inputs, budgets_of(size, configuration), exact=False)


def check_architecture(architecture: Architecture, configurations: tuple[int, ...]) -> None:
    model, inputs = architecture.build()
    if "ForCausalLM" in architecture.name or "LMHead" in architecture.name:
        inputs = {**inputs, "labels": inputs["input_ids"], "use_cache": False}
    elif architecture.kind in ("seq2seq", "speech"):
        inputs = {**inputs, "labels": inputs["decoder_input_ids"], "use_cache": False}
    check(architecture.stem, model.train(), inputs, configurations)


@pytest.mark.parametrize(("turn", "stem"), [slow(each, each[1] not in QUICK) for each in enumerate(SAMPLE)])
def test_sample(turn: int, stem: str) -> None:
    (architecture,) = [a for a in TABLE if a.stem == stem]
    check_architecture(architecture, (turn % 3,))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TABLE, ids=lambda a: a.name)
def test_architecture(architecture: Architecture) -> None:
    if architecture.stem in UNTRACED:
        pytest.skip("its step has no graph in train mode")
    check_architecture(architecture, (0, 1, 2))


@pytest.mark.parametrize("name", [slow((name,), name not in QUICK) for name in PLAIN])
def test_plain_module(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = PLAIN[name]
    check(name, make(), {"x": inputs()}, (0, 2))
