"""Conversion of an fx graph to JSON and back, with the traced value, module stack and line of each node.

A file has each distinct size, tensor and module stack once; nodes refer to them by index::

    {"symbols": [["s0", ["integer", "positive"], 16, [2, ["infinity", 1]]]],
     "sizes": [["int", ["Symbol", "s0"], 16]],
     "values": [[[["symbolic", 0], 64], [64, 1], "float32", "cpu", false, null]], ...}

The last entry of a tensor is the number of its storage, which its views share, if an operation writes to it.
Other tensors with the same entry are read as one tensor, which takes a tenth of the time.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from graphplan._compat.symbolic_sizes import SizeMaker, plain_expression, plain_symbol
from graphplan._compat.torch import storage_of, unbacked_like_backed
from graphplan._compat.traced_tensors import fake_tensor
from graphplan.capture.saved.plain_values import (
    NotSavedError,
    checked_name,
    from_plain,
    plain_target,
    target_from_plain,
    to_plain,
)
from graphplan.capture.written_memory import written_memories

_NUMBERS = {"int": torch.SymInt, "float": torch.SymFloat, "bool": torch.SymBool}
_OPS = ("placeholder", "get_attr", "call_function", "output")
_META_KEYS = ("stack_trace", "backward", "forward", "repeats", "seq_nr")


class GraphWriter:
    """Converts the graphs of one trace; values that several nodes share are written once.

    Args:
        module: the graph, with those of its control-flow operations.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.tables: dict[str, list[Any]] = {"symbols": [], "sizes": [], "values": [], "paths": []}
        graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
        written = dict.fromkeys(
            memory for graph in graphs for node in graph.nodes for memory in written_memories(node)
        )
        self._memories = {memory: number for number, memory in enumerate(written)}
        self._indices: dict[str, dict[str, int]] = {name: {} for name in self.tables}

    def graph(self, module: fx.GraphModule) -> dict[str, Any]:
        """Return a graph as JSON, with those of its control-flow operations."""
        nodes = [self._node(node) for node in module.graph.nodes]
        inner: dict[str, Any] = {}
        for node in module.graph.find_nodes(op="get_attr"):
            branch = getattr(module, str(node.target), None)
            if not isinstance(branch, fx.GraphModule):
                raise NotSavedError(f"a graph that reads the attribute {node.target!r} is not saved")
            inner[str(node.target)] = self.graph(branch)
        return {"nodes": nodes, "inner": inner}

    def _node(self, node: fx.Node) -> list[Any]:
        meta = {name: node.meta[name] for name in _META_KEYS if name in node.meta}
        if "nn_module_stack" in node.meta:
            stack = node.meta["nn_module_stack"] or {}
            meta["path"] = self._number("paths", [[key, *map(_text, entry)] for key, entry in stack.items()])
        if "val" in node.meta:
            meta["value"] = to_plain(node.meta["val"], self._traced)
        arguments = to_plain(node.args), to_plain(dict(node.kwargs))
        return [node.op, node.name, plain_target(node.target), *arguments, meta]

    def _traced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return ["tensor", self._number("values", self._tensor(value))]
        return self._size(value) if isinstance(value, tuple(_NUMBERS.values())) else to_plain(value)

    def _tensor(self, value: torch.Tensor) -> list[Any]:
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            raise NotSavedError(
                f"a graph with tensors of {type(value).__name__}, {value.layout} is not saved"
            )
        sizes = [list(map(self._size, of)) for of in (value.shape, value.stride())]
        memory = self._memories.get(storage_of(value))
        return [*sizes, to_plain(value.dtype)[1], str(value.device), value.requires_grad, memory]

    def _size(self, size: Any) -> Any:
        type_name = next(
            (type_name for type_name, number_class in _NUMBERS.items() if isinstance(size, number_class)),
            None,
        )
        if type_name is None or (type_name == "int" and size.node.expr.is_number):  # fixed by the trace
            return int(size)
        expression, env = size.node.expr, size.node.shape_env
        for symbol in sorted(expression.free_symbols, key=str):
            plain = plain_symbol(symbol, env)
            if plain[2] is None:
                raise NotSavedError("a graph with sizes that depend on values of inputs is not saved")
            self._number("symbols", plain)
        try:
            plain = plain_expression(expression)
        except KeyError as error:
            raise NotSavedError(f"a graph with the size {expression} is not saved: {error}") from error
        return ["symbolic", self._number("sizes", [type_name, plain])]

    def _number(self, table: str, entry: Any) -> int:
        key = json.dumps(entry)
        index = self._indices[table].setdefault(key, len(self.tables[table]))
        if index == len(self.tables[table]):
            self.tables[table].append(entry)
        return index


def _text(entry: Any) -> str:
    return f"{entry.__module__}.{entry.__qualname__}" if isinstance(entry, type) else str(entry)


class GraphMaker:
    """Rebuilds the graphs of a file.

    Args:
        tables: the tables of the :class:`GraphWriter`.
    """

    def __init__(self, tables: dict[str, list[Any]]) -> None:
        self.sizes = SizeMaker()
        for symbol in tables["symbols"]:
            self.sizes.symbol(symbol)
        self._memories: dict[int, torch.Tensor] = {}
        self._sizes = [self.sizes.size(*entry) for entry in tables["sizes"]]
        tensors = [self._tensor(*entry) for entry in tables["values"]]
        self._known = {"symbolic": self._sizes, "tensor": tensors}
        self._paths = [{key: tuple(entry) for key, *entry in path} for path in tables["paths"]]

    def module(self, plain: dict[str, Any]) -> fx.GraphModule:
        """Return the graph, in a module that has the graphs of its control-flow operations."""
        root = nn.Module()
        for name, inner in plain["inner"].items():
            setattr(root, name, self.module(inner))
        graph, nodes = fx.Graph(), dict[str, fx.Node]()
        for op, name, target, args, kwargs, meta in plain["nodes"]:
            if op not in _OPS:
                raise NotSavedError(f"{op!r} is not a node of a traced graph")
            arguments = from_plain(args, {"node": nodes}), from_plain(kwargs, {"node": nodes})
            node = graph.create_node(op, target_from_plain(target), *arguments, name)
            if node.name != name:
                node.name = checked_name(name)
            node.meta = {key: meta[key] for key in _META_KEYS if key in meta}
            if "path" in meta:
                node.meta["nn_module_stack"] = self._paths[meta["path"]]
            if "value" in meta:
                node.meta["val"] = from_plain(meta["value"], self._known)
            nodes[name] = node
        return fx.GraphModule(root, graph)

    def _tensor(
        self, shape: Any, stride: Any, dtype: str, device: str, requires_grad: bool, memory: int | None
    ) -> torch.Tensor:
        sizes, strides = (list(map(self._size, of)) for of in (shape, stride))
        base = None if memory is None else self._memories.get(memory)
        torch_dtype, torch_device = getattr(torch, dtype), torch.device(device)
        with unbacked_like_backed():  # as in the trace, which assumes no size to be above 1
            tensor = fake_tensor(self.sizes.mode, sizes, strides, 0, torch_dtype, torch_device, base)
        tensor.requires_grad_(requires_grad)
        if memory is not None:
            self._memories.setdefault(memory, tensor)
        return tensor

    def _size(self, plain: Any) -> Any:
        return self._sizes[plain[1]] if isinstance(plain, list) else plain
