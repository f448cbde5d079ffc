"""Changes that a call makes to the caller's objects: caches, lists, dicts and objects of any class."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from builders import largest_difference
from cases import in_turn
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
from transformers.modeling_outputs import BaseModelOutput

import graphplan

TEXT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
ROOM = {0: "120KiB", 1: "120KiB"}
IDS = torch.arange(10).reshape(2, 5) + 3


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {**TEXT, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **HEADS, eos_token_id=None, pad_token_id=0)).eval()


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


class Calling(nn.Module):
    """Calls a model with caches in some form, and returns them in some form."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.model, self.call = llama(), call

    def forward(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.model, ids, *args, **kwargs)


def logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return found


@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # transformers 5.24 renames it
@pytest.mark.slow
@pytest.mark.parametrize("form", ["position", "dict"])
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_cache_in_unnamed_argument_is_extended(form: str) -> None:
    in_dict = form == "dict"
    model = Calling(lambda m, ids, cache: logits(m, ids, cache["c"] if in_dict else cache)).eval()
    caches = DynamicCache(), DynamicCache()
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(
            model,
            {**machine.max_memory, "cpu": "1MiB"},
            (IDS, {"c": DynamicCache()} if in_dict else DynamicCache()),
        )
        for ids in (IDS, IDS[:, :1]):
            mine, other = ({"c": cache} if in_dict else cache for cache in caches)
            assert largest_difference(placed(ids, mine), model(ids, other)) < 1e-5
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 6


def test_returned_cache_is_the_given_object() -> None:
    model = Calling(lambda m, ids, cache: [logits(m, ids, cache), {"in": (cache,)}]).eval()
    cache = DynamicCache()
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (IDS,), {"cache": DynamicCache()})
        assert placed(IDS, cache=cache)[1]["in"][0] is cache
    assert cache.get_seq_length() == 5


@pytest.mark.slow
def test_one_cache_under_two_names_raises() -> None:
    model = Calling(lambda m, ids, a, b: logits(m, ids, a) + logits(m, ids, b)).eval()
    caches = {"a": DynamicCache(), "b": DynamicCache()}
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (IDS,), caches)
        one = DynamicCache()
        with pytest.raises(graphplan.InputError, match="a and b are one object"):
            placed(IDS, a=one, b=one)


class Writes(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(16, 16), write

    def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        self.write(state, found)
        return found


def _rename(state: Any, _: Any) -> None:
    state["b"] = state.pop("a")


def _append(state: Any, found: torch.Tensor) -> None:
    state["n"] += 1
    state["inner"].append(found)


def _of_output(state: Any, found: torch.Tensor) -> None:
    state["last_hidden_state"] = found


@pytest.mark.parametrize(
    ("write", "make"),
    [
        (_rename, lambda: {"a": torch.zeros(2)}),
        (_append, lambda: {"n": 2, "inner": [torch.zeros(2)]}),
        (_of_output, lambda: BaseModelOutput(last_hidden_state=torch.zeros(2))),
    ],
)
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_module_by_module_writes_reach_the_callers_objects(write: Any, make: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = Writes(write)

        def forward(self, x: torch.Tensor, state: Any) -> torch.Tensor:
            found: torch.Tensor = self.inner(x, state)
            return found if float(found.sum()) < 1e9 else x  # no graph

    model, x, mine, other = Outer(), torch.ones(2, 16), make(), make()
    kept = mine.get("inner")
    with graphplan.simulate({0: "64KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, {**machine.max_memory, "cpu": "1MiB"}, (x, make()))
        for _ in range(1 if write is _rename else 2):
            assert largest_difference(placed(x, mine), model(x, other)) < 1e-5
    assert list(mine) == list(other)
    assert mine.get("inner") is kept
    assert kept is None or len(kept) == len(other["inner"]) == 3


def test_uncopyable_argument_raises_and_is_unchanged() -> None:
    class Locked(Holder):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    state = Locked()
    with pytest.raises(graphplan.InputError, match=r"must be copied \(state, Locked\).*lock"):
        graphplan.partition(Keeps(), {"cpu": "1GiB"}, (torch.ones(2, 16), state))
    assert state.h is None


class Logs(LlamaForCausalLM):
    """A model of transformers with arguments of its own."""

    def forward(self, input_ids: torch.Tensor, log: list[Any], seen: dict[str, Any], **kwargs: Any) -> Any:
        found = super().forward(input_ids, **kwargs)
        log.append(found.logits[:, -1])
        seen["count"] = seen.get("count", 0) + 1
        return found


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`past_key_values` is deprecated:FutureWarning"
)  # transformers 5.24 renames it
def test_models_of_transformers_change_lists_and_dicts_too() -> None:
    model = Logs(llama().config).eval()
    states: list[dict[str, Any]] = [{"log": [], "seen": {}} for _ in range(3)]
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS, **states[0]})
        for run, state in zip((placed, model), states[1:], strict=True):
            run.generate(IDS, max_new_tokens=2, do_sample=False, **state)
            run(IDS, past_key_values=DynamicCache(), **state)
    mine, others = (state["log"] for state in states[1:])
    assert len(mine) == len(others) == 3
    assert all(largest_difference(a, b) < 1e-5 for a, b in zip(mine, others, strict=True))
    assert [state["seen"] for state in states] == [{}, {"count": 3}, {"count": 3}]


@pytest.mark.slow
def test_hidden_states_are_once_in_each_graph() -> None:
    model = llama()
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS})
        for more in ({}, {"attention_mask": torch.ones_like(IDS)}, {"use_cache": False}):
            asked = {"input_ids": IDS, "output_hidden_states": True, **more}
            found, expected = placed(**asked).hidden_states, model(**asked).hidden_states
            assert len(found) == len(expected) == 2
            assert largest_difference(found, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not support it:graphplan.GraphplanWarning")
@pytest.mark.parametrize("more", [{"return_dict": False}, {"labels": IDS[:, :3]}], ids=list)
def test_cache_is_extended_by_calls_the_exporter_refuses(more: dict[str, Any]) -> None:
    model = llama()
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS})
        last = []
        for called, cache in ((placed, DynamicCache()), (model, DynamicCache())):
            called(input_ids=IDS, past_key_values=cache)
            called(input_ids=IDS[:, :3], past_key_values=cache, **more)
            assert cache.get_seq_length() == 8
            last.append(called(input_ids=IDS[:, :1], past_key_values=cache).logits)
        assert largest_difference(*last) < 1e-5


@pytest.mark.slow
def test_a_cache_of_a_model_inside_another_is_extended() -> None:
    model, caches = Wrapped().eval(), (DynamicCache(), DynamicCache())
    with graphplan.simulate(ROOM) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (IDS,))
        for ids in (IDS, IDS[:, :1], IDS[:, 1:2]):
            assert largest_difference(placed(ids, caches[0]), model(ids, caches[1])) < 1e-5
        assert caches[0].get_seq_length() == caches[1].get_seq_length() == 7
        assert placed.plan.method == "export"


@pytest.mark.parametrize(
    ("make", "is_example"),
    in_turn([lambda: [torch.zeros(2, 16)], lambda: {"h": torch.zeros(2, 16)}, Holder], [False, True]),
)
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_replaced_items_of_an_argument_are_kept_after_calls(make: Any, is_example: bool) -> None:
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


@pytest.mark.filterwarnings("ignore:.*data-dependent size:graphplan.GraphplanWarning")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_beams_of_states_in_dicts(family: str) -> None:
    torch.manual_seed(0)
    kept = {"eos_token_id": None, "pad_token_id": 0}
    if family == "mamba2":
        small = {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4}
        config: Any = Mamba2Config(vocab_size=64, hidden_size=16, num_hidden_layers=1, **small, **kept)
        model: Any = Mamba2ForCausalLM(config).eval()
    else:
        small = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
        layers = {"attn_layer_indices": [1], "mamba_chunk_size": 4, "mamba_expand": 2}
        model = BambaForCausalLM(BambaConfig(**TEXT, **HEADS, **small, **layers, **kept)).eval()
    with graphplan.simulate({0: "160KiB", 1: "160KiB"}) as machine:
        placed = graphplan.partition(model, {**machine.max_memory, "cpu": "8MiB"}, kwargs={"input_ids": IDS})
        asked = {"max_new_tokens": 3, "num_beams": 2, "do_sample": False}
        assert torch.equal(placed.generate(IDS, **asked), model.generate(IDS, **asked))
