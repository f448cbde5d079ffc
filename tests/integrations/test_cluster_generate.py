"""``generate()`` over several machines: invalid requests raise before any communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from architectures import TABLE

import graphplan
from graphplan.integrations.transformers.cluster_generate import generator_of


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a forward pass")


@pytest.mark.parametrize("stem", ["Llama", "T5"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "give num_beams=1"),
        ({"output_scores": True, "return_dict_in_generate": True}, r"output_scores: generate\(\) over"),
    ],
)
def test_generation_modes_that_need_all_scores_raise(stem: str, options: dict[str, Any], said: str) -> None:
    (architecture,) = [one for one in TABLE if one.stem == stem]
    model, inputs = architecture.build()
    generate = generator_of(model, never, 0, Counter())
    assert generate is not None
    start = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
    with pytest.raises(graphplan.InputError, match=said):
        generate(inputs["input_ids"], max_new_tokens=2, **start, **options)


def test_model_without_generation_has_no_generate() -> None:
    assert generator_of(torch.nn.Linear(2, 2), never, 0, Counter()) is None
