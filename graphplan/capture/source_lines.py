"""The line of the model's code that called an operation, or at which a trace failed."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from functools import lru_cache
from pathlib import PurePath
from types import FrameType

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LIBRARIES = (f"{PurePath(torch.__file__).parent}/", f"{PurePath(__file__).parents[1]}/")
_EXPORT = f"{_LIBRARIES[0]}export/"
STANDARD_LIBRARY = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")


def belong_with(node: fx.Node, other: fx.Node) -> None:
    """Assign a node to the module, and the line of the model's code, of another node."""
    keys = ("nn_module_stack", "stack_trace")
    node.meta |= {key: other.meta[key] for key in keys if key in other.meta}


def source_line(stack: str) -> str:
    """Return the innermost line outside torch and graphplan (``"models/llama.py:263"``); else torch's, or "".

    The path is relative to the import root, so that a plan does not reveal where that is.
    """
    frames = list(_FRAME.finditer(stack))
    outside = [frame for frame in frames if not frame["file"].startswith(_LIBRARIES)]
    chosen = (outside or frames)[-1:]
    return "".join(f"{_from_root(frame['file'])}:{frame['line']}" for frame in chosen)


def calling_line() -> str:
    """Return, inside an export, the line of the innermost ``forward`` outside torch and graphplan.

    It has the form of a line of a stack trace; it is torch's if there is no other.
    """
    internals = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_EXPORT):
        if frame.f_code.co_name == "forward":
            line = f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                return line
            internals = internals or line
        frame = frame.f_back
    return internals


def failed_line(error: BaseException) -> str:
    """Return a text with the innermost line of the model's code in an error's traceback; empty if none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        if not (file.startswith("<") or is_of_versions(file) or "/transformers/exporters/" in file):
            return f"\n  at {file}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def is_of_versions(file: str) -> bool:
    """Whether code belongs to torch, Python or graphplan, which are identified by their versions."""
    if file.startswith(("<frozen ", *_LIBRARIES)):
        return True
    return file.startswith(STANDARD_LIBRARY) and not is_installed(file)


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed package."""
    return any(folder in file for folder in PACKAGE_FOLDERS)


@lru_cache(maxsize=1024)
def _from_root(file: str) -> str:
    path = PurePath(file)
    roots = [PurePath(root) for root in sys.path if root]
    below = [path.relative_to(root) for root in roots if path.is_relative_to(root)]
    return min(below, key=lambda found: len(found.parts)).as_posix() if below else path.name
