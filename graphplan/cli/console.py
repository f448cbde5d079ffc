"""What the command says, and how it ends: results on stdout, all else on stderr.

=====  ==============================================================
0      it is done
1      anything else went wrong
2      the command, a file or a name that it gives is wrong
3      no placement keeps the budgets
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

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and ends of lines


def _typed_pairs(found: re.Match[str]) -> str:
    """A mapping of an argument, ``max_memory={0: 1024}``, as the option's words: ``--max-memory 0=1024``."""
    option = f"--{found[1].replace('_', '-')} "
    between = f" {option}" if found[1] == "pin" else ","
    return option + found[2].replace("'", "").replace(": ", "=").replace(", ", between)


# arguments of `plan` as its errors write them -> the options that set them
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
    """How the process ends after this error."""
    if isinstance(error, InfeasibleError):
        return 3
    if isinstance(error, CaptureError):
        return 4
    return 2 if isinstance(error, _WRONG) else 1


def complain(error: Exception, message: str, *, as_json: bool) -> None:
    """One line on stderr: text, or a JSON object of the error's type, message and figures."""
    if isinstance(error, OSError) and error.filename and error.strerror:  # without the number of the error
        message = f"{str(error.filename)!r}: {error.strerror}"
    line = _visible(" ".join(as_typed(message).split()))
    if not as_json:
        print(f"graphplan: {line}", file=sys.stderr)
        return
    said: dict[str, Any] = {"type": type(error).__name__, "message": line}
    if isinstance(error, InfeasibleError):
        said |= {
            "needed": encode(error.needed),
            "available": encode(error.available),
            "operation": error.operation,
            "device": error.device,
        }
    print(json.dumps({"error": said}), file=sys.stderr)


def as_typed(message: str) -> str:
    """An error of ours, with the options of the command in place of arguments."""
    for argument, option in _AS_TYPED:
        message = argument.sub(option, message)
    return message


def require_writable(*paths: Path | None, read: Iterable[Path | None] = ()) -> None:
    """Refuse files that cannot be written before the work that would be lost with them."""
    inputs = {path.resolve() for path in read if path is not None}
    seen: set[Path] = set()
    for path in filter(None, paths):
        if path.is_dir():
            raise InputError(f"{str(path)!r} is a folder: name a file in it")
        if not path.parent.is_dir():
            raise InputError(f"{str(path)!r}: there is no folder {str(path.parent)!r}")
        if path.resolve() in inputs:
            raise InputError(f"{str(path)!r} is read by this command, and would be written over")
        if path.resolve() in seen:
            raise InputError(f"{str(path)!r} is named twice, and would hold only what is written last")
        seen.add(path.resolve())


def say(text: object) -> None:
    """Text on stdout; what a terminal would obey in a plan's names is shown as numbers."""
    print(_visible(str(text)))


def say_written(*paths: Path | None) -> None:
    """The files that a command has written, on stdout; nothing where it has written none."""
    written = [str(path) for path in paths if path is not None]
    if written:
        print(f"\nwrote {' and '.join(written)}")


def _visible(text: str) -> str:
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=1))


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner with the seconds that have passed, where stderr is a terminal.

    What libraries and models print meanwhile is dropped: torch prints the whole graph that it cannot trace,
    beside the error that it raises, and stdout is for the result.
    """
    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield


def show_warnings_in_one_line() -> None:
    """Our warnings as the errors are: without the place in the code; others' not at all."""
    logging.disable(logging.WARNING)  # of the libraries that transformers imports
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=UserWarning, module="graphplan")
    warnings.filterwarnings("always", category=GraphplanWarning)

    stream = sys.stderr

    def shown(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"graphplan: warning: {' '.join(str(message).split())}", file=stream)

    warnings.showwarning = shown
