"""The code blocks of a Markdown page, run in order, each with what it prints.

Blocks of ``python`` share one namespace. In blocks of ``bash``, lines that begin with ``graphplan`` are run
as the command; other lines are for people. A block below ``<!-- no-run -->`` is left alone.
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
from warnings import catch_warnings

_FENCE = re.compile(
    r"^(?P<left><!-- no-run -->\n)?```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        page: the file that it is in.
        line: number of its first line of code.
        language: the first word of the fence.
        code: its text.
    """

    page: Path
    line: int
    language: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that are run, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        if match["language"] in ("python", "bash") and not match["left"]:
            line = text.count("\n", 0, match.start("body")) + 1
            found.append(Block(page, line, match["language"], match["body"]))
    return found


def outputs_of(page: Path, folder: Path) -> Iterator[str]:
    """What each block prints; files that it names lie in ``folder``, which is current meanwhile.

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
    """What ``graphplan`` prints; run here, for a process of its own would load torch anew.

    Raises:
        RuntimeError: it ends with another code than 0.
    """
    from graphplan.__main__ import main  # the command is optional

    out, err, code = io.StringIO(), io.StringIO(), 0
    with _as_a_process(["graphplan", *words], folder), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    if code:
        raise RuntimeError(f"graphplan {shlex.join(words)} ended with {code}: {err.getvalue()}")
    return out.getvalue()


@contextmanager
def _as_a_process(words: list[str], folder: Path) -> Iterator[None]:
    """What the command changes of this process, it changes until the end of this."""
    loaded, environment, before = set(sys.modules), dict(os.environ), sys.argv
    os.environ.update({"HF_HUB_OFFLINE": "1", "COLUMNS": "100", "NO_COLOR": "1"})
    sys.argv = words
    try:
        with chdir(folder), catch_warnings():
            yield
    finally:
        logging.disable(logging.NOTSET)
        sys.argv = before
        os.environ.clear()
        os.environ.update(environment)
        for name in set(sys.modules) - loaded:  # the next page may have a module of that name
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder.resolve())):
                del sys.modules[name]
