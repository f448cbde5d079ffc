"""The same plan for the same input, whatever order the interpreter gives to sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import hashlib
import torch
import graphplan

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))

with torch.device("meta"):
    model = torch.nn.Sequential(*(Block(64) for _ in range(3)))
    example = torch.empty(16, 64)
size = sum(weight.nbytes for weight in model.parameters())
for max_memory in (
    {0: int(0.75 * size), "cpu": "1GiB"},
    {0: int(0.4 * size), 1: int(0.35 * size), "cpu": "1GiB"},
    {0: int(0.75 * size), 1: int(0.6 * size)},
):
    plan = graphplan.plan(model, max_memory, (example,))
    print(hashlib.sha256(plan.to_json().encode()).hexdigest())
"""


def _planned_by_another_process() -> list[str]:
    own = os.environ.get("PYTHONHASHSEED", "random")  # random ones differ
    environment = {**os.environ, "PYTHONHASHSEED": "1" if own != "1" else "2"}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_plans_do_not_depend_on_the_order_of_sets(capsys: pytest.CaptureFixture[str]) -> None:
    exec(_SCRIPT, {"__name__": "__main__"})
    here = capsys.readouterr().out.split()
    assert len(here) == 3
    assert _planned_by_another_process() == here
