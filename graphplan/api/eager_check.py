"""Whether a placed model and eager agree: what ``check=True`` compares."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphplan.capture.eager_run import undrawn, unwritten
from graphplan.capture.model.shared_attributes import copy_to_run
from graphplan.capture.model_methods import method_of
from graphplan.capture.signature import BoundCall
from graphplan.capture.structure import flatten_with_path, know_containers, map_leaves
from graphplan.errors import NoGraphError
from graphplan.runtime.fallback.hooked_run import undone
from graphplan.runtime.fallback.module_by_module import copied_arguments
from graphplan.runtime.module.placed_view import PlacedView
from graphplan.warnings import warn

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def _eager_result(model: nn.Module, entry: str, call: BoundCall, *, keep_grad: bool) -> Any:
    """What the model itself, or an entry of it, returns; what it writes to are copies, inputs too."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    runs = copy_to_run(model, memo)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))

    def here(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    with torch.set_grad_enabled(keep_grad), unwritten(model):
        args, kwargs = map_leaves(here, copied_arguments(call))
        return method_of(runs, entry)(*args, **kwargs)


def require_equal(model: nn.Module, placed: nn.Module, call: BoundCall, entry: str) -> None:
    """Raise NoGraphError where a placed model and eager do not agree on the example inputs."""
    if any(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers())):
        warn("check: the model has no weights of its own to compare with")
        return
    with undrawn(model), undone(placed):
        keep_grad = vars(placed)["_graphplan"].keep_grad
        eager = [_eager_result(model, entry, call, keep_grad=keep_grad) for _ in range(2)]
        if compare(*eager) is not None:
            warn("check: eager differs from call to call, so nothing can be compared")
            return
        args, kwargs = copied_arguments(call)
        apart = compare(method_of(placed, entry)(*args, **kwargs), eager[0])
    if apart is not None:
        what = "graph" if PlacedView(placed).graph_modules else "model that hooks run"
        raise NoGraphError(f"the {what} of {type(model).__name__} differs on the example inputs: {apart}")


def compare(ours: Any, eager: Any) -> str | None:
    """The first tensor that differs by more than rounding does, and how; None where none does."""
    left, right = dict(_named_tensors(ours)), dict(_named_tensors(eager))
    if left.keys() != right.keys():
        return f"the result has {sorted(left)}, eager's has {sorted(right)}"
    for name, want in right.items():
        found, want = left[name].detach().cpu(), want.detach().cpu()
        try:
            torch.testing.assert_close(
                found, want, rtol=0, atol=_rounding(want), equal_nan=True, check_stride=False
            )
        except AssertionError as error:
            return f"{name or 'the result'} differs from eager's: {' '.join(str(error).split())}"
    return None


def _rounding(tensor: torch.Tensor) -> float:
    """By how much values may differ from these: a share of the largest."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = tensor[tensor.isfinite()].abs()
    return _TOLERANCE.get(tensor.dtype, 1e-1) * max(1e-3, float(finite.max()) if finite.numel() else 0.0)


def _named_tensors(tree: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [("", tree)]
    if hasattr(tree, "items"):
        return [(f"{k}{n}", t) for k, value in tree.items() for n, t in _named_tensors(value)]
    inside: list[tuple[str, Any]]
    if isinstance(tree, list | tuple):
        inside = [(f"[{i}]", part) for i, part in enumerate(tree)]
    else:
        know_containers(tree)
        inside = [(pytree.keystr(path), part) for path, part in flatten_with_path(tree) if path]
    return [(f"{name}{n}", t) for name, part in inside for n, t in _named_tensors(part)]
