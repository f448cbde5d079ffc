"""Render benchmark results for the pages: a Markdown section for each file of ``benchmarks/results``.

A section is empty if its file is missing, so that no page reports a result that does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Data = Mapping[str, Any]

# case of benchmarks/real_models.py -> description of its devices
CASES = {
    "1x0.7": "one GPU + CPU",
    "2x0.35": "two GPUs + CPU",
    "2x0.55": "two identical GPUs",
    "4x0.275": "four identical GPUs",
    "mixed": "three mixed GPUs",
}
_GENERATION_CASES = {
    "1x0.5": "one GPU of 50 %",
    "1x0.25": "one GPU of 25 %",
    "2x0.35": "two GPUs of 35 %",
}
_METHODS = {
    "transformers": "transformers' exporters",
    "export": "`torch.export`",
    "hooks": "none, module by module",
}


def tables(results: Path = RESULTS) -> dict[str, str]:
    """Return name of a benchmark -> its section; empty if it has no result."""
    return {name: _rendered(results / f"{name}.json", render) for name, render in _RENDERERS.items()}


def _rendered(path: Path, render: Callable[[Data], str]) -> str:
    if not path.is_file():
        return ""
    data = json.loads(path.read_text(encoding="utf-8"))
    return f"{render(data)}\n\n{_machine(data['machine'])}\n"


def _machine(machine: Data) -> str:
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return f"*{machine['date']}, {machine['processor']}, {machine['cores']} cores, {gpus}; {versions}.*"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is left-aligned, the others right-aligned."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(_cell(c) for c in row)} |" for row in (header, rule, *rows))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def map_of(row: Data, name: str = "accelerate") -> Data:
    """Return the figures of another planner's device map in a row of a benchmark."""
    device_map: Data = next(other for other in row["others"] if other["name"] == name)
    return device_map


def ratio_of(row: Data) -> float | None:
    """Return accelerate's estimated time over graphplan's; None if either has no feasible placement."""
    other = map_of(row)
    if row["error"] or other["seconds"] is None or other["over"]:
        return None
    return float(other["seconds"] / row["makespan"])


def _real_models(data: Data) -> str:
    rows = [_case(name, [row for row in data["rows"] if row["case"] == case]) for case, name in CASES.items()]
    counts = ["graphplan faster by over 1 %", "within 1 %", "accelerate faster by over 1 %"]
    header = ["devices", "median ratio", *counts, "median gap"]
    planning = [row["planning"] for row in data["rows"] if not row["error"]]
    return (
        f"{markdown(header, rows)}\n\nPlanning took {min(planning):.0f} to {max(planning):.0f} CPU seconds "
        "after the trace. accelerate's maps take milliseconds."
    )


def _case(name: str, rows: Sequence[Data]) -> list[str]:
    ratios = [ratio for row in rows if (ratio := ratio_of(row)) is not None]
    gaps = [row["gap"] for row in rows if not row["error"]]
    faster, slower = sum(ratio > 1.01 for ratio in ratios), sum(ratio < 0.99 for ratio in ratios)
    counts = [str(faster), str(len(ratios) - faster - slower), str(slower)]
    return [name, f"{median(ratios):.2f}×", *counts, f"{100 * median(gaps):.1f} %"]


def _gigabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e9:.1f} GB"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


def _generation(data: Data) -> str:
    rows = [
        [
            f"{row['model']}, {_GENERATION_CASES[row['case']]}",
            *(
                _milliseconds(seconds)
                for part in (row["prompt"], row["token"])
                for seconds in (part["seconds"], part["accelerate"])
            ),
            "-" if row["token"]["accelerate"] is None else _times(row["token"]),
        ]
        for row in data["rows"]
    ]
    header = ["model and budgets", "prompt", "accelerate's", "token", "accelerate's", "ratio of tokens"]
    return (
        "## Text generation\n\nEstimated time of a forward pass over "
        f"{data['length']} tokens and of a decode step, over one placement of the weights, and with "
        "accelerate's map. Each GPU has the named share of the weights and 2 GiB, the CPU 1.5 TFLOP/s and 60 "
        "GB/s. For a single token the CPU "
        "computes with many of the weights that it holds, while others are prefetched, and a mixture of "
        "experts reads the chosen experts only. accelerate copies all offloaded weights to the GPU for each "
        "token.\n\n"
        f"{markdown(header, rows)}"
    )


def _times(part: Data) -> str:
    return f"{part['accelerate'] / part['seconds']:.1f}×"


def _offload(data: Data) -> str:
    rows = [
        [
            row["form"],
            "-" if row["share"] == 1 else _gigabytes(row["budget"]),
            _gigabytes(row["peak"]),
            _milliseconds(row["forward"]),
            f"{row['generate']:.2f} s",
            *(_milliseconds(row[key]) for key in ("estimated", "copies")),
            f"{row['setup']:.0f} s",
            f"{100 * row['apart']:.1f} %",
        ]
        for row in data["rows"]
    ]
    load = data["workload"]
    shares = " and ".join(f"{100 * share:.0f} %" for share in load["shares"])
    generate = f"generate, {load['tokens']} tokens"
    header = ["", "budget", "peak", "forward pass", generate, "estimated", "copies", "setup", "difference"]
    return (
        f"## Measured on a GPU\n\nA language model of the shape of Llama 3 8B with {load['layers']} layers "
        f"and random weights in bfloat16, a prompt of {load['prompt']} tokens. The GPU's budgets are "
        f"{shares} of the weights, and 2 GiB. "
        "accelerate's map counts weights alone, so it gets the budget without the 2 GiB, and no better map "
        "was searched for; graphplan also uses them for weights, as far as activations leave room. No "
        "forward pass can be faster than the copies of the weights that graphplan streams. The difference is "
        "the largest one of a logit from eager mode, as a share of the largest logit.\n\n"
        f"{markdown(header, rows)}"
    )


def _training_gpu(data: Data) -> str:
    rows = [
        [
            row["form"],
            *(_gigabytes(row[key]) for key in ("budget", "peak")),
            *(_milliseconds(row[key]) for key in ("seconds", "estimated", "recomputed")),
            _gigabytes(row["streamed"]),
        ]
        for row in data["rows"]
    ]
    load = data["workload"]
    header = ["", "budget", "peak", "step", "estimated", "recomputed", "weights copied"]
    return (
        f"### A training step\n\n{load['layers']} layers of the shape of Llama 3 8B in bfloat16, "
        f"fused AdamW, {load['rows']} x {load['length']} tokens, with `accumulate_gradients=False`. Weights "
        "that are copied to the GPU in a step reside in CPU memory, and the optimizer updates them there.\n\n"
        f"{markdown(header, rows)}"
    )


def _overhead(data: Data, title: str = "## Overhead of a forward pass", where: str = "CPU") -> str:
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in data["rows"]):
        times = [
            f"{row['form']} {row['best_ms']:.1f} ms" for row in data["rows"] if row["workload"] == workload
        ]
        lines.append(f"- {workload}: {', '.join(times)}.")
    return (
        f"{title}\n\nThese models are so small that Python dominates the time, not the kernels. Best of many "
        f"runs on the {where}:\n\n" + "\n".join(lines)
    )


def _loading(data: Data) -> str:
    times = [f"{row['way']} {row['seconds']:.2f} s" for row in data["rows"]]
    loads = [f"{load['seconds']:.1f} s" for load in data["loads"]]
    return (
        f"## Loading a checkpoint\n\nA checkpoint of {data['bytes'] / 1e9:.1f} GB, loaded once per process, "
        f"in CPU seconds: {', '.join(times)}. `graphplan.load`, planning included, takes "
        f"{' and '.join(loads)}: first with a CPU budget for all weights, then with one for 60 % of them and "
        "the others left on disk."
    )


def _planning_time(data: Data) -> str:
    times = [
        f"{row['layers']} layers ({row['operations']} operations) {sum(row['seconds'].values()):.1f} s"
        for row in data["rows"]
    ]
    what = f"Llama-like models on {data['devices']} devices, trace included"
    return f"## Time to plan\n\n{what}: {', '.join(times)}."


def _sweep(data: Data) -> str:
    methods = [f"{_METHODS.get(name, name)} {count}" for name, count in data["captured_by"].items()]
    return (
        f"## Architectures of transformers\n\nOf {data['architectures']} model types, {data['ran']} can be "
        f"built small and run in eager mode here, {data['of']} of them with repeatable results. "
        f"{data['passed']} of these, placed on simulated devices, give eager's results within 1e-5 of the "
        "largest value, stay within every budget, and, unless they run module by module, copy the planned "
        f"bytes. Models by tracer: {', '.join(methods)}."
    )


def _image_sweep(data: Data) -> str:
    other = [record["name"] for record in data["results"] if record["rows"][0]["outcome"] != "equal"]
    return (
        f"## Models of timm and torchvision\n\nThe smallest models of {data['architectures']} families, "
        f"placed on simulated devices: {data['passed']} give eager's results within 1e-5 of the largest "
        f"value, stay within every budget, and copy the planned bytes. The exception is {', '.join(other)}: "
        "its rounding errors grow, in eager mode too. torchvision's detection models are left out: they "
        "cannot be traced, and run module by module."
    )


_RENDERERS: dict[str, Callable[[Data], str]] = {
    "real_models": _real_models,
    "generation": _generation,
    "offload": _offload,
    "training_gpu": _training_gpu,
    "overhead": _overhead,
    "gpu_overhead": partial(_overhead, title="### On a GPU", where="GPU"),
    "loading": _loading,
    "planning_time": _planning_time,
    "sweep": _sweep,
    "image_sweep": _image_sweep,
}
