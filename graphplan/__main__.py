"""Entry point of ``python -m graphplan`` and of the ``graphplan`` command."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line, or exit with one line that names the packages it lacks."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        how = "pip install '.[cli]' in a copy of the repository"  # on the package index the name is not ours
        sys.exit(f"graphplan: the command needs {' and '.join(missing)}: {how}")
    from graphplan.cli.commands import run  # optional packages

    run()


if __name__ == "__main__":
    main()
