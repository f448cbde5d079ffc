"""Run operations on fake tensors: what each makes, what is a view of what, what it takes on the way.

No data, no arithmetic. Two operations that look alike are run once between them, so a model of eighty
equal layers costs little more than one of two. Running them shows what no schema tells: which result
is a view, and how many bytes a composite operation takes before it is done.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from graphplan.device import unmetered
from graphplan.errors import NoGraphError
from graphplan.sizes import finite_bound, symbols_of

__all__ = ["Effect", "Interpreter", "OperationResult", "TensorMeta", "describe", "round_up"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor as the interpreter carries it.

    ``requires_grad`` matters even without autograd: ``matmul`` copies a strided input to fold its
    dimensions when the other side requires a gradient, and does not when it does not.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def copy_bytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize

    def copied(self) -> TensorMeta:
        """What ``.to()`` another device makes of it: dense, its dimensions in the same order.

        As torch's ``infer_dense_strides`` (``ExpandUtils.cpp``).
        """
        order = list(range(len(self.shape)))[::-1]
        for i in range(1, len(order)):
            at = i
            for j in range(i - 1, -1, -1):
                inner, outer = order[j], order[at]
                swap = self._belongs_outside(inner, outer)
                if swap > 0:
                    order[j], order[at] = outer, inner
                    at = j
                elif swap < 0:
                    break
        strides, step = [0] * len(order), 1
        for dimension in order:
            strides[dimension] = step
            step *= max(self.shape[dimension], 1)
        kept = self.stride if self._is_dense() else tuple(strides)
        return TensorMeta(self.shape, kept, self.dtype)

    def _belongs_outside(self, a: int, b: int) -> int:
        """1 if dimension ``a`` has the larger step of the two, -1 if ``b`` has, 0 if that is open."""
        if self.stride[a] == 0 or self.stride[b] == 0:
            return 0
        if self.stride[a] != self.stride[b]:
            return 1 if self.stride[a] > self.stride[b] else -1
        return 1 if self.shape[a] > self.shape[b] else 0

    def _is_dense(self) -> bool:
        """Whether its elements fill its storage without gap or overlap."""
        step = 1
        for stride, size in sorted((st, n) for st, n in zip(self.stride, self.shape, strict=True) if n != 1):
            if stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class OperationResult:
    """One tensor that an operation returned.

    ``argument`` is the index, among the operation's tensor arguments, of the one that it is a view
    of; ``sibling`` that of the earlier result whose storage it shares; -1 for neither.
    """

    tensor: TensorMeta
    nbytes: int
    argument: int = -1
    sibling: int = -1


@dataclass(frozen=True, slots=True)
class Effect:
    """What running one operation showed. ``results`` are a flat list; ``value`` the structure."""

    value: Any
    results: tuple[OperationResult, ...]
    flops: int
    workspace: Mapping[str, int]


class _Tracker(TorchDispatchMode):
    """Counts FLOPs, and the bytes that are alive beyond the arguments'."""

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.known = {storage._cdata for storage in known}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.higher_order.cond:
            _, true_branch, false_branch, operands = args
            with self:
                return [branch(*operands) for branch in (false_branch, true_branch)][1]
        if func is torch.ops.higher_order.while_loop:
            condition, body, carried, additional = args
            with self:  # the values of one round are alive while the next round's are made
                first = condition(*carried, *additional)
                once = body(*carried, *additional)
                second = condition(*once, *additional)
                twice = tuple(body(*once, *additional))
                del first, second
                return twice
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return out
        self.flops += _flops(func, args, kwargs or {}, out)
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.live:
                    self.live[storage._cdata] = (StorageWeakRef(storage), round_up(storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))
        return out


def round_up(nbytes: int) -> int:
    """Bytes as allocators hand them out: in steps of 512."""
    return -(-nbytes // 512) * 512


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    packet = getattr(func, "_overloadpacket", None)
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


class Interpreter:
    """Runs the graph on fake tensors, each distinct operation once."""

    def __init__(self, device_types: Sequence[str], sizes: Mapping[Any, int] | None = None) -> None:
        self.sizes = sizes or {}
        self.device_types = tuple(dict.fromkeys(("cpu", *device_types)))
        self.env: dict[fx.Node, Any] = {}
        self.memo: dict[Any, dict[str, Effect]] = {}

    def load(self, node: fx.Node, *, requires_grad: bool = False) -> None:
        """Take a placeholder's value from the trace."""
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
        """Run one node; its value is remembered for those that read it.

        Args:
            node: an operation.
            copied: whether it reads a copy of an argument that was moved to its device: a copy is
                dense, which may make another operation take another path.
            device_type: of its device: kernels differ in the strides of what they return.
        """

        def argument(source: fx.Node) -> Any:
            value = self.env[source]
            return value.copied() if isinstance(value, TensorMeta) and copied(source) else value

        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)), is_leaf=_is_tensor)
        # what the data decides differs between operations that look alike
        own = node if symbols_of(node) else None
        key = (node.target, spec, tuple(map(_hashable, leaves)), own)
        effects = self.memo.get(key)
        if effects is None:
            effects = self._measure(node, leaves, spec)
            self.memo[key] = effects
        effect = effects.get(device_type) or next(iter(effects.values()))
        self.env[node] = effect.value
        return effect

    def _measure(self, node: fx.Node, leaves: Sequence[Any], spec: pytree.TreeSpec) -> dict[str, Effect]:
        """For each type of device, what it showed; one entry where that does not depend on the device."""
        if not any(isinstance(leaf, TensorMeta) for leaf in leaves) and not _makes_tensor(node):
            return {"": self._compute_scalar(node, leaves, spec)}
        effects: dict[str, Effect] = {}
        workspace: dict[str, int] = {}
        for device_type in self.device_types:
            try:
                with _without_log():
                    run = _run_fake(node.target, leaves, spec, _fake_device(device_type))
            except Exception as error:  # a kernel without a fake may raise anything
                if not effects:
                    return {"": self._recorded(node, error)}
                continue  # Operation.workspace_on takes the largest that is known
            workspace[device_type] = run.workspace[""]
            if not effects or _shapes(run) == _shapes(next(iter(effects.values()))):
                effects[device_type] = run  # some fakes of recurrent layers have other shapes than the CPU's
        flops = next(iter(effects.values())).flops
        return {kind: Effect(run.value, run.results, flops, workspace) for kind, run in effects.items()}

    def _compute_scalar(self, node: fx.Node, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Effect:
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        if any(leaf is None for leaf in leaves) and not callable(node.target):
            return self._recorded(node, None)
        try:
            assert callable(node.target)
            value = node.target(*args, **kwargs)
        except (TypeError, RuntimeError, ZeroDivisionError, OverflowError) as error:
            return self._recorded(node, error)
        return Effect(value, (), 0, {})

    def _recorded(self, node: fx.Node, error: Exception | None) -> Effect:
        """What the trace itself recorded, for an operation that does not run on fake tensors."""
        if "val" not in node.meta:
            raise NoGraphError(f"{node.format_node()} cannot be run on fake tensors: {error}") from error
        value = describe(node.meta["val"], self.sizes)
        tensors = [leaf for leaf in pytree.tree_leaves(value, is_leaf=_is_tensor) if _is_tensor(leaf)]
        return Effect(value, tuple(OperationResult(t, t.copy_bytes) for t in tensors), 0, {"cpu": 0})


@contextmanager
def _without_log() -> Iterator[None]:
    """What fake tensors cannot run is dealt with here: its traceback is not for the user."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _shapes(effect: Effect) -> list[tuple[Any, ...]]:
    leaves = pytree.tree_leaves(effect.value, is_leaf=_is_tensor)
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, TensorMeta)]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, TensorMeta)


def _hashable(leaf: Any) -> Any:
    # True == 1 == 1.0, yet they are different arguments
    return leaf if isinstance(leaf, TensorMeta) else (type(leaf), leaf)


def _makes_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _fake_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    backend = getattr(torch, device_type, None)
    available = backend is not None and backend.is_available()
    return torch.device(device_type, 0) if available else torch.device("cpu")


def _size(size: Any, sizes: Mapping[Any, int]) -> int:
    """A size as the plan counts it: a dynamic one at its bound, as one that the data decides."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr.xreplace(sizes)
    if isinstance(expression, int) or expression.is_number:
        return int(expression)
    bound = finite_bound(size.node.shape_env.bound_sympy(expression).upper)
    if bound is None:
        warnings.warn(
            "a size that only the data decides has no upper bound: it counts as 1 in the plan, whose peaks "
            "may be passed",
            stacklevel=2,
        )
        return max(1, int(expression.subs(dict.fromkeys(expression.free_symbols, 1))))
    return bound


def describe(val: Any, sizes: Mapping[Any, int] | None = None) -> Any:
    """A traced value as the interpreter carries it; ``sizes`` are those of its symbols."""
    sizes = sizes or {}
    if isinstance(val, torch.Tensor):
        shape = tuple(_size(size, sizes) for size in val.shape)
        if val.layout is not torch.strided:
            return TensorMeta(shape, _contiguous(shape), val.dtype)
        return TensorMeta(shape, tuple(_size(step, sizes) for step in val.stride()), val.dtype)
    if isinstance(val, list | tuple):
        return [describe(item, sizes) for item in val]
    if isinstance(val, torch.SymInt):
        return _size(val, sizes)
    if isinstance(val, torch.SymFloat | torch.SymBool):
        return val.node.hint if val.node.hint is not None else 1.0
    return val


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _true_strides(target: Any, fakes: Sequence[Any], meta: TensorMeta) -> TensorMeta:
    """``meta`` with the strides that kernels give it, where torch's fakes keep the input's.

    BatchNorm's kernels write contiguous results, or channels-last ones for channels-last input.
    """
    if target is not aten.batch_norm.default or len(meta.shape) != fakes[0].dim():
        return meta
    if fakes[0].dim() == 4 and fakes[0].is_contiguous(memory_format=torch.channels_last):
        return meta
    return TensorMeta(meta.shape, _contiguous(meta.shape), meta.dtype, meta.requires_grad)


def _restrided(value: Any, results: Sequence[OperationResult]) -> Any:
    return results[0].tensor if isinstance(value, TensorMeta) and results else value


def _fake(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
    return made.requires_grad_() if meta.requires_grad else made


def _run_fake(target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, device: torch.device) -> Effect:
    # torch may touch the device itself when it first fakes a tensor there
    with unmetered(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [
            _fake(leaf, device)
            if isinstance(leaf, TensorMeta)
            else device
            if isinstance(leaf, torch.device)
            else leaf
            for leaf in leaves
        ]
        arguments = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
        storages = [fake.untyped_storage() for fake in arguments]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        with _Tracker(storages) as tracker:
            out = target(*args, **kwargs)
        owner = {storage._cdata: index for index, storage in enumerate(storages)}
        results: list[OperationResult] = []
        first: dict[int, int] = {}
        own = 0
        for leaf in pytree.tree_leaves(out):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            argument = owner.get(storage._cdata, -1)
            sibling = -1 if argument >= 0 else first.setdefault(storage._cdata, len(results))
            shared = sibling >= 0 and sibling != len(results)
            nbytes = 0 if argument >= 0 or shared else storage.nbytes()
            own += round_up(nbytes)
            meta = _true_strides(target, fakes, describe(leaf))
            results.append(OperationResult(meta, nbytes, argument, sibling if shared else -1))
        return Effect(
            _restrided(describe(out), results),
            tuple(results),
            tracker.flops,
            {"": max(0, tracker.peak - own)},
        )
