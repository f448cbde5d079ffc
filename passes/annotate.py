"""Give a captured graph its bytes, FLOPs, aliases and workspaces: ``torch.fx`` becomes a ``Graph``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphplan.captured import Capture, Part
from graphplan.device import CPU, DeviceKey
from graphplan.graph import Graph, Operation, Value, Weight
from graphplan.passes.aliases import find_together
from graphplan.passes.measure import Effect, Interpreter, OperationResult, TensorMeta, describe, round_up
from graphplan.passes.simplify import mutated_arguments
from graphplan.schedule import Schedule
from graphplan.source import source_line
from graphplan.twin import ModelWeights, is_wrapper, tensor_bytes

__all__ = ["Annotator", "annotate", "costlier", "part_weight"]

aten = torch.ops.aten


def annotate(capture: Capture, weights: ModelWeights, device_types: Sequence[str] = ("cpu",)) -> Graph:
    """The planner's graph of a capture: see :class:`Annotator`."""
    return Annotator(capture, weights, device_types).graph()


class Annotator:
    """Writes down the graph of a capture, as it is and as a schedule makes it.

    Args:
        capture: simplified.
        weights: of the model that was captured; unused ones are in the graph too.
        device_types: for which to measure workspaces; a type without a backend here counts as CPU.
    """

    def __init__(
        self, capture: Capture, weights: ModelWeights, device_types: Sequence[str] = ("cpu",)
    ) -> None:
        self.capture, self.weights, self.device_types = capture, weights, device_types
        self.interpreter = Interpreter(device_types, capture.sizes)

    def of(self, capture: Capture) -> Annotator:
        """An annotator of another capture of the model, which knows what this one has measured."""
        other = Annotator(capture, self.weights, self.device_types)
        other.interpreter.memo = self.interpreter.memo
        return other

    def graph(self, schedule: Schedule | None = None, kinds: Mapping[DeviceKey, str] | None = None) -> Graph:
        """The graph; with ``schedule``, as it is when values are moved as it says.

        A moved value that was a slice arrives dense, and kernels of one type of device return other
        strides than those of another: after either an operation may copy where it took a view, or take
        another workspace.

        Args:
            schedule: where operations run.
            kinds: the type of each of its devices; one that is left out counts as CPU.

        Raises:
            CaptureError: an operation that cannot be run on fake tensors and has no recorded result.
        """
        reader = _GraphReader(self.capture, self.weights, kinds or {})
        if self.capture.method == "symbolic_trace":
            reader.read_unknown()
        else:
            usual = next((kind for kind in self.device_types if kind != CPU), CPU)
            reader.read(self.interpreter, schedule, usual)
        graph = reader.graph()
        graph.verify()
        return graph


def costlier(a: Graph, b: Graph) -> Graph:
    """Of two readings of one capture, each value's and operation's larger bytes.

    A value that is a view in one and not in the other is none, so both readings are covered.
    """
    values = [_costlier_value(value, b.values[name]) for name, value in a.values.items()]
    operations = []
    for name, operation in a.operations.items():
        other = b.operations[name]
        kinds = {*operation.workspace, *other.workspace}
        workspace = {k: max(operation.workspace_on(k), other.workspace_on(k)) for k in sorted(kinds)}
        operations.append(replace(operation, workspace=workspace))
    together = {*a.together, *b.together}
    parts = (operations, values, a.weights.values(), a.inputs, a.outputs)
    return Graph(*parts, together, shapes_known=a.shapes_known)


def _costlier_value(a: Value, b: Value) -> Value:
    if a.alias_of == b.alias_of:
        return replace(a, nbytes=max(a.nbytes, b.nbytes), copy_bytes=max(a.copy_bytes, b.copy_bytes))
    return a if a.alias_of is None else b


# Reads of a few rows of a table: what passes through memory is the rows.
_GATHERS = {
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
}


class _GraphReader:
    """Walks the fx graph once and writes down operations, values and weights."""

    def __init__(self, capture: Capture, weights: ModelWeights, kinds: Mapping[DeviceKey, str]) -> None:
        self.capture, self.model, self.kinds = capture, weights, kinds
        self.operations: list[Operation] = []
        self.values: dict[str, Value] = {}
        self.inputs: list[str] = []
        self.states: list[tuple[str, TensorMeta]] = []
        self.written: set[str] = set()
        self.opaque: set[str] = set()
        self.name_of: dict[fx.Node, str] = {}
        self.nodes = list(capture.graph.nodes)
        self.sees_shapes = capture.method != "symbolic_trace"

    def read(self, interpreter: Interpreter, schedule: Schedule | None, usual: str) -> None:
        """Read it as under a schedule; without one, as on devices of the usual type."""
        self.home: dict[str, DeviceKey] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                weight = self.model.tensors.get(self.capture.weights.get(node.name, ""))
                interpreter.load(node, requires_grad=weight is not None and weight.requires_grad)
                self._placeholder(node, interpreter.env[node])
            elif node.op == "get_attr":  # a submodule of a control-flow operation
                interpreter.env[node] = getattr(self.capture.module, str(node.target))
            elif node.op == "call_function" and not self._is_part(node):
                copied = self._copied_by(schedule, node)
                key = None if schedule is None else schedule.assignment.operations[node.name]
                kind = usual if key is None else self.kinds.get(key, CPU)
                effect = _inner_tensor(node) or interpreter.run(node, copied, kind)
                interpreter.env[node] = effect.value
                self._operation(node, effect)
                for user in self._parts(node):
                    interpreter.env[user] = interpreter.env[node][user.args[1]]

    def _copied_by(self, schedule: Schedule | None, node: fx.Node) -> Callable[[fx.Node], bool]:
        """Which arguments of an operation are copies, under a schedule."""
        if schedule is None:
            return lambda _: False
        device = schedule.assignment.operations[node.name]
        for made in (node, *self._parts(node)):
            self.home[made.name] = device

        def copied(argument: fx.Node) -> bool:
            name = self.name_of.get(argument, argument.name)
            home = schedule.assignment.weights.get(name, self.home.get(name, schedule.host))
            return home != device

        return copied

    def read_unknown(self) -> None:
        """Without example inputs: operations and weights, and no bytes of activations."""
        for node in self.nodes:
            if node.op == "placeholder":
                self._placeholder(node, None)
            elif node.op == "get_attr":
                if node.name in self.capture.weights:
                    self.name_of[node] = self.capture.weights[node.name]
            elif node.op != "output" and not self._is_part(node):
                self._operation(node, None)

    def _placeholder(self, node: fx.Node, described: Any) -> None:
        if node.name in self.capture.weights:
            self.name_of[node] = self.capture.weights[node.name]
            return
        if node.name in self.capture.states and isinstance(described, TensorMeta):
            self.name_of[node] = node.name
            self.states.append((node.name, described))
            return
        counter = isinstance(node.meta.get("val"), torch.SymInt)
        if self.sees_shapes and not isinstance(described, TensorMeta) and not counter:
            return  # a constant, which the trace has taken in
        if node.name not in self.capture.inputs:
            return
        self.name_of[node] = node.name
        self.inputs.append(node.name)
        nbytes = described.copy_bytes if isinstance(described, TensorMeta) else 0
        value = _value(node.name, described, nbytes)
        self.values[node.name] = replace(value, is_tensor=False) if counter else value

    def _is_part(self, node: fx.Node) -> bool:
        """Whether this takes one result out of several: a part of its producer, not a step."""
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            return False
        if self.sees_shapes:
            return isinstance(node.args[0].meta.get("val"), list | tuple) or _is_list(node.args[0])
        return node.args[0].op == "call_module" and isinstance(node.args[1], int)

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self._is_part(user)]

    def _operation(self, node: fx.Node, effect: Effect | None) -> None:
        parts = self._parts(node)
        made = parts or [node]
        for part in made:
            self.name_of[part] = part.name
        inputs = self._names(node.all_input_nodes)
        if node.op == "call_module":
            inputs += self._module_weights(str(node.target))
        mutates = self._names(mutated_arguments(node))
        if node.op == "call_module":
            mutates += self._module_buffers(str(node.target))
        inputs = list(dict.fromkeys([*inputs, *mutates]))
        self.written.update(mutates)
        if effect is None:
            values = [self._unknown_value(part, node) for part in made]
            flops, accessed, workspace = 0, 0, dict[str, int]()
        else:
            values = self._known_values(node, parts, effect)
            flops, accessed = effect.flops, self._bytes_accessed(node, effect, bool(mutates))
            unnamed = self._unnamed_bytes(parts, effect)
            unnamed += self._unwrapped_bytes(node)
            workspace = {kind: nbytes + unnamed for kind, nbytes in effect.workspace.items()}
        self.values.update({value.name: value for value in values})
        self.operations.append(
            Operation(
                node.name,
                _target_name(node.target),
                tuple(inputs),
                tuple(value.name for value in values),
                tuple(dict.fromkeys(mutates)),
                flops,
                accessed,
                workspace,
                _module_path(node),
                host_only=not any(value.is_tensor for value in values) and not mutates,
                source=source_line(node.meta.get("stack_trace") or ""),
            )
        )

    def _names(self, nodes: Iterable[fx.Node]) -> list[str]:
        return list(dict.fromkeys(self.name_of[node] for node in nodes if node in self.name_of))

    def _known_values(self, node: fx.Node, parts: list[fx.Node], effect: Effect) -> list[Value]:
        arguments = [self.name_of[n] for n in _flat_nodes(node) if _is_tensor_node(n) and n in self.name_of]
        if not parts:
            if isinstance(effect.value, TensorMeta):
                return [self._result_value(node.name, effect.results[0], arguments, {})]
            if not effect.results:
                return [Value(node.name, is_tensor=False)]
            total = sum(result.nbytes for result in effect.results)
            return [Value(node.name, total, sum(r.tensor.copy_bytes for r in effect.results))]
        index_of = _result_index(effect.value)
        owners = {index_of[p.args[1]]: p.name for p in reversed(parts) if p.args[1] in index_of}
        values: list[Value] = []
        for part in parts:
            index = index_of.get(part.args[1])
            if index is None:
                values.append(Value(part.name, is_tensor=False))
                continue
            result = effect.results[index]
            if owners[index] != part.name:  # the same result taken out twice
                twin = owners[index]
                result = OperationResult(result.tensor, 0)
                values.append(_value(part.name, result.tensor, 0, twin))
                continue
            values.append(self._result_value(part.name, result, arguments, owners))
        return values

    def _result_value(
        self, name: str, result: OperationResult, arguments: Sequence[str], owners: Mapping[int, str]
    ) -> Value:
        base, nbytes = None, result.nbytes
        if 0 <= result.argument < len(arguments):
            base = arguments[result.argument]
        elif result.sibling >= 0:
            base = owners.get(result.sibling)
            nbytes = 0 if base is not None else result.tensor.copy_bytes
        return _value(name, result.tensor, nbytes, base)

    def _unnamed_bytes(self, parts: list[fx.Node], effect: Effect) -> int:
        """Bytes of results that nobody takes out: they die with the operation."""
        if not parts:
            return 0
        index_of = _result_index(effect.value)
        taken = {index_of.get(part.args[1]) for part in parts}
        return sum(round_up(r.nbytes) for i, r in enumerate(effect.results) if i not in taken)

    def _unwrapped_bytes(self, node: fx.Node) -> int:
        """Bytes that an operation takes for the plain form of wrapped weights that it is given as they are.

        The wrapper's own code makes it, which no trace sees: it is taken to need the plain tensor twice.
        """
        if node.target is torch.ops.export.access_subclass_inner_tensor.default:
            return 0
        named = (self.model.tensors.get(self.capture.weights.get(n.name, "")) for n in node.all_input_nodes)
        wrapped = [tensor for tensor in named if tensor is not None and is_wrapper(tensor)]
        return sum(2 * round_up(tensor.numel() * tensor.element_size()) for tensor in wrapped)

    def _bytes_accessed(self, node: fx.Node, effect: Effect, writes: bool) -> int:
        made = sum(result.nbytes for result in effect.results)
        if not made and not writes:
            return 0
        tensors = [describe(n.meta.get("val"), self.capture.sizes) for n in node.all_input_nodes]
        read = [t.copy_bytes for t in tensors if isinstance(t, TensorMeta)]
        if node.target in _GATHERS:
            return 2 * made + sum(read[1:])
        return made + sum(read)

    def _unknown_value(self, part: fx.Node, node: fx.Node) -> Value:
        mutated = mutated_arguments(node)
        if mutated and mutated[0] in self.name_of:
            return Value(part.name, alias_of=self.name_of[mutated[0]])
        first = next((a for a in node.args if isinstance(a, fx.Node) and a in self.name_of), None)
        if first is not None and _may_be_view(node):
            return Value(part.name, alias_of=self.name_of[first])
        return Value(part.name)

    def _module_weights(self, path: str) -> list[str]:
        prefix = path + "."
        found = [first for name, first in self.model.first.items() if name.startswith(prefix)]
        self.opaque.update(found)
        return list(dict.fromkeys(found))

    def _module_buffers(self, path: str) -> list[str]:
        return [n for n in self._module_weights(path) if n not in self.model.parameters]

    def graph(self) -> Graph:
        weights = [weight for name, t in self.model.tensors.items() for weight in self._weights(name, t)]
        for name, tensor in self.capture.constants.items():
            weights.append(_constant(name, tensor, name in self.written))
        weights += [_state(name, described, name in self.written) for name, described in self.states]
        outputs = []
        for position, node in enumerate(self.capture.outputs):
            returned = self.name_of.get(node) if isinstance(node, fx.Node) else None
            if returned is not None and position in self.capture.kept:
                self._let_stay(returned)
            elif returned is not None:
                outputs.append(returned)
        unique = list(dict.fromkeys(outputs))
        parts = (self.operations, self.values.values(), weights, self.inputs, unique)
        plain = Graph(*parts, shapes_known=self.sees_shapes)
        return Graph(*parts, find_together(plain), shapes_known=self.sees_shapes)

    def _let_stay(self, name: str) -> None:
        value = self.values.get(name)
        if value is not None and value.is_tensor and name not in self.inputs:
            self.values[name] = replace(value, stays=True)

    def _weights(self, name: str, tensor: torch.Tensor) -> list[Weight]:
        """A weight, with its parts if it is sliced."""
        whole = self._weight(name, tensor)
        parts = [part for part in self.capture.parts.values() if part.weight == name]
        if not parts:
            return [whole]
        return [replace(whole, nbytes=0), *(part_weight(whole, part) for part in parts)]

    def _weight(self, name: str, tensor: torch.Tensor) -> Weight:
        names = tuple(self.model.names[name])
        return Weight(
            name,
            _weight_bytes(tensor),
            names,
            "parameter" if name in self.model.parameters else "buffer",
            any(n in self.model.persistent for n in names),
            name in self.written,
            name not in self.opaque and not is_wrapper(tensor),
            tuple(tensor.shape),
            _dtype_name(tensor.dtype),
        )


def _weight_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a weight; what a wrapper wraps is allocated tensor by tensor."""
    if not is_wrapper(tensor):
        return tensor_bytes(tensor)
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a protocol of torch's
    return sum(round_up(_weight_bytes(getattr(tensor, name))) for name in names)


def _inner_tensor(node: fx.Node) -> Effect | None:
    """What takes a tensor out of a wrapper: it is there already."""
    if node.target is not torch.ops.export.access_subclass_inner_tensor.default:
        return None
    meta = describe(node.meta["val"])
    return Effect(meta, (OperationResult(meta, 0, argument=0),), 0, {})


def part_weight(whole: Weight, part: Part) -> Weight:
    """Some rows of a weight, as a weight."""
    rows = part.stop - part.start
    return replace(
        whole,
        name=part.name,
        nbytes=whole.nbytes // whole.shape[0] * rows,
        names=(part.name,),
        kind="part",
        persistent=False,
        shape=(rows, *whole.shape[1:]),
        part_of=whole.name,
        start=part.start,
    )


def _constant(name: str, tensor: torch.Tensor, written: bool) -> Weight:
    shape, dtype = tuple(tensor.shape), _dtype_name(tensor.dtype)
    return Weight(name, tensor_bytes(tensor), (name,), "constant", False, written, True, shape, dtype)


def _state(name: str, described: TensorMeta, written: bool) -> Weight:
    """A tensor of a cache: what reads it runs where it is."""
    nbytes, dtype = described.copy_bytes, _dtype_name(described.dtype)
    return Weight(name, nbytes, (name,), "cache", False, written, False, described.shape, dtype)


def _value(name: str, described: Any, nbytes: int, base: str | None = None) -> Value:
    if isinstance(described, TensorMeta):
        dtype = _dtype_name(described.dtype)
        return Value(name, nbytes, described.copy_bytes, base, True, described.shape, dtype)
    return Value(name, nbytes, 0, base)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _result_index(value: Any) -> dict[Any, int]:
    """Position in a list of results -> index among its tensors."""
    found: dict[Any, int] = {}
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            if isinstance(item, TensorMeta):
                found[position] = len(found)
    return found


def _flat_nodes(node: fx.Node) -> list[fx.Node]:
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _is_tensor_node(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_list(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    returns = node.target._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and "[]" in str(returns[0].type))


_MAYBE_VIEWS = {
    "view", "reshape", "transpose", "permute", "t", "squeeze", "unsqueeze", "flatten", "expand",
    "expand_as", "narrow", "select", "chunk", "split", "unbind", "getitem", "contiguous", "detach",
    "view_as", "movedim", "swapaxes", "unfold", "diagonal", "to", "type", "float", "half", "dropout",
    "getattr",
}  # fmt: skip


def _may_be_view(node: fx.Node) -> bool:
    return _target_name(node.target).rpartition(".")[2] in _MAYBE_VIEWS


def _target_name(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        packet, overload = target._overloadpacket, target._overloadname
        name = packet.__name__ if overload == "default" else f"{packet.__name__}.{overload}"
        return name if target.namespace == "aten" else f"{target.namespace}::{name}"
    return getattr(target, "__name__", str(target))


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        path = entry[0] if isinstance(entry, tuple) else str(entry)
    return ".".join(part.partition("@")[0] for part in path.split("."))
