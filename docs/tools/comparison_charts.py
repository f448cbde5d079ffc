"""Charts of the comparison page: estimated times of other planners' placements over graphplan's.

Colors are CSS variables of ``docs/extra.css``, so that the charts follow the light and the dark scheme.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from doc_tables import CASES, RESULTS, map_of, ratio_of

from graphplan.report.svg_elements import text

_WIDTH, _ROW, _TOP, _LABELS = 900, 22, 46, 178  # pixels of the view box
_FASTER, _SLOWER = "var(--chart-faster, #3b6fd4)", "var(--chart-slower, #c75d1c)"
_OTHER, _GRID = "var(--chart-other, #0f8b7d)", "var(--chart-grid, #0003)"
_text = partial(text, fill="currentColor", size=13)
_TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis of ratios between two x positions."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def over(cls, left: float, right: float, ratios: Iterable[float]) -> _Axis:
        """Return an axis that covers all ratios, and 1."""
        marks = [1.0, *ratios]
        return cls(left, right, 0.9 * min(marks), 1.25 * max(marks))

    def x(self, ratio: float) -> float:
        """Return the x position of a ratio."""
        share = math.log(ratio / self.low) / math.log(self.high / self.low)
        return self.left + share * (self.right - self.left)

    def grid(self, bottom: float) -> list[str]:
        """Return the SVG of a line and a label for each tick."""
        parts = []
        for tick in (tick for tick in _TICKS if self.low <= tick <= self.high):
            x, width = self.x(tick), 1.5 if tick == 1 else 0.75
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom:.0f}" '
                f'style="stroke:{_GRID};stroke-width:{width}"/>'
            )
            parts.append(_text(x, _TOP - 12, f"{tick:g}×", anchor="middle", size=11))
        return parts


def charts() -> dict[str, str]:
    """Return file name -> SVG of each chart."""
    models = json.loads((RESULTS / "real_models.json").read_text(encoding="utf-8"))["rows"]
    graphs = json.loads((RESULTS / "placement.json").read_text(encoding="utf-8"))["results"]
    return {"models.svg": models_svg(models), "graphs.svg": graphs_svg(graphs)}


def models_svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw a panel for each set of devices, with accelerate's time over graphplan's for each model."""
    sizes = {row["model"]: row["weights"] for row in rows}
    names = sorted(sizes, key=lambda name: -sizes[name])
    ratios = {(row["model"], row["case"]): ratio_of(row) for row in rows}
    bottom = _TOP + _ROW * len(names)
    panel = (_WIDTH - _LABELS) / len(CASES)
    parts = [
        _text(0, _TOP + _ROW * number + 16, f"{name}, {sizes[name] / 1e9:.1f} GB")
        for number, name in enumerate(names)
    ]
    for column, (case, title) in enumerate(CASES.items()):
        left = _LABELS + column * panel
        axis = _Axis.over(left + 6, left + panel - 30, (r for r in ratios.values() if r is not None))
        parts += [_text(axis.x(1), 14, title, weight=600), *axis.grid(bottom)]
        for number, name in enumerate(names):
            ratio = ratios.get((name, case))
            if ratio is not None:
                parts += _bar(axis, ratio, _TOP + _ROW * number, f"{name}, {title}")
    return _svg(parts, bottom + 8, "Accelerate's estimated time over graphplan's, by model and devices")


def _bar(axis: _Axis, ratio: float, top: float, title: str) -> list[str]:
    """Return a line from 1 to the ratio with a dot at its end, and the ratio as a number."""
    start, end, middle = axis.x(1), axis.x(ratio), top + _ROW / 2
    colour = _SLOWER if ratio < 0.99 else _FASTER
    label = html.escape(f"{title}: {ratio:.3f}")
    return [
        f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
        f'style="stroke:{colour};stroke-width:4"/>',
        f'<circle cx="{end:.1f}" cy="{middle:.1f}" r="4.5" style="fill:{colour}">'
        f"<title>{label}</title></circle>",
        _text(max(start, end) + 8, middle + 4, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", size=11),
    ]


def graphs_svg(results: Sequence[Mapping[str, Any]]) -> str:
    """Draw a row for each benchmark graph, with marks for accelerate's map and for sequential fill."""
    bottom = _TOP + _ROW * len(results)
    legend = (("accelerate", _FASTER), ("sequential fill", _OTHER))
    marks = [
        (number, name, colour, other, other["seconds"] / run["seconds"])
        for number, row in enumerate(results)
        for run in (run for run in row["runs"] if run["limit"] is None)
        for name, colour in legend
        if (other := map_of(row, name))["seconds"] is not None
    ]
    axis = _Axis.over(_LABELS + 90, _WIDTH - 40, (ratio for *_, ratio in marks))
    parts = axis.grid(bottom)
    for number, (name, colour) in enumerate(legend):
        parts.append(f'<circle cx="{6 + 130 * number}" cy="10" r="5" style="fill:{colour}"/>')
        parts.append(_text(16 + 130 * number, 14, name))
    for number, row in enumerate(results):
        shown = f"{row['instance']}, {row['operations']} operations"
        parts.append(_text(0, _TOP + _ROW * number + _ROW / 2 + 5, shown))
    for number, name, colour, other, ratio in marks:
        note = ", over budget" if other["over"] else ""
        label = f"{results[number]['instance']}: {name} {ratio:.3f}{note}"
        paint = f"fill:{'none' if other['over'] else colour};stroke:{colour};stroke-width:2"
        parts.append(
            f'<circle cx="{axis.x(ratio):.1f}" cy="{_TOP + _ROW * number + _ROW / 2:.1f}" r="5" '
            f'style="{paint}"><title>{html.escape(label)}</title></circle>'
        )
    return _svg(parts, bottom + 8, "Estimated times of other placements over graphplan's, by graph")


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
    return f'{start}aria-label="{html.escape(label)}" font-family="sans-serif">' + "".join(parts) + "</svg>"
