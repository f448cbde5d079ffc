"""Measured pipelines of two processes: graphplan's cut, and cuts by even layers and even parameters.

python benchmarks/stages.py

Two processes on this machine, each bound to one core and one thread, run five models with unequal layers. All
three cuts run on the same engine with the same schedule: for a cut by rule, the planner has only this one to
choose from. It plans with the profile of one microbatch, which has the efficiencies of the model's own
operations: at such small sizes they are far from the usual ones. The profile is of wall time: other load on
the machine makes estimates and cuts worse. Layers are those that a person would cut a pipeline into; a cut by
parameters is where the bytes before it are nearest to half. The three cuts run in turn. Ratios are those of
the least seconds of a batch, since other load only adds time, and of the processor seconds of the busiest
process, which bound the throughput.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import itertools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import llama_of
from report import parser_of, table, write
from torch import nn
from transformers import LlamaForCausalLM, SegformerConfig, SegformerForSemanticSegmentation

import graphplan
from graphplan.devices.speeds import Measurements
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.stage_dp import Segments, StageDP

RANKS = 2
ROUNDS, MICROBATCHES = 15, 8
WARM = 2  # rounds that are not counted
PROFILES = 40  # number of profiles; the fastest run of each operation counts
LOOPBACK = graphplan.Link(1.5e9, 100e-6)  # about the speed of gloo between processes of one machine
CUTS = ("ours", "even layers", "even parameters")


@dataclass(frozen=True)
class Model:
    """A model and the layers between which a person would cut it.

    Attributes:
        module: the model.
        inputs: one batch.
        layers: paths of the modules that run one after another; a cut is before one of them.
    """

    module: nn.Module
    inputs: Mapping[str, Any]
    layers: Sequence[str]


def funnel() -> Model:
    """Return linear layers that get narrower."""
    widths = (2048, 1536, 1024, 768, 512, 384, 256, 192, 128)
    parts = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(widths)]
    return Model(
        nn.Sequential(*parts), {"input": torch.randn(1024, 2048)}, [str(i) for i in range(len(parts))]
    )


def pyramid() -> Model:
    """Return convolutions: early layers take most time, late ones have most weights."""
    widths = (3, 32, 64, 128, 256, 512)
    parts = [
        nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU()
        )
        for a, b in itertools.pairwise(widths)
    ]
    return Model(
        nn.Sequential(*parts), {"input": torch.randn(16, 3, 128, 128)}, [str(i) for i in range(len(parts))]
    )


def large_head() -> Model:
    """Return a Llama with small layers and a large vocabulary."""
    layers = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(8)), "lm_head"]
    inputs = {"input_ids": torch.randint(0, 32_000, (16, 32)), "use_cache": False}
    return Model(LlamaForCausalLM(llama_of(256, 688, 8, 8, 8, 32_000)()), inputs, layers)


def segformer() -> Model:
    """Return a vision transformer whose stages have falling resolution, and a decoder."""
    config = SegformerConfig(depths=[2, 2, 2, 2], hidden_sizes=[16, 32, 80, 128], decoder_hidden_size=128)
    layers = [*(f"segformer.stages.{s}.blocks.{i}" for s in range(4) for i in range(2)), "decode_head"]
    return Model(
        SegformerForSemanticSegmentation(config), {"pixel_values": torch.randn(8, 3, 128, 128)}, layers
    )


class Hourglass(nn.Module):
    """A U-Net of one dimension: outputs of the down path are concatenated to inputs of the up path."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 64, 128)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(nn.Conv1d(a, b, 5, padding=2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(2 * b, a, 4, padding=1, stride=2) for a, b in reversed(pairs)
        )
        self.head = nn.Sequential(*(nn.Conv1d(16, 16, 9, padding=4) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = torch.relu(layer(torch.cat([x, skips.pop()], 1)))
        return self.head(x)


def hourglass() -> Model:
    layers = [f"{part}.{i}" for part, count in (("down", 3), ("up", 3), ("head", 6)) for i in range(count)]
    return Model(Hourglass(), {"x": torch.randn(32, 16, 2048)}, layers)


MODELS: tuple[Callable[[], Model], ...] = (funnel, pyramid, large_head, segformer, hourglass)


def layer_of_cut(model: Model, kind: str) -> int:
    """Return the index of the layer before which a rule cuts."""
    if kind == "even layers":
        return len(model.layers) // 2
    nbytes = [sum(p.nbytes for p in model.module.get_submodule(name).parameters()) for name in model.layers]
    before = np.cumsum(nbytes) - nbytes
    return max(1, int(np.argmin(np.abs(before - sum(nbytes) / 2))))


def only_before(model: Model, layer: int, boundaries: Boundaries) -> np.ndarray[Any, Any]:
    """Return the boundary before a layer, or the nearest allowed one, between both ends."""
    later = tuple(f"{name}." for name in model.layers[layer:])
    paths = [f"{operation.module_path}." for operation in boundaries.graph.operations.values()]
    position = next(at for at, path in enumerate(paths) if path.startswith(later))
    inner = boundaries.allowed[1:-1]
    nearest = inner[int(np.argmin(np.abs(inner - position)))]
    return np.array([boundaries.allowed[0], nearest, boundaries.allowed[-1]])


def placed_by(model: Model, kind: str, speeds: Measurements) -> nn.Module:
    """Place the model over all ranks, cut by the planner or by a rule."""
    partition = functools.partial(
        graphplan.partition,
        model.module.eval(),
        machines=[{"cpu": "2GiB"}] * RANKS,
        kwargs=model.inputs,
        microbatches=MICROBATCHES,
        objective="throughput",
        network=LOOPBACK,
        devices=speeds,
    )
    if kind == "ours":
        return partition()
    layer, both = layer_of_cut(model, kind), Segments(cuts=(0, 1, 2), classes=(0, 0), total=0.0, slowest=0.0)
    with (
        patch.object(Boundaries, "candidates", lambda own, *_: only_before(model, layer, own)),
        patch.object(StageDP, "solve", lambda *_: both),  # the planner would leave a machine idle if faster
    ):
        return partition()


def profiled(model: Model, devices: Measurements) -> Measurements:
    """The figures of the devices, with what the model's types of operation reach in one microbatch."""
    micro = {
        name: value[: len(value) // MICROBATCHES] if isinstance(value, torch.Tensor) else value
        for name, value in model.inputs.items()
    }
    placed = graphplan.partition(model.module.eval(), {"cpu": "2GiB"}, kwargs=micro, devices=devices)
    with torch.no_grad():
        placed(**micro)
        profiles = [placed.profile(**micro) for _ in range(PROFILES)]
    each = zip(*(profile.timeline.events for profile in profiles), strict=True)
    quickest = tuple(min(events, key=lambda event: event.end - event.start) for events in each)
    first = profiles[0]
    timeline = replace(first.timeline, events=quickest)
    return replace(first, measured=replace(first.measured, timeline=timeline)).measurements


def seconds_of(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall seconds of the slowest process, and the processor seconds of the busiest."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    call()
    spent = torch.tensor([time.perf_counter() - start, time.process_time() - busy], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent[0]), float(spent[1])


def measure(rank: int, port: int, speeds: Sequence[Measurements], rows: Any) -> None:
    """Measure all cuts in one process; rank 0 stores the rows."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    for make, own in zip(MODELS, speeds, strict=True):
        torch.manual_seed(0)
        model = make()
        placed: dict[str, Any] = {kind: placed_by(model, kind, own) for kind in CUTS}
        seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in CUTS}
        for turn in range(ROUNDS + WARM):
            for kind, module in placed.items():
                spent = seconds_of(functools.partial(module, **model.inputs))
                if turn >= WARM:
                    seconds[kind].append(spent)
        if rank == 0:
            plans = {kind: module.plan for kind, module in placed.items()}
            rows.append(
                {
                    "model": make.__name__.replace("_", " "),
                    "seconds": {kind: min(wall for wall, _ in found) for kind, found in seconds.items()},
                    "busiest": {kind: min(busy for _, busy in found) for kind, found in seconds.items()},
                    "estimated": {kind: plan.makespan for kind, plan in plans.items()},
                    "operations": {
                        kind: [len(s.plan.graph.operations) for s in plan.stages]
                        for kind, plan in plans.items()
                    },
                }
            )
    dist.destroy_process_group()


def main() -> None:
    parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    devices = graphplan.measure_devices({"cpu": "4GiB"})
    speeds = [profiled(make(), devices) for make in MODELS]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.Manager() as manager:
        rows = manager.list()
        mp.spawn(measure, (port, speeds, rows), nprocs=RANKS)
        found = list(rows)
    for row in found:
        row["ratios"] = {
            figure: {kind: row[figure][kind] / row[figure]["ours"] for kind in CUTS[1:]}
            for figure in ("seconds", "busiest", "estimated")
        }
    print(table({"model": row["model"], "ours": row["seconds"]["ours"], **row["ratios"]} for row in found))
    print(f"wrote {write('stages', {'rounds': ROUNDS, 'microbatches': MICROBATCHES, 'rows': found})}")


if __name__ == "__main__":
    main()
