"""Custom attributes of parameters, set by a library or a user, and the tensors in them.

For example, bitsandbytes stores the scales of 4-bit weights::

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

TRACED_ATTRIBUTES = "_graphplan_attributes"
"""The attribute of a tensor that replaces a parameter in a trace: the parameter's custom attributes."""


def custom_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a parameter that its class does not define: ``weight.no_decay = True``.

    A wrapper has none, unless a trace has stored them in ``TRACED_ATTRIBUTES``: its attributes are its inner
    tensors.
    """
    own_names = getattr(type(parameter), "own", ())
    attributes = vars(parameter) if is_own(parameter) else vars(parameter).get(TRACED_ATTRIBUTES, {})
    return {name: value for name, value in attributes.items() if name not in own_names}


def attribute_tensors(
    value: Any, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (name, table of attributes, key in the table) of each tensor in the attributes of a parameter.

    ``seen`` has the ids of the objects that were searched.
    """
    table, seen = vars(value), set() if seen is None else seen
    for key, one in (custom_attributes(value) if isinstance(value, torch.Tensor) else table).items():
        if isinstance(one, torch.Tensor):
            yield f"{name}{key}", table, key
        elif may_hold_tensors(one) and id(one) not in seen:
            seen.add(id(one))
            yield from attribute_tensors(one, f"{name}{key}.", seen)


def may_hold_tensors(value: Any) -> bool:
    """Whether tensors in this value of an attribute of a parameter count as weights."""
    is_code = isinstance(value, nn.Module | type | ModuleType) or isroutine(value)
    return hasattr(value, "__dict__") and not is_code


def is_own(tensor: torch.Tensor) -> bool:
    """Whether a tensor has only elements and custom attributes, as bitsandbytes' parameters have."""
    kind = getattr(type(tensor), "stands_for", type(tensor))
    is_plain = issubclass(kind, nn.Parameter) and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return kind in (torch.Tensor, nn.Parameter) or (is_plain and not is_lazy(tensor))
