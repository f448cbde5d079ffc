"""Branches of the model's code that go by weights alone: which way they go, and what tells of a change.

What a call traces is the way that the weights of that moment choose; the question is kept beside the graph,
which serves calls for as long as the answer is the same::

    if not self.initialized:           ne = aten.ne(initialized, 0)
        ...                            item = aten.item(ne)               False
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves, tree_map_only

from graphplan._compat.traced_tensors import node_of, untraced
from graphplan.capture.source_lines import calling_line
from graphplan.capture.structure import memories, written_memories

aten = torch.ops.aten

ValueOf = Callable[[str], torch.Tensor | None]
"""The weight of a name, as it is now; None where it has no values."""


@dataclass(frozen=True, slots=True)
class WeightBranch:
    """What a branch asked, and the answer.

    Attributes:
        question: computes the answer of the weights.
        weights: their names.
        answer: by which the trace went, as text: a float that is no number does not equal itself.
    """

    question: fx.GraphModule
    weights: tuple[str, ...]
    answer: str

    def renamed(self, name_of: Callable[[str], str]) -> WeightBranch:
        """With other names of the weights."""
        return replace(self, weights=tuple(map(name_of, self.weights)))


def same_answers(branches: Sequence[WeightBranch], value_of: ValueOf) -> bool:
    """Whether all branches go by these weights as they went in the trace."""
    if not branches:
        return True
    with _plainly():
        for branch in branches:
            values = [value for name in branch.weights if (value := value_of(name)) is not None]
            if len(values) < len(branch.weights) or repr(_asked(branch.question, values)) != branch.answer:
                return False
    return True


@contextmanager
def _plainly() -> Iterator[None]:
    """A block in which questions are asked, whatever modes the code that asks them is in."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def _asked(question: fx.GraphModule, values: Iterable[Any]) -> Any:
    return question.forward(*(value.detach().cpu() for value in values))


class WeightBranches:
    """The branches of the traces of one call: what one trace fails at, the next one answers.

    Args:
        module: what is traced.
        value_of: gives its weights, by their names in it.

    Attributes:
        found: those of the last trace.
    """

    def __init__(self, module: nn.Module, value_of: ValueOf) -> None:
        self._module, self._value_of = module, value_of
        self._answered: set[str] = set()  # the lines of the code whose questions are answered
        self._names: dict[fx.Node | None, str] = {}  # of the weights' nodes
        self._lines: dict[Any, str] = {}  # symbol -> the line that has made it
        self._failed = ""
        self.found: list[WeightBranch] = []

    def begin(self) -> None:
        """Forget what the last trace has found."""
        self._names, self._lines, self._failed, self.found = {}, {}, "", []

    def enter(self, tracer: Any) -> None:
        """Know the weights before the first call of the trace, which may write to them."""
        if not self._names:
            tables = (self._module.named_parameters, self._module.named_buffers)
            named = (entry for table in tables for entry in table(remove_duplicate=False))
            self._names = {node_of(tensor, tracer): name for name, tensor in named}

    def read(self, tracer: Any, operation: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """What ``operation`` returns, of which the code will know the value; or the value itself."""
        leaves = tree_leaves((args, kwargs))
        given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        nodes = {key: node for key, one in given.items() if (node := node_of(one, tracer)) is not None}
        if len(nodes) < len(given) or not self._are_settled(_computed_from(nodes.values(), {})):
            return operation()
        writers = _writers(tracer.graph)
        needed = _computed_from(nodes.values(), writers)
        if not self._are_settled(needed):
            return operation()
        names = tuple(self._names[node] for node in needed if node in self._names)
        values = [self._value_of(name) for name in names]
        if any(value is None for value in values):
            return operation()
        line = calling_line()
        if line in self._answered:
            asked = tree_map_only(torch.Tensor, lambda one: nodes[id(one)], (args, kwargs))
            question = self._question(needed, writers.keys(), func, *asked)
            with untraced(), _plainly():
                answer = _asked(question, values)
            self.found.append(WeightBranch(question, names, repr(answer)))
            return answer
        self._failed = line  # until there is a result
        result = operation()
        self._failed = ""
        if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
            self._lines |= dict.fromkeys(result.node.expr.free_symbols, line)
        return result

    def decide(self, number: Any) -> bool:
        """Whether weights alone decide a symbolic number of the trace."""
        return bool(self._lines.keys() & number.node.expr.free_symbols)

    def learn(self, error: Exception) -> bool:
        """Whether a trace has failed for want of an answer that the next one has."""
        symbols = error.cond.free_symbols if isinstance(error, GuardOnDataDependentSymNode) else ()
        lines = {self._lines[symbol] for symbol in symbols if symbol in self._lines} | {self._failed} - {""}
        new = lines - self._answered
        self._answered |= new
        return bool(new)

    def _are_settled(self, nodes: Iterable[fx.Node]) -> bool:
        return all(node in self._names or _is_settled(node) for node in nodes)

    def _question(
        self, needed: Iterable[fx.Node], written: Set[int], func: Any, args: Any, kwargs: Any
    ) -> fx.GraphModule:
        """A function of the weights that are among the nodes; it writes to copies of them."""
        found, made = fx.Graph(), dict[fx.Node, fx.Node]()
        given = {node: found.placeholder(node.name) for node in needed if node in self._names}
        for node in needed:
            if node in given:
                made[node] = given[node]
                if not written.isdisjoint(memories(node)):
                    made[node] = found.call_function(aten.clone.default, (given[node],))
            else:
                made[node] = found.node_copy(node, made.__getitem__)
                made[node].meta.clear()  # which holds on to tensors
        asked = fx.map_arg((args, kwargs), made.__getitem__)
        found.output(found.call_function(func, *asked))
        return fx.GraphModule(nn.Module(), found)


def _writers(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """What has been written to so far: the memory, and by which nodes."""
    found = defaultdict[int, list[fx.Node]](list)
    for node in graph.nodes:
        for memory in written_memories(node):
            found[memory].append(node)
    return found


def _computed_from(nodes: Iterable[fx.Node], writers: Mapping[int, list[fx.Node]]) -> list[fx.Node]:
    """Nodes, all that these are computed from, and all that has written to what these read, in order."""
    todo, found = list(nodes), set[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
            todo += [writer for memory in memories(node) for writer in writers.get(memory, ())]
    return sorted(found)


def _is_settled(node: fx.Node) -> bool:
    """Whether a node makes tensors that only its arguments decide."""
    made = tree_leaves(node.meta.get("val"))
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    plain = node.op == "call_function" and not random
    return plain and all(isinstance(one, torch.Tensor) for one in made)
