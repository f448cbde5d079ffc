"""Layers that attend to a window keep the window of a cache, not the whole prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import build, inputs_of
from versions import needs

from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.sizes.size_limits import SizeLimits, bounded
from graphplan.capture.tracing import capture
from graphplan.ir.graph import Graph
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.simplify import simplify

pytest.importorskip("transformers")
pytestmark = needs("torch", "2.12", "windows have sizes that nobody knows before")

WINDOW = 16
TOKEN = 3 * 2 * 8 * 4  # bytes of one tensor of a layer: batch, heads, their width, float32


def kept(found: Capture) -> list[torch.fx.Node]:
    """Keys and values that are returned."""
    nodes = [found.outputs[position] for position in found.kept]
    return [
        node for node in nodes if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dim() == 4
    ]


def traced(model_copy: ModelCopy, inputs: dict[str, Any]) -> tuple[Capture, Graph]:
    call = model_copy.bind((), {**inputs, "use_cache": True})
    found = bounded(capture(model_copy, call), call, SizeLimits(), 0.0)
    simplify(found)
    return found, Annotator(found, model_copy.weights).graph()


@pytest.fixture(scope="module")
def gemma3() -> ModelCopy:
    """One layer of a window of 16 tokens, and one of all."""
    return ModelCopy(build("gemma3"))


def after_prompt(gemma3: ModelCopy) -> dict[str, Any]:
    """One token, after a prompt of 60."""
    inputs = inputs_of("gemma3", 3, 60)
    with torch.no_grad():
        cache = gemma3.module(**inputs, use_cache=True).past_key_values
    return {"input_ids": inputs["input_ids"][:, :1], "past_key_values": cache}


def test_cache_windows_do_not_keep_the_prompt(gemma3: ModelCopy) -> None:
    found, graph = traced(gemma3, inputs_of("gemma3", 3, 60))
    assert sorted(str(node.target) for node in kept(found)) == 2 * ["aten.cat.default"] + 2 * [
        "aten.clone.default"
    ]
    sizes = [graph.values[node.name].nbytes // TOKEN for node in kept(found)]
    assert sorted(sizes) == [WINDOW - 1] * 2 + [60] * 2


@pytest.mark.slow
def test_cache_one_token_longer_than_window_is_not_copied(gemma3: ModelCopy) -> None:
    found, graph = traced(gemma3, after_prompt(gemma3))
    assert sorted(str(node.target) for node in kept(found)) == 2 * ["aten.cat.default"] + 2 * [
        "aten.slice.Tensor"
    ]
    states = [state.nbytes // TOKEN for state in graph.cache_inputs if len(state.shape) == 4]
    assert sorted(states) == [WINDOW] * 2 + [60] * 2
