"""Output and exit codes of the command: results on stdout, all else on stderr.

=====  ==============================================================
0      success
1      any other error
2      wrong option, file or name
3      no placement within the budgets
4      the model cannot be traced
130    interrupted
=====  ==============================================================
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from graphplan.errors import (
    BudgetError,
    CaptureError,
    DeviceError,
    GraphplanWarning,
    InfeasibleError,
    InputError,
    PlanError,
)
from graphplan.versioned_json import encode

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all control characters except tab and newline


def _typed_pairs(match: re.Match[str]) -> str:
    """Return a mapping in a message as options: ``max_memory={0: 1024} -> --max-memory 0=1024``."""
    option = f"--{match[1].replace('_', '-')} "
    between = f" {option}" if match[1] == "pin" else ","
    return option + match[2].replace("'", "").replace(": ", "=").replace(", ", between)


# arguments of `plan` in its error messages -> the options that set them
_AS_TYPED: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\b(max_memory|pin)=\{([^}]*)\}"), _typed_pairs),
    (re.compile(r"\bmax_memory\[(['\"]?)([^\]]*?)\1\]"), r"--max-memory \2"),
    (re.compile(r"\bmax_memory\b"), "--max-memory"),
    (re.compile(r"\bdevices\[(['\"]?)([^\]]*?)\1\]"), r"--device \2"),
    (re.compile(r"\breserve(?= = )"), "--reserve"),
    (re.compile(r"\bdevices(?= names\b)"), "--device"),
    (re.compile(r"\blinks(?= names\b)"), "--link"),
    (re.compile(r"\boffload=False\b"), "--no-offload"),
    (re.compile(r"\btime_limit\b(.* seconds) or None\b"), r"--time-limit\1"),
    (re.compile(r"\bgive args= or kwargs="), "name a factory that returns the model and its inputs"),
)
_WRONG = (BudgetError, DeviceError, InputError, PlanError, OSError)


def exit_code(error: Exception) -> int:
    """Return the exit code for an error."""
    if isinstance(error, InfeasibleError):
        return 3
    if isinstance(error, CaptureError):
        return 4
    return 2 if isinstance(error, _WRONG) else 1


def complain(error: Exception, message: str, *, as_json: bool) -> None:
    """Print an error as one line on stderr: text, or a JSON object of its type, message and figures."""
    if isinstance(error, OSError) and error.filename and error.strerror:  # without errno
        message = f"{str(error.filename)!r}: {error.strerror}"
    line = _visible(" ".join(as_typed(message).split()))
    if not as_json:
        print(f"graphplan: {line}", file=sys.stderr)
        return
    fields: dict[str, Any] = {"type": type(error).__name__, "message": line}
    if isinstance(error, InfeasibleError):
        names = ("needed", "available", "operation", "device")
        fields |= {name: encode(getattr(error, name)) for name in names}
    print(json.dumps({"error": fields}), file=sys.stderr)


def as_typed(message: str) -> str:
    """Return an error message with the command's options in place of the arguments of ``plan``."""
    for argument, option in _AS_TYPED:
        message = argument.sub(option, message)
    return message


def require_writable(*paths: Path | None, read: Iterable[Path | None] = ()) -> None:
    """Raise InputError for files that cannot be written, before work is lost with them."""
    inputs = {path.resolve() for path in read if path is not None}
    seen: set[Path] = set()
    for path in filter(None, paths):
        if path.is_dir():
            raise InputError(f"{str(path)!r} is a folder: name a file in it")
        if not path.parent.is_dir():
            raise InputError(f"{str(path)!r}: there is no folder {str(path.parent)!r}")
        if path.resolve() in inputs:
            raise InputError(f"{str(path)!r} is read by this command, and would be overwritten")
        if path.resolve() in seen:
            raise InputError(f"{str(path)!r} is named twice, and would hold only the last output")
        seen.add(path.resolve())


def say(text: object) -> None:
    """Print text on stdout, with control characters, which names in a plan may have, escaped."""
    print(_visible(str(text)))


def say_written(*paths: Path | None) -> None:
    """Print the files that a command has written, if any, on stdout."""
    written = [str(path) for path in paths if path is not None]
    if written:
        print(f"\nwrote {' and '.join(written)}")


def _visible(text: str) -> str:
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def print_json(data: Any) -> None:
    """Print a JSON document on stdout."""
    print(json.dumps(data, indent=1))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Context manager that shows a spinner with the elapsed time, if stderr is a terminal.

    Output of libraries and models is dropped meanwhile: stdout is for the result, and torch prints the whole
    graph that it cannot trace, in addition to the error that it raises.
    """
    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield


def show_warnings_in_one_line() -> None:
    """Print graphplan's warnings as one line, without the source line, and drop those of libraries."""
    logging.disable(logging.WARNING)  # of the libraries that transformers imports
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=UserWarning, module="graphplan")
    warnings.filterwarnings("always", category=GraphplanWarning)

    stream = sys.stderr

    def shown(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"graphplan: warning: {' '.join(str(message).split())}", file=stream)

    warnings.showwarning = shown
