"""Rebuilt results equal pytree's, and no two calls share objects."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphplan
from graphplan.capture.structure import flatten, leaves_of, register_containers
from graphplan.runtime.module.result_structure import rebuilder

Pair = namedtuple("Pair", "left right")
TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.tuples(inner, inner).map(lambda two: Pair(*two))
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(TREES)
def test_rebuilt_results_equal_the_original(tree: Any) -> None:
    leaves, spec = flatten(tree)
    assert same(rebuilder(spec)(leaves, {}), tree)


def test_dataclasses_and_model_outputs_are_rebuilt() -> None:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    @dataclass
    class Found:
        value: Any
        rest: Any

    for result in (
        Found(1, [2, None]),
        BaseModelOutputWithPast(
            last_hidden_state=torch.ones(1), hidden_states=(torch.zeros(1), torch.ones(2))
        ),
    ):
        register_containers(result)
        leaves, spec = flatten(result)
        again = rebuilder(spec)(leaves, {})
        assert type(again) is type(result)
        assert flatten(again)[1] == spec
        assert all(a is b for a, b in zip(leaves_of(again), leaves, strict=True))
        assert vars(again).keys() == vars(result).keys()


def test_caches_are_new_objects_in_each_call() -> None:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    register_cache_pytrees_for_model(model)
    cache = model(torch.ones(1, 3, dtype=torch.long)).past_key_values
    leaves, spec = flatten({"cache": cache})
    rebuild = rebuilder(spec)
    one, two = rebuild(leaves, {})["cache"], rebuild(leaves, {})["cache"]
    assert type(one) is DynamicCache
    assert flatten({"cache": one})[1] == spec
    assert all(a is b for a, b in zip(leaves_of(one), leaves, strict=True))
    one.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
    one.layers.append(None)
    assert two.get_seq_length() == rebuild(leaves, {})["cache"].get_seq_length() == 3
    assert len(two.layers) == 2
    assert one.get_seq_length() == 4


class Summed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, given: Any) -> Any:
        made = type(given)(last_hidden_state=self.layer(x), hidden_states=(x + given.pooler_output, None))
        made.pooler_output = given.last_hidden_state - given.hidden_states[0]
        return made


def test_model_outputs_keep_the_order_of_their_keys() -> None:
    """Regression: rebuilt outputs had the key order of their class, so ``output[1]`` was another tensor."""
    outputs = pytest.importorskip("transformers.modeling_outputs").BaseModelOutputWithPooling
    model = Summed().eval()

    def given() -> dict[str, Any]:
        one = outputs(last_hidden_state=torch.randn(2, 4), hidden_states=(torch.randn(2, 4), None))
        one.pooler_output = torch.randn(2, 4)
        return {"x": torch.randn(2, 4), "given": one}

    placed = graphplan.partition(model, {"cpu": "1MiB"}, kwargs=given(), strict=True)
    for _ in range(2):
        inputs = given()
        with torch.no_grad():
            found, expected = placed(**inputs), model(**inputs)
        assert list(found) == list(expected) == ["last_hidden_state", "hidden_states", "pooler_output"]
        assert torch.allclose(found[2], expected[2])
        assert torch.allclose(found[1][0], expected[1][0])
        assert found[1][1] is None
