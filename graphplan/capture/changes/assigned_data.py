"""Weights whose ``data`` the code of a model assigns, as layers that bound a norm do: a graph writes it.

::

    self.weight.data = torch.renorm(...)        renorm = aten.renorm(...)
                                                copy_ = aten.copy_(detach, renorm)

In eager mode the weight has the memory of what it is assigned from then on. So that must be the weight's
alone: made in the call, and not written to afterwards. Nor may its memory of before be read afterwards, as by
``before = self.weight.data``, which a graph has overwritten.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx, nn

from graphplan._compat.torch import storage_of
from graphplan._compat.traced_tensors import node_of
from graphplan.capture.structure import memories
from graphplan.errors import NoGraphError

_ELSE = (
    "forward assigns the .data of a tensor: a graph does so for a parameter or buffer that is given what was "
    "made in the call, of its shape and type. Use copy_"
)
_WRITTEN = "forward assigns the .data of a weight, and writes to it afterwards: a graph has copies. Use copy_"
_READ = (
    "forward assigns the .data of a weight, and reads its memory of before afterwards: a graph has written "
    "to it. Keep a clone"
)


class AssignedData:
    """Writes to weights in the place of assignments of their ``data``, while one module is traced."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: list[tuple[torch.Tensor, int]] = []
        # by the memory of a weight, what makes it and writes to it
        self._copies = defaultdict[int, list[tuple[fx.Node | None, fx.Node]]](list)

    def assign(self, tracer: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Let a weight have other values.

        Raises:
            NoGraphError: it is no weight, or these are no values that only it has.
        """
        made = node_of(value, tracer)
        if made is not None:
            self._require_new(made)
        place = storage_of(tensor), tensor.stride(), tensor.storage_offset(), _form(tensor)
        if place == (storage_of(value), value.stride(), value.storage_offset(), _form(value)):
            return
        tables = [table for part in self._module.modules() for table in (part._parameters, part._buffers)]
        weights = [one for table in tables for one in table.values() if one is not None]
        others = {storage_of(one) for one in weights if one is not tensor}
        values = (node.meta["val"] for node in tracer.graph.find_nodes(op="placeholder"))
        given = {storage_of(one) for one in values if isinstance(one, torch.Tensor)}
        is_weight = any(one is tensor for one in weights) and storage_of(tensor) not in others
        is_made = made is not None and storage_of(value) not in given
        if not (is_weight and is_made and _form(tensor) == _form(value)):
            raise NoGraphError(_ELSE)
        tensor.detach().copy_(value.detach())
        copied = next(iter(reversed(tracer.graph.nodes)))
        self._copies[storage_of(tensor)].append((node_of(tensor, tracer), copied))
        self._written = [entry for entry in self._written if entry[0] is not tensor]
        self._written += [(one, one._version) for one in (tensor, value)]

    def require_kept(self) -> None:
        """Raise NoGraphError where something was written to what has been assigned."""
        if any(tensor._version != version for tensor, version in self._written):
            raise NoGraphError(_WRITTEN)
        graphs = {copy.graph for copies in self._copies.values() for _, copy in copies}
        for user in (node for graph in graphs for node in graph.nodes):
            for given in user.all_input_nodes:
                self._require_new(given, user)

    def _require_new(self, node: fx.Node, user: fx.Node | None = None) -> None:
        """Raise NoGraphError where a node has memory that a weight had before its data was assigned.

        ``user`` reads it; without, the code does now.
        """
        for weight, copy in (entry for memory in memories(node) for entry in self._copies.get(memory, ())):
            if node is not weight and node < copy and (user is None or copy < user):
                raise NoGraphError(_READ)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout
