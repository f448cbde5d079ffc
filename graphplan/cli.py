"""The ``graphplan`` command."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from graphplan.demo import DemoResult, run_demo
from graphplan.errors import GraphplanError

__all__ = ["main"]


def main() -> None:
    """Entry point of the ``graphplan`` command; exits 1 with one line on an error of ours."""
    if importlib.util.find_spec("typer") is None:
        sys.exit("graphplan: the command needs typer and rich: pip install 'graphplan[cli]'")
    import typer  # optional package

    app = typer.Typer(add_completion=True, no_args_is_help=True, help="Place PyTorch models over devices.")

    @app.callback()
    def group() -> None:
        """Place PyTorch models over devices."""

    @app.command()
    def demo(
        out: Path = typer.Option(Path("out"), help="Folder for plan.json and plan.dot."),  # noqa: B008  # typer's way
    ) -> None:
        """Place a real sentence encoder over two accelerators and the CPU, and compare its results."""
        from rich.console import Console  # optional package

        console = Console(highlight=False)
        with console.status("loading, planning and placing all-MiniLM-L6-v2 ..."):
            result = run_demo()
        _report(result, console.print)
        out.mkdir(parents=True, exist_ok=True)
        result.plan.save_json(out / "plan.json")
        result.plan.save_dot(out / "plan.dot")
        console.print(f"\nwrote {out / 'plan.json'} and {out / 'plan.dot'}")
        if result.difference > 1e-5:
            raise GraphplanError(f"the placed model's embeddings differ by {result.difference}")

    try:
        app(standalone_mode=True)
    except GraphplanError as error:
        print(f"graphplan: {error}", file=sys.stderr)
        sys.exit(1)


def _report(result: DemoResult, show: object) -> None:
    assert callable(show)
    kind = "simulated accelerators" if result.simulated else "accelerators"
    show(f"all-MiniLM-L6-v2 over two {kind} and the CPU\n")
    show(result.plan.summary())
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


if __name__ == "__main__":
    main()
