"""Weights from a safetensors checkpoint, one tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from graphplan.errors import InputError
from graphplan.twin import ModelWeights

__all__ = ["Checkpoint", "read_checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Checkpoint:
    """The tensors of a checkpoint by the first name of each weight.

    A buffer that no checkpoint holds (non-persistent) comes from the model itself.
    """

    def __init__(self, weights: ModelWeights, files: dict[str, Path]) -> None:
        self.weights = weights
        self.file_of = {
            first: (files[name], name)
            for first, names in weights.names.items()
            for name in names
            if name in files
        }
        self.open: dict[Path, Any] = {}

    def read(self, name: str) -> torch.Tensor:
        """One weight, in the model's dtype, on the CPU."""
        model = self.weights.tensors[name]
        if name not in self.file_of:
            return model
        path, key = self.file_of[name]
        if path not in self.open:
            self.open[path] = safe_open(path, framework="pt", device="cpu")
        tensor: torch.Tensor = self.open[path].get_tensor(key)
        if tensor.shape != model.shape:
            raise InputError(
                f"{path.name} has {key!r} of shape {list(tensor.shape)}, the model {list(model.shape)}"
            )
        return tensor.to(model.dtype)


def read_checkpoint(model: nn.Module, weights: ModelWeights, path: str | Path, *, strict: bool) -> Checkpoint:
    """Open a checkpoint and compare its names with the model's.

    Args:
        model: whose weights they are, for messages.
        weights: of ``model``.
        path: a ``.safetensors`` file, or a folder with one or with an index of several.
        strict: whether missing or unexpected names are errors.

    Raises:
        InputError: no such file, a damaged one, or names that do not fit.
    """
    files = _files(Path(path))
    known = set(weights.first)
    missing = [
        first
        for first, names in weights.names.items()
        if not any(name in files for name in names)
        and ((strict and set(names) & weights.persistent) or weights.tensors[first].device.type == "meta")
    ]
    unexpected = sorted(set(files) - known) if strict else []
    if missing or unexpected:
        raise InputError(
            f"{path} does not fit {type(model).__name__}: missing {_some(missing)}, "
            f"unexpected {_some(unexpected)}"
        )
    return Checkpoint(weights, files)


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _files(path: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    if path.is_dir() and (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        named = {name: path / file for name, file in index["weight_map"].items()}
        if lacking := sorted({str(file) for file in named.values() if not file.is_file()}):
            raise InputError(f"the index of {path} names files that are not there: {_some(lacking)}")
        return named
    if path.is_dir():
        path = path / _SINGLE
    if not path.is_file():
        raise InputError(
            f"no checkpoint at {path}: give a .safetensors file, or a folder with {_SINGLE} or {_INDEX}"
        )
    try:
        with safe_open(path, framework="pt", device="cpu") as opened:
            return dict.fromkeys(opened.keys(), path)
    except SafetensorError as error:
        raise InputError(f"{path} is no safetensors file, or is cut short: {error}") from error
