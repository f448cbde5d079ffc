"""Warnings that point at the user's line, and filters for warnings and log records of other libraries."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from graphplan.errors import GraphplanWarning

# packages whose frames are skipped in search of the user's line
_SKIPPED_PACKAGES = ("graphplan", "torch", "transformers", "accelerate", "peft", "diffusers")


_listeners: dict[int, tuple[int, list[str]]] = {}


def warn(message: str) -> None:
    """Issue a GraphplanWarning at the innermost frame outside of graphplan and packages that call models."""
    for thread, heard in list(_listeners.values()):
        if thread == threading.get_ident():
            heard.append(message)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _SKIPPED_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, GraphplanWarning, stacklevel=level)


def _package(namespace: dict[str, object]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


@contextmanager
def overheard() -> Iterator[list[str]]:
    """Context manager that yields a list, which collects graphplan's warning messages in this thread."""
    heard = list[str]()
    _listeners[id(heard)] = threading.get_ident(), heard
    try:
        yield heard
    finally:
        del _listeners[id(heard)]


@contextmanager
def unwarned(beginning: str = "") -> Iterator[None]:
    """Context manager that suppresses warnings of this thread, and no other, whose messages begin so."""
    matcher = _ThisThread(beginning)
    filters: list[Any] = warnings.filters  # type: ignore[assignment]  # a list that is typed as a sequence
    entry = ("ignore", matcher, Warning, None, 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        matcher.ident = None
        with suppress(ValueError):  # the block may have reset the filters
            filters.remove(entry)


class _ThisThread:
    """Stand-in for the message pattern of a warning filter, which matches warnings of one thread only."""

    def __init__(self, beginning: str) -> None:
        self.ident: int | None = threading.get_ident()
        self.beginning = beginning

    def match(self, message: str) -> bool:
        return threading.get_ident() == self.ident and message.startswith(self.beginning)


@contextmanager
def silenced(*names: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Context manager that drops this thread's records below a level of these loggers and their children."""
    thread = threading.get_ident()

    def audible(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= level or not _is_below(record.name, names)

    handlers = list(_handlers(names))
    for handler in handlers:
        handler.addFilter(audible)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(audible)


def _is_below(name: str, names: Sequence[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in names)


def _handlers(names: Sequence[str]) -> set[logging.Handler]:
    """Return the handlers that may print records of these loggers and their children."""
    handlers = {logging.lastResort} if logging.lastResort is not None else set()
    prefixes = tuple(f"{name}." for name in names)
    for name in (*names, *(key for key in logging.root.manager.loggerDict if key.startswith(prefixes))):
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            handlers.update(logger.handlers)
            logger = logger.parent
    return handlers
