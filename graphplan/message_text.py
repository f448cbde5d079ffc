"""Forms of bytes, errors and lines in messages."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(nbytes: int) -> str:
    """Bytes for people: ``1536 -> "1.5 KiB"``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    value = nbytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if round(value, 1) < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def readable_bytes(nbytes: int) -> str:
    """Bytes for people, and exactly: ``1536 -> "1.5 KiB (1536 bytes)"``."""
    return f"{size_text(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"


def meant_unit(name: str, nbytes: int) -> str:
    """What to write where a budget is too small for any device, as 24 bytes are; else nothing."""
    return f"{name} is {nbytes} bytes: write '{nbytes}GiB' for as many GiB" if 0 < nbytes < 1 << 10 else ""


def first_line(error: BaseException, most: int = 200) -> str:
    """The kind of an error and what it says first: torch goes on with lists of all its backends.

    Args:
        error: any.
        most: characters of the text.
    """
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text if len(text) <= most else text[: most - 3] + '...'}"


def lines_around(lines: Sequence[str], index: int) -> str:
    """The lines around one of them, which is marked: for messages."""
    first = max(0, index - 5)
    return "\n".join(
        f"{'->' if at == index else '  '} {line}" for at, line in enumerate(lines[first : index + 6], first)
    )
