"""The placement problem of a call: its graph, the caller's options, and the decisions of earlier plans."""

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
from graphplan.passes.placement.calls.joint import Call
from graphplan.passes.placement.problem import Problem


@dataclass(frozen=True, slots=True)
class Options:
    """The options that are the same for all calls; as in :func:`graphplan.partition`."""

    dynamic_shapes: Any = None
    grad: bool = False
    return_outputs: bool = True
    constraints: Constraints = field(default_factory=Constraints)
    size_limits: SizeLimits = field(default_factory=SizeLimits)
    compile: Mapping[str, Any] | None = None
    time_limit: float | None = None
    training: Training | None = None
    stores: bool = True  # whether calls store tensors in attributes: stages of several machines cannot
    # not in the repr, which ranks compare: each rank may have its own folder
    saved_captures: SavedCaptures | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        limit = self.time_limit
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (number and limit > 0):
            raise InputError(f"time_limit must be a positive number of seconds or None, not {limit!r}")

    @property
    def differentiates(self) -> bool:
        """Whether a backward pass may follow, by autograd or in a planned training step."""
        return self.grad or self.training is not None


@dataclass(frozen=True, slots=True)
class Member:
    """One of the calls that are planned together; ``weight`` says how much its seconds count."""

    annotator: Annotator
    call: BoundCall
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Formulation:
    """Formulates placement problems within the decisions of earlier plans, ``committed``.

    ``mappable`` are the parameters that can stay on disk; None for all.
    """

    topology: Topology
    options: Options
    committed: Commitments
    mappable: Set[str] | None = None

    def constrained(self, member: Member) -> Problem:
        """Return the problem of a call, with the caller's constraints."""
        return self.call(member).with_homes({})

    def call(self, member: Member, together: Sequence[Capture] = ()) -> Call:
        """Return the problem and the constraints of a call; ``together`` as in :meth:`graph`."""
        plain = self.plain(member, together)
        return Call(plain, self.options.constraints.within(plain.graph), member.weight)

    def plain(self, member: Member, together: Sequence[Capture] = ()) -> Problem:
        """Return the problem of a call without the caller's constraints; ``together`` as in :meth:`graph`."""
        capture = member.annotator.capture
        fixed = self.committed.homes_of_constants(capture.constants, self.topology)
        fixed |= self._state_homes(capture, member.call)
        return Problem(
            self.graph(member.annotator, together=together),
            self.topology,
            host_key(self.topology, member.call),
            returns_to_host=self.options.return_outputs,
            fixed_weights={**(self.committed.homes or {}), **self.committed.constants.homes, **fixed},
            prefetch_bytes=self.committed.prefetch_bytes(),
            prefetch_limits=self.committed.prefetch_limits(self.topology),
            streaming=not self.options.grad,
        )

    def graph(
        self, annotator: Annotator, schedule: Schedule | None = None, together: Sequence[Capture] = ()
    ) -> Graph:
        """Return the graph, with the constants, caches and parts of other calls, which also take memory.

        ``schedule`` is as in :meth:`Annotator.graph`; ``together`` are all calls that are planned together.
        """
        kinds = {spec.key: spec.type for spec in self.topology.devices}
        graph = annotator.graph(schedule, kinds)
        if self.options.training is not None:
            graph = self.options.training.held(graph, annotator.capture, self.committed.trained)
        others = [*self._others(annotator.capture, together), *self._other_parts(annotator.capture, graph)]
        return graph.changed(weights=[*graph.weights.values(), *others]) if others else graph

    def _others(self, capture: Capture, together: Sequence[Capture]) -> list[Weight]:
        """Return the constants and the tensors of caches that other calls have and this one has not."""
        tensors = dict(self.committed.constants.tensors)
        for other in together:
            tensors |= other.constants
        constants = (
            Weight(name, tensor_bytes(tensor), (name,), "constant", persistent=False)
            for name, tensor in tensors.items()
            if name not in capture.constants
        )
        caches = (name for other in together for name in other.states if name not in capture.states)
        return [*constants, *(Weight(name, 0, (name,), "cache", persistent=False) for name in caches)]

    def _other_parts(self, capture: Capture, graph: Graph) -> list[Weight]:
        """Return the placed parts of sliced weights that this call does not read as parts."""
        weights = []
        for part, key in self.committed.parts.items():
            if part.name not in capture.parts:
                kept = part_weight(graph.weights[part.weight], part)
                nbytes = kept.nbytes if self.topology[key].is_accelerator else 0  # on the CPU it is a view
                weights.append(replace(kept, nbytes=nbytes, part_of=""))
        return weights

    def _state_homes(self, capture: Capture, call: BoundCall) -> dict[str, DeviceKey]:
        """Return the devices of the cache tensors on accelerators; none before weights are placed."""
        if self.committed.homes is None:
            return {}
        key_of = {spec.torch_device: spec.key for spec in self.topology.accelerators}
        keys = ((name, key_of.get(call.leaves[leaf].device)) for name, leaf in capture.states.items())
        return {name: key for name, key in keys if key is not None}


def host_key(topology: Topology, call: BoundCall) -> DeviceKey:
    """Return the key of the device that holds the caller's tensors; meta tensors count as on the CPU."""
    device = call.device
    if device is None or device.type == "meta":
        device = torch.device(CPU)
    for spec in topology.devices:
        if spec.computes and spec.torch_device == device:
            return spec.key
    return str(device)
