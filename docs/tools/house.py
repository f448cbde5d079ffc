"""Generate parts of CONTRIBUTING.md and README.md, between their ``<!-- begin: NAME -->`` marks.

python docs/tools/house.py

Writes the diagram of packages (from the layers that import-linter checks), the forms of one operation in each
package, and the README's table of estimated times; ``tests/test_docs.py`` checks that they are current.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import torch
from doc_tables import RESULTS, map_of, markdown
from torch import nn

import graphplan

ROOT = Path(__file__).parents[2]

# model and case of benchmarks/real_models.py, and the README's name for both
_SHOWN = (
    ("llama-3-70b", "2x0.55", "Llama 3 70B, two identical GPUs"),
    ("qwen-moe", "mixed", "Qwen MoE, three mixed GPUs"),
    ("mixtral-8x7b", "1x0.7", "Mixtral 8x7B, one GPU and the CPU"),
)


def times_table() -> str:
    """Return a table of the times of graphplan's plans and accelerate's maps, and a summary of all cases."""
    rows = json.loads((RESULTS / "real_models.json").read_text(encoding="utf-8"))["rows"]
    by_case = {(row["model"], row["case"]): row for row in rows}
    lines = []
    for model, case, text in _SHOWN:
        row = by_case[model, case]
        ours, other = 1e3 * row["makespan"], 1e3 * map_of(row)["seconds"]
        lines.append([text, f"{ours:.1f} ms", f"{other:.1f} ms", f"{other / ours:.2f}×"])
    ratios = [row["makespan"] / map_of(row)["seconds"] for row in rows if "accelerate" in row["beaten_by"]]
    equal = sum(abs(map_of(row)["seconds"] / row["makespan"] - 1) < 0.01 for row in rows)
    header = ["model and devices", "graphplan", "accelerate's map", "ratio"]
    faster = f"accelerate's map is faster in {len(ratios)}" + (
        f", by at most {100 * (max(ratios) - 1):.2f} %." if ratios else "."
    )
    text = f"Of {len(rows)} cases, {equal} are within 1 % of each other; {faster}"
    return f"{markdown(header, lines)}\n\n{text}\n{_tokens()}"


def _tokens() -> str:
    """Return how much faster the single tokens of text generation are, where weights are in CPU memory."""
    rows = json.loads((RESULTS / "generation.json").read_text(encoding="utf-8"))["rows"]
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        token = row["token"]
        ratios[row["model"].startswith("llama")].append(token["accelerate"] / token["seconds"])
    return (
        f"Tokens after a prompt, with weights in CPU memory: {_range(ratios[True])} times faster for Llamas, "
        f"{_range(ratios[False])} times for mixtures of experts."
    )


def _range(ratios: list[float]) -> str:
    return f"{min(ratios):.0f} to {max(ratios):.0f}"


def rooms_diagram() -> str:
    """Return the layers of pyproject.toml as a Mermaid diagram; imports follow the arrows."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    by_container = {
        contract["containers"][0]: contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    }
    lines = ["```mermaid", "flowchart TB"]
    for container in ("graphplan", "graphplan.passes", "graphplan.runtime"):
        name = container.rpartition(".")[2]
        layers = [" · ".join(re.split(r" [|:] ", layer)) for layer in by_container[container]]
        nodes = [f'{name}{number}["{layer}"]' for number, layer in enumerate(layers)]
        lines += [f'  subgraph {name}_rooms["{container}"]', f"    {' --> '.join(nodes)}", "  end"]
    return "\n".join([*lines, "```"])


def walk() -> str:
    """Return how one linear layer of a small model is represented in each package."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval(), torch.ones(4, 256)
    captured = torch.export.export(model, (x,)).graph
    node = next(node for node in captured.nodes if node.name == "linear_1")
    with graphplan.simulate({0: "300KiB", 1: "300KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
    plan = placed.plan
    operation = next(line for line in str(plan.graph).splitlines() if line.strip().startswith("linear_1 ="))
    stage = plan.stage_of("linear_1")
    placing = f"linear_1 runs on {stage.device}; 2.weight resides on {plan.placement['2.weight']}"
    steps = [str(step) for step in plan.schedule.steps]
    code = [
        line.strip().partition(";")[0]
        for line in placed.code.splitlines()
        if "linear_1 =" in line or "= linear.to(" in line
    ]
    stops = {
        "`capture/`: a node of the exported fx graph": node.format_node() or "",
        "`passes/frontend/`: an operation with its bytes and FLOPs": operation.strip(),
        "`passes/placement/`: devices": placing,
        "`passes/schedule/`: every transfer a step": "\n".join(steps),
        "`passes/lowering/`: the code that `runtime/` runs": "\n".join(code),
    }
    return "\n\n".join(f"{title}\n\n```text\n{text}\n```" for title, text in stops.items())


PARTS = {
    "CONTRIBUTING.md": {"rooms": rooms_diagram, "walk": walk},
    "README.md": {"times": times_table},
}


def filled(page: str, name: str, text: str) -> str:
    """Return the page with the text between the marks of ``name`` replaced."""
    begin, end = f"<!-- begin: {name} -->\n", f"\n<!-- end: {name} -->"
    head, _, rest = page.partition(begin)
    _, mark, tail = rest.partition(end)
    if not mark:
        raise ValueError(f"no marks of {name!r}: add {begin.strip()} and {end.strip()}")
    return head + begin + text + mark + tail


def main() -> None:
    for page, parts in PARTS.items():
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        for name, make in parts.items():
            text = filled(text, name, make())
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
