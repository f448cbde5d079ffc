"""A checkpoint some of whose weights are made of several tensors, or of parts of one.

Where a conversion only moves data, each tensor is read straight into its place. Else its sources are read
into host memory, it is done, and they go again, one conversion after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphplan.capture.model.model_weights import ModelWeights
from graphplan.errors import CheckpointError
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.checkpoint.deferred_reads import DeferredReads
from graphplan.runtime.checkpoint.parallel_reads import Read, read_into
from graphplan.runtime.checkpoint.safetensors_header import FileTensor

Make = Callable[[Sequence[Any]], Mapping[str, Any]]


@dataclass(frozen=True, eq=False, slots=True)
class Conversion:
    """How some weights come of tensors of a checkpoint.

    Attributes:
        sources: in the order that ``make`` takes.
        dtype: to which sources are converted first.
        make: from the sources to the weights, by name; takes meta tensors too.
    """

    sources: tuple[FileTensor, ...]
    dtype: torch.dtype
    make: Make

    def outline(self) -> Mapping[str, Any]:
        """The weights without their data."""
        return self.make(DeferredReads(self.sources).tensors)

    def results(self, progress: Callable[[int], object]) -> Mapping[str, Any]:
        """The weights, made of sources that are read into host memory."""
        sources = [torch.empty(source.shape, dtype=self.dtype) for source in self.sources]
        read_into(list(map(Read, self.sources, sources)), progress)
        return self.make(sources)


class ConvertedCheckpoint(Checkpoint):
    """Weights that are in files as they are, and those that conversions make.

    Args:
        weights: of the model.
        found: name of a weight -> where it is in a file.
        made: name of a weight -> the conversion that makes it.
    """

    def __init__(
        self, weights: ModelWeights, found: Mapping[str, FileTensor], made: Mapping[str, Conversion]
    ) -> None:
        super().__init__(weights, found)
        self.made = {
            weights.first[name]: conversion
            for name, conversion in made.items()
            if weights.first[name] not in self.found
        }

    def __contains__(self, name: object) -> bool:
        return name in self.made or super().__contains__(name)

    def read(self, targets: Mapping[str, torch.Tensor], progress: Callable[[int], object]) -> None:
        """As :meth:`Checkpoint.read`."""
        requests = [Read(self.found[name], targets[name]) for name in targets if name in self.found]
        computed: dict[Conversion, list[str]] = {}
        outlines: dict[Conversion, tuple[DeferredReads, Mapping[str, Any]]] = {}
        for name, target in targets.items():
            conversion = self.made.get(name)
            if conversion is None:
                continue
            if conversion not in outlines:
                with DeferredReads(conversion.sources) as deferred:
                    outlines[conversion] = deferred, conversion.make(deferred.tensors)
            deferred, outline = outlines[conversion]
            reads = deferred.requests(self._of(name, outline), target)
            if reads is None:
                computed.setdefault(conversion, []).append(name)
            else:
                requests += reads
        read_into(requests, progress)
        for conversion, names in computed.items():
            results = conversion.results(progress)
            for name in names:
                targets[name].copy_(self._of(name, results))
            del results

    def _of(self, first: str, made: Mapping[str, Any]) -> Any:
        """The weight of this first name among what a conversion makes."""
        for name in self.weights.names[first]:
            if name in made:
                value = made[name]
                return value[0] if isinstance(value, list) else value
        raise CheckpointError(
            f"the conversion of the checkpoint does not make {first!r}, as it said it would"
        )
