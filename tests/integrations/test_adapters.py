"""Temporary changes of a placed model by PEFT."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import pytest
import torch
from builders import largest_difference
from transformers import LlamaConfig, LlamaForCausalLM

import graphplan

IDS = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(0))
CPU = {"cpu": "1GiB"}


def adapted(config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, pad_token_id=0, eos_token_id=None))
    return peft.get_peft_model(llama, config).eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.slow
@pytest.mark.parametrize("before", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.filterwarnings("error::graphplan.GraphplanWarning")
def test_prompts_can_be_disabled_temporarily(before: bool) -> None:
    """PEFT sets ``forward`` to the base model's own, and then to the method that it was."""
    model = adapted(peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    eager = copy.deepcopy(model)
    enabled = logits(eager)
    with eager.disable_adapter():
        disabled = logits(eager)
    assert largest_difference(enabled, disabled) > 1e-3
    if before:
        with model.disable_adapter():
            logits(model)
    placed = graphplan.partition(model, CPU, kwargs={"input_ids": IDS})
    for _ in range(2):
        assert largest_difference(logits(placed), enabled) < 1e-5
        with placed.disable_adapter():
            for _ in range(2):
                assert largest_difference(logits(placed), disabled) < 1e-5
    assert largest_difference(logits(placed), enabled) < 1e-5
    assert largest_difference(logits(graphplan.unplace(placed)), enabled) < 1e-5


@pytest.mark.parametrize("encoded", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompts_are_generated_from_on_an_accelerator(encoded: bool) -> None:
    """Regression: PEFT joined the prompt, on an accelerator, with the embeddings of inputs on the CPU."""
    config: Any = peft.PromptEncoderConfig if encoded else peft.PromptTuningConfig
    model = adapted(config(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    inputs: Any = {"input_ids": IDS, "max_new_tokens": 3, "do_sample": False}
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS}, offload=False)
        assert torch.equal(placed.generate(**inputs), model.generate(**inputs))


@pytest.mark.slow
def test_an_adapted_model_is_moved_by_trainers() -> None:
    model = adapted(peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    nbytes = sum(weight.nbytes for weight in model.parameters())
    with graphplan.simulate({0: nbytes, 1: nbytes}) as machine:
        budgets = {key: int(0.8 * size) for key, size in machine.max_memory.items()}
        placed = graphplan.partition(model, budgets, kwargs={"input_ids": IDS}, balance=True)
        devices = [weight.device for weight in placed.parameters()]
        assert len(set(devices)) == 2
        assert placed.to("cpu").to("sim:1").to("cpu") is placed
        assert [weight.device for weight in placed.parameters()] == devices
        assert largest_difference(logits(placed), logits(model)) < 1e-5
        with pytest.raises(graphplan.PlanError, match="keeps its dtype"):
            placed.to(torch.float16)


@pytest.mark.slow
def test_adapters_added_after_placement_can_be_removed() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    base = adapted(config).unload()
    expected = logits(base)
    placed: Any = graphplan.partition(base, CPU, kwargs={"input_ids": IDS})
    late: Any = peft.get_peft_model(placed, config)
    for _ in range(2):
        with pytest.raises(graphplan.PlanError, match=r"take them out \(by unload\(\).*graphplan\.unplace"):
            logits(placed)
    assert late.unload() is placed
    assert largest_difference(logits(placed), expected) < 1e-6
    again = peft.get_peft_model(graphplan.unplace(placed), config)
    placed = graphplan.partition(again, CPU, kwargs={"input_ids": IDS})
    assert largest_difference(logits(placed), logits(again)) < 1e-6
    assert largest_difference(logits(placed), expected) > 1e-3


def test_add_adapter_of_a_placed_model_raises() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"])
    placed: Any = graphplan.partition(adapted(config).unload(), CPU, kwargs={"input_ids": IDS})
    before = logits(placed)
    with pytest.raises(graphplan.PlanError, match=r"before it is placed.*graphplan\.unplace"):
        placed.add_adapter(config)
    assert torch.equal(logits(placed), before)
    peft.get_peft_model(graphplan.unplace(placed), config)


@pytest.mark.slow
def test_generate_of_an_adapted_model_does_not_retrace() -> None:
    """PEFT's ``generate`` sets a method of the base model, and sets it back."""
    model = adapted(peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    how = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(**how)
    placed: Any = graphplan.partition(model, CPU, kwargs={"input_ids": IDS})
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphplan.GraphplanWarning)
        for _ in range(2):
            logits(placed)
            assert torch.equal(placed.generate(**how), expected)
            plans = len(placed.plans)
        logits(placed)
    assert len(placed.plans) == plans
