"""Run one operation on fake tensors of one type of device: its results, FLOPs and workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import run_scan, storage_of
from graphplan._compat.traced_tensors import untraced
from graphplan.capture.attention import RUNS as ATTENTION
from graphplan.capture.transformers.recurrences import RECURRENCES, Recurrence
from graphplan.devices.machine import unmetered
from graphplan.devices.topology import SIMULATED, round_up
from graphplan.ir.liveness import LiveStorages
from graphplan.passes.frontend.flop_formulas import flops_of
from graphplan.passes.frontend.tensor_meta import TensorMeta, describe, stand_in

aten = torch.ops.aten

_ELEMENTWISE = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)
"""Losses whose result has storage for every element's loss, even if it is their sum or mean."""

_LENGTHS = (64, 128)
"""Tokens with which longer recurrences are run, to extrapolate: all rounds need and compute the same."""

_ROUNDS = 3
"""Rounds of a scan or map that are run: in the third, the results of the first two are alive."""


@dataclass(frozen=True, slots=True)
class OperationResult:
    """One tensor that an operation returned.

    ``argument`` is the index, among the operation's tensor arguments, of the one that it is a view of;
    ``sibling`` that of the earlier result whose storage it shares; -1 if there is none.
    """

    tensor: TensorMeta
    nbytes: int
    argument: int = -1
    sibling: int = -1


@dataclass(frozen=True, slots=True)
class Effect:
    """The observed effect of one operation. ``results`` are a flat list; ``value`` has the structure."""

    value: Any
    results: tuple[OperationResult, ...]
    flops: int
    workspace: Mapping[str, int]


def run_fake(
    target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, device: torch.device, mode: FakeTensorMode
) -> Effect:
    """Run an operation on fake tensors.

    Args:
        target: the operation.
        leaves: its arguments, flat, tensors as :class:`~graphplan.passes.frontend.tensor_meta.TensorMeta`.
        spec: their structure.
        device: device of the tensors; it replaces every device among the arguments.
        mode: fake mode, shared by many operations, since creating one takes longer than running most.
    """
    # torch may touch the device itself when it first fakes a tensor there
    with unmetered(), mode, torch.no_grad():
        fakes = [stand_in(leaf, device) for leaf in leaves]
        arguments = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        mode.cache_enabled = bool(arguments)  # torch's cache forgets that a window is part of a longer tensor
        # a type without a backend here is taken to have the CPU's kernels
        kernels = DispatchKey.PrivateUse1 if device.type == SIMULATED else DispatchKey.CPU
        with _Tracker(arguments, target, kernels) as tracker:
            # run attention by its implementation, whose workspace is visible
            out = ATTENTION.get(target, target)(*args, **kwargs)
        if target in _BATCH_NORMS:
            out = _with_true_strides(out, args[_BATCH_NORMS[target]])
        returned = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        results = _results(returned, arguments)
        result_bytes = sum(round_up(result.nbytes) for result in results)
        workspace = {"": max(0, tracker.live.peak - result_bytes)}
        flops = flops_of(target, args, kwargs, out) if target in ATTENTION else tracker.flops
        return Effect(describe(out), tuple(results), flops, workspace)


def _results(returned: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[OperationResult]:
    """Return the results of an operation, and whose storage each has."""
    owner = {storage_of(tensor): index for index, tensor in enumerate(arguments)}
    first: dict[int, int] = {}
    results: list[OperationResult] = []
    for tensor in returned:
        key = storage_of(tensor)
        argument = owner.get(key, -1)
        sibling = -1 if argument >= 0 else first.setdefault(key, len(results))
        shared = sibling >= 0 and sibling != len(results)
        nbytes = 0 if argument >= 0 or shared else tensor.untyped_storage().nbytes()
        results.append(OperationResult(describe(tensor), nbytes, argument, sibling if shared else -1))
    return results


_BATCH_NORMS: dict[Any, int] = {
    aten.batch_norm.default: 0,
    aten.native_batch_norm.default: 0,
    aten.native_batch_norm_backward.default: 1,
}
"""Batch norm -> position of its input among the arguments."""


def _with_true_strides(out: Any, x: torch.Tensor) -> Any:
    """Return a BatchNorm's results with the strides of its kernels; fakes have those of an argument.

    Kernels write contiguous results, or channels-last ones for channels-last input.
    """
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    strides = torch.empty(x.shape, device="meta", memory_format=memory_format).stride()
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.as_strided(t.shape, strides) if t.dim() == x.dim() else t, out
    )


class _Tracker(TorchDispatchMode):
    """Counts FLOPs, and the bytes alive beyond the arguments."""

    supports_higher_order_operators = True

    def __init__(self, arguments: Sequence[torch.Tensor], target: Any, kernels: DispatchKey) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.live, self.target, self.kernels = LiveStorages(arguments), target, kernels
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.higher_order.cond:
            return self._cond(*args)
        if func is torch.ops.higher_order.while_loop:
            return self._while_loop(*args)
        if func is torch.ops.higher_order.map_impl:
            return self._map(func, *args)
        if func is torch.ops.higher_order.scan:
            return self._scan(func, *args)
        if func in RECURRENCES.values():  # run step by step, to see workspace and FLOPs
            return self._recurrence(func, args)
        if func is aten.equal.default and self.target is aten.istft.default:
            return False  # istft's check of its window's values, which a fake lacks
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        whole = func.has_kernel_for_dispatch_key(self.kernels)
        if not whole and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:  # in control flow, operations arrive undecomposed
                return func.decompose(*args, **(kwargs or {}))
        run = _gru_cell if func is aten._thnn_fused_gru_cell.default else func
        out = run(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        if func is aten.view.default:
            return out.as_strided(out.shape, _viewed_strides(args[0], args[1]))
        if func in _ELEMENTWISE or func is aten.col2im.default:
            out = self._in_whole_storage(func, args, out)
        self.live.count(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out

    def _in_whole_storage(self, func: Any, args: tuple[Any, ...], out: torch.Tensor) -> Any:
        """Return a result in the larger storage that its kernel allocates first, and narrows afterwards."""
        if func is aten.col2im.default:
            storage = args[0].new_empty(max(args[0].numel(), out.numel()))
        else:
            storage = out.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
            self.live.count([storage, torch.empty_like(storage)])  # the losses, before they are summed
        return storage.as_strided(out.shape, out.stride())

    def _cond(self, _condition: Any, true_branch: Any, false_branch: Any, operands: Any) -> Any:
        """Run both branches, and count the FLOPs of the one that has more: only one runs."""
        initial = largest = self.flops
        for branch in (false_branch, true_branch):
            self.flops = initial
            with self:
                results = branch(*operands)
            largest = max(largest, self.flops)
        self.flops = largest
        return results

    def _while_loop(self, condition: Any, body: Any, carried: Any, additional: Any) -> tuple[Any, ...]:
        """Run two rounds: the values of one are alive while the next round's are made."""
        with self:
            first = condition(*carried, *additional)
            once = body(*carried, *additional)
            second = condition(*once, *additional)
            twice = tuple(body(*once, *additional))
            del first, second
            return twice

    def _map(self, operation: Any, function: Any, xs: Any, additional: Any) -> Any:
        """Run the last rounds, in which the rows of all others are alive; then copy all rows together."""
        results = operation(function, xs, additional)
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        row = sum(round_up(tensor[0].nbytes) for tensor in tensors)
        length, earlier = xs[0].shape[0], self.flops
        rounds = min(length, _ROUNDS)
        rows = xs[0].new_empty((length - rounds) * row, dtype=torch.uint8)
        self.live.count([rows])
        with self:
            operation.py_kernels[DispatchKey.CompositeExplicitAutograd](
                function, [x[:rounds] for x in xs], additional
            )
        self.flops = earlier + (self.flops - earlier) * length // rounds
        self.live.count([*tensors, rows.new_empty(rounds * row)])
        return results

    def _scan(self, operation: Any, combine: Any, init: Any, xs: Any, additional: Any) -> tuple[Any, ...]:
        """Run a few rounds with the whole results alive: all others need and compute the same."""
        rows = operation(combine, init, xs, additional)[len(init) :]
        self.live.count(row for row in rows if isinstance(row, torch.Tensor))
        length, earlier = xs[0].shape[0], self.flops
        rounds = min(length, _ROUNDS)
        with self:
            carried = run_scan(combine, init, [x[:rounds] for x in xs], additional_inputs=additional)[
                : len(init)
            ]
        self.flops = earlier + (self.flops - earlier) * length // rounds
        return (*carried, *rows)

    def _recurrence(self, operation: Any, args: tuple[Any, ...]) -> Any:
        """Run a recurrence round by round; a long text is extrapolated from two shorter ones."""
        recurrence = Recurrence.of(operation, args)
        if recurrence.rounds <= sum(_LENGTHS):
            with self:
                return recurrence.run_in_torch()
        short, longer = (self._tracked(recurrence.with_length(tokens)) for tokens in _LENGTHS)
        factor = (recurrence.rounds - _LENGTHS[1]) / (_LENGTHS[1] - _LENGTHS[0])
        peak, flops = (round(b + (b - a) * factor) for a, b in zip(short, longer, strict=True))
        results = operation(*args)
        result_bytes = sum(round_up(result.untyped_storage().nbytes()) for result in results)
        workspace = results[0].new_empty(max(0, peak - result_bytes), dtype=torch.uint8)
        self.live.count([*results, workspace])
        self.flops += flops
        return results

    def _tracked(self, recurrence: Recurrence) -> tuple[int, int]:
        """Return the bytes that a recurrence needs beyond its arguments, and its FLOPs."""
        _, tensors, _ = recurrence.operands()
        with _Tracker(tensors, self.target, self.kernels) as tracker:
            recurrence.run_in_torch()
        return tracker.live.peak, tracker.flops


def _gru_cell(_input_gates: Any, _hidden_gates: Any, hidden: torch.Tensor, *_biases: Any) -> Any:
    """Return fakes of the new state of a GRU's fused cell and of its gates, as torch has none."""
    rows, width = hidden.shape
    return torch.empty_like(hidden), hidden.new_empty(rows, 5 * width)


def _viewed_strides(fake: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of torch's kernels; those of fakes differ in dimensions of size 1.

    They decide how a convolution lays out its result.
    """
    with untraced():
        return torch.empty_strided(fake.shape, fake.stride(), device="meta").view(shape).stride()
