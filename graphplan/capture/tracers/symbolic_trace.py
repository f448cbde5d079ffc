"""Capture without example inputs: ``torch.fx.symbolic_trace``, opened up to the weights."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.captured_graph import OWN_NAMES, Capture
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.signature import InputSignature
from graphplan.capture.source_lines import failed_line
from graphplan.capture.structure import flatten, know_containers
from graphplan.errors import CaptureError, first_line


class _OpenTracer(fx.Tracer):
    """Traces into torch's weight-bearing layers, so that their weights are the graph's to place.

    Its other layers stay whole: many of them decide by the sizes of what they get.
    """

    OPEN = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.RMSNorm)

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """While it traces, it is told of the modules that other threads run too."""
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Likewise of their attributes."""
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) and not isinstance(m, self.OPEN)


def trace_symbolically(model_copy: ModelCopy) -> Capture:
    """The graph of ``forward`` with its optional arguments left out.

    Raises:
        CaptureError: control flow depends on the inputs, or arguments are variadic.
    """
    parameters = model_copy.signature.parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise CaptureError(
            f"{type(model_copy.module).__name__}.forward{model_copy.signature} takes any number of "
            "arguments: give example inputs (args=..., kwargs=...)"
        )
    concrete = {p.name: p.default for p in parameters if p.default is not p.empty}
    required = [p.name for p in parameters if p.default is p.empty]
    try:
        graph = _OpenTracer().trace(model_copy.module, concrete_args=concrete)
    except Exception as error:  # tracing runs the model's own code, which may raise anything
        raise CaptureError(
            f"{type(model_copy.module).__name__} cannot be traced without example inputs "
            f"({first_line(error)}): give args=... or kwargs=...{failed_line(error)}"
        ) from error
    targets = [str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")]
    for name in OWN_NAMES.intersection(target.partition(".")[0] for target in targets):
        raise CaptureError(
            f"{type(model_copy.module).__name__} has a child named {name!r}, as generated modules have, and "
            "cannot be traced without example inputs: give args=... or kwargs=..."
        )
    return _from_symbolic(model_copy, graph, required)


def _from_symbolic(model_copy: ModelCopy, graph: fx.Graph, required: Sequence[str]) -> Capture:
    weights: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs = []
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if node.target in required:
                inputs.append(node.name)
            elif not node.users:
                graph.erase_node(node)
        elif node.op == "get_attr":
            first = model_copy.weights.first.get(node.target)
            if first is None:
                value = attrgetter(node.target)(model_copy.module)
                if not isinstance(value, torch.Tensor):
                    continue
                constants[node.target] = value
                first = node.target
            weights[node.name] = first
    output = graph.output_node()
    results = _plain(output.args[0])
    know_containers(results)
    flat, out_spec = flatten(results)
    output.args = (tuple(flat),)
    spec = flatten(((), dict.fromkeys(required, 0)))[1]
    signature = InputSignature(spec, (None,) * len(required), tuple(required), symbolic=True)
    module = fx.GraphModule(model_copy.module, graph)
    return Capture(module, weights, constants, tuple(inputs), out_spec, signature, "symbolic_trace")


def _plain(results: Any) -> Any:
    """Fx keeps a graph's arguments immutable: give back the containers that the model made."""
    if isinstance(results, dict):
        return {key: _plain(value) for key, value in results.items()}
    if isinstance(results, fx.immutable_collections.immutable_list):
        return [_plain(value) for value in results]
    if type(results) is tuple:
        return tuple(_plain(value) for value in results)
    return results
