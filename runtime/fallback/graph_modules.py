"""Methods that placed copies of a ``torch.fx.GraphModule`` override.

torch's ``recompile`` writes the graph's code into the object's class, which for a placed module is the class
that runs the plan. Its ``__deepcopy__`` uses the first base class that torch has not generated: PlacedModule.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn

from graphplan.runtime.fallback.derived_classes import original_class, written_class


def graph_methods(original: type[nn.Module]) -> dict[str, Any]:
    """Return name -> method for the class of placed copies; {} if the model is not a ``GraphModule``."""
    if not issubclass(original, fx.GraphModule):
        return {}
    return {"recompile": _recompile, "__deepcopy__": _deepcopy}


def _recompile(self: Any) -> Any:
    """Write the code into the model's original class; the next call notices that the graph has changed."""
    placed = type(self)
    self.__class__ = original_class(self)
    try:
        return self.recompile()
    finally:
        self.__class__ = placed


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    make, _, state = self.__reduce_ex__(2)
    base: Any = written_class(self)
    copied = memo[id(self)] = make(type(fx.GraphModule.__new__(base)))
    copied.__setstate__(copy.deepcopy(state, memo))
    copied.recompile()
    return copied
