"""Speeds of devices and links: datasheets, the caller's figures, measurements."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import chain
from test_partition import IDS, Tied

import graphplan
from graphplan import Link, Measurements, Speed
from graphplan.devices import max_memory
from graphplan.devices.datasheets import find_gpu
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.speeds import with_speeds
from graphplan.passes.placement.driver import place
from graphplan.passes.placement.problem import Problem
from graphplan.runtime.profile.device_benchmark import _Bench

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A4000", "A4000"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("RTX4090", "RTX 4090"),
        ("rtx 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("RTX3090Ti", "RTX 3090 Ti"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Tesla T4", "T4"),
    ],
)
def test_gpus_are_found_by_driver_name(name: str, card: str) -> None:
    found = find_gpu(name)
    assert found is not None
    assert found.name == card


@pytest.mark.parametrize("name", ["Quadro RTX 6000", "NVIDIA T400 4GB", "NVIDIA A4", ""])
def test_unknown_gpu_names_are_not_found(name: str) -> None:
    assert find_gpu(name) is None


def test_given_speeds_are_used_in_the_plan() -> None:
    mine = {0: Speed(flops=1e12), "cpu": Speed(2e12, 3e9, 4e-6)}
    plan = graphplan.plan(Tied().eval(), {0: "1MiB", 1: "1MiB", "cpu": "1MiB"}, (IDS,), devices=mine)
    default = read_max_memory({0: 1, 1: 1})
    assert plan.topology[0].flops == 1e12
    assert plan.topology[0].bandwidth == default[0].bandwidth
    assert plan.topology[1].flops == default[1].flops
    cpu = plan.topology["cpu"]
    assert (cpu.flops, cpu.bandwidth, cpu.overhead) == (2e12, 3e9, 4e-6)


def test_gpu_name_sets_datasheet_speeds() -> None:
    budgets = {0: "1MiB", 1: "1MiB", "cpu": "1MiB"}
    plan = graphplan.plan(Tied().eval(), budgets, (IDS,), devices={0: "NVIDIA H100 80GB HBM3", 1: "rtx4090"})
    for key, card in ((0, "H100"), (1, "RTX 4090")):
        known = find_gpu(card)
        assert known is not None
        assert (plan.topology[key].flops, plan.topology[key].bandwidth) == (known.flops, known.bandwidth)
        assert plan.topology[key].origin == "datasheet"


def test_speed_of_a_device_round_trips() -> None:
    spec = read_max_memory({0: "1GiB"})[0]
    changed = Speed(2e12, 3e9, 4e-6).applied(spec)
    assert Speed.of(changed).flops == 2e12
    assert Speed.of(spec).applied(changed) == spec


def test_operations_are_placed_on_the_faster_device() -> None:
    problem = Problem(chain(6, flops=10**10), read_max_memory({0: "1MiB", 1: "1MiB"}), "cpu")
    fast = with_speeds(problem.topology, {1: Speed(flops=1e16)})
    found = place(Problem(problem.graph, fast, "cpu")).evaluation
    assert set(place(problem).evaluation.schedule.assignment.operations.values()) == {0}
    assert set(found.schedule.assignment.operations.values()) == {1}


def test_measurements_match_devices_by_other_spelling() -> None:
    measured = Measurements({0: Speed(flops=5e12), 7: Speed(flops=1.0)}, {(0, "cpu"): Link(1e9, 1e-3)})
    name = read_max_memory({0: 1}).devices[0].device
    topology = with_speeds(read_max_memory({name: "1GiB", "cpu": "1GiB"}), measured)
    assert topology[name].flops == 5e12
    assert topology.link(name, "cpu") == Link(1e9, 1e-3)


@pytest.mark.parametrize("written", ["cpu", "cpu:0", torch.device("cpu")])
@pytest.mark.parametrize("key", ["cpu", "cpu:0"])
def test_speeds_accept_every_spelling_of_a_device(written: Any, key: str) -> None:
    speed, link = Speed(flops=5e12), Link(1e9, 1e-3)
    topology = read_max_memory({"cuda:1": "1GiB", key: "1GiB"})
    assert with_speeds(topology, {written: speed})[key].flops == 5e12
    measured = with_speeds(topology, Measurements({written: speed}, {("cuda:1", written): link}))
    assert measured[key].flops == 5e12
    assert measured.link(key, "cuda:1") is link
    named = with_speeds(topology, {torch.device("cuda", 1): "H200"})  # type: ignore[dict-item]  # it may
    assert named.link("cuda:1", key).bandwidth == 55e9


def test_given_links_override_measured_links() -> None:
    measured = Measurements(links={(0, 1): Link(1e9, 1.0), (1, 0): Link(2e9, 1.0)})
    topology = with_speeds(read_max_memory({0: 1, 1: 1}, {(0, 1): Link(3e9, 0.0)}), measured)
    assert topology.link(0, 1) == topology.link(1, 0) == Link(3e9, 0.0)


def test_host_link_is_that_of_the_named_gpu() -> None:
    budgets = {0: "1GiB", 1: "1GiB", "cpu": "1GiB"}
    topology = with_speeds(read_max_memory(budgets), {0: "H200", 1: Speed(flops=1e12)})
    assert topology.link(0, "cpu").bandwidth == topology.link("cpu", 0).bandwidth == 55e9
    assert topology.link(0, "cpu").origin == "datasheet"
    assert topology.link(1, "cpu") == topology.default_link
    given = with_speeds(read_max_memory(budgets, {("cpu", 0): Link(3e9, 0.0)}), {0: "H200"})
    assert given.link(0, "cpu") == Link(3e9, 0.0)


def test_measured_and_given_links_override_the_datasheet(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        max_memory, "_datasheet", lambda spec: find_gpu("T4") if spec.device == "cuda:0" else None
    )
    budgets = {"cuda:0": "1GiB", "cpu": "1GiB"}
    assert read_max_memory(budgets).link("cpu", "cuda:0").bandwidth == 12e9
    measured = Measurements(links={("cuda:0", "cpu"): Link(1e9, 1.0), ("cpu", "cuda:0"): Link(2e9, 1.0)})
    topology = with_speeds(read_max_memory(budgets), measured)
    assert topology.link("cpu", "cuda:0").bandwidth == 2e9
    given = read_max_memory(budgets, {("cpu", "cuda:0"): Link(3e9, 1.0)})
    assert given.link("cuda:0", "cpu").bandwidth == 3e9
    assert with_speeds(given, measured).link("cuda:0", "cpu").bandwidth == 3e9


@pytest.mark.parametrize("figure", [0, -1.0, float("nan"), float("inf"), "fast", True])
def test_speeds_are_positive_numbers(figure: Any) -> None:
    with pytest.raises(graphplan.DeviceError, match=r"Speed\(flops="):
        Speed(flops=figure)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ({5: Speed()}, "devices names 5"),
        ({0: 1e12}, "graphplan.Speed"),
        ({0: "Abacus"}, r"devices\[0\]: unknown GPU 'Abacus'; known GPUs: .*H100"),
        (3, "graphplan.Measurements"),
    ],
)
def test_invalid_devices_argument_raises(devices: Any, message: str) -> None:
    with pytest.raises(graphplan.DeviceError, match=message):
        with_speeds(read_max_memory({0: 1}), devices)


@pytest.mark.parametrize("given", [lambda speeds: speeds, Measurements])
def test_speed_of_the_disk_raises_and_suggests_links(given: Any) -> None:
    with pytest.raises(graphplan.DeviceError, match=r"devices\['disk'\].* links=\{\('disk', 'cpu'\)"):
        with_speeds(read_max_memory({"disk": 1, "cpu": 1}), given({"disk": Speed(bandwidth=6e9)}))


def test_the_cpu_is_measured(tmp_path: Path) -> None:
    measured = graphplan.measure_devices({"cpu": 128 * MIB}, repetitions=2, progress=False)
    speed = measured.speeds["cpu"]
    assert None not in (speed.flops, speed.bandwidth, speed.overhead)
    assert "conv2d" in speed.efficiency
    assert measured.dtypes == {"cpu": "float32"}
    assert not measured.notes
    measured.save_json(tmp_path / "speeds.json")
    again = Measurements.load_json(tmp_path / "speeds.json")
    assert again == measured
    topology = with_speeds(read_max_memory({"cpu": "1GiB"}), again)
    assert topology["cpu"].flops == speed.flops
    assert "TFLOP/s" in str(measured)


def test_cpu_is_measured_in_the_given_dtype() -> None:
    measured = graphplan.measure_devices({"cpu": MIB}, dtype=torch.float64, repetitions=1, progress=False)
    assert measured.dtypes == {"cpu": "float64"}


def test_simulated_devices_are_not_measured() -> None:
    link = Link(1e9, 1e-3)
    with graphplan.simulate({0: "1MiB", "cpu": "4MiB"}, {(0, "cpu"): link}) as machine:
        with pytest.warns(UserWarning, match="device 0 is not measured: it is simulated"):
            measured = graphplan.measure_devices(repetitions=1, progress=False)
        assert set(measured.speeds) == {"cpu"}
        assert "simulated" in measured.notes[0]
        assert "the budget is too small" in measured.notes["cpu"]
        assert dict(measured.links) == {(0, "cpu"): link}
        assert machine.peak_bytes(0) == 0
        assert not machine.transfers
        assert Measurements.from_json(measured.to_json()) == measured


def test_measuring_an_absent_device_raises() -> None:
    with pytest.raises(graphplan.DeviceError, match=r"device 97 .* is not here"):
        graphplan.measure_devices({97: "1GiB"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not JSON"),
        ("[]", "no measurements"),
        ('{"format": "graphplan.measurements", "version": 99}', "version 99"),
        ('{"format": "graphplan.measurements", "version": 2}', "damaged"),
    ],
)
def test_invalid_measurements_json_raises(text: str, message: str) -> None:
    with pytest.raises(graphplan.PlanError, match=message):
        Measurements.from_json(text)


def test_damaged_speeds_in_json_raise() -> None:
    data = json.loads(Measurements({0: Speed(flops=1.0)}).to_json())
    data["speeds"][0][1]["flops"] = -1.0
    with pytest.raises(graphplan.PlanError, match="damaged"):
        Measurements.from_json(json.dumps(data))


@pytest.mark.parametrize("ends", [[0], [0, "cpu", "cpu"], []])
def test_links_without_two_devices_in_json_raise(ends: list[object]) -> None:
    data = json.loads(Measurements(links={(0, "cpu"): Link(1e9)}).to_json())
    data["links"][0][0] = ends
    with pytest.raises(graphplan.PlanError, match="damaged"):
        Measurements.from_json(json.dumps(data))


def test_single_thread_timing_excludes_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    topology = read_max_memory({"cpu": "1GiB"})
    bench = _Bench(topology, None, 2, progress=False)
    assert bench._time(lambda: time.sleep(0.05), topology.devices) < 0.025
