"""Access to private names of torch and other packages, which may disappear without notice.

Each has one function here. If the name is gone, it raises :class:`graphplan.GraphplanError`, which lists the
tested versions. Code outside this package uses only private names that other projects also build on:
``torch.utils._pytree``, dispatch modes, ``torch._ops`` with its schemas, ``torch._subclasses``, types of
``torch._C`` in schemas and generated code, tensor versions, and ``_parameters`` and ``_buffers`` of modules.
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
"""Package -> versions with which the core tests passed."""

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""A patch: owner (module or class), attribute name, and function from the old value to the new one."""


def private(owner: Any, name: str, package: str) -> Any:
    """Return a private attribute of a module, class or object.

    Raises:
        GraphplanError: the installed package no longer has it.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise GraphplanError(
            f"{where}.{name} is not in {package} {version(package)}; graphplan needs it, and was tested with "
            f"{package} {', '.join(TESTED[package])}: install one of these, or a newer graphplan"
        ) from error


def patch_target(owner: Any, name: str, package: str) -> tuple[Any, str]:
    """Return an attribute as a patch target, (owner, name); raise as :func:`private`."""
    private(owner, name, package)
    return owner, name
