"""Compare the results of a placed model with those of eager mode, for ``check=True``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphplan.capture.eager_run import random_state_restored, tensors_restored
from graphplan.capture.model.shared_attributes import copy_to_run
from graphplan.capture.model_methods import method_of
from graphplan.capture.signature import BoundCall
from graphplan.capture.structure import flatten_with_path, map_leaves, register_containers
from graphplan.errors import NoGraphError
from graphplan.runtime.fallback.hooked_run import rolled_back
from graphplan.runtime.fallback.module_by_module import copied_arguments
from graphplan.runtime.module.placed_view import PlacedView
from graphplan.warnings import warn

_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def _eager_result(model: nn.Module, call: BoundCall, *, keep_grad: bool) -> Any:
    """Return the result of a call in eager mode, run on copies of whatever it may write to."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    shell = copy_to_run(model, memo)
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))

    def to_device(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    with torch.set_grad_enabled(keep_grad), tensors_restored(model):
        args, kwargs = map_leaves(to_device, copied_arguments(call))
        return method_of(shell, call.entry)(*args, **kwargs)


def require_equal(model: nn.Module, placed: nn.Module, call: BoundCall) -> None:
    """Raise NoGraphError if a placed model and eager mode differ on the example inputs.

    Warn instead if the model has no data, or if two eager runs differ.
    """
    if any(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers())):
        warn("check: the model has no weights of its own to compare with")
        return
    with random_state_restored(model), rolled_back(placed):
        keep_grad = vars(placed)["_graphplan"].keep_grad
        eager = [_eager_result(model, call, keep_grad=keep_grad) for _ in range(2)]
        if compare(*eager) is not None:
            warn("check: results of eager mode differ from call to call, so nothing can be compared")
            return
        args, kwargs = copied_arguments(call)
        diff = compare(method_of(placed, call.entry)(*args, **kwargs), eager[0])
    if diff is not None:
        what = "graph" if PlacedView(placed).graph_modules else "module-by-module run"
        raise NoGraphError(f"the {what} of {type(model).__name__} differs on the example inputs: {diff}")


def compare(ours: Any, eager: Any) -> str | None:
    """Describe the first tensor that differs by more than rounding; return None if none does."""
    left, right = dict(_named_tensors(ours)), dict(_named_tensors(eager))
    if left.keys() != right.keys():
        return f"the result has {sorted(left)}, eager's has {sorted(right)}"
    for name, expected in right.items():
        actual, expected = left[name].detach().cpu(), expected.detach().cpu()
        try:
            torch.testing.assert_close(
                actual, expected, rtol=0, atol=_rounding(expected), equal_nan=True, check_stride=False
            )
        except AssertionError as error:
            return f"{name or 'the result'} differs from eager's: {' '.join(str(error).split())}"
    return None


def _rounding(tensor: torch.Tensor) -> float:
    """Return the allowed absolute difference: a share of the largest finite absolute value."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = tensor[tensor.isfinite()].abs()
    return _TOLERANCE.get(tensor.dtype, 1e-1) * max(1e-3, float(finite.max()) if finite.numel() else 0.0)


def _named_tensors(tree: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        return [("", tree)]
    if hasattr(tree, "items"):
        return [(f"{k}{n}", t) for k, value in tree.items() for n, t in _named_tensors(value)]
    items: list[tuple[str, Any]]
    if isinstance(tree, list | tuple):
        items = [(f"[{i}]", part) for i, part in enumerate(tree)]
    else:
        register_containers(tree)
        items = [(pytree.keystr(path), part) for path, part in flatten_with_path(tree) if path]
    return [(f"{name}{n}", t) for name, part in items for n, t in _named_tensors(part)]
