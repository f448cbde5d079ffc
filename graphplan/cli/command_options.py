"""Words and options that several commands take, with their completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphplan.cli.option_parsing import read_plan
from graphplan.devices.datasheets import card_names
from graphplan.errors import GraphplanError

__all__ = [
    "Batch",
    "Budgets",
    "Cards",
    "Dtype",
    "Json",
    "Length",
    "Links",
    "Measured",
    "Meta",
    "Model",
    "Name",
    "Pins",
    "PlanFile",
    "Reserve",
    "TimeLimit",
    "Trust",
]


def _complete_card(incomplete: str) -> list[str]:
    key, equals, name = incomplete.partition("=")
    return (
        [f"{key}={card}" for card in card_names() if card.lower().startswith(name.lower())] if equals else []
    )


def _complete_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Modules, one level at a time, of the plan that was named before."""
    try:
        plan = read_plan(Path(ctx.params["path"]))
    except (GraphplanError, OSError, KeyError, TypeError):
        return []
    depth = incomplete.count(".") + 1
    paths = (operation.module_path.split(".")[:depth] for operation in plan.graph.operations.values())
    names = dict.fromkeys(".".join(path) for path in paths)
    return [name for name in names if name and name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder of transformers or its config.json (no weights are read), or package.module:factory, "
        "which returns a module, or a module and its inputs.",
    ),
]
Budgets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=BYTES",
        help="Budgets: 0=24GiB,cpu=64GiB, or one each time. The devices need not be here. "
        "Without, what is free here.",
    ),
]
Cards = Annotated[
    list[str] | None,
    typer.Option(
        "--device", metavar="KEY=CARD", help="How fast it is: 0=H100.", autocompletion=_complete_card
    ),
]
Links = Annotated[
    list[str] | None,
    typer.Option("--link", metavar="KEY-KEY=BYTES", help="Bytes a second: 0-1=450GB. Without, 25 GB."),
]
Measured = Annotated[
    Path | None, typer.Option(metavar="FILE", help="What `graphplan devices --measure --out` has written.")
]
Pins = Annotated[
    list[str] | None, typer.Option("--pin", metavar="NAME=KEY", help="A module or weight: lm_head=0.")
]
Reserve = Annotated[str, typer.Option(metavar="BYTES", help="Bytes to leave free on every device: 1GiB.")]
Batch = Annotated[int | None, typer.Option(min=1, metavar="N", help="Of the example inputs; 1 without.")]
Length = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Tokens, or samples of sound, of the example inputs.")
]
Dtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="bfloat16, float16, float32; without, the model's own.")
]
TimeLimit = Annotated[
    float | None,
    typer.Option(min=0, metavar="SECONDS", help="For the search after the trace; without, limited by work."),
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that lies in the model's folder.")]
Meta = Annotated[
    bool, typer.Option("--meta", help="Run a factory on torch's meta device: no memory, no data.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="What `graphplan plan --out` or plan.save_json has written.")
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A module, operation or weight.", autocompletion=_complete_name)
]
