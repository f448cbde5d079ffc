"""What graphplan says of a module that it has placed: as ``placed.graphplan``, and under short names.

::

    placed.graphplan.plan      always, unless the model has a child of the name graphplan
    placed.plan                the same, unless the model has something of its own of the name plan
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["ShortNames"]


class ShortNames(nn.Module):
    """A module that answers to the names of its view where the model itself does not."""

    _graphplan_view: type
    """Takes the module; its public attributes are the short names."""

    def __getattr__(self, name: str) -> Any:
        """What the model has of this name, else what its view has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            view = self._graphplan_view
            if name != "graphplan" and (name.startswith("_") or name not in vars(view)):
                raise
        return view(self) if name == "graphplan" else getattr(view(self), name)

    def __dir__(self) -> Iterable[str]:
        short = (name for name in vars(self._graphplan_view) if not name.startswith("_"))
        return sorted({*super().__dir__(), "graphplan", *short})  # type: ignore[no-untyped-call]  # torch's
