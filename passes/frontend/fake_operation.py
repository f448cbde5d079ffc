"""One operation on fake tensors of one type of device: its results, its FLOPs, what it takes on the way."""

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
from graphplan.capture.transformers.recurrences import WHOLE, run_in_torch, shortened, text_length
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
"""Losses whose result has memory for the loss of each element, also where it is their sum or mean."""

_LENGTHS = (64, 128)
"""Tokens at which longer recurrences are run, each round of which takes and computes the same."""


_ROUNDS = 3
"""Rounds of a scan or map that are run: in the third, what the first two have returned is alive."""


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


def run_fake(
    target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, device: torch.device, mode: FakeTensorMode
) -> Effect:
    """Run an operation on fakes of its arguments.

    Args:
        target: the operation.
        leaves: its arguments, flat, tensors as :class:`~graphplan.passes.frontend.tensor_meta.TensorMeta`.
        spec: their structure.
        device: of the tensors, and what stands for each device among the arguments.
        mode: of the fakes; one for many operations, since making one takes longer than to run most.
    """
    # torch may touch the device itself when it first fakes a tensor there
    with unmetered(), mode, torch.no_grad():
        fakes = [stand_in(leaf, device) for leaf in leaves]
        arguments = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        mode.cache_enabled = bool(arguments)  # torch's forgets that a window is a part of a longer one
        # the kernels of the types that are not here are taken to be as the CPU's
        kernels = DispatchKey.PrivateUse1 if device.type == SIMULATED else DispatchKey.CPU
        with _Tracker(arguments, target, kernels) as tracker:
            # by what it runs, whose workspace is seen
            out = ATTENTION.get(target, target)(*args, **kwargs)
        if target in _BATCH_NORMS:
            out = _with_true_strides(out, args[_BATCH_NORMS[target]])
        returned = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        results = _results(returned, arguments)
        own = sum(round_up(result.nbytes) for result in results)
        workspace = {"": max(0, tracker.live.peak - own)}
        flops = flops_of(target, args, kwargs, out) if target in ATTENTION else tracker.flops
        return Effect(describe(out), tuple(results), flops, workspace)


def _results(returned: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]) -> list[OperationResult]:
    """What an operation returned, and whose storage each of it is."""
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
"""Each, and the position of its input."""


def _with_true_strides(out: Any, given: torch.Tensor) -> Any:
    """What a BatchNorm returned, with the strides that its kernels give it: fakes have an argument's.

    Kernels write contiguous results, or channels-last ones for channels-last input.
    """
    last = given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if last else torch.contiguous_format
    strides = torch.empty(given.shape, device="meta", memory_format=form).stride()
    return pytree.tree_map_only(
        torch.Tensor, lambda one: one.as_strided(one.shape, strides) if one.dim() == given.dim() else one, out
    )


class _Tracker(TorchDispatchMode):
    """Counts FLOPs, and the bytes that are alive beyond the arguments'."""

    supports_higher_order_operators = True

    def __init__(self, arguments: Sequence[torch.Tensor], target: Any, kernels: DispatchKey) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.live, self.target, self.kernels = LiveStorages(arguments), target, kernels
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.higher_order.cond:
            _, true_branch, false_branch, operands = args
            before = most = self.flops
            for branch in (false_branch, true_branch):  # one of which runs
                self.flops = before
                with self:
                    results = branch(*operands)
                most = max(most, self.flops)
            self.flops = most
            return results
        if func is torch.ops.higher_order.while_loop:
            condition, body, carried, additional = args
            with self:  # the values of one round are alive while the next round's are made
                first = condition(*carried, *additional)
                once = body(*carried, *additional)
                second = condition(*once, *additional)
                twice = tuple(body(*once, *additional))
                del first, second
                return twice
        if func is torch.ops.higher_order.map_impl:
            return self._map(func, *args)
        if func is torch.ops.higher_order.scan:
            return self._scan(func, *args)
        if func in WHOLE:  # what it is made of, so that its workspace and FLOPs are seen
            return self._recurrence(func, args)
        if func is aten.equal.default and self.target is aten.istft.default:
            return False  # it asks whether its window is too small
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        whole = func.has_kernel_for_dispatch_key(self.kernels)
        if not whole and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:  # in a branch or a round, operations arrive whole
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        if func is aten.view.default:
            return out.as_strided(out.shape, _viewed_strides(args[0], args[1]))
        if func in _ELEMENTWISE or func is aten.col2im.default:
            out = self._in_whole_storage(func, args, out)
        self.live.count(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out

    def _in_whole_storage(self, func: Any, args: tuple[Any, ...], out: torch.Tensor) -> Any:
        """A result whose memory is larger than what is in it: kernels make it smaller afterwards."""
        if func is aten.col2im.default:
            storage = args[0].new_empty(max(args[0].numel(), out.numel()))
        else:
            storage = out.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
            self.live.count([storage, torch.empty_like(storage)])  # the losses, before they are summed
        return storage.as_strided(out.shape, out.stride())

    def _map(self, operation: Any, function: Any, xs: Any, additional: Any) -> Any:
        """The last rounds, for which the rows of all others are kept; then all rows are copied together."""
        results = operation(function, xs, additional)
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        row = sum(round_up(tensor[0].nbytes) for tensor in tensors)
        length, before = xs[0].shape[0], self.flops
        few = min(length, _ROUNDS)
        rows = xs[0].new_empty((length - few) * row, dtype=torch.uint8)
        self.live.count([rows])
        with self:
            operation.py_kernels[DispatchKey.CompositeExplicitAutograd](
                function, [x[:few] for x in xs], additional
            )
        self.flops = before + (self.flops - before) * length // few
        self.live.count([*tensors, rows.new_empty(few * row)])
        return results

    def _scan(self, operation: Any, combine: Any, init: Any, xs: Any, additional: Any) -> tuple[Any, ...]:
        """A few rounds beside the whole results: all others take and compute the same."""
        rows = operation(combine, init, xs, additional)[len(init) :]
        self.live.count(row for row in rows if isinstance(row, torch.Tensor))
        length, before = xs[0].shape[0], self.flops
        few = min(length, _ROUNDS)
        with self:
            carried = run_scan(combine, init, [x[:few] for x in xs], additional_inputs=additional)[
                : len(init)
            ]
        self.flops = before + (self.flops - before) * length // few
        return (*carried, *rows)

    def _recurrence(self, operation: Any, args: tuple[Any, ...]) -> Any:
        """One of many rounds; where they are very many, as much as two shorter texts tell of it."""
        length = text_length(operation, args)
        if length <= sum(_LENGTHS):
            with self:
                return run_in_torch(operation, args)
        short, longer = (
            _tracked(operation, shortened(operation, args, tokens), self.kernels) for tokens in _LENGTHS
        )
        beyond = (length - _LENGTHS[1]) / (_LENGTHS[1] - _LENGTHS[0])
        peak, flops = (round(b + (b - a) * beyond) for a, b in zip(short, longer, strict=True))
        results = operation(*args)
        own = sum(round_up(result.untyped_storage().nbytes()) for result in results)
        workspace = results[0].new_empty(max(0, peak - own), dtype=torch.uint8)
        self.live.count([*results, workspace])
        self.flops += flops
        return results


def _viewed_strides(fake: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Those of torch's kernels: fakes have others in dimensions of size 1, which decide how a convolution
    lays its result out.
    """
    with untraced():
        return torch.empty_strided(fake.shape, fake.stride(), device="meta").view(shape).stride()


def _tracked(operation: Any, args: tuple[Any, ...], kernels: DispatchKey) -> tuple[int, int]:
    """The bytes that a recurrence takes beyond its arguments, and its FLOP."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    with _Tracker(tensors, operation, kernels) as tracker:
        run_in_torch(operation, args)
    return tracker.live.peak, tracker.flops
