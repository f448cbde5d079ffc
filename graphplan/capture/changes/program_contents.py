"""Reads, writes and operations of an exported program, to compare the traces of two calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graphplan._compat.torch import storage_of
from graphplan.capture.changes.assigned_writes import unconverted, writes
from graphplan.capture.structure import reachable
from graphplan.capture.written_memory import written_arguments


def written_constants(program: torch.export.ExportedProgram) -> set[str]:
    """Return the names of the tensors, other than weights and buffers, that in-place operations write to."""
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    parts = [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes] if constants else []
    written = [leaf for node in nodes for leaf in written_arguments(node.target, node.args, node.kwargs)]
    values = [unconverted(node).meta.get("val") for node in written if isinstance(node, fx.Node)]
    storages = {storage_of(value) for value in values if isinstance(value, torch.Tensor)}
    inputs = [node for node in program.graph.find_nodes(op="placeholder") if node.name in constants]
    return {str(constants[node.name]) for node in inputs if storage_of(node.meta["val"]) in storages}


def constants_read(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """Return the tensors, other than weights and buffers, that results depend on."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    constant = torch.export.graph_signature.InputKind.CONSTANT_TENSOR
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is constant]
    return [program.constants[str(spec.target)] for spec in specs if _is_used(nodes[spec.arg.name])]


def writes_to_state(program: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """Return the operations that write to weights and buffers, each with the name of the written tensor."""
    signature, nodes = program.graph_signature, program.graph.nodes
    state = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    storages = {storage_of(node.meta["val"]): node.name for node in nodes if node.name in state}
    written = (
        (node.target, storage_of(node.all_input_nodes[0].meta["val"])) for node in nodes if writes(node)
    )
    return [(str(target), storages[storage]) for target, storage in written if storage in storages]


def operations(
    program: torch.export.ExportedProgram, states: Iterable[torch.Tensor]
) -> tuple[list[str], list[Any]]:
    """Return the operations, whatever the names of nodes, and the dtypes, shapes and bytes of constants.

    The bytes of ``states`` are left out: they change from call to call.
    """
    texts = []
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            position = {node: index for index, node in enumerate(module.graph.nodes)}
            for node in position:
                arguments = fx.node.map_arg((node.args, node.kwargs), position.__getitem__)
                texts.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {arguments}")
    changing = set(map(id, states))
    return texts, [
        (one.dtype, one.shape, None if id(one) in changing else _bytes_of(one))
        for one in constants_read(program)
    ]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


def _is_used(node: fx.Node) -> bool:
    """Whether a result, or a write, depends on a node."""
    users = reachable(node.users, lambda user: user.users)
    return any(user.op == "output" or writes(user) for user in users)
