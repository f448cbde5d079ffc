"""The ``graphplan`` command; needs the ``cli`` extra (typer, rich). Exit codes are in ``console``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

import graphplan
from graphplan.command_options import (
    Batch,
    Budgets,
    Cards,
    Dtype,
    Json,
    Length,
    Links,
    Measured,
    Meta,
    Model,
    Name,
    Pins,
    PlanFile,
    Reserve,
    TimeLimit,
    Trust,
)
from graphplan.comparison import Baseline, device_maps, ours
from graphplan.console import (
    complain,
    exit_code,
    print_json,
    require_writable,
    say,
    show_warnings_in_one_line,
    working,
)
from graphplan.demo import DemoResult, run_demo
from graphplan.device import DeviceKey, Topology, read_max_memory, require_present
from graphplan.digest import comparison_text, device_digest, devices_text, plan_digest
from graphplan.errors import DeviceError, GraphplanError, InfeasibleError, InputError
from graphplan.key_values import read_budgets, read_links, read_pins, read_speeds
from graphplan.named_files import read_measurements, read_plan
from graphplan.named_model import Ask, NamedModel, load_named
from graphplan.passes.evaluate import Problem
from graphplan.placement import Plan
from graphplan.runtime.benchmark import measure_devices
from graphplan.speeds import Speed, with_speeds

__all__ = ["app", "run"]

_ROOMY = 1 << 50  # bytes of each device where only the graph is wanted
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
# what typer raises for a wrong command line: its own class, or click's in older releases
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def run() -> None:
    """Run the command; an error of ours is one line on stderr and an exit code."""
    show_warnings_in_one_line()
    as_json = "--json" in sys.argv
    try:
        sys.exit(app(standalone_mode=False, prog_name="graphplan") or 0)
    except (GraphplanError, OSError) as error:
        complain(error, str(error), as_json=as_json)
        sys.exit(exit_code(error))
    except _UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # it has printed the help
            complain(error, _usage(error), as_json=as_json)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


def _usage(error: Exception) -> str:
    formatted = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    path = "graphplan" if context is None else context.command_path
    return f"{formatted} (see {path} --help)"


# -- commands ----------------------------------------------------------------------------------------------


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
    """Place PyTorch models over devices.

    Exit codes: 0 done; 2 the command line, a file or a name is wrong;
    3 no placement keeps the budgets; 4 the model cannot be traced;
    1 anything else. Errors are one line on stderr, JSON with --json.
    """


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For plan.html, .json and .dot.")] = Path("out"),
    as_json: Json = False,
) -> None:
    """Place a real sentence encoder over two accelerators and the CPU, and compare its results."""
    with working("loading, planning and placing all-MiniLM-L6-v2"):
        result = run_demo()
    out.mkdir(parents=True, exist_ok=True)
    result.plan.save_json(out / "plan.json")
    result.plan.save_dot(out / "plan.dot")
    result.plan.save_html(out / "plan.html", title="all-MiniLM-L6-v2")
    if as_json:
        measured = list(map(list, result.measured_peak_bytes.items()))
        figures = {"difference": result.difference, "measured_peaks": measured, "simulated": result.simulated}
        print_json({**figures, "plan": plan_digest(result.plan)})
    else:
        _report(result)
        print(f"\nwrote {out / 'plan.html'}, {out / 'plan.json'} and {out / 'plan.dot'}")
    if result.difference > 1e-5:
        raise GraphplanError(f"the placed model's embeddings differ by {result.difference}")


@app.command()
def plan(
    model: Model,
    max_memory: Budgets = None,
    device: Cards = None,
    link: Links = None,
    measured: Measured = None,
    pin: Pins = None,
    reserve: Reserve = "0",
    offload: Annotated[bool, typer.Option(help="Without: what accelerators do not hold is an error.")] = True,
    balance: Annotated[bool, typer.Option("--balance", help="Spread the work evenly.")] = False,
    batch: Batch = None,
    length: Length = None,
    dtype: Dtype = None,
    time_limit: TimeLimit = None,
    trust_remote_code: Trust = False,
    meta: Meta = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan here, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page to look at here.")] = None,
    as_json: Json = False,
) -> None:
    """Decide where everything in a model goes. Devices that this machine lacks are fine."""
    require_writable(out, html)
    topology, pins = _topology(max_memory, device, link, measured, reserve), read_pins(pin or ())
    named = _load(model, Ask(batch, length, dtype, trust_remote_code, meta))
    with working(f"tracing {named.name} and placing it"):
        found = _plan(named, topology, pin=pins, offload=offload, balance=balance, time_limit=time_limit)
    _write(found, out, html, named.name)
    if as_json:
        print_json({"model": named.name, "inputs": named.inputs, **plan_digest(found)})
        return
    print(f"{named.name}, called with {named.inputs}")
    say(found.summary())
    for path in (out, html):
        if path is not None:
            print(f"\nwrote {path}")


@app.command()
def show(
    path: PlanFile,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page to look at here.")] = None,
    dot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it for graphviz here.")] = None,
    bottleneck: Annotated[
        bool, typer.Option("--bottleneck", help="Say what more memory or speed would save most.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a plan that was written before."""
    require_writable(html, dot)
    found = read_plan(path)
    _write(found, None, html, path.stem)
    if dot is not None:
        found.save_dot(dot)
    wanted = found.bottleneck(progress=sys.stderr.isatty()) if bottleneck else None
    if as_json:
        said = plan_digest(found)
        print_json(said if wanted is None else {**said, "bottleneck": json.loads(wanted.to_json())})
        return
    say(found.summary())
    if wanted is not None:
        say(f"\n{wanted}")


@app.command()
def compare(
    model: Model,
    max_memory: Budgets = None,
    device: Cards = None,
    link: Links = None,
    measured: Measured = None,
    reserve: Reserve = "0",
    batch: Batch = None,
    length: Length = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    meta: Meta = False,
    as_json: Json = False,
) -> None:
    """Judge our plan, accelerate's device map and transformers' by one evaluator."""
    topology = _topology(max_memory, device, link, measured, reserve)
    named = _load(model, Ask(batch, length, dtype, trust_remote_code, meta))
    with working(f"tracing {named.name} and placing it"):
        rows, problem = _ours(named, topology)
    with working("asking accelerate and transformers"):
        no_split = sorted(getattr(named.model, "_no_split_modules", None) or ())
        rows += device_maps(problem, named.model, no_split)
    if as_json:
        said = [{**asdict(row), "excess": list(map(list, row.excess.items()))} for row in rows]
        print_json({"model": named.name, "inputs": named.inputs, "planners": said})
    else:
        print(f"{named.name}, called with {named.inputs}\n\n{comparison_text(rows)}")


@app.command()
def devices(
    measure: Annotated[bool, typer.Option("--measure", help="Measure speeds and links: seconds.")] = False,
    max_memory: Budgets = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was measured here, for --measured.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what this machine has, and what graphplan takes its speed to be."""
    if out is not None and not measure:
        raise InputError("--out writes measurements: give --measure too")
    require_writable(out)
    topology = read_max_memory(read_budgets(max_memory or ()))
    require_present(topology)
    found = None
    if measure:
        budgets = {spec.key: spec.memory for spec in topology.devices}
        found = measure_devices(budgets, progress=sys.stderr.isatty())
        topology = with_speeds(topology, found)
        if out is not None:
            found.save_json(out)
    if as_json:
        said = {"devices": device_digest(topology), "measured": measure}
        print_json(said if found is None else {**said, "measurements": json.loads(found.to_json())})
        return
    print(devices_text(topology))
    print("\nspeeds were measured" if measure else "\nspeeds are makers' figures or guesses: see --measure")
    if found is not None:
        print(found)


@app.command()
def explain(path: PlanFile, name: Name, as_json: Json = False) -> None:
    """Say why a module, operation or weight is where it is, what it costs there, and elsewhere."""
    with working("judging the other devices"):
        found = read_plan(path).explain(name)
    say(found.to_json() if as_json else found)


# -- steps -------------------------------------------------------------------------------------------------


def _ours(named: NamedModel, topology: Topology) -> tuple[list[Baseline], Problem]:
    """Our row, and the problem for the others: of our graph, or without a plan of one with more room."""
    start = time.perf_counter()
    try:
        found = _plan(named, topology)
        return [ours(found, time.perf_counter() - start)], found.plain_problem
    except InfeasibleError as error:
        row = Baseline("graphplan", error=str(error), planning=time.perf_counter() - start)
    roomy = topology.with_memory(dict.fromkeys(topology.keys, _ROOMY))
    return [row], replace(_plan(named, roomy).plain_problem, topology=topology)


def _plan(
    named: NamedModel,
    topology: Topology,
    *,
    pin: Mapping[str, DeviceKey] | None = None,
    offload: bool = True,
    balance: bool = False,
    time_limit: float | None = None,
) -> Plan:
    return graphplan.plan(
        named.model,
        {spec.key: spec.memory for spec in topology.devices},
        named.args,
        named.kwargs,
        links=topology.links,
        devices={s.key: Speed(s.flops, s.bandwidth, s.overhead) for s in topology.devices if s.computes},
        reserve={spec.key: spec.reserve for spec in topology.devices},
        pin=pin,
        offload=offload,
        balance=balance,
        time_limit=time_limit,
    )


def _topology(
    max_memory: list[str] | None,
    device: list[str] | None,
    link: list[str] | None,
    measured: Path | None,
    reserve: str,
) -> Topology:
    """The devices that the words of a command describe."""
    budgets = read_budgets(max_memory or ())
    links = read_links(link or (), budgets)
    if measured is not None and device:
        raise DeviceError("give --measured or --device, not both")
    speeds = read_speeds(device or ()) if measured is None else read_measurements(measured)
    return with_speeds(read_max_memory(budgets, links, reserve), speeds or None)


def _load(word: str, ask: Ask) -> NamedModel:
    with working(f"building {word}"):
        return load_named(word, ask)


def _write(found: Plan, out: Path | None, html: Path | None, title: str) -> None:
    if out is not None:
        found.save_json(out)
    if html is not None:
        found.save_html(html, title=title)


def _report(result: DemoResult) -> None:
    kind = "simulated accelerators" if result.simulated else "accelerators"
    print(f"all-MiniLM-L6-v2 over two {kind} and the CPU\n")
    print(result.plan.summary())
    print("\nmeasured peaks against plan and budget:")
    for key, measured in result.measured_peak_bytes.items():
        budget = result.plan.topology[key].memory
        print(f"  {key}: {measured:,} <= {result.plan.peak_bytes[key]:,} <= {budget:,} bytes")
    name, device = result.offloaded
    print(f"\n{name} stays on the CPU, and says so: device {device}")
    print(f"largest difference from the unplaced model's embeddings: {result.difference:.1e}\n")
    for i, sentence in enumerate(result.sentences):
        row = result.similarity[i].clone()
        row[i] = -1
        best = int(row.argmax())
        print(f"  {sentence:46s} is closest to: {result.sentences[best]} ({float(row[best]):.2f})")
