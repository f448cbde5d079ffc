"""Branches of the model's code on values of weights, or of integer inputs.

A trace follows the branch that the current values choose. The *question*, a small graph that computes the
branch's condition, is stored with the trace, which serves calls while the answer stays the same::

    if not self.initialized:                 ne = aten.ne(initialized, 0)
        ...                                  item = aten.item(ne)                   False
    for height, width in sizes.tolist():     select = aten.select(sizes, 0, 0)
        ...                                  item = aten.item(select)               32

Sizes that depend on such values, as in ``repeat_interleave``, are answers, too.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, has_free_unbacked_symbols
from torch.utils._pytree import tree_leaves, tree_map_only

from graphplan._compat.traced_tensors import constant_of, is_made_in_code, node_of, untraced, with_sizes
from graphplan.capture.signature import BoundCall, Guard, InputSignature
from graphplan.capture.source_lines import calling_line
from graphplan.capture.structure import flatten_with_path, reachable
from graphplan.capture.written_memory import memories, written_memories
from graphplan.errors import InputError

aten = torch.ops.aten

_SIZE_READERS = (aten.sym_size.int, aten.sym_numel.default)
_MAX_SYMBOLS = 16  # of one tensor: more make a trace slow

ValueOf = Callable[[str], torch.Tensor | None]
"""Function from the name of a weight to its current tensor; None if it has no values."""


@dataclass(frozen=True, slots=True)
class Branch:
    """The question of a branch, and its answer in the trace.

    Attributes:
        question: computes the answer from the weights, or from the inputs.
        weights: names of the weights that it reads.
        inputs: indices of the input leaves that it reads; of floating-point ones, only their sizes.
        answer: the answer as text, since NaN does not equal itself.
    """

    question: fx.GraphModule
    weights: tuple[str, ...]
    inputs: tuple[int, ...]
    answer: str

    def renamed(self, name_of: Callable[[str], str]) -> Branch:
        """Return the branch with renamed weights."""
        return replace(self, weights=tuple(map(name_of, self.weights)))

    def holds_for(self, values: Iterable[torch.Tensor]) -> bool:
        """Whether the answer for ``values`` is that of the trace; False if computing it fails.

        A question that the code evaluates only if a flag is set may fail without the flag.
        """
        try:
            return repr(_answer_of(self.question, values)) == self.answer
        except (RuntimeError, IndexError, ValueError, ArithmeticError):  # errors of operations and kernels
            return False


@dataclass(frozen=True, slots=True)
class InputBranches:
    """The condition of a guard: a call takes the traced path at branches on inputs.

    Attributes:
        branches: the branches on inputs.
        traced: leaf index -> the input in the trace: equal inputs give equal answers.
    """

    branches: tuple[Branch, ...]
    traced: Mapping[int, torch.Tensor]

    @property
    def integers(self) -> list[int]:
        """Indices of the leaves whose values matter, not only their sizes."""
        return [index for index, value in self.traced.items() if not value.is_meta]

    def have_other_values(self, leaves: Sequence[Any]) -> bool:
        """Whether the leaves that the branches read are tensors, as in the trace, but have other values."""
        are_tensors = all(isinstance(leaves[index], torch.Tensor) for index in self.traced)
        same = (_is_same(_readable_part(leaves[index]), self.traced[index]) for index in self.integers)
        return are_tensors and not all(same)

    def __call__(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these leaves takes the traced path at all branches."""
        values = {index: _readable_part(leaves[index]) for index in self.traced}
        if all(_is_same(values[index], traced) for index, traced in self.traced.items()):
            return True
        with _without_modes():
            return all(branch.holds_for(values[index] for index in branch.inputs) for branch in self.branches)


def same_answers(branches: Sequence[Branch], value_of: ValueOf) -> bool:
    """Whether all branches take the traced path for these weights."""
    if not branches:
        return True
    with _without_modes():
        for branch in branches:
            values = [value for name in branch.weights if (value := value_of(name)) is not None]
            if len(values) < len(branch.weights) or not branch.holds_for(values):
                return False
    return True


def _readable_part(leaf: torch.Tensor) -> torch.Tensor:
    """Return the part of an input that questions may read: integer values, or a meta tensor for its sizes."""
    return leaf.detach().cpu() if is_integer_tensor(leaf) else torch.empty_like(leaf, device="meta")


def _is_same(leaf: torch.Tensor, other: torch.Tensor) -> bool:
    if leaf.dtype != other.dtype or leaf.is_meta != other.is_meta:
        return False
    return leaf.shape == other.shape if leaf.is_meta else torch.equal(leaf, other)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Context manager without gradients and autocast, in which questions are computed."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@dataclass(frozen=True, slots=True)
class _Layout:
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _answer_of(question: fx.GraphModule, values: Iterable[torch.Tensor]) -> Any:
    """Return the answer: a number, or a :class:`_Layout` for each tensor."""
    answer = question.forward(*(value if value.is_meta else value.detach().cpu() for value in values))
    return tree_map_only(torch.Tensor, lambda tensor: _Layout(tuple(tensor.shape), tensor.stride()), answer)


@dataclass(frozen=True, slots=True)
class _ValueRead:
    """A read of a value by the code: the nodes that compute the value, and the weights and inputs among them.

    Attributes:
        line: the line of the model's code.
        nodes: the nodes that compute the value.
        written: memory that the graph has written to.
        weights: names of the weights that determine the value.
        inputs: indices of the input leaves that determine the value.
        values: the current tensors of these weights, or inputs.
    """

    line: str
    nodes: Sequence[fx.Node]
    written: Set[int]
    weights: tuple[str, ...]
    inputs: tuple[int, ...]
    values: tuple[torch.Tensor, ...]


class Branches:
    """The branches in one trace: if it fails at one, the next trace, with the same ``sources``, answers it.

    Args:
        module: the module that is traced.
        value_of: function from a name in the module to the weight's current tensor.
        call: the arguments, on whose integers and sizes branches may depend; None if they must not.
        sources: lines of the code, and paths of arguments, whose questions are answered; traces add to it.

    Attributes:
        taken: the branches that the code has taken.
        answers_given: each answer: the line, the weights and inputs that determine it, and its text.
        nodes_read: the nodes of each answered question, repeated ones included.
    """

    def __init__(
        self, module: nn.Module, value_of: ValueOf, call: Any = None, sources: set[Any] | None = None
    ) -> None:
        self._module, self._value_of = module, value_of
        self._sources = set() if sources is None else sources
        leaves = [] if call is None else list(enumerate(flatten_with_path(call)))
        self._leaves = {
            index: _readable_part(leaf) for index, (_, leaf) in leaves if isinstance(leaf, torch.Tensor)
        }
        self._paths = {index: path for index, (path, _) in leaves if index in self._leaves}
        self._names: dict[fx.Node | None, str] = {}  # node -> name of the weight
        self._inputs: dict[fx.Node | None, int] = {}  # node -> index of the input leaf
        self._reads: dict[Any, _ValueRead] = {}  # symbol -> the read that made it
        self._failed: _ValueRead | None = None
        self._answers: dict[str, Any] = {}  # text of a question -> answer
        self._writers = _Writers()
        self.answers_given: set[tuple[Any, ...]] = set()
        self.nodes_read: list[Sequence[fx.Node]] = []
        self.taken: list[Branch] = []

    def record_sources(self, tracer: Any, call: Any) -> None:
        """Record the nodes of weights and inputs before the first call of the trace, which may write them."""
        if self._names or self._inputs:
            return
        tables = (self._module.named_parameters, self._module.named_buffers)
        named = (entry for table in tables for entry in table(remove_duplicate=False))
        self._names = {node_of(tensor, tracer): name for name, tensor in named}
        traced = dict(flatten_with_path(call)) if self._paths else {}
        paths = ((index, path) for index, path in self._paths.items() if path in traced)
        self._inputs = {node_of(traced[path], tracer): index for index, path in paths}

    def read_value(self, tracer: Any, operation: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Return the answer if the trace may depend on it; else the result of ``operation``."""
        read = self._find_read(tracer, args, kwargs)
        if read is not None and self._is_answered(read):
            return self._answer(tracer, read, func, args, kwargs)
        self._failed = read  # until there is a result
        result = operation()
        self._failed = None
        self._record_symbols(read, result)
        return result

    def read_list(self, tracer: Any, operation: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Likewise for ``operation`` = ``tolist``: one question answers for all numbers."""
        read = self._find_read(tracer, tensor, {})
        if read is not None and self._is_answered(read):
            return self._answer(tracer, read, _numbers_of, (tensor,), {})
        count = tensor.numel()
        if read is not None and (isinstance(count, torch.SymInt) or count > _MAX_SYMBOLS):
            self._failed = read
            raise DataDependentOutputException(aten._local_scalar_dense.default)
        return operation(tensor)

    def run_dynamic(
        self, tracer: Any, operation: Callable[[], Any], func: Any, args: Any, kwargs: Any
    ) -> Any:
        """Return the result of ``operation``, whose sizes depend on values; an answer makes them known."""
        read = self._find_read(tracer, args, kwargs)
        result = operation()
        tensors = tree_leaves(result)
        unknown = [size for tensor in tensors for size in tensor.shape if has_free_unbacked_symbols(size)]
        answered = read is not None and self._is_answered(read)
        if read is not None and answered and unknown and not any(one.requires_grad for one in tensors):
            layouts = self._answer(tracer, read, func, args, kwargs, is_listed=False)
            return with_sizes(result, [(one.size, one.stride) for one in tree_leaves(layouts)], tracer)
        for size in unknown:
            self._record_symbols(read, size)
        return result

    def determine(self, number: Any) -> bool:
        """Whether weights, or inputs, alone determine a symbolic number of the trace."""
        return bool(self._reads.keys() & number.node.expr.free_symbols)

    def learn(self, error: Exception) -> bool:
        """Add the sources whose answers a failed trace lacked; return whether any of them is new."""
        symbols = error.cond.free_symbols if isinstance(error, GuardOnDataDependentSymNode) else ()
        failed = [self._reads[symbol] for symbol in symbols if symbol in self._reads]
        if self._failed is not None:
            failed.append(self._failed)
        new = {source for read in failed for source in self._sources_of(read)} - self._sources
        self._sources |= new
        return bool(new)

    def _find_read(self, tracer: Any, args: Any, kwargs: Any) -> _ValueRead | None:
        """Return an operation's read; None unless weights alone, or inputs alone, determine its value."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        arguments = [node for one in tensors if (node := node_of(one, tracer, constants=True))]
        if len(arguments) < len(tensors) or not self._are_determined(_computed_from(arguments, {}), tracer):
            return None
        writers = self._writers.of(tracer.graph)
        nodes = _computed_from(arguments, writers)
        weights = tuple(self._names[node] for node in nodes if node in self._names)
        inputs = tuple(self._inputs[node] for node in nodes if node in self._inputs)
        sources = (*map(self._value_of, weights), *map(self._leaves.__getitem__, inputs))
        values = tuple(value for value in sources if value is not None)
        if (weights and inputs) or len(values) < len(sources) or not self._are_determined(nodes, tracer):
            return None
        return _ValueRead(calling_line(), nodes, writers.keys(), weights, inputs, values)

    def are_written(self, nodes: Iterable[fx.Node], graph: fx.Graph) -> bool:
        """Whether a node of the graph so far writes to the memory of the results of ``nodes``."""
        return not self._writers.of(graph).keys().isdisjoint(memories(*nodes))

    @property
    def depend_on_weights(self) -> bool:
        """Whether a branch may depend on a weight: blocks with other weights may take other paths."""
        return any(isinstance(source, str) for source in self._sources)

    def _sources_of(self, read: _ValueRead) -> list[Any]:
        """Return the inputs, or the line, whose questions a trace answers; none if it reads only sizes."""
        integers = [index for index in read.inputs if not self._leaves[index].is_meta]
        return [self._paths[index] for index in integers] or [read.line] * bool(read.weights)

    def _is_answered(self, read: _ValueRead) -> bool:
        return self._sources.issuperset(self._sources_of(read))

    def _answer(
        self,
        tracer: Any,
        read: _ValueRead,
        func: Any,
        args: Any,
        kwargs: Any,
        *,
        is_listed: bool = True,
    ) -> Any:
        arguments = tree_map_only(
            torch.Tensor, lambda one: node_of(one, tracer, constants=True), (args, kwargs)
        )
        question = self._build_question(read, tracer, func, *arguments)
        self.nodes_read.append(read.nodes)
        text = _text_of(question)
        if text not in self._answers:  # each layer may have the same question
            with untraced(), _without_modes():
                self._answers[text] = _answer_of(question, read.values)
            if read.values:
                answer = repr(self._answers[text])
                self.taken.append(Branch(question, read.weights, read.inputs, answer))
        if is_listed and read.values:
            self.answers_given.add((read.line, read.weights, read.inputs, repr(self._answers[text])))
        return copy.deepcopy(self._answers[text])

    def _record_symbols(self, read: _ValueRead | None, number: Any) -> None:
        """Record the read that a symbolic number comes from."""
        if read is not None and isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
            self._reads |= dict.fromkeys(number.node.expr.free_symbols, read)

    def _are_determined(self, nodes: Collection[fx.Node], tracer: Any) -> bool:
        known = self._names.keys() | self._inputs.keys()
        return not self._reads_float_values(nodes) and all(
            node in known or _is_deterministic(node) or _is_literal(node, tracer) for node in nodes
        )

    def _reads_float_values(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether any node reads more of a floating-point input than its sizes."""
        real = {node for node, index in self._inputs.items() if self._leaves[index].is_meta}
        return any(
            node.target not in _SIZE_READERS and not real.isdisjoint(node.all_input_nodes) for node in nodes
        )

    def _build_question(
        self, read: _ValueRead, tracer: Any, func: Any, args: Any, kwargs: Any
    ) -> fx.GraphModule:
        """Return a graph module that computes the value from weights or inputs; it writes only to copies."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        sources = self._names.keys() | self._inputs.keys()
        placeholders = {node: graph.placeholder(node.name) for node in read.nodes if node in sources}
        for node in read.nodes:
            copies[node] = placeholders.get(node) or graph.node_copy(node, copies.__getitem__)
            copies[node].meta.clear()  # it would keep tensors alive
            is_source = node in placeholders or node.op == "get_attr"
            if is_source and not read.written.isdisjoint(memories(node)):
                copies[node] = graph.call_function(aten.clone.default, (copies[node],))
        arguments = fx.map_arg((args, kwargs), copies.__getitem__)
        graph.output(graph.call_function(func, *arguments))
        constants = ((str(node.target), constant_of(node, tracer)) for node in read.nodes)
        return fx.GraphModule({name: tensor for name, tensor in constants if tensor is not None}, graph)


def _text_of(question: fx.GraphModule) -> str:
    """Return a text that is equal for equal questions, whatever the names of their nodes."""
    with untraced():
        constants = {name: (tensor.dtype, tensor.tolist()) for name, tensor in question.named_buffers()}
    names = {node: f"%{number}" for number, node in enumerate(question.graph.nodes)}
    return repr(
        [
            (constants.get(str(node.target), node.target), *fx.map_arg((node.args, node.kwargs), names.get))
            for node in question.graph.nodes
        ]
    )


def input_guard(branches: Iterable[Branch], leaves: Sequence[Any], names: Sequence[str]) -> tuple[Guard, ...]:
    """Return a guard that branches on inputs take the same path as for ``leaves``, if there are any."""
    on_inputs = tuple(branch for branch in branches if branch.inputs)
    indices = sorted({index for branch in on_inputs for index in branch.inputs})
    if not on_inputs:
        return ()
    condition = InputBranches(on_inputs, {index: _readable_part(leaves[index]).clone() for index in indices})
    text = (
        f"the code branches on values of {', '.join(names[index] for index in condition.integers)}, "
        "which differ from those of the trace"
    )
    return (Guard(text, condition),)


def branched_on_other_values(signature: InputSignature, call: BoundCall) -> bool:
    """Whether a trace of the same structure branched on other input values than those of the call."""
    branches = _input_branches(signature)
    return branches is not None and branches.have_other_values(signature.traced(call).leaves)


def takes_same_path(signature: InputSignature, call: BoundCall) -> bool:
    """Whether the branches on inputs take the traced path for a call that matches in all else."""
    branches = _input_branches(signature)
    return branches is None or branches(signature.traced(call).leaves)


def require_same_branches(signature: InputSignature, parts: Iterable[BoundCall]) -> None:
    """Raise InputError if a microbatch does not take the traced path at branches on inputs."""
    branches = _input_branches(signature)
    if branches is not None and not all(branches(signature.traced(part).leaves) for part in parts):
        names = ", ".join(signature.of_graph.names[index] for index in branches.integers)
        raise InputError(
            f"the code branches on values of {names}, which differ between microbatches: pad them alike, or "
            "use microbatches=1"
        )


def _input_branches(signature: InputSignature) -> InputBranches | None:
    conditions = (guard.holds for guard in signature.of_graph.guards)
    return next((one for one in conditions if isinstance(one, InputBranches)), None)


def _numbers_of(tensor: torch.Tensor) -> Any:
    return tensor.tolist()


def is_integer_tensor(leaf: Any) -> bool:
    """Whether a leaf is a tensor on whose values a graph may depend: not floating point, as masks and ids."""
    return isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex())


class _Writers:
    """The nodes that write to memory in a growing graph."""

    def __init__(self) -> None:
        self._graph: fx.Graph | None = None
        self._writers: dict[int, list[fx.Node]] = {}
        self._last: fx.Node | None = None

    def of(self, graph: fx.Graph) -> Mapping[int, list[fx.Node]]:
        """Return memory -> the nodes that write to it so far."""
        if graph is not self._graph:
            self._graph, self._writers, self._last = graph, defaultdict(list), None
        new = list(takewhile(lambda node: node is not self._last, reversed(graph.nodes)))
        for node in new:
            for memory in written_memories(node):
                self._writers[memory].append(node)
        self._last = new[0] if new else self._last
        return self._writers


def _computed_from(nodes: Iterable[fx.Node], writers: Mapping[int, list[fx.Node]]) -> list[fx.Node]:
    """Return the nodes, those they are computed from, and those that wrote to memory they read, in order."""

    def sources(node: fx.Node) -> list[fx.Node]:
        written = (writer for memory in memories(node) for writer in writers.get(memory, ()))
        return [*node.all_input_nodes, *written]

    return sorted(reachable(nodes, sources))


def _is_literal(node: fx.Node, tracer: Any) -> bool:
    """Whether a node is a constant in the code; a tensor in an attribute is not one, since it may change."""
    return constant_of(node, tracer) is not None and is_made_in_code(node)


def _is_deterministic(node: fx.Node) -> bool:
    """Whether the results of a node are tensors, sizes or flags that depend only on its arguments."""
    results = tree_leaves(node.meta.get("val"))
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    is_plain = node.op == "call_function" and not is_random
    return is_plain and all(isinstance(one, torch.Tensor | torch.SymInt | torch.SymBool) for one in results)
