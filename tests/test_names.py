"""A name is one thing: no file and no class of the project has the name of another."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for room in ("graphplan", "passes", "runtime") for path in (ROOT / room).rglob("*.py")]
EVERY_ROOM = ("__init__.py", "__main__.py")


def repeated(places: dict[str, set[Path]]) -> dict[str, list[str]]:
    return {name: sorted(map(str, of)) for name, of in places.items() if len(of) > 1}


def test_no_file_name_is_used_twice() -> None:
    places = defaultdict(set)
    for path in FILES:
        if path.name not in EVERY_ROOM:
            places[path.name].add(path.resolve())  # passes/ and runtime/ are linked in graphplan/
    assert len(places) > 200
    assert not repeated(places)


def test_no_class_name_is_used_twice() -> None:
    places = defaultdict(set)
    for path in {path.resolve() for path in FILES}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path)
    assert len(places) > 200
    assert not repeated(places)
