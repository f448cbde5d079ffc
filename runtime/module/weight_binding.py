"""Generated code whose weights are arguments, instead of attributes that each call looks up one by one.

``self.model.layers.0.mlp.up.weight`` is five dictionary look-ups through ``nn.Module.__getattr__``. Bound
code takes it as an argument, read straight from the dictionary of parameters of the module that owns it::

    def forward(self, x):                         def forward(self, x, up_weight):
        up_weight = self.mlp.up.weight                linear = torch._C._nn.linear(x, up_weight)
        linear = torch._C._nn.linear(x, up_weight)    return (linear,)
        return (linear,)

What a call reads is what the modules hold at that time: a parameter that was replaced, in whatever way, is
found in its dictionary; where a module was replaced, or the graph module recompiled, the code is bound anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem, is_
from typing import Any

from torch import fx, nn


class BoundCode:
    """Runs a graph module's graph with its weights bound.

    Threads may call it at the same time.

    Args:
        code: whose ``get_attr`` nodes become arguments. It holds on to its own weights; this adds no cycle.
    """

    def __init__(self, code: fx.GraphModule) -> None:
        self.code = code
        self.binding: _Binding | None = None

    def __call__(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The flat results for the flat inputs."""
        code, binding = self.code, self.binding
        if binding is None or binding.forward is not type(code).forward:
            binding = self._bind()
        weights = binding.read()
        if weights is None:  # a module was replaced
            binding = self._bind()
            weights = binding.read()
        found: Sequence[Any]
        if weights is None or binding.function is None or code._forward_hooks or code._forward_pre_hooks:
            found = code(*tensors)
        else:
            found = binding.function(code, *tensors, *weights)
        return found

    def _bind(self) -> _Binding:
        forward = type(self.code).forward
        graph, targets = _with_arguments(self.code.graph)
        sources = _find_sources(self.code, targets)
        if sources is None:  # a parametrization, say: its attribute computes the weight, and is read by name
            self.binding = _Binding(forward)
        else:
            shell = fx.GraphModule(nn.Module(), fx.Graph(), class_name=type(self.code).__name__)
            shell.graph = graph
            self.binding = _Binding(forward, type(shell).forward, *sources)
        return self.binding


@dataclass(frozen=True, slots=True)
class _Binding:
    """What was bound at one time; a change makes another.

    Attributes:
        forward: of the graph module then: recompiling it makes another.
        function: takes the module, the inputs, the weights; None where weights are not plain entries.
        parents: the dictionary in which each module, or parameter, on the way to a weight stands.
        children: the names of these there.
        modules: these themselves, when the code was bound.
        owners: for each weight, the dictionary that has it.
        names: of the weights, there.
    """

    forward: Any
    function: Callable[..., Any] | None = None
    parents: Sequence[dict[str, Any]] = ()
    children: Sequence[str] = ()
    modules: Sequence[Any] = ()
    owners: Sequence[dict[str, Any]] = ()
    names: Sequence[str] = ()

    def read(self) -> list[Any] | None:
        """The weights as they are now; None where they are to be looked for anew."""
        try:
            same = all(map(is_, map(getitem, self.parents, self.children), self.modules))
            return list(map(getitem, self.owners, self.names)) if same else None
        except KeyError:
            return None


def _with_arguments(graph: fx.Graph) -> tuple[fx.Graph, list[str]]:
    """A copy in which attributes are placeholders, behind the inputs; and their targets."""
    bound = fx.Graph()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    attributes = [node for node in graph.nodes if node.op == "get_attr"]
    env = {node: bound.placeholder(node.name) for node in (*inputs, *attributes)}
    for node in graph.nodes:
        if node not in env:
            env[node] = bound.node_copy(node, env.__getitem__)
    return bound, [str(node.target) for node in attributes]


def _find_sources(root: nn.Module, targets: Sequence[str]) -> tuple[list[Any], ...] | None:
    """Where weights are read from, as a :class:`_Binding` has it."""
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
    found = list(steps.values())
    return [s[0] for s in found], [s[1] for s in found], [s[2] for s in found], owners, names


def _table_of(holder: Any, name: str) -> dict[str, Any] | None:
    """The dictionary of a module, parameter or object that has an attribute; None where its class answers."""
    own = vars(holder)
    inside = (
        own[table] for table in ("_modules", "_parameters", "_buffers") if isinstance(holder, nn.Module)
    )
    return None if hasattr(type(holder), name) else next((t for t in (own, *inside) if name in t), None)
