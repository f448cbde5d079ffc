"""What a model assigns to itself in a call: buffers are written, and other tensors must not be read again.

Before and after, in what is traced of a module's call::

    self.mean = 0.9 * self.mean + x            add = 0.9 * mean + x
                                               copy_ = copy_(mean, add)

Torch does so for the buffers of the model itself, and not for those of its submodules. Of other attributes a
trace knows the tensor that was there before: a model that reads what its last call has left is no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.captured_graph import Capture
from graphplan.errors import NoGraphError

aten = torch.ops.aten


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """A block after which the modules of a tree have the buffers that they had."""
    before = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for table, buffers in before:
            if list(map(id, table.values())) != list(map(id, buffers.values())):
                table.clear()
                table.update(buffers)


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A tensor that was assigned to a module, by itself."""

    owner: dict[str, Any]
    label: str
    name: str
    before: Any
    after: torch.Tensor


class AssignedState:
    """What modules assign in one trace: see the module's text."""

    def __init__(self) -> None:
        self._before: dict[int, dict[str, Any]] = {}
        self._written: dict[tuple[int, str], Any] = {}
        self._attributes: list[_Attribute] = []

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a module's call, after which buffers are written.

        Raises:
            NoGraphError: a buffer is added, removed, or takes another shape or type.
        """
        is_root = not self._before
        if is_root:
            for _, own in _attributes(module):
                self._before[id(own)] = dict(own)
                self._before[id(own["_buffers"])] = dict(own["_buffers"])
        result = forward(*args, **kwargs)
        for label, own in _attributes(module):
            self._write_buffers(label, own["_buffers"])
            before = self._before.get(id(own), own)
            for name, value in own.items() if is_root else ():
                if isinstance(value, torch.Tensor) and value is not before.get(name):
                    self._attributes.append(_Attribute(own, label, name, before.get(name), value))
        return result

    def _write_buffers(self, label: str, table: Mapping[str, Any]) -> None:
        before = self._before.get(id(table), table)  # a part of a Sequential is a module of its own
        if table.keys() != before.keys():
            raise NoGraphError(f"{label} adds or removes buffers when it is called, which no graph can do")
        for name, value in table.items():
            if value is not self._written.get((id(table), name), before[name]):
                _write(f"{label}.{name}", before[name], value)
                self._written[id(table), name] = value

    def refuse_kept(self, program: torch.export.ExportedProgram) -> None:
        """Raise NoGraphError where the traced call reads a tensor in the place of which it puts another."""
        readers = {node.name: node.users for node in program.graph.find_nodes(op="placeholder")}
        read = [
            program.constants[str(spec.target)]
            for spec in program.graph_signature.input_specs
            if spec.kind is torch.export.graph_signature.InputKind.CONSTANT_TENSOR and readers[spec.arg.name]
        ]
        for one in self._attributes:
            if any(one.before is tensor for tensor in read):
                raise NoGraphError(
                    f"{one.label}.{one.name} is read and then assigned: a graph has nothing from the call "
                    f"before, but for buffers. Make it one, by register_buffer({one.name!r}, ...)"
                )

    @contextmanager
    def left(self) -> Iterator[bool]:
        """A block in which what was no tensor before the call is one, as after it; whether there is any."""
        new = [one for one in self._attributes if not isinstance(one.before, torch.Tensor)]
        had = [(one, one.name in one.owner) for one in new]
        for one in new:
            shape = [int(size) for size in one.after.shape]
            one.owner[one.name] = torch.zeros(shape, dtype=one.after.dtype)
        try:
            yield bool(new)
        finally:
            for one, there in had:
                if there:
                    one.owner[one.name] = one.before
                else:
                    one.owner.pop(one.name)


def keep_what_is_read(capture: Capture) -> None:
    """Let a backward pass read what assigned buffers held before: a copy, which nothing writes to."""
    place = {node: index for index, node in enumerate(capture.graph.nodes)}
    for node in filter(_is_assignment, list(place)):
        buffer = node.all_input_nodes[0]
        earlier = [user for user in buffer.users if place[user] < place[node]]
        if buffer.name not in capture.weights or not earlier or any(map(_writes, earlier)):
            continue
        first = min(earlier, key=place.__getitem__)
        with capture.graph.inserting_before(first):
            copy = capture.graph.call_function(aten.clone.default, (buffer,))
        copy.meta = {**first.meta, "val": buffer.meta["val"]}
        for user in earlier:
            user.replace_input_with(buffer, copy)


def _is_assignment(node: fx.Node) -> bool:
    """As :func:`_write` has it traced."""
    return node.target is aten.copy_.default and node.all_input_nodes[-1].target is aten.detach.default


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _write(name: str, buffer: torch.Tensor | None, value: torch.Tensor | None) -> None:
    """What follows in the call reads ``value`` itself, with its gradient."""
    if buffer is None or value is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        raise NoGraphError(
            f"{name} is {_said(buffer)} and is assigned {_said(value)}: in a graph, a buffer keeps its shape "
            "and type"
        )
    buffer.copy_(value.detach())


def _said(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _attributes(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The class and the attributes of each module of a tree, once; a tracer puts others in their places."""
    pending, seen = [module], set[int]()
    while pending:
        part = pending.pop()
        own = vars(part)
        if id(own) not in seen:
            seen.add(id(own))
            pending += [child for child in own["_modules"].values() if child is not None]
            yield type(part).__name__, own
