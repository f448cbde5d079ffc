"""Training steps of transformers architectures, shrunken, and of plain modules, compared with eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import TABLE, Architecture
from plain_modules import PLAIN
from shortcuts import short_search
from torch import nn
from training_steps import budgets_of, check_training, example, needed

ADAMW = torch.optim.AdamW
SAMPLE = (
    "Llama", "GPT2", "Mixtral", "Gemma3", "OPT", "Bert", "T5", "Whisper", "ViT", "ResNet", "CLIP", "Bloom",
    "GPTNeoX",
)  # fmt: skip
QUICK = {"ViT", "tied"}
# random choices of which layers run, or what is masked, decide what they compute in train mode; or it has a
# own backward, which is not the derivative
UNTRACED = ("M2M100", "Wav2Vec2", "Hubert", "RecurrentGemma")
# the largest weight with its state, and what AdamW takes to step it, are more than 0.65 of the step
UNDIVIDED = ("drop", "tied", "detach")


def slow(values: tuple[Any, ...], is_slow: bool) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow] if is_slow else [])


def check(name: str, model: nn.Module, inputs: dict[str, Any], configurations: tuple[int, ...]) -> None:
    with short_search():
        size = needed(model, inputs, optimizer=ADAMW)
        for configuration in configurations:
            if configuration < 2 or name not in UNDIVIDED:
                check_training(model, inputs, budgets_of(size, configuration), exact=False)


def check_architecture(architecture: Architecture, configurations: tuple[int, ...]) -> None:
    model, inputs = example(architecture)
    check(architecture.stem, model, inputs, configurations)


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
