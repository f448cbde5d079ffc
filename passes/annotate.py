"""Give a captured graph its bytes, FLOPs, aliases and workspaces: ``torch.fx`` becomes a ``Graph``.

Each operation is run once on fake tensors (no data, no arithmetic) at the sizes of the example
inputs. Two operations that look alike are run once between them, so a model of eighty equal layers
costs little more than one of two. Running them shows what no schema tells: which result is a view,
and how many bytes a composite operation takes on the way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from graphplan.errors import CaptureError
from graphplan.graph import Graph, Operation, Value, Weight
from graphplan.passes.aliases import find_together
from graphplan.passes.simplify import mutated_arguments
from graphplan.tracing import Capture, ModelWeights, tensor_bytes

__all__ = ["annotate"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor as the interpreter carries it: sizes, strides, dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def copy_bytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that an operation returned.

    ``argument`` is the index, among the operation's tensor arguments, of the one that it is a view
    of; ``sibling`` that of the earlier result whose storage it shares; -1 for neither.
    """

    tensor: _Tensor
    nbytes: int
    argument: int = -1
    sibling: int = -1


@dataclass(frozen=True, slots=True)
class _Effect:
    """What running one operation showed. ``results`` are a flat list; ``value`` the structure."""

    value: Any
    results: tuple[_Result, ...]
    flops: int
    workspace: Mapping[str, int]


def annotate(capture: Capture, weights: ModelWeights, device_types: Sequence[str] = ("cpu",)) -> Graph:
    """The planner's graph of a capture.

    Args:
        capture: simplified.
        weights: of the model that was captured; unused ones are in the graph too.
        device_types: for which to measure workspaces; a type without a backend here counts as CPU.

    Raises:
        CaptureError: an operation that cannot be run on fake tensors and has no recorded result.
    """
    reader = _GraphReader(capture, weights)
    if capture.method == "symbolic_trace":
        reader.read_unknown()
    else:
        reader.read(_Interpreter(capture, device_types))
    graph = reader.graph()
    graph.verify()
    return graph


class _Tracker(TorchDispatchMode):
    """Counts FLOPs, and the bytes that are alive beyond the arguments'."""

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.known = {storage._cdata for storage in known}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.higher_order.cond:
            _, true_branch, false_branch, operands = args
            with self:
                return [branch(*operands) for branch in (false_branch, true_branch)][1]
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return out
        self.flops += _flops(func, args, kwargs or {}, out)
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.live:
                    self.live[storage._cdata] = (StorageWeakRef(storage), _round(storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out


def _round(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    packet = getattr(func, "_overloadpacket", None)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


class _Interpreter:
    """Runs the graph on fake tensors, each distinct operation once."""

    def __init__(self, capture: Capture, device_types: Sequence[str]) -> None:
        self.capture = capture
        self.device_types = tuple(dict.fromkeys(("cpu", *device_types)))
        self.env: dict[fx.Node, Any] = {}
        self.memo: dict[Any, _Effect] = {}

    def load(self, node: fx.Node) -> None:
        """Take a placeholder's value from the trace."""
        val = node.meta.get("val")
        self.env[node] = _describe(val)

    def run(self, node: fx.Node) -> _Effect:
        """Run one node; its value is remembered for those that read it."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.env[n])
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)), is_leaf=_is_tensor)
        key = (node.target, spec, tuple(map(_hashable, leaves)))
        effect = self.memo.get(key)
        if effect is None:
            effect = self._measure(node, leaves, spec)
            self.memo[key] = effect
        self.env[node] = effect.value
        return effect

    def _measure(self, node: fx.Node, leaves: Sequence[Any], spec: pytree.TreeSpec) -> _Effect:
        if not any(isinstance(leaf, _Tensor) for leaf in leaves) and not _makes_tensor(node):
            return self._compute_scalar(node, leaves, spec)
        effect: _Effect | None = None
        workspace: dict[str, int] = {}
        for device_type in self.device_types:
            try:
                run = _run_fake(node.target, leaves, spec, _fake_device(device_type))
            except Exception as error:  # a kernel without a fake may raise anything
                if effect is None:
                    return _recorded(node, error)
                continue
            workspace[device_type] = run.workspace[""]
            effect = effect or run
        assert effect is not None
        return _Effect(effect.value, effect.results, effect.flops, workspace)

    def _compute_scalar(self, node: fx.Node, leaves: Sequence[Any], spec: pytree.TreeSpec) -> _Effect:
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        if any(leaf is None for leaf in leaves) and not callable(node.target):
            return _recorded(node, None)
        try:
            assert callable(node.target)
            value = node.target(*args, **kwargs)
        except (TypeError, RuntimeError, ZeroDivisionError, OverflowError) as error:
            return _recorded(node, error)
        return _Effect(value, (), 0, {})


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, _Tensor)


def _hashable(leaf: Any) -> Any:
    # True == 1 == 1.0, yet they are different arguments
    return leaf if isinstance(leaf, _Tensor) else (type(leaf), leaf)


def _makes_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _fake_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    backend = getattr(torch, device_type, None)
    available = backend is not None and backend.is_available()
    return torch.device(device_type, 0) if available else torch.device("cpu")


def _size(size: Any) -> int:
    """A size at the example inputs; 1 for what only the data decides."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return 1 if hint is None else int(hint)
    return int(size)


def _describe(val: Any) -> Any:
    """A traced value as the interpreter carries it."""
    if isinstance(val, torch.Tensor):
        shape = tuple(map(_size, val.shape))
        if val.layout is not torch.strided:
            return _Tensor(shape, _contiguous(shape), val.dtype)
        return _Tensor(shape, tuple(map(_size, val.stride())), val.dtype)
    if isinstance(val, list | tuple):
        return [_describe(item) for item in val]
    if isinstance(val, torch.SymInt):
        return _size(val)
    if isinstance(val, torch.SymFloat | torch.SymBool):
        return val.node.hint if val.node.hint is not None else 1.0
    return val


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _recorded(node: fx.Node, error: Exception | None) -> _Effect:
    """What the trace itself recorded, for an operation that does not run on fake tensors."""
    if "val" not in node.meta:
        raise CaptureError(f"{node.format_node()} cannot be run on fake tensors: {error}") from error
    value = _describe(node.meta["val"])
    tensors = [leaf for leaf in pytree.tree_leaves(value, is_leaf=_is_tensor) if _is_tensor(leaf)]
    return _Effect(value, tuple(_Result(t, t.copy_bytes) for t in tensors), 0, {"cpu": 0})


def _run_fake(target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, device: torch.device) -> _Effect:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=device)
            if isinstance(leaf, _Tensor)
            else device
            if isinstance(leaf, torch.device)
            else leaf
            for leaf in leaves
        ]
        arguments = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
        storages = [fake.untyped_storage() for fake in arguments]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        with _Tracker(storages) as tracker:
            out = target(*args, **kwargs)
        owner = {storage._cdata: index for index, storage in enumerate(storages)}
        results: list[_Result] = []
        first: dict[int, int] = {}
        own = 0
        for leaf in pytree.tree_leaves(out):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            argument = owner.get(storage._cdata, -1)
            sibling = -1 if argument >= 0 else first.setdefault(storage._cdata, len(results))
            shared = sibling >= 0 and sibling != len(results)
            nbytes = 0 if argument >= 0 or shared else storage.nbytes()
            own += _round(nbytes)
            results.append(_Result(_describe(leaf), nbytes, argument, sibling if shared else -1))
        return _Effect(_describe(out), tuple(results), tracker.flops, {"": max(0, tracker.peak - own)})


# Reads of a few rows of a table: what passes through memory is the rows.
_GATHERS = {
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
}


class _GraphReader:
    """Walks the fx graph once and writes down operations, values and weights."""

    def __init__(self, capture: Capture, weights: ModelWeights) -> None:
        self.capture, self.model = capture, weights
        self.operations: list[Operation] = []
        self.values: dict[str, Value] = {}
        self.inputs: list[str] = []
        self.written: set[str] = set()
        self.opaque: set[str] = set()
        self.name_of: dict[fx.Node, str] = {}
        self.nodes = list(capture.graph.nodes)
        self.sees_shapes = capture.method != "symbolic_trace"

    def read(self, interpreter: _Interpreter) -> None:
        for node in self.nodes:
            if node.op == "placeholder":
                interpreter.load(node)
                self._placeholder(node, interpreter.env[node])
            elif node.op == "get_attr":  # a submodule of a control-flow operation
                interpreter.env[node] = getattr(self.capture.module, str(node.target))
            elif node.op == "call_function" and not self._is_part(node):
                self._operation(node, interpreter.run(node))
                for user in self._parts(node):
                    interpreter.env[user] = interpreter.env[node][user.args[1]]

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
        if self.sees_shapes and not isinstance(described, _Tensor):
            return  # a constant, which the trace has taken in
        if node.name not in self.capture.inputs:
            return
        self.name_of[node] = node.name
        self.inputs.append(node.name)
        nbytes = described.copy_bytes if isinstance(described, _Tensor) else 0
        self.values[node.name] = _value(node.name, described, nbytes)

    def _is_part(self, node: fx.Node) -> bool:
        """Whether this takes one result out of several: a part of its producer, not a step."""
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            return False
        if self.sees_shapes:
            return isinstance(node.args[0].meta.get("val"), list | tuple) or _is_list(node.args[0])
        return node.args[0].op == "call_module" and isinstance(node.args[1], int)

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self._is_part(user)]

    def _operation(self, node: fx.Node, effect: _Effect | None) -> None:
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
            )
        )

    def _names(self, nodes: Iterable[fx.Node]) -> list[str]:
        return list(dict.fromkeys(self.name_of[node] for node in nodes if node in self.name_of))

    def _known_values(self, node: fx.Node, parts: list[fx.Node], effect: _Effect) -> list[Value]:
        arguments = [self.name_of[n] for n in _flat_nodes(node) if _is_tensor_node(n) and n in self.name_of]
        if not parts:
            if isinstance(effect.value, _Tensor):
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
                result = _Result(result.tensor, 0)
                values.append(_value(part.name, result.tensor, 0, twin))
                continue
            values.append(self._result_value(part.name, result, arguments, owners))
        return values

    def _result_value(
        self, name: str, result: _Result, arguments: Sequence[str], owners: Mapping[int, str]
    ) -> Value:
        base, nbytes = None, result.nbytes
        if 0 <= result.argument < len(arguments):
            base = arguments[result.argument]
        elif result.sibling >= 0:
            base = owners.get(result.sibling)
            nbytes = 0 if base is not None else result.tensor.copy_bytes
        return _value(name, result.tensor, nbytes, base)

    def _unnamed_bytes(self, parts: list[fx.Node], effect: _Effect) -> int:
        """Bytes of results that nobody takes out: they die with the operation."""
        if not parts:
            return 0
        index_of = _result_index(effect.value)
        taken = {index_of.get(part.args[1]) for part in parts}
        return sum(_round(r.nbytes) for i, r in enumerate(effect.results) if i not in taken)

    def _bytes_accessed(self, node: fx.Node, effect: _Effect, writes: bool) -> int:
        made = sum(result.nbytes for result in effect.results)
        if not made and not writes:
            return 0
        tensors = [_describe(n.meta.get("val")) for n in node.all_input_nodes]
        read = [t.copy_bytes for t in tensors if isinstance(t, _Tensor)]
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
        weights = [self._weight(name, t) for name, t in self.model.tensors.items()]
        for name, tensor in self.capture.constants.items():
            weights.append(_constant(name, tensor, name in self.written))
        outputs = [
            self.name_of[node]
            for node in self.capture.outputs
            if isinstance(node, fx.Node) and node in self.name_of
        ]
        unique = list(dict.fromkeys(outputs))
        parts = (self.operations, self.values.values(), weights, self.inputs, unique)
        plain = Graph(*parts, shapes_known=self.sees_shapes)
        return Graph(*parts, find_together(plain), shapes_known=self.sees_shapes)

    def _weight(self, name: str, tensor: torch.Tensor) -> Weight:
        names = tuple(self.model.names[name])
        return Weight(
            name,
            tensor_bytes(tensor),
            names,
            "parameter" if name in self.model.parameters else "buffer",
            any(n in self.model.persistent for n in names),
            name in self.written,
            name not in self.opaque,
            tuple(tensor.shape),
            _dtype_name(tensor.dtype),
        )


def _constant(name: str, tensor: torch.Tensor, written: bool) -> Weight:
    shape, dtype = tuple(tensor.shape), _dtype_name(tensor.dtype)
    return Weight(name, tensor_bytes(tensor), (name,), "constant", False, written, True, shape, dtype)


def _value(name: str, described: Any, nbytes: int, base: str | None = None) -> Value:
    if isinstance(described, _Tensor):
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
            if isinstance(item, _Tensor):
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
