"""The caller's options of training: memory for each parameter, and where the backward pass starts."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.capture.model.modes import Differentiation
from graphplan.capture.written_memory import memories, written_arguments, written_memories
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Weight
from graphplan.passes.training.optimizer_memory import OptimizerMemory


@dataclass(frozen=True, slots=True)
class Training:
    """The caller's options of training.

    Attributes:
        optimizer: name of each parameter -> memory that the optimizer takes for it once it is trained.
        trained: names of the parameters that require a gradient when the model is placed.
        outputs: names of the results that backward starts from; None for the loss, or all results.
        recompute: whether the backward pass may recompute parts of the forward pass.
        offload_activations: whether saved activations may wait for the backward pass in CPU memory.
        accumulates: whether parameters may have gradients already when a call begins.
        in_flight: in a pipeline, the most microbatches in flight in this stage.
        shared: parameters that other stages read too: their gradients of a batch are summed over the stages
            before they are added to earlier ones.
    """

    optimizer: Mapping[str, OptimizerMemory] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    outputs: tuple[str, ...] | None = None
    recompute: bool = True
    offload_activations: bool = True
    accumulates: bool = True
    in_flight: int = 1
    shared: frozenset[str] = frozenset()

    @property
    def differentiation(self) -> Differentiation:
        """The results and parameters that the step planned first differentiates."""
        return Differentiation(self.trained, self.outputs)

    def held(self, graph: Graph, capture: Capture, earlier: Set[str]) -> Graph:
        """Return the graph with gradients and optimizer state of the parameters.

        The capture of a training step says which parameters have gradients; for another call, all that may
        have one count. Parameters that ``earlier`` steps trained keep theirs. If gradients do not accumulate,
        no call begins with one: only the step's own count, from the operation that makes them on; those that
        are copied count as long as their parameter.
        """
        step_trained = self.trained if capture.step is None else capture.step.gradients.values()
        trained = {*step_trained, *earlier}
        in_place, counted = frozenset[str](), trained
        if not self.accumulates:
            in_place = _made_in_place(graph, capture)
            counted = {value.gradient_of for value in graph.values.values() if value.name not in in_place}
        weights = [
            self._held(weight, steps=capture.step is not None, gradient=weight.name in counted)
            if weight.name in trained
            else weight
            for weight in graph.weights.values()
        ]
        values = [
            replace(value, stays=True) if value.name in in_place else value for value in graph.values.values()
        ]
        in_flight = 1 if capture.step is None else self.in_flight
        return graph.changed(weights=weights, values=values, in_flight=in_flight)

    def _held(self, weight: Weight, *, steps: bool, gradient: bool) -> Weight:
        memory = self.optimizer.get(weight.name, OptimizerMemory())
        gradients = (1 + (steps and weight.name in self.shared)) * gradient
        return replace(
            weight,
            beside=(*[weight.nbytes] * gradients, *memory.state),
            step_bytes=memory.step,
            together_bytes=memory.together,
            step_traffic=memory.traffic if steps else 0,
        )


def _made_in_place(graph: Graph, capture: Capture) -> frozenset[str]:
    """Return the gradients that need no copy: their memory is theirs alone, in the parameter's layout."""
    strides = {
        capture.weights[node.name]: node.meta["val"].stride()
        for node in capture.graph.find_nodes(op="placeholder")
        if node.name in capture.weights
    }
    return frozenset(
        node.name
        for node in capture.graph.nodes
        if node.name in graph.owned_gradients
        and node.meta["val"].stride() == strides[graph.values[node.name].gradient_of]
    )


def trainable(weights: ModelWeights) -> frozenset[str]:
    """Return the parameters that require a gradient."""
    return frozenset(
        n for n, tensor in weights.tensors.items() if n in weights.parameters and tensor.requires_grad
    )


def trained_values(capture: Capture, parameters: Set[str]) -> frozenset[str]:
    """Return the values through which gradients flow from a result to one of these parameters."""
    dependent: set[fx.Node] = set()
    written: set[int] = set()  # identities of memory
    for node in capture.graph.nodes:
        inputs = node.all_input_nodes
        reads = not dependent.isdisjoint(inputs) or not written.isdisjoint(memories(*inputs))
        reached = reads and not _stops_gradients(node)
        if capture.weights.get(node.name) in parameters or reached:
            dependent.add(node)
            written.update(written_memories(node))
    read: set[fx.Node] = set()
    for node in reversed(capture.graph.nodes):
        ends = node.op == "output" or written_arguments(node.target, node.args, node.kwargs)
        if (ends or node in read) and not _stops_gradients(node):
            read.update(node.all_input_nodes)
    values = {node.name: node.meta.get("val") for node in dependent & read}
    return frozenset(
        name
        for name, val in values.items()
        if isinstance(val, torch.Tensor) and (val.is_floating_point() or val.is_complex())
    )


def _stops_gradients(node: fx.Node) -> bool:
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.args[0] is False
    val = node.meta.get("val")
    is_integral = isinstance(val, torch.Tensor) and not (val.is_floating_point() or val.is_complex())
    return is_integral or node.target is torch.ops.aten.detach.default
