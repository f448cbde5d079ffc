"""What an optimizer keeps for each parameter, and takes for its step: measured in a dry step.

One parameter of each shape and dtype goes through two steps on the meta device. What the first leaves in
``state`` is kept; the most that lives in the second beyond that is what a step takes. Tensors of no
dimension, such as Adam's ``step``, are scalars on the CPU and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.errors import InputError, first_line
from graphplan.ir.liveness import LiveStorages

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""The class of an optimizer, or what makes one of parameters (``functools.partial(SGD, momentum=0.9)``)."""


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Bytes of one parameter's training.

    Attributes:
        state: of each tensor that the optimizer keeps.
        step: the most that it takes beyond these while it changes the parameter.
    """

    state: tuple[int, ...] = ()
    step: int = 0


def optimizer_memory(
    parameters: Mapping[str, torch.Tensor], optimizer: Optimizer | None, bytes_per_element: float | None
) -> dict[str, OptimizerMemory]:
    """Name of each parameter -> what the optimizer keeps and takes.

    Args:
        parameters: those that may be trained.
        optimizer: that will change them; None for none, or for what ``bytes_per_element`` says.
        bytes_per_element: bytes of state for each element, in one tensor, in place of a dry step.

    Raises:
        InputError: the optimizer cannot step on the meta device.
    """
    known: dict[tuple[torch.Size, torch.dtype], OptimizerMemory] = {}
    found = {}
    for name, tensor in parameters.items():
        kind = tensor.shape, tensor.dtype
        if kind not in known:
            known[kind] = _measure(*kind, optimizer, bytes_per_element)
        found[name] = known[kind]
    return found


def _measure(
    shape: torch.Size, dtype: torch.dtype, optimizer: Optimizer | None, bytes_per_element: float | None
) -> OptimizerMemory:
    if bytes_per_element is not None:
        nbytes = int(shape.numel() * bytes_per_element)
        return OptimizerMemory((nbytes,) if nbytes else ())
    if optimizer is None:
        return OptimizerMemory()
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    try:
        stepping = optimizer([parameter])
        stepping.step()
        kept = _tensors(stepping.state)
        with _Watch([parameter, parameter.grad, *kept]) as watch:
            stepping.step()
    except Exception as error:  # the optimizer's own code may raise anything
        raise InputError(
            f"optimizer={optimizer!r} does not step on the meta device ({first_line(error)}): give "
            "optimizer_bytes_per_element= instead, the bytes of its state for each element of a parameter"
        ) from error
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept if t.dim()}
    return OptimizerMemory(tuple(sizes.values()), watch.live.peak)


def _tensors(state: Any) -> list[torch.Tensor]:
    tables = [list(table.values()) for table in state.values()]
    return [leaf for leaf in pytree.tree_leaves(tables) if isinstance(leaf, torch.Tensor)]


class _Watch(TorchDispatchMode):
    """Counts the bytes that are alive beyond the known tensors'."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.live = LiveStorages(known)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(out)
        self.live.count(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
        return out
