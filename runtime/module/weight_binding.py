"""Generated code that takes its weights as arguments, instead of looking attributes up in each call.

``self.model.layers.0.mlp.up.weight`` is five dictionary look-ups through ``nn.Module.__getattr__``. Bound
code takes it as an argument, read straight from the dictionary of parameters of the module that owns it::

    def forward(self, x):                         def forward(self, x, up_weight):
        up_weight = self.mlp.up.weight                linear = torch._C._nn.linear(x, up_weight)
        linear = torch._C._nn.linear(x, up_weight)    return (linear,)
        return (linear,)

A call reads what the modules hold at that time. A parameter that was replaced, in whatever way, is found in
its dictionary. If a module was replaced, or the graph module recompiled, the code is bound again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any

from torch import fx, nn


class BoundCode:
    """A callable that runs a graph module's graph with its weights bound. Threads may call it concurrently.

    Args:
        code: the graph module, whose ``get_attr`` nodes become arguments. Binding adds no reference cycle.
    """

    def __init__(self, code: fx.GraphModule) -> None:
        self.code = code
        self.binding: _Binding | None = None

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the flat results for the flat inputs."""
        code, binding = self.code, self.binding
        if binding is None or binding.forward is not type(code).forward:
            binding = self._bind()
        weights = binding.read()
        if weights is None:  # a module was replaced
            binding = self._bind()
            weights = binding.read()
        results: Sequence[Any]
        if weights is None or binding.function is None or code._forward_hooks or code._forward_pre_hooks:
            results = code(*tensors)
        else:
            results = binding.function(code, *tensors, *weights)
        return results

    def _bind(self) -> _Binding:
        forward = type(self.code).forward
        graph, targets = _with_arguments(self.code.graph)
        sources = _find_sources(self.code, targets)
        if sources is None:  # such as a parametrization, whose attribute computes the weight at each read
            self.binding = _Binding(forward)
        else:
            shell = fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(self.code).__name__)
            shell.graph = graph
            self.binding = _Binding(forward, type(shell).forward, *sources)
        return self.binding


@dataclass(frozen=True, slots=True)
class _Binding:
    """One binding of the code; after a change another replaces it.

    Attributes:
        forward: the graph module's ``forward`` when it was bound: recompiling makes another.
        function: takes the graph module, the inputs, the weights; None if a class computes one of these.
        parents: the dictionary of each module, or parameter, on the path to a weight.
        children: their keys in ``parents``.
        modules: their values when the code was bound.
        owners: for each weight, the dictionary that holds it.
        names: the keys of weights in ``owners``.
    """

    forward: Any
    function: Callable[..., Any] | None = None
    parents: Sequence[dict[str, Any]] = ()
    children: Sequence[str] = ()
    modules: Sequence[Any] = ()
    owners: Sequence[dict[str, Any]] = ()
    names: Sequence[str] = ()

    def read(self) -> list[Any] | None:
        """Return the present weights; None if they must be located again."""
        try:
            valid = all(map(is_, map(getitem, self.parents, self.children), self.modules))
            return list(map(getitem, self.owners, self.names)) if valid else None
        except KeyError:
            return None


def _with_arguments(graph: fx.Graph) -> tuple[fx.Graph, list[str]]:
    """Return a copy in which attributes are placeholders after the inputs, and the attributes' targets."""
    bound = fx.Graph()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    attributes = [node for node in graph.nodes if node.op == "get_attr"]
    env = {node: bound.placeholder(node.name) for node in (*inputs, *attributes)}
    for node in graph.nodes:
        if node not in env:
            env[node] = bound.node_copy(node, env.__getitem__)
    return bound, [str(node.target) for node in attributes]


def _find_sources(root: nn.Module, targets: Sequence[str]) -> tuple[list[Any], ...] | None:
    """Return the last five fields of a :class:`_Binding`; None if a class computes one of the attributes."""
    steps: dict[str, tuple[dict[str, Any], str, Any]] = {}
    owners, names = [], []
    for target in targets:
        holder: Any = root
        *path, name = target.split(".")
        for depth, part in enumerate(path):
            table = _table_of(holder, part)
            if table is None:
                return None
            steps[".".join(path[: depth + 1])] = (table, part, table[part])
            holder = table[part]
        owner = _table_of(holder, name)
        if owner is None:
            return None
        owners.append(owner)
        names.append(name)
    path_steps = list(steps.values())
    return [s[0] for s in path_steps], [s[1] for s in path_steps], [s[2] for s in path_steps], owners, names


def _table_of(holder: Any, name: str) -> dict[str, Any] | None:
    """Return the dictionary in which an object holds an attribute; None if its class has the attribute."""
    direct = vars(holder)
    tables = (direct[t] for t in ("_modules", "_parameters", "_buffers") if isinstance(holder, nn.Module))
    return None if hasattr(type(holder), name) else next((t for t in (direct, *tables) if name in t), None)
