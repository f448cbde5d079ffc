"""Write the files that pages include: printed output of their code, benchmark tables, pictures, CLI help.

python docs/tools/doc_pages.py

Writes ``docs/generated/``; ``make docs`` does this first. The pictures show a model of four blocks over two
accelerators and the CPU, with too little memory for all weights, so that some are streamed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from comparison_charts import charts
from doc_blocks import command, outputs_of
from doc_tables import tables
from torch import nn

import graphplan
from graphplan.analysis.plan import Plan
from graphplan.report.dot import to_dot
from graphplan.report.svg import to_svg

COMMANDS = ("demo", "plan", "run", "show", "compare", "devices", "explain")


def pages(docs: Path) -> list[Path]:
    """Return the pages whose code is run."""
    return [docs / "tutorial.md", *sorted((docs / "how-to").glob("*.md"))]


def printed(docs: Path) -> dict[str, str]:
    """Return ``<page>-<number of the block, from 1>.txt`` -> the text that the block prints."""
    outputs = {}
    for page in pages(docs):
        with tempfile.TemporaryDirectory() as folder:
            for number, text in enumerate(outputs_of(page, Path(folder)), 1):
                outputs[f"{page.stem}-{number}.txt"] = text
    return outputs


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def example(blocks: int, memory: graphplan.devices.max_memory.MaxMemory) -> Plan:
    """Return a plan of blocks of 2 MiB each, with links so slow that transfers are visible."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block(256) for _ in range(blocks))), torch.ones(64, 256)
    link = graphplan.Link(12e9, 5e-6)
    keys = list(memory)
    links = {(a, b): link for a in keys for b in keys if a != b}
    speed = graphplan.Speed(2e12, 200e9, 4e-6)
    accelerators = [key for key in keys if key != "cpu"]
    return graphplan.plan(model, memory, (x,), links=links, devices=dict.fromkeys(accelerators, speed))


def pictures() -> dict[str, str]:
    """Return file name -> text of each picture."""
    small = example(1, {0: "64MiB"})
    large = example(4, {0: "4MiB", 1: "3MiB", "cpu": "64MiB"})
    return {
        "graph.txt": str(small.graph),
        "summary.txt": large.summary(),
        "placed.svg": _drawn(large),
        "plan.svg": to_svg(large, "Four blocks over two accelerators and the CPU"),
        **charts(),
        "code.txt": _code(),
    }


def _code() -> str:
    """Return the lowered code of two blocks over two simulated accelerators."""
    model = nn.Sequential(Block(64), Block(64)).eval()
    x = torch.ones(8, 64)
    with graphplan.simulate({0: "160KiB", 1: "160KiB"}) as machine:
        return str(graphplan.partition(model, machine.max_memory, (x,)).code)


def _drawn(plan: Plan) -> str:
    """Render the plan's DOT text with graphviz.

    Raises:
        RuntimeError: graphviz is not installed.
    """
    if shutil.which("dot") is None:
        raise RuntimeError("the pictures need graphviz: install it, so that there is a command `dot`")
    dot = subprocess.run(
        ["dot", "-Tsvg"], input=to_dot(plan), capture_output=True, encoding="utf-8", check=True
    )
    return dot.stdout[dot.stdout.index("<svg") :]


def write(into: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (into / name).write_text(text.rstrip() + "\n", encoding="utf-8")


def main() -> None:
    docs = Path(__file__).resolve().parents[1]
    into = docs / "generated"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    write(into, printed(docs))
    write(into, {f"{name}.md": text for name, text in tables().items()})
    write(into, pictures())
    write(into, {f"help-{name}.txt": command([name, "--help"], into).strip() for name in COMMANDS})
    print(f"wrote {into}")


if __name__ == "__main__":
    main()
