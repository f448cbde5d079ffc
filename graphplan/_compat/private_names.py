"""How a private name is reached: with an error that says what is missing, and what was tested."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from graphplan.errors import GraphplanError


def private(owner: Any, name: str, package: str, tested: str) -> Any:
    """An attribute that its package may change without notice.

    Args:
        owner: module, class or object.
        name: of the attribute.
        package: whose it is.
        tested: the version of the package with which graphplan was tested.

    Raises:
        GraphplanError: it is gone.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        here = getattr(owner, "__name__", type(owner).__name__)
        raise GraphplanError(
            f"{here}.{name} is not in {package} {version(package)}; graphplan needs it, and was tested with "
            f"{package} {tested}: install that, or a newer graphplan"
        ) from error
