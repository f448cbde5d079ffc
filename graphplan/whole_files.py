"""Atomic writes: a file is there as a whole, or as it was before."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it: an older file stays until the new one is complete.

    Args:
        path: the file. A device, a pipe, and a file in a folder without write access are written directly.
        content: bytes, or text, which is written as UTF-8.

    Raises:
        OSError: the file cannot be written; ``filename`` is its path.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))  # a symbolic link stays one
    special = str(path).startswith("/dev/") or (os.path.exists(path) and not os.path.isfile(path))
    if special or (target.exists() and not os.access(target.parent, os.W_OK)):
        Path(path).write_bytes(data)
        return
    temporary = target.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        if target.exists():
            with target.open("r+b"):  # raises if the file is read-only
                pass
        temporary.write_bytes(data)
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
