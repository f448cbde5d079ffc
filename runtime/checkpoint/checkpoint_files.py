"""The weights of a safetensors checkpoint: which file has what, and what can stay there."""

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


class Checkpoint:
    """The tensors of a checkpoint by the first name of each weight.

    A buffer that no checkpoint holds (non-persistent) comes from the model itself.
    """

    def __init__(self, weights: ModelWeights, found: Mapping[str, FileTensor]) -> None:
        self.weights = weights
        self.found = {
            first: found[name]
            for first, names in weights.names.items()
            for name in names  # the last of its names that a file has, as in load_state_dict
            if name in found
        }
        self._files: dict[Path, MappedFile] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.found

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """Those that :meth:`map` has mapped."""
        return tuple(self._files.values())

    def mappable(self) -> frozenset[str]:
        """Parameters that can be used where they are in their file: of the model's dtype and strides."""
        return frozenset(
            name
            for name, one in self.found.items()
            if name in self.weights.parameters
            and one.dtype == self.weights.tensors[name].dtype
            and self.weights.tensors[name].is_contiguous()
            and one.start % one.dtype.itemsize == 0
        )

    def map(self, name: str) -> torch.Tensor:
        """One weight in its file."""
        one = self.found[name]
        if one.file.path not in self._files:
            self._files[one.file.path] = MappedFile(one.file)
        return self._files[one.file.path].tensor(one)

    def read(self, targets: Mapping[str, torch.Tensor], progress: Callable[[int], object]) -> None:
        """Fill tensors, on any device and of any dtype, with the weights of these first names; report bytes
        as they come.
        """
        read_into([Read(self.found[name], target) for name, target in targets.items()], progress)


def read_checkpoint(model: nn.Module, weights: ModelWeights, path: str | Path, *, strict: bool) -> Checkpoint:
    """Open a checkpoint and compare its names and shapes with the model's.

    Args:
        model: whose weights they are, for messages.
        weights: of ``model``.
        path: a ``.safetensors`` file, or a folder with one, with an index of several, or with several.
        strict: whether missing or unexpected names are errors.

    Raises:
        CheckpointError: no such file, a damaged one, or names, shapes or dtypes that do not fit.
    """
    found = file_entries(Path(path))
    missing = [
        first
        for first, names in weights.names.items()
        if not any(name in found for name in names)
        and ((strict and set(names) & weights.persistent) or weights.tensors[first].device.type == "meta")
    ]
    unexpected = sorted(set(found) - set(weights.first)) if strict else []
    if missing or unexpected:
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}: missing {_listed(missing)}, "
            f"unexpected {_listed(unexpected)}"
        )
    checkpoint = Checkpoint(weights, found)
    wrong = [
        f"{one.file.path.name} has {one.name!r} of shape {list(one.shape)}, the model "
        f"{list(weights.tensors[name].shape)}"
        for name, one in checkpoint.found.items()
        if one.shape != tuple(weights.tensors[name].shape)
    ]
    wrong += [
        f"{one.file.path.name} has {one.name!r} of {one.dtype}, the model {weights.tensors[name].dtype}: "
        "only numbers of one kind are converted"
        for name, one in checkpoint.found.items()
        if _kind(one.dtype) != _kind(weights.tensors[name].dtype)
    ]
    if wrong:
        raise CheckpointError("; ".join(wrong))
    _tell_of_differing_ties(checkpoint, found)
    return checkpoint


def _tell_of_differing_ties(checkpoint: Checkpoint, found: Mapping[str, FileTensor]) -> None:
    for first, used in checkpoint.found.items():
        for name in checkpoint.weights.names[first]:
            if name in found and name != used.name and not equal_in_files(found[name], used):
                warn(
                    f"{name!r} and {used.name!r} are tied, and differ in the checkpoint: both become "
                    f"{used.name!r}, as in load_state_dict"
                )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """What tells floating-point, complex, boolean and whole numbers apart."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def file_entries(path: Path) -> dict[str, FileTensor]:
    """Tensor name -> where it is; ``path`` as in :func:`read_checkpoint`.

    Raises:
        CheckpointError: no such file, or a damaged one.
    """
    single = path / _SINGLE
    index = path / _INDEX if path.is_dir() and not single.is_file() else path
    if index.name.endswith(".index.json") and index.is_file():
        return _indexed(index)
    files = [path]
    if path.is_dir():
        files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files or not files[0].is_file():
        raise CheckpointError(
            f"no checkpoint at {path}: give a .safetensors file, or a folder with {_SINGLE}, {_INDEX} or "
            "other .safetensors files"
        )
    found: dict[str, FileTensor] = {}
    for file in files:
        for name, one in read_header(file).items():
            if name in found:
                raise CheckpointError(f"{found[name].file.path} and {file} both have {name!r}")
            found[name] = one
    return found


def _indexed(index: Path) -> dict[str, FileTensor]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        named = {str(name): index.parent / file for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of a checkpoint: {error!r}") from error
    if lacking := sorted({str(file) for file in named.values() if not file.is_file()}):
        raise CheckpointError(f"{index} names files that are not there: {_listed(lacking)}")
    headers = {file: read_header(file) for file in dict.fromkeys(named.values())}
    if absent := [name for name, file in named.items() if name not in headers[file]]:
        raise CheckpointError(f"{index} names tensors that its files do not have: {_listed(absent)}")
    return {name: headers[file][name] for name, file in named.items()}
