"""Find the weights of a safetensors checkpoint: the file of each, and whether it can be used in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from graphplan.capture.model.model_weights import ModelWeights
from graphplan.errors import CheckpointError
from graphplan.runtime.checkpoint.mapped_files import MappedFile, equal_in_files
from graphplan.runtime.checkpoint.parallel_reads import Read, read_into
from graphplan.runtime.checkpoint.safetensors_header import FileTensor, read_header
from graphplan.warnings import warn

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NOT_PERSISTENT = (
    ". The missing ones are buffers that no checkpoint has: build the model in "
    "accelerate.init_empty_weights(), which computes them, or load a transformers model with graphplan.load"
)


class Checkpoint:
    """The tensors of a checkpoint, by the first name of each weight.

    Non-persistent buffers, which no checkpoint holds, come from the model itself.
    """

    def __init__(self, weights: ModelWeights, tensors: Mapping[str, FileTensor]) -> None:
        self.weights = weights
        self.tensors = {
            first: tensors[name]
            for first, names in weights.names.items()
            for name in names  # the last name that a file has wins, as in load_state_dict
            if name in tensors
        }
        self._files: dict[Path, MappedFile] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """The files that :meth:`map` has mapped."""
        return tuple(self._files.values())

    def mappable(self) -> frozenset[str]:
        """Return the parameters that can be used in place in their file: same dtype and strides, aligned."""
        return frozenset(
            name
            for name, tensor in self.tensors.items()
            if name in self.weights.parameters
            and tensor.dtype == self.weights.tensors[name].dtype
            and self.weights.tensors[name].is_contiguous()
            and tensor.start % tensor.dtype.itemsize == 0
        )

    def map(self, name: str) -> torch.Tensor:
        """Return a weight as a tensor over its mapped file."""
        tensor = self.tensors[name]
        if tensor.file.path not in self._files:
            self._files[tensor.file.path] = MappedFile(tensor.file)
        return self._files[tensor.file.path].tensor(tensor)

    def read(self, targets: Mapping[str, torch.Tensor], progress: Callable[[int], object]) -> None:
        """Fill targets, on any device and of any dtype, by first name; report the bytes of each read."""
        read_into([Read(self.tensors[name], target) for name, target in targets.items()], progress)


def read_checkpoint(model: nn.Module, weights: ModelWeights, path: str | Path, *, strict: bool) -> Checkpoint:
    """Open a checkpoint and compare its names, shapes and dtypes with the model's.

    Args:
        model: used in messages.
        weights: those of ``model``.
        path: a ``.safetensors`` file, or a folder with one, with an index of several, or with several.
        strict: whether missing or unexpected names are errors.

    Raises:
        CheckpointError: the file is missing or damaged, or names, shapes or dtypes differ from the model's.
    """
    tensors = file_entries(Path(path))
    missing = [
        first
        for first, names in weights.names.items()
        if not any(name in tensors for name in names)
        and ((strict and set(names) & weights.persistent) or weights.tensors[first].device.type == "meta")
    ]
    unexpected = sorted(set(tensors) - set(weights.first)) if strict else []
    lists = {"missing": missing, "unexpected": unexpected}
    if misfits := [f"{what} {_joined_names(names)}" for what, names in lists.items() if names]:
        buffers = missing and not any(weights.persistent & set(weights.names[first]) for first in missing)
        hint = _NOT_PERSISTENT if buffers else ""
        raise CheckpointError(f"{path} does not fit {type(model).__name__}: {', '.join(misfits)}{hint}")
    checkpoint = Checkpoint(weights, tensors)
    wrong = [
        f"{tensor.file.path.name} has {tensor.name!r} of shape {list(tensor.shape)}, but the model has "
        f"{list(weights.tensors[name].shape)}"
        for name, tensor in checkpoint.tensors.items()
        if tensor.shape != tuple(weights.tensors[name].shape)
    ]
    wrong += [
        f"{tensor.file.path.name} has {tensor.name!r} of {tensor.dtype}, but the model has "
        f"{weights.tensors[name].dtype}: only numbers of one kind are converted"
        for name, tensor in checkpoint.tensors.items()
        if _kind(tensor.dtype) != _kind(weights.tensors[name].dtype)
    ]
    if wrong:
        raise CheckpointError("; ".join(wrong))
    _warn_of_differing_ties(checkpoint, tensors)
    return checkpoint


def _warn_of_differing_ties(checkpoint: Checkpoint, tensors: Mapping[str, FileTensor]) -> None:
    for first, tensor in checkpoint.tensors.items():
        for name in checkpoint.weights.names[first]:
            if name in tensors and name != tensor.name and not equal_in_files(tensors[name], tensor):
                warn(
                    f"{name!r} and {tensor.name!r} are tied, and differ in the checkpoint: both become "
                    f"{tensor.name!r}, as in load_state_dict"
                )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return a key that distinguishes floating-point, complex, boolean and integer dtypes."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _joined_names(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def file_entries(path: Path) -> dict[str, FileTensor]:
    """Return tensor name -> its place in a file; ``path`` as in :func:`read_checkpoint`.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    single = path / _SINGLE
    index = path / _INDEX if path.is_dir() and not single.is_file() else path
    if index.name.endswith(".index.json") and index.is_file():
        return _index_entries(index)
    files = [path]
    if path.is_dir():
        files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files or not files[0].is_file():
        raise CheckpointError(
            f"no checkpoint at {path}: give a .safetensors file, or a folder with {_SINGLE}, {_INDEX} or "
            "other .safetensors files"
        )
    tensors: dict[str, FileTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"{tensors[name].file.path} and {file} both have {name!r}")
            tensors[name] = tensor
    return tensors


def _index_entries(index: Path) -> dict[str, FileTensor]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): index.parent / file for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of a checkpoint: {error!r}") from error
    if missing := sorted({str(file) for file in files.values() if not file.is_file()}):
        raise CheckpointError(f"{index} names files that are not there: {_joined_names(missing)}")
    headers = {file: read_header(file) for file in dict.fromkeys(files.values())}
    if absent := [name for name, file in files.items() if name not in headers[file]]:
        raise CheckpointError(f"{index} names tensors that its files do not have: {_joined_names(absent)}")
    return {name: headers[file][name] for name, file in files.items()}
