"""Branches of the model's code that go by weights alone, or by integers that a call is given.

What a call traces is the way that the values of that moment choose; the question is kept beside the graph,
which serves calls for as long as the answer is the same::

    if not self.initialized:                 ne = aten.ne(initialized, 0)
        ...                                  item = aten.item(ne)                   False
    for height, width in sizes.tolist():     select = aten.select(sizes, 0, 0)
        ...                                  item = aten.item(select)               32

So are sizes that such values decide, as those of ``repeat_interleave``.
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
from graphplan.capture.structure import flatten_with_path, memories, reached, written_memories
from graphplan.errors import InputError

aten = torch.ops.aten

_OF_SIZES = (aten.sym_size.int, aten.sym_numel.default)
_FEW = 16  # numbers that may stay symbols; a trace takes long over more

ValueOf = Callable[[str], torch.Tensor | None]
"""The weight of a name, as it is now; None where it has no values."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What a branch asked, and the answer.

    Attributes:
        question: computes the answer of the weights, or of the inputs.
        weights: their names.
        inputs: indices of their leaves in the call that was traced; of real ones, it asks for sizes alone.
        answer: by which the trace went, as text: a float that is no number does not equal itself.
    """

    question: fx.GraphModule
    weights: tuple[str, ...]
    inputs: tuple[int, ...]
    answer: str

    def renamed(self, name_of: Callable[[str], str]) -> Branch:
        """With other names of the weights."""
        return replace(self, weights=tuple(map(name_of, self.weights)))

    def goes_by(self, values: Iterable[torch.Tensor]) -> bool:
        """Whether the answer is the same of other values.

        Of some there is none: what the code asks where a flag is set may be an error where it is not.
        """
        try:
            return repr(_answer_of(self.question, values)) == self.answer
        except (RuntimeError, IndexError, ValueError, ArithmeticError):  # of operations, kernels among them
            return False


@dataclass(frozen=True, slots=True)
class InputBranches:
    """Whether branches go by the leaves of a call as they went in the trace: the condition of a guard.

    Attributes:
        branches: those that inputs decide.
        traced: these inputs in the trace: of the same ones all answers are the same.
    """

    branches: tuple[Branch, ...]
    traced: Mapping[int, torch.Tensor]

    @property
    def integers(self) -> list[int]:
        """Those of which values decide, and not sizes alone."""
        return [index for index, value in self.traced.items() if not value.is_meta]

    def are_others(self, leaves: Sequence[Any]) -> bool:
        """Whether those that decide are tensors, as in the trace, and have other values."""
        known = all(isinstance(leaves[index], torch.Tensor) for index in self.traced)
        same = (_is_same(_known_of(leaves[index]), self.traced[index]) for index in self.integers)
        return known and not all(same)

    def __call__(self, leaves: Sequence[Any]) -> bool:
        """Whether these are leaves of such a call; those that do not decide may be anything."""
        given = {index: _known_of(leaves[index]) for index in self.traced}
        if all(_is_same(given[index], value) for index, value in self.traced.items()):
            return True
        with _plainly():
            return all(one.goes_by(given[index] for index in one.inputs) for one in self.branches)


def same_answers(branches: Sequence[Branch], value_of: ValueOf) -> bool:
    """Whether all branches go by these weights as they went in the trace."""
    if not branches:
        return True
    with _plainly():
        for branch in branches:
            values = [value for name in branch.weights if (value := value_of(name)) is not None]
            if len(values) < len(branch.weights) or not branch.goes_by(values):
                return False
    return True


def _known_of(leaf: torch.Tensor) -> torch.Tensor:
    """What questions are told of an input: the values of integers; of real numbers the sizes, on meta."""
    return leaf.detach().cpu() if is_of_integers(leaf) else torch.empty_like(leaf, device="meta")


def _is_same(leaf: torch.Tensor, other: torch.Tensor) -> bool:
    if leaf.dtype != other.dtype or leaf.is_meta != other.is_meta:
        return False
    return leaf.shape == other.shape if leaf.is_meta else torch.equal(leaf, other)


@contextmanager
def _plainly() -> Iterator[None]:
    """A block in which questions are asked, whatever modes the code that asks them is in."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@dataclass(frozen=True, slots=True)
class _Form:
    """Of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]


def _answer_of(question: fx.GraphModule, values: Iterable[torch.Tensor]) -> Any:
    """A number; or for each tensor, its sizes and strides."""
    made = question.forward(*(value if value.is_meta else value.detach().cpu() for value in values))
    return tree_map_only(torch.Tensor, lambda tensor: _Form(tuple(tensor.shape), tensor.stride()), made)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Nodes that decide a value that the code asks for; the sources among them, with what these are now."""

    line: str
    needed: Sequence[fx.Node]
    written: Set[int]
    weights: tuple[str, ...]
    inputs: tuple[int, ...]
    values: tuple[torch.Tensor, ...]


class Branches:
    """The branches of the traces of one call: what one trace fails at, the next one answers.

    Args:
        module: what is traced.
        value_of: gives its weights, by their names in it.
        call: its arguments, of which integers and sizes may decide too; None where none are to.
        answered: lines of the code, and paths of arguments, whose questions are answered; traces add to it.

    Attributes:
        found: those of the last trace.
        told: the values in it that the code was told: the line, what decided each, and the answer.
        read_by: for each question that was answered in it, also again, the nodes that it reads.
    """

    def __init__(
        self, module: nn.Module, value_of: ValueOf, call: Any = None, answered: set[Any] | None = None
    ) -> None:
        self._module, self._value_of = module, value_of
        self._answered = set() if answered is None else answered
        leaves = [] if call is None else list(enumerate(flatten_with_path(call)))
        self._leaves = {
            index: _known_of(leaf) for index, (_, leaf) in leaves if isinstance(leaf, torch.Tensor)
        }
        self._paths = {index: path for index, (path, _) in leaves if index in self._leaves}
        self.begin()

    def begin(self) -> None:
        """Know nothing of a trace yet."""
        self._names: dict[fx.Node | None, str] = {}  # of the weights' nodes
        self._inputs: dict[fx.Node | None, int] = {}  # the leaves of the inputs' nodes
        self._asked: dict[Any, _Asked] = {}  # symbol -> what has made it
        self._failed: _Asked | None = None
        self._known: dict[str, Any] = {}  # the answers to questions, by their texts
        self._writers = _Writers()
        self.told: set[tuple[Any, ...]] = set()
        self.read_by: list[Sequence[fx.Node]] = []
        self.found: list[Branch] = []

    def enter(self, tracer: Any, call: Any) -> None:
        """Know the weights and inputs before the first call of the trace, which may write to them."""
        if self._names or self._inputs:
            return
        tables = (self._module.named_parameters, self._module.named_buffers)
        named = (entry for table in tables for entry in table(remove_duplicate=False))
        self._names = {node_of(tensor, tracer): name for name, tensor in named}
        traced = dict(flatten_with_path(call)) if self._paths else {}
        ours = ((index, path) for index, path in self._paths.items() if path in traced)
        self._inputs = {node_of(traced[path], tracer): index for index, path in ours}

    def read(self, tracer: Any, operation: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """What ``operation`` returns, of which the code will know the value; or the value itself."""
        asked = self._what_decides(tracer, args, kwargs)
        if asked is not None and self._is_answered(asked):
            return self._answer(tracer, asked, func, args, kwargs)
        self._failed = asked  # until there is a result
        result = operation()
        self._failed = None
        self._remember(asked, result)
        return result

    def read_all(self, tracer: Any, operation: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """What ``operation``, which is ``tolist``, returns: of many numbers, one question is asked."""
        asked = self._what_decides(tracer, tensor, {})
        if asked is not None and self._is_answered(asked):
            return self._answer(tracer, asked, _numbers_of, (tensor,), {})
        count = tensor.numel()
        if asked is not None and (isinstance(count, torch.SymInt) or count > _FEW):
            self._failed = asked
            raise DataDependentOutputException(aten._local_scalar_dense.default)
        return operation(tensor)

    def make(self, tracer: Any, operation: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """What ``operation`` makes, whose sizes values decide: the sizes themselves, where they are known."""
        asked = self._what_decides(tracer, args, kwargs)
        result = operation()
        made = tree_leaves(result)
        unknown = [size for tensor in made for size in tensor.shape if has_free_unbacked_symbols(size)]
        answered = asked is not None and self._is_answered(asked)
        if asked is not None and answered and unknown and not any(tensor.requires_grad for tensor in made):
            known = self._answer(tracer, asked, func, args, kwargs, told=False)
            return with_sizes(result, [(form.size, form.stride) for form in tree_leaves(known)], tracer)
        for size in unknown:
            self._remember(asked, size)
        return result

    def decide(self, number: Any) -> bool:
        """Whether weights or inputs alone decide a symbolic number of the trace."""
        return bool(self._asked.keys() & number.node.expr.free_symbols)

    def learn(self, error: Exception) -> bool:
        """Whether a trace has failed for want of an answer that the next one has."""
        symbols = error.cond.free_symbols if isinstance(error, GuardOnDataDependentSymNode) else ()
        failed = [self._asked[symbol] for symbol in symbols if symbol in self._asked]
        failed += [self._failed] if self._failed is not None else []
        new = {source for one in failed for source in self._told_by(one)} - self._answered
        self._answered |= new
        return bool(new)

    def _what_decides(self, tracer: Any, args: Any, kwargs: Any) -> _Asked | None:
        """What the values that an operation is given come from; None where that is more than values known."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        nodes = [node for one in given if (node := node_of(one, tracer, constants=True))]
        if len(nodes) < len(given) or not self._are_settled(_computed_from(nodes, {}), tracer):
            return None
        writers = self._writers.of(tracer.graph)
        needed = _computed_from(nodes, writers)
        weights = tuple(self._names[node] for node in needed if node in self._names)
        inputs = tuple(self._inputs[node] for node in needed if node in self._inputs)
        found = (*map(self._value_of, weights), *map(self._leaves.__getitem__, inputs))
        values = tuple(value for value in found if value is not None)
        if (weights and inputs) or len(values) < len(found) or not self._are_settled(needed, tracer):
            return None
        return _Asked(calling_line(), needed, writers.keys(), weights, inputs, values)

    def are_written(self, nodes: Iterable[fx.Node], graph: fx.Graph) -> bool:
        """Whether anything so far in a graph writes to the memory of what nodes make."""
        return not self._writers.of(graph).keys().isdisjoint(memories(*nodes))

    @property
    def by_weights(self) -> bool:
        """Whether a weight may decide: others do in blocks that are alike."""
        return any(isinstance(source, str) for source in self._answered)

    def _told_by(self, asked: _Asked) -> list[Any]:
        """What the next trace has to answer: of constants and sizes alone, nothing."""
        integers = [index for index in asked.inputs if not self._leaves[index].is_meta]
        return [self._paths[index] for index in integers] or [asked.line] * bool(asked.weights)

    def _is_answered(self, asked: _Asked) -> bool:
        return self._answered.issuperset(self._told_by(asked))

    def _answer(
        self, tracer: Any, asked: _Asked, func: Any, args: Any, kwargs: Any, *, told: bool = True
    ) -> Any:
        arguments = tree_map_only(
            torch.Tensor, lambda one: node_of(one, tracer, constants=True), (args, kwargs)
        )
        question = self._question(asked, tracer, func, *arguments)
        self.read_by.append(asked.needed)
        text = _text_of(question)
        if text not in self._known:  # each layer may ask the same
            with untraced(), _plainly():
                self._known[text] = _answer_of(question, asked.values)
            if asked.values:
                answer = repr(self._known[text])
                self.found.append(Branch(question, asked.weights, asked.inputs, answer))
        if told and asked.values:
            self.told.add((asked.line, asked.weights, asked.inputs, repr(self._known[text])))
        return copy.deepcopy(self._known[text])

    def _remember(self, asked: _Asked | None, number: Any) -> None:
        """Know what has made a symbolic number."""
        if asked is not None and isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
            self._asked |= dict.fromkeys(number.node.expr.free_symbols, asked)

    def _are_settled(self, nodes: Collection[fx.Node], tracer: Any) -> bool:
        known = self._names.keys() | self._inputs.keys()
        return not self._reads_real(nodes) and all(
            node in known or _is_settled(node) or _is_number(node, tracer) for node in nodes
        )

    def _reads_real(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether any reads more of a real input than its sizes."""
        real = {node for node, index in self._inputs.items() if self._leaves[index].is_meta}
        return any(
            node.target not in _OF_SIZES and not real.isdisjoint(node.all_input_nodes) for node in nodes
        )

    def _question(self, asked: _Asked, tracer: Any, func: Any, args: Any, kwargs: Any) -> fx.GraphModule:
        """A function of the sources that are among the nodes; it writes to copies of them."""
        found, made = fx.Graph(), dict[fx.Node, fx.Node]()
        sources = self._names.keys() | self._inputs.keys()
        given = {node: found.placeholder(node.name) for node in asked.needed if node in sources}
        for node in asked.needed:
            made[node] = given.get(node) or found.node_copy(node, made.__getitem__)
            made[node].meta.clear()  # which holds on to tensors
            is_kept = node in given or node.op == "get_attr"
            if is_kept and not asked.written.isdisjoint(memories(node)):
                made[node] = found.call_function(aten.clone.default, (made[node],))
        arguments = fx.map_arg((args, kwargs), made.__getitem__)
        found.output(found.call_function(func, *arguments))
        constants = ((str(node.target), constant_of(node, tracer)) for node in asked.needed)
        return fx.GraphModule({name: tensor for name, tensor in constants if tensor is not None}, found)


def _text_of(question: fx.GraphModule) -> str:
    """The same for questions that ask the same of the same sources, whatever the names of their nodes."""
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
    """A guard that such of a trace go as they did for these leaves, of these names; none where none do."""
    ours = tuple(branch for branch in branches if branch.inputs)
    indices = sorted({index for branch in ours for index in branch.inputs})
    if not ours:
        return ()
    found = InputBranches(ours, {index: _known_of(leaves[index]).clone() for index in indices})
    said = (
        f"the code branches by values of {', '.join(names[one] for one in found.integers)}, which are others"
    )
    return (Guard(said, found),)


def goes_by_others(signature: InputSignature, call: BoundCall) -> bool:
    """Whether a trace of the same structure went by other values of inputs than those of a call."""
    branches = _input_branches(signature)
    leaves = signature.traced(call).leaves if branches else ()
    return any(one.are_others(leaves) for one in branches)


def goes_by_same(signature: InputSignature, call: BoundCall) -> bool:
    """Whether the inputs of a call, of which all else is known, decide as those of the trace did."""
    branches = _input_branches(signature)
    leaves = signature.traced(call).leaves if branches else ()
    return all(one(leaves) for one in branches)


def require_same_way(signature: InputSignature, parts: Iterable[BoundCall]) -> None:
    """Raise InputError where the inputs of a microbatch do not decide as those of the trace did."""
    if not all(goes_by_same(signature, part) for part in parts):
        names = (signature if signature.prepared is None else signature.prepared.signature).names
        deciding = sorted({index for one in _input_branches(signature) for index in one.integers})
        said = ", ".join(names[index] for index in deciding)
        raise InputError(
            f"the code branches by values of {said}, which are others in one microbatch than in another: pad "
            "them alike, or use microbatches=1"
        )


def _input_branches(signature: InputSignature) -> list[InputBranches]:
    inner = signature if signature.prepared is None else signature.prepared.signature
    return [guard.holds for guard in inner.guards if isinstance(guard.holds, InputBranches)]


def _numbers_of(tensor: torch.Tensor) -> Any:
    return tensor.tolist()


def is_of_integers(leaf: Any) -> bool:
    """Whether a leaf is a tensor by whose values code may branch: real numbers are others in each call."""
    return isinstance(leaf, torch.Tensor) and not (leaf.is_floating_point() or leaf.is_complex())


class _Writers:
    """What has been written to so far in a graph that grows."""

    def __init__(self) -> None:
        self._graph: fx.Graph | None = None
        self._found: dict[int, list[fx.Node]] = {}
        self._last: fx.Node | None = None

    def of(self, graph: fx.Graph) -> Mapping[int, list[fx.Node]]:
        """The memory, and by which nodes."""
        if graph is not self._graph:
            self._graph, self._found, self._last = graph, defaultdict(list), None
        new = list(takewhile(lambda node: node is not self._last, reversed(graph.nodes)))
        for node in new:
            for memory in written_memories(node):
                self._found[memory].append(node)
        self._last = new[0] if new else self._last
        return self._found


def _computed_from(nodes: Iterable[fx.Node], writers: Mapping[int, list[fx.Node]]) -> list[fx.Node]:
    """Nodes, all that these are computed from, and all that has written to what these read, in order."""

    def sources(node: fx.Node) -> list[fx.Node]:
        written = (writer for memory in memories(node) for writer in writers.get(memory, ()))
        return [*node.all_input_nodes, *written]

    return sorted(reached(nodes, sources))


def _is_number(node: fx.Node, tracer: Any) -> bool:
    """Whether a node is a constant of the code: tensors in attributes may be others in each call."""
    return constant_of(node, tracer) is not None and is_made_in_code(node)


def _is_settled(node: fx.Node) -> bool:
    """Whether a node makes tensors, or sizes, that only its arguments decide."""
    made = tree_leaves(node.meta.get("val"))
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    plain = node.op == "call_function" and not random
    return plain and all(isinstance(one, torch.Tensor | torch.SymInt | torch.SymBool) for one in made)
