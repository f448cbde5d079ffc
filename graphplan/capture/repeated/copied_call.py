"""A call of a module, as the copy of one that was traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphplan._compat.torch import storage_of
from graphplan._compat.traced_tensors import fake_like, is_made_in_code, new_constant, set_node, untraced
from graphplan.capture.repeated.recorded_call import InnerCall, RecordedCall
from graphplan.capture.repeated.traced_values import TracedValue, is_symbolic, take_apart


class NotRepeatedError(Exception):
    """A block is not what the copies before it have taken it for."""


class CallCopy:
    """Copies a recorded call over the arguments and weights of another, which is not traced."""

    def __init__(
        self, recorded: RecordedCall, other: RecordedCall, tracer: Any, shared: tuple[type, ...]
    ) -> None:
        self._recorded, self._other = recorded, other
        self._tracer, self._shared = tracer, shared
        self._graph: fx.Graph = tracer.graph
        self._nodes = dict(zip(recorded.nodes, other.nodes, strict=True))
        self._tensors = dict(zip(recorded.nodes, other.tensors, strict=True))
        self._storages = {
            storage_of(old): new for old, new in zip(recorded.tensors, other.tensors, strict=True)
        }
        *_, (self._old_path, _) = recorded.outer.values()
        *_, (self._path, _) = other.outer.values()
        self._inside: dict[int, list[fx.Node]] = {}  # by their memory, recorded nodes of which none left

    def run(self) -> Any:
        """The result of the call."""
        pending: list[fx.Node] = []
        for event in self._recorded.events:
            if isinstance(event, fx.Node):
                pending.append(event)
                continue
            self._copy(pending)
            self._run(event)
            pending = []
        self._copy(pending)
        assert self._recorded.result is not None
        tensors = self._tracked(self._recorded.result)
        with untraced():
            for before, after in self._recorded.rebound.items():
                set_node(self._tensors[before], self._nodes[after], self._tracer)
        self._recorded.copies += 1
        return self._recorded.result.rebuilt(tensors, self._other.integers)

    def _copy(self, nodes: list[fx.Node]) -> None:
        if not nodes:
            return
        with untraced():
            for node in nodes:
                value = node.meta.get("val")
                if is_symbolic(value):  # one number of sizes is like another
                    self._nodes[node] = node
                    continue
                copied = self._graph.node_copy(node, lambda source: self._nodes.get(source, source))
                if node in self._recorded.constants:
                    constant = self._recorded.constants[node]
                    made_anew = constant.clone() if is_made_in_code(node) else constant
                    copied.target = new_constant(made_anew, self._tracer)
                copied.meta = {**node.meta, "nn_module_stack": self._stack(node.meta["nn_module_stack"])}
                self._nodes[node] = copied
                if isinstance(value, torch.Tensor):
                    if storage_of(value) in self._storages:
                        copied.meta["val"] = self._stand_in(value)
                    else:
                        self._inside.setdefault(storage_of(value), []).append(node)

    def _stack(self, recorded: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        """The modules that would be being called: those around the copy, then those in the recorded call."""
        inner = list(recorded.items())[len(self._recorded.outer) :]
        moved = {self._moved(key): (self._moved(path), kind) for key, (path, kind) in inner}
        stack = {**self._other.outer, **moved}
        return {key: (path, _name(kind)) for key, (path, kind) in stack.items()}

    def _moved(self, path: str) -> str:
        return self._path + path.removeprefix(self._old_path)

    def _tensor(self, node: fx.Node, recorded: torch.Tensor) -> torch.Tensor:
        """What stands for the result of a recorded node, as which something else got ``recorded``.

        Memory is made for what leaves the call only: the rest has the values of the recorded nodes, of which
        sizes are read, and which nodes of the call have the same memory.
        """
        if node not in self._tensors:
            value = node.meta["val"]
            for same in self._inside.pop(storage_of(value), ()):
                self._nodes[same].meta["val"] = self._stand_in(same.meta["val"])
            made = self._nodes[node].meta["val"]
            if recorded.requires_grad:  # as what autograd has made, which may be written to
                made = made.requires_grad_().clone()
            self._tensors[node] = made
            set_node(made, self._nodes[node], self._tracer)
        return self._tensors[node]

    def _stand_in(self, old: torch.Tensor) -> torch.Tensor:
        """A tensor like one of the recorded call, over the memory that stands for its memory."""
        base = self._storages.get(storage_of(old))
        new = fake_like(old, base)
        if base is None:
            self._storages[storage_of(old)] = new
        return new

    def _run(self, event: InnerCall) -> None:
        args, kwargs = event.given.rebuilt(self._tracked(event.given), self._other.integers)
        last = next(iter(reversed(self._graph.nodes)))
        returned = event.method(*args, **kwargs)
        while (last := last.next).op != "root":
            last.meta["nn_module_stack"], last.meta["stack_trace"] = self._stack(event.stack), event.line
        result = take_apart(returned, self._tracer, [], self._shared)
        if result.description() != event.result.description():
            raise NotRepeatedError(f"{self._path}: what a cache returns is not as in {self._old_path}")
        self._nodes.update(zip(event.result.nodes, result.nodes, strict=True))
        self._tensors.update(zip(event.result.nodes, result.tensors, strict=True))
        for old, new in zip(event.result.tensors, result.tensors, strict=True):
            self._storages.setdefault(storage_of(old), new)

    def _tracked(self, value: TracedValue) -> list[torch.Tensor]:
        """The tensors that stand for the results of recorded nodes, of which the trace knows."""
        with untraced():
            return [self._tensor(*pair) for pair in zip(value.nodes, value.tensors, strict=True)]


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind
