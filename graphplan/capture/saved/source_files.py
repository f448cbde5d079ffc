"""The files of Python code that a process has loaded: any of them may have to do with a trace.

What a trace reads of code that is deep in others, or that ``forward`` imports, nobody can list. So a saved
capture has all files that were loaded when it was made, and is used while none of them has changed::

    {"model": ["/home/me/model.py", "sha256:9f86..."],      the user's, by what is in it
     "timm.layers": [".../site-packages/timm/layers/__init__.py", "4382 1764000000000000000"]}    size, time

Torch, Python and graphplan are left out: their versions are looked at.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping

from graphplan.capture.saved.code_objects import file_of_module, is_installed, is_of_versions


def loaded_files() -> dict[str, tuple[str, str]]:
    """Of each module that is loaded: its file, and the state of that."""
    found = {}
    for name, module in sys.modules.copy().items():  # other threads import meanwhile
        file = file_of_module(module)
        if file and not is_of_versions(file):
            found[name] = file, state_of(file)
    return found


def changed_file(files: Mapping[str, tuple[str, str]]) -> str | None:
    """The first of these that has changed, or that is not where this process has its module from."""
    for name, (file, state) in files.items():
        here = file_of_module(sys.modules.get(name))
        if state_of(file) != state or (name != "__main__" and here not in (None, file)):
            return file
    return None


def state_of(file: str) -> str:
    """What a file is, to be compared; code may come from an archive, or from a file that is gone."""
    if not os.path.isfile(file):
        return ""
    if is_installed(file):
        found = os.stat(file)
        return f"{found.st_size} {found.st_mtime_ns}"
    with open(file, "rb") as opened:
        return f"sha256:{hashlib.file_digest(opened, 'sha256').hexdigest()}"
