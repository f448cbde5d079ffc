"""A module call that is copied from a traced one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphplan._compat.torch import storage_of
from graphplan._compat.traced_tensors import fake_like, is_made_in_code, new_constant, set_node, untraced
from graphplan.capture.repeated.recorded_call import RecordedCall, SharedCall
from graphplan.capture.repeated.traced_values import TracedValue, is_symbolic, split_traced


class NotRepeatedError(Exception):
    """A block differs from the recorded one, although it was assumed equal."""


class CallCopy:
    """Copies a recorded call with the arguments and weights of another call, which is not traced."""

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
        *_, (self._old_path, _) = recorded.stack.values()
        *_, (self._path, _) = other.stack.values()
        self._local: dict[int, list[fx.Node]] = {}  # storage -> recorded nodes that have not left the call

    def run(self) -> Any:
        """Copy the nodes, and return the result of the call."""
        pending: list[fx.Node] = []
        for event in self._recorded.events:
            if isinstance(event, fx.Node):
                pending.append(event)
                continue
            self._copy(pending)
            self._run_shared_call(event)
            pending = []
        self._copy(pending)
        assert self._recorded.result is not None
        tensors = self._counterparts(self._recorded.result)
        with untraced():
            for before, after in self._recorded.rebound.items():
                set_node(self._tensors[before], self._nodes[after], self._tracer)
        self._recorded.copies += 1
        return self._recorded.result.rebuild(tensors, self._other.integers)

    def _copy(self, nodes: list[fx.Node]) -> None:
        if not nodes:
            return
        with untraced():
            for node in nodes:
                value = node.meta.get("val")
                if is_symbolic(value):  # a number computed from sizes is the same for all blocks
                    self._nodes[node] = node
                    continue
                copied = self._graph.node_copy(node, lambda source: self._nodes.get(source, source))
                if node in self._recorded.constants:
                    constant = self._recorded.constants[node]
                    constant = constant.clone() if is_made_in_code(node) else constant
                    copied.target = new_constant(constant, self._tracer)
                copied.meta = {**node.meta, "nn_module_stack": self._stack(node.meta["nn_module_stack"])}
                self._nodes[node] = copied
                if isinstance(value, torch.Tensor):
                    if storage_of(value) in self._storages:
                        copied.meta["val"] = self._stand_in(value)
                    else:
                        self._local.setdefault(storage_of(value), []).append(node)

    def _stack(self, recorded: dict[str, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        """Return the ``nn_module_stack`` of a copied node: that of the copied call, then inner modules."""
        inner = list(recorded.items())[len(self._recorded.stack) :]
        renamed = {self._renamed(key): (self._renamed(path), kind) for key, (path, kind) in inner}
        stack = {**self._other.stack, **renamed}
        return {key: (path, _name(kind)) for key, (path, kind) in stack.items()}

    def _renamed(self, path: str) -> str:
        return self._path + path.removeprefix(self._old_path)

    def _tensor(self, node: fx.Node, recorded: torch.Tensor) -> torch.Tensor:
        """Return the counterpart of ``recorded``, the result of a recorded node that leaves the call.

        Fake memory is allocated only for results that leave the call. Inner nodes keep the values of the
        recorded nodes, which show sizes and which nodes share memory.
        """
        if node not in self._tensors:
            value = node.meta["val"]
            for same in self._local.pop(storage_of(value), ()):
                self._nodes[same].meta["val"] = self._stand_in(same.meta["val"])
            tensor = self._nodes[node].meta["val"]
            if recorded.requires_grad:  # not a leaf of autograd, so that it can be written to
                tensor = tensor.requires_grad_().clone()
            self._tensors[node] = tensor
            set_node(tensor, self._nodes[node], self._tracer)
        return self._tensors[node]

    def _stand_in(self, old: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor like one of the recorded call, over the counterpart of its storage."""
        base = self._storages.get(storage_of(old))
        new = fake_like(old, base)
        if base is None:
            self._storages[storage_of(old)] = new
        return new

    def _run_shared_call(self, event: SharedCall) -> None:
        args, kwargs = event.arguments.rebuild(self._counterparts(event.arguments), self._other.integers)
        last = next(iter(reversed(self._graph.nodes)))
        returned = event.method(*args, **kwargs)
        while (last := last.next).op != "root":
            last.meta["nn_module_stack"], last.meta["stack_trace"] = self._stack(event.stack), event.line
        result = split_traced(returned, self._tracer, [], self._shared)
        if result.description() != event.result.description():
            raise NotRepeatedError(f"{self._path}: a cache returns another value than in {self._old_path}")
        self._nodes.update(zip(event.result.nodes, result.nodes, strict=True))
        self._tensors.update(zip(event.result.nodes, result.tensors, strict=True))
        for old, new in zip(event.result.tensors, result.tensors, strict=True):
            self._storages.setdefault(storage_of(old), new)

    def _counterparts(self, value: TracedValue) -> list[torch.Tensor]:
        """Return the counterparts of the tensors of a recorded value, which the trace then tracks."""
        with untraced():
            return [self._tensor(*pair) for pair in zip(value.nodes, value.tensors, strict=True)]


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind
