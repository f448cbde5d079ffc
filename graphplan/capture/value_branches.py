"""Branches of the model's code on values of weights, or of integer inputs.

A trace follows the branch that the current values choose. The *question*, a small graph that computes the
branch's condition, is stored with the trace, which serves calls while the answer stays the same::

    if not self.initialized:                 ne = aten.ne(initialized, 0)
        ...                                  item = aten.item(ne)                   False
    for height, width in sizes.tolist():     select = aten.select(sizes, 0, 0)
        ...                                  item = aten.item(select)               32

Sizes that such values decide, as in ``repeat_interleave``, are answers, too.
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
from graphplan.capture.structure import flatten_with_path, reached
from graphplan.capture.written_memory import memories, written_memories
from graphplan.errors import InputError

aten = torch.ops.aten

_SIZE_READERS = (aten.sym_size.int, aten.sym_numel.default)
_FEW = 16  # most numbers of a tensor that may become symbols: more make a trace slow

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

    def is_same_for(self, values: Iterable[torch.Tensor]) -> bool:
        """Whether the answer for ``values`` is that of the trace; False if computing it fails.

        A question that the code asks only if a flag is set may fail without it.
        """
        try:
            return repr(_answer_of(self.question, values)) == self.answer
        except (RuntimeError, IndexError, ValueError, ArithmeticError):  # errors of operations and kernels
            return False


@dataclass(frozen=True, slots=True)
class InputBranches:
    """The condition of a guard: branches take the same way for a call as in the trace.

    Attributes:
        branches: the branches on inputs.
        traced: leaf index -> the input in the trace: equal inputs give equal answers.
    """

    branches: tuple[Branch, ...]
    traced: Mapping[int, torch.Tensor]

    @property
    def integers(self) -> list[int]:
        """Indices of the leaves whose values decide, not only their sizes."""
        return [index for index, value in self.traced.items() if not value.is_meta]

    def are_others(self, leaves: Sequence[Any]) -> bool:
        """Whether the deciding leaves are tensors, as in the trace, but have other values."""
        are_tensors = all(isinstance(leaves[index], torch.Tensor) for index in self.traced)
        same = (_is_same(_readable_part(leaves[index]), self.traced[index]) for index in self.integers)
        return are_tensors and not all(same)

    def __call__(self, leaves: Sequence[Any]) -> bool:
        """Whether the branches take the same way for these leaves of a call."""
        given = {index: _readable_part(leaves[index]) for index in self.traced}
        if all(_is_same(given[index], value) for index, value in self.traced.items()):
            return True
        with _without_modes():
            return all(one.is_same_for(given[index] for index in one.inputs) for one in self.branches)


def same_answers(branches: Sequence[Branch], value_of: ValueOf) -> bool:
    """Whether all branches take the same way for these weights as in the trace."""
    if not branches:
        return True
    with _without_modes():
        for branch in branches:
            values = [value for name in branch.weights if (value := value_of(name)) is not None]
            if len(values) < len(branch.weights) or not branch.is_same_for(values):
                return False
    return True


def _readable_part(leaf: torch.Tensor) -> torch.Tensor:
    """Return the part of an input that questions may read: integer values, or a meta tensor for its sizes."""
    return leaf.detach().cpu() if is_of_integers(leaf) else torch.empty_like(leaf, device="meta")


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
class _Form:
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _answer_of(question: fx.GraphModule, values: Iterable[torch.Tensor]) -> Any:
    """Return the answer: a number, or a :class:`_Form` for each tensor."""
    answer = question.forward(*(value if value.is_meta else value.detach().cpu() for value in values))
    return tree_map_only(torch.Tensor, lambda tensor: _Form(tuple(tensor.shape), tensor.stride()), answer)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A value that the code asks for: the nodes that decide it, and the weights and inputs among these.

    Attributes:
        line: the line of the model's code.
        needed: the nodes that decide the value.
        written: memory that the graph has written to.
        weights: names of the weights that decide.
        inputs: indices of the input leaves that decide.
        values: the current tensors of weights, or inputs.
    """

    line: str
    needed: Sequence[fx.Node]
    written: Set[int]
    weights: tuple[str, ...]
    inputs: tuple[int, ...]
    values: tuple[torch.Tensor, ...]


class Branches:
    """The branches in one trace: if it fails at one, the next trace, of the same ``answered``, answers it.

    Args:
        module: the module that is traced.
        value_of: function from a name in the module to the weight's current tensor.
        call: the arguments, whose integers and sizes may decide branches; None if they must not.
        answered: lines of the code, and paths of arguments, whose questions are answered; traces add to it.

    Attributes:
        taken: the branches that the code has taken.
        answers_given: those that it was given: the line, the weights and inputs that decide, and the answer.
        read_by: for each question that it answered, repeated ones included, the nodes that it reads.
    """

    def __init__(
        self, module: nn.Module, value_of: ValueOf, call: Any = None, answered: set[Any] | None = None
    ) -> None:
        self._module, self._value_of = module, value_of
        self._answered = set() if answered is None else answered
        leaves = [] if call is None else list(enumerate(flatten_with_path(call)))
        self._leaves = {
            index: _readable_part(leaf) for index, (_, leaf) in leaves if isinstance(leaf, torch.Tensor)
        }
        self._paths = {index: path for index, (path, _) in leaves if index in self._leaves}
        self._names: dict[fx.Node | None, str] = {}  # node -> name of the weight
        self._inputs: dict[fx.Node | None, int] = {}  # node -> index of the input leaf
        self._asked: dict[Any, _Asked] = {}  # symbol -> the value that it stands for
        self._failed: _Asked | None = None
        self._answers: dict[str, Any] = {}  # text of a question -> answer
        self._writers = _Writers()
        self.answers_given: set[tuple[Any, ...]] = set()
        self.read_by: list[Sequence[fx.Node]] = []
        self.taken: list[Branch] = []

    def enter(self, tracer: Any, call: Any) -> None:
        """Note the nodes of weights and inputs before the first call of the trace, which may write them."""
        if self._names or self._inputs:
            return
        tables = (self._module.named_parameters, self._module.named_buffers)
        named = (entry for table in tables for entry in table(remove_duplicate=False))
        self._names = {node_of(tensor, tracer): name for name, tensor in named}
        traced = dict(flatten_with_path(call)) if self._paths else {}
        deciding = ((index, path) for index, path in self._paths.items() if path in traced)
        self._inputs = {node_of(traced[path], tracer): index for index, path in deciding}

    def read(self, tracer: Any, operation: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Return the answer if the trace may depend on it; else the result of ``operation``."""
        asked = self._what_decides(tracer, args, kwargs)
        if asked is not None and self._is_answered(asked):
            return self._answer(tracer, asked, func, args, kwargs)
        self._failed = asked  # until there is a result
        result = operation()
        self._failed = None
        self._remember(asked, result)
        return result

    def read_all(self, tracer: Any, operation: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Do the same where ``operation`` is ``tolist``: a single question asks for all numbers."""
        asked = self._what_decides(tracer, tensor, {})
        if asked is not None and self._is_answered(asked):
            return self._answer(tracer, asked, _numbers_of, (tensor,), {})
        count = tensor.numel()
        if asked is not None and (isinstance(count, torch.SymInt) or count > _FEW):
            self._failed = asked
            raise DataDependentOutputException(aten._local_scalar_dense.default)
        return operation(tensor)

    def make(self, tracer: Any, operation: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of ``operation``, whose sizes values decide; with an answer, of known sizes."""
        asked = self._what_decides(tracer, args, kwargs)
        result = operation()
        tensors = tree_leaves(result)
        unknown = [size for tensor in tensors for size in tensor.shape if has_free_unbacked_symbols(size)]
        answered = asked is not None and self._is_answered(asked)
        if asked is not None and answered and unknown and not any(one.requires_grad for one in tensors):
            forms = self._answer(tracer, asked, func, args, kwargs, is_noted=False)
            return with_sizes(result, [(form.size, form.stride) for form in tree_leaves(forms)], tracer)
        for size in unknown:
            self._remember(asked, size)
        return result

    def decide(self, number: Any) -> bool:
        """Whether weights, or inputs, alone decide a symbolic number of the trace."""
        return bool(self._asked.keys() & number.node.expr.free_symbols)

    def learn(self, error: Exception) -> bool:
        """Note the answers that a failed trace lacked; return whether any of them is new."""
        symbols = error.cond.free_symbols if isinstance(error, GuardOnDataDependentSymNode) else ()
        failed = [self._asked[symbol] for symbol in symbols if symbol in self._asked]
        failed += [self._failed] if self._failed is not None else []
        new = {source for one in failed for source in self._sources_of(one)} - self._answered
        self._answered |= new
        return bool(new)

    def _what_decides(self, tracer: Any, args: Any, kwargs: Any) -> _Asked | None:
        """Return what decides an operation's arguments; None if not weights alone, or inputs alone, do."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        nodes = [node for one in tensors if (node := node_of(one, tracer, constants=True))]
        if len(nodes) < len(tensors) or not self._are_settled(_computed_from(nodes, {}), tracer):
            return None
        writers = self._writers.of(tracer.graph)
        needed = _computed_from(nodes, writers)
        weights = tuple(self._names[node] for node in needed if node in self._names)
        inputs = tuple(self._inputs[node] for node in needed if node in self._inputs)
        sources = (*map(self._value_of, weights), *map(self._leaves.__getitem__, inputs))
        values = tuple(value for value in sources if value is not None)
        if (weights and inputs) or len(values) < len(sources) or not self._are_settled(needed, tracer):
            return None
        return _Asked(calling_line(), needed, writers.keys(), weights, inputs, values)

    def are_written(self, nodes: Iterable[fx.Node], graph: fx.Graph) -> bool:
        """Whether a node of the graph so far writes to the memory of the results of ``nodes``."""
        return not self._writers.of(graph).keys().isdisjoint(memories(*nodes))

    @property
    def by_weights(self) -> bool:
        """Whether a weight may decide a branch: repeated blocks, with other weights, may take other ways."""
        return any(isinstance(source, str) for source in self._answered)

    def _sources_of(self, asked: _Asked) -> list[Any]:
        """Return the inputs, or the line, whose questions a trace answers; none if sizes alone decide."""
        integers = [index for index in asked.inputs if not self._leaves[index].is_meta]
        return [self._paths[index] for index in integers] or [asked.line] * bool(asked.weights)

    def _is_answered(self, asked: _Asked) -> bool:
        return self._answered.issuperset(self._sources_of(asked))

    def _answer(
        self, tracer: Any, asked: _Asked, func: Any, args: Any, kwargs: Any, *, is_noted: bool = True
    ) -> Any:
        arguments = tree_map_only(
            torch.Tensor, lambda one: node_of(one, tracer, constants=True), (args, kwargs)
        )
        question = self._question(asked, tracer, func, *arguments)
        self.read_by.append(asked.needed)
        text = _text_of(question)
        if text not in self._answers:  # each layer may ask the same
            with untraced(), _without_modes():
                self._answers[text] = _answer_of(question, asked.values)
            if asked.values:
                answer = repr(self._answers[text])
                self.taken.append(Branch(question, asked.weights, asked.inputs, answer))
        if is_noted and asked.values:
            self.answers_given.add((asked.line, asked.weights, asked.inputs, repr(self._answers[text])))
        return copy.deepcopy(self._answers[text])

    def _remember(self, asked: _Asked | None, number: Any) -> None:
        """Note what decides a symbolic number."""
        if asked is not None and isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
            self._asked |= dict.fromkeys(number.node.expr.free_symbols, asked)

    def _are_settled(self, nodes: Collection[fx.Node], tracer: Any) -> bool:
        known = self._names.keys() | self._inputs.keys()
        return not self._reads_real(nodes) and all(
            node in known or _is_settled(node) or _is_number(node, tracer) for node in nodes
        )

    def _reads_real(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether any node reads more of a floating-point input than its sizes."""
        real = {node for node, index in self._inputs.items() if self._leaves[index].is_meta}
        return any(
            node.target not in _SIZE_READERS and not real.isdisjoint(node.all_input_nodes) for node in nodes
        )

    def _question(self, asked: _Asked, tracer: Any, func: Any, args: Any, kwargs: Any) -> fx.GraphModule:
        """Return a graph module that computes the value from weights or inputs; it writes only to copies."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        sources = self._names.keys() | self._inputs.keys()
        placeholders = {node: graph.placeholder(node.name) for node in asked.needed if node in sources}
        for node in asked.needed:
            copies[node] = placeholders.get(node) or graph.node_copy(node, copies.__getitem__)
            copies[node].meta.clear()  # it would keep tensors alive
            is_source = node in placeholders or node.op == "get_attr"
            if is_source and not asked.written.isdisjoint(memories(node)):
                copies[node] = graph.call_function(aten.clone.default, (copies[node],))
        arguments = fx.map_arg((args, kwargs), copies.__getitem__)
        graph.output(graph.call_function(func, *arguments))
        constants = ((str(node.target), constant_of(node, tracer)) for node in asked.needed)
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
    """Return a guard that branches on inputs take the same way as for ``leaves``, if there are any."""
    on_inputs = tuple(branch for branch in branches if branch.inputs)
    indices = sorted({index for branch in on_inputs for index in branch.inputs})
    if not on_inputs:
        return ()
    holds = InputBranches(on_inputs, {index: _readable_part(leaves[index]).clone() for index in indices})
    text = (
        f"the code branches on values of {', '.join(names[one] for one in holds.integers)}, which differ "
        "from those of the trace"
    )
    return (Guard(text, holds),)


def took_other_inputs(signature: InputSignature, call: BoundCall) -> bool:
    """Whether a trace of the same structure branched on other input values than those of the call."""
    branches = _input_branches(signature)
    return branches is not None and branches.are_others(signature.traced(call).leaves)


def takes_same_way(signature: InputSignature, call: BoundCall) -> bool:
    """Whether branches on inputs take the same way for a call, which fits otherwise, as in the trace."""
    branches = _input_branches(signature)
    return branches is None or branches(signature.traced(call).leaves)


def require_same_branches(signature: InputSignature, parts: Iterable[BoundCall]) -> None:
    """Raise InputError if branches on inputs take another way for a microbatch than in the trace."""
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


def is_of_integers(leaf: Any) -> bool:
    """Whether a leaf is a tensor on whose values code may branch: floating-point ones differ in each call."""
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

    return sorted(reached(nodes, sources))


def _is_number(node: fx.Node, tracer: Any) -> bool:
    """Whether a node is a constant of the code; a tensor in an attribute is none, since it may change."""
    return constant_of(node, tracer) is not None and is_made_in_code(node)


def _is_settled(node: fx.Node) -> bool:
    """Whether the arguments of a node alone decide its results, which are tensors, sizes or flags."""
    results = tree_leaves(node.meta.get("val"))
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    is_plain = node.op == "call_function" and not is_random
    return is_plain and all(isinstance(one, torch.Tensor | torch.SymInt | torch.SymBool) for one in results)
