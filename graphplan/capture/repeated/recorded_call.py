"""A recorded module call, and its recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from graphplan._compat.traced_tensors import constant_of, is_made_in_code, node_of, untraced
from graphplan.capture.repeated.guarded_integer import GuardedInteger, plain
from graphplan.capture.repeated.module_traits import (
    AttributeRef,
    Identities,
    ModuleTraits,
    NotComparableError,
    traits_of,
)
from graphplan.capture.repeated.traced_values import TracedValue, describe, is_symbolic, split_traced
from graphplan.capture.source_lines import calling_line
from graphplan.capture.structure import Seen, flatten

_SIZE_QUERIES = (
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
)
"""Operations that return a size, stride or offset of a tensor."""


@dataclass(frozen=True, slots=True)
class SharedCall:
    """A method call on an object that all blocks share, such as a cache; it runs for each block.

    Attributes:
        method: the bound method.
        arguments: its (args, kwargs).
        result: the returned value.
        stack: the ``nn_module_stack`` at the call.
        line: the line of code that called it.
    """

    method: Callable[..., Any]
    arguments: TracedValue
    result: TracedValue
    stack: dict[str, tuple[str, Any]]
    line: str | None


@dataclass(slots=True)
class RecordedCall:
    """A traced call of a module.

    Attributes:
        traits: the traits of the module before the call.
        varying: its integer attributes that differ within the stack.
        guarded: their values.
        arguments: the arguments of the call.
        visible_state: all that code could read before the call of the arguments, the module, and torch.
        weights: the weights of the module.
        weight_nodes: their nodes.
        stack: the ``nn_module_stack`` at the call, including this module.
        events: nodes and shared calls, in order.
        constants: node -> constant tensor that the code makes from numbers or reads.
        result: the returned value.
        rebound: node of a tensor -> node of its value after the call, if that is another.
        branched_on: nodes whose values the code has branched on.
        copies: the number of copies made.
    """

    traits: ModuleTraits
    varying: list[AttributeRef]
    guarded: list[GuardedInteger]
    arguments: TracedValue
    visible_state: tuple[Any, ...]
    weights: list[torch.Tensor]
    weight_nodes: list[fx.Node]
    stack: dict[str, tuple[str, Any]]
    events: list[fx.Node | SharedCall] = field(default_factory=list)
    constants: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    result: TracedValue | None = None
    rebound: dict[fx.Node, fx.Node] = field(default_factory=dict)
    branched_on: frozenset[fx.Node] = frozenset()
    copies: int = 0

    @property
    def integers(self) -> list[int]:
        """The values of the integer attributes that differ within the stack."""
        return [guarded.value for guarded in self.guarded]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the arguments, and the weights."""
        return [*self.arguments.tensors, *self.weights]

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of ``tensors`` before the call."""
        return [*self.arguments.nodes, *self.weight_nodes]

    def serves(self, other: RecordedCall) -> bool:
        """Whether nothing that the code could read differs in ``other``, a call that is not traced yet."""
        if self.visible_state != other.visible_state:
            return False
        integers = zip(self.guarded, other.integers, strict=True)
        nodes = zip(self.nodes, other.nodes, strict=True)
        same_integers = all(guarded.same_results_for(value) for guarded, value in integers)
        return same_integers and all(node is one for node, one in nodes if node in self.branched_on)

    def canonical_trace(self, integers: list[int]) -> Iterator[Any]:
        """Yield the trace with numbered nodes: equal for equal traces; ``integers`` are guarded values.

        Raises:
            NotComparableError: nodes read tensors from outside the call, or data-dependent numbers.
        """
        number: dict[fx.Node, int] = {}
        for node in self.nodes:
            number.setdefault(node, len(number))

        def numbered(node: fx.Node) -> Any:
            value = node.meta.get("val")
            if is_symbolic(value):
                return describe(value)
            if node not in number:
                raise NotComparableError(f"{node.name} is read, which is not an argument")
            return f"%{number[node]}"

        for event in self.events:
            if isinstance(event, SharedCall):
                arguments = event.arguments.with_integers(integers)
                yield arguments, *map(numbered, event.arguments.nodes), event.result.description()
                for node in event.result.nodes:
                    number.setdefault(node, len(number))
            elif event in self.constants:
                constant = self.constants[event]
                with untraced():
                    yield constant.tolist() if is_made_in_code(event) else Identities([constant])
                number[event] = len(number)
            elif event.op != "call_function" or "unbacked_bindings" in event.meta:
                raise NotComparableError(f"{event.name} is not an operation, or depends on data")
            elif is_symbolic(event.meta.get("val")):  # a size, which is the same in all blocks
                symbolic = all(is_symbolic(node.meta.get("val")) for node in event.all_input_nodes)
                if not symbolic and event.target not in _SIZE_QUERIES:
                    raise NotComparableError(f"{event.name} is a number that depends on data")
            else:
                args, kwargs = fx.map_arg((event.args, event.kwargs), numbered)
                yield event.target, args, kwargs, describe(event.meta.get("val"))
                number[event] = len(number)
        assert self.result is not None
        yield self.result.with_integers(integers), *map(numbered, self.result.nodes)
        yield {numbered(before): numbered(after) for before, after in self.rebound.items()}


class CallRecorder:
    """Records a module call while it is traced.

    Attributes:
        call: the recorded call.
    """

    def __init__(
        self,
        tracer: Any,
        module: nn.Module,
        varying: list[AttributeRef],
        args: Any,
        kwargs: Any,
        shared: tuple[type, ...],
        blocks: Sequence[Any],
        nodes_read: Sequence[Sequence[fx.Node]],
    ) -> None:
        """``blocks`` (open autocast blocks) and ``nodes_read`` (of branches) grow during the trace."""
        self._nodes_read, self._reads_before = nodes_read, len(nodes_read)
        self._blocks, self._modes_before = blocks, _modes(blocks)
        self._tracer, self._shared = tracer, shared
        self._arguments = args, kwargs
        traits = traits_of(module)
        weights = traits.weights()
        nodes = [node for weight in weights if (node := node_of(weight, tracer)) is not None]
        if len(nodes) < len(weights):
            raise NotComparableError("a weight is a constant")
        arguments = split_traced((args, kwargs), tracer, [], shared)
        numbers = [nodes.index(node) if node in nodes else None for node in arguments.nodes]
        visible_state = (
            arguments.description(),
            *numbers,
            calling_line(),
            *self._modes_before,
            traits.state(varying),
        )
        guarded = [GuardedInteger(value) for value in traits.integers(varying)]
        self.call = RecordedCall(
            traits,
            varying,
            guarded,
            arguments=arguments,
            visible_state=visible_state,
            weights=weights,
            weight_nodes=nodes,
            stack=dict(tracer.module_stack),
        )
        self._state = traits.state()
        self._last = _end(tracer.graph)
        self._in_shared_call = False
        self._error: NotComparableError | None = None
        self._cache_contents: list[Any] = []

    def run(self, forward: Callable[[], Any], *, guard: bool) -> Any:
        """Trace the call; if ``guard``, with guarded integers for those that vary in the stack."""
        self._cache_contents = self._contents_of_caches()
        attributes = [(self.call.traits.namespaces[index], name) for index, name in self.call.varying]
        pairs = list(zip(attributes, self.call.guarded, strict=True)) if guard else []
        for (namespace, name), guarded in pairs:
            namespace[name] = guarded
        try:
            return forward()
        finally:
            for (namespace, name), guarded in pairs:
                if namespace[name] is guarded:
                    namespace[name] = guarded.value

    def record_shared_call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run and record a method of an object that all blocks share."""
        if self._in_shared_call:
            return method(*args, **kwargs)
        self._require_unchanged_caches()
        if _modes(self._blocks) != self._modes_before:  # a copy would call the cache in the block's modes
            self._error = NotComparableError("a cache is called in modes other than the block's")
        stack, line = dict(self._tracer.module_stack), calling_line()
        self._record_nodes()
        arguments = self._split_traced((args, kwargs))
        self._in_shared_call = True
        try:
            result = method(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
        finally:
            self._in_shared_call = False
        self._cache_contents = self._contents_of_caches()
        self._last = _end(self._tracer.graph)
        returned = self._split_traced(result)
        if arguments is not None and returned is not None:
            self.call.events.append(SharedCall(method, arguments, returned, stack=stack, line=line))
        return result

    def _contents_of_caches(self) -> list[tuple[Any, Identities]]:
        """Return the contents of the shared objects among the arguments."""
        caches = [flatten(leaf.value) for leaf in self.call.arguments.leaves if leaf.kind == "shared"]
        return [(spec, Identities(leaves)) for leaves, spec in caches]

    def _require_unchanged_caches(self) -> None:
        if self._contents_of_caches() != self._cache_contents:  # a copy would not change them
            self._error = NotComparableError("the call changes a cache other than by its methods")

    def _split_traced(self, value: Any) -> TracedValue | None:
        try:
            return split_traced(value, self._tracer, self.call.guarded, self._shared)
        except NotComparableError as error:  # the call goes on, and finish() raises it
            self._error = error
            return None

    def finish(self, result: Any) -> RecordedCall:
        """Return the recorded call; raise NotComparableError if a copy would not repeat all that it did."""
        call = self.call
        self._require_unchanged_caches()
        if self._error is not None:
            raise self._error
        self._record_nodes()
        now = traits_of(call.traits.module)
        if now.state() != self._state or Identities(now.weights()) != Identities(call.weights):
            raise NotComparableError("the call changes attributes")
        arguments = split_traced(self._arguments, self._tracer, [], self._shared)
        if arguments.description() != call.visible_state[0]:
            raise NotComparableError("the call changes its arguments other than in values")
        if Identities(arguments.tensors) != Identities(call.arguments.tensors):
            raise NotComparableError("the call replaces tensors in its arguments")
        call.result = split_traced(result, self._tracer, call.guarded, self._shared)
        call.branched_on = frozenset(chain.from_iterable(self._nodes_read[self._reads_before :]))
        shared = [*arguments.containers, *now.containers, *now.external_state()[1].objects]
        pairs = list(zip(call.tensors, call.nodes, strict=True))
        for event in call.events:
            if isinstance(event, SharedCall):
                shared += event.result.containers
                for value in (event.arguments, event.result):
                    pairs += zip(value.tensors, value.nodes, strict=True)
        if any(map(Seen(map(id, shared)), call.result.containers)):
            raise NotComparableError("the call returns a list or dict to which other objects refer")
        latest = {node: node_of(tensor, self._tracer) for tensor, node in pairs}
        call.rebound = {node: to for node, to in latest.items() if to is not None and to is not node}
        list(call.canonical_trace(call.integers))  # raises if a copy may differ
        return call

    def _record_nodes(self) -> None:
        end = _end(self._tracer.graph)
        while self._last is not end:
            self._last = self._last.next
            self.call.events.append(self._last)
            constant = constant_of(self._last, self._tracer)
            if constant is not None:
                self.call.constants[self._last] = constant


def _modes(blocks: Sequence[Any]) -> tuple[Any, ...]:
    return torch.is_grad_enabled(), torch.get_default_dtype(), *blocks


def _end(graph: fx.Graph) -> fx.Node:
    """Return the last node of a graph in progress."""
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last
