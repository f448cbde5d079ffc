"""Masks in traces: for attention that is not causal by itself, and masks made by ``torch.vmap``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from builders import largest_difference
from every_architecture import build
from language_models import TEXT
from torch import nn

import graphplan

transformers = pytest.importorskip("transformers")

ROOM = {0: "1GiB", "cpu": "1GiB"}
LENGTH = 12


def paddings(ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """No mask, one that pads nothing, one that pads."""
    ones = torch.ones_like(ids)
    padded = ones.clone()
    padded[0, :3] = 0
    return [{}, {"attention_mask": ones}, {"attention_mask": padded}]


def calls(name: str) -> tuple[Any, list[dict[str, Any]]]:
    made = build(name)
    base = {key: value for key, value in made.inputs.items() if key != "attention_mask"}
    return made.model, [base | mask for mask in paddings(base["input_ids"])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("aimv2", {}),
        ("paligemma", {}),
        ("paligemma", {"use_cache": False}),
    ],
)
def test_tokens_see_each_other_where_eager_lets_them(name: str, flags: dict[str, Any]) -> None:
    # with a causal mask that eager leaves out, both differed by 0.07 of the largest value
    model, given = calls(name)
    with graphplan.simulate(ROOM) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=copy.deepcopy(given[1] | flags))
        assert placed.plan.method == "transformers"
        for inputs in given:
            with torch.no_grad():
                expected = model(**copy.deepcopy(inputs | flags))
            assert largest_difference(placed(**copy.deepcopy(inputs | flags)), expected) < 1e-5
        assert len(placed.plans) == 2  # with a mask and without: its values are not part of the structure


@pytest.mark.slow
def test_composite_model_is_traced_with_call_flags() -> None:
    # use_cache=False did not reach the configuration of PaliGemma's text model
    model, given = calls("paligemma")
    inputs = given[1] | {"use_cache": False}
    with graphplan.simulate(ROOM) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=copy.deepcopy(inputs))
        assert "past_key_values" not in placed(**copy.deepcopy(inputs))


@pytest.mark.slow
def test_causal_attention_without_mask_stays_causal() -> None:
    """Moonshine marks its attention as not causal if there is a mask, which eager mode omits."""
    made = build("moonshine")
    with graphplan.simulate(ROOM) as machine:
        placed = graphplan.partition(made.model, machine.max_memory, kwargs=copy.deepcopy(made.inputs))
        assert placed.plan.method == "transformers"
        assert largest_difference(placed(**copy.deepcopy(made.inputs)), made.result) < 1e-5


def masks_of(plan: graphplan.Plan) -> list[tuple[str, ...]]:
    """The arguments of each attention besides query, key and value."""
    operations = plan.graph.operations.values()
    return [one.inputs[3:] for one in operations if one.type == "scaled_dot_product_attention"]


SHORT, PACKED, LONG = "short", "two texts in a row", "longer than the window"
ALL = (SHORT, PACKED, LONG)


@pytest.mark.parametrize(
    ("train", "window", "kinds"),
    [
        pytest.param(False, None, (SHORT, PACKED), marks=pytest.mark.slow),
        (False, 8, (SHORT,)),
        (True, 8, (LONG,)),
        pytest.param(False, None, ALL, marks=pytest.mark.slow),
        pytest.param(False, 8, ALL, marks=pytest.mark.slow),
        pytest.param(True, 8, ALL, marks=pytest.mark.slow),
        pytest.param(True, None, ALL, marks=pytest.mark.slow),
    ],
)
def test_causal_attention_has_no_mask_where_eager_has_none(
    train: bool, window: int | None, kinds: Sequence[str]
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": window}
    config = transformers.MistralConfig(num_hidden_layers=1, **sizes, **heads)
    model = transformers.MistralForCausalLM(config).train(train)
    ids, positions = torch.randint(0, 50, (2, 16)), torch.arange(3).repeat(2, 5)
    below = train or window is None  # a graph of any length is of those above the window too
    known: dict[str, tuple[int, dict[str, torch.Tensor], bool]] = {
        SHORT: (6, {}, not below),
        PACKED: (6, {"position_ids": positions[:, :6]}, True),
        LONG: (16, {}, window is not None),
    }
    for length, given, masked in map(known.__getitem__, kinds):
        inputs: dict[str, Any] = {"input_ids": ids[:, :length], "use_cache": False} | given
        inputs |= {"labels": inputs["input_ids"]} if train else {}
        placed = graphplan.partition(copy.deepcopy(model), {"cpu": "1GiB"}, kwargs=inputs, train=train)
        assert [bool(mask) for mask in masks_of(placed.plan)] == [masked]
        shorter = {k: v[:, 1:] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        with torch.set_grad_enabled(train):
            for one in [inputs] if train else [inputs, shorter]:
                assert largest_difference(placed(**one).logits, model(**one).logits) < 1e-5


@pytest.mark.parametrize("window", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_full_attention_without_padding_has_no_mask(window: int | None) -> None:
    """Regression: the mask had all pairs of tokens, as if the padding were unknown."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "pad_token_id": 0}
    layers: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 4}
    if window is None:
        model = transformers.BertModel(transformers.BertConfig(**sizes, **layers)).eval()
    else:
        local = {"local_attention": window, "layer_types": ["sliding_attention"]}
        model = transformers.ModernBertModel(transformers.ModernBertConfig(**sizes, **layers, **local)).eval()
    ids = torch.randint(1, 50, (2, 16))
    for mask, masked in (({}, window is not None), ({"attention_mask": torch.ones_like(ids)}, True)):
        inputs = {"input_ids": ids} | mask
        placed = graphplan.partition(model, {"cpu": "1GiB"}, kwargs=inputs)
        assert [bool(found) for found in masks_of(placed.plan)] == [masked]
        with torch.no_grad():
            for length in (16, 3):
                shorter = {name: value[:, :length] for name, value in inputs.items()}
                assert largest_difference(placed(**shorter)[0], model(**shorter)[0]) < 1e-5


@pytest.mark.slow
def test_length_reducing_layers_have_no_full_mask() -> None:
    """Regression: Informer's encoder halves the length between layers, so a full mask did not fit."""
    torch.manual_seed(0)
    sizes = {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    config = transformers.InformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2, **sizes
    )
    model = transformers.InformerModel(config).eval()
    past, times = torch.rand(2, 10), torch.rand(2, 10, 2)
    inputs = {"past_values": past, "past_time_features": times, "past_observed_mask": past.gt(0.1)}
    inputs |= {"future_values": torch.rand(2, 4), "future_time_features": torch.rand(2, 4, 2)}
    placed = graphplan.partition(model, {"cpu": "1GiB"}, kwargs=inputs, strict=True)
    torch.manual_seed(1)
    with torch.no_grad():
        expected = model(**inputs)[0]
    torch.manual_seed(1)
    assert largest_difference(placed(**inputs)[0], expected) < 1e-5


def gemma3(layers: list[str]) -> Any:
    """With images, whose tokens see each other."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    image = {**sizes, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4, "vision_use_head": False}
    kinds = {"num_hidden_layers": len(layers), "layer_types": layers}
    text = {**TEXT, **kinds, "head_dim": 8, "sliding_window": 8}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=image, mm_tokens_per_image=4, image_token_index=5
    )
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [["sliding_attention"], ["sliding_attention", "full_attention"]])
def test_image_tokens_attend_bidirectionally_in_graph(layers: list[str]) -> None:
    model, ids = gemma3(layers), torch.randint(6, 96, (2, LENGTH))
    ids[:, 2:6] = 5
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": (ids == 5).long()}
    inputs["attention_mask"][1, :2] = 0
    inputs["pixel_values"] = torch.randn(2, 3, 16, 16)
    expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    with graphplan.simulate({0: "256KiB", 1: "256KiB", "cpu": "1GiB"}) as machine, torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error", graphplan.GraphplanWarning)  # it has a graph
            placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        assert torch.allclose(placed(**inputs).logits, model(**inputs).logits, atol=1e-5)
        assert torch.equal(placed.generate(**inputs, max_new_tokens=4, do_sample=False), expected)


class Masked(transformers.PreTrainedModel):  # type: ignore[misc]  # an optional package
    """Returns the mask that a function of four numbers, and of a table of tokens, makes."""

    config_class = transformers.LlamaConfig

    def __init__(self, sees: Callable[..., torch.Tensor]) -> None:
        super().__init__(transformers.LlamaConfig(**TEXT))
        self.sees, self.fc = sees, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        def sees(*numbers: torch.Tensor) -> torch.Tensor:
            return self.sees(table, *numbers)

        embedded, allowed = self.fc(x), transformers.masking_utils.create_causal_mask
        mask = allowed(self.config, embedded, None, None, or_mask_function=sees)
        return (mask >= 0).float() @ embedded[:, None]


@pytest.mark.parametrize(
    "sees",
    [
        lambda table, b, _h, q, k: (table[b, q] == table[b, k]) & (table[b, q] > 0),
        lambda *_: torch.tensor(True),
        lambda table, b, _h, q, _k: table[b][q] > 0,  # not broadcast: torch.vmap is traced
        pytest.param(
            lambda table, b, _h, q, k: torch.where(table.sum(1)[b] > 0, (q - k).abs() < 2, q == 0),
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda table, b, _h, _q, k: table[b].sum() > k, marks=pytest.mark.slow),
    ],
)
def test_a_mask_is_broadcast_where_that_is_the_same(sees: Callable[..., torch.Tensor]) -> None:
    model = Masked(sees).eval()
    with graphplan.simulate({0: "1MiB", "cpu": "1GiB"}) as machine, torch.no_grad():
        for batch, length in ((2, LENGTH), (4, 4)):
            x, table = torch.randn(batch, length, 8), torch.randint(-1, 3, (batch, length))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                placed = graphplan.partition(model, machine.max_memory, (x, table))
            assert torch.allclose(placed(x, table), model(x, table), atol=1e-5)
            assert placed.plan.method != "hooks"
