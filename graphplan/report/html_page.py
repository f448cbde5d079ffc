"""A plan as one HTML file that needs nothing else: no network, no second file.

The template, the styles and the scripts are files of ``graphplan/report/assets``; the plan goes in as
JSON. Names of a model are data only: in the page they are always set as text, and no text ends the JSON's
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
# an escape of JSON; the group has those that would hide or turn around what is beside them: controls, marks
# without width, and those that set the direction of text
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
    """The page of a plan, with a measured call and another plan of the same model beside, if they are given.

    Raises:
        PlanError: the other plan has no operation of this one.
    """
    title = title or "Plan"
    parts = {
        "title": html.escape(json.loads(_plain(json.dumps(title)))),
        "style": f"<style>\n{asset('page.css')}</style>",
        "scripts": "\n".join(f"<script>\n{asset(name)}</script>" for name in _SCRIPTS),
        "data": _embedded({"title": title, **page_data(plan, measured, remarks, other)}),
    }
    return _SLOT.sub(lambda found: parts[found[1]], asset("page.html"))


def asset(name: str) -> str:
    """The text of a file of ``graphplan/report/assets``."""
    return files("graphplan.report").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")


def _plain(text: str) -> str:
    """JSON whose strings show characters that cannot be seen by their numbers."""
    return _ESCAPE.sub(lambda found: ("\\" if found[1] else "") + found[0], text)


def _embedded(data: dict[str, Any]) -> str:
    """JSON for an element of the page: without characters that could end the element or begin a comment."""
    text = _plain(json.dumps(data, separators=(",", ":"), ensure_ascii=True))
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="plan">{escaped}</script>'
