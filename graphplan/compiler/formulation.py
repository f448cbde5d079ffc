"""The problem that a call poses: its graph, beside what the caller and earlier plans have settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_weights import tensor_bytes
from graphplan.capture.signature import BoundCall
from graphplan.capture.sizes.size_limits import SizeLimits
from graphplan.compiler.earlier_plans import Commitments
from graphplan.compiler.saved_captures import SavedCaptures
from graphplan.compiler.training import Training
from graphplan.devices.topology import CPU, DeviceKey, Topology
from graphplan.errors import InputError
from graphplan.ir.constraints import Constraints
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Weight
from graphplan.ir.schedule import Schedule
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.graph_weights import part_weight
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.problem import Problem


@dataclass(frozen=True, slots=True)
class Options:
    """What does not change from call to call; as in :func:`graphplan.partition`."""

    dynamic_shapes: Any = None
    grad: bool = False
    return_outputs: bool = True
    constraints: Constraints = field(default_factory=Constraints)
    size_limits: SizeLimits = field(default_factory=SizeLimits)
    compile: Mapping[str, Any] | None = None
    time_limit: float | None = None
    training: Training | None = None
    # not in the repr, which ranks compare: each may have a folder of its own
    saved_captures: SavedCaptures | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        limit = self.time_limit
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (number and limit > 0):
            raise InputError(f"time_limit must be a positive number of seconds or None, not {limit!r}")

    @property
    def differentiates(self) -> bool:
        """Whether a backward pass may follow: by autograd, or as planned."""
        return self.grad or self.training is not None


@dataclass(frozen=True, slots=True)
class Formulation:
    """Poses problems, beside what earlier plans have ``committed``.

    ``mappable`` are the parameters that can stay on disk; None for all.
    """

    topology: Topology
    options: Options
    committed: Commitments
    mappable: Set[str] | None = None

    def constrained(self, annotator: Annotator, call: BoundCall) -> Problem:
        """What is to be placed, with the caller's rules."""
        plain = self.plain(annotator, call)
        return constrain(plain, self.options.constraints.within(plain.graph))

    def plain(self, annotator: Annotator, call: BoundCall, together: Sequence[Capture] = ()) -> Problem:
        """What is to be placed, without the caller's rules; ``together`` as in :meth:`graph`."""
        states = self._state_homes(annotator.capture, call)
        return Problem(
            self.graph(annotator, together=together),
            self.topology,
            host_key(self.topology, call),
            self.options.return_outputs,
            {**(self.committed.homes or {}), **self.committed.constants.homes, **states},
            prefetch_bytes=self.committed.prefetch_bytes(),
            prefetch_limits=self.committed.prefetch_limits(self.topology),
            streaming=not self.options.grad,
        )

    def graph(
        self, annotator: Annotator, schedule: Schedule | None = None, together: Sequence[Capture] = ()
    ) -> Graph:
        """The graph with the constants and parts of other calls, which take their bytes all the same.

        ``schedule`` is as in :meth:`Annotator.graph`; ``together`` are all calls that are planned together.
        """
        kinds = {spec.key: spec.type for spec in self.topology.devices}
        graph = annotator.graph(schedule, kinds)
        if self.options.training is not None:
            graph = self.options.training.held(graph, annotator.capture, self.committed.trained)
        beside = [*self._beside(annotator.capture, together), *self._kept_parts(annotator.capture, graph)]
        return graph.changed(weights=[*graph.weights.values(), *beside]) if beside else graph

    def _beside(self, capture: Capture, together: Sequence[Capture]) -> list[Weight]:
        """Constants and tensors of caches of other calls."""
        tensors = dict(self.committed.constants.tensors)
        for other in together:
            tensors |= other.constants
        away = [name for other in together for name in other.states if name not in capture.states]
        return [
            *(
                Weight(name, tensor_bytes(tensor), (name,), "constant", False)
                for name, tensor in tensors.items()
                if name not in capture.constants
            ),
            *(Weight(name, 0, (name,), "cache", False) for name in away),
        ]

    def _kept_parts(self, capture: Capture, graph: Graph) -> list[Weight]:
        """Parts of sliced weights that this call does not read so."""
        found = []
        for part, key in self.committed.parts.items():
            if part.name not in capture.parts:
                kept = part_weight(graph.weights[part.weight], part)
                nbytes = kept.nbytes if self.topology[key].is_accelerator else 0  # else a view
                found.append(replace(kept, nbytes=nbytes, part_of=""))
        return found

    def _state_homes(self, capture: Capture, call: BoundCall) -> dict[str, DeviceKey]:
        """Where the tensors of a call's caches are, as far as accelerators hold them and weights too."""
        if self.committed.homes is None:
            return {}
        of = {spec.torch_device: spec.key for spec in self.topology.accelerators}
        found = ((name, of.get(call.leaves[leaf].device)) for name, leaf in capture.states.items())
        return {name: key for name, key in found if key is not None}


def host_key(topology: Topology, call: BoundCall) -> DeviceKey:
    """The key of the device where the caller's tensors are; meta ones are taken to be on the CPU."""
    device = call.device
    if device is None or device.type == "meta":
        device = torch.device(CPU)
    for spec in topology.devices:
        if spec.computes and spec.torch_device == device:
            return spec.key
    return str(device)
