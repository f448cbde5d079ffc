"""Notes: attributes that a library or a user has set on parameters, and the tensors in them.

So bitsandbytes stores the scales of 4-bit weights::

    weight.quant_state.absmax       a weight of the plan, on the device of its parameter
    weight.no_decay = True          a value that code may read
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isroutine
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

NOTES = "_graphplan_notes"
"""The attribute in which the tensor that replaces a parameter in a trace has the notes of the parameter."""


def notes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter that are not of its class: ``weight.no_decay = True``.

    A wrapper has none, unless a trace has stored them under ``NOTES``: its attributes are what it wraps.
    """
    own = getattr(type(parameter), "own", ())
    notes = vars(parameter) if is_own(parameter) else vars(parameter).get(NOTES, {})
    return {name: value for name, value in notes.items() if name not in own}


def noted_tensors(
    value: Any, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the tensors in the notes of a parameter: the name, the table of attributes, the key there.

    ``seen`` has the ids of the objects that were searched.
    """
    table, seen = vars(value), set() if seen is None else seen
    for key, one in (notes_of(value) if isinstance(value, torch.Tensor) else table).items():
        if isinstance(one, torch.Tensor):
            yield f"{name}{key}", table, key
        elif is_looked_into(one) and id(one) not in seen:
            seen.add(id(one))
            yield from noted_tensors(one, f"{name}{key}.", seen)


def is_looked_into(note: Any) -> bool:
    """Whether tensors in the attributes of a note count as weights."""
    is_code = isinstance(note, nn.Module | type | ModuleType) or isroutine(note)
    return hasattr(note, "__dict__") and not is_code


def is_own(tensor: torch.Tensor) -> bool:
    """Whether a tensor consists of its elements and notes alone, as bitsandbytes' parameters do."""
    kind = getattr(type(tensor), "stands_for", type(tensor))
    is_plain = issubclass(kind, nn.Parameter) and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return kind in (torch.Tensor, nn.Parameter) or (is_plain and not is_lazy(tensor))
