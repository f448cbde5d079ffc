"""Object detection: a placed detector with post-processing equals eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphplan

SIZE = (64, 96)  # of the images


def yolos(transformers: Any) -> Any:
    config = transformers.YolosConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=list(SIZE),
        num_detection_tokens=10,
        num_labels=5,
    )
    return transformers.YolosForObjectDetection(config)


def detr(transformers: Any) -> Any:
    sizes = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "out_features": ["stage4"]}
    backbone = transformers.ResNetConfig(embedding_size=8, layer_type="basic", **sizes)
    each = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
    both = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in each.items()}
    config = transformers.DetrConfig(
        backbone_config=backbone, d_model=32, num_queries=10, num_labels=5, **both
    )
    return transformers.DetrForObjectDetection(config)


@pytest.mark.parametrize("build", [yolos, pytest.param(detr, marks=pytest.mark.slow)])
def test_boxes_equal_eager(build: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pil = pytest.importorskip("transformers.models.detr.image_processing_pil_detr")
    torch.manual_seed(0)
    model, images = build(transformers).eval(), torch.randn(2, 3, *SIZE)
    processor = pil.DetrImageProcessorPil()

    def found(detector: Any, pixels: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        with torch.no_grad():
            outputs = detector(pixel_values=pixels)
        sizes = [SIZE] * len(pixels)
        boxes: list[dict[str, torch.Tensor]] = processor.post_process_object_detection(
            outputs, threshold=0.0, target_sizes=sizes
        )
        return boxes

    with graphplan.simulate({0: "4MiB", 1: "4MiB"}) as machine:
        placed = graphplan.partition(
            model, machine.max_memory, kwargs={"pixel_values": images}, strict=True, balance=True
        )
        assert {0, 1} <= set(placed.plan.placement.values())
        for pixels in (images, images.flip(0)):
            torch.testing.assert_close(found(placed, pixels), found(model, pixels), rtol=1e-4, atol=1e-4)
        assert len(placed.graphplan.plans) == 1
        assert all(machine.peak_bytes(index) <= placed.plan.peak_bytes[index] for index in (0, 1))
