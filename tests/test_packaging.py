"""The wheel holds every folder of the package."""

from __future__ import annotations

import subprocess
import sys
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


def test_an_import_loads_nothing_until_a_name_is_used() -> None:
    code = """
import sys, graphplan
assert graphplan.__version__ and not {"torch", "scipy", "networkx"} & sys.modules.keys()
assert not hasattr(graphplan, "nothing")
from graphplan import *
import graphplan.public
assert set(graphplan.__all__) == set(dir(graphplan)) == {*graphplan.public.__all__, "__version__"}
assert partition is graphplan.api.partition.partition
try:
    from graphplan import nothing
except ImportError as error:
    assert "nothing" in str(error)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_and_completion_load_no_torch() -> None:
    code = "import sys, graphplan.cli.commands; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
