"""The dataflow graph that the planner works on: operations, the values between them, their bytes.

Nothing here depends on ``torch.fx``: a :class:`Graph` can be built by hand in a test. Its text form::

    weights:
      fc.weight : 4096 bytes
    inputs:
      x : 512 bytes
    operations:
      linear = linear(x, fc.weight) : 512 bytes, 65536 FLOP  # fc
    outputs: linear
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import networkx as nx

from graphplan.errors import VerificationError
from graphplan.ir.graph_elements import Operation, Value, Weight, storage_root
from graphplan.message_text import lines_around
from graphplan.versioned_json import decode

_FIELD_TYPES: dict[str, Any] = {
    "operations": tuple[Operation, ...],
    "values": tuple[Value, ...],
    "weights": tuple[Weight, ...],
    "inputs": tuple[str, ...],
    "outputs": tuple[str, ...],
    "together": tuple[frozenset[str], ...],
    "shapes_known": bool,
    "in_flight": int,
}
"""Field of a graph as plain data -> its type."""


class Graph:
    """Operations in trace order, with the values and weights between them.

    ``digraph`` is the ``networkx.DiGraph``, built on first use: a node per operation (attribute
    ``operation``), an edge per producer and consumer (attribute ``values``: names of the values between
    them, in order).

    Args:
        operations: in the order in which the trace ran them.
        values: every value, inputs included.
        weights: every parameter, buffer and constant, unused ones too.
        inputs: names of the values that the caller passes in.
        outputs: names of the values or weights that are returned, in order.
        together: sets of operations that must share a device, since one writes memory that others read.
        shapes_known: False if activations could not be measured; they count as 0 bytes then.
        in_flight: in a pipeline, the most microbatches that have run forward, but not yet backward.
    """

    def __init__(
        self,
        operations: Iterable[Operation],
        values: Iterable[Value],
        weights: Iterable[Weight] = (),
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        together: Iterable[frozenset[str]] = (),
        *,
        shapes_known: bool = True,
        in_flight: int = 1,
    ) -> None:
        self.operations = {operation.name: operation for operation in operations}
        self.values = {value.name: value for value in values}
        self.weights = {weight.name: weight for weight in weights}
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.together = tuple(sorted(together, key=sorted))
        self.shapes_known = shapes_known
        self.in_flight = in_flight
        self._workspaces: dict[str, dict[str, int]] = {}
        self.producer = {v: op.name for op in self.operations.values() for v in op.outputs}
        users: dict[str, list[str]] = defaultdict(list)
        for operation in self.operations.values():
            for name in operation.inputs:
                users[name].append(operation.name)
        self.consumers = {name: tuple(found) for name, found in users.items()}

    @cached_property
    def position_of(self) -> dict[str, int]:
        """Operation -> its position in the order."""
        return {name: position for position, name in enumerate(self.operations)}

    @cached_property
    def group_of(self) -> dict[str, frozenset[str]]:
        """Operation that must share a device with others -> all of these, itself included."""
        return {name: group for group in self.together for name in group}

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Value or weight -> the operations that read its data, not only its shape, in order."""
        host_only = {operation.name for operation in self.operations.values() if operation.host_only}
        return {
            name: tuple(user for user in users if user not in host_only)
            for name, users in self.consumers.items()
        }

    def tied(self, groups: Iterable[Iterable[str]]) -> Graph:
        """Return the same graph with further groups of operations that must share a device."""
        ties: nx.Graph[str] = nx.Graph()
        for names in (*self.together, *groups):
            nx.add_path(ties, sorted(names))
        return self.changed(together=[frozenset(t) for t in nx.connected_components(ties) if len(t) > 1])

    def changed(self, **parts: Any) -> Graph:
        """Return the graph with other operations, values, weights, ``together`` or ``in_flight``."""
        current = {name: getattr(self, name).values() for name in ("operations", "values", "weights")}
        given: dict[str, Any] = {**current, "together": self.together, "in_flight": self.in_flight, **parts}
        return Graph(**given, inputs=self.inputs, outputs=self.outputs, shapes_known=self.shapes_known)

    @cached_property
    def digraph(self) -> nx.DiGraph[str]:
        """The ``networkx`` graph: a node for each operation, an edge for each producer and consumer."""
        digraph: nx.DiGraph[str] = nx.DiGraph()
        for operation in self.operations.values():
            digraph.add_node(operation.name, operation=operation)
        for operation in self.operations.values():
            passing: dict[str, list[str]] = defaultdict(list)
            for name in operation.inputs:
                if name in self.producer:
                    passing[self.producer[name]].append(name)
            for source, names in passing.items():
                digraph.add_edge(source, operation.name, values=tuple(names))
        return digraph

    def to_networkx(self) -> nx.DiGraph[str]:
        """Return a copy of ``digraph``, which the caller may change."""
        return self.digraph.copy()

    def edges(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yield (producer, consumer, names of the values that pass) for each edge of ``digraph``."""
        for source, target in self.digraph.edges:
            yield source, target, self.digraph.edges[source, target]["values"]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, shared ones once."""
        return sum(weight.nbytes for weight in self.weights.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of all weights, with gradients and optimizer state in training."""
        return sum(weight.held_bytes for weight in self.weights.values())

    @cached_property
    def trains(self) -> bool:
        """Whether the graph is a training step: a forward and a backward pass."""
        return any(operation.backward for operation in self.operations.values())

    @property
    def call(self) -> str:
        """The kind of call, for messages."""
        return "training step" if self.trains else "forward pass"

    @property
    def flops(self) -> int:
        """FLOP of one forward pass, or training step, at the example inputs."""
        return sum(operation.flops for operation in self.operations.values())

    @property
    def changed_inputs(self) -> tuple[str, ...]:
        """Inputs that forward writes to, directly or through a view."""
        roots = {self.root(name) for op in self.operations.values() for name in op.mutates}
        return tuple(name for name in self.inputs if name in roots)

    @cached_property
    def streamable(self) -> frozenset[str]:
        """Weights that may be copied into memory that is reused before the forward pass ends.

        Weights that forward writes to, or whose storage it returns, are not among them.
        """
        kept = {self.root(name) for name in self.outputs}
        kept |= {self.root(name) for name in self.values_kept_after_call}
        kept |= {self.root(name) for op in self.operations.values() for name in op.mutates}
        return frozenset(w.name for w in self.weights.values() if w.streamable and w.name not in kept)

    @cached_property
    def owned_gradients(self) -> frozenset[str]:
        """Gradients that own their memory: no operation reads it after they are computed."""
        roots = [self.root(value.name) for value in self.values.values() if value.gradient_of]
        if not roots:
            return frozenset()
        order = self.position_of
        last_reader: dict[str, int] = {}
        for name, readers in self.consumers.items():
            root = self.root(name)
            last_reader[root] = max(last_reader.get(root, -1), *(order[reader] for reader in readers))
        for name in self.outputs:
            last_reader[self.root(name)] = len(order)
        owned = []
        for value in self.values.values():
            root = self.root(value.name)
            if not value.gradient_of or root not in self.producer or roots.count(root) > 1:
                continue
            whole = self.values[root].nbytes == value.copy_bytes
            if whole and last_reader.get(root, -1) <= order[self.producer[value.name]]:
                owned.append(value.name)
        return frozenset(owned)

    @cached_property
    def not_tensors(self) -> frozenset[str]:
        """Values that are numbers, sizes or lists: they take no bytes and need no copy."""
        return frozenset(value.name for value in self.values.values() if not value.is_tensor)

    @cached_property
    def device_inputs(self) -> dict[str, tuple[str, ...]]:
        """Operation -> the tensors that it needs on its device; none if it reads only their sizes."""
        return {
            operation.name: ()
            if operation.host_only
            else tuple(n for n in operation.inputs if n not in self.not_tensors)
            for operation in self.operations.values()
        }

    @cached_property
    def weight_inputs(self) -> dict[str, tuple[str, ...]]:
        """Operation -> its inputs that are weights or views of weights, if it has any."""
        of_weights = {name for name in (*self.weights, *self.values) if self.root(name) in self.weights}
        inputs = {
            operation.name: tuple(name for name in operation.inputs if name in of_weights)
            for operation in self.operations.values()
        }
        return {name: names for name, names in inputs.items() if names}

    @cached_property
    def values_kept_after_call(self) -> tuple[str, ...]:
        """Values that outlive the call: tensors of returned caches, gradients that stay."""
        return tuple(value.name for value in self.values.values() if value.stays)

    def saves_on_cpu(self, operation: Operation) -> bool:
        """Whether an operation keeps a value in CPU memory for the backward pass."""
        kept = operation.outputs if operation.offloads else ()
        return any(
            self.operations[reader].backward for name in kept for reader in self.consumers.get(name, ())
        )

    @cached_property
    def weights_with_step_memory(self) -> tuple[Weight, ...]:
        """Parameters for which the optimizer needs memory while it updates them."""
        return tuple(w for w in self.weights.values() if w.step_bytes or w.together_bytes)

    def workspaces(self, device_type: str) -> Mapping[str, int]:
        """Return operation -> its workspace bytes on a device of this type, if it needs any."""
        if device_type not in self._workspaces:
            sizes = {name: one.workspace_on(device_type) for name, one in self.operations.items()}
            self._workspaces[device_type] = {name: nbytes for name, nbytes in sizes.items() if nbytes}
        return self._workspaces[device_type]

    @cached_property
    def cache_inputs(self) -> tuple[Weight, ...]:
        """The cache tensors that the caller passes in."""
        return tuple(weight for weight in self.weights.values() if weight.kind == "cache" and weight.nbytes)

    @cached_property
    def parts(self) -> tuple[Weight, ...]:
        """The weights that are parts of sliced weights."""
        return tuple(weight for weight in self.weights.values() if weight.part_of)

    def weight_named(self, name: str) -> Weight | None:
        """Return the weight that has this name, if any; a shared weight has several names."""
        return next((w for w in self.weights.values() if name == w.name or name in w.names), None)

    def copy_bytes(self, name: str) -> int:
        """Return the bytes of a copy of a value or weight."""
        weight = self.weights.get(name)
        return self.values[name].copy_bytes if weight is None else weight.nbytes

    def root(self, name: str) -> str:
        """Return the value or weight whose storage ``name`` is a view of, itself included."""
        return storage_root(self.values, name)

    def verify(self) -> None:
        """Raise VerificationError unless names resolve, order is topological and no bytes are negative."""
        known = set(self.weights) | set(self.inputs)
        if len(known) != len(self.weights) + len(self.inputs):
            raise VerificationError("an input and a weight share a name")
        if lacking := set(self.inputs) - set(self.values):
            raise VerificationError(f"the input {min(lacking)!r} is not among the values")
        if stray := set(self.values) - set(self.inputs) - set(self.producer):
            raise VerificationError(f"no operation makes the value {min(stray)!r}")
        sizes = {name: self.values[name].nbytes for name in self.inputs}
        sizes |= {weight.name: weight.nbytes for weight in self.weights.values()}
        if negative := [name for name, nbytes in sizes.items() if nbytes < 0]:
            raise VerificationError(f"{negative[0]!r} has negative bytes")
        if views := [name for name in self.inputs if self.values[name].alias_of is not None]:
            raise VerificationError(f"the input {views[0]!r} is a view")
        for position, operation in enumerate(self.operations.values()):
            self._verify_operation(position, operation, known)
            known.update(operation.outputs)
        for name in self.outputs:
            if name not in known:
                raise VerificationError(f"output {name!r} is made by no operation")
        for group in self.together:
            if unknown := group - set(self.operations):
                raise VerificationError(f"together names unknown operations {sorted(unknown)}")

    def _verify_operation(self, position: int, operation: Operation, known: set[str]) -> None:
        problem = None
        if missing := [name for name in operation.inputs if name not in known]:
            problem = f"reads {missing[0]!r} before it is made"
        elif again := [name for name in operation.outputs if name in known]:
            problem = f"outputs {again[0]!r}, which exists already"
        elif unknown := [name for name in operation.outputs if name not in self.values]:
            problem = f"outputs {unknown[0]!r}, which is not among the values"
        elif stray := [name for name in operation.mutates if name not in operation.inputs]:
            problem = f"mutates {stray[0]!r}, which it does not read"
        elif len(set(operation.inputs)) != len(operation.inputs):
            problem = "names an input twice"
        elif min(operation.flops, operation.bytes_accessed, *operation.workspace.values()) < 0:
            problem = "has a negative size"
        else:
            for index, name in enumerate(operation.outputs):
                value = self.values[name]
                base = value.alias_of
                if base is not None and base not in known and base not in operation.outputs[:index]:
                    problem = f"outputs {name!r} as an alias of the unknown {base!r}"
                elif value.nbytes < 0 or value.copy_bytes < 0:
                    problem = f"outputs {name!r} with negative bytes"
                elif base is not None and value.nbytes:
                    problem = f"outputs {name!r}, an alias of {base!r}, with bytes of its own"
        if problem:
            lines = [self.line(one) for one in self.operations.values()]
            where = lines_around(lines, position)
            raise VerificationError(f"operation {operation.name!r} {problem}\n{where}")

    def line(self, operation: Operation) -> str:
        """Return one operation as text."""
        outputs = ", ".join(operation.outputs) or "()"
        nbytes = sum(self.values[name].nbytes for name in operation.outputs if name in self.values)
        text = f"{outputs} = {operation.target}({', '.join(operation.inputs)}) : {nbytes} bytes"
        if operation.flops:
            text += f", {operation.flops} FLOP"
        if operation.mutates:
            text += f", writes {', '.join(operation.mutates)}"
        aliases = [
            f"{name} is {base}"
            for name in operation.outputs
            if name in self.values and (base := self.values[name].alias_of) is not None
        ]
        if aliases:
            text += f", {', '.join(aliases)}"
        return f"{text}  # {operation.module_path}" if operation.module_path else text

    def __str__(self) -> str:
        lines = ["weights:"]
        for weight in self.weights.values():
            tied = [name for name in weight.names if name != weight.name]
            note = f" = {', '.join(tied)}" if tied else ""
            lines.append(f"  {weight.name} : {weight.nbytes} bytes{note}")
        lines.append("inputs:")
        lines += [f"  {name} : {self.values[name].nbytes} bytes" for name in self.inputs]
        lines.append("operations:")
        lines += [f"  {self.line(operation)}" for operation in self.operations.values()]
        lines.append(f"outputs: {', '.join(self.outputs)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.operations)} operations, {len(self.weights)} weights of "
            f"{self.weight_bytes} bytes, {self.flops} FLOP)"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # equal by content, and content can be large

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "operations": list(map(asdict, self.operations.values())),
            "values": list(map(asdict, self.values.values())),
            "weights": list(map(asdict, self.weights.values())),
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "together": [sorted(group) for group in self.together],
            "shapes_known": self.shapes_known,
            "in_flight": self.in_flight,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Graph:
        """Return the graph of the plain data that :meth:`to_dict` returned."""
        return cls(**{name: decode(kind, data[name]) for name, kind in _FIELD_TYPES.items()})
