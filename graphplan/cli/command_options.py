"""Arguments and options that several commands share, with their completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import graphplan
from graphplan.devices.datasheets import gpu_names
from graphplan.errors import GraphplanError


def _complete_gpu(incomplete: str) -> list[str]:
    key, equals, name = incomplete.partition("=")
    return [f"{key}={gpu}" for gpu in gpu_names() if gpu.lower().startswith(name.lower())] if equals else []


def _complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete module names, one level at a time, of the plan on the command line."""
    try:
        plan = graphplan.Plan.load_json(Path(ctx.params["path"]))
    except (GraphplanError, OSError, KeyError, TypeError):
        return []
    depth = incomplete.count(".") + 1
    paths = (operation.module_path.split(".")[:depth] for operation in plan.graph.operations.values())
    names = dict.fromkeys(".".join(path) for path in paths)
    return [name for name in names if name and name.startswith(incomplete)]


_FACTORY = "package.module:factory, a function that returns a module, or a module and its inputs."
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder or config.json of a transformers model (no weights are read), or " + _FACTORY,
    ),
]
ModelToRun = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="The folder or config.json of a transformers model, or " + _FACTORY),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=BYTES",
        help="Budgets: 0=24GiB,cpu=64GiB, or one per option. The devices need not exist here. "
        "Default: the free memory of this machine.",
    ),
]
BudgetsHere = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=BYTES",
        help="Devices of this machine: 0=24GiB,cpu=64GiB. Default: all, with their free memory.",
    ),
]
Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--device", metavar="KEY=GPU", help="Its speed, by name: 0=H100.", autocompletion=_complete_gpu
    ),
]
Links = Annotated[
    list[str] | None,
    typer.Option(
        "--link",
        metavar="KEY-KEY=BYTES",
        help="Bandwidth in bytes/s: 0-1=450GB. Default: of a known GPU to the CPU by its datasheet, "
        "else 25GB.",
    ),
]
Measured = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file that `graphplan devices --measure --out` wrote.")
]
Pins = Annotated[
    list[str] | None,
    typer.Option("--pin", metavar="NAME=KEY", help="Pin a module or weight to a device: lm_head=0."),
]
Reserve = Annotated[str, typer.Option(metavar="BYTES", help="Memory to leave free on every device: 1GiB.")]
Batch = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Batch size of the example inputs. Default: 1.")
]
Length = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens or audio samples per example input.")
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="bfloat16, float16 or float32. Default: the model's own.")
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Time for the search, after the trace. Default: a fixed amount of work.",
    ),
]
CaptureCache = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Store the trace in this folder, and use a trace stored there."),
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code in the model's folder.")]
Meta = Annotated[
    bool, typer.Option("--meta", help="Call the factory on torch's meta device: shapes without memory.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page of the plan.")]
Other = Annotated[
    Path | None,
    typer.Option(
        "--other", metavar="PLAN", help="A saved plan of the same model, beside this one on the page."
    ),
]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A file that `graphplan plan --out` or plan.save_json wrote.")
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A module, operation or weight.", autocompletion=_complete_name)
]
