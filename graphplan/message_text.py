"""Format byte counts, errors and source lines for messages."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(nbytes: int) -> str:
    """Return bytes in a readable unit: ``1536 -> "1.5 KiB"``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = nbytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if round(value, 1) < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def readable_bytes(nbytes: int) -> str:
    """Return bytes in a readable unit and exactly: ``1536 -> "1.5 KiB (1536 bytes)"``."""
    return f"{size_text(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"


def meant_unit(name: str, nbytes: int) -> str:
    """Return a hint to add a unit if a budget is below 1 KiB; else an empty string."""
    return f"{name} is {nbytes} bytes: write '{nbytes}GiB' for as many GiB" if 0 < nbytes < 1 << 10 else ""


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the class of an error and the first line of its message, cut to ``limit`` characters.

    Further lines are left out because torch lists all its backends there.
    """
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text if len(text) <= limit else text[: limit - 3] + '...'}"


def one_line(error: BaseException) -> str:
    """Return the class of an error and its whole message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def lines_around(lines: Sequence[str], index: int) -> str:
    """Return the line at ``index``, marked by an arrow, with the five before and after it."""
    first = max(0, index - 5)
    return "\n".join(
        f"{'->' if n == index else '  '} {line}" for n, line in enumerate(lines[first : index + 6], first)
    )
