"""Attributes of a placed model in which its calls store tensors, as ``forward`` does.

The plan of a call counts what it stores itself. So it releases the tensors of the call before when it begins,
and those that another graph has stored elsewhere move to CPU memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphplan.capture.structure import Seen, flatten, layout_of, map_leaves, unflatten

_CHANGED_IN_PLACE = (list, dict, deque)


class StoredValue:
    """An attribute in which one or several graphs store tensors.

    ``grows`` says whether it is a list or dict that calls extend: it is empty for each trace.
    """

    grows = False

    def __init__(self, owner: dict[str, Any], name: str) -> None:
        self._owner, self._name = owner, name
        self._traced = layout_of(owner.get(name))
        self._stored = [self._traced]  # the last two: other threads check while one stores
        self._constants: list[tuple[int, torch.Tensor]] = []
        self._copied: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # to the constants, and versions

    def get(self) -> Any:
        """Return what the attribute is now; None if the module does not have it."""
        return self._owner.get(self._name)

    @property
    def is_absent(self) -> bool:
        """Whether the module does not have the attribute."""
        return self._name not in self._owner

    def to_trace(self) -> Any:
        """Return what a trace finds in the attribute."""
        return emptied(self.get()) if self.grows else self.get()

    def is_expected(self) -> bool:
        """Whether the attribute is like what a call has stored, or what it was when the graphs were traced.

        Tensors are alike if they have one shape and type: code may branch on these. What graphs read may have
        another shape, and all may be None or empty: then other graphs serve the calls.
        """
        held = self.get()
        if held is None or (isinstance(held, _CHANGED_IN_PLACE) and not held):
            return True
        tensors = [leaf for leaf in flatten(held, Seen())[0] if isinstance(leaf, torch.Tensor)]
        if not self._constants or not tensors:
            return layout_of(held) in (*self._stored, self._traced)
        return not any(tensor.requires_grad for tensor in tensors)

    def is_read_as(self, constants: list[tuple[int, torch.Tensor]]) -> None:
        """Let these tensors of the code have the attribute's values, each that of one of its leaves."""
        self._constants, self._copied = constants, {}

    def update_constants(self) -> None:
        """Copy the tensors to the constants of graphs that read them, unless they have their values."""
        held = self.get() if self._constants else None
        if held is None:
            return
        leaves, copied = flatten(held, Seen())[0], dict(self._copied)
        for index, constant in self._constants:
            tensor = leaves[index] if index < len(leaves) else None
            if not isinstance(tensor, torch.Tensor) or layout_of(tensor) != layout_of(constant):
                continue  # that of a graph for another shape
            version = 0 if tensor.is_inference() else tensor._version
            if index not in copied or copied[index][0]() is not tensor or copied[index][1] != version:
                constant.detach().copy_(tensor)
                self._copied[index] = weakref.ref(tensor), version

    def accept(self) -> None:
        """Take what the attribute is for what a call has stored."""
        self._expect(self.get())

    def _expect(self, value: Any) -> None:
        self._stored = [self._stored[-1], layout_of(value)]

    def replace(self, value: Any, *, in_place: bool) -> None:
        """Set the attribute, or the contents of the list or dict that it holds if ``in_place``."""
        self._expect(value)
        held: Any = self._owner.get(self._name)
        if not in_place or type(held) is not type(value) or not isinstance(held, _CHANGED_IN_PLACE):
            self._owner[self._name] = value
        else:
            held.clear()
            held.update(value) if isinstance(held, dict) else held.extend(value)

    def clear(self, constants: Mapping[int, torch.Tensor], *, in_place: bool) -> None:
        """Release the tensors; the code's constants, by leaf, replace those that it reads.

        A list or dict that changes in place is emptied instead, unless it is read.
        """
        held = self.get()
        if not constants:
            empties = in_place and isinstance(held, _CHANGED_IN_PLACE)
            self.replace(emptied(held) if empties else None, in_place=in_place)
            return
        leaves, spec = flatten(held, Seen())
        self.replace(unflatten([constants.get(i) for i in range(len(leaves))], spec), in_place=in_place)

    def move_to_host(self) -> None:
        """Move the tensors to CPU memory."""
        held = self._owner.get(self._name)
        if any(
            isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in flatten(held, Seen())[0]
        ):
            moved = map_leaves(
                lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, held, Seen()
            )
            self.replace(moved, in_place=True)


def emptied(value: Any) -> Any:
    """Return an empty container in place of one that calls change in place; any other value as it is."""
    return type(value)() if isinstance(value, _CHANGED_IN_PLACE) else value


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """Where one graph stores tensors.

    Attributes:
        value: the attribute.
        in_place: whether it changes the list or dict that the attribute holds, instead of replacing it.
        constants: the tensors of the code that have the attribute's present values, by leaf, if the code
            reads them. The attribute consists of them, and of None for other leaves, during a call and after
            one that has failed.
    """

    value: StoredValue
    in_place: bool
    constants: Mapping[int, torch.Tensor]

    def release(self) -> None:
        """Release what the last call has stored."""
        self.value.clear(self.constants, in_place=self.in_place)

    def store(self, value: Any) -> None:
        """Store the result of a call."""
        self.value.replace(value, in_place=self.in_place)
