"""Masks that transformers makes by ``torch.vmap``, in graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import TEXT
from torch import nn

import graphplan

transformers = pytest.importorskip("transformers")

LENGTH = 12


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
def test_tokens_of_an_image_see_each_other_in_a_graph(layers: list[str]) -> None:
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
    ("sees", "has_graph"),
    [
        (lambda table, b, _h, q, k: (table[b, q] == table[b, k]) & (table[b, q] > 0), True),
        (lambda *_: torch.tensor(True), True),
        (lambda table, b, _h, q, _k: table[b][q] > 0, False),
        pytest.param(
            lambda table, b, _h, q, k: torch.where(table.sum(1)[b] > 0, (q - k).abs() < 2, q == 0),
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda table, b, _h, _q, k: table[b].sum() > k, False, marks=pytest.mark.slow),
    ],
)
def test_a_mask_is_broadcast_where_that_is_the_same(
    sees: Callable[..., torch.Tensor], has_graph: bool
) -> None:
    model = Masked(sees).eval()
    with graphplan.simulate({0: "1MiB", "cpu": "1GiB"}) as machine, torch.no_grad():
        for batch, length in ((2, LENGTH), (4, 4)):
            x, table = torch.randn(batch, length, 8), torch.randint(-1, 3, (batch, length))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                placed = graphplan.partition(model, machine.max_memory, (x, table))
            assert torch.allclose(placed(x, table), model(x, table), atol=1e-5)
            assert (placed.plan.method != "hooks") is has_graph
