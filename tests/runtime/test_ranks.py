"""Models over real processes of a gloo group on loopback, beside eager."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from ranks import Ranks, said

# 32 architectures, each on two ranks or on three; on both under -m slow
TWO = (
    "Llama", "Gemma3", "GPT2", "Bloom", "Mixtral", "Mamba", "Bert", "DebertaV2",
    "ModernBert", "T5", "ViT", "Segformer", "ResNet", "Whisper", "Wav2Vec2", "CLIP",
)  # fmt: skip
THREE = (
    "OPT", "GPTNeoX", "Qwen2Moe", "RecurrentGemma", "Albert", "FNet", "Bart", "Marian",
    "Swin", "ConvNext", "MobileNetV2", "Hiera", "AST", "Siglip", "Mistral", "Qwen3",
)  # fmt: skip
PLAIN = ("UNet", "DenseNet", "Branches", "SharedWeight", "Views")
GENERATE = ("Llama", "Gemma3", "Mixtral")
ALL_GENERATE = (*GENERATE, "GPT2", "OPT", "GPTNeoX", "Qwen2Moe", "Bloom", "Mistral", "Qwen3", "Gemma2")


def check_equal(ranks: int, names: Sequence[str], *arguments: str) -> None:
    """Every rank says of each model that it is divided and does as eager."""
    with Ranks(ranks, *arguments) as group:
        for output in group.outputs():
            lines = {line.partition(":")[0]: line for line in said(output)}
            assert set(lines) == set(names), output[-2000:]
            for line in lines.values():
                found = re.search(r": (\d)/\d stages, same type True, difference (\S+)$", line)
                assert found is not None, line
                assert int(found[1]) > 1, line
                assert float(found[2]) < 1e-5, line


def test_architectures_on_two_ranks() -> None:
    check_equal(2, TWO, "architectures", *TWO)


def test_architectures_on_three_ranks() -> None:
    check_equal(3, THREE, "architectures", *THREE)


@pytest.mark.parametrize("ranks", [2, 3])
def test_plain_modules_with_skips(ranks: int) -> None:
    check_equal(ranks, PLAIN, "plain")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stems"), [(2, THREE), (3, TWO)])
def test_the_other_architectures(ranks: int, stems: Sequence[str]) -> None:
    check_equal(ranks, stems, "architectures", *stems)


def check_generation(ranks: int, stems: Sequence[str]) -> None:
    """Tokens are eager's on every rank; the last sends only tokens, the others only what crosses cuts."""
    with Ranks(ranks, "generation", *stems) as group:
        for rank, output in enumerate(group.outputs()):
            lines = {line.partition(":")[0]: line for line in said(output)}
            assert set(lines) == set(stems), output[-2000:]
            for line in lines.values():
                assert "greedy True, sampled True" in line
                sent = line.partition("; sent ")[2]
                assert ("tokens" in sent) == (rank == ranks - 1), line
                assert "logits" not in sent


def test_generation_on_two_ranks() -> None:
    check_generation(2, GENERATE)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_generation_of_more_families(ranks: int) -> None:
    check_generation(ranks, ALL_GENERATE)


@pytest.mark.parametrize("kind", ["dies", "stops"])
def test_a_rank_that_does_not_answer_is_named(kind: str) -> None:
    with Ranks(3, "fault", kind, "1", seconds=60) as group:
        first, last = (said(output)[-1] for output in group.outputs([0, 2]))
    assert re.match(r"ClusterError: rank 0 \(stage 0 of 3\) waited for rank 1 to take 'linear_\d'", first)
    assert re.match(r"ClusterError: rank 2 \(stage 2 of 3\) waited for rank 1 to send 'linear_\d'", last)


@pytest.mark.parametrize(
    ("kind", "rank", "what"),
    [
        ("budgets", "1", "ranks 0, 2 and rank 1 differ in machines=, or another argument"),
        ("code", "2", "ranks 0, 1 and rank 2 differ in the traced graph"),
        ("weights", "0", "rank 0 and ranks 1, 2 differ in the weights' names and sizes"),
    ],
)
def test_what_differs_between_ranks_is_found_at_the_start(kind: str, rank: str, what: str) -> None:
    with Ranks(3, "fault", kind, rank, seconds=60) as group:
        for output in group.outputs():
            assert f"ClusterError: {what}" in said(output)[-1]


def test_calls_of_other_sizes_on_one_rank_are_found() -> None:
    with Ranks(2, "fault", "forms", "0", seconds=60) as group:
        outputs = group.outputs()
    assert "rank 1 was called with inputs of other names or sizes than rank 0" in said(outputs[1])[-1]


def test_weights_come_from_rank_0_or_from_a_checkpoint() -> None:
    with Ranks(2, "weights") as group:
        for output in group.outputs():
            assert said(output) == ["sent: equal True", "read: equal True", "loaded: equal True"], output[
                -2000:
            ]


def test_a_training_step_has_the_gradients_of_eager() -> None:
    with Ranks(3, "training") as group:
        for output in group.outputs():
            (line,) = said(output)
            assert float(line.rpartition(" ")[2]) < 1e-5, line
