"""The files of Python code that a process has loaded, any of which may affect a trace.

The code that a trace runs deep inside other code, or that ``forward`` imports, cannot be listed. So a saved
capture lists all files that were loaded when it was made, and is used only if none of them has changed::

    {"model": ["/home/me/model.py", "sha256:9f86..."],      a user's file, by its content
     "timm.layers": [".../site-packages/timm/layers/__init__.py", "4382 1764000000000000000"]}    size, time

Torch, Python and graphplan are omitted: their versions are compared.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping

from graphplan.capture.saved.code_objects import file_of_module
from graphplan.capture.source_lines import is_installed, is_of_versions


def loaded_files() -> dict[str, tuple[str, str]]:
    """Return name of each loaded module -> (its file, the file's state)."""
    files = {}
    for name, module in sys.modules.copy().items():  # other threads may import meanwhile
        file = file_of_module(module)
        if file and not is_of_versions(file):
            files[name] = file, state_of(file)
    return files


def changed_file(files: Mapping[str, tuple[str, str]]) -> str | None:
    """Return the first file that has changed, or whose module this process has from elsewhere, or None."""
    for name, (file, state) in files.items():
        loaded = file_of_module(sys.modules.get(name))
        if state_of(file) != state or (name != "__main__" and loaded not in (None, file)):
            return file
    return None


def state_of(file: str) -> str:
    """Return a file's size and time if it is installed, else the hash of its content."""
    if not os.path.isfile(file):  # in an archive, or deleted
        return ""
    if is_installed(file):
        stat = os.stat(file)
        return f"{stat.st_size} {stat.st_mtime_ns}"
    with open(file, "rb") as opened:
        return f"sha256:{hashlib.file_digest(opened, 'sha256').hexdigest()}"
