"""What a model assigns to itself in a call: buffers are written, and other tensors must not be read again.

Before and after, in what is traced of a module's call::

    self.mean = 0.9 * self.mean + x            add = 0.9 * mean + x
                                               copy_ = copy_(mean, add)

Torch does so for the buffers of the model itself, and not for those of its submodules. Of other attributes a
trace knows the tensor that was there before: a model that goes by what its last call has left is no graph. A
table that is made at the first call, and then read, is: each call of the graph makes it. A flag by which the
first call differs from the next, such as one that says that weights are scaled already, makes no graph. Which
of these it is shows in a trace of the call that comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import fx, nn

from graphplan._compat.torch import storage_of
from graphplan.capture.captured_graph import Capture
from graphplan.capture.changes.assigned_data import AssignedData
from graphplan.capture.changes.assigned_writes import ASSIGNS, unconverted
from graphplan.capture.changes.attribute_data import data_in, objects_in
from graphplan.capture.changes.attribute_snapshots import Snapshot, own_attributes, snapshot
from graphplan.capture.structure import Seen, flatten, reached, unflatten, written_arguments
from graphplan.capture.value_branches import Branch
from graphplan.errors import NoGraphError

aten = torch.ops.aten

_ABSENT = object()

WRITTEN = "written to in place"


class KeptStateError(NoGraphError):
    """A call leaves in attributes what the next goes by: the model itself is to run, and no copy of it."""


@contextmanager
def restored(tables: Iterable[dict[str, Any]]) -> Iterator[None]:
    """A block after which tables have the entries that they had."""
    before = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, entries in before:
            if list(table) != list(entries) or any(map(is_not, table.values(), entries.values())):
                table.clear()
                table.update(entries)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """What a call has put under a name, among a module's attributes or buffers; or that it took it away."""

    owner: dict[str, Any]
    label: str
    name: str
    before: Any
    tensors: list[torch.Tensor]  # that were there before
    after: Any
    is_plain: bool  # whether numbers, texts or flags are others


class AssignedState:
    """What modules, and the objects in their attributes, assign in one trace: see the module's text.

    Attributes:
        losses: attributes that have a gradient, such as losses for others to add.
        makes_tensors: whether the next call may go by tensors that this one has made.
        goes_by_values: whether the trace went by the value of a tensor.
        data: what the code assigns the ``data`` of.
        branches: of the code, that go by weights or inputs.
        told: the values that it was told, as in ``Branches``.
        kept_by_hooks: what is to be said of hooks that store something outside of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = set(map(id, model.modules()))
        self._objects = {id(one): one for one in objects_in(model)}
        self._buffers: dict[int, dict[str, Any]] = {}
        self._attributes: dict[int, dict[str, Snapshot]] = {}
        self._written: dict[tuple[int, str], torch.Tensor] = {}
        self._made: dict[tuple[int, str], _Change] = {}
        self._changes: list[_Change] = []
        self._requiring = set[int]()  # ids of buffers that required a gradient before
        self._with_history: list[str] = []
        self.losses: list[str] = []
        self.data = AssignedData(model)
        self.branches: list[Branch] = []
        self.told: set[tuple[Any, ...]] = set()
        self.makes_tensors = False
        self.goes_by_values = False
        self.kept_by_hooks: list[str] = []

    def note_value(self) -> None:
        """Know that the trace has gone by the value of a tensor."""
        self.goes_by_values = True

    def call(
        self, tracer: Any, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """The result of a module's call; buffers are written at the end of the first, that of the model."""
        if self._buffers:
            return forward(*args, **kwargs)
        for part in _modules(module):
            buffers = self._buffers[id(part._buffers)] = dict(part._buffers)
            self._requiring |= {id(x) for x in buffers.values() if x is not None and x.requires_grad}
        for owner in (*_modules(module), *self._objects.values()):
            known = {name: snapshot(value) for name, value in own_attributes(owner).items()}
            self._attributes[id(vars(owner))] = known
        result = forward(*args, **kwargs)
        for part in _modules(module):
            self._write_buffers(tracer.graph, type(part).__name__, part._buffers)
        for owner in (*_modules(module), *self._objects.values()):
            self._note_attributes(owner)
        return result

    def _write_buffers(self, graph: fx.Graph, label: str, table: dict[str, Any]) -> None:
        before = self._buffers.get(id(table), table)  # that of a module made in the call is not written
        for name in {**before, **table}:
            value, buffer = table.get(name), before.get(name)
            if value is not None and value.requires_grad and id(value) not in self._requiring:
                self._with_history.append(f"{label}.{name}")
            if value is buffer:
                continue
            if buffer is None or value is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
                self._made[id(table), name] = _Change(table, label, name, buffer, [], value, False)
                continue
            if {buffer.layout, value.layout} != {torch.strided}:
                raise NoGraphError(f"{label}.{name} is assigned a tensor of the layout {value.layout}")
            buffer.copy_(value.detach())
            next(iter(reversed(graph.nodes))).meta[ASSIGNS] = True
            self._written[id(table), name] = value

    def refuse_history(self) -> None:
        """Raise NoGraphError where a call leaves a buffer through which gradients flow: eager keeps them."""
        if self._with_history:
            raise NoGraphError(
                f"a call leaves {self._with_history[0]} with a gradient, which eager keeps and a graph does "
                "not: assign .detach() of it, if no backward pass is to go through it after the call"
            )

    def assigned(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """What buffers were assigned, by each of their names in the module."""
        return {
            f"{path}.{name}" if path else name: self._written[id(part._buffers), name]
            for path, part in module.named_modules(remove_duplicate=False)
            for name in part._buffers
            if (id(part._buffers), name) in self._written
        }

    def _note_attributes(self, owner: Any) -> None:
        own, label = vars(owner), type(owner).__name__
        known = self._attributes.get(id(own), {})
        for name in {**known, **own_attributes(owner)}:
            before, after = known.get(name, Snapshot(_ABSENT)), own.get(name, _ABSENT)
            if not before.is_of(after):
                was, now = self._opened(before), self._opened(snapshot(after))
                is_plain = was.plain() != now.plain()
                self._changes.append(_Change(own, label, name, before.value, _tensors(was), after, is_plain))
                # as weight_norm sets the weight that is then read
                by_hook = own.get("_forward_pre_hooks") and isinstance(before.value, torch.Tensor)
                if not by_hook and any(one.grad_fn for one in _tensors(now)):
                    self.losses.append(f"{label}.{name}")

    def _opened(self, kept: Snapshot) -> Snapshot:
        """With what is in the objects there, also in those that the call has made."""
        return kept.opened(self._objects | self._made_in(kept.value))

    def _made_in(self, value: Any) -> dict[int, Any]:
        """The objects in what the call has left that were not there before, by their ids."""
        found = data_in("", value, set(self._objects), self._modules).objects
        return {id(one): one for one in found if id(vars(one)) not in self._attributes}

    def _tensors_in(self, value: Any) -> list[torch.Tensor]:
        return _tensors(self._opened(snapshot(value)))

    def _carried(self, read: list[torch.Tensor]) -> list[_Change]:
        """Attributes that have other tensors after the traced call than those that it read."""
        return [one for one in self._changes if _any_of(one.tensors, read)]

    @contextmanager
    def left(self, program: torch.export.ExportedProgram) -> Iterator[bool]:
        """A block in which modules have what the traced call has left; whether the next call may go by it."""
        carried = self._carried(_read(program))
        grown = [one for one in self._changes if len(one.tensors) != len(self._tensors_in(one.after))]
        self.makes_tensors = bool(carried or grown or self._made)
        plain = any(one.is_plain for one in self._changes)
        new = [*self._changes, *self._made.values()] if self.makes_tensors or plain else []
        with restored(one.owner for one in new):
            for one in new:
                for made in self._made_in(one.after).values():
                    vars(made).update({name: _without_trace(value) for name, value in vars(made).items()})
                if one.after is _ABSENT:
                    one.owner.pop(one.name, None)
                else:
                    one.owner[one.name] = _without_trace(one.after)
            yield bool(new)

    def refuse_other(
        self,
        traced: torch.export.ExportedProgram,
        again: AssignedState,
        program: torch.export.ExportedProgram,
    ) -> None:
        """Raise KeptStateError where the next call is another by what this one, ``traced``, has left.

        ``again`` and ``program`` are of the next.
        """
        for key, one in self._made.items():
            once = one.before is not None and one.after is None
            if once or key in again._made or key in again._written:
                raise KeptStateError(
                    f"{one.label}.{one.name} is {_said(one.before)} and is assigned {_said(one.after)}: in a "
                    "graph, a buffer keeps its shape and type"
                )
        read, changed = _read(program), {(id(one.owner), one.name) for one in again._changes}
        for one in again._carried(read) + self._carried(_read(traced)):
            kept = (id(one.owner), one.name) not in changed and _any_of(
                self._tensors_in(one.owner[one.name]), read
            )
            if not kept:  # as it is where a tensor is converted once
                label = f"{one.label}.{one.name}"
                raise KeptStateError(nothing_from_before(label, one.name, "read and then assigned"))
        written = [program.constants[name] for name in written_constants(program)]
        for one in self._changes:
            if _any_of(self._tensors_in(one.owner.get(one.name)), written):
                raise KeptStateError(nothing_from_before(f"{one.label}.{one.name}", one.name, WRITTEN))
        plain = [one for one in self._changes if one.is_plain]
        # what the next call reads of new tensors, the first has made
        described = _writes_to_state if self.makes_tensors else _operations
        # an answer that is kept in an attribute is not asked again
        if plain and (described(traced) != described(program) or self.told != again.told):
            raise KeptStateError(
                f"a call changes {plain[0].label}.{plain[0].name}, and the next computes something else: a "
                "graph does not. If only the first differs, call the model before you place it"
            )


def nothing_from_before(label: str, name: str, what: str) -> str:
    """Why no graph has an attribute with a name that a call changes in some way."""
    return (
        f"{label} is {what}: a graph has nothing from the call before, but for buffers. Make it one of a "
        f"module, by register_buffer({name!r}, ...)"
    )


def written_constants(program: torch.export.ExportedProgram) -> set[str]:
    """The names of the tensors, other than weights and buffers, that operations in place write to."""
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    parts = [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes] if constants else []
    written = [leaf for node in nodes for leaf in written_arguments(node.target, node.args, node.kwargs)]
    values = [unconverted(node).meta.get("val") for node in written if isinstance(node, fx.Node)]
    storages = {storage_of(value) for value in values if isinstance(value, torch.Tensor)}
    inputs = [node for node in program.graph.find_nodes(op="placeholder") if node.name in constants]
    return {str(constants[node.name]) for node in inputs if storage_of(node.meta["val"]) in storages}


def keep_what_is_read(capture: Capture) -> None:
    """Let a backward pass read what assigned buffers held before: a copy, which nothing writes to."""
    place = {node: index for index, node in enumerate(capture.graph.nodes)}
    for node in filter(_is_assignment, list(place)):
        buffer = node.all_input_nodes[0]
        earlier = sorted((user for user in buffer.users if place[user] < place[node]), key=place.__getitem__)
        if _written_node(buffer).name not in capture.weights or not earlier or any(map(_writes, earlier)):
            continue
        with capture.graph.inserting_before(earlier[0]):
            copy = capture.graph.call_function(aten.clone.default, (buffer,))
        copy.meta = {**earlier[0].meta, "val": buffer.meta["val"]}
        for user in earlier:
            user.replace_input_with(buffer, copy)


def _is_assignment(node: fx.Node) -> bool:
    """As :class:`AssignedState` has it traced."""
    return node.target is aten.copy_.default and node.all_input_nodes[-1].target is aten.detach.default


def _written_node(node: fx.Node) -> fx.Node:
    """What an operation in place, and those before it, have written to."""
    while _writes(node):
        node = node.all_input_nodes[0]
    return node


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _read(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """The tensors, other than weights and buffers, that results depend on."""
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    constant = torch.export.graph_signature.InputKind.CONSTANT_TENSOR
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is constant]
    return [program.constants[str(spec.target)] for spec in specs if _matters(nodes[spec.arg.name])]


def _writes_to_state(program: torch.export.ExportedProgram) -> list[tuple[str, str]]:
    """The operations that write to weights and buffers, and to which."""
    signature, nodes = program.graph_signature, program.graph.nodes
    state = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    storages = {storage_of(node.meta["val"]): node.name for node in nodes if node.name in state}
    written = (
        (node.target, storage_of(node.all_input_nodes[0].meta["val"])) for node in nodes if _writes(node)
    )
    return [(str(target), storages[storage]) for target, storage in written if storage in storages]


def _operations(program: torch.export.ExportedProgram) -> tuple[list[str], list[Any]]:
    """What is computed, whatever its results are called; and the tensors that the code has as they are."""
    texts = []
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            place = {node: index for index, node in enumerate(module.graph.nodes)}
            for node in place:
                arguments = fx.node.map_arg((node.args, node.kwargs), place.__getitem__)
                texts.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {arguments}")
    read = [one.detach() for one in _read(program)]
    return texts, [(one.dtype, one.shape, one.flatten().view(torch.uint8).numpy().tobytes()) for one in read]


def _any_of(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return not {id(one) for one in tensors}.isdisjoint(map(id, others))


def _matters(node: fx.Node) -> bool:
    """Whether a result, or what is written to, depends on a value."""
    users = reached(node.users, lambda user: user.users)
    return any(user.op == "output" or _writes(user) for user in users)


def _said(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Each module of a tree, once; a tracer puts others, with the same attributes, in their places."""

    def children(part: nn.Module) -> list[nn.Module]:
        return [child for child in vars(part)["_modules"].values() if child is not None]

    return reached([module], children, lambda part: id(vars(part)))


def _tensors(kept: Snapshot) -> list[torch.Tensor]:
    """The tensors that an attribute holds, by itself or in containers."""
    return [leaf for leaf in kept.leaves() if isinstance(leaf, torch.Tensor)]


def _without_trace(tree: Any) -> Any:
    """What a trace has left, of tensors with data, and with numbers in the place of symbols."""
    leaves, spec = flatten(tree, Seen())
    return unflatten([_zeros(one) if isinstance(one, torch.Tensor) else _number(one) for one in leaves], spec)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(list(map(_number, tensor.shape)), dtype=tensor.dtype)


def _number(leaf: Any) -> Any:
    """Of a size that the data decides, 1."""
    if not isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf
    return leaf.node.hint if leaf.node.has_hint() else leaf.node.pytype(1)
