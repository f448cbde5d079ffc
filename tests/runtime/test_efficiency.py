"""Efficiency of operation types: from samples, in costs, in plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from placements import CARD
from torch import nn

import graphplan
from graphplan import Operation, Speed
from graphplan.devices.topology import Efficiency
from graphplan.ir.cost_model import operation_seconds
from graphplan.ir.timeline import Measured, Timeline
from graphplan.runtime.profile.call_profile import Profile
from graphplan.runtime.profile.efficiency import Sample, efficiencies
from graphplan.runtime.profile.operation_benchmark import MOST_BYTES, _case, operation_cases

SLOW = Efficiency(flops=0.5, bandwidth=0.25)


def test_samples_separate_arithmetic_from_memory_efficiency() -> None:
    """On a GPU of 1 TFLOP/s and 100 GB/s, with 4 µs for each operation."""
    samples = [
        Sample("conv2d", 10**9, 10**6, 2e-3 + 4e-6),
        Sample("conv2d", 10**6, 10**8, 4e-3 + 4e-6),
        Sample("add", 0, 10**8, 1e-3 + 4e-6),
        Sample("relu", 0, 10**4, 5e-6),
        Sample("view", 0, 0, 5e-6),
    ]
    found = efficiencies(samples, CARD)
    assert found.keys() == {"conv2d", "add"}
    assert (found["conv2d"].flops, found["conv2d"].bandwidth) == pytest.approx((0.5, 0.25))
    assert (found["add"].flops, found["add"].bandwidth) == pytest.approx((1.0, 1.0))


def test_many_samples_yield_an_overhead_per_type() -> None:
    """Each takes 50 µs and twice the nominal seconds: the overhead is not counted as inefficiency."""
    moved = [(10**size, 50e-6 + 2 * 10**size / CARD.bandwidth) for size in range(3, 9)]
    found = efficiencies([Sample("conv2d", 0, nbytes, seconds) for nbytes, seconds in moved], CARD)
    assert found["conv2d"].bandwidth == pytest.approx(0.5)
    assert found["conv2d"].overhead == pytest.approx(50e-6)
    spec = replace(CARD, efficiency=found)
    for nbytes, seconds in moved:
        operation = Operation("a", "conv2d", flops=0, bytes_accessed=nbytes)
        assert operation_seconds(operation, spec) == pytest.approx(seconds)


def test_operation_seconds_use_the_types_efficiency() -> None:
    spec = replace(CARD, efficiency={"add": SLOW})
    for target in ("add.Tensor", "add_.Tensor", "add"):
        arithmetic = Operation("a", target, flops=10**9, bytes_accessed=10**6)
        memory = Operation("b", target, flops=10**6, bytes_accessed=10**8)
        assert operation_seconds(arithmetic, spec) == pytest.approx(2e-3 + 4e-6)
        assert operation_seconds(memory, spec) == pytest.approx(4e-3 + 4e-6)
    other = Operation("c", "mul.Tensor", flops=10**9, bytes_accessed=10**6)
    assert operation_seconds(other, spec) == operation_seconds(other, CARD)


def test_invalid_efficiency_raises() -> None:
    with pytest.raises(graphplan.DeviceError, match="positive"):
        Efficiency(flops=0.0)


def test_profiled_efficiency_sets_the_next_estimate() -> None:
    """Linear layers measured at five times their estimate have that time in the next plan."""
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), torch.randn(256, 512)
    plan = graphplan.plan(model, {"cpu": "1GiB"}, (x,))
    spec, took = plan.topology["cpu"], {}
    for name, operation in plan.graph.operations.items():
        took[name] = spec.overhead + 5 * (operation_seconds(operation, spec) - spec.overhead)
    profile = Profile(plan, Measured(Timeline((), 1.0), {}, took))
    again = graphplan.plan(model, {"cpu": "1GiB"}, (x,), devices=profile.measurements)
    assert again.makespan == pytest.approx(sum(took.values()))
    assert graphplan.Plan.from_json(again.to_json()).topology["cpu"].efficiency.keys() == {"linear"}


def test_simulated_devices_yield_no_speeds() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with graphplan.simulate({0: "1MiB", "cpu": "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (torch.ones(2, 64),), pin={"0": "cpu"})
        speeds = placed.profile(torch.ones(2, 64)).measurements.speeds
    assert set(speeds) == {"cpu"}


@pytest.mark.slow
def test_cases_run_and_are_small() -> None:
    cases = list(operation_cases(torch.device("cpu"), torch.float32))
    types = {case.type for case in cases}
    assert {"linear", "conv2d", "layer_norm", "scaled_dot_product_attention"} <= types
    for case in cases:
        assert case.bytes_accessed <= MOST_BYTES
        assert case.work().isfinite().all()


def test_runs_of_a_case_read_different_memory() -> None:
    """Otherwise the L1 cache would hold all data, as it seldom does in a model."""
    read: list[torch.Tensor] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        read.append(x)
        return x.relu()

    case = _case("relu", noted, torch.rand(256, 1024))
    for _ in range(100):
        case.work()
    distinct = {x.data_ptr(): x.nbytes for x in read}
    assert len({x.data_ptr() for x in read[-8:]}) == 8
    assert MOST_BYTES / 2 < sum(distinct.values()) <= MOST_BYTES


def test_speeds_keep_their_efficiencies_in_json() -> None:
    measured = graphplan.Measurements({"cpu": Speed(1e12, 1e10, 1e-6, {"conv2d": SLOW})})
    assert graphplan.Measurements.from_json(measured.to_json()) == measured
    assert "1 types of operation" in str(measured)
