"""Walk a captured fx graph once and record its operations, values and weights."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_weights import ModelWeights, is_wrapper
from graphplan.capture.source_lines import source_line
from graphplan.capture.transformers.caches import states_on_one_device
from graphplan.devices.topology import CPU, DeviceKey, round_up
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight, storage_root
from graphplan.ir.lowered_ops import keep_on_cpu
from graphplan.ir.schedule import Schedule
from graphplan.passes.frontend.aliases import find_together
from graphplan.passes.frontend.fake_interpreter import Interpreter
from graphplan.passes.frontend.fake_operation import Effect, OperationResult
from graphplan.passes.frontend.fx_nodes import argument_nodes, is_tensor_node, module_path, target_name
from graphplan.passes.frontend.graph_weights import cache_weight, constant_weight, part_weight, weight_of
from graphplan.passes.frontend.simplify import mutated_arguments
from graphplan.passes.frontend.tensor_meta import TensorMeta, describe, dtype_name

aten = torch.ops.aten

_UNWRAP = torch.ops.export.access_subclass_inner_tensor.default

# Reads of a few rows of a table: only these rows pass through memory.
_GATHERS = {
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
}

# Sums of a few rows of a table, and products of each row with the matrix of its group, such as an expert.
_BAGS = {"embedding_bag.padding_idx", "_embedding_bag", "_embedding_bag_forward_only"}
_GROUPED = {"_grouped_mm", "transformers::grouped_mm_fallback"}


class GraphReader:
    """Records the operations, values and weights of an fx graph."""

    def __init__(
        self, capture: Capture, weights: ModelWeights, types_by_device: Mapping[DeviceKey, str]
    ) -> None:
        self.capture, self.model, self.types_by_device = capture, weights, types_by_device
        self.operations: list[Operation] = []
        self.values: dict[str, Value] = {}
        self.inputs: list[str] = []
        self.states: list[tuple[str, TensorMeta]] = []
        self.written: set[str] = set()
        self.name_of: dict[fx.Node, str] = {}
        self.home: dict[str, DeviceKey] = {}

    def read(self, interpreter: Interpreter, schedule: Schedule | None, default_device_type: str) -> None:
        """Read the graph as under a schedule; without one, as on devices of type ``default_device_type``."""
        for node in self.capture.graph.nodes:
            if node.op == "placeholder":
                weight = self.model.tensors.get(self.capture.weights.get(node.name, ""))
                interpreter.load(node, requires_grad=weight is not None and weight.requires_grad)
                self._placeholder(node, interpreter.env[node])
            elif node.op == "get_attr":  # a submodule of a control-flow operation
                interpreter.env[node] = getattr(self.capture.module, str(node.target))
            elif node.op == "call_function" and not self._is_part(node):
                copied = self._copied_by(schedule, node)
                key = None if schedule is None else schedule.assignment.operations[node.name]
                device_type = default_device_type if key is None else self.types_by_device.get(key, CPU)
                effect = _inner_tensor(node) or interpreter.run(node, copied, device_type)
                self._operation(node, effect)
                if schedule is None:
                    self._lower_cost(interpreter, node, device_type)
                interpreter.env[node] = effect.value
                for user in self._parts(node):
                    interpreter.env[user] = interpreter.env[node][user.args[1]]

    def _copied_by(self, schedule: Schedule | None, node: fx.Node) -> Callable[[fx.Node], bool]:
        """Return a predicate: whether a node's argument is read from a copy, under a schedule."""
        if schedule is None:
            return lambda _: False
        device = schedule.assignment.operations[node.name]
        for output in (node, *self._parts(node)):
            self.home[output.name] = device

        def copied(argument: fx.Node) -> bool:
            name = self.name_of.get(argument, argument.name)
            home = schedule.assignment.weights.get(name, self.home.get(name, schedule.host))
            return home != device

        return copied

    def _placeholder(self, node: fx.Node, described: Any) -> None:
        if node.name in self.capture.weights:
            self.name_of[node] = self.capture.weights[node.name]
            return
        if node.name in self.capture.states and isinstance(described, TensorMeta):
            self.name_of[node] = node.name
            self.states.append((node.name, described))
            return
        is_number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)
        if not isinstance(described, TensorMeta) and not is_number:
            return  # a constant that the trace has inlined
        tangents = () if self.capture.step is None else self.capture.step.tangents
        if node.name not in self.capture.inputs and node.name not in tangents:
            return
        self.name_of[node] = node.name
        self.inputs.append(node.name)
        nbytes = described.copy_bytes if isinstance(described, TensorMeta) else 0
        value = _value_of(node.name, described, nbytes)
        self.values[node.name] = replace(value, is_tensor=False) if is_number else value

    def _is_part(self, node: fx.Node) -> bool:
        """Whether a node takes one result out of several: it belongs to its producer."""
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            return False
        return isinstance(node.args[0].meta.get("val"), list | tuple)

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self._is_part(user)]

    def _operation(self, node: fx.Node, effect: Effect) -> None:
        parts = self._parts(node)
        output_nodes = parts or [node]
        self.name_of.update({part: part.name for part in output_nodes})
        inputs, mutates = self._names(node.all_input_nodes), self._names(mutated_arguments(node))
        self.written.update(storage_root(self.values, name) for name in mutates)
        values = _values_of(node, parts, effect, self.name_of)
        gradients = {} if self.capture.step is None else self.capture.step.gradients
        for value in values:
            parameter = gradients.get(value.name, "")
            self.values[value.name] = replace(value, gradient_of=parameter) if parameter else value
            if self.capture.step is not None and value.name in self.capture.step.input_gradients:
                self._keep_after_call(value.name)
        flops, nbytes, workspace = self._cost(node, parts, effect, writes=bool(mutates))
        self.operations.append(
            Operation(
                node.name,
                target_name(node.target),
                inputs=tuple(dict.fromkeys([*inputs, *mutates])),
                outputs=tuple(value.name for value in values),
                mutates=tuple(dict.fromkeys(mutates)),
                flops=flops,
                bytes_accessed=nbytes,
                workspace=workspace,
                module_path=module_path(node),
                host_only=not any(value.is_tensor for value in values) and not mutates,
                source=source_line(node.meta.get("stack_trace") or ""),
                backward=bool(node.meta.get("backward")),
                forward=node.meta.get("forward", ""),
                repeats=node.meta.get("repeats", ""),
                offloads=node.target is keep_on_cpu,
            )
        )

    def _lower_cost(self, interpreter: Interpreter, node: fx.Node, device_type: str) -> None:
        """Lower the cost of an operation that copies slices or expanded values to its cost after their move.

        Moved values are dense, so that the operation may return a view.
        """
        operation = self.operations[-1]
        values = ((n, interpreter.env.get(n)) for n in node.all_input_nodes)
        slices = {
            n
            for n, value in values
            if isinstance(value, TensorMeta) and value.copied().stride != value.stride
        }
        if slices and operation.bytes_accessed:
            dense = interpreter.run(node, slices.__contains__, device_type)
            flops, nbytes, _ = self._cost(node, self._parts(node), dense, writes=bool(operation.mutates))
            flops, nbytes = min(operation.flops, flops), min(operation.bytes_accessed, nbytes)
            self.operations[-1] = replace(operation, flops=flops, bytes_accessed=nbytes)

    def _cost(
        self, node: fx.Node, parts: Sequence[fx.Node], effect: Effect, *, writes: bool
    ) -> tuple[int, int, Mapping[str, int]]:
        """Return an operation's FLOPs, its bytes read and written, and its workspace by device type."""
        extra = _unnamed_bytes(parts, effect) + self._unwrapped_bytes(node)
        workspace = {device_type: nbytes + extra for device_type, nbytes in effect.workspace.items()}
        return effect.flops, self._bytes_accessed(node, effect, writes=writes), workspace

    def _names(self, nodes: Iterable[fx.Node]) -> list[str]:
        return list(dict.fromkeys(self.name_of[node] for node in nodes if node in self.name_of))

    def _unwrapped_bytes(self, node: fx.Node) -> int:
        """Return the bytes that an operation needs to unwrap the wrapped weights that it reads.

        The wrapper's own code does it, which no trace sees: it is taken to need the plain tensor twice.
        """
        if node.target is _UNWRAP:
            return 0
        named = (self.model.tensors.get(self.capture.weights.get(n.name, "")) for n in node.all_input_nodes)
        wrapped = [tensor for tensor in named if tensor is not None and is_wrapper(tensor)]
        return sum(2 * round_up(tensor.numel() * tensor.element_size()) for tensor in wrapped)

    def _bytes_accessed(self, node: fx.Node, effect: Effect, *, writes: bool) -> int:
        output_bytes = sum(result.nbytes for result in effect.results)
        if not output_bytes and not writes:
            return 0
        described = (describe(n.meta.get("val"), self.capture.sizes) for n in node.all_input_nodes)
        tensors = [t for t in described if isinstance(t, TensorMeta)]
        if node.target in _GATHERS:
            return 2 * output_bytes + sum(t.copy_bytes for t in tensors[1:])
        read = [t.copy_bytes for t in tensors]
        table, rows = _table_and_rows(target_name(node.target), tensors)
        if writes and tensors:
            read[0] = self._bytes_written(node, tensors[0])
        elif rows is not None:
            read[table] = _bytes_of_rows(tensors[table], rows)
        return output_bytes + sum(read)

    def _bytes_written(self, node: fx.Node, written: TensorMeta) -> int:
        """Return the bytes of the rows that an operation writes to its first argument; else all bytes."""
        args: tuple[Any, ...] = node.args
        nodes: dict[int, fx.Node] = {}
        if node.target in (aten.index_copy_.default, aten.index_add_.default) and len(args) > 2:
            nodes = {args[1]: args[2]}
        elif node.target is aten.index_put_.default and len(args) > 1:
            nodes = {dimension: index for dimension, index in enumerate(args[1]) if index is not None}
        described = (describe(index.meta.get("val"), self.capture.sizes) for index in nodes.values())
        indices = [index for index in described if isinstance(index, TensorMeta)]
        masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        if not indices or len(indices) < len(nodes) or not written.shape or masks:
            return written.copy_bytes
        positions = math.prod(written.shape[dimension] for dimension in nodes)
        count = min(positions, max(math.prod(index.shape) for index in indices))
        return written.copy_bytes // max(1, positions) * count

    def graph(self) -> Graph:
        """Return the graph that has been read."""
        weights = [weight for name in self.model.tensors for weight in self._weights(name)]
        for name, tensor in self.capture.constants.items():
            weights.append(constant_weight(name, tensor, written=name in self.written))
        for (name, described), nbytes in zip(self.states, self._cache_bytes(), strict=True):
            weights.append(cache_weight(name, described, nbytes, written=name in self.written))
        outputs = []
        for position, node in enumerate(self.capture.outputs):
            returned = self.name_of.get(node) if isinstance(node, fx.Node) else None
            if returned is not None and position in self.capture.kept:
                self._keep_after_call(returned)
            elif returned is not None:
                outputs.append(returned)
        unique = list(dict.fromkeys(outputs))
        parts = (self.operations, self.values.values(), weights, self.inputs, unique)
        return Graph(*parts, find_together(Graph(*parts), self._cache_groups()))

    def _cache_groups(self) -> Iterator[list[str]]:
        """Yield the tensors that each layer of a cache requires on one device; sizes are on none."""
        outputs = self.capture.outputs
        for group in states_on_one_device(self.capture.out_spec):
            names = (self.name_of.get(outputs[position]) for position in group)
            yield [n for n in names if n is not None and (n not in self.values or self.values[n].is_tensor)]

    def _cache_bytes(self) -> list[int]:
        """Return the bytes of each tensor of a cache, and of the longer tensor that a window keeps.

        The latter is left out if this forward pass adds tensors to the cache: it is not known which of its
        results replaces which tensor.
        """
        sizes = [described.copy_bytes for _, described in self.states]
        changed = self.capture.out_spec.children()[1:] if self.capture.changed_names else ()
        count = sum(spec.num_leaves for spec in changed)
        last = self.capture.outputs[-count:] if count else ()
        nodes = [n for n in last if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.Tensor)]
        hidden = [self._hidden_bytes(self.name_of[node]) for node in nodes]
        return list(map(operator.add, sizes, hidden)) if len(hidden) == len(sizes) else sizes

    def _hidden_bytes(self, name: str) -> int:
        """Return the bytes of a result's storage beyond its own elements; 0 for a broadcast result."""
        storage = self.values.get(storage_root(self.values, name))
        return 0 if storage is None else max(storage.nbytes - self.values[name].copy_bytes, 0)

    def _keep_after_call(self, name: str) -> None:
        value = self.values.get(name)
        if value is not None and value.is_tensor and name not in self.inputs:
            self.values[name] = replace(value, stays=True)

    def _weights(self, name: str) -> list[Weight]:
        """Return a weight, with its parts if it is sliced."""
        whole = weight_of(self.model, name, written=name in self.written)
        parts = [part for part in self.capture.parts.values() if part.weight == name]
        if not parts:
            return [whole]
        return [replace(whole, nbytes=0), *(part_weight(whole, part) for part in parts)]


def _table_and_rows(target: str, tensors: Sequence[TensorMeta]) -> tuple[int, int | None]:
    """Return the argument of which an operation reads a few rows, or matrices, and how many; None for all."""
    if target in _BAGS:
        return 0, math.prod(tensors[1].shape)
    if target in _GROUPED and len(tensors[0].shape) == 2 < len(tensors[1].shape):
        return 1, tensors[0].shape[0]
    return 0, None


def _bytes_of_rows(table: TensorMeta, count: int) -> int:
    """Return the bytes of ``count`` rows, or matrices, of a table; of all of them if it has fewer."""
    return table.copy_bytes // max(1, table.shape[0]) * min(count, table.shape[0])


def _inner_tensor(node: fx.Node) -> Effect | None:
    """Return the effect of taking a tensor out of a wrapper, a view; None for other nodes."""
    if node.target is not _UNWRAP:
        return None
    meta = describe(node.meta["val"])
    return Effect(meta, (OperationResult(meta, 0, argument=0),), 0, {})


def _values_of(
    node: fx.Node, parts: Sequence[fx.Node], effect: Effect, names: Mapping[fx.Node, str]
) -> list[Value]:
    """Return the output values of a measured operation.

    Args:
        node: the operation.
        parts: the nodes that take one of its several results.
        effect: the measured effect of the operation.
        names: node -> name of the value or weight, for all nodes before it.
    """
    arguments = [names[n] for n in argument_nodes(node) if is_tensor_node(n) and n in names]
    if parts:
        return _taken_values(parts, effect, arguments)
    if isinstance(effect.value, TensorMeta):
        return [_result_value(node.name, effect.results[0], arguments, {})]
    if not effect.results:
        return [Value(node.name, is_tensor=False)]
    total = sum(round_up(result.nbytes) for result in effect.results)  # each is an allocation
    return [Value(node.name, total, sum(result.tensor.copy_bytes for result in effect.results))]


def _unnamed_bytes(parts: Sequence[fx.Node], effect: Effect) -> int:
    """Return the bytes of results that no node takes out: they are freed with the operation."""
    if not parts:
        return 0
    index_of = _result_index(effect.value)
    taken = {index_of.get(part.args[1]) for part in parts}
    return sum(round_up(result.nbytes) for i, result in enumerate(effect.results) if i not in taken)


def _value_of(name: str, described: Any, nbytes: int, base: str | None = None) -> Value:
    """Return the value of a tensor, or of another result."""
    if isinstance(described, TensorMeta):
        return Value(
            name,
            nbytes,
            described.copy_bytes,
            alias_of=base,
            shape=described.shape,
            dtype=dtype_name(described.dtype),
        )
    return Value(name, nbytes, 0, alias_of=base)


def _taken_values(parts: Sequence[fx.Node], effect: Effect, arguments: Sequence[str]) -> list[Value]:
    index_of = _result_index(effect.value)
    owners = {index_of[p.args[1]]: p.name for p in reversed(parts) if p.args[1] in index_of}
    values: list[Value] = []
    for part in parts:
        index = index_of.get(part.args[1])
        if index is None:
            values.append(Value(part.name, is_tensor=False))
        elif owners[index] != part.name:  # the same result taken out twice
            values.append(_value_of(part.name, effect.results[index].tensor, 0, owners[index]))
        else:
            values.append(_result_value(part.name, effect.results[index], arguments, owners))
    return values


def _result_value(
    name: str, result: OperationResult, arguments: Sequence[str], owners: Mapping[int, str]
) -> Value:
    base, nbytes = None, result.nbytes
    if 0 <= result.argument < len(arguments):
        base = arguments[result.argument]
    elif result.sibling >= 0:
        base = owners.get(result.sibling)
        nbytes = 0 if base is not None else result.tensor.copy_bytes
    return _value_of(name, result.tensor, nbytes, base)


def _result_index(value: Any) -> dict[Any, int]:
    """Return position in a list of results -> index among its tensors."""
    index_of: dict[Any, int] = {}
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            if isinstance(item, TensorMeta):
                index_of[position] = len(index_of)
    return index_of
