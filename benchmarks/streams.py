"""How well streamed weights hide behind compute, on the planner's clocks: ``python benchmarks/streams.py``.

A row of equal blocks, each of two operations with a weight of their own, on one accelerator that holds a
part of them. For several ratios of the time to copy a block to the time to compute it, the plan's own
choice is compared with the longer of all copies and all compute, and with the same number of blocks taken
from the end of the model instead of spread over it. ``loads`` are blocks copied in one call; no choice of
what stays can do with fewer than ``least``, since all memory may hold weights then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import report
from planner_api import Evaluation, Problem, evaluate, place, reside

from graphplan import Graph, Operation, Value, Weight
from graphplan.devices.topology import DeviceSpec, Link, Topology
from graphplan.ir.timeline import make_timeline

WEIGHT = 64 << 20  # bytes of one operation's weight; a block has two
BLOCK_SECONDS = 4e-3  # to compute one block
ACTIVATION = 1 << 20
LATENCY = 15e-6
RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0)
SHAPES = ((60, 30), (60, 45), (60, 10), (32, 22), (80, 20))


@dataclass(frozen=True)
class Case:
    """``blocks`` of which the memory holds ``held``; a copy takes ``ratio`` times the compute of a block."""

    blocks: int
    held: int
    ratio: float

    def problem(self) -> Problem:
        link = Link(2 * WEIGHT / (self.ratio * BLOCK_SECONDS), LATENCY)
        memory = self.held * 2 * WEIGHT + 4 * ACTIVATION
        devices = (
            DeviceSpec(0, "sim:0", memory, 1e12, 1e15, 0.0),
            DeviceSpec("cpu", "cpu", 1 << 50, 1.0, 1.0, 0.0),
        )
        return Problem(blocks_in_a_row(self.blocks), Topology(devices, {("cpu", 0): link}), 0)

    @property
    def block(self) -> float:
        """Seconds to copy one block and to compute it."""
        return BLOCK_SECONDS * (1 + self.ratio) + 2 * LATENCY


def blocks_in_a_row(count: int) -> Graph:
    values, weights, operations = [Value("x", ACTIVATION, ACTIVATION)], [], []
    previous = "x"
    for index in range(2 * count):
        name = f"v{index}"
        weights.append(Weight(f"w{index}", WEIGHT))
        values.append(Value(name, ACTIVATION, ACTIVATION))
        flops = int(BLOCK_SECONDS / 2 * 1e12)
        operations.append(Operation(name, "linear", (previous, f"w{index}"), (name,), (), flops, WEIGHT))
        previous = name
    return Graph(operations, values, weights, ["x"], [previous])


def main() -> None:
    rows = [measure(Case(blocks, held, ratio)) for blocks, held in SHAPES for ratio in RATIOS]
    header = [
        "blocks",
        "held",
        "copy/compute",
        "slots",
        "loads",
        "least",
        "ms",
        "bound",
        "over",
        "from the end",
    ]
    table = [
        [
            row["blocks"],
            row["held"],
            row["ratio"],
            row["slots"],
            f"{row['loads']:.1f}",
            row["least_loads"],
            f"{1e3 * row['seconds']:.2f}",
            f"{1e3 * row['bound']:.2f}",
            f"{100 * row['over']:+.2f} %",
            f"{1e3 * row['tail_seconds']:.2f}",
        ]
        for row in rows
    ]
    print(report.table(header, table))
    worst, most = max(row["over"] for row in rows), max(row["loads"] - row["least_loads"] for row in rows)
    print(f"\nworst time over max(copy, compute) + one block: {100 * worst:+.2f} % (wanted: within 2 %)")
    print(f"most loads over the least: {most:.1f} blocks (wanted: within 1)")
    print(
        f"written to {report.write('streams', {'rows': rows, 'worst_over': worst, 'most_loads_over': most})}"
    )


def measure(case: Case) -> dict[str, Any]:
    problem = case.problem()
    found = place(problem).evaluation
    timeline = make_timeline(problem.graph, problem.topology, found.schedule)
    assert abs(timeline.seconds - found.seconds) <= 1e-12 * found.seconds
    compute, copy = timeline.busy("run"), timeline.busy("load", 0)
    bound = max(compute, copy)
    (ring,) = found.schedule.rings
    return {
        "blocks": case.blocks,
        "held": case.held,
        "ratio": case.ratio,
        "slots": len(ring.slots),
        "loads": len(streamed(found)) / 2,
        "least_loads": case.blocks - case.held,
        "seconds": found.seconds,
        "compute": compute,
        "copy": copy,
        "bound": bound,
        "over": found.seconds / (bound + case.block) - 1,
        "tail_seconds": from_the_end(problem, found).seconds,
    }


def streamed(found: Evaluation) -> list[str]:
    """Names of the weights that are copied in one forward pass."""
    (ring,) = found.schedule.rings
    return [name for segment in ring.segments for name in segment.weights]


def from_the_end(problem: Problem, found: Evaluation) -> Evaluation:
    """As many weights streamed, with as many slots, but the last ones of the model."""
    (ring,) = found.schedule.rings
    names = list(problem.graph.weights)[-len(streamed(found)) :]
    assignment = reside(problem, dict.fromkeys(problem.graph.operations, 0), names)
    return evaluate(problem, replace(assignment, slots={0: len(ring.slots)}))


if __name__ == "__main__":
    main()
