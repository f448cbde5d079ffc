"""A progress bar of the planning stages, on stderr if that is a terminal, once planning takes two seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from threading import Timer
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from tqdm.auto import tqdm

Given = ParamSpec("Given")
Result = TypeVar("Result")
Stage = Literal["trace", "annotate", "search", "lower", "place weights"]

_DELAY = 2.0  # seconds
_STAGES: tuple[Stage, ...] = get_args(Stage)
_bar: ContextVar[tqdm[Any] | None] = ContextVar("planning", default=None)


def with_progress(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorate a function to show its planning stages in a bar; functions that it calls share the bar."""

    @wraps(function)
    def shown(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if _bar.get() is not None:
            return function(*args, **kwargs)
        form = "{desc}: {bar:20} {n_fmt}/{total_fmt} [{elapsed}]"
        with tqdm(
            total=len(_STAGES), desc="planning", bar_format=form, leave=False, delay=_DELAY, disable=None
        ) as bar:
            timer, token = Timer(_DELAY, _show, [bar]), _bar.set(bar)
            timer.daemon = True
            if not bar.disable:
                timer.start()
            try:
                return function(*args, **kwargs)
            finally:
                timer.cancel()
                _bar.reset(token)

    return shown


def enter_stage(stage: Stage) -> None:
    """Show the stage that begins now; each of several calls planned together starts again at the first."""
    bar = _bar.get()
    if bar is not None and not bar.disable:
        bar.n = _STAGES.index(stage)
        bar.set_description_str(stage, refresh=not bar.delay)


def _show(bar: tqdm[Any]) -> None:
    """Draw the bar now; tqdm itself would wait for the end of the stage."""
    bar.delay = 0
    bar.refresh()
