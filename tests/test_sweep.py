"""The sweep of every architecture: what it builds, and what it says of one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from every_architecture import LARGEST, NotBuiltError, build, names
from sweep import page, summary, verdict
from sweep_one import CONFIGURATIONS, difference, run


def test_every_model_type_is_swept() -> None:
    assert {"llama", "t5", "whisper", "mamba", "clip", "segformer", "qwen2_vl"} <= set(names())
    assert len(names()) > 600


@pytest.mark.parametrize(
    "name", ["qwen2_vl", pytest.param("swin", marks=pytest.mark.slow), "wav2vec2", "patchtst"]
)
def test_models_are_small_and_run(name: str) -> None:
    made = build(name)
    assert 0 < sum(p.numel() for p in made.model.parameters()) < LARGEST
    with torch.no_grad():
        assert difference(made.model(**made.inputs), made.result) == 0


def test_vision_language_inputs_have_image_tokens() -> None:
    made = build("llava")
    token = made.model.config.image_token_id
    assert {"input_ids", "pixel_values"} <= set(made.inputs)
    assert (made.inputs["input_ids"] == token).any()


def test_one_that_cannot_be_built_says_why() -> None:
    with pytest.raises(NotBuiltError, match="timm"):
        build("detr")


@pytest.mark.slow
def test_an_architecture_is_told_of_as_it_goes() -> None:
    told: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        run("opt", CONFIGURATIONS[3:5], thorough=False, tell=lambda record: told.append(dict(record)))
    last = told[-1]
    assert verdict(last) == "equal"
    assert [row["accelerators"] for row in last["rows"]] == [2, 2]
    figures = summary([last, {"name": "x", "built": False, "ran": False, "rows": [], "why": "no model"}])
    assert (figures["architectures"], figures["ran"], figures["passed"]) == (2, 1, 1)
    assert "| opt | OPTForCausalLM |" in page([last])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"built": True, "ran": False, "rows": []}, "does not run"),
        ({"built": True, "ran": True, "rows": [], "random": "two calls differ"}, "random"),
        ({"built": True, "ran": True, "rows": []}, "error"),
        (
            {"built": True, "ran": True, "rows": [{"outcome": "equal"}, {"outcome": "infeasible"}]},
            "infeasible",
        ),
        (
            {"built": True, "ran": True, "rows": [{"outcome": "equal"}, {"outcome": "differs by 1"}]},
            "differs by 1",
        ),
    ],
)
def test_verdicts(record: dict[str, Any], said: str) -> None:
    assert verdict(record) == said


def test_differences_are_of_the_largest_value() -> None:
    a = {"x": torch.tensor([100.0, 1.0]), "y": [torch.tensor([float("nan")])]}
    b = {"x": torch.tensor([101.0, 1.0]), "y": [torch.tensor([float("nan")])]}
    assert difference(a, a) == 0
    assert difference(a, b) == pytest.approx(1 / 101)
    assert difference(a, {"x": a["x"]}) == float("inf")
