"""The plan of several machines as one HTML file: figures, the picture of a batch, and a table.

The styles are those of a plan's page. There is no script: names are escaped when the page is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from graphplan.ir.cluster.cluster_plan_data import ClusterPlanData
from graphplan.message_text import size_text
from graphplan.report.cluster.cluster_perfetto import Slot
from graphplan.report.cluster.cluster_svg import to_cluster_svg
from graphplan.report.cluster.cluster_text import (
    HEADER,
    bounded_text,
    machine_rows,
    network_text,
    schedule_text,
    shares_text,
)
from graphplan.report.html_page import asset
from graphplan.report.text import count_text, time_text


def to_cluster_html(plan: ClusterPlanData[Any], title: str = "", measured: Sequence[Slot] = ()) -> str:
    """Return the page of a plan, with a measured batch, if given, below the estimated one."""
    title = title or "Plan"
    used = count_text(len(plan.used), "machine")
    parts = count_text(plan.microbatches, "microbatch", "microbatches")
    direction = " forward" if measured and plan.trains else ""
    pictures = [to_cluster_svg(plan, f"Batch{direction}, estimated", forward_only=bool(direction))]
    if measured:
        pictures.append(to_cluster_svg(plan, f"Batch{direction}, measured", measured))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{asset('page.css')}</style>\n</head>\n<body>",
            f'<header class="bar"><h1>{escape(title)}</h1>',
            f'<p class="subtitle">{used} · {parts} · {schedule_text(plan)}</p></header>\n<main>',
            '<section aria-label="Summary"><div class="figures">',
            *(_figure(*one) for one in _figures(plan)),
            "</div></section>",
            *(f'<section class="scroll">{picture}</section>' for picture in pictures),
            f"<section>{_table(HEADER, machine_rows(plan))}</section>",
            "</main>\n</body>\n</html>\n",
        ]
    )


def _figures(plan: ClusterPlanData[Any]) -> Iterator[tuple[str, str, str]]:
    yield "Batch", time_text(plan.makespan), f"{time_text(plan.latency)} for one microbatch, estimated"
    bound = f"{time_text(plan.lower_bound)} for {bounded_text(plan)}: {plan.proof}"
    yield "Gap to the lower bound", f"{100 * plan.gap:.1f} %", bound
    yield "Bubble", f"{100 * plan.bubble:.0f} %", shares_text(plan)
    yield "Network", size_text(plan.network_bytes), f"for each microbatch, at {network_text(plan.network)}"


def _figure(title: str, value: str, note: str) -> str:
    return (
        f'<div class="figure"><span class="title">{escape(title)}</span><b>{escape(value)}</b>'
        f'<span class="note">{escape(note)}</span></div>'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<div class="scroll"><table><thead>{line("th", header)}</thead><tbody>{body}</tbody></table></div>'
    )
