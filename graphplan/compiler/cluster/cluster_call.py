"""A call of a model over several machines: the tensors that cross the network, and the model's result."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.capture.signature import BoundCall
from graphplan.capture.sizes.dynamic_sizes import sizes_of_call
from graphplan.errors import CaptureError
from graphplan.passes.frontend.tensor_meta import TensorMeta, describe
from graphplan.runtime.distributed.stage_runner import Wire
from graphplan.runtime.module.result_structure import cache_layouts, rebuilder


class Wires:
    """The tensors on the network for one microbatch, of the sizes of this microbatch, not of the plan.

    Gradients of the values in ``trained`` are sent back. The inputs are not kept.
    """

    def __init__(self, capture: Capture, micro: BoundCall, trained: Set[str] = frozenset()) -> None:
        self.trained, self.capture = trained, capture
        inputs = capture.inputs_in(micro)
        microbatch_sizes = sizes_of_call(capture.graph, capture.inputs, list(inputs.values()))
        self.sizes = {**capture.sizes, **microbatch_sizes}
        self.nodes = {node.name: node for node in capture.graph.nodes}

    def of(self, name: str) -> Wire:
        """Return the description of a value that is sent."""
        described = self._described(name)
        if not isinstance(described, TensorMeta):
            raise CaptureError(
                f"a result is {described!r}, not a tensor, and machines send only tensors: leave it out of "
                "what the model returns (for a transformers model, use_cache=False)"
            )
        return Wire(name, described.shape, described.dtype, name in self.trained)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a value that is sent; 0 if it is not a tensor."""
        described = self._described(name)
        return described.copy_bytes if isinstance(described, TensorMeta) else 0

    def absent(self, name: str) -> Any:
        """Return a value that another rank has: a size as it is; for a tensor, zeros that take no memory."""
        described = self._described(name)
        if isinstance(described, int):
            return described
        wire = self.of(name)
        return torch.zeros((), dtype=wire.dtype).expand(wire.shape)

    def _described(self, name: str) -> Any:
        return describe(self.nodes[name].meta.get("val"), self.sizes)


def rebuild_result(wires: Wires, results: Mapping[str, torch.Tensor], call: BoundCall) -> Any:
    """Return the model's result: local values, constants of the trace, zeros for other ranks' values."""
    capture, flat = wires.capture, []
    inputs = capture.inputs_in(call)
    for item in capture.outputs:
        if not isinstance(item, fx.Node):
            flat.append(item)
        elif item.name in results:
            flat.append(results[item.name])
        elif item.name in inputs:
            flat.append(inputs[item.name])
        else:
            flat.append(wires.absent(item.name))
    given = {name: call.kwargs[name] for name in capture.changed_names}
    return rebuilder(capture.out_spec, cache_layouts(capture.signature.spec, given))(flat, given)
