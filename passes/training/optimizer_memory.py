"""An optimizer's state, workspace and memory traffic for each parameter, measured in a dry step.

Two parameters of each shape and dtype go through two steps on the meta device: two, since a loop over
parameters still holds the temporaries of the one before. After the first step, ``state`` is the optimizer's
state; the peak beyond it in the second is the workspace of a step. If a third parameter raises that peak, all
parameters are updated at once. Tensors on the CPU, such as Adam's ``step``, are scalars and not counted.
Floating-point numbers that a step reads from tensors, as Adafactor does, are 1: they scale values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan._compat.torch import storage_of
from graphplan.errors import InputError
from graphplan.ir.liveness import LiveBytes
from graphplan.message_text import first_line

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""The class of an optimizer, or a function from parameters (``functools.partial(SGD, momentum=0.9)``)."""


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Bytes that an optimizer keeps and moves for one parameter.

    Attributes:
        state: bytes of each tensor of optimizer state.
        step: peak bytes beyond the state while parameters of this size are updated one by one.
        together: this parameter's part of the peak if all are updated at once (``foreach=True``, torch's
            default on GPUs); 0 if the optimizer never does so.
        traffic: bytes read and written in a step, summed over its operations.
    """

    state: tuple[int, ...] = ()
    step: int = 0
    together: int = 0
    traffic: int = 0


def optimizer_memory(
    parameters: Mapping[str, torch.Tensor], optimizer: Optimizer | None, bytes_per_element: float | None
) -> dict[str, OptimizerMemory]:
    """Return name of each parameter -> its optimizer memory.

    Args:
        parameters: the trainable parameters.
        optimizer: the optimizer that will update them; None for none, or if ``bytes_per_element`` is given.
        bytes_per_element: bytes of state for each element, in one tensor, in place of a dry step.

    Raises:
        InputError: the optimizer cannot step on the meta device.
    """
    measured: dict[tuple[torch.Size, torch.dtype], OptimizerMemory] = {}
    by_name = {}
    for name, tensor in parameters.items():
        key = tensor.shape, tensor.dtype
        if key not in measured:
            measured[key] = _measure(*key, optimizer, bytes_per_element)
        by_name[name] = measured[key]
    return by_name


def _measure(
    shape: torch.Size, dtype: torch.dtype, optimizer: Optimizer | None, bytes_per_element: float | None
) -> OptimizerMemory:
    if bytes_per_element is not None:
        nbytes = int(shape.numel() * bytes_per_element)
        traffic = 2 * nbytes + 3 * shape.numel() * dtype.itemsize  # at least; the gradient is only read
        return OptimizerMemory((nbytes,) if nbytes else (), traffic=traffic)
    if optimizer is None:
        return OptimizerMemory()
    try:
        state, step, traffic = _dry_steps(2, shape, dtype, optimizer, foreach=False)
        two, three = (_dry_steps(count, shape, dtype, optimizer, foreach=True)[1] for count in (2, 3))
    except Exception as error:  # the optimizer's own code may raise anything
        raise InputError(
            f"optimizer={optimizer!r} does not step on the meta device ({first_line(error)}): give "
            "optimizer_bytes_per_element= instead, the bytes of its state for each element of a parameter"
        ) from error
    return OptimizerMemory(state, step, two // 2 if three > two else 0, traffic // 2)


def _dry_steps(
    count: int, shape: torch.Size, dtype: torch.dtype, optimizer: Optimizer, *, foreach: bool
) -> tuple[tuple[int, ...], int, int]:
    """Return bytes of a parameter's state, the peak beyond state in step two of ``count``, and traffic."""
    parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    stepping = optimizer(parameters)
    fused = [group for group in stepping.param_groups if group.get("fused")]
    for group in stepping.param_groups:
        if group in fused:  # meta tensors have no fused kernel; others need more
            group["fused"] = False
        elif group.get("foreach", False) is not False:  # the caller's own False stays
            group["foreach"] = foreach
    with _NumbersAreOnes():  # type: ignore[no-untyped-call]  # torch's
        stepping.step()
        state = _tensors(stepping.state.values())
        counted = [*parameters, *(p.grad for p in parameters if p.grad is not None), *state]
        with LiveBytes(counted, _counts) as watch, _Traffic() as traffic:  # type: ignore[no-untyped-call]  # torch's
            stepping.step()
    # a fused optimizer keeps its scalars on the parameter's device, too
    first_state = [t for t in _tensors([stepping.state[parameters[0]]]) if fused or _counts(t)]
    sizes = {storage_of(t): t.untyped_storage().nbytes() for t in first_state}
    if fused:  # all are read and written once; gradients are only read
        traffic.nbytes = sum(2 * t.nbytes for t in counted) - sum(p.nbytes for p in parameters)
    return tuple(sizes.values()), watch.live.peak, traffic.nbytes


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write; views do neither."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.nbytes += sum(
                leaf.nbytes for leaf in filter(_counts, pytree.tree_leaves((args, kwargs, out)))
            )
        return out


class _NumbersAreOnes(TorchDispatchMode):
    """Lets floating-point numbers read from meta tensors be 1; other reads raise."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        read = func is torch.ops.aten._local_scalar_dense.default and _counts(args[0])
        if read and args[0].dtype.is_floating_point:  # a bool may decide whether to step at all
            return 1.0
        return func(*args, **(kwargs or {}))


def _tensors(states: Iterable[Any]) -> list[torch.Tensor]:
    tables = [list(state.values()) for state in states]
    return [leaf for leaf in pytree.tree_leaves(tables) if isinstance(leaf, torch.Tensor)]


def _counts(leaf: Any) -> bool:
    """Whether a value is a tensor on the parameter's device."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "meta"
