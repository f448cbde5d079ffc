"""Some of the weights of a model, under their own names, as a module without code: what a stage holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from graphplan.capture.model_weights import ModelWeights


class StageModule(nn.Module):
    """Holds weights under the names that they have in the model; its placed copy runs the stage's graph."""

    def forward(self, *values: torch.Tensor) -> Any:
        """Nothing: only its graph says what it computes."""
        raise NotImplementedError("a stage runs as a graph only")


def partial_model(weights: ModelWeights, names: Iterable[str]) -> StageModule:
    """A module with these weights of a model, which it shares with it.

    Args:
        weights: of the model.
        names: first names of those that it holds; it holds them under all of their names.
    """
    root, wanted = StageModule(), set(names)
    for name, first in weights.first.items():  # in the order of the model, so that first names stay first
        if first in wanted:
            path, _, own = name.rpartition(".")
            part, tensor = _part(root, path), weights.tensors[first]
            if name in weights.parameters:
                part.register_parameter(own, tensor)  # type: ignore[arg-type]  # it is one in the model
            else:
                part.register_buffer(own, tensor, persistent=name in weights.persistent)
    return root.eval()


def _part(root: nn.Module, path: str) -> nn.Module:
    found = root
    for step in path.split(".") if path else ():
        if step not in found._modules:
            found.add_module(step, nn.Module())
        found = found._modules[step]  # type: ignore[assignment]  # just added
    return found
