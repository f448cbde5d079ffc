"""Vision-language models whose code branches on image grids: one graph for each grid."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from builders import largest_difference

import graphplan

transformers = pytest.importorskip("transformers")

IMAGE, MERGED = 100, 4  # the token of an image, and the patches that are one
SQUARE, WIDE = (4, 4), (2, 6)


def qwen() -> Any:
    text = {
        "vocab_size": 112,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    ids = {"image_token_id": IMAGE, "video_token_id": 101, "vision_start_token_id": 102}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def asked(*grids: tuple[int, int], words: int = 4) -> dict[str, torch.Tensor]:
    """A text about images of so many patches."""
    counts = [height * width // MERGED for height, width in grids]
    images = (102 if at == 0 else 103 if at > n else IMAGE for n in counts for at in range(n + 2))
    ids = torch.cat([torch.tensor([[*images]]), torch.randint(3, 90, (1, words))], dim=1)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(sum(counts) * MERGED, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, *grid] for grid in grids]),
    }


@pytest.mark.slow
@torch.no_grad()
def test_a_grid_has_a_graph(recwarn: pytest.WarningsRecorder) -> None:
    model = qwen()
    with graphplan.simulate({0: "100KiB", "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(qwen(), machine.max_memory, kwargs=asked(SQUARE, WIDE), strict=True)
        for grids, plans in ((SQUARE, WIDE), 1), ((WIDE, SQUARE), 2), ((SQUARE, WIDE), 2):
            inputs = asked(*grids)
            assert largest_difference(placed(**inputs).logits, model(**inputs).logits) < 1e-5
            assert len(placed.plans) == plans
    assert not [one for one in recwarn if issubclass(one.category, graphplan.GraphplanWarning)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_text_for_known_image_grid_reuses_graph(caplog: pytest.LogCaptureFixture) -> None:
    model = qwen()
    placed = graphplan.partition(qwen(), {"cpu": "1GiB"}, kwargs=asked(SQUARE, WIDE), strict=True)
    flags = {"max_new_tokens": 3, "do_sample": False}
    counts = []
    for wide, words in (WIDE, 4), (WIDE, 6), (WIDE, 5), (SQUARE, 5), (SQUARE, 4):
        inputs = asked(SQUARE, wide, words=words)
        caplog.clear()
        with caplog.at_level(logging.INFO, "graphplan"):
            assert torch.equal(placed.generate(**inputs, **flags), model.generate(**inputs, **flags))
        counts.append(caplog.text.count("capturing another graph"))
    assert counts[2] == counts[4] == 0
