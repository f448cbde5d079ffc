"""The private names of torch and transformers that graphplan uses: one function for each, and no others.

The files say with which versions they were tested; where a name is gone, :class:`graphplan.GraphplanError` is
raised.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from graphplan.errors import GraphplanError

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""A module or class, the name of its attribute, and what makes another of the attribute."""


def private(owner: Any, name: str, package: str, tested: str) -> Any:
    """An attribute of a module, class or object that its package may change without notice.

    Raises:
        GraphplanError: it is gone; ``tested`` is the version with which graphplan was tested.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        here = getattr(owner, "__name__", type(owner).__name__)
        raise GraphplanError(
            f"{here}.{name} is not in {package} {version(package)}; graphplan needs it, and was tested with "
            f"{package} {tested}: install that, or a newer graphplan"
        ) from error
