"""The calls that read the weights of a module now: who moves the weights waits until there are none."""

from __future__ import annotations

from threading import Condition, get_ident
from typing import Any


class RunningCalls:
    """A block for each call, in any thread."""

    def __init__(self) -> None:
        self._threads: list[int] = []
        self._ended = Condition()

    def __enter__(self) -> None:
        with self._ended:
            self._threads.append(get_ident())

    def __exit__(self, *_: Any) -> None:
        with self._ended:
            self._threads.remove(get_ident())
            self._ended.notify_all()

    def wait_for_others(self) -> None:
        """Return when no other thread has a call under way."""
        here = get_ident()
        with self._ended:
            self._ended.wait_for(lambda: all(thread == here for thread in self._threads))
