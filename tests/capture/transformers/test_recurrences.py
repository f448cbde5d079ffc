"""Recurrences of state-space models are one operation in a graph that serves all lengths."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from builders import largest_difference
from language_models import TEXT, VOCABULARY, build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import graphplan
from graphplan.capture.transformers import recurrences
from graphplan.capture.transformers.recurrences import RECURRENCES, Recurrence, recurrences_as_operations
from graphplan.passes.frontend import fake_operation
from graphplan.passes.frontend.fake_operation import run_fake
from graphplan.passes.frontend.tensor_meta import describe, is_tensor_meta

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}


def mamba() -> Any:
    options = {**SIZES, "num_hidden_layers": 1, "state_size": 8, "pad_token_id": 0, "eos_token_id": None}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**options, bos_token_id=1))


def falcon_mamba() -> Any:
    config = transformers.FalconMambaConfig(**SIZES, state_size=8, pad_token_id=0, eos_token_id=None)
    return transformers.FalconMambaForCausalLM(config)


def jamba() -> Any:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
    return transformers.JambaForCausalLM(transformers.JambaConfig(**TEXT, **experts, **layers))


def qwen3_next() -> Any:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    experts["shared_expert_intermediate_size"] = 16
    config = transformers.Qwen3NextConfig(**TEXT, **experts, **LINEAR, head_dim=8, layer_types=LAYERS)
    return transformers.Qwen3NextForCausalLM(config)


def kimi_linear() -> Any:
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    heads = {"v_head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 8, "num_key_value_heads": 4}
    options = {**TEXT, **ranks, **experts, **heads, "n_group": 1, "topk_group": 1, "pad_token_id": 0}
    return transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**options, layer_types=LAYERS))


def rwkv() -> Any:
    sizes = {**SIZES, "attention_hidden_size": 32, "context_length": 128, "eos_token_id": None}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes))


LAYERS = ["linear_attention", "full_attention"]
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FAMILIES = {
    "mamba": (mamba, "mamba_selective_scan"),
    "falcon_mamba": (falcon_mamba, "mamba_selective_scan"),
    "jamba": (jamba, "mamba_selective_scan"),
    "qwen3_next": (qwen3_next, "torch_chunk_gated_delta_rule"),
    "kimi_linear": (kimi_linear, "chunk_kimi_delta_attention"),
    "rwkv": (rwkv, "rwkv_linear_attention"),
}
MORE = FAMILIES.keys() - {"mamba"}  # under -m slow
LENGTHS = (9, 40, 66)  # of one chunk and of two, where a family goes by chunks of 64
STEP_BY_STEP = (9, 16)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in FAMILIES]
)
def test_one_graph_serves_all_lengths(family: str) -> None:
    torch.manual_seed(0)
    make, operation = FAMILIES[family]
    lengths = STEP_BY_STEP if operation == "mamba_selective_scan" else LENGTHS
    model = make().eval()
    ids = torch.randint(6, VOCABULARY, (2, lengths[-1]))
    with torch.no_grad():
        model(ids)  # RWKV's first call scales its weights
    with graphplan.simulate({0: "6MiB", 1: "6MiB"}) as machine:
        placed = graphplan.partition(
            model, machine.max_memory, kwargs={"input_ids": ids[:, :9]}, max_batch=2, max_length=lengths[-1]
        )
        targets = [operation.target for operation in placed.plan.graph.operations.values()]
        assert sum(operation in target for target in targets) in (1, 2)
        plans = len(placed.plans)
        for length in lengths:
            with torch.no_grad():
                expected = model(ids[:, :length]).logits
            assert largest_difference(placed(ids[:, :length]).logits, expected) < 1e-5
        for length in (9, lengths[-1] - 6):
            options = {"max_new_tokens": 5, "do_sample": False}
            found = placed.generate(ids[:, :length], **options)
            assert torch.equal(found, model.generate(ids[:, :length], **options))
        assert len(placed.plans) == plans
        for key, budget in machine.max_memory.items():
            if key != "cpu":
                most = max(plan.peak_bytes[key] for plan in placed.plans)
                assert machine.peak_bytes(key) <= most <= budget


class Salient(nn.Module):
    """How much each token matters, by the gradient of the embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            given = self.model.get_input_embeddings()(input_ids).detach().requires_grad_()
            logits = self.model(inputs_embeds=given, use_cache=False).logits
            return torch.autograd.grad(logits.pow(2).sum(), given)[0]


def test_gradients_that_forward_computes_pass_recurrences() -> None:
    model = Salient(falcon_mamba().eval())
    ids = torch.randint(1, VOCABULARY, (2, 5))
    wanted = model(ids)
    with torch.no_grad(), recurrences_as_operations(model):
        assert torch.allclose(model(ids), wanted, atol=1e-5)


def test_eager_runs_while_another_thread_traces() -> None:
    model, ids = build("mamba"), torch.randint(6, VOCABULARY, (2, 9))
    with torch.no_grad():
        expected = model(ids).logits
        with recurrences_as_operations(model):
            assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("family", ["mamba", "rwkv"])
def test_long_texts_are_measured_by_shorter_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, state = torch.empty(2, 32, 50), torch.empty(2, 8, 50)
    if family == "mamba":
        text = {"hidden_states": x, "dt": x, "A": torch.empty(32, 8), "B": state, "C": state}
        arguments = {**text, "D": torch.empty(32), "z": x, "delta_bias": None, "delta_softplus": True}
        name, flags = "mamba_selective_scan", {"return_last_state": True, "use_mambapy": True}
    else:
        name, flags = "rwkv_linear_attention", {"state": None, "return_state": True}
        text = dict.fromkeys(("key", "value"), torch.empty(2, 50, 32))
        arguments = {**dict.fromkeys(("time_decay", "time_first"), torch.empty(32)), **text}
    module = f"transformers.models.{family}.modeling_{family}"
    home, tensors, encoded = Recurrence(name, module, arguments | flags).operands()
    args = ((home, list(map(describe, tensors)), encoded), {})
    leaves, spec = pytree.tree_flatten(args, is_leaf=is_tensor_meta)
    whole = run_fake(RECURRENCES[name], leaves, spec, torch.device("cpu"), FakeTensorMode())
    monkeypatch.setattr(fake_operation, "_LENGTHS", (16, 24))
    assert whole == run_fake(RECURRENCES[name], leaves, spec, torch.device("cpu"), FakeTensorMode())


def test_recurrence_operation_runs_transformers_function() -> None:
    model = build("mamba")
    home = importlib.import_module("transformers.models.mamba.modeling_mamba")
    own = home.mamba_selective_scan
    with torch.no_grad(), recurrences_as_operations(model):
        assert home.mamba_selective_scan is not own
        assert recurrences._original(home.__name__, "mamba_selective_scan") is own
    assert home.mamba_selective_scan is own
