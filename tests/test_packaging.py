"""The wheel holds every folder of the package."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {"graphplan": "graphplan", "passes": "graphplan.passes", "runtime": "graphplan.runtime"}
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for folder, package in folders.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(settings["tool"]["setuptools"]["packages"])
