"""Warnings that point at the caller's own line, however deep in graphplan they come up."""

from __future__ import annotations

import sys
import warnings

from graphplan.errors import GraphplanWarning

__all__ = ["warn"]

_BETWEEN = ("graphplan", "torch", "transformers")  # packages whose frames may lie between


def warn(message: str) -> None:
    """Warn the first caller that is neither graphplan nor what calls a model for its user."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, GraphplanWarning, stacklevel=level)


def _package(namespace: dict[str, object]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]
