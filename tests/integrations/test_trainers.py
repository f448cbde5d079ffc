"""Training with transformers' Trainer, accelerate and PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import nn
from training_steps import ROOMY, gap, gradients_of, needed, step_of

import graphplan

pytestmark = pytest.mark.slow
ADAMW = torch.optim.AdamW


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 60}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config).train()


def rows(count: int, length: int = 8) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 60, (count, length), generator=draw)
    return [{"input_ids": row, "labels": row} for row in ids]


def batch_of(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([one[name] for one in examples]) for name in examples[0]}


def losses(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """Of 20 steps of the Trainer."""
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=20,
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(40), data_collator=batch_of)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_losses_equal_eager(tmp_path: Path) -> None:
    inputs = batch_of(rows(2))
    expected = losses(llama(), tmp_path)
    assert len(expected) == 20
    size = needed(llama(), inputs, optimizer=ADAMW)
    with graphplan.simulate({0: int(0.7 * size)}) as machine:
        budgets = {**machine.max_memory, "cpu": ROOMY}
        placed = graphplan.partition(llama(), budgets, kwargs=inputs, train=True, optimizer=ADAMW)
        assert losses(placed, tmp_path) == pytest.approx(expected, rel=1e-4)
        assert machine.peak_bytes(0) <= budgets[0]


def test_trainer_example_fits_its_steps(tmp_path: Path) -> None:
    """The Trainer turns the cache off, and passes the number of labels."""
    model, calls = llama(), list[dict[str, torch.Tensor]]()
    model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    losses(model, tmp_path)
    assert set(calls[0]) == {"input_ids", "labels", "num_items_in_batch"}
    assert not model.config.use_cache
    example = {**batch_of(rows(2)), "num_items_in_batch": torch.ones_like(calls[0]["num_items_in_batch"])}
    model = llama()
    model.config.use_cache = False
    with graphplan.simulate({0: "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=example, train=True, optimizer=ADAMW)
        losses(placed, tmp_path)
        assert len(placed.plans) == 1


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_trainer_gradient_checkpointing_is_ignored_for_a_plan(tmp_path: Path) -> None:
    """Regression: the Trainer added a hook to the embeddings, and the model ran module by module."""
    expected, inputs = losses(llama(), tmp_path), batch_of(rows(2))
    with graphplan.simulate({0: "1GiB"}) as machine:
        placed = graphplan.partition(llama(), machine.max_memory, kwargs=inputs, train=True, optimizer=ADAMW)
        with pytest.warns(graphplan.GraphplanWarning) as told:
            found = losses(placed, tmp_path, gradient_checkpointing=True)
        assert found == pytest.approx(expected, rel=1e-4)
        ours = [str(one.message) for one in told if one.category is graphplan.GraphplanWarning]
        assert any("left to its plan" in text for text in ours)
        assert not any("module by module" in text for text in ours)
        assert not placed._graphplan.modular_calls.structures


def test_peft_enable_input_require_grads_is_ignored_with_warning() -> None:
    peft: Any = pytest.importorskip("peft")
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"])).train()
    inputs = batch_of(rows(2))
    with graphplan.simulate({0: "1GiB"}) as machine:
        placed = graphplan.partition(copy.deepcopy(adapted), machine.max_memory, kwargs=inputs, train=True)
        for one in (placed, placed.base_model.model):
            with pytest.warns(graphplan.GraphplanWarning, match="left to its plan"):
                one.enable_input_require_grads()
        assert torch.allclose(step_of(placed, inputs), step_of(adapted, inputs), rtol=1e-4)
        assert gap(gradients_of(placed), gradients_of(adapted)) < 1e-4
        assert not placed._graphplan.modular_calls.structures


class Plain(nn.Module):
    """A model of no library, whose base class has no ``to`` that leaves weights where they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(60, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 60))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_trainers_do_not_move_a_placed_plain_module(tmp_path: Path) -> None:
    inputs = batch_of(rows(2))
    expected = losses(Plain(), tmp_path)
    size = needed(Plain(), inputs, optimizer=ADAMW)
    with graphplan.simulate({0: int(0.7 * size)}) as machine:
        budgets = {**machine.max_memory, "cpu": ROOMY}
        placed = graphplan.partition(Plain(), budgets, kwargs=inputs, train=True, optimizer=ADAMW)
        devices = [weight.device for weight in placed.parameters()]
        assert len(set(devices)) == 2
        assert losses(placed, tmp_path) == pytest.approx(expected, rel=1e-4)
        assert accelerate.Accelerator(cpu=True).prepare(placed) is placed
        assert [weight.device for weight in placed.parameters()] == devices


def test_accelerate_does_not_move_a_module_of_one_parameter() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(nn.Linear(4, 4, bias=False), machine.max_memory, (torch.ones(2, 4),))
        assert accelerate.Accelerator(cpu=True).prepare(placed) is placed


def test_adapter_trains_on_a_streamed_base() -> None:
    peft: Any = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model: nn.Module = peft.get_peft_model(llama(), config).train()
        return model

    inputs = batch_of(rows(2))
    eager = adapted()
    size = needed(copy.deepcopy(eager), inputs, optimizer=ADAMW)
    with graphplan.simulate({0: size // 2}) as machine:
        budgets = {**machine.max_memory, "cpu": ROOMY}
        placed = graphplan.partition(adapted(), budgets, kwargs=inputs, train=True, optimizer=ADAMW)
        assert placed.plan.streamed_bytes
        for model in (placed, eager):
            step_of(model, inputs)
        found = gradients_of(placed)
        assert gap(found, gradients_of(eager)) < 1e-5
        assert {name for name, gradient in found.items() if gradient is not None} == {
            name for name in found if "lora" in name
        }
