"""A plan in Graphviz's DOT language: a cluster for each device, which contains one for each of its stages.

Graphviz takes minutes for thousands of nodes, and nobody reads them. If a plan has more operations than
``MOST_NODES``, a node is the part of a module in one stage, with modules as deep as ``MOST_MODULES`` allows::

    model.layers.3.self_attn
    22 operations
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphplan.ir.plan_data import PlanData
from graphplan.message_text import size_text
from graphplan.report.text import count_text, device_colours, device_name

MOST_NODES = 400
MOST_MODULES = 100


@dataclass(frozen=True, slots=True)
class _Box:
    name: str
    label: str
    stage: int


def to_dot(plan: PlanData) -> str:
    """Return the operations, or modules of them, with bytes on the edges between devices."""
    boxes = _boxes(plan)
    lines = [
        "digraph plan {",
        "  rankdir=TB; compound=true;",
        "  node [shape=box, style=filled, fontname=Helvetica, fontsize=11];",
        "  edge [color=gray45, fontname=Helvetica, fontsize=10];",
    ]
    colours = device_colours(plan.topology)
    for index, spec in enumerate(plan.topology.devices):
        stages = [stage.index for stage in plan.stages if stage.device == spec.key]
        if not stages:
            continue
        colour = colours[spec.key][0]
        label = f"{device_name(spec.key)}: {size_text(plan.peak_bytes[spec.key])} of {size_text(spec.memory)}"
        lines.append(f"  subgraph cluster_device_{index} {{")
        lines.append(f"    label={_quote(label)}; color={_quote(colour)}; fontname=Helvetica;")
        for stage in stages:
            lines += _stage(stage, boxes, colour)
        lines.append("  }")
    lines += _edges(plan, boxes)
    lines.append("}")
    return "\n".join(lines) + "\n"


def _boxes(plan: PlanData) -> dict[str, _Box]:
    """Return operation -> its box, in the order of the stages."""
    operations = plan.graph.operations
    names = [(stage.index, name) for stage in plan.stages for name in stage.operations]
    if len(names) <= MOST_NODES:
        boxes = {}
        for stage, name in names:
            path = operations[name].module_path
            boxes[name] = _Box(name, operations[name].target + (f"\n{path}" if path else ""), stage)
        return boxes
    paths = {name: operations[name].module_path.split(".") for _, name in names}
    depth = max(map(len, paths.values()))
    while depth and len({(stage, *paths[name][:depth]) for stage, name in names}) > MOST_MODULES:
        depth -= 1
    members: dict[tuple[int, str], list[str]] = {}
    for stage, name in names:
        members.setdefault((stage, ".".join(paths[name][:depth])), []).append(name)
    return {
        name: _Box(f"{stage}:{path}", f"{path or '(root)'}\n{count_text(len(inside), 'operation')}", stage)
        for (stage, path), inside in members.items()
        for name in inside
    }


def _stage(index: int, boxes: dict[str, _Box], colour: str) -> Iterator[str]:
    yield f"    subgraph cluster_stage_{index} {{"
    yield f"      label={_quote(f'stage {index}')}; style=rounded; color=gray70;"
    fill = _quote(f"{colour}30")  # mostly transparent
    for node in dict.fromkeys(node for node in boxes.values() if node.stage == index):
        yield f"      {_quote(node.name)} [label={_quote(node.label)}, fillcolor={fill}];"
    yield "    }"


def _edges(plan: PlanData, boxes: dict[str, _Box]) -> Iterator[str]:
    """Yield an edge for each connected pair of boxes; its bytes count each copied value once."""
    passed: dict[tuple[_Box, _Box], set[str]] = {}
    for maker, reader, values in plan.graph.edges():
        if maker in boxes and reader in boxes and boxes[maker] != boxes[reader]:
            passed.setdefault((boxes[maker], boxes[reader]), set()).update(values)
    for (source, target), copied in passed.items():
        note = ""
        if plan.stages[source.stage].device != plan.stages[target.stage].device:
            nbytes = sum(plan.graph.values[value].copy_bytes for value in copied)
            note = f' [label={_quote(size_text(nbytes))}, color="#c75d1c", fontcolor="#c75d1c", penwidth=2]'
        yield f"  {_quote(source.name)} -> {_quote(target.name)}{note};"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
