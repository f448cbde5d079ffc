"""The loss of a transformers model is traced like the rest of ``forward``."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from builders import largest_difference
from language_models import VOCABULARY, build

import graphplan

transformers = pytest.importorskip("transformers")


def classifier(kind: str | None = "single_label_classification") -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=VOCABULARY, **sizes, num_labels=3, problem_type=kind)
    return transformers.BertForSequenceClassification(config).eval()


def labelled(model: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(batch)
    ids = torch.randint(6, VOCABULARY, (batch, length), generator=draw)
    if type(model).__name__.endswith("ForSequenceClassification"):
        return {"input_ids": ids, "labels": torch.randint(0, 3, (batch,), generator=draw)}
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 3 == 0, -100)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "grad"),
    [
        (lambda: build("short llama"), True),
        (classifier, False),
        pytest.param(lambda: build("short llama"), False, marks=pytest.mark.slow),
        pytest.param(classifier, True, marks=pytest.mark.slow),
        pytest.param(lambda: build("t5"), False, marks=pytest.mark.slow),
        pytest.param(lambda: build("t5"), True, marks=pytest.mark.slow),
    ],
    ids=["llama-True", "classifier-False", "llama-False", "classifier-True", "t5-False", "t5-True"],
)
def test_a_loss_is_traced_for_all_batches_and_lengths(
    make: Any, grad: bool, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the exporter dropped labels, so each size was retraced."""
    model = make()
    placed = graphplan.partition(model, {"cpu": "1GiB"}, kwargs=labelled(model, 2, 8), grad=grad)
    with caplog.at_level(logging.INFO, "graphplan"), torch.set_grad_enabled(grad):
        for size in ((3, 11), (2, 8), (5, 20)):
            inputs = labelled(model, *size)
            found, expected = placed(**inputs).loss, model(**inputs).loss
            assert largest_difference(found, expected) < 1e-5
            if grad:
                given = torch.autograd.grad(found, list(placed.parameters()), allow_unused=True)
                wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
                for one, other in zip(given, wanted, strict=True):
                    assert (one is None) == (other is None)
                    assert one is None or largest_difference(one, other) < 1e-4
    assert "capturing another graph" not in caplog.text
    assert not [one for one in recwarn if issubclass(one.category, graphplan.GraphplanWarning)]


@pytest.mark.slow
def test_loss_type_set_in_forward_is_traced_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: the attribute stayed set in the copy, so the same call had other modes and was retraced."""
    model = classifier(None)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, kwargs=labelled(model, 2, 8))
    with caplog.at_level(logging.INFO, "graphplan"), torch.no_grad():
        for size in ((5, 1), (3, 11), (4, 1)):
            inputs = labelled(model, *size)
            assert largest_difference(placed(**inputs).loss, model(**inputs).loss) < 1e-5
            model.config.problem_type = None
    assert caplog.text.count("capturing another graph") == 1


@pytest.mark.slow
def test_future_values_are_traced_for_all_batches(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the exporter dropped ``future_values``, so each batch was retraced with a warning."""
    torch.manual_seed(0)
    sizes = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2, **sizes
    )
    model = transformers.TimeSeriesTransformerForPrediction(config).eval()

    def series(batch: int) -> dict[str, torch.Tensor]:
        past, future = torch.rand(batch, 10), torch.rand(batch, 4)
        times = {
            "past_time_features": torch.rand(batch, 10, 2),
            "future_time_features": torch.rand(batch, 4, 2),
        }
        return {"past_values": past, "past_observed_mask": past.gt(0.1), "future_values": future, **times}

    placed = graphplan.partition(model, {"cpu": "1GiB"}, kwargs=series(2))
    with caplog.at_level(logging.INFO, "graphplan"), torch.no_grad():
        for batch in (3, 2, 5):
            inputs = series(batch)
            assert largest_difference(placed(**inputs).loss, model(**inputs).loss) < 1e-5
    assert "capturing another graph" not in caplog.text
    assert not [one for one in recwarn if issubclass(one.category, graphplan.GraphplanWarning)]
