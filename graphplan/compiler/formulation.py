"""The problem that a call poses: its graph, beside what earlier plans of the model have settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch

from graphplan.capture.captured_graph import Capture
from graphplan.capture.model_weights import tensor_bytes
from graphplan.capture.signature import BoundCall
from graphplan.compiler.earlier_plans import Commitments
from graphplan.compiler.options import Options
from graphplan.devices.topology import CPU, DeviceKey, Topology
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Weight
from graphplan.ir.schedule import Schedule
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.graph_weights import part_weight
from graphplan.passes.placement.constrain import constrain
from graphplan.passes.placement.problem import Problem


@dataclass(frozen=True, slots=True)
class Company:
    """What the calls that are planned together hold between them.

    Attributes:
        constants: of all their captures.
        states: names of the tensors of all their caches.
    """

    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    states: Sequence[str] = ()


_ALONE = Company()


def company_of(captures: Sequence[Capture]) -> Company:
    """What the calls of these captures hold between them."""
    constants: dict[str, torch.Tensor] = {}
    for capture in captures:
        constants |= capture.constants
    return Company(constants, [name for capture in captures for name in capture.states])


@dataclass(frozen=True, slots=True)
class Formulation:
    """Poses problems.

    Attributes:
        topology: the devices.
        options: of the caller.
        committed: what earlier plans have settled.
        mappable: the parameters that can stay on disk; None for all.
    """

    topology: Topology
    options: Options
    committed: Commitments
    mappable: Set[str] | None = None

    def constrained(self, annotator: Annotator, call: BoundCall | None) -> Problem:
        """What is to be placed, with the caller's rules."""
        plain = self.plain(annotator, call)
        return constrain(plain, self.options.constraints.within(plain.graph))

    def plain(self, annotator: Annotator, call: BoundCall | None, company: Company = _ALONE) -> Problem:
        """What is to be placed, without the caller's rules."""
        constants = self.committed.constants.homes(annotator.capture.constants)
        states = self._state_homes(annotator.capture, call)
        return Problem(
            self.graph(annotator, company=company),
            self.topology,
            host_key(self.topology, call),
            self.options.return_outputs,
            {**(self.committed.homes or {}), **constants, **states},
            prefetch_bytes=self.committed.prefetch_bytes(),
            prefetch_limits=self.committed.prefetch_limits(self.topology),
            streaming=not self.options.grad,
        )

    def graph(
        self, annotator: Annotator, schedule: Schedule | None = None, company: Company = _ALONE
    ) -> Graph:
        """The graph with the constants and parts of other calls, which take their bytes all the same.

        Args:
            annotator: of one call.
            schedule: as in :meth:`Annotator.graph`.
            company: of the calls that are planned together with it.
        """
        kinds = {spec.key: spec.type for spec in self.topology.devices}
        graph = annotator.graph(schedule, kinds)
        beside = [*self._beside(annotator.capture, company), *self._kept_parts(annotator.capture, graph)]
        if not beside:
            return graph
        parts = (graph.operations.values(), graph.values.values(), [*graph.weights.values(), *beside])
        return Graph(*parts, graph.inputs, graph.outputs, graph.together, shapes_known=graph.shapes_known)

    def _beside(self, capture: Capture, company: Company) -> list[Weight]:
        """Constants and tensors of caches of other calls."""
        here = {**capture.constants, **company.constants}
        tensors = {other.name: other.tensor for other in self.committed.constants.others(here)}
        tensors |= {n: tensor for n, tensor in company.constants.items() if n not in capture.constants}
        found = [
            Weight(name, tensor_bytes(tensor), (name,), "constant", False) for name, tensor in tensors.items()
        ]
        away = [name for name in company.states if name not in capture.states]
        return found + [Weight(name, 0, (name,), "cache", False) for name in away]

    def _kept_parts(self, capture: Capture, graph: Graph) -> list[Weight]:
        """Parts of sliced weights that this call does not read so."""
        found = []
        for part, key in self.committed.parts.items():
            if part.name not in capture.parts:
                kept = part_weight(graph.weights[part.weight], part)
                nbytes = kept.nbytes if self.topology[key].is_accelerator else 0  # else a view
                found.append(replace(kept, nbytes=nbytes, part_of=""))
        return found

    def _state_homes(self, capture: Capture, call: BoundCall | None) -> dict[str, DeviceKey]:
        """Where the tensors of a call's caches are, as far as accelerators hold them."""
        if call is None:
            return {}
        of = {spec.torch_device: spec.key for spec in self.topology.devices if spec.is_accelerator}
        found = ((name, of.get(call.leaves[leaf].device)) for name, leaf in capture.states.items())
        return {name: key for name, key in found if key is not None}


def host_key(topology: Topology, call: BoundCall | None) -> DeviceKey:
    """The key of the device where the caller's tensors are; meta ones are taken to be on the CPU."""
    device = call.device if call is not None else None
    if device is None or device.type == "meta":
        device = torch.device(CPU)
    for spec in topology.devices:
        if spec.computes and spec.torch_device == device:
            return spec.key
    return str(device)
