"""Private names of torch and other packages that may go without notice: one function for each.

Where a name is gone, :class:`graphplan.GraphplanError` is raised, which says what was tested. Elsewhere
only those are used that code outside torch builds on: ``torch.utils._pytree``, its modes for dispatch,
``torch._ops`` with the schemas of operations, ``torch._subclasses``, the types of ``torch._C`` that generated
code and schemas name, versions of tensors, and the tables of modules (``_parameters``, ``_buffers``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from graphplan.errors import GraphplanError

TESTED = {
    "torch": ("2.11.0", "2.13.0", "2.14.1", "2.15.0"),
    "transformers": ("5.17.0", "5.23.0", "5.24.0"),
}
"""Package -> the versions that the core tests ran with."""

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""A module or class, the name of its attribute, and what makes another of the attribute."""


def private(owner: Any, name: str, package: str) -> Any:
    """An attribute of a module, class or object that its package may change without notice.

    Raises:
        GraphplanError: it is gone.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        here = getattr(owner, "__name__", type(owner).__name__)
        raise GraphplanError(
            f"{here}.{name} is not in {package} {version(package)}; graphplan needs it, and was tested with "
            f"{package} {', '.join(TESTED[package])}: install one of these, or a newer graphplan"
        ) from error


def place(owner: Any, name: str, package: str) -> tuple[Any, str]:
    """Where such an attribute is, to be replaced; GraphplanError likewise."""
    private(owner, name, package)
    return owner, name
