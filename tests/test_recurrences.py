"""Recurrences of state-space models are one operation of a graph, which serves all lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import largest_difference
from language_models import TEXT, VOCABULARY, build

import graphplan
from graphplan.recurrences import recurrences_whole

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}


def falcon_mamba() -> Any:
    config = transformers.FalconMambaConfig(**SIZES, state_size=8, pad_token_id=0, eos_token_id=None)
    return transformers.FalconMambaForCausalLM(config)


def jamba() -> Any:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
    return transformers.JambaForCausalLM(transformers.JambaConfig(**TEXT, **experts, **layers))


FAMILIES = {"mamba": lambda: build("mamba"), "falcon_mamba": falcon_mamba, "jamba": jamba}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_serves_all_lengths(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    ids = torch.randint(6, VOCABULARY, (2, 40))
    with graphplan.simulate({0: "4MiB", 1: "4MiB"}) as machine:
        placed = graphplan.partition(
            model, machine.max_memory, kwargs={"input_ids": ids[:, :9]}, max_batch=2, max_length=40
        )
        operations = placed.plan.graph.operations.values()
        assert sum("selective_scan" in operation.target for operation in operations) in (1, 2)
        plans = len(placed.plans)
        for length in (9, 23, 40):
            with torch.no_grad():
                expected = model(ids[:, :length]).logits
            assert largest_difference(placed(ids[:, :length]).logits, expected) < 1e-5
        for length in (9, 30):
            options = {"max_new_tokens": 5, "do_sample": False}
            found = placed.generate(ids[:, :length], **options)
            assert torch.equal(found, model.generate(ids[:, :length], **options))
        assert len(placed.plans) == plans
        for key, budget in machine.max_memory.items():
            if key != "cpu":
                most = max(plan.peak_bytes[key] for plan in placed.plans)
                assert machine.peak_bytes(key) <= most <= budget


def test_eager_runs_while_another_thread_traces() -> None:
    model, ids = build("mamba"), torch.randint(6, VOCABULARY, (2, 9))
    with torch.no_grad():
        expected = model(ids).logits
        with recurrences_whole(model):
            assert torch.equal(model(ids).logits, expected)
