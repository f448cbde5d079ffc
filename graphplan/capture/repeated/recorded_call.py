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
from graphplan.capture.repeated.module_traits import Identities, ModuleTraits, Place, UnlikeError, traits_of
from graphplan.capture.repeated.traced_values import TracedValue, describe, is_symbolic, take_apart
from graphplan.capture.source_lines import calling_line
from graphplan.capture.structure import Seen, flatten

_OF_SIZES = (
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
)
"""Operations that return a number of a tensor without reading its values."""


@dataclass(frozen=True, slots=True)
class InnerCall:
    """A method call of an object that all blocks share, such as a cache; it runs for each block.

    Attributes:
        method: the bound method.
        arguments: its (args, kwargs).
        result: what it returned.
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
        places: its integer attributes that differ within the stack.
        guarded: their values.
        arguments: of the call.
        before: all that code could read before the call of the arguments, the module, and torch.
        weights: the weights of the module.
        weight_nodes: their nodes.
        outer: the ``nn_module_stack`` at the call, including this module.
        events: nodes and inner calls, in order.
        constants: node -> constant tensor that the code makes from numbers or reads.
        result: what the call returned.
        rebound: node of a tensor -> node of its value after the call, if that is another.
        branched_on: nodes whose values the code has branched on.
        copies: how many copies were made.
    """

    traits: ModuleTraits
    places: list[Place]
    guarded: list[GuardedInteger]
    arguments: TracedValue
    before: tuple[Any, ...]
    weights: list[torch.Tensor]
    weight_nodes: list[fx.Node]
    outer: dict[str, tuple[str, Any]]
    events: list[fx.Node | InnerCall] = field(default_factory=list)
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
        if self.before != other.before:
            return False
        integers = zip(self.guarded, other.integers, strict=True)
        nodes = zip(self.nodes, other.nodes, strict=True)
        same_integers = all(guarded.same_from(value) for guarded, value in integers)
        return same_integers and all(node is one for node, one in nodes if node in self.branched_on)

    def lines(self, integers: list[int]) -> Iterator[Any]:
        """Yield the trace with numbers for names: equal for equal traces; ``integers`` are guarded values."""
        number: dict[fx.Node, int] = {}
        for node in self.nodes:
            number.setdefault(node, len(number))

        def numbered(node: fx.Node) -> Any:
            value = node.meta.get("val")
            return describe(value) if is_symbolic(value) else f"%{number[node]}"

        for event in self.events:
            if isinstance(event, InnerCall):
                arguments = event.arguments.with_integers(integers)
                yield arguments, *map(numbered, event.arguments.nodes), event.result.description()
                for node in event.result.nodes:
                    number.setdefault(node, len(number))
            elif event in self.constants:
                constant = self.constants[event]
                with untraced():
                    yield constant.tolist() if is_made_in_code(event) else Identities([constant])
                number[event] = len(number)
            elif not is_symbolic(event.meta.get("val")):
                args, kwargs = fx.map_arg((event.args, event.kwargs), numbered)
                yield event.target, args, kwargs, describe(event.meta.get("val"))
                number[event] = len(number)
        assert self.result is not None
        yield self.result.with_integers(integers), *map(numbered, self.result.nodes)
        yield {numbered(before): numbered(after) for before, after in self.rebound.items()}

    def require_closed(self) -> None:
        """Raise UnlikeError if nodes read tensors from outside the call, or data-dependent numbers."""
        known = set(self.nodes)
        for event in self.events:
            if isinstance(event, InnerCall):
                known.update(event.result.nodes)
                continue
            if "unbacked_bindings" in event.meta:
                raise UnlikeError(f"{event.name} is of a size that data decides")
            if event.op != "call_function" and event not in self.constants:
                raise UnlikeError(f"{event.name} is no operation")
            tensors = [node for node in event.all_input_nodes if not is_symbolic(node.meta.get("val"))]
            if is_symbolic(event.meta.get("val")):  # a size, which is the same in all blocks
                if tensors and event.target not in _OF_SIZES:
                    raise UnlikeError(f"{event.name} is a number that data decides")
                continue
            for node in tensors:
                if node not in known:
                    raise UnlikeError(f"{event.name} reads {node.name}, which is no argument")
            known.add(event)


class CallRecorder:
    """Records a module call while it is traced.

    Attributes:
        call: the recorded call.
    """

    def __init__(
        self,
        tracer: Any,
        module: nn.Module,
        places: list[Place],
        args: Any,
        kwargs: Any,
        shared: tuple[type, ...],
        blocks: Sequence[Any],
        answered: Sequence[Sequence[fx.Node]],
    ) -> None:
        """``blocks`` (open autocast blocks) and ``answered`` (nodes read by branches) change in the trace."""
        self._answered, self._answered_before = answered, len(answered)
        self._blocks, self._modes_before = blocks, _modes(blocks)
        self._tracer, self._shared = tracer, shared
        self._arguments = args, kwargs
        traits = traits_of(module)
        weights = traits.weights()
        nodes = [node for weight in weights if (node := node_of(weight, tracer)) is not None]
        if len(nodes) < len(weights):
            raise UnlikeError("a weight is a constant")
        arguments = take_apart((args, kwargs), tracer, [], shared)
        numbers = [nodes.index(node) if node in nodes else None for node in arguments.nodes]
        before = (
            arguments.description(),
            *numbers,
            calling_line(),
            *self._modes_before,
            traits.state(places),
        )
        guarded = [GuardedInteger(value) for value in traits.integers(places)]
        outer = dict(tracer.module_stack)
        self.call = RecordedCall(traits, places, guarded, arguments, before, weights, nodes, outer)
        self._state = traits.state()
        self._last = _end(tracer.graph)
        self._inside = False
        self._unlike: UnlikeError | None = None
        self._cache_contents: list[Any] = []

    def run(self, forward: Callable[[], Any], *, guard: bool) -> Any:
        """Trace the call; if ``guard``, with guarded integers in place of those that vary in the stack."""
        self._cache_contents = self._in_caches()
        attributes = [(self.call.traits.parts[part], name) for part, name in self.call.places]
        pairs = list(zip(attributes, self.call.guarded, strict=True)) if guard else []
        for (part, name), guarded in pairs:
            part[name] = guarded
        try:
            return forward()
        finally:
            for (part, name), guarded in pairs:
                if part[name] is guarded:
                    part[name] = guarded.value

    def inner(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run and record a method of an object that all blocks share."""
        if self._inside:
            return method(*args, **kwargs)
        self._require_unchanged_caches()
        if _modes(self._blocks) != self._modes_before:  # a copy would call it in the modes of the block
            self._unlike = UnlikeError("a cache is called in other modes than the block")
        stack, line = dict(self._tracer.module_stack), calling_line()
        self._take_nodes()
        before = self._take_apart((args, kwargs))
        self._inside = True
        try:
            result = method(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
        finally:
            self._inside = False
        self._cache_contents = self._in_caches()
        self._last = _end(self._tracer.graph)
        after = self._take_apart(result)
        if before is not None and after is not None:
            self.call.events.append(InnerCall(method, before, after, stack, line))
        return result

    def _in_caches(self) -> list[tuple[Any, Identities]]:
        """Return the contents of the shared objects among the arguments."""
        caches = [flatten(leaf.value) for leaf in self.call.arguments.leaves if leaf.kind == "shared"]
        return [(spec, Identities(leaves)) for leaves, spec in caches]

    def _require_unchanged_caches(self) -> None:
        if self._in_caches() != self._cache_contents:  # a copy would not change them
            self._unlike = UnlikeError("the call changes a cache other than by its methods")

    def _take_apart(self, value: Any) -> TracedValue | None:
        try:
            return take_apart(value, self._tracer, self.call.guarded, self._shared)
        except UnlikeError as error:  # the call goes on, and finish() raises it
            self._unlike = error
            return None

    def finish(self, result: Any) -> RecordedCall:
        """Return the recorded call; raise UnlikeError if it did something that a copy would not repeat."""
        call = self.call
        self._require_unchanged_caches()
        if self._unlike is not None:
            raise self._unlike
        self._take_nodes()
        now = traits_of(call.traits.module)
        if now.state() != self._state or Identities(now.weights()) != Identities(call.weights):
            raise UnlikeError("the call changes attributes")
        arguments = take_apart(self._arguments, self._tracer, [], self._shared)
        if arguments.description() != call.before[0]:
            raise UnlikeError("the call changes its arguments other than in values")
        if Identities(arguments.tensors) != Identities(call.arguments.tensors):
            raise UnlikeError("the call replaces tensors in what it is given")
        call.result = take_apart(result, self._tracer, call.guarded, self._shared)
        call.branched_on = frozenset(chain.from_iterable(self._answered[self._answered_before :]))
        shared = [*arguments.containers, *now.containers, *now.held()[1].objects]
        pairs = list(zip(call.tensors, call.nodes, strict=True))
        for event in call.events:
            shared += event.result.containers if isinstance(event, InnerCall) else ()
            for value in (event.arguments, event.result) if isinstance(event, InnerCall) else ():
                pairs += zip(value.tensors, value.nodes, strict=True)
        if any(map(Seen(map(id, shared)), call.result.containers)):
            raise UnlikeError("the call returns a list or dict that others have too")
        latest = {node: node_of(tensor, self._tracer) for tensor, node in pairs}
        call.rebound = {node: to for node, to in latest.items() if to is not None and to is not node}
        call.require_closed()
        return call

    def _take_nodes(self) -> None:
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
