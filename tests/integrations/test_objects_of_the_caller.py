"""What a call changes of the caller's objects: caches, lists, dicts and objects of any class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
)

import graphplan

TEXT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
ROOM = {0: "120KiB", 1: "120KiB"}
IDS = torch.arange(10).reshape(2, 5) + 3


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TEXT, **HEADS, eos_token_id=None, pad_token_id=0)).eval()


class Wrapped(nn.Module):
    """A model of a user's own around one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        return 2 * logits


class Keeps(nn.Module):
    """Keeps the sum of what it has computed, in what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, state: Any = None) -> torch.Tensor:
        h = self.first(x)
        if isinstance(state, list | dict):
            key: Any = 0 if isinstance(state, list) else "h"
            state[key] = h = state[key] + h
        elif state is not None:
            state.h = h = h if state.h is None else state.h + h
        found: torch.Tensor = self.last(h)
        return found


class Holder:
    """An object of a class that nobody else knows."""

    def __init__(self) -> None:
        self.h: Any = None


def test_each_graph_has_the_hidden_states_once() -> None:
    model = llama()
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS})
        for more in ({}, {"attention_mask": torch.ones_like(IDS)}, {"use_cache": False}):
            asked = {"input_ids": IDS, "output_hidden_states": True, **more}
            found, expected = placed(**asked).hidden_states, model(**asked).hidden_states
            assert len(found) == len(expected) == 3
            assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize("more", [{"labels": IDS[:, :3]}, {"return_dict": False}])
@pytest.mark.filterwarnings("ignore:.*does not take it:graphplan.GraphplanWarning")
def test_a_cache_is_extended_by_calls_that_the_exporter_refuses(more: dict[str, Any]) -> None:
    model, caches = llama(), (DynamicCache(), DynamicCache())
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS})
        last = []
        for called, cache in zip((placed, model), caches, strict=True):
            called(input_ids=IDS, past_key_values=cache)
            called(input_ids=IDS[:, :3], past_key_values=cache, **more)
            assert cache.get_seq_length() == 8
            last.append(called(input_ids=IDS[:, :1], past_key_values=cache).logits)
        assert largest_difference(*last) < 1e-5


def test_a_cache_of_a_model_inside_another_is_extended() -> None:
    model, caches = Wrapped().eval(), (DynamicCache(), DynamicCache())
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (IDS,))
        for ids in (IDS, IDS[:, :1], IDS[:, 1:2]):
            assert largest_difference(placed(ids, caches[0]), model(ids, caches[1])) < 1e-5
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == 7
        assert placed.plan.method == "export"


@pytest.mark.parametrize("make", [lambda: [torch.zeros(2, 16)], lambda: {"h": torch.zeros(2, 16)}, Holder])
@pytest.mark.parametrize("is_example", [False, True])
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_what_replaces_a_part_of_an_argument_is_there_after_each_call(make: Any, is_example: bool) -> None:
    torch.manual_seed(0)
    model, x, mine, other = Keeps(), torch.randn(2, 16), make(), make()
    before = str(vars(mine)) if isinstance(mine, Holder) else str(mine)
    with graphplan.simulate({0: "2KiB", 1: "2KiB"}) as machine, torch.no_grad():
        args = (x, mine) if is_example else (x,)
        placed = graphplan.partition(model, {**machine.max_memory, "cpu": "1MiB"}, args)
        assert (str(vars(mine)) if isinstance(mine, Holder) else str(mine)) == before
        for _ in range(3):
            found = placed(x, mine)
            assert found.device.type == "cpu"
            assert largest_difference(found, model(x, other)) < 1e-5
    now = [
        one.h if isinstance(one, Holder) else one[0 if isinstance(one, list) else "h"]
        for one in (mine, other)
    ]
    assert largest_difference(now[0].cpu(), now[1]) < 1e-5


@pytest.mark.filterwarnings("ignore:a size that only the data decides:graphplan.GraphplanWarning")
@pytest.mark.parametrize("family", ["mamba2", pytest.param("bamba", marks=pytest.mark.slow)])
def test_beams_of_states_in_dicts(family: str) -> None:
    torch.manual_seed(0)
    kept = {"eos_token_id": None, "pad_token_id": 0}
    if family == "mamba2":
        small = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4}
        config: Any = Mamba2Config(vocab_size=64, hidden_size=16, num_hidden_layers=2, **small, **kept)
        model: Any = Mamba2ForCausalLM(config).eval()
    else:
        small = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
        layers = {"attn_layer_indices": [1], "mamba_chunk_size": 4, "mamba_expand": 2}
        model = BambaForCausalLM(BambaConfig(**TEXT, **HEADS, **small, **layers, **kept)).eval()
    with graphplan.simulate({0: "160KiB", 1: "160KiB"}) as machine:
        placed = graphplan.partition(model, {**machine.max_memory, "cpu": "8MiB"}, kwargs={"input_ids": IDS})
        asked = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
        assert torch.equal(placed.generate(IDS, **asked), model.generate(IDS, **asked))
