"""scipy's ``milp`` without what HiGHS prints.

HiGHS names one of its functions on the C library's stdout when it mends a solution that presolving has made
slightly infeasible (``HighsMipSolverData::transformNewIntegerFeasibleSolution``, in HiGHS 1.12), whatever its
options say. Programs whose stdout is read by others must not have that. While HiGHS runs, the descriptor of
stdout leads to a file; what else was written there meanwhile, by other threads, is handed on afterwards.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import scipy.optimize

Result = TypeVar("Result")

_STDOUT = 1
_PRINTED = re.compile(rb"^Highs\w+::.*\n?", re.MULTILINE)
_TURN = threading.Lock()  # two at a time would each take the other's file for stdout


def milp(*args: Any, **kwargs: Any) -> Any:
    """:func:`scipy.optimize.milp`, silent."""
    return without_prints(lambda: scipy.optimize.milp(*args, **kwargs))


def without_prints(solve: Callable[[], Result]) -> Result:
    """What ``solve`` returns, without the lines that HiGHS prints on the way."""
    if os.name != "posix":  # no way to the C library's own stdout
        return solve()
    library = ctypes.CDLL(None)
    with _TURN, tempfile.TemporaryFile() as diverted:
        library.fflush(None)
        try:
            stdout = os.dup(_STDOUT)
        except OSError:  # closed: nothing can be printed
            return solve()
        os.dup2(diverted.fileno(), _STDOUT)
        try:
            return solve()
        finally:
            library.fflush(None)
            os.dup2(stdout, _STDOUT)
            os.close(stdout)
            diverted.seek(0)
            _write(_PRINTED.sub(b"", diverted.read()))


def _write(text: bytes) -> None:
    while text:
        text = text[os.write(_STDOUT, text) :]
