"""What placed copies of a ``torch.fx.GraphModule`` do instead of it: each such module has a class of its own.

torch writes the code of the graph into the class of the object, which for a placed one is the class that runs
the plan. And it makes a copy's class of the first base that is not written so, which is ``PlacedModule``.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn

from graphplan.runtime.fallback.short_names import original_class, written_class


def graph_methods(original: type[nn.Module]) -> dict[str, Any]:
    """Name -> method of the class of placed copies; none where the model is no ``GraphModule``."""
    if not issubclass(original, fx.GraphModule):
        return {}
    return {"recompile": _recompile, "__deepcopy__": _deepcopy}


def _recompile(self: Any) -> Any:
    """Write the code into the model's own class: the next call notices that the graph is another."""
    placed = type(self)
    self.__class__ = original_class(self)
    try:
        return self.recompile()
    finally:
        self.__class__ = placed


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    make, _, state = self.__reduce_ex__(2)
    written: Any = written_class(self)
    made = memo[id(self)] = make(type(fx.GraphModule.__new__(written)))
    made.__setstate__(copy.deepcopy(state, memo))
    made.recompile()
    return made
