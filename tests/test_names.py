"""Rules for names: each file and each class has its own; parameters are nouns; tests say what they test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for room in ("graphplan", "passes", "runtime") for path in (ROOT / room).rglob("*.py")]
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in {path.resolve() for path in FILES}  # passes/ and runtime/ are linked in graphplan/
}
TESTS = list((ROOT / "tests").rglob("test_*.py"))
EVERY_ROOM = ("__init__.py", "__main__.py")
NO_NOUNS = {
    *("near", "below", "every", "enough", "beside", "around", "usual", "rest"),
    *("become", "most", "least", "here", "there", "told", "asked", "own"),
}
SAVED = {"beside", "here"}  # fields of JSON files
MOST_WORDS = 9
HEADLESS = re.compile(r"test_(what|who|it|they|so)_")


def repeated(places: dict[str, set[Path]]) -> dict[str, list[str]]:
    return {name: sorted(map(str, of)) for name, of in places.items() if len(of) > 1}


def test_no_file_name_is_used_twice() -> None:
    places = defaultdict(set)
    for path in TREES:
        if path.name not in EVERY_ROOM:
            places[path.name].add(path)
    assert len(places) > 200
    assert not repeated(places)


def test_no_class_name_is_used_twice() -> None:
    """An underscore alone does not tell two classes apart."""
    places = defaultdict(set)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(path)
    assert len(places) > 200
    assert not repeated(places)


def test_parameters_and_fields_are_nouns() -> None:
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            match node:
                case ast.arg(arg=name) if name in NO_NOUNS:
                    found.append(f"{path}:{node.lineno} {name}")
                case ast.AnnAssign(target=ast.Name(id=name)) if name in NO_NOUNS - SAVED:
                    found.append(f"{path}:{node.lineno} {name}")
    assert not found


def test_test_names_are_short_and_name_their_subject() -> None:
    names = [
        node.name
        for path in TESTS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 1000
    assert not [name for name in names if name.count("_") > MOST_WORDS or HEADLESS.match(name)]
