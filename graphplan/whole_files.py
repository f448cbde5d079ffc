"""Files that are there as a whole, or as they were before."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file, which gets its name when all of it is written: an older one stays until then.

    Args:
        path: of the file; of a device or a pipe, which is written to as it is.
        content: bytes, or text, which is written as UTF-8.

    Raises:
        OSError: it cannot be written; ``filename`` is its path.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))  # a link stays one
    special = str(path).startswith("/dev/") or (os.path.exists(path) and not os.path.isfile(path))
    if special or (target.exists() and not os.access(target.parent, os.W_OK)):
        Path(path).write_bytes(data)
        return
    beside = target.with_name(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        if target.exists():
            with target.open("r+b"):  # raises where it may not be written to
                pass
        beside.write_bytes(data)
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
