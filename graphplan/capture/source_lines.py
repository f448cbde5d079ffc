"""The line of code that called an operation, from the stack that the tracer noted."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import PurePath

import torch

__all__ = ["source_line"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NOT_THE_MODELS = (f"{PurePath(torch.__file__).parent}/", f"{PurePath(__file__).parents[1]}/")


def source_line(stack: str) -> str:
    """The innermost line outside torch and graphplan (``"models/llama.py:263"``); else torch's, or none.

    The file is named from below the folder that it was imported from, so that a plan tells nobody where
    that folder is.
    """
    frames = list(_FRAME.finditer(stack))
    own = [frame for frame in frames if not frame["file"].startswith(_NOT_THE_MODELS)]
    chosen = (own or frames)[-1:]
    return "".join(f"{_from_root(frame['file'])}:{frame['line']}" for frame in chosen)


@lru_cache(maxsize=1024)
def _from_root(file: str) -> str:
    path = PurePath(file)
    roots = [PurePath(root) for root in sys.path if root]
    below = [path.relative_to(root) for root in roots if path.is_relative_to(root)]
    return min(below, key=lambda found: len(found.parts)).as_posix() if below else path.name
