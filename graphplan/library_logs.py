"""Keep other libraries' log lines from a user who did not call them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["silenced"]


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
