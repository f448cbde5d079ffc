"""Assignments to the ``data`` of a weight, as in layers that bound a norm: the graph writes to the weight.

::

    self.weight.data = torch.renorm(...)        renorm = aten.renorm(...)
                                                copy_ = aten.copy_(detach, renorm)

In eager mode the weight takes over the memory of the assigned tensor. So nothing else may use this memory:
the tensor must be made in the call, and not be written to afterwards. Nor may the weight's old memory be
read afterwards, as by ``before = self.weight.data``: the graph has overwritten it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn

from graphplan._compat.torch import storage_of
from graphplan._compat.traced_tensors import node_of
from graphplan.capture.written_memory import memories
from graphplan.errors import NoGraphError

_UNSUPPORTED = (
    "forward assigns the .data of a tensor: in a graph, only a parameter or buffer can be assigned, with a "
    "tensor of its shape and type that the call has made. Use copy_"
)
_WRITTEN = (
    "forward assigns the .data of a weight, and writes to it afterwards: a graph has only copies. Use copy_"
)
_READ = (
    "forward assigns the .data of a weight, and then reads its previous memory, which a graph has "
    "overwritten. Keep a clone"
)


class AssignedData:
    """Replaces assignments to the ``data`` of weights by writes while one module is traced."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: list[tuple[torch.Tensor, int]] = []
        # memory of a weight -> the node that makes the weight, and the node that writes to it
        self._copies = defaultdict[int, list[tuple[fx.Node | None, fx.Node]]](list)

    def assign(self, tracer: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``value`` to the weight ``tensor``.

        Raises:
            NoGraphError: ``tensor`` is not a weight with memory of its own, or ``value`` was not made in the
                call, of its shape and type.
        """
        value_node = node_of(value, tracer)
        if value_node is not None:
            self._require_new(value_node)
        layout = storage_of(tensor), tensor.stride(), tensor.storage_offset(), _shape_and_type(tensor)
        if layout == (storage_of(value), value.stride(), value.storage_offset(), _shape_and_type(value)):
            return  # the weight is assigned its own data
        tables = [table for part in self._module.modules() for table in (part._parameters, part._buffers)]
        weights = [one for table in tables for one in table.values() if one is not None]
        other_storages = {storage_of(one) for one in weights if one is not tensor}
        values = (node.meta["val"] for node in tracer.graph.find_nodes(op="placeholder"))
        input_memories = {storage_of(one) for one in values if isinstance(one, torch.Tensor)}
        is_weight = any(one is tensor for one in weights) and storage_of(tensor) not in other_storages
        is_new = value_node is not None and storage_of(value) not in input_memories
        if not (is_weight and is_new and _shape_and_type(tensor) == _shape_and_type(value)):
            raise NoGraphError(_UNSUPPORTED)
        tensor.detach().copy_(value.detach())
        copied = next(iter(reversed(tracer.graph.nodes)))
        self._copies[storage_of(tensor)].append((node_of(tensor, tracer), copied))
        self._written = [entry for entry in self._written if entry[0] is not tensor]
        self._written += [(one, one._version) for one in (tensor, value)]

    def require_kept(self) -> None:
        """Raise NoGraphError if assigned memory was written to, or a weight's former memory is read."""
        if any(tensor._version != version for tensor, version in self._written):
            raise NoGraphError(_WRITTEN)
        graphs = {copy.graph for copies in self._copies.values() for _, copy in copies}
        for user in (node for graph in graphs for node in graph.nodes):
            for source in user.all_input_nodes:
                self._require_new(source, user)

    def _require_new(self, node: fx.Node, user: fx.Node | None = None) -> None:
        """Raise NoGraphError if a node has memory that a weight had before its data was assigned.

        ``user`` is the node that reads it; without one, the traced code reads it now.
        """
        for weight, copy in (entry for memory in memories(node) for entry in self._copies.get(memory, ())):
            if node is not weight and node < copy and (user is None or copy < user):
                raise NoGraphError(_READ)


def _shape_and_type(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout
