"""What the pages take in: what their code prints, the benchmarks' tables, pictures, the command's help.

python docs/tools/doc_pages.py

Writes ``docs/generated/``; ``make docs`` does this first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import doc_pictures
from doc_blocks import command, outputs_of
from doc_tables import tables

COMMANDS = ("demo", "plan", "show", "compare", "devices", "explain")


def pages(docs: Path) -> list[Path]:
    """The pages with code that is run."""
    return [docs / "tutorial.md", *sorted((docs / "how-to").glob("*.md"))]


def write_outputs(docs: Path, into: Path) -> None:
    """One file for each block that prints something: ``<page>-<number of the block, from 1>.txt``."""
    for page in pages(docs):
        with tempfile.TemporaryDirectory() as folder:
            for number, text in enumerate(outputs_of(page, Path(folder)), 1):
                (into / f"{page.stem}-{number}.txt").write_text(text.rstrip() + "\n", encoding="utf-8")


def write_rest(into: Path) -> None:
    """Tables, pictures and help texts."""
    for name, text in tables().items():
        (into / f"{name}.md").write_text(text, encoding="utf-8")
    doc_pictures.write(into)
    for name in COMMANDS:
        (into / f"help-{name}.txt").write_text(
            command([name, "--help"], into).strip() + "\n", encoding="utf-8"
        )


def main() -> None:
    docs = Path(__file__).resolve().parents[1]
    into = docs / "generated"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    write_outputs(docs, into)
    write_rest(into)
    print(f"wrote {into}")


if __name__ == "__main__":
    main()
