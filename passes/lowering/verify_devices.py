"""Prove, without running it, that each operation of a lowered graph has its tensors on one device.

Devices are propagated through the fx graph from those of the weights and inputs; ``.to()`` and the load of a
segment change a device, and every other operation requires all its tensors on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphplan.devices.topology import Topology
from graphplan.errors import VerificationError
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation
from graphplan.ir.lowered_ops import constant_attribute, part_attribute
from graphplan.ir.schedule import Load, Move, Release, Run, Schedule, Step
from graphplan.message_text import lines_around
from graphplan.passes.lowering.emit import torch_devices


def verify_lowered(code: fx.Graph, graph: Graph, schedule: Schedule, topology: Topology) -> None:
    """Raise VerificationError unless each operation's tensors are on the device where it was placed.

    Also, each value is moved at most once to each device, and as often as in the schedule.
    """
    _Proof(code, graph, schedule, topology).run()


class _Proof:
    def __init__(self, code: fx.Graph, graph: Graph, schedule: Schedule, topology: Topology) -> None:
        self.code, self.graph, self.schedule = code, graph, schedule
        self.devices = devices = torch_devices(schedule, topology)
        self.host = devices[schedule.host]
        self.residence: dict[str, torch.device] = {}
        for name, key in schedule.assignment.weights.items():
            self.residence[name] = devices[key]
            if graph.weights[name].kind == "constant":
                self.residence[constant_attribute(name)] = devices[key]
        for index, part in enumerate(graph.parts):
            self.residence[part_attribute(index)] = self.residence[part.name]
        self.device: dict[fx.Node, torch.device | None] = {}
        self.moved: set[tuple[Any, Any]] = set()
        self.streamed: list[Step] = []

    def run(self) -> None:
        nodes = list(self.code.nodes)
        for index, node in enumerate(nodes):
            problem = self._visit(node)
            if problem:
                lines = [f"{line.format_node()}  # {self.device.get(line, '?')}" for line in nodes]
                raise VerificationError(f"{problem}\n{lines_around(lines, index)}")
        expected = sum(1 for move in self.schedule.moves() if move.kind != "writeback")
        if len(self.moved) != expected:
            raise VerificationError(
                f"the lowered graph moves {len(self.moved)} values, the schedule {expected}"
            )
        steps = [step for step in self.schedule.steps if not isinstance(step, Move | Run)]
        if self.streamed != steps:
            raise VerificationError(
                f"the lowered graph has {len(self.streamed)} steps of streams, the schedule {len(steps)}, or "
                "they are in another order"
            )

    def _visit(self, node: fx.Node) -> str | None:
        if node.op == "placeholder":
            value = self.graph.values.get(node.name)
            default = self.host if value is None or value.is_tensor else None
            self.device[node] = self.residence.get(node.name, default)
        elif node.op == "get_attr":
            self.device[node] = self.residence.get(str(node.target))
        elif node.op == "output":
            return None
        elif node.target is getattr:
            self.device[node] = None
        elif "move" in node.meta:
            return self._move(node)
        elif "stream" in node.meta:
            return self._stream(node, node.meta["stream"])
        elif "operation" in node.meta:
            return self._operate(node, self.graph.operations[node.meta["operation"]])
        else:  # one of several results, rows of a weight, or an input written back
            self.device[node] = self.device[node.all_input_nodes[0]]
        return None

    def _move(self, node: fx.Node) -> str | None:
        value, target, *_ = node.args
        if (value, str(target)) in self.moved:
            return f"{value} is moved to {target} twice"
        self.moved.add((value, str(target)))
        assert isinstance(value, fx.Node)
        destination = self.host if isinstance(target, fx.Node) else torch.device(str(target))
        if self.device[value] == destination:
            return f"{value} is moved to {destination}, where it is already"
        self.device[node] = destination
        return None

    def _stream(self, node: fx.Node, step: Step) -> str | None:
        self.streamed.append(step)
        if isinstance(step, Load):
            for weight in node.all_input_nodes[1:]:
                if self.device[weight] != self.devices[step.source]:
                    return f"{weight} is loaded from {step.source!r}, where it is not"
            self.device[node] = self.devices[step.device]
        else:  # a wait returns the loaded weights, a release nothing
            loaded = self.device[node.all_input_nodes[0]]
            self.device[node] = None if isinstance(step, Release) else loaded
        return None

    def _operate(self, node: fx.Node, operation: Operation) -> str | None:
        inputs = [n for n in node.all_input_nodes if self.device.get(n) is not None]
        node_on: Mapping[torch.device, fx.Node] = {self.device[n]: n for n in inputs}  # type: ignore[misc]  # Nones are out
        placed = self.devices[self.schedule.assignment.operations[operation.name]]
        values = [self.graph.values[name] for name in operation.outputs]
        self.device[node] = placed if any(value.is_tensor for value in values) else None
        if operation.host_only:
            return None
        for device, culprit in node_on.items():
            if device != placed:
                return f"{node.name} runs on {placed}, its input {culprit} is on {device}"
        return None
