"""Recurrences of transformers' layers as one operation each: a trace of their loop would fix the length.

Without their optional kernels, Mamba and RWKV layers loop over a text token by token, and those of
Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi-Linear and similar models by chunks of 64. Unrolled, a prompt of a
thousand tokens is thousands of operations per layer, and each length is another graph. Here the whole
recurrence is one operation, which runs transformers' own function::

    eager      for index in range(seq_len): ...
    exporter   the same, unrolled
    here       graphplan.mamba_selective_scan("transformers.models.mamba.modeling_mamba", [x, dt, ...],
                                              '{"hidden_states": {"tensor": 0}, "dt": {"tensor": 1}, ...}')
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphplan.capture.structure import leaves_of
from graphplan.capture.thread_patches import patched, unpatched

_DELTA_RULE = 1, ("value", "query", "key", "g", "beta")
_TEXTS = {
    "mamba_selective_scan": (2, ("hidden_states", "dt", "B", "C", "z")),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "rwkv_linear_attention": (1, ("value", "key")),
}
"""Function -> dimension of the tokens, and the arguments that have it; outputs are shaped as the first."""

_RESULTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_TEXTS, lambda outputs, *state: (outputs, *(state or [None]))),
    "mamba_selective_scan": lambda outputs, *state: (outputs, *state) if state else outputs,
    "rwkv_linear_attention": lambda outputs, *state: (outputs, list(state) or None),
}
"""Function -> its result, made of the tensors in it: the outputs, and the last state if it was asked for."""

_LOOPS = {"rwkv_linear_attention": "rwkv_linear_attention_cpu"}
"""Function that only chooses between a kernel and a loop -> the loop."""

_CHUNK = "chunk_size"
"""The argument of functions that loop over chunks."""

_LIBRARY = torch.library.Library("graphplan", "FRAGMENT")


def _original(module: str, name: str) -> Callable[..., Any]:
    """Return transformers' function, even if it is patched for a trace."""
    function: Callable[..., Any] = unpatched(getattr(importlib.import_module(module), name))
    return function


def _tensors_in(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A call of a function that loops over a text.

    Attributes:
        name: the name of the function.
        module: the name of its module.
        arguments: its arguments by name.
    """

    name: str
    module: str
    arguments: dict[str, Any]

    @classmethod
    def of(cls, operation: Any, args: Sequence[Any]) -> Recurrence:
        """Return the call that an operation makes."""
        module, tensors, text = args

        def referred(part: dict[str, Any]) -> Any:
            return tensors[part["tensor"]] if "tensor" in part else part

        arguments = json.loads(text, object_hook=referred)
        return cls(operation._schema.name.partition("::")[2], module, arguments)

    def operands(self) -> tuple[str, list[torch.Tensor], str]:
        """Return the arguments of the operation that makes the call."""
        tensors: list[torch.Tensor] = []

        def reference(tensor: torch.Tensor) -> dict[str, int]:
            tensors.append(tensor)
            return {"tensor": len(tensors) - 1}

        return self.module, tensors, json.dumps(self.arguments, default=reference)

    @property
    def length(self) -> Any:
        """The number of tokens."""
        dimension, (first, *_) = _TEXTS[self.name]
        return self.arguments[first].shape[dimension]

    @property
    def rounds(self) -> int:
        """The number of tokens, if it loops over tokens; 0 if it loops over chunks."""
        return 0 if _CHUNK in self.arguments else int(self.length)

    def with_length(self, length: int) -> Recurrence:
        """Return the call for a text of another length, without data; one token is a chunk."""
        dimension, names = _TEXTS[self.name]
        tensors = {name: self.arguments[name] for name in names if self.arguments[name] is not None}
        resized = {name: _resized(tensor, dimension, length) for name, tensor in tensors.items()}
        chunk = {_CHUNK: 1} if _CHUNK in self.arguments and length == 1 else {}
        return replace(self, arguments=self.arguments | resized | chunk)

    def run(self) -> list[torch.Tensor]:
        """Run transformers' function, and return the tensors in its result."""
        return _tensors_in(_original(self.module, self.name)(**self.arguments))

    def run_in_torch(self) -> list[torch.Tensor]:
        """Run it in torch operations, whatever kernels are installed, to measure it on fake tensors."""
        loop = inspect.unwrap(_original(self.module, _LOOPS.get(self.name, self.name)))
        no_kernel = {"use_mambapy": False} if "use_mambapy" in self.arguments else {}
        return _tensors_in(loop(**{**self.arguments, **no_kernel}))

    def shapes(self) -> list[torch.Tensor]:
        """Return the results without data: those for one token, with the outputs as long as the text."""
        outputs, *states = self.with_length(1).run_in_torch()
        outputs = _resized(outputs, _TEXTS[self.name][0], self.length)
        return [outputs, *(state.new_empty(state.shape) for state in states)]


def _resized(tensor: torch.Tensor, dimension: int, length: Any) -> torch.Tensor:
    return tensor.new_empty((*tensor.shape[:dimension], length, *tensor.shape[dimension + 1 :]))


def _defined(name: str) -> Any:
    """Define the operation that calls a function."""
    _LIBRARY.define(f"{name}(str module, Tensor[] tensors, str arguments) -> Tensor[]")
    operation = getattr(torch.ops.graphplan, name).default
    _LIBRARY.impl(operation, lambda *args: Recurrence.of(operation, args).run(), "CompositeExplicitAutograd")
    torch.library.register_fake(
        operation, lambda *args: Recurrence.of(operation, args).shapes(), lib=_LIBRARY
    )
    return operation


RECURRENCES = {name: _defined(name) for name in _TEXTS}
"""Function -> the operation that calls it."""


@contextmanager
def recurrences_as_operations(module: nn.Module) -> Iterator[None]:
    """Context manager that makes recurrences in a model's layers single operations, if grad is disabled."""
    homes = sorted({type(part).__module__ for part in module.modules()} & set(sys.modules))
    operations = (
        (sys.modules[home], name, functools.partial(_as_operation, home, name))
        for home in homes
        for name in _TEXTS
        if hasattr(sys.modules[home], name)
    )
    with patched(*operations):
        yield


def _as_operation(home: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(inspect.unwrap(function))
    result_of = _RESULTS[name]

    @functools.wraps(function)
    def recurrence(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        others = bound.arguments.pop("kwargs", {})
        # only the kernels support lengths of packed texts and the like
        if torch.is_grad_enabled() or any(isinstance(value, torch.Tensor) for value in others.values()):
            return function(*args, **kwargs)
        return result_of(*RECURRENCES[name](*Recurrence(name, home, bound.arguments).operands()))

    return recurrence
