"""The plan of several machines as one HTML file: its summary, and the picture of a batch.

The styles are those of a plan's page. There is no script: names are escaped when the page is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from graphplan.ir.cluster.cluster_plan_data import ClusterPlanData
from graphplan.report.cluster.cluster_perfetto import Slot
from graphplan.report.cluster.cluster_svg import to_cluster_svg
from graphplan.report.cluster.cluster_text import cluster_summary
from graphplan.report.html_page import asset


def to_cluster_html(plan: ClusterPlanData[Any], title: str = "", measured: Sequence[Slot] = ()) -> str:
    """Return the page of a plan, with a measured batch, if given, below the estimated one."""
    heading = escape(title or "Plan")
    direction = " forward" if measured and plan.trains else ""
    pictures = [to_cluster_svg(plan, f"Batch{direction}, estimated", forward_only=bool(direction))]
    if measured:
        pictures.append(to_cluster_svg(plan, f"Batch{direction}, measured", measured))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{heading}</title>\n<style>\n{asset('page.css')}</style>\n</head>\n<body>",
            f'<header class="bar"><h1>{heading}</h1></header>\n<main>',
            f'<section class="scroll"><pre>{escape(cluster_summary(plan))}</pre></section>',
            *(f'<section class="scroll">{picture}</section>' for picture in pictures),
            "</main>\n</body>\n</html>\n",
        ]
    )
