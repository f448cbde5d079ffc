"""Small graphs, modules and comparisons that tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch

import graphplan
from graphplan import Graph, Operation, Value, Weight
from graphplan.capture.structure import leaves_of
from graphplan.devices.simulated_machine import SimulatedMachine

KIB = 1024


def chain(count: int = 4, weight: int = 4 * KIB, activation: int = KIB, flops: int = 1_000_000) -> Graph:
    """``count`` operations in a row, each with a weight of its own."""
    operations, values, weights = [], [Value("x", activation, activation)], []
    previous = "x"
    for i in range(count):
        weights.append(Weight(f"w{i}", weight, (f"w{i}",)))
        values.append(Value(f"v{i}", activation, activation))
        operations.append(
            Operation(f"v{i}", "linear", (previous, f"w{i}"), (f"v{i}",), (), flops, weight, {}, f"layer{i}")
        )
        previous = f"v{i}"
    return Graph(operations, values, weights, ["x"], [previous])


def largest_difference(a: Any, b: Any) -> float:
    """The largest difference of the leaves of two results; infinite if anything but values differs."""
    left, right = leaves_of(a), leaves_of(b)
    if type(a) is not type(b) or len(left) != len(right):
        return float("inf")
    worst = 0.0
    for x, y in zip(left, right, strict=True):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            if x.shape != y.shape or x.dtype != y.dtype:
                return float("inf")
            if x.numel():
                worst = max(worst, float((x.detach().cpu().double() - y.detach().cpu().double()).abs().max()))
        elif x != y:
            return float("inf")
    return worst


def moves_of(machine: SimulatedMachine) -> list[tuple[Any, Any, int]]:
    """The copies that were made, as the plan writes them."""
    return [(t.source, t.destination, t.nbytes) for t in machine.transfers]


def planned_moves(plan: graphplan.Plan) -> list[tuple[Any, Any, int]]:
    """The planned copies."""
    return [(m.source, m.destination, m.nbytes) for m in plan.schedule.copies()]


def assert_kept(machine: SimulatedMachine, plan: graphplan.Plan, *, larger: bool = False) -> None:
    """Measured peaks are within the plan's, the plan's within the budgets; the copies are the plan's.

    With ``larger``, the plan may be for larger sizes than those of the call.
    """
    for spec in plan.topology.devices:
        if isinstance(spec.key, int):
            measured = machine.peak_bytes(spec.key)
            assert measured <= plan.peak_bytes[spec.key] <= spec.memory, (spec.key, measured)
    moves, planned = moves_of(machine), planned_moves(plan)
    if larger:
        planned = [(*ends, min(move[2], most)) for move, (*ends, most) in zip(moves, planned, strict=True)]
    assert moves == planned


def run_placed(
    machine: SimulatedMachine, placed: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a placed module, and compare the plan with the measurements."""
    gc.collect()
    machine.reset_peaks()
    result = placed(*args, **(kwargs or {}))
    assert_kept(machine, placed.plan)
    return result


def bytes_of(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers, ties once."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
