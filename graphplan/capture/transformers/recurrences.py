"""Recurrences of transformers' layers as one operation each: a trace of their loop would fix the length.

Without their optional kernels, Mamba and RWKV layers loop over a text token by token, and those of
Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi-Linear and similar models by chunks of 64. Unrolled, a prompt of a
thousand tokens is thousands of operations per layer, and each length is another graph. Here the whole
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

from graphplan.capture.thread_patches import patched, unpatched

_SCAN = "mamba_selective_scan"
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_LINEAR = "rwkv_linear_attention"
_LOOPS = {_LINEAR: f"{_LINEAR}_cpu"}  # where the function itself only chooses between kernel and loop

_Find = Callable[[str, str], Callable[..., Any]]
"""(module, function name) -> function of transformers."""

_LIBRARY = torch.library.Library("graphplan", "FRAGMENT")
_LIBRARY.define(
    "selective_scan(str module, Tensor hidden_states, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, "
    "Tensor? z, Tensor? delta_bias, bool delta_softplus, bool use_mambapy) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "delta_rule(str module, str function, Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, "
    "Tensor? initial_state, int chunk_size, bool use_qk_l2norm_in_kernel) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "linear_attention(str module, Tensor time_decay, Tensor time_first, Tensor key, Tensor value, "
    "Tensor[] state) -> (Tensor, Tensor, Tensor, Tensor)"
)

selective_scan = torch.ops.graphplan.selective_scan.default
"""Returns outputs (batch, channels, length) and the last state (batch, channels, states)."""

delta_rule = torch.ops.graphplan.delta_rule.default
"""Returns outputs (batch, length, heads, value size) and last state (batch, heads, key size, value size)."""

linear_attention = torch.ops.graphplan.linear_attention.default
"""Returns outputs (batch, length, channels) and last numerators, denominators, maxima (batch, channels)."""


def _original(module: str, name: str) -> Callable[..., Any]:
    """Return transformers' function, even if it is patched for a trace."""
    function: Callable[..., Any] = unpatched(getattr(importlib.import_module(module), name))
    return function


def _in_torch(module: str, name: str) -> Callable[..., Any]:
    """Return the function's implementation in torch operations, whatever kernels are installed."""
    loop: Callable[..., Any] = inspect.unwrap(_original(module, _LOOPS.get(name, name)))
    return loop


def _scan(find: _Find, module: str, *args: Any) -> tuple[Any, ...]:
    hidden_states, dt, a, b, c, d, z, delta_bias, delta_softplus, use_mambapy = args
    options = {"D": d, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
    options |= {"return_last_state": True, "use_mambapy": use_mambapy}
    return tuple(find(module, _SCAN)(hidden_states, dt, a, b, c, **options))


def _apply_rule(find: _Find, module: str, *args: Any) -> tuple[Any, ...]:
    name, query, key, value, g, beta, initial_state, chunk_size, use_qk_l2norm_in_kernel = args
    options = {"chunk_size": chunk_size, "initial_state": initial_state, "output_final_state": True}
    options |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    return tuple(find(module, name)(query, key, value, g=g, beta=beta, **options))


def _attend(find: _Find, module: str, *args: Any) -> tuple[Any, ...]:
    *tensors, state = args
    outputs, last = find(module, _LINEAR)(*tensors, state=state or None, return_state=True)
    return outputs, *last


RECURRENCES = {selective_scan: _scan, delta_rule: _apply_rule, linear_attention: _attend}
"""Operation -> implementation."""

_TOKENS = {selective_scan: (1, 2), linear_attention: (3, 1)}
"""Token-by-token operation -> (index of the argument with the outputs' shape, its token dimension)."""


def run_in_torch(operation: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run an operation in torch operations, whatever kernels are installed, to measure it on fake tensors."""
    if operation is selective_scan:
        args = (*args[:-1], False)  # no mambapy, which does not support fake tensors
    return RECURRENCES[operation](_in_torch, *args)


def text_length(operation: Any, args: tuple[Any, ...]) -> int:
    """Return the number of tokens over which an operation loops; 0 if it loops over chunks."""
    if operation not in _TOKENS:
        return 0
    index, dimension = _TOKENS[operation]
    return int(args[index].shape[dimension])


def with_length(operation: Any, args: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Return the arguments for a text of another length, without data."""
    _, dimension = _TOKENS[operation]

    def short(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 3:
            return value
        shape = [length if index == dimension else size for index, size in enumerate(value.shape)]
        return value.new_empty(shape)

    return tuple(map(short, args))


def _shapes_by_token(operation: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    """Return the results without data: the shapes of one token, extended to the length of the text."""
    outputs, *last = run_in_torch(operation, with_length(operation, args, 1))
    index, _ = _TOKENS[operation]
    return outputs.new_empty(args[index].shape), *(tensor.new_empty(tensor.shape) for tensor in last)


def _shapes_of_rule(*args: Any) -> tuple[torch.Tensor, ...]:
    """Return both results without data; the state is float32 for all input dtypes."""
    query, key, value = args[2:5]
    batch, _, heads, size = value.shape
    state = value.new_empty((batch, heads, key.shape[-1], size), dtype=torch.float32)
    return value.new_empty(value.shape, dtype=query.dtype), state


for _operation, _run in RECURRENCES.items():
    _by_token = functools.partial(_shapes_by_token, _operation)
    _LIBRARY.impl(_operation, functools.partial(_run, _original), "CompositeExplicitAutograd")
    torch.library.register_fake(
        _operation, _by_token if _operation in _TOKENS else _shapes_of_rule, lib=_LIBRARY
    )


@contextmanager
def recurrences_as_operations(module: nn.Module) -> Iterator[None]:
    """Context manager that makes recurrences in a model's layers single operations, if grad is disabled."""
    homes = sorted({type(part).__module__ for part in module.modules()} & set(sys.modules))
    operations = (
        (sys.modules[home], name, functools.partial(_as_operation, home, name))
        for home in homes
        for name in _REPLACED
        if hasattr(sys.modules[home], name)
    )
    with patched(*operations):
        yield


def _as_operation(home: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inspect.unwrap(function))
    replacement = _REPLACED[name]

    @functools.wraps(function)
    def recurrence(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        # only the kernels support lengths of packed texts and the like
        has_lengths = any(isinstance(value, torch.Tensor) for value in arguments.get("kwargs", {}).values())
        if has_lengths or torch.is_grad_enabled():
            return function(*args, **kwargs)
        return replacement(home, arguments)

    return recurrence


def _scan_whole(home: str, arguments: dict[str, Any]) -> Any:
    tensors = [arguments[name] for name in ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias")]
    outputs, state = selective_scan(home, *tensors, arguments["delta_softplus"], arguments["use_mambapy"])
    return (outputs, state) if arguments["return_last_state"] else outputs


def _rule_whole(function: str, home: str, arguments: dict[str, Any]) -> Any:
    tensors = [arguments[name] for name in ("query", "key", "value", "g", "beta", "initial_state")]
    flags = arguments["chunk_size"], arguments["use_qk_l2norm_in_kernel"]
    outputs, state = delta_rule(home, function, *tensors, *flags)
    return outputs, state if arguments["output_final_state"] else None


def _attention_whole(home: str, arguments: dict[str, Any]) -> Any:
    tensors = [arguments[name] for name in ("time_decay", "time_first", "key", "value")]
    outputs, *state = linear_attention(home, *tensors, list(arguments["state"] or ()))
    return outputs, state if arguments["return_state"] or arguments["state"] is not None else None


_REPLACED: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    _SCAN: _scan_whole,
    **{name: functools.partial(_rule_whole, name) for name in _DELTA_RULES},
    _LINEAR: _attention_whole,
}
