"""The ``graphplan`` command; needs the ``cli`` extra (typer, rich). Exit codes are in ``console``.

Commands import what they need when they run: help and completion must not wait seconds for torch.
"""

from __future__ import annotations

import json
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

import graphplan
from graphplan.cli import command_options as options
from graphplan.cli.console import (
    complain,
    exit_code,
    print_json,
    require_writable,
    say,
    say_written,
    show_warnings_in_one_line,
    working,
)
from graphplan.errors import GraphplanError, InfeasibleError, InputError
from graphplan.versioned_json import encode

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
# typer's error for a wrong command line: a class of its own, or click's in older releases
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def run() -> None:
    """Run the command; print an error of graphplan as one line on stderr, and set the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # characters that it cannot encode are replaced
            stream.reconfigure(errors="replace")
    show_warnings_in_one_line()
    as_json = "--json" in sys.argv
    try:
        sys.exit(app(standalone_mode=False, prog_name="graphplan") or 0)
    except (GraphplanError, OSError) as error:
        complain(error, str(error), as_json=as_json)
        sys.exit(exit_code(error))
    except _UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # typer has printed the help
            complain(error, _usage(error), as_json=as_json)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


def _usage(error: Exception) -> str:
    formatted = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    path = "graphplan" if context is None else context.command_path
    return f"{formatted} (see {path} --help)"


def _version(wanted: bool) -> None:
    if wanted:
        print(graphplan.__version__)
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Place PyTorch models over several devices.

    Exit codes: 0 success; 2 wrong option, file or name;
    3 no placement within the budgets; 4 the model cannot be traced;
    1 any other error. Errors are one line on stderr, JSON with --json.
    """


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where to write plan.html, plan.json and plan.dot.")
    ] = Path("out"),
    as_json: options.Json = False,
) -> None:
    """Place a sentence encoder over two accelerators and the CPU, and compare its results."""
    from graphplan.cli.demo import run_demo
    from graphplan.cli.result_text import plan_digest

    with working("loading, planning and placing all-MiniLM-L6-v2"):
        result, figures, text = run_demo()
    out.mkdir(parents=True, exist_ok=True)
    result.save_json(out / "plan.json")
    result.save_dot(out / "plan.dot")
    result.save_html(out / "plan.html", title="all-MiniLM-L6-v2")
    if as_json:
        print_json({**figures, "plan": plan_digest(result)})
    else:
        print(text)
        print(f"\nwrote {out / 'plan.html'}, {out / 'plan.json'} and {out / 'plan.dot'}")
    if figures["difference"] > 1e-5:
        raise GraphplanError(f"the placed model's embeddings differ by {figures['difference']}")


@app.command()
def plan(
    model: options.Model,
    max_memory: options.Budgets = None,
    device: options.Gpus = None,
    link: options.Links = None,
    measured: options.Measured = None,
    pin: options.Pins = None,
    reserve: options.Reserve = "0",
    offload: Annotated[
        bool,
        typer.Option(help="Whether the CPU may hold weights and run operations, if accelerators are full."),
    ] = True,
    balance: Annotated[
        bool, typer.Option("--balance", help="Spread the work evenly over the accelerators.")
    ] = False,
    batch: options.Batch = None,
    length: options.Length = None,
    dtype: options.Dtype = None,
    time_limit: options.TimeLimit = None,
    capture_cache: options.CaptureCache = None,
    trust_remote_code: options.Trust = False,
    meta: options.Meta = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan to this JSON file.")
    ] = None,
    html: options.Html = None,
    as_json: options.Json = False,
) -> None:
    """Plan a placement without running it. The devices need not exist on this machine."""
    from graphplan.cli.model_argument import ModelOptions, load_named
    from graphplan.cli.model_plans import planned
    from graphplan.cli.option_parsing import read_pins, read_topology
    from graphplan.cli.result_text import plan_digest

    require_writable(out, html, read=(measured, Path(model), Path(model, "config.json")))
    topology, pins = read_topology(max_memory, device, link, measured, reserve), read_pins(pin or ())
    named = load_named(model, ModelOptions(batch, length, dtype, trust_remote_code, meta))
    with working(f"tracing and planning {named.name}"):
        result = planned(
            named,
            topology,
            pin=pins,
            offload=offload,
            balance=balance,
            time_limit=time_limit,
            capture_cache=capture_cache,
        )
    if out is not None:
        result.save_json(out)
    if html is not None:
        result.save_html(html, title=named.name)
    if as_json:
        print_json({"model": named.name, "inputs": named.inputs, **plan_digest(result)})
        return
    print(f"{named.name}, example inputs: {named.inputs}")
    say(result.summary())
    say_written(out, html)


@app.command("run")
def run_saved(
    path: options.PlanFile,
    model: options.ModelToRun,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Simulate the plan's accelerators on the CPU: same peaks, slow."),
    ] = False,
    batch: options.Batch = None,
    length: options.Length = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.Trust = False,
    capture_cache: options.CaptureCache = None,
    as_json: options.Json = False,
) -> None:
    """Carry out a saved plan without a search, and measure a forward pass.

    The model, its inputs and the devices must be those of the plan.
    Weights are read from the folder's safetensors files, if it has any.
    """
    from graphplan.cli.model_argument import ModelOptions
    from graphplan.cli.plan_run import run_plan
    from graphplan.cli.result_text import run_digest
    from graphplan.report.text import time_text

    model_options = ModelOptions(batch, length, dtype, trust_remote_code)
    saved_plan = graphplan.Plan.load_json(path)
    with working(f"running {model}"):
        named, profile, seconds = run_plan(
            saved_plan, model, model_options, simulated=simulate, capture_cache=capture_cache
        )
    if as_json:
        about = {"model": named.name, "inputs": named.inputs, "simulated": simulate, "seconds": seconds}
        print_json({**about, **run_digest(profile)})
    else:
        print(f"{named.name}, inputs: {named.inputs}\n")
        say(f"{profile}\n\nwithout marks between operations: {time_text(seconds)}")
        if simulate:
            print("accelerators were simulated on the CPU: peaks are theirs, times are not")
    planned = profile.plan.peak_bytes
    over = {key: n - planned[key] for key, n in profile.peak_bytes.items() if n > planned[key]}
    if over:
        raise GraphplanError(f"measured peaks exceed the planned ones, by bytes: {over}")


@app.command()
def show(
    path: options.PlanFile,
    html: options.Html = None,
    other: options.Other = None,
    dot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Graphviz file.")] = None,
    bottleneck: Annotated[
        bool,
        typer.Option("--bottleneck", help="Find the budget, link or device whose growth saves most time."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show a saved plan."""
    from graphplan.cli.result_text import plan_digest

    require_writable(html, dot, read=(path, other))
    if other is not None and html is None:
        raise InputError("--other is shown on the page: add --html FILE")
    saved, second = graphplan.Plan.load_json(path), None if other is None else graphplan.Plan.load_json(other)
    worst = saved.bottleneck(progress=sys.stderr.isatty()) if bottleneck else None
    if html is not None:
        saved.save_html(html, title=path.stem, bottleneck=worst, other=second)
    if dot is not None:
        saved.save_dot(dot)
    if as_json:
        digest = plan_digest(saved)
        print_json(digest if worst is None else {**digest, "bottleneck": json.loads(worst.to_json())})
        return
    say(saved.summary())
    if worst is not None:
        say(f"\n{worst}")
    say_written(html, dot)


@app.command()
def compare(
    model: options.Model,
    max_memory: options.Budgets = None,
    device: options.Gpus = None,
    link: options.Links = None,
    measured: options.Measured = None,
    reserve: options.Reserve = "0",
    batch: options.Batch = None,
    length: options.Length = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.Trust = False,
    meta: options.Meta = False,
    as_json: options.Json = False,
) -> None:
    """Compare graphplan's plan with accelerate's and transformers' device maps."""
    from graphplan.cli.model_argument import ModelOptions, load_named
    from graphplan.cli.model_plans import compared
    from graphplan.cli.option_parsing import read_topology
    from graphplan.cli.result_text import comparison_text

    topology = read_topology(max_memory, device, link, measured, reserve)
    named = load_named(model, ModelOptions(batch, length, dtype, trust_remote_code, meta))
    rows = compared(named, topology)
    if as_json:
        print_json({"model": named.name, "inputs": named.inputs, "planners": list(map(encode, rows))})
    else:
        print(f"{named.name}, example inputs: {named.inputs}\n\n{comparison_text(rows)}")
    if not rows[0].feasible:
        raise InfeasibleError(rows[0].error)


@app.command()
def devices(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure devices and links. Takes seconds.")
    ] = False,
    max_memory: options.BudgetsHere = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the measurements to this file, for --measured.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show this machine's devices and the speeds that the planner assumes."""
    from graphplan.cli.option_parsing import read_budgets
    from graphplan.cli.result_text import device_digest, devices_text
    from graphplan.devices.max_memory import read_max_memory, require_present
    from graphplan.devices.speeds import with_speeds

    if out is not None and not measure:
        raise InputError("--out writes measurements: give --measure too")
    require_writable(out)
    topology = read_max_memory(read_budgets(max_memory or ()))
    require_present(topology, "To plan for another machine use `graphplan plan`")
    result = None
    if measure:
        result = graphplan.measure_devices(topology.budgets, progress=sys.stderr.isatty())
        topology = with_speeds(topology, result)
        if out is not None:
            result.save_json(out)
    if as_json:
        digest = {"devices": device_digest(topology), "measured": measure}
        print_json(digest if result is None else {**digest, "measurements": json.loads(result.to_json())})
        return
    source = "were measured" if measure else "are datasheet values or defaults: --measure measures them"
    print(f"{devices_text(topology)}\n\nspeeds {source}")
    if result is not None:
        print(result)
    say_written(out)


@app.command()
def explain(path: options.PlanFile, name: options.Name, as_json: options.Json = False) -> None:
    """Explain why a module, operation or weight is where it is, and what other devices would cost."""
    with working("evaluating the other devices"):
        explanation = graphplan.Plan.load_json(path).explain(name)
    say(explanation.to_json() if as_json else explanation)
