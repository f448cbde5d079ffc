"""The wheel holds every folder of the package; the versions that it admits are those that were tested."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import graphplan
from graphplan import public
from graphplan._compat import TESTED
from graphplan.api.partition import partition

ROOT = Path(__file__).parents[1]


def pinned(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_folder_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {"graphplan": "graphplan", "passes": "graphplan.passes", "runtime": "graphplan.runtime"}
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / folder).parts])
        for folder, package in folders.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(settings["tool"]["setuptools"]["packages"])


def test_the_floor_has_the_oldest_versions_that_are_admitted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["transformers"]
    oldest = dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in needed)
    assert {
        name: version.startswith(f"{oldest[name]}.") or version == oldest[name]
        for name, version in pinned("constraints-floor.txt").items()
    } == dict.fromkeys(oldest, True)


def test_messages_name_the_versions_that_were_tested() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    runs = re.findall(r"^\| (2\.\d+\.\d+) \| (5\.\d+\.\d+) \|", page, re.MULTILINE)
    daily, floor = pinned("constraints.txt"), pinned("constraints-floor.txt")
    for index, package in enumerate(("torch", "transformers")):
        assert {*(run[index] for run in runs), daily[package]} == {*TESTED[package]}
        assert TESTED[package][0] == floor[package]


def test_the_import_help_and_completion_load_no_torch() -> None:
    code = """
import sys, graphplan
assert graphplan.__version__ and not {"torch", "scipy", "networkx"} & sys.modules.keys()
import graphplan.cli.commands
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_names_are_found_as_they_are_used() -> None:
    spec = graphplan.__spec__
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert "partition" not in vars(fresh)
    assert not hasattr(fresh, "nothing")
    assert fresh.partition is partition
    assert set(fresh.__all__) == set(dir(fresh)) == {*public.__all__, "__version__"}
    assert set(fresh.__all__) <= vars(fresh).keys()
