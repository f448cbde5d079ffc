"""The progress bar of planning."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from typing import ClassVar

import pytest
import torch
from torch import nn
from tqdm import tqdm

import graphplan
from graphplan.compiler import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_planning_shows_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(progress, "_DELAY", 0.01)

    @progress.with_progress
    def slow() -> None:
        progress.enter_stage("trace")
        for _ in range(1000):  # at most 10 seconds
            if "trace" in terminal.getvalue():
                break
            time.sleep(0.01)
        graphplan.plan(nn.Linear(4, 4), {"cpu": "1MiB"}, (torch.ones(1, 4),))

    with redirect_stderr(terminal):
        slow()
    shown = terminal.getvalue()
    assert shown.index("trace") < shown.index("annotate") < shown.index("search")
    assert shown.endswith("\r"), "the bar is wiped"


def test_short_planning_shows_nothing() -> None:
    with redirect_stderr(terminal := Terminal()):
        progress.with_progress(lambda: progress.enter_stage("search"))()
    assert terminal.getvalue() == ""


def test_a_file_gets_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "_DELAY", 0.001)
    graphplan.plan(nn.Linear(4, 4), {"cpu": "1MiB"}, (torch.ones(1, 4),))
    assert capsys.readouterr().err == ""


def test_a_placed_model_goes_through_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "tqdm", Bar)
    with redirect_stderr(Terminal()):
        graphplan.partition(nn.Linear(4, 4), {"cpu": "1MiB"}, (torch.ones(1, 4),))
    assert tuple(Bar.entered) == progress._STAGES


class Bar(tqdm):  # type: ignore[type-arg]  # it takes none at run time
    """One that remembers its descriptions."""

    entered: ClassVar[list[str | None]] = []

    def set_description_str(self, desc: str | None = None, refresh: bool | None = True) -> None:
        self.entered.append(desc)
        super().set_description_str(desc, refresh)
