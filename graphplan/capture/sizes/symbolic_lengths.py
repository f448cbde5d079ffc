"""``len(x)`` of a tensor, in the code of a model, is ``x.shape[0]`` while the model is traced.

Python has ``len`` give an int, so a trace takes the first size, mostly the batch, for the one that the
example has. ``x.shape[0]`` may be a symbol::

    x.view(len(x), -1)      one graph for each batch
    here                    one for all, as of x.view(x.shape[0], -1)

The name is replaced in the modules that define the model's classes. What these call elsewhere has Python's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphplan.capture.thread_patches import Patch

_own = len


def symbolic_lengths(module: nn.Module) -> Iterator[Patch]:
    """What to replace while a model is traced."""
    for code in _globals_of(module):
        if "len" not in code:
            yield Patch(code, "len", _own, _length)


def _length(value: Any) -> Any:
    plain = isinstance(value, torch.Tensor) and type(value).__len__ is torch.Tensor.__len__
    return value.shape[0] if plain and value.dim() else _own(value)


def _globals_of(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The global variables of the code of each class of a model, but torch's own."""
    known = set[int]()
    for cls in dict.fromkeys(cls for part in module.modules() for cls in type(part).__mro__):
        for function in filter(inspect.isfunction, vars(cls).values()):
            code = inspect.unwrap(function).__globals__
            if id(code) not in known and code.get("__name__", "").partition(".")[0] != "torch":
                known.add(id(code))
                yield code
