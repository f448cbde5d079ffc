"""A checkpoint in which some weights are computed from several tensors, or from parts of one.

If a conversion only joins tensors, each is read directly into its place. Otherwise its sources are read
into host memory, converted and freed, one conversion after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphplan.capture.model.model_weights import ModelWeights
from graphplan.errors import CheckpointError
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.checkpoint.deferred_joins import DeferredJoins
from graphplan.runtime.checkpoint.parallel_reads import Read, read_into
from graphplan.runtime.checkpoint.safetensors_header import FileTensor


@dataclass(frozen=True, eq=False, slots=True)
class Conversion:
    """Compute some weights from tensors of a checkpoint.

    Attributes:
        sources: the tensors that ``make`` takes, in order.
        dtype: the dtype to which the sources are converted first.
        make: maps the sources to the weights, by name; also accepts meta tensors.
    """

    sources: tuple[FileTensor, ...]
    dtype: torch.dtype
    make: Callable[[Sequence[Any]], Mapping[str, Any]]

    def outline(self) -> Mapping[str, Any]:
        """Return the weights as meta tensors."""
        return self.make(DeferredJoins(self.sources).tensors)

    def results(self, progress: Callable[[int], object]) -> Mapping[str, Any]:
        """Read the sources into host memory and return the weights."""
        sources = [torch.empty(source.shape, dtype=self.dtype) for source in self.sources]
        read_into(list(map(Read, self.sources, sources)), progress)
        return self.make(sources)


class ConvertedCheckpoint(Checkpoint):
    """A checkpoint of weights that files hold unchanged, and of weights that conversions compute.

    Args:
        weights: those of the model.
        tensors: name of a weight -> its place in a file.
        conversions: name of a weight -> the conversion that computes it.
    """

    def __init__(
        self, weights: ModelWeights, tensors: Mapping[str, FileTensor], conversions: Mapping[str, Conversion]
    ) -> None:
        super().__init__(weights, tensors)
        self.conversions = {
            weights.first[name]: conversion
            for name, conversion in conversions.items()
            if weights.first[name] not in self.tensors
        }

    def __contains__(self, name: object) -> bool:
        return name in self.conversions or super().__contains__(name)

    def read(self, targets: Mapping[str, torch.Tensor], progress: Callable[[int], object]) -> None:
        """See :meth:`Checkpoint.read`."""
        requests = [Read(self.tensors[name], targets[name]) for name in targets if name in self.tensors]
        converted: dict[Conversion, list[str]] = {}
        for name in targets:
            if name in self.conversions:
                converted.setdefault(self.conversions[name], []).append(name)
        for conversion, names in converted.items():
            with DeferredJoins(conversion.sources) as deferred:
                results = conversion.make(deferred.tensors)
            if deferred.computes:
                results = conversion.results(progress)
            for name in names:
                value, target = self._result(name, results), targets[name]
                if deferred.computes:
                    target.copy_(value)
                else:
                    requests += deferred.reads(value, target, progress)
            del results, value  # host memory for the next
        read_into(requests, progress)

    def _result(self, name: str, results: Mapping[str, Any]) -> Any:
        """Return a weight, by its first name, from the results of a conversion."""
        for alias in self.weights.names[name]:
            if alias in results:
                value = results[alias]
                return value[0] if isinstance(value, list) else value
        raise CheckpointError(
            f"the conversion of the checkpoint does not return the weight {name!r} that it declares"
        )
