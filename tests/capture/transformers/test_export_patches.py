"""The replacement code of transformers' exporters computes the same as the model's own code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from builders import largest_difference
from every_architecture import build
from torch import nn
from versions import needs

import graphplan
from graphplan.capture.transformers.export_patches import (
    forwards_of,
    have_equal_lengths,
    require_all_weights_read,
)
from graphplan.errors import CaptureError

transformers = pytest.importorskip("transformers")


def agrees(model: Any, placed: Any, inputs: dict[str, Any]) -> bool:
    with torch.no_grad():
        expected = model(**copy.deepcopy(inputs))
    return largest_difference(placed(**copy.deepcopy(inputs)), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm4v_vision", "glm_ocr_vision"])
def test_images_of_several_sizes_are_kept_apart(name: str) -> None:
    # the exporter takes all images to be of one size, and has no norm of glm_ocr's queries and keys
    made = build(name)
    with graphplan.simulate({0: "1GiB", "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(made.model, machine.max_memory, kwargs=copy.deepcopy(made.inputs))
        assert placed.plan.method == "transformers"
        graphs = []
        several = [[1, 2, 4], [1, 4, 6]], [[1, 4, 6], [1, 2, 4]], [[1, 2, 4], [1, 2, 4], [1, 4, 4]]
        for grid in ([[1, 4, 4], [1, 4, 4]], *several, [[1, 4, 4], [1, 2, 4], [1, 2, 4]]):
            assert agrees(made.model, placed, made.inputs | {"grid_thw": torch.tensor(grid)})
            graphs.append(len(placed.plans))
        assert graphs == [1, 2, 2, 3, 3]  # for images of one size, of several, and any number of these


@pytest.mark.slow
@needs("torch", "2.12", "a slice of an open size cannot be traced")
def test_sizes_fixed_by_exporter_are_retraced() -> None:
    config = transformers.PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    torch.manual_seed(0)
    model = transformers.PixtralVisionModel(config).eval()
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "image_sizes": torch.tensor([[32, 32], [32, 32]])}
    with graphplan.simulate({0: "1GiB", "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        for sizes, graphs in (
            ([[32, 32], [32, 32]], 1),
            ([[16, 32], [32, 16]], 2),
            ([[32, 32], [32, 32]], 2),
        ):
            assert agrees(model, placed, inputs | {"image_sizes": torch.tensor(sizes)})
            assert len(placed.plans) == graphs


def test_lengths_of_segments() -> None:
    assert have_equal_lengths(torch.tensor([0, 4, 8]))
    assert have_equal_lengths(torch.tensor([0, 7]))
    assert have_equal_lengths(torch.tensor([0]))
    assert not have_equal_lengths(torch.tensor([0, 4, 7]))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.linear(x))
        return y


def test_replacement_code_omitting_weights_raises() -> None:
    model = nn.Sequential(Normed(), Normed())
    own = forwards_of(model)
    stand_in = {**own, Normed: lambda self, x: self.linear(x)}
    every = {name for name, _ in model.named_parameters()}
    less = every - {"1.norm.weight", "1.norm.bias"}
    require_all_weights_read(model, own, own, less)  # the model's own code may leave out what it likes
    require_all_weights_read(model, own, stand_in, every)
    require_all_weights_read(model, own, stand_in, {n for n in every if n.startswith("0.")})  # never called
    with pytest.raises(CaptureError, match=r"'1' \(Normed\) does not read its 'norm\.weight'"):
        require_all_weights_read(model, own, stand_in, less)
