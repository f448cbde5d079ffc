"""Convert a schedule to a ``torch.fx`` graph: moves become ``.to()``, device arguments the placed devices.

Before and after, for ``arange`` and ``add`` on device ``sim:1``::

    arange = arange(8, device=cpu)        arange = arange(8, device=sim:1)
    add = add(x, arange)                  x_1 = x.to('sim:1')
                                          add = add(x_1, arange)

The result takes the tensors of a forward pass, in order, and returns a flat tuple. Weights are read from the
module under their original names; for streamed ones see :mod:`graphplan.ir.lowered_ops`.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Iterable
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from graphplan.capture.attention import RUNS as ATTENTION
from graphplan.capture.captured_graph import Capture
from graphplan.devices.topology import CPU, DISK, DeviceKey, Topology
from graphplan.errors import NoGraphError, VerificationError
from graphplan.ir.graph import Graph
from graphplan.ir.lowered_ops import (
    GRADIENTS,
    add_gradient,
    arrived,
    constant_attribute,
    gradient_added,
    gradient_to,
    part_attribute,
    stream_attribute,
)
from graphplan.ir.schedule import Load, Move, Release, Run, Schedule, Wait, backward_start
from graphplan.passes.frontend.simplify import drop_checks


def lower(
    capture: Capture, graph: Graph, schedule: Schedule, topology: Topology
) -> tuple[fx.Graph, dict[str, fx.GraphModule]]:
    """Return the fx graph of ``schedule``; attribute -> graph that ``torch.cond`` or its like calls."""
    return _Lowering(capture, graph, schedule, topology).run()


def torch_devices(schedule: Schedule, topology: Topology) -> dict[DeviceKey, torch.device]:
    """Return the torch device of each key, and of ``schedule.host``, which may be a name instead."""
    devices = {spec.key: spec.torch_device for spec in topology.devices}
    if schedule.host not in devices:
        devices[schedule.host] = torch.device(str(schedule.host))
    return devices


class _Lowering:
    def __init__(self, capture: Capture, graph: Graph, schedule: Schedule, topology: Topology) -> None:
        self.capture, self.graph, self.schedule = capture, graph, schedule
        self.devices = torch_devices(schedule, topology)
        self.source = {node.name: node for node in capture.graph.nodes}
        self.out = fx.Graph()
        self.env: dict[tuple[str, DeviceKey], fx.Node] = {}
        self.home: dict[str, DeviceKey] = dict(schedule.assignment.weights)
        self.name_of = {node: capture.weights.get(name, name) for name, node in self.source.items()}
        self.return_device: fx.Node | None = None
        self.pending_copies: dict[tuple[str, DeviceKey], torch.device] = {}
        self.branches: dict[str, fx.GraphModule] = {}
        self.streams: dict[DeviceKey, fx.Node] = {}
        self.loaded: dict[tuple[DeviceKey, int], fx.Node] = {}
        self.owned = graph.owned_gradients
        self.step = 0
        self.last_read = _last_reads(graph, schedule)
        self.added: dict[int, list[tuple[str, fx.Node]]] = {}  # step after which hooks run -> gradients
        self.copies: dict[str, list[fx.Node]] = {}  # weight -> its loads in the current pass

    def run(self) -> tuple[fx.Graph, dict[str, fx.GraphModule]]:
        self._placeholders()
        backward = backward_start(self.graph, self.schedule.steps)
        forward: set[fx.Node] = set()
        for index, step in enumerate(self.schedule.steps):
            self.step = index
            if index == backward:
                self._await_copies()
                forward = set(self.out.nodes)
                self.copies.clear()
            if isinstance(step, Move):
                self._move(step)
            elif isinstance(step, Run):
                self._run(step)
            else:
                self._stream(step)
            for parameter, added in self.added.get(index, ()):
                self._call(gradient_added, (added, *self.copies.get(parameter, ())), f"{added.name}_added")
        self._await_copies()
        self._output()
        if forward:
            for node in self.out.nodes:
                node.meta["backward"] = node not in forward
        self.out.lint()
        return self.out, self.branches

    def _placeholders(self) -> None:
        for name in self.graph.inputs:
            node = self.out.placeholder(name)
            node.meta.update(self.source[name].meta)
            self.env[name, self.schedule.host] = node
            self.home[name] = self.schedule.host
        for name in self.graph.weights:
            if name in self.capture.states:
                node = self.out.placeholder(name)
                node.meta.update(self.source[name].meta)
                self.env[name, self.home[name]] = node
        moved_out = any(True for _ in self.schedule.moves("output"))
        tangents = () if self.capture.step is None else self.capture.step.tangents  # not in the forward pass
        tensors = [n for n in self.graph.inputs if self.graph.values[n].is_tensor and n not in tangents]
        if moved_out and tensors:
            first = self.env[tensors[0], self.schedule.host]
            self.return_device = self.out.call_function(getattr, (first, "device"))

    def _instance(self, name: str, key: DeviceKey) -> fx.Node:
        node = self.env.get((name, key))
        if node is not None:
            return self._await_copy(name, key) if (name, key) in self.pending_copies else node
        in_place = self.home.get(name) == DISK and self.devices[key].type == CPU
        if name not in self.graph.weights or (self.home[name] != key and not in_place):
            raise VerificationError(f"lowering needs {name!r} on {key!r}, where the schedule has not put it")
        if self.graph.weights[name].part_of:
            node = self._part(name, key)
        else:
            constant = name in self.capture.constants
            node = self.out.get_attr(constant_attribute(name) if constant else _readable(name))
        self.env[name, key] = node
        return node

    def _part(self, name: str, key: DeviceKey) -> fx.Node:
        """Return rows of a weight: a view on the weight's device, else the copy that resides on ``key``."""
        part = self.graph.weights[name]
        whole = self._instance(part.part_of, self.home[part.part_of])
        if self.home[part.part_of] == key:
            return self._call(torch.narrow, (whole, 0, part.start, part.shape[0]), name)
        copy_of_rows = self.out.get_attr(part_attribute(self.graph.parts.index(part)))
        return self._call("current", (copy_of_rows, whole), name)

    def _move(self, step: Move) -> None:
        node = self._instance(step.value, step.source)
        if step.kind == "writeback":
            caller = self.env[step.value, step.destination]
            self.out.call_method("copy_", (caller, node))
            return
        target: Any = str(self.devices[step.destination])
        if step.kind == "output" and self.return_device is not None:
            target = self.return_device
        suffix = "returned" if step.kind == "output" else f"on_{step.destination}"
        name = f"{step.value}_{suffix}"
        source, destination = self.devices[step.source], self.devices[step.destination]
        if step.kind == "gradient" and destination.type == CPU:
            parameter = self._instance(self.graph.values[step.value].gradient_of, step.destination)
            copies = self.out.get_attr(GRADIENTS)
            moved = self._call(gradient_to, (node, target, parameter, copies), name)
        else:
            moved = self._call("to", (node, target), name)
            if source.type == "cuda" and destination.type == CPU:
                moved.kwargs = {"non_blocking": True}
                self.pending_copies[step.value, step.destination] = source
        moved.meta["move"] = step
        self.env[step.value, step.destination] = moved
        if step.kind == "gradient":
            self._add_gradient(step.value, step.destination, owned=True)

    def _await_copy(self, name: str, key: DeviceKey) -> fx.Node:
        """Return the value on the CPU, once its copy is done."""
        source, node = self.pending_copies.pop((name, key)), self.env[name, key]
        self.env[name, key] = self._call(arrived, (node, str(source)), f"{name}_arrived")
        return self.env[name, key]

    def _await_copies(self) -> None:
        for name, key in list(self.pending_copies):
            self._await_copy(name, key)

    def _add_gradient(self, name: str, key: DeviceKey, *, owned: bool) -> None:
        parameter = self.graph.values[name].gradient_of
        last = self.last_read.get(parameter, 0)
        arguments = self._instance(parameter, key), self.env[name, key], owned, last <= self.step
        added = self._call(add_gradient, arguments, f"{name}_of_{parameter}")
        if last > self.step:
            self.added.setdefault(last, []).append((parameter, added))

    def _stream(self, step: Load | Wait | Release) -> None:
        place = step.device, step.segment
        if isinstance(step, Release):
            node = self._call("release", (self.loaded[place],), f"released_{step.segment}")
        elif isinstance(step, Load):
            weights = [self._instance(name, step.source) for name in step.weights]
            arguments = (self._prefetch_buffer(step.device), step.segment, *weights)
            node = self.loaded[place] = self._call("load", arguments, f"loaded_{step.segment}")
            for name in step.weights:
                self.copies.setdefault(name, []).append(node)
        else:
            node = self._call("wait", (self.loaded[place],), f"segment_{step.segment}")
            for position, name in enumerate(self.schedule.segment(step).weights):
                part = self._call(operator.getitem, (node, position), f"{name}_on_{step.device}")
                self.env[name, step.device] = part
        node.meta["stream"] = step

    def _call(self, target: Any, arguments: tuple[Any, ...], name: str) -> fx.Node:
        """Create a call of a function, or of the first argument's method if ``target`` is a name."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        return self.out.create_node(kind, target, arguments, name=re.sub(r"\W", "_", name))

    def _prefetch_buffer(self, key: DeviceKey) -> fx.Node:
        if key not in self.streams:
            index = next(i for i, buffer in enumerate(self.schedule.prefetch_buffers) if buffer.device == key)
            self.streams[key] = self.out.get_attr(stream_attribute(index))
        return self.streams[key]

    def _run(self, step: Run) -> None:
        operation = self.graph.operations[step.operation]
        node = self.source[operation.name]

        def find(argument: fx.Node) -> Any:
            name = self.name_of[argument]
            if argument.op == "get_attr" and name not in self.graph.weights:
                return self._branch(str(argument.target), self.devices[step.device])
            value = self.graph.values.get(name)
            elsewhere = operation.host_only or (value is not None and not value.is_tensor)
            return self._instance(name, self.home[name] if elsewhere else step.device)

        copied = self.out.node_copy(node, find)
        copied.target = ATTENTION.get(copied.target, copied.target)  # the function that autograd records
        copied.meta["operation"] = operation.name
        _set_device(copied, self.devices[step.device])
        self._bind(node.name, step.device, copied)
        for user in node.users:
            if user.name in operation.outputs and user is not node:
                part = self.out.call_function(operator.getitem, (copied, user.args[1]))
                part.meta.update(user.meta)
                self._bind(user.name, step.device, part)
        for name in operation.outputs:
            parameter = self.graph.values[name].gradient_of
            if parameter and self.schedule.assignment.weights[parameter] == step.device:
                self._add_gradient(name, step.device, owned=name in self.owned)

    def _branch(self, name: str, device: torch.device) -> fx.Node:
        """Copy a graph that a control-flow operation calls, with that operation's device in its nodes."""
        branch = copy.deepcopy(getattr(self.capture.module, name))
        for part in [m for m in branch.modules() if isinstance(m, fx.GraphModule)]:
            drop_checks(part.graph)
            for node in part.graph.nodes:
                if node.op == "call_function":
                    _set_device(node, device)
            part.recompile()
        self.branches[name] = branch
        return self.out.get_attr(name)

    def _bind(self, name: str, key: DeviceKey, node: fx.Node) -> None:
        self.env[name, key] = node
        self.home[name] = key

    def _output(self) -> None:
        def find(argument: Any, *, stays: bool = False) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            name, returned = self.name_of[argument], self.schedule.returns_to_host and not stays
            moved = self.env.get((name, self.schedule.host)) if returned else None
            return moved or self._instance(name, self.home[name])

        results = [
            find(argument, stays=position in self.capture.kept)
            for position, argument in enumerate(self.capture.outputs)
        ]
        step = self.capture.step
        gradients = [] if step is None else [find(self.source[name]) for name in step.input_gradients]
        self.out.output((*results, *gradients))


def _last_reads(graph: Graph, schedule: Schedule) -> dict[str, int]:
    """Return weight -> the last step that reads it, or a value that shares its memory."""
    last: dict[str, int] = {}
    for index, step in enumerate(schedule.steps):
        read: Iterable[str] = ()
        if isinstance(step, Run):
            read = graph.operations[step.operation].inputs
        elif isinstance(step, Move):
            read = (step.value,)
        elif isinstance(step, Load):
            read = step.weights
        last.update(dict.fromkeys(map(graph.root, read), index))
    return last


def _readable(name: str) -> str:
    """Return the name of a weight; raise NoGraphError if generated code cannot read that attribute."""
    word = next(filter(iskeyword, name.split(".")), "self" if name == "self" else None)
    if word is not None:
        raise NoGraphError(
            f"generated code reads weights by name: rename {name!r}, as {word!r} is a word of Python"
        )
    return name


def _set_device(node: fx.Node, device: torch.device) -> None:
    """Replace the devices that the trace baked into an operation; a factory without one gets it."""
    if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
        node.args = tuple(device if isinstance(value, torch.device) else value for value in node.args)
        named = node.kwargs.items()
        node.kwargs = {name: device if isinstance(value, torch.device) else value for name, value in named}
    elif isinstance(node.target, torch._ops.OpOverload) and not node.all_input_nodes:
        takes_device = any(argument.name == "device" for argument in node.target._schema.arguments)
        if takes_device and "device" not in node.kwargs:
            node.update_kwarg("device", device)
