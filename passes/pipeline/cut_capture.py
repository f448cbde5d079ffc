"""The capture of one stage: a stretch of a captured graph, as a graph of its own.

Before, and the second of two stages, cut before ``linear_1``::

    x, w1, w2 = placeholders                  relu, x, w2 = placeholders
    n = sym_size(x, 0)                        n = sym_size(x, 0)
    linear = linear(x, w1)                    linear_1 = linear(relu, w2)
    relu = relu(linear)                       view = reshape(linear_1, [n, -1])
    linear_1 = linear(relu, w2)               return (view,)
    view = reshape(linear_1, [n, -1])
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from graphplan.capture.captured_graph import Capture
from graphplan.capture.signature import InputSignature, TensorLeaf
from graphplan.capture.structure import reachable
from graphplan.errors import CaptureError, VerificationError
from graphplan.passes.frontend.tensor_meta import TensorMeta, describe
from graphplan.passes.pipeline.boundaries import Boundaries


@dataclass(frozen=True, slots=True)
class StageCapture:
    """One stage of a captured forward pass.

    Attributes:
        capture: takes ``inputs``, returns ``outputs`` as a flat tuple.
        inputs: names of its inputs: received values, and inputs of the model.
        outputs: names of the values that it computes for later stages or as results, or that stay here.
        received: names of the values that cross the cut before it, in order; some only pass through.
        sent: names of those that cross the cut after it; for the last stage, of the results.
        sizes: name of each of these -> its metadata at the sizes of the plan.
        numbers: name of each input that is a number -> its value in the trace.
        trace: name of a further, empty argument of the stage that identifies the trace of the model: stages
            of two traces may take tensors of the same sizes.
    """

    capture: Capture
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    sizes: dict[str, TensorMeta]
    numbers: dict[str, int | float]
    trace: str


def cut_capture(
    whole: Capture, boundaries: Boundaries, start: int, end: int, trace: str = "trace"
) -> StageCapture:
    """Return the stage of the operations from ``start`` to ``end``, of a capture for the plan's sizes.

    Raises:
        CaptureError: a value that crosses a cut, or a result, is not a tensor, or has a data-dependent size.
    """
    return _Cut(whole, boundaries, start, end).stage(trace)


def results_of(whole: Capture, *, caches_stay: bool) -> tuple[str, ...]:
    """Return the names of the results that are nodes, each once; without caches if ``caches_stay``."""
    named = (
        node.name
        for position, node in enumerate(whole.outputs)
        if isinstance(node, fx.Node) and not (caches_stay and position in whole.kept)
    )
    return tuple(dict.fromkeys(named))


class _Cut:
    def __init__(self, whole: Capture, boundaries: Boundaries, start: int, end: int) -> None:
        self.whole, self.boundaries = whole, boundaries
        self.operations = list(boundaries.graph.operations)
        self.names = set(self.operations[start:end]) - boundaries.recomputed
        self.received = boundaries.crossing(start) if start else ()
        last = end == len(self.operations)
        stay = boundaries.caches_stay
        self.sent = results_of(whole, caches_stay=stay) if last else boundaries.crossing(end)
        self.nodes = {node.name: node for node in whole.graph.nodes}
        cached = {whole.outputs[position] for position in whole.kept} if stay else set()
        nodes = (node for node in cached if isinstance(node, fx.Node))
        self.cached = [node.name for node in nodes if self._producer(node).name in self.names]

    def stage(self, trace: str) -> StageCapture:
        available = {*self.received, *self.whole.inputs}
        returned = (*self.sent, *sorted(self.cached))
        outputs = tuple(dict.fromkeys(name for name in returned if name not in available))
        wanted = self._wanted([*self.names, *outputs])
        inputs = [name for name in (*self.received, *self.whole.inputs) if self.nodes[name] in wanted]
        graph = self._graph(wanted, outputs)
        weights = {
            node.name: self.whole.weights[node.name]
            for node in graph.find_nodes(op="placeholder")
            if node.name in self.whole.weights
        }
        constants = {n: t for n, t in self.whole.constants.items() if n in set(weights.values())}
        leaves = tuple(self._leaf(name) for name in inputs)
        spec = pytree.tree_structure((tuple(range(len(inputs))), {trace: ()}))
        capture = Capture(
            fx.GraphModule(self.whole.module, graph),
            weights,
            constants,
            inputs=tuple(inputs),
            out_spec=pytree.tree_structure(tuple(range(len(outputs)))),
            signature=InputSignature(spec, leaves, tuple(inputs)),
            method=self.whole.method,
            sizes=dict(self.whole.sizes),
            order=tuple(range(len(inputs))),
        )
        named = dict.fromkeys((*self.received, *self.sent, *inputs))
        values = {name: self.nodes[name].meta.get("val") for name in inputs}
        numbers = {n: v.node.hint for n, v in values.items() if isinstance(v, torch.SymInt | torch.SymFloat)}
        sizes = {name: self._tensor(name) for name in named if name not in numbers}
        return StageCapture(
            capture,
            tuple(inputs),
            outputs,
            received=self.received,
            sent=self.sent,
            sizes=sizes,
            numbers=numbers,
            trace=trace,
        )

    def _wanted(self, names: Iterable[str]) -> set[fx.Node]:
        """Return the nodes of the stage: its operations, the values they read, and those it recomputes."""

        def read(node: fx.Node) -> list[fx.Node]:
            if node.name in self.received or node.op == "placeholder":
                return []
            self._require_made_here(node)
            return node.all_input_nodes

        return set(reachable((self.nodes[name] for name in names), read))

    def _producer(self, node: fx.Node) -> fx.Node:
        """Return the node of the operation that makes a value, which may be one of several results."""
        while node.name not in self.boundaries.graph.operations and node.target is operator.getitem:
            node = node.all_input_nodes[0]
        return node

    def _require_made_here(self, node: fx.Node) -> None:
        producer = self._producer(node)
        is_made_here = producer.name in self.names or producer.name in self.boundaries.recomputed
        if not is_made_here and producer.op == "call_function":
            raise VerificationError(f"a stage reads {node.name!r}, which cannot cross a cut before it")

    def _graph(self, wanted: set[fx.Node], outputs: Sequence[str]) -> fx.Graph:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        ordered = [node for node in self.whole.graph.nodes if node in wanted]
        placeholders = [n for n in ordered if n.op == "placeholder" or n.name in self.received]
        for node in placeholders:
            placeholder = graph.create_node("placeholder", node.name, name=node.name)
            placeholder.meta.update(node.meta)
            placeholder.name = node.name  # fx renames a node that has the name of a builtin, as ``input``
            env[node] = placeholder
        for node in ordered:
            if node not in env:
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].name = node.name
        graph.output(tuple(env[self.nodes[name]] for name in outputs))
        graph.lint()
        return graph

    def _leaf(self, name: str) -> Any:
        """Return the stage's requirements on an input: dynamic sizes may be as large as in the plan."""
        val = self.nodes[name].meta.get("val")
        if not isinstance(val, torch.Tensor):
            index = self.whole.inputs.index(name)
            position = self.whole.order[index] if self.whole.order else index
            return None if position is None else self.whole.signature.leaves[position]
        sizes = self._tensor(name).shape
        shape = tuple(None if isinstance(size, torch.SymInt) else int(size) for size in val.shape)
        ranges = tuple(
            None if size is not None else (0, bound) for size, bound in zip(shape, sizes, strict=True)
        )
        return TensorLeaf(val.dtype, shape, ranges, ())

    def _tensor(self, name: str) -> TensorMeta:
        node = self.nodes[name]
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            raise CaptureError(
                f"{name!r} is a {type(val).__name__}, not a tensor: only tensors can be sent between "
                "machines, or returned by a model over several machines"
            )
        open_sizes = [size for size in val.shape if free_unbacked_symbols(size)]
        if open_sizes:
            raise CaptureError(
                f"{name!r} has a data-dependent size, {open_sizes[0]}: it cannot be sent between machines "
                "or returned, because such sizes are not known in advance"
            )
        described = describe(val, self.whole.sizes)
        assert isinstance(described, TensorMeta)
        return described
