"""The benchmarks' results as Markdown: only what is in ``benchmarks/results``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Data = Mapping[str, Any]


def tables(results: Path = RESULTS) -> dict[str, str]:
    """Name of a benchmark -> its table, or one line that says that there are no results of it."""
    return {name: _rendered(results / f"{name}.json", render) for name, render in _RENDERERS.items()}


def _rendered(path: Path, render: Callable[[Data], str]) -> str:
    if not path.is_file():
        return f"*There is no result `benchmarks/results/{path.name}` in this repository.*\n"
    data = json.loads(path.read_text(encoding="utf-8"))
    return f"{render(data)}\n\n{_machine(data['machine'])}\n"


def _machine(machine: Data) -> str:
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"*{machine['date']}, {machine['processor']}, {machine['cores']} cores, {gpus}; {versions}.*"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left, the others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(_cell(c) for c in row)} |" for row in (header, rule, *rows))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"


def _other(other: Data) -> str:
    """Our seconds by another's, or why there is no such figure."""
    if other["seconds"] is None:
        return "no placement"
    if other["over"]:
        return f"over budget by {other['over'] / 1e6:.0f} MB"
    return "-" if other["ratio"] is None else f"{other['ratio']:.3f}"


def _placement(data: Data) -> str:
    names = [other["name"] for other in data["results"][0]["others"]]
    header = ["instance", "operations", "devices", "our ms", "gap", "CPU s", *names]
    rows = []
    for result in data["results"]:
        runs = result["runs"]
        run = next((run for run in runs if run["limit"] is None), runs[-1] if runs else None)
        if run is None:
            own = ["-", result["error"], "-"]
        else:
            own = [_ms(run["seconds"]), f"{100 * run['gap']:.2f} %", _cpu(run["cpu_seconds"])]
        sizes = [str(result["operations"]), str(result["devices"])]
        rows.append([result["instance"], *sizes, *own, *map(_other, result["others"])])
    beaten = f"Another placement within the budgets is faster on {data['beaten']} of {len(rows)} instances."
    return f"{markdown(header, rows)}\n\n{beaten}"


def _cpu(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def _real_models(data: Data) -> str:
    names = [other["name"] for other in data["rows"][0]["others"]]
    header = [
        "model and cards",
        "weights GB",
        "our ms",
        "gap",
        "offloaded GB",
        "use",
        "beside prefetch buffer",
    ]
    for name in names:
        header += [f"{name} ms", "offloaded GB", "use"]
    rows = [_real_model(row) for row in data["rows"]]
    return f"{markdown(header, rows)}\n\n{_said_of(data)}"


def _real_model(row: Data) -> list[str]:
    line = [f"{row['model']} {row['case']}", f"{row['weights'] / 1e9:.2f}"]
    if row["error"]:
        line += ["-"] * 5
    else:
        line += [_ms(row["makespan"]), f"{100 * row['gap']:.1f} %", _gb(row["offloaded"])]
        line += [f"{100 * row['use']:.1f} %", f"{100 * row['use_beside_buffers']:.1f} %"]
    for other in row["others"]:
        over = f" (over by {other['over'] / 1e6:.0f} MB)" if other["over"] else ""
        use = other["used"] / row["packing"]["most"]
        line.append(_ms(other["seconds"]) + over)
        line += ["-"] * 2 if other["seconds"] is None else [_gb(other["offloaded"]), f"{100 * use:.1f} %"]
    return line


def _said_of(data: Data) -> str:
    rows = data["rows"]
    within = sum(1 for row in rows if row["within"])
    fit = [row for row in rows if row["packing"]["everything"]]
    kept = sum(1 for row in fit if not row["offloaded"])
    forced = [row for row in rows if row["offloaded"] and not row["packing"]["everything"]]
    full = sum(1 for row in forced if row["use_beside_buffers"] >= 0.98)
    beaten = [f"{row['model']} {row['case']}" for row in rows if row["beaten_by"]]
    return (
        f"Every peak is within its budget in {within} of {len(rows)} plans. Of {len(fit)} models that fit "
        f"whole, {kept} offload nothing. Of {len(forced)} plans that offload, {full} use 98 % or more of "
        "what an exact packing of the weights allows beside the prefetch buffer. A map that keeps the "
        f"budgets is faster than ours on: {', '.join(beaten) or 'none'}."
    )


def _searches(data: Data) -> str:
    parts = []
    for kind, said in {"stack": "Layers of a Llama on like cards", "random": "Random operations"}.items():
        rows = [row for row in data["searches"] if row["kind"] == kind]
        devices = sorted({row["devices"] for row in rows})
        known = {(row["operations"], row["devices"]): row for row in rows}
        lines = [
            [str(size), *(_search(known[size, cards]) for cards in devices)]
            for size in sorted({row["operations"] for row in rows})
        ]
        exponents = {law["devices"]: f"{law['exponent']:.2f}" for law in data["laws"] if law["kind"] == kind}
        lines.append(["exponent p", *(exponents[cards] for cards in devices)])
        grid = markdown(["operations", *(f"{cards} devices" for cards in devices)], lines)
        parts.append(f"{said}:\n\n{grid}")
    return "\n\n".join(parts)


def _search(row: Data) -> str:
    return f"{row['seconds']:.1f} s ({100 * row['gap']:.1f} %)"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3f}"


def _overhead(data: Data) -> str:
    header = ["workload", "form", "best ms", "times eager"]
    rows = [
        [row["workload"], row["form"], f"{row['best_ms']:.2f}", f"{row['ratio_of_best']:.2f}"]
        for row in data["rows"]
    ]
    return f"{markdown(header, rows)}\n\nClock: {data['clock']}."


def _loading(data: Data) -> str:
    header = ["way", "best ms", "median ms", "GB/s", "peak by model"]
    rows = [
        [
            row["way"],
            f"{1e3 * row['seconds']:.1f}",
            f"{1e3 * row['median_seconds']:.1f}",
            f"{data['bytes'] / 1e9 / row['seconds']:.1f}",
            f"{row['peak_over_model']:.2f}",
        ]
        for row in data["rows"]
    ]
    loads = [
        f"{load['seconds']:.1f} s, {load['on_host'] / 1e9:.2f} GB in host memory, "
        f"growth by {load['over_host']:.2f} of that"
        for load in data["loads"]
    ]
    said = f"A checkpoint of {data['bytes'] / 1e9:.2f} GB. `graphplan.load`, planning included: "
    return f"{markdown(header, rows)}\n\n{said}{'; '.join(loads)}."


def _planning_time(data: Data) -> str:
    steps = list(data["rows"][0]["seconds"])
    header = ["layers", "operations", *(f"{step} s" for step in steps), "total s", "gap"]
    rows = []
    for row in data["rows"]:
        taken = [f"{row['seconds'][step]:.2f}" for step in steps]
        total = f"{sum(row['seconds'].values()):.2f}"
        rows.append([str(row["layers"]), str(row["operations"]), *taken, total, f"{100 * row['gap']:.2f} %"])
    said = "The search alone, its proven gap, and p of seconds = a × operations<sup>p</sup> fitted to it:"
    stages = f"{markdown(header, rows)}\n\nOver {data['devices']} devices."
    return f"{stages}\n\n{said}\n\n{_searches(data)}"


def _sweep(data: Data) -> str:
    rows = [[method, str(count)] for method, count in sorted(data["captured_by"].items())]
    good = (
        f"Of {data['architectures']} model types of transformers {data['ran']} were built small and ran "
        f"eagerly. {data['passed']} of the {data['of']} whose results do not differ from call to call give "
        "eager's results within 1e-5 of the largest value, keep every budget, and copy what the plan says. "
    )
    table = markdown(["run by", "architectures"], rows)
    return f"{good}\n\n{table}"


_RENDERERS: dict[str, Callable[[Data], str]] = {
    "placement": _placement,
    "real_models": _real_models,
    "overhead": _overhead,
    "loading": _loading,
    "planning_time": _planning_time,
    "sweep": _sweep,
}
