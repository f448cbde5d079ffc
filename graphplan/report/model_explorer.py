"""A plan for Model Explorer: one graph nested by stage and module, and colours for its operations.

The graph is a ``GraphCollection`` and the colours are ``NodeDataProviderData``, as in the interfaces of
``input_graph.ts`` and ``types.ts`` of github.com/google-ai-edge/model-explorer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphplan.ir.graph_elements import Operation
from graphplan.ir.plan_data import PlanData
from graphplan.ir.timeline import Measured
from graphplan.message_text import size_text
from graphplan.report.data_flows import made_bytes, run_seconds
from graphplan.report.text import device_colours, shape_text, time_text
from graphplan.whole_files import write_whole

_GRAPH = "plan"
_GRADIENT = [{"stop": 0, "bgColor": "#f4f7fd"}, {"stop": 1, "bgColor": "#e0762f"}]


def to_model_explorer(
    plan: PlanData, title: str = "Plan", measured: Measured | None = None
) -> dict[str, str]:
    """Return JSON texts: ``""`` -> the graph; name of each colouring -> its node data.

    A measured forward pass is one more colouring.
    """
    graph = {"id": _GRAPH, "nodes": _nodes(plan), "groupNodeAttributes": _groups(plan)}
    colourings = {name: json.dumps({_GRAPH: data}) for name, data in _node_data(plan, measured).items()}
    return {"": json.dumps({"label": title, "graphs": [graph]}), **colourings}


def save_model_explorer(plan: PlanData, path: Path, title: str, measured: Measured | None = None) -> None:
    """Write the graph to ``path``, and each colouring to a file beside it (``plan.seconds.json``)."""
    for name, text in to_model_explorer(plan, title, measured).items():
        write_whole(path.with_suffix(f".{name}.json") if name else path, text)


def _namespaces(plan: PlanData) -> dict[str, str]:
    """Return operation -> the stage and the modules around it, joined by slashes."""
    namespaces = {}
    for stage in plan.stages:
        for name in stage.operations:
            path = plan.graph.operations[name].module_path.replace("/", "_").split(".")
            namespaces[name] = "/".join([_stage_name(stage.index, stage.device), *filter(None, path)])
    return namespaces


def _stage_name(index: int, device: object) -> str:
    return f"stage {index} on {device}".replace("/", "_")


def _nodes(plan: PlanData) -> list[dict[str, Any]]:
    graph, namespaces = plan.graph, _namespaces(plan)
    position = {value: i for op in graph.operations.values() for i, value in enumerate(op.outputs)}
    return [
        {
            "id": operation.name,
            "label": operation.target,
            "namespace": namespaces.get(operation.name, "on the host"),
            "attrs": _attributes(_facts(plan, operation)),
            "incomingEdges": [
                {
                    "sourceNodeId": graph.producer[name],
                    "sourceNodeOutputId": str(position[name]),
                    "targetNodeInputId": str(i),
                }
                for i, name in enumerate(operation.inputs)
                if name in graph.producer
            ],
            "inputsMetadata": [
                {"id": str(i), "attrs": _attributes({"name": name})}
                for i, name in enumerate(operation.inputs)
            ],
            "outputsMetadata": [
                {
                    "id": str(i),
                    "attrs": _attributes({"name": name, "tensor_shape": shape_text(graph.values[name])}),
                }
                for i, name in enumerate(operation.outputs)
            ],
        }
        for operation in graph.operations.values()
    ]


def _attributes(facts: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the facts that are not empty, as the format has them."""
    return [{"key": key, "value": value} for key, value in facts.items() if value]


def _facts(plan: PlanData, operation: Operation) -> dict[str, str]:
    weights = [plan.graph.weights[name] for name in operation.inputs if name in plan.graph.weights]
    return {
        "device": str(plan.schedule.assignment.operations[operation.name]),
        "module": operation.module_path,
        "FLOP": f"{operation.flops:,}" if operation.flops else "",
        "makes": size_text(made_bytes(plan.graph, operation)),
        "weights": ", ".join(f"{weight.name} ({size_text(weight.nbytes)})" for weight in weights),
        "source": operation.source,
    }


def _groups(plan: PlanData) -> dict[str, dict[str, str]]:
    runs = run_seconds(plan.timeline)
    groups = {
        _stage_name(stage.index, stage.device): {
            "device": str(stage.device),
            "operations": str(len(stage.operations)),
            "time": time_text(sum(runs.get(name, 0.0) for name in stage.operations)),
        }
        for stage in plan.stages
    }
    whole = {
        "time": f"{time_text(plan.makespan)} estimated, lower bound {time_text(plan.lower_bound)}",
        "proof": plan.proof,
        "transfers": size_text(plan.transfer_bytes),
        "streamed weights": size_text(plan.streamed_bytes),
    }
    return {"": whole, **groups}


def _node_data(plan: PlanData, measured: Measured | None) -> dict[str, dict[str, Any]]:
    homes = plan.schedule.assignment.operations
    colour = {key: f"{light}66" for key, (light, _) in device_colours(plan.topology).items()}
    output_bytes = {op.name: made_bytes(plan.graph, op) for op in plan.graph.operations.values()}
    colourings = {
        "device": {
            "name": "device",
            "results": {n: {"value": str(k), "bgColor": colour.get(k, "#dddddd")} for n, k in homes.items()},
        },
        "bytes": _graded("bytes made", output_bytes),
        "seconds": _graded("estimated seconds", run_seconds(plan.timeline)),
    }
    if measured is not None:
        colourings["measured"] = _graded("measured seconds", run_seconds(measured.timeline))
    return colourings


def _graded(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "results": {key: {"value": figure} for key, figure in figures.items()},
        "gradient": _GRADIENT,
    }
