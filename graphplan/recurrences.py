"""Recurrences of state-space models as one operation each: a trace of their loop would be of one length.

Mamba's layers go over a text token by token where its kernels are not installed. Unrolled, a prompt of a
thousand tokens is some thousand operations a layer, and one of another length another graph. Here the whole
recurrence is one operation, which runs transformers' own function::

    eager      for index in range(seq_len): ...
    exporter   the same, unrolled
    here       graphplan.selective_scan("transformers.models.mamba.modeling_mamba", hidden_states, dt, ...)
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["recurrences_whole", "run_in_torch", "selective_scan"]

_NAME = "mamba_selective_scan"
_OWN = "_graphplan_own"  # attribute of what stands for a function while it is traced: the function
_LIBRARY = torch.library.Library("graphplan", "FRAGMENT")
_LIBRARY.define(
    "selective_scan(str module, Tensor hidden_states, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? z, Tensor? delta_bias, bool delta_softplus, bool use_mambapy) -> (Tensor, Tensor)"
)
selective_scan = torch.ops.graphplan.selective_scan.default
"""Outputs (batch, channels, length), and the last state (batch, channels, states)."""


def _scan(
    module: str,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    delta_softplus: bool,
    use_mambapy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    function = getattr(importlib.import_module(module), _NAME)
    function = getattr(function, _OWN, function)  # another thread may run while one traces
    options = {"D": d, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
    options |= {"return_last_state": True, "use_mambapy": use_mambapy}
    found: tuple[torch.Tensor, torch.Tensor] = function(hidden_states, dt, a, b, c, **options)
    return found


def run_in_torch(module: str, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operation by torch's own operations, whatever kernels are installed: to be measured on fakes."""
    owner = importlib.import_module(module)
    own = getattr(owner, _NAME)
    setattr(owner, _NAME, inspect.unwrap(own))
    try:
        return _scan(module, *args[:9])  # not by mambapy, which knows no fakes
    finally:
        setattr(owner, _NAME, own)


def _shapes(
    module: str, hidden_states: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results without data: those of one token, as long as the text."""
    batch, channels, length = hidden_states.shape

    def short(tensor: Any) -> Any:
        whole = isinstance(tensor, torch.Tensor) and tensor.dim() == 3
        return tensor.new_empty((batch, tensor.shape[1], 1)) if whole else tensor

    outputs, state = run_in_torch(module, short(hidden_states), short(dt), a, *map(short, args))
    return outputs.new_empty((batch, channels, length)), state.new_empty(state.shape)


_LIBRARY.impl("selective_scan", _scan, "CompositeExplicitAutograd")
torch.library.register_fake("graphplan::selective_scan", _shapes, lib=_LIBRARY)


@contextmanager
def recurrences_whole(module: nn.Module) -> Iterator[None]:
    """Inside, the recurrences of a model's layers are one operation each, unless gradients are kept."""
    homes = {type(part).__module__ for part in module.modules()}
    found = {home: getattr(sys.modules.get(home), _NAME, None) for home in sorted(homes)}
    known = {home: function for home, function in found.items() if function is not None}
    if torch.is_grad_enabled():
        known = {}
    for home, function in known.items():
        setattr(sys.modules[home], _NAME, _as_operation(home, function))
    try:
        yield
    finally:
        for home, function in known.items():
            setattr(sys.modules[home], _NAME, function)


def _as_operation(home: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inspect.unwrap(function))

    @functools.wraps(function)
    def scan(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if any(value is not None for value in given.get("kwargs", {}).values()):
            return function(*args, **kwargs)
        tensors = [given[name] for name in ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias")]
        flags = given["delta_softplus"], given["use_mambapy"]
        outputs, state = selective_scan(home, *tensors, *flags)
        return (outputs, state) if given["return_last_state"] else outputs

    setattr(scan, _OWN, function)
    return scan
