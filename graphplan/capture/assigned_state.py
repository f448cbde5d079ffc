"""What a model assigns to itself in a call: buffers are written, and other tensors must not be read again.

Before and after, in what is traced of a module's call::

    self.mean = 0.9 * self.mean + x            add = 0.9 * mean + x
                                               copy_ = copy_(mean, add)

Torch does so for the buffers of the model itself, and not for those of its submodules. Of other attributes a
trace knows the tensor that was there before: a model that reads what its last call has left is no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.captured_graph import Capture
from graphplan.capture.structure import Seen, flatten, unflatten
from graphplan.errors import NoGraphError

aten = torch.ops.aten

_TORCHS = frozenset(vars(nn.Module()))  # attributes that each module has


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
    """Tensors that a call has put into an attribute, which has ``before`` in it until then."""

    owner: dict[str, Any]
    label: str
    name: str
    before: list[torch.Tensor]
    after: Any


class AssignedState:
    """What modules assign in one trace: see the module's text."""

    def __init__(self) -> None:
        self._buffers: dict[int, dict[str, Any]] = {}
        self._tensors: dict[tuple[int, str], list[torch.Tensor]] = {}
        self._written: dict[tuple[int, str], Any] = {}
        self._attributes: list[_Attribute] = []

    def call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a module's call, after which buffers are written.

        Raises:
            NoGraphError: a buffer is added, removed, or takes another shape or type.
        """
        is_root = not self._buffers
        if is_root:
            for _, own in _modules(module):
                self._buffers[id(own)] = dict(own["_buffers"])
                self._tensors.update(((id(own), name), _tensors(value)) for name, value in _attributes(own))
        result = forward(*args, **kwargs)
        for label, own in _modules(module):
            self._write_buffers(label, own)
            for name, value in _attributes(own) if is_root else ():
                before = self._tensors.get((id(own), name), [])
                if not {id(one) for one in before}.issuperset(map(id, _tensors(value))):
                    self._attributes.append(_Attribute(own, label, name, before, value))
        return result

    def _write_buffers(self, label: str, own: dict[str, Any]) -> None:
        table = own["_buffers"]
        before = self._buffers.get(id(own), table)  # a part of a Sequential is a module of its own
        if table.keys() != before.keys():
            raise NoGraphError(f"{label} adds or removes buffers when it is called, which no graph can do")
        for name, value in table.items():
            if value is not self._written.get((id(own), name), before[name]):
                _write(f"{label}.{name}", before[name], value)
                self._written[id(own), name] = value

    def refuse_kept(self, program: torch.export.ExportedProgram) -> None:
        """Raise NoGraphError where the traced call reads a tensor in the place of which it puts another."""
        readers = {node.name: node.users for node in program.graph.find_nodes(op="placeholder")}
        read = [
            program.constants[str(spec.target)]
            for spec in program.graph_signature.input_specs
            if spec.kind is torch.export.graph_signature.InputKind.CONSTANT_TENSOR and readers[spec.arg.name]
        ]
        for one in self._attributes:
            if any(before is tensor for before in one.before for tensor in read):
                raise NoGraphError(
                    f"{one.label}.{one.name} is read and then assigned: a graph has nothing from the call "
                    f"before, but for buffers. Make it one, by register_buffer({one.name!r}, ...)"
                )

    @contextmanager
    def left(self) -> Iterator[bool]:
        """A block in which what was no tensor before the call is one, as after it; whether there is any."""
        new = [one for one in self._attributes if not one.before]
        had = [(one, one.name in one.owner, one.owner.get(one.name)) for one in new]
        for one in new:
            leaves, spec = flatten(one.after, Seen())
            one.owner[one.name] = unflatten(list(map(_zeros, leaves)), spec)
        try:
            yield bool(new)
        finally:
            for one, there, value in had:
                one.owner.pop(one.name)
                if there:
                    one.owner[one.name] = value


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


def _modules(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The class and the attributes of each module of a tree, once; a tracer puts others in their places."""
    pending, seen = [module], set[int]()
    while pending:
        part = pending.pop()
        own = vars(part)
        if id(own) not in seen:
            seen.add(id(own))
            pending += [child for child in own["_modules"].values() if child is not None]
            yield type(part).__name__, own


def _attributes(own: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of a module's attributes that may hold tensors, by themselves or in containers."""
    for name, value in own.items():
        if name not in _TORCHS and isinstance(value, torch.Tensor | list | tuple | dict):
            yield name, value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value, Seen())[0] if isinstance(leaf, torch.Tensor)]


def _zeros(leaf: Any) -> Any:
    """In the place of a traced tensor, one with data."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.zeros([int(size) for size in leaf.shape], dtype=leaf.dtype)
