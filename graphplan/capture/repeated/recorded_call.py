"""A call of a module as it was traced."""

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
"""Operations that make a number of a tensor without reading its values."""


@dataclass(frozen=True, slots=True)
class InnerCall:
    """A method of an object that all blocks share, such as a cache: it is run for each block.

    Attributes:
        method: takes its arguments, and ``result`` is what it returned.
        given: its positional and its named arguments.
        result: what it returned.
        stack: the modules that were being called: ``nn_module_stack`` of a node.
        line: of the code that called it.
    """

    method: Callable[..., Any]
    given: TracedValue
    result: TracedValue
    stack: dict[str, tuple[str, Any]]
    line: str | None


@dataclass(slots=True)
class RecordedCall:
    """What a call has traced.

    Attributes:
        traits: of the module, as they were before the call.
        places: its integer attributes that differ in the stack.
        guarded: their values.
        given: the arguments.
        before: what else code can read of them, of the module, and of torch.
        weights: of the module.
        weight_nodes: what stands for them.
        outer: the modules that were being called, this one the last: ``nn_module_stack`` of a node.
        events: nodes, and calls between them, in order.
        constants: tensors that the code makes of numbers, by the nodes that stand for them.
        result: what the call has returned.
        rebound: for a tensor, by its node, another that has changed or replaced it.
        asked: nodes of whose values the code was told something.
        copies: how often it was copied.
    """

    traits: ModuleTraits
    places: list[Place]
    guarded: list[GuardedInteger]
    given: TracedValue
    before: tuple[Any, ...]
    weights: list[torch.Tensor]
    weight_nodes: list[fx.Node]
    outer: dict[str, tuple[str, Any]]
    events: list[fx.Node | InnerCall] = field(default_factory=list)
    constants: dict[fx.Node, torch.Tensor] = field(default_factory=dict)
    result: TracedValue | None = None
    rebound: dict[fx.Node, fx.Node] = field(default_factory=dict)
    asked: frozenset[fx.Node] = frozenset()
    copies: int = 0

    @property
    def integers(self) -> list[int]:
        """The values of integer attributes that differ in the stack."""
        return [guarded.value for guarded in self.guarded]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Arguments and weights."""
        return [*self.given.tensors, *self.weights]

    @property
    def nodes(self) -> list[fx.Node]:
        """What stood for ``tensors`` before."""
        return [*self.given.nodes, *self.weight_nodes]

    def serves(self, other: RecordedCall) -> bool:
        """Whether the code could read nothing that differs in another call, which is not traced yet."""
        return (
            self.before == other.before
            and all(
                guarded.same_from(value) for guarded, value in zip(self.guarded, other.integers, strict=True)
            )
            and all(
                node is one for node, one in zip(self.nodes, other.nodes, strict=True) if node in self.asked
            )
        )

    def lines(self, integers: list[int]) -> Iterator[Any]:
        """What was traced, with numbers in the place of names: equal for calls that have traced the same.

        Of guarded integers it has these values.
        """
        number: dict[fx.Node, int] = {}
        for node in self.nodes:
            number.setdefault(node, len(number))

        def numbered(node: fx.Node) -> Any:
            value = node.meta.get("val")
            return describe(value) if is_symbolic(value) else f"%{number[node]}"

        for event in self.events:
            if isinstance(event, InnerCall):
                given = event.given.with_integers(integers)
                yield given, *map(numbered, event.given.nodes), event.result.description()
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
        """Raise UnlikeError where nodes read what is neither given nor a weight, or the values of tensors."""
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
            if is_symbolic(event.meta.get("val")):  # a size, which is the same number of whatever it is read
                if tensors and event.target not in _OF_SIZES:
                    raise UnlikeError(f"{event.name} is a number that data decides")
                continue
            for node in tensors:
                if node not in known:
                    raise UnlikeError(f"{event.name} reads {node.name}, which is no argument")
            known.add(event)


class CallRecorder:
    """Watches a call while it is traced.

    Attributes:
        call: what was traced, once it has been run.
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
        """As they go on: ``blocks`` of autocast, in which the code is; what ``answered`` questions read."""
        self._answered, self._known = answered, len(answered)
        self._blocks, self._around = blocks, _modes(blocks)
        self._tracer, self._shared = tracer, shared
        self._given = args, kwargs
        traits = traits_of(module)
        weights = traits.weights()
        nodes = [node for weight in weights if (node := node_of(weight, tracer)) is not None]
        if len(nodes) < len(weights):
            raise UnlikeError("a weight is a constant")
        given = take_apart((args, kwargs), tracer, [], shared)
        numbers = [nodes.index(node) if node in nodes else None for node in given.nodes]
        before = (given.description(), *numbers, calling_line(), *self._around, traits.state(places))
        guarded = [GuardedInteger(value) for value in traits.integers(places)]
        outer = dict(tracer.module_stack)
        self.call = RecordedCall(traits, places, guarded, given, before, weights, nodes, outer)
        self._state = traits.state()
        self._last = _end(tracer.graph)
        self._inside = False
        self._unlike: UnlikeError | None = None
        self._held: list[Any] = []

    def run(self, forward: Callable[[], Any], *, guard: bool) -> Any:
        """Trace the call; ``guard``: with objects that note what is asked of varying integers."""
        self._held = self._in_caches()
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
        """Run a method of an object that all blocks share."""
        if self._inside:
            return method(*args, **kwargs)
        self._require_caches_as_held()
        if _modes(self._blocks) != self._around:  # in which a copy would not call it
            self._unlike = UnlikeError("a cache is called in other modes than the block")
        stack, line = dict(self._tracer.module_stack), calling_line()
        self._take_nodes()
        before = self._taken((args, kwargs))
        self._inside = True
        try:
            result = method(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
        finally:
            self._inside = False
        self._held = self._in_caches()
        self._last = _end(self._tracer.graph)
        after = self._taken(result)
        if before is not None and after is not None:
            self.call.events.append(InnerCall(method, before, after, stack, line))
        return result

    def _in_caches(self) -> list[tuple[Any, Identities]]:
        """What the objects hold that all blocks share, of those that the call is given."""
        found = [flatten(leaf.value) for leaf in self.call.given.leaves if leaf.kind == "shared"]
        return [(spec, Identities(leaves)) for leaves, spec in found]

    def _require_caches_as_held(self) -> None:
        if self._in_caches() != self._held:  # a copy would not change them
            self._unlike = UnlikeError("the call changes a cache other than by its methods")

    def _taken(self, value: Any) -> TracedValue | None:
        try:
            return take_apart(value, self._tracer, self.call.guarded, self._shared)
        except UnlikeError as error:  # the call goes on, and finish() tells of it
            self._unlike = error
            return None

    def finish(self, result: Any) -> RecordedCall:
        """What was traced."""
        call = self.call
        self._require_caches_as_held()
        if self._unlike is not None:
            raise self._unlike
        self._take_nodes()
        now = traits_of(call.traits.module)
        if now.state() != self._state or Identities(now.weights()) != Identities(call.weights):
            raise UnlikeError("the call changes attributes")
        given = take_apart(self._given, self._tracer, [], self._shared)
        if given.description() != call.before[0]:
            raise UnlikeError("the call changes its arguments other than in values")
        if Identities(given.tensors) != Identities(call.given.tensors):
            raise UnlikeError("the call replaces tensors in what it is given")
        call.result = take_apart(result, self._tracer, call.guarded, self._shared)
        call.asked = frozenset(chain.from_iterable(self._answered[self._known :]))
        known = [*given.containers, *now.containers, *now.held()[1].objects]
        pairs = list(zip(call.tensors, call.nodes, strict=True))
        for event in call.events:
            known += event.result.containers if isinstance(event, InnerCall) else ()
            for value in (event.given, event.result) if isinstance(event, InnerCall) else ():
                pairs += zip(value.tensors, value.nodes, strict=True)
        if any(map(Seen(map(id, known)), call.result.containers)):
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
    """The last node of a graph that is being made."""
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last
