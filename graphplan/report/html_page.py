"""A plan as one self-contained HTML file: no network, no second file.

The template, the styles and the scripts are files of ``graphplan/report/assets``; the plan is embedded as
JSON. Names of a model are data only: the page always sets them as text, and no text can end the JSON's
element.
"""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from typing import Any

from graphplan.ir.plan_data import PlanData
from graphplan.ir.remarks import Remarks
from graphplan.ir.timeline import Measured
from graphplan.report.page_data import page_data

_SCRIPTS = (
    "vendor/cytoscape.min.js",
    "vendor/dagre.min.js",
    "format.js",
    "model.js",
    "dom.js",
    "layout.js",
    "overview.js",
    "paper.js",
    "graph_style.js",
    "graph.js",
    "outline.js",
    "details.js",
    "search.js",
    "memory.js",
    "timeline.js",
    "tables.js",
    "compare.js",
    "spent.js",
    "main.js",
)
# an escape of JSON; the group matches characters that hide or reorder text near them: controls, zero-width
# marks, and marks of text direction
_ESCAPE = re.compile(
    r"\\(?:([bfnrt]|u00[01].|u00[89].|u00ad|u061c|u180e|u200[b-f]|u202[89a-e]|u206.|ufeff)|u....|.)"
)
_SLOT = re.compile(r"<!-- (title|style|scripts|data) -->")


def to_html(
    plan: PlanData,
    title: str = "",
    measured: Measured | None = None,
    remarks: Remarks | None = None,
    other: PlanData | None = None,
) -> str:
    """Return the page of a plan, with a measured call and another plan of the same model if given.

    Raises:
        PlanError: the other plan is of another graph.
    """
    title = title or "Plan"
    parts = {
        "title": html.escape(json.loads(_plain(json.dumps(title)))),
        "style": f"<style>\n{asset('page.css')}</style>",
        "scripts": "\n".join(f"<script>\n{asset(name)}</script>" for name in _SCRIPTS),
        "data": _embedded({"title": title, **page_data(plan, measured, remarks, other)}),
    }
    return _SLOT.sub(lambda match: parts[match[1]], asset("page.html"))


def asset(name: str) -> str:
    """Return the text of a file of ``graphplan/report/assets``."""
    return files("graphplan.report").joinpath("assets", name).read_text(encoding="utf-8")


def _plain(text: str) -> str:
    """Return JSON whose strings show the numbers of invisible characters in their place."""
    return _ESCAPE.sub(lambda match: ("\\" if match[1] else "") + match[0], text)


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON as an element of the page, without characters that could end it or begin a comment."""
    text = _plain(json.dumps(data, separators=(",", ":"), ensure_ascii=True))
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="plan">{escaped}</script>'
