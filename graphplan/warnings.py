"""What a user is told: warnings at the line that they wrote, and no log lines of other libraries."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from graphplan.errors import GraphplanWarning

__all__ = ["silenced", "warn"]

_BETWEEN = ("graphplan", "torch", "transformers")  # packages whose frames may lie between


def warn(message: str) -> None:
    """Warn the first caller that is neither graphplan nor what calls a model for its user."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, GraphplanWarning, stacklevel=level)


def _package(namespace: dict[str, object]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


@contextmanager
def silenced(*names: str, below: int = logging.CRITICAL) -> Iterator[None]:
    """Without what these loggers say below a level."""
    loggers = [(logger, logger.level) for logger in map(logging.getLogger, names)]
    for logger, _ in loggers:
        logger.setLevel(below)
    try:
        yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)
