"""What a user is told: warnings at the line that they wrote, and no log lines of other libraries."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from graphplan.errors import GraphplanWarning

# packages whose frames may lie between
_BETWEEN = ("graphplan", "torch", "transformers", "accelerate", "peft", "diffusers")


_listeners: dict[int, tuple[int, list[str]]] = {}


def warn(message: str) -> None:
    """Warn the first caller that is neither graphplan nor what calls a model for its user."""
    for thread, heard in list(_listeners.values()):
        if thread == threading.get_ident():
            heard.append(message)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, GraphplanWarning, stacklevel=level)


def _package(namespace: dict[str, object]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


@contextmanager
def overheard() -> Iterator[list[str]]:
    """A block, and what graphplan warns of in this thread meanwhile."""
    heard = list[str]()
    _listeners[id(heard)] = threading.get_ident(), heard
    try:
        yield heard
    finally:
        del _listeners[id(heard)]


@contextmanager
def unwarned(beginning: str = "") -> Iterator[None]:
    """Without the warnings of this thread whose messages begin so; other threads warn as before."""
    here = _ThisThread(beginning)
    filters: list[Any] = warnings.filters  # type: ignore[assignment]  # a list, though typed as a sequence
    entry = ("ignore", here, Warning, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        here.ident = None
        with suppress(ValueError):  # the block may have reset them
            filters.remove(entry)


class _ThisThread:
    """In a filter of warnings, in the place of a pattern: it matches what one thread warns of."""

    def __init__(self, beginning: str) -> None:
        self.ident: int | None = threading.get_ident()
        self.beginning = beginning

    def match(self, message: str) -> bool:
        return threading.get_ident() == self.ident and message.startswith(self.beginning)


@contextmanager
def silenced(*names: str, below: int = logging.CRITICAL) -> Iterator[None]:
    """Without what these loggers, and those below them, say in this thread below a level."""
    thread = threading.get_ident()

    def audible(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= below or not _within(record.name, names)

    handlers = list(_handlers(names))
    for handler in handlers:
        handler.addFilter(audible)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(audible)


def _within(name: str, names: Sequence[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in names)


def _handlers(names: Sequence[str]) -> set[logging.Handler]:
    """What prints the lines of these loggers, of those below them, and of those above."""
    found = {logging.lastResort} if logging.lastResort is not None else set()
    below = tuple(f"{name}." for name in names)
    for known in (*names, *(one for one in logging.root.manager.loggerDict if one.startswith(below))):
        here: logging.Logger | None = logging.getLogger(known)
        while here is not None:
            found.update(here.handlers)
            here = here.parent
    return found
