"""What is noted on parameters: attributes that a library or a user has given them, and tensors in these.

As bitsandbytes keeps the scales of 4-bit weights::

    weight.quant_state.absmax       a weight of the plan, which goes where its parameter goes
    weight.no_decay = True          what code may read
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
"""The attribute, of what torch puts in the place of a parameter for a trace, with what is noted on that."""


def notes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes of a parameter that are not of its class: ``weight.no_decay = True``.

    Those of a wrapper are what it wraps.
    """
    own = getattr(type(parameter), "own", ())
    noted = vars(parameter) if is_own(parameter) else vars(parameter).get(NOTES, {})
    return {name: value for name, value in noted.items() if name not in own}


def noted_tensors(
    value: Any, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The tensors that attributes of a parameter lead to: the name, the table of attributes, the key there.

    ``seen`` has the ids of the objects that were looked into, each once.
    """
    table, seen = vars(value), set() if seen is None else seen
    for key, one in (notes_of(value) if isinstance(value, torch.Tensor) else table).items():
        if isinstance(one, torch.Tensor):
            yield f"{name}{key}", table, key
        elif is_looked_into(one) and id(one) not in seen:
            seen.add(id(one))
            yield from noted_tensors(one, f"{name}{key}.", seen)


def is_looked_into(note: Any) -> bool:
    """Whether tensors in the attributes of an object, which is noted on a parameter, are weights."""
    is_code = isinstance(note, nn.Module | type | ModuleType) or isroutine(note)
    return hasattr(note, "__dict__") and not is_code


def is_own(tensor: torch.Tensor) -> bool:
    """Whether its elements, and what is noted on it, are all that it is, as of bitsandbytes' parameters."""
    kind = getattr(type(tensor), "stands_for", type(tensor))
    noted = issubclass(kind, nn.Parameter) and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return kind in (torch.Tensor, nn.Parameter) or (noted and not is_lazy(tensor))
