"""Placement in a graph of the writes of buffers that a model assigns.

A trace has these writes at its end, where no code of the model can read the buffer any more. There the new
values would stay in memory until the end, and the device of the first module would run an operation last. So
each write is moved up to the last operation that reads the buffer's former values::

    linear = linear(x, w)              linear = linear(x, w)
    add = add(linear, hidden)          add = add(linear, hidden)
    linear_1 = linear(add, w_1)        detach = detach(add)
    detach = detach(add)               copy_ = copy_(hidden, detach)
    copy_ = copy_(hidden, detach)      linear_1 = linear(add, w_1)

Former values of a buffer that are returned, or assigned to another buffer, are copied first.
"""

from __future__ import annotations

import operator
from collections.abc import Container

import torch
from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.capture.source_lines import belong_with
from graphplan.capture.structure import attribute_and_leaf
from graphplan.capture.written_memory import memories, named_arguments, written_arguments

aten = torch.ops.aten

ASSIGNS = "graphplan_assigns"
"""Key in the ``meta`` of nodes that write an assigned buffer, at the end of a trace."""


def place_writes(graph: fx.Graph) -> None:
    """Move writes of assigned buffers up from the end of a graph; see the module docstring."""
    writes = {node: node.all_input_nodes[-1] for node in graph.nodes if node.meta.pop(ASSIGNS, False)}
    if not writes:
        return
    written = set(_memories(*writes))
    copies: dict[fx.Node, fx.Node] = {}
    for reader in (*writes.values(), graph.output_node()):
        for argument in reader.all_input_nodes:
            source = argument
            while source in writes:  # the trace's node for a buffer is the last write to it
                source = source.all_input_nodes[0]
            if written.isdisjoint(_memories(source)):
                continue
            if source not in copies:
                with graph.inserting_before(next(iter(writes.values()))):
                    copies[source] = graph.call_function(aten.clone.default, (source,))
                copies[source].meta = {"val": source.meta["val"].clone()}
            reader.replace_input_with(argument, copies[source])
    for source, copy in copies.items():
        _move([copy], set(_memories(source)))
    for write, detach in writes.items():
        _move([detach, write], set(_memories(write)))


def _move(nodes: list[fx.Node], memory: set[int]) -> None:
    """Move nodes up to the last node that computes an input of theirs, or touches their ``memory``."""
    inputs = {source for node in nodes for source in node.all_input_nodes}
    read = set(_memories(*inputs))
    last = nodes[0].prev
    while last.op != "placeholder" and last not in inputs:
        touched = _memories(last, *last.all_input_nodes)
        if not memory.isdisjoint(touched) or (_may_write(last) and not read.isdisjoint(touched)):
            break
        last = last.prev
    for node in reversed(nodes):
        last.append(node)
        belong_with(node, last)


def _may_write(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(written_arguments(node.target, node.args, node.kwargs))
    return node.target is not operator.getitem


def _memories(*nodes: fx.Node) -> list[int]:
    return memories(*map(unconverted, nodes))


def unconverted(node: fx.Node) -> fx.Node:
    """Return the node whose tensor ``to`` returned unchanged: a trace gives the result another memory."""
    while getattr(node.target, "overloadpacket", None) is aten.to:
        source = node.all_input_nodes[0]
        named = named_arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        own, before = node.meta["val"], source.meta["val"]
        if named.get("copy") or (own.dtype, own.device) != (before.dtype, before.device):
            break
        node = source
    return node


def copy_read_buffers(capture: Capture) -> None:
    """Make readers of a buffer before its assignment read a copy, which a backward pass may read later."""
    for node in capture.graph.find_nodes(op="call_function", target=aten.copy_.default):
        if node.all_input_nodes[-1].target is not aten.detach.default:
            continue  # not a write of an assigned buffer, as ``AssignedState`` traces it
        buffer = node.all_input_nodes[0]
        earlier = sorted(user for user in buffer.users if user < node)
        if _written_node(buffer).name not in capture.weights or not earlier or any(map(writes, earlier)):
            continue
        with capture.graph.inserting_before(earlier[0]):
            copy = capture.graph.call_function(aten.clone.default, (buffer,))
        copy.meta = {**earlier[0].meta, "val": buffer.meta["val"]}
        for user in earlier:
            user.replace_input_with(buffer, copy)


def copy_read_states(capture: Capture, states: Container[str]) -> None:
    """Read copies of attributes that calls update: a backward pass may follow after more calls."""
    names = {name for name, at in (capture.attributes or {}).items() if attribute_and_leaf(at)[0] in states}
    for node in capture.graph.find_nodes(op="placeholder"):
        if capture.weights.get(node.name) in names:
            with capture.graph.inserting_after(node):
                copy = capture.graph.call_function(aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)


def _written_node(node: fx.Node) -> fx.Node:
    """Return the node whose tensor a chain of in-place operations writes to."""
    while writes(node):
        node = node.all_input_nodes[0]
    return node


def writes(node: fx.Node) -> bool:
    """Whether a node is an in-place operation, by its schema."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
