"""The line of the model's code that called an operation, or that a trace could not pass."""

from __future__ import annotations

import re
import sys
import traceback
from functools import lru_cache
from pathlib import PurePath
from types import FrameType

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NOT_THE_MODELS = (f"{PurePath(torch.__file__).parent}/", f"{PurePath(__file__).parents[1]}/")
_EXPORT = f"{PurePath(torch.__file__).parent}/export/"
_AROUND = ("/transformers/exporters/", "/contextlib.py", "/functools.py")


def belong_with(node: fx.Node, other: fx.Node) -> None:
    """Let a node be of the module, and of the line of the model's code, that another is of."""
    of_code = ("nn_module_stack", "stack_trace")
    node.meta |= {key: other.meta[key] for key in of_code if key in other.meta}


def source_line(stack: str) -> str:
    """The innermost line outside torch and graphplan (``"models/llama.py:263"``); else torch's, or none.

    The file is named from below the folder that it was imported from, so that a plan tells nobody where
    that folder is.
    """
    frames = list(_FRAME.finditer(stack))
    own = [frame for frame in frames if not frame["file"].startswith(_NOT_THE_MODELS)]
    chosen = (own or frames)[-1:]
    return "".join(f"{_from_root(frame['file'])}:{frame['line']}" for frame in chosen)


def calling_line() -> str:
    """Inside an export: the line of the innermost ``forward`` outside torch and graphplan, as in a stack.

    Torch's own where there is no other.
    """
    torchs = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_EXPORT):
        if frame.f_code.co_name == "forward":
            line = f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'
            if not frame.f_code.co_filename.startswith(_NOT_THE_MODELS):
                return line
            torchs = torchs or line
        frame = frame.f_back
    return torchs


def failed_line(error: BaseException) -> str:
    """The innermost line of the model's own code at which an error was raised, for people; empty without."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        if not file.startswith(("<", *_NOT_THE_MODELS)) and not any(part in file for part in _AROUND):
            return f"\n  at {file}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""


@lru_cache(maxsize=1024)
def _from_root(file: str) -> str:
    path = PurePath(file)
    roots = [PurePath(root) for root in sys.path if root]
    below = [path.relative_to(root) for root in roots if path.is_relative_to(root)]
    return min(below, key=lambda found: len(found.parts)).as_posix() if below else path.name
