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
from typing import Any

import pytest
from comparison_charts import graphs_svg, models_svg
from doc_blocks import Block, blocks_of, outputs_of
from doc_pages import COMMANDS, pages, pictures
from doc_tables import CASES, markdown, tables
from house import PARTS, filled
from shortcuts import short_search

import graphplan
from graphplan import errors
from graphplan.passes.placement.params import PARAMS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HAS_MKDOCS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings"))
PICTURES = (
    "graph.txt",
    "summary.txt",
    "placed.svg",
    "plan.svg",
    "models.svg",
    "graphs.svg",
    "code.txt",
)


def included(page: Path) -> set[str]:
    return set(re.findall(r'^ *--8<-- "(.+)"$', page.read_text(encoding="utf-8"), re.MULTILINE))


# pages that train, generate or plan for many devices, each some 10 seconds: under -m slow
LONG = {
    "from-accelerate", "generate", "laptop-for-cluster", "look-at-a-plan", "methods-and-submodules",
    "one-gpu-and-cpu", "several-machines", "train",
}  # fmt: skip


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page.stem in LONG), id=page.stem)
        for page in pages(DOCS)
    ],
)
def test_page_code_prints_the_shown_output(page: Path, tmp_path: Path) -> None:
    with short_search():
        outputs = list(outputs_of(page, tmp_path))
    assert outputs, "the page has no code that is run"
    shown = {f"{page.stem}-{number}.txt" for number, text in enumerate(outputs, 1) if text.strip()}
    assert included(page) == shown


@pytest.mark.slow
def test_the_scripts_of_several_machines_run_in_two_processes(tmp_path: Path) -> None:
    page = (DOCS / "how-to" / "several-machines.md").read_text(encoding="utf-8")
    scripts = re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [name for _, name in scripts] == ["run.py", "train.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    def run(name: str) -> str:
        done = subprocess.run([*torchrun, name], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for text, name in scripts:
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert run("run.py").count("all 32 results") == 2
    assert run("train.py").count("has done step") == 6
    (tmp_path / "train.py").write_text(scripts[1][0].replace(", 3\n", ", 5\n"), encoding="utf-8")
    assert run("train.py").count("has done step") == 4  # from the checkpoint of step 2 on


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


def test_the_front_page_is_short_and_its_files_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    links = re.findall(r'(?:\]\(|src="|srcset=")([^)"#]+)', readme)
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_the_planners_page_has_every_field_of_the_parameters() -> None:
    text = (DOCS / "planner.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE))
    assert {name: float(value) for name, value in listed.items()} == asdict(PARAMS)


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


def test_sections_are_of_the_results() -> None:
    made = tables()
    assert included(DOCS / "comparison.md") - set(PICTURES) == {f"{name}.md" for name in made}
    for name, text in made.items():
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        if path.is_file():
            assert json.loads(path.read_text(encoding="utf-8"))["machine"]["processor"] in text


def test_measured_times_are_beside_the_peaks_and_the_differences() -> None:
    text = tables()["offload"]
    assert "| graphplan | 6.7 GB | 6.7 GB | 35 ms |" in text
    assert "| 26 s | 3.1 % |" in text
    assert "| accelerate | 6.7 GB | 4.5 GB | 934 ms |" in text
    assert "no better map was searched for" in text


def test_pages_without_results_have_no_tables(tmp_path: Path) -> None:
    assert set(tables(tmp_path).values()) == {""}


def test_sections_of_results_that_are_not_there_yet(tmp_path: Path) -> None:
    machine = {"date": "d", "processor": "p", "cores": 1, "gpus": [], "versions": {}}
    ways = [{"way": "ours", "seconds": 1.5}, {"way": "load_file", "seconds": 2.0}]
    loading = {"machine": machine, "bytes": 2e9, "rows": ways, "loads": [{"seconds": 3.0}]}
    stages = {"layers": 2, "operations": 9, "seconds": {"capture": 1.0, "place": 2.0}}
    planning = {"machine": machine, "devices": 8, "rows": [stages]}
    for name, data in {"loading": loading, "planning_time": planning}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    made = tables(tmp_path)
    assert "in CPU seconds: ours 1.50 s, load_file 2.00 s." in made["loading"]
    assert "planning included, takes 3.0 s: first" in made["loading"]
    assert "on 8 devices, trace included: 2 layers (9 operations) 3.0 s." in made["planning_time"]


def real_models() -> list[dict[str, Any]]:
    """Two models in each case: one that is as fast by accelerate's map, one that is faster by it."""
    rows = []
    for case in CASES:
        for model, seconds, over in (("a", 1.0, 0), ("b", 0.5, 0), ("c", 9.0, 5)):
            other = {"name": "accelerate", "seconds": seconds, "over": over}
            row = {"model": model, "case": case, "weights": 1e9, "makespan": 0.5, "gap": 0.25}
            rows.append({**row, "planning": 3.0, "error": "", "others": [other], "beaten_by": []})
    return rows


def test_the_summary_of_real_models_counts_who_is_faster(tmp_path: Path) -> None:
    machine = {"date": "d", "processor": "p", "cores": 1, "gpus": [], "versions": {}}
    data = {"machine": machine, "rows": real_models()}
    (tmp_path / "real_models.json").write_text(json.dumps(data), encoding="utf-8")
    text = tables(tmp_path)["real_models"]
    assert "| two identical GPUs | 1.50× | 1 | 1 | 0 | 25.0 % |" in text
    assert "3 to 3 CPU seconds" in text
    assert markdown(["x"], [["y | z"]]) == "| x |\n| :-- |\n| y \\| z |"


def test_charts_mark_each_feasible_placement() -> None:
    drawn = models_svg(real_models())
    assert drawn.count("<circle") == 2 * len(CASES)  # the third model's map exceeds its budget
    others = [
        {"name": "accelerate", "seconds": 2.0, "over": 3},
        {"name": "sequential fill", "seconds": 1.0, "over": 0},
    ]
    run = {"limit": None, "seconds": 1.0}
    row = {"instance": "x", "operations": 3, "runs": [run], "others": others}
    drawn = graphs_svg([row])
    assert drawn.count("<circle") == 2 + 2  # and the legend's
    assert drawn.count("fill:none") == 1
    far = graphs_svg([{**row, "runs": [{**run, "seconds": 1e-6}]}])  # the axis reaches as far as its marks
    places = [float(x) for x in re.findall(r'<circle cx="([0-9.]+)"', far)]
    assert all(0 < x < 900 for x in places)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_pictures_are_those_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = pictures()
    assert set(drawn) == set(PICTURES)
    assert all("<svg" in text for name, text in drawn.items() if name.endswith(".svg"))
    assert "def forward" in drawn["code.txt"]


@pytest.mark.skipif(
    not HAS_MKDOCS, reason="mkdocs-material or mkdocstrings is not installed: the extra `docs`"
)
@pytest.mark.slow
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
        text = page.read_text(encoding="utf-8")
        assert "```" not in text, f"{page.name} has a block that is shown as text"
        loaded = re.findall(r'<script[^>]+src="?(https?:[^ >]+)', text)
        assert loaded == [], f"{page.name} needs the network"
    placing = (tmp_path / "site" / "reference" / "placing.html").read_text(encoding="utf-8")
    assert 'id="graphplan.plan"' in placing
    assert "the devices need not exist on this machine" in placing  # of its docstring
    assert not re.search(r'(src|href)="https?://fonts', placing)
