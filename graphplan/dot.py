"""A plan in graphviz's language: a cluster for each device, in it one for each of its stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphplan.visualize import COLOURS, size_text

if TYPE_CHECKING:
    from graphplan.placement import Plan, Stage

__all__ = ["to_dot"]


def to_dot(plan: Plan) -> str:
    """The operations, with bytes on the edges that cross from device to device."""
    lines = [
        "digraph plan {",
        "  rankdir=TB; compound=true;",
        "  node [shape=box, style=filled, fontname=Helvetica, fontsize=11];",
        "  edge [color=gray45, fontname=Helvetica, fontsize=10];",
    ]
    for index, spec in enumerate(plan.topology.devices):
        stages = [stage for stage in plan.stages if stage.device == spec.key]
        if not stages:
            continue
        colour = COLOURS[index % len(COLOURS)]
        label = f"{spec.key}: {size_text(plan.peak_bytes[spec.key])} of {size_text(spec.memory)}"
        lines.append(f"  subgraph cluster_device_{index} {{")
        lines.append(f"    label={_quote(label)}; color={_quote(colour)}; fontname=Helvetica;")
        for stage in stages:
            lines += _stage(plan, stage, colour)
        lines.append("  }")
    lines += _edges(plan)
    lines.append("}")
    return "\n".join(lines) + "\n"


def _stage(plan: Plan, stage: Stage, colour: str) -> Iterator[str]:
    yield f"    subgraph cluster_stage_{stage.index} {{"
    yield f"      label={_quote(f'stage {stage.index}')}; style=rounded; color=gray70;"
    for name in stage.operations:
        operation = plan.graph.operations[name]
        path = f"\n{operation.module_path}" if operation.module_path else ""
        fill = _quote(f"{colour}30")  # mostly transparent
        yield f"      {_quote(name)} [label={_quote(operation.target + path)}, fillcolor={fill}];"
    yield "    }"


def _edges(plan: Plan) -> Iterator[str]:
    device = {name: stage.device for stage in plan.stages for name in stage.operations}
    for source, target, values in plan.graph.edges():
        if source not in device or target not in device:
            continue
        note = ""
        if device[source] != device[target]:
            nbytes = sum(plan.graph.values[value].copy_bytes for value in values)
            note = f' [label={_quote(size_text(nbytes))}, color="#c75d1c", fontcolor="#c75d1c", penwidth=2]'
        yield f"  {_quote(source)} -> {_quote(target)}{note};"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
