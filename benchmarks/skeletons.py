"""The module tree that a graph's names describe, for those who ask for modules."""

from __future__ import annotations

import torch
from torch import nn

from graphplan.ir.graph import Graph


class Block(nn.Module):
    """A module that device maps keep whole."""


def skeleton(graph: Graph) -> nn.Module:
    """The module tree that a graph's names describe, its parameters on the meta device.

    The outermost modules whose name is a number are blocks. Modules and parameters are registered in
    the order of execution; a tied weight is one parameter under all its names.
    """
    root = nn.Module()
    made: dict[str, nn.Parameter] = {}
    for operation in graph.operations.values():
        module, inside = root, False
        for part in operation.module_path.split("."):
            if not hasattr(module, part):
                block = part.isdigit() and not inside
                module.add_module(part, Block() if block else nn.Module())
            inside = inside or part.isdigit()
            module = getattr(module, part)
        for name in operation.inputs:
            if name in graph.weights:
                _register(module, operation.module_path, graph, name, made)
    return root


def _register(module: nn.Module, path: str, graph: Graph, weight: str, made: dict[str, nn.Parameter]) -> None:
    found = graph.weights[weight]
    if weight not in made:
        data = torch.empty(found.nbytes, dtype=torch.uint8, device="meta")
        made[weight] = nn.Parameter(data, requires_grad=False)
    for name in found.names:
        owner, _, leaf = name.rpartition(".")
        if owner == path and leaf not in module._parameters:
            module.register_parameter(leaf, made[weight])
