"""Place a PyTorch model over several devices and CPU memory, by the graph of its operations.

>>> import torch, graphplan
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
>>> placed = graphplan.partition(model, {"cpu": "1GiB"}, args=(torch.ones(2, 8),))
>>> bool((placed(torch.ones(2, 8)) == model(torch.ones(2, 8))).all())
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphplan.version import __version__ as __version__

if TYPE_CHECKING:
    from graphplan.public import *  # noqa: F403  # type checkers read its __all__
else:

    def __getattr__(name: str) -> Any:
        """Load the public names on first access (PEP 562), so that ``import graphplan`` imports no torch."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        public = import_module("graphplan.public")
        names = {public_name: getattr(public, public_name) for public_name in public.__all__}
        globals().update(names, __all__=[*public.__all__, "__version__"])
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return __getattr__("__all__")
