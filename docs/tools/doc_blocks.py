"""Run the code blocks of a Markdown page in order, and return what each prints.

Blocks of ``python`` share one namespace. In blocks of ``bash``, only lines that begin with ``graphplan`` are
run. A block below ``<!-- no-run -->`` is skipped.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings

_FENCE = re.compile(
    r"^(?P<left><!-- no-run -->\n)?```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block.

    Attributes:
        page: the file that contains it.
        line: number of its first line of code.
        language: the text after the opening fence.
        code: its text.
    """

    page: Path
    line: int
    language: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that are run, in order."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in _FENCE.finditer(text):
        if match["language"] in ("python", "bash") and not match["left"]:
            line = text.count("\n", 0, match.start("body")) + 1
            blocks.append(Block(page, line, match["language"], match["body"]))
    return blocks


def outputs_of(page: Path, folder: Path) -> Iterator[str]:
    """Yield what each block prints; ``folder`` is the working directory of the blocks.

    Raises:
        Exception: whatever a block raises, with the page and the line in its traceback.
    """
    names: dict[str, Any] = {"__name__": page.stem}
    with chdir(folder):
        for block in blocks_of(page):
            yield _python(block, names) if block.language == "python" else _bash(block, folder)


def _python(block: Block, names: dict[str, Any]) -> str:
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    out = io.StringIO()
    with redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def _bash(block: Block, folder: Path) -> str:
    lines = block.code.replace("\\\n", " ").splitlines()
    return "".join(command(shlex.split(line)[1:], folder) for line in lines if line.startswith("graphplan "))


def command(words: list[str], folder: Path) -> str:
    """Return what the command ``graphplan`` prints; it runs in this process, which has torch loaded.

    Raises:
        RuntimeError: its exit code is not 0.
    """
    from graphplan.__main__ import main  # the CLI is an optional extra

    out, err, code = io.StringIO(), io.StringIO(), 0
    with _restored_process(["graphplan", *words], folder), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    if code:
        raise RuntimeError(f"graphplan {shlex.join(words)} ended with {code}: {err.getvalue()}")
    return out.getvalue()


@contextmanager
def _restored_process(words: list[str], folder: Path) -> Iterator[None]:
    """Context manager that restores the state of this process after a command has changed it."""
    loaded = set(sys.modules)
    environment = patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "NO_COLOR": "1"})
    try:
        with chdir(folder), catch_warnings(), environment, patch.object(sys, "argv", words):
            yield
    finally:
        logging.disable(logging.NOTSET)
        for name in set(sys.modules) - loaded:  # the next page may have a module of that name
            file = getattr(sys.modules[name], "__file__", None)  # built-in modules and namespaces have none
            if file is not None and Path(file).is_relative_to(folder.resolve()):
                del sys.modules[name]
