"""The ``graphplan`` command; needs the ``cli`` extra (typer, rich)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from graphplan.demo import DemoResult, run_demo
from graphplan.errors import GraphplanError

__all__ = ["app", "run"]

app = typer.Typer(no_args_is_help=True, help="Place PyTorch models over devices.")
_console = Console(highlight=False, soft_wrap=True)


def run() -> None:
    """Run the command; an error of ours is one line on stderr and exit code 1."""
    try:
        app()
    except GraphplanError as error:
        print(f"graphplan: {error}", file=sys.stderr)
        sys.exit(1)


@app.callback()
def _group() -> None:
    """Place PyTorch models over devices."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for plan.json and plan.dot.")] = Path("out"),
) -> None:
    """Place a real sentence encoder over two accelerators and the CPU, and compare its results."""
    with _console.status("loading, planning and placing all-MiniLM-L6-v2 ..."):
        result = run_demo()
    _report(result)
    out.mkdir(parents=True, exist_ok=True)
    result.plan.save_json(out / "plan.json")
    result.plan.save_dot(out / "plan.dot")
    _console.print(f"\nwrote {out / 'plan.json'} and {out / 'plan.dot'}")
    if result.difference > 1e-5:
        raise GraphplanError(f"the placed model's embeddings differ by {result.difference}")


def _report(result: DemoResult) -> None:
    show = _console.print
    kind = "simulated accelerators" if result.simulated else "accelerators"
    show(f"all-MiniLM-L6-v2 over two {kind} and the CPU\n")
    show(result.plan.summary(), markup=False)
    show("\nmeasured peaks against plan and budget:")
    for key, measured in result.measured_peak_bytes.items():
        budget = result.plan.topology[key].memory
        show(f"  {key}: {measured:,} <= {result.plan.peak_bytes[key]:,} <= {budget:,} bytes")
    name, device = result.offloaded
    show(f"\n{name} stays on the CPU, and says so: device {device}")
    show(f"largest difference from the unplaced model's embeddings: {result.difference:.1e}\n")
    for i, sentence in enumerate(result.sentences):
        row = result.similarity[i].clone()
        row[i] = -1
        best = int(row.argmax())
        show(f"  {sentence:46s} is closest to: {result.sentences[best]} ({float(row[best]):.2f})")
