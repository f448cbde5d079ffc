"""Files that are there as a whole, or as they were before."""

from __future__ import annotations

import os
import shutil
import threading
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
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_bytes(data)
        return
    target = Path(os.path.realpath(path))  # a link stays one
    beside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        beside.write_bytes(data)
        if target.exists():
            with target.open("r+b"):  # raises where it may not be written to
                shutil.copymode(target, beside)
        os.replace(beside, target)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        beside.unlink(missing_ok=True)
