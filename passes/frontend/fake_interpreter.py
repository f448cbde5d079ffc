"""Run operations on fake tensors to find their results, views and workspaces.

There is no data and no arithmetic. Of equal operations only one is run, so a model of eighty equal layers
costs little more than one of two. A run shows facts that no schema states: which result is a view, and how
many bytes a composite operation allocates before it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from graphplan.errors import NoGraphError
from graphplan.passes.frontend.fake_operation import Effect, OperationResult, run_fake
from graphplan.passes.frontend.kernel_workspace import KernelBench
from graphplan.passes.frontend.tensor_meta import TensorMeta, describe, is_tensor_meta
from graphplan.warnings import warn

_DATA_DECIDES = (DataDependentOutputException, DynamicOutputShapeException)  # the trace recorded the results


class Interpreter:
    """Runs the graph on fake tensors, each distinct operation once."""

    def __init__(
        self,
        device_types: Sequence[str],
        sizes: Mapping[Any, int] | None = None,
        bench: KernelBench | None = None,
    ) -> None:
        self.sizes, self.bench = sizes or {}, bench
        self.device_types = tuple(dict.fromkeys(("cpu", *device_types)))
        self.env: dict[fx.Node, Any] = {}
        self.memo: dict[Any, dict[str, Effect]] = {}
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def load(self, node: fx.Node, *, requires_grad: bool = False) -> None:
        """Store a placeholder's value from the trace."""
        value = describe(node.meta.get("val"), self.sizes)
        if isinstance(value, TensorMeta) and requires_grad:
            value = replace(value, requires_grad=True)
        self.env[node] = value

    def run(
        self,
        node: fx.Node,
        copied: Callable[[fx.Node], bool] = lambda _: False,
        device_type: str = "cpu",
    ) -> Effect:
        """Run one node, and store its value for the nodes that read it.

        Args:
            node: the operation.
            copied: whether the operation reads a copy of an argument, moved to its device: a copy is dense,
                which may make the operation take another path.
            device_type: type of its device, whose kernels determine the strides of the results.
        """

        def argument(source: fx.Node) -> Any:
            value = self.env[source]
            return value.copied() if isinstance(value, TensorMeta) and copied(source) else value

        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)), is_leaf=is_tensor_meta)
        key = (node.target, spec, tuple(map(_hashable, leaves)))
        effects = self.memo.get(key)
        if effects is None:
            try:
                effects = self.memo[key] = self._measure(node, leaves, spec)
            except _NoFakeError as error:  # results that depend on data differ between equal operations
                effects = {"": self._recorded(node, error.args[0])}
        effect = effects.get(device_type) or next(iter(effects.values()))
        self.env[node] = effect.value
        return effect

    @property
    def differs(self) -> bool:
        """Whether an operation that was run returns other strides, or copies, on one type of device only."""
        return any(
            (effect.value, effect.results) != (first.value, first.results)
            for first, *others in map(list, map(dict.values, self.memo.values()))
            for effect in others
        )

    def _measure(self, node: fx.Node, leaves: Sequence[Any], spec: pytree.TreeSpec) -> dict[str, Effect]:
        """Return the effect for each type of device; a scalar has one effect for all."""
        if not any(isinstance(leaf, TensorMeta) for leaf in leaves) and not _makes_tensor(node):
            return {"": _compute_scalar(node, leaves, spec)}
        effects: dict[str, Effect] = {}
        workspace: dict[str, int] = {}
        runs: dict[torch.device, Effect] = {}  # types without a backend on this machine share the CPU's
        for device_type in self.device_types:
            device = _fake_device(device_type)
            try:
                if device not in runs:
                    runs[device] = run_fake(node.target, leaves, spec, device, self.mode)
            except Exception as error:  # a kernel without a fake may raise anything
                if not effects:
                    raise _NoFakeError(error) from error
                continue  # Operation.workspace_on falls back to the largest workspace
            run = runs[device]
            workspace[device_type] = run.workspace[""]
            if device_type == "cuda" and self.bench is not None:
                results = sum(result.nbytes for result in run.results)
                measured = self.bench.workspace(node.target, leaves, spec, results)
                workspace[device_type] = max(measured, run.workspace[""])
            if not effects or _shapes(run) == _shapes(next(iter(effects.values()))):
                effects[device_type] = run  # some recurrent layers' fakes differ in shape from the CPU's
        flops = next(iter(effects.values())).flops
        return {
            device_type: Effect(run.value, run.results, flops, workspace)
            for device_type, run in effects.items()
        }

    def _recorded(self, node: fx.Node, error: Exception) -> Effect:
        """Return the recorded effect of an operation that does not run on fake tensors."""
        if "val" not in node.meta:
            raise NoGraphError(f"{node.format_node()} cannot be run on fake tensors: {error}") from error
        # no warning for dynamic sizes: at their bounds they need not fit together
        if not isinstance(error, _DATA_DECIDES) and _has_static_sizes(node):
            warn(
                f"{node.target} does not run on fake tensors ({type(error).__name__}: {error}): its results "
                "count as new memory of the traced sizes, and its workspace as 0 bytes"
            )
        value = describe(node.meta["val"], self.sizes)
        tensors = [leaf for leaf in pytree.tree_leaves(value, is_leaf=is_tensor_meta) if is_tensor_meta(leaf)]
        return Effect(value, tuple(OperationResult(t, t.copy_bytes) for t in tensors), 0, {"cpu": 0})


class _NoFakeError(Exception):
    """An operation does not run on fake tensors; the argument is the error that it raises."""


def _compute_scalar(node: fx.Node, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Effect:
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    assert callable(node.target)
    try:
        value = node.target(*args, **kwargs)
    except (TypeError, RuntimeError, ZeroDivisionError, OverflowError) as error:
        raise _NoFakeError(error) from error
    return Effect(value, (), 0, {})


def _shapes(effect: Effect) -> list[tuple[Any, ...]]:
    leaves = pytree.tree_leaves(effect.value, is_leaf=is_tensor_meta)
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, TensorMeta)]


def _hashable(leaf: Any) -> Any:
    # True == 1 == 1.0, yet they are different arguments
    return leaf if isinstance(leaf, TensorMeta) else (type(leaf), leaf)


def _makes_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _has_static_sizes(node: fx.Node) -> bool:
    """Whether all sizes of a node's inputs and results are numbers."""
    leaves = pytree.tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    return not any(
        isinstance(size, torch.SymInt)
        for leaf in leaves
        for size in (leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,))
    )


def _fake_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    backend = getattr(torch, device_type, None)
    available = backend is not None and backend.is_available()
    return torch.device(device_type, 0) if available else torch.device("cpu")
