"""Pictures of one small plan for the documentation, drawn from the plan's own data.

A model of four blocks over two accelerators and the CPU, with too little memory for all weights, so that
some are streamed.
"""

from __future__ import annotations

import html
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from comparison_charts import charts
from torch import nn

import graphplan
from graphplan.analysis.plan import Plan
from graphplan.devices.topology import DeviceKey
from graphplan.ir.timeline import Event
from graphplan.report.svg import to_svg

_COLOURS = {"run": "#4c78a8", "move": "#e45756", "load": "#54a24b", "wait": "#b8b8b8"}
_WORDS = {
    "run": "operations",
    "move": "moves",
    "load": "weights streamed ahead",
    "wait": "waiting for weights",
}
_WIDTH, _LANE, _LEFT = 900, 26, 70


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def example(blocks: int, memory: graphplan.devices.max_memory.MaxMemory) -> Plan:
    """A plan of so many blocks of 2 MiB, with links as slow as to be seen."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(Block(256) for _ in range(blocks))), torch.ones(64, 256)
    link = graphplan.Link(12e9, 5e-6)
    keys = list(memory)
    links = {(a, b): link for a in keys for b in keys if a != b}
    speed = graphplan.Speed(2e12, 200e9, 4e-6)
    accelerators = [key for key in keys if key != "cpu"]
    return graphplan.plan(model, memory, (x,), links=links, devices=dict.fromkeys(accelerators, speed))


def pictures() -> dict[str, str]:
    """File name -> text of each picture."""
    small = example(1, {0: "64MiB"})
    large = example(4, {0: "4MiB", 1: "3MiB", "cpu": "64MiB"})
    return {
        "graph.txt": str(small.graph),
        "summary.txt": large.summary(),
        "placed.svg": _drawn(large),
        "plan.svg": to_svg(large, "Four blocks over two accelerators and the CPU"),
        "timeline.svg": timeline_svg(large),
        "memory.svg": memory_svg(large),
        **charts(),
        "code.txt": _code(),
    }


def _code() -> str:
    """The lowered code of two blocks over two simulated accelerators."""
    model = nn.Sequential(Block(64), Block(64)).eval()
    x = torch.ones(8, 64)
    with graphplan.simulate({0: "160KiB", 1: "160KiB"}) as machine:
        return str(graphplan.partition(model, machine.max_memory, (x,)).code)


def _drawn(plan: Plan) -> str:
    """The plan's own DOT, by graphviz.

    Raises:
        RuntimeError: graphviz is not installed.
    """
    if shutil.which("dot") is None:
        raise RuntimeError("the pictures need graphviz: install it, so that there is a command `dot`")
    path = Path("plan.dot")
    plan.save_dot(path)
    done = subprocess.run(["dot", "-Tsvg", str(path)], capture_output=True, text=True, check=True)
    path.unlink()
    return done.stdout[done.stdout.index("<svg") :]


# -- charts ----------------------------------------------------------------------------------------------


def timeline_svg(plan: Plan) -> str:
    """Lanes of operations, moves and streamed weights over the time of one forward pass."""
    lanes = _lanes(plan)
    scale = (_WIDTH - _LEFT - 10) / plan.timeline.seconds
    parts = []
    for row, (name, events) in enumerate(lanes.items()):
        y = 10 + row * (_LANE + 6)
        parts.append(_text(4, y + 17, name))
        for event in events:
            x, width = _LEFT + event.start * scale, max((event.end - event.start) * scale, 0.7)
            title = f"{event.name}: {1e6 * (event.end - event.start):.1f} µs on {event.device}"
            parts.append(_rect(x, y, width, _LANE, _COLOURS[event.kind], title))
    bottom = 10 + len(lanes) * (_LANE + 6) + 12
    parts.append(_text(_LEFT, bottom, "0"))
    parts.append(_text(_WIDTH - 70, bottom, f"{1e6 * plan.timeline.seconds:.0f} µs"))
    shown = dict.fromkeys(event.kind for event in plan.timeline.events if event.end > event.start)
    parts += _legend([(_COLOURS[kind], _WORDS[kind]) for kind in shown], bottom + 16)
    return _svg(parts, bottom + 32)


def _lanes(plan: Plan) -> dict[str, list[Event]]:
    """A lane for each device, and one for what is copied to it ahead."""
    lanes: dict[str, list[Event]] = {}
    for key in plan.topology.keys:
        lanes[str(key)] = []
        if any(event.kind == "load" and event.device == key for event in plan.timeline.events):
            lanes[f"to {key}"] = []
    for event in plan.timeline.events:
        if event.end > event.start:
            lanes[f"to {event.device}" if event.kind == "load" else str(event.device)].append(event)
    return {name: events for name, events in lanes.items() if events}


def memory_svg(plan: Plan) -> str:
    """Bytes on each accelerator at each step, with the budget."""
    parts: list[str] = []
    height, top = 90, 10
    for spec in (spec for spec in plan.topology.devices if spec.is_accelerator):
        profile = plan.memory.profile[spec.key]
        parts += _area(plan, spec.key, spec.memory, profile, top, height)
        top += height + 30
    parts += _legend(
        [("#9ecae9", "weights"), ("#4c78a8", "activations and copies"), ("#e45756", "budget")], top
    )
    return _svg(parts, top + 16)


def _area(
    plan: Plan, key: DeviceKey, budget: int, profile: Sequence[int], top: int, height: int
) -> Iterator[str]:
    step = (_WIDTH - _LEFT - 10) / len(profile)
    scale = height / (1.1 * budget)
    weights = plan.peaks[key].weights
    yield _text(4, top + height - 4, str(key))
    for index, nbytes in enumerate(profile):
        x = _LEFT + index * step
        for low, high, colour in ((0, weights, "#9ecae9"), (weights, nbytes, "#4c78a8")):
            y = top + height - high * scale
            yield _rect(
                x, y, step + 0.3, max(0.0, (high - low) * scale), colour, f"step {index}: {high:,} bytes"
            )
    y = top + height - budget * scale
    yield _rect(_LEFT, y, _WIDTH - _LEFT - 10, 1.5, "#e45756", f"budget: {budget:,} bytes")


def _legend(entries: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    for index, (colour, text) in enumerate(entries):
        x = _LEFT + 200 * index
        yield _rect(x, y - 10, 12, 12, colour, text)
        yield _text(x + 18, y, text)


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    box = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{colour}"'
    return f"<rect {box}><title>{html.escape(title)}</title></rect>"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" fill="currentColor">{html.escape(text)}</text>'


def _svg(parts: Sequence[str], height: float) -> str:
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
    return start + 'font-family="sans-serif" font-size="13">' + "".join(parts) + "</svg>"


def write(folder: Path) -> dict[str, Any]:
    """Write all of them into a folder."""
    made = pictures()
    for name, text in made.items():
        (folder / name).write_text(text.rstrip() + "\n", encoding="utf-8")
    return made
