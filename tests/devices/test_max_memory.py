from __future__ import annotations

from typing import Any

import pytest
import torch

import graphplan
from graphplan.devices.machine import accelerator_type
from graphplan.devices.max_memory import read_max_memory, require_present
from graphplan.devices.topology import Link


def test_keys_keep_the_callers_order() -> None:
    topology = read_max_memory({2: "1GiB", 0: 1000, 5: "2MB", "cpu": 1.0e9})
    assert topology.keys == (2, 0, 5, "cpu")
    assert [spec.memory for spec in topology.devices] == [1 << 30, 1000, 2_000_000, 10**9]


def test_sizes_may_be_in_terabytes() -> None:
    topology = read_max_memory({0: "1TiB", 1: "1.5TB", "cpu": "2 tib"})
    assert [spec.memory for spec in topology.devices] == [1 << 40, 1_500_000_000_000, 1 << 41]
    for text in ("-1TB", "TiB", "nanTB", "infTiB", "1T"):
        with pytest.raises(graphplan.BudgetError, match=text):
            read_max_memory({0: text})


def test_integer_keys_name_accelerators_even_without_one() -> None:
    topology = read_max_memory({3: 10, "cuda:1": 10, "disk": 10})
    assert [spec.device for spec in topology.devices] == [
        f"{accelerator_type() or 'cuda'}:3",
        "cuda:1",
        "disk",
    ]
    assert [spec.computes for spec in topology.devices] == [True, True, False]


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        ({}, "empty"),
        ({0: "ten"}, "'ten'"),
        ({0: -1}, "-1"),
        ({0: "-5GB"}, "'-5GB' is negative"),
        ({0: 0.5}, "write '0.5GiB'"),
        ({0: "10G"}, "write bytes, '10GiB' or '10GB'"),
        ({0: "²"}, "²"),
        ({0: True}, "True"),
        ({0: None}, "None"),
        ({0: float("nan")}, "nan"),
        ({0: float("inf")}, "inf"),
        ([1, 2], "list"),
        ({"disk": "1GB"}, "disk"),
    ],
)
def test_invalid_budgets_raise_with_key_and_value(budget: object, named: str) -> None:
    with pytest.raises(graphplan.BudgetError, match=named):
        read_max_memory(budget)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("key", [-1, "gpu", "cuda:x", "meta", True, (0,), None])
def test_invalid_keys_raise(key: object) -> None:
    with pytest.raises(graphplan.DeviceError):
        read_max_memory({key: 10})  # type: ignore[dict-item]  # what is tested


@pytest.mark.parametrize(("key", "hint"), [("CPU", "'cpu'"), ("cput", "'cpu'"), ("gpu", "an index")])
def test_a_similar_key_is_suggested(key: str, hint: str) -> None:
    with pytest.raises(graphplan.DeviceError, match=hint):
        read_max_memory({key: 10})


def test_index_as_text_raises_and_suggests_a_number() -> None:
    with pytest.raises(
        graphplan.DeviceError, match="'1' is text: write the accelerator's index as a number, 1"
    ):
        read_max_memory({0: 10, "1": 10})


def test_one_device_under_two_keys_raises() -> None:
    with pytest.raises(graphplan.DeviceError, match="both cuda:0"):
        read_max_memory({"cuda:0": 10, "cuda": 10})


@pytest.mark.parametrize("written", ["cuda:0", "cuda", torch.device("cuda"), torch.device("cuda", 0)])
def test_reserve_accepts_every_spelling_of_a_device(written: Any) -> None:
    (spec,) = read_max_memory({written: "1MiB"}).devices
    assert (spec.key, spec.device) == (str(written), "cuda:0")
    for key in ("cuda", "cuda:0"):
        assert read_max_memory({key: "1MiB"}, reserve={written: "1KiB"})[key].reserve == 1 << 10
    with pytest.raises(graphplan.DeviceError, match=r"reserve names .* not in max_memory: it has 'cpu'"):
        read_max_memory({"cpu": "1MiB"}, reserve={written: 1})


def test_repeated_devices_in_reserve_or_links_raise() -> None:
    budgets = {0: "1MiB", "cpu": "1MiB"}
    with pytest.raises(graphplan.DeviceError, match="reserve names a device twice"):
        read_max_memory(budgets, reserve={"cpu": 1, "cpu:0": 2})
    link = Link(1e9, 1e-6)
    for links in ({(0, "cpu"): link, (0, "cpu:0"): link}, {("cpu", "cpu:0"): link}):
        with pytest.raises(graphplan.DeviceError, match="a pair twice, or a device with itself"):
            read_max_memory(budgets, links=links)


def test_absent_device_raises_in_partition() -> None:
    with pytest.raises(graphplan.DeviceError, match=r"device 7 .* is not here.*graphplan\.plan"):
        require_present(read_max_memory({7: 10}))


def test_links_are_found_in_either_direction() -> None:
    fast = Link(100e9, 1e-6)
    topology = read_max_memory({0: 10, 1: 10}, {(0, 1): fast})
    assert topology.link(1, 0) is fast
    assert topology.link("cpu", 0) == Link()
    assert fast.seconds(100_000) == pytest.approx(2e-6)


def test_with_faster_link_scales_both_directions() -> None:
    slow = {(0, 1): Link(1e9, 4e-6), (1, 0): Link(2e9, 0.0)}
    topology = read_max_memory({0: "1GiB", 1: "1GiB"}, slow)
    faster = topology.with_faster_link(1, 0, 2.0)
    assert (faster.link(0, 1), faster.link(1, 0)) == (Link(2e9, 2e-6), Link(4e9, 0.0))
    assert faster.link("cpu", 0) == topology.link("cpu", 0)


def test_allocations_are_rounded_as_the_allocator_does() -> None:
    cuda, cpu = read_max_memory({"cuda:0": 10, "cpu": 10}).devices
    assert [cpu.allocated(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    mib = 1 << 20
    assert cuda.allocated(2 * mib) == 3 * mib  # a cached block may be up to 1 MiB too large
    assert cuda.resident([100, 600]) == 512 + 1024
    assert cuda.resident([2 * mib] * 9) == 19 * mib  # all from one segment
    assert cuda.resident([11 * mib + 512]) == 12 * mib  # the rest of a segment of 12 MiB is kept
    assert cuda.resident([10 * mib + 512]) == 10 * mib + 512  # that of a larger rest is not


@pytest.mark.parametrize(
    ("links", "named"),
    [
        ({(0, 7): Link()}, "names 7, which is not in max_memory"),
        ({0: Link()}, r"key 0: write \(source, destination\)"),
        ({(0, 1): 25e9}, "graphplan.Link"),
        ([Link()], "graphplan.Link"),
    ],
)
def test_invalid_links_raise(links: object, named: str) -> None:
    with pytest.raises(graphplan.DeviceError, match=named):
        read_max_memory({0: 10, 1: 10}, links)  # type: ignore[arg-type]  # what is tested


def test_links_to_devices_outside_max_memory_are_accepted() -> None:
    link = Link(1e9)
    topology = read_max_memory({0: 10}, {("cpu", 0): link, ("cuda:3", 0): link})
    assert topology.link("cpu", 0) is topology.link("cuda:3", 0) is link


@pytest.mark.parametrize("figures", [(0.0,), (-1.0,), (float("inf"),), ("10GB",), (True,), (1e9, -1e-6)])
def test_link_requires_positive_numbers(figures: tuple[object, ...]) -> None:
    with pytest.raises(graphplan.DeviceError, match=r"Link\("):
        Link(*figures)  # type: ignore[arg-type]  # what is tested
    assert Link(1e9, 0.0).seconds(10**9) == 1.0


@pytest.mark.parametrize("accelerator", [0, "cuda", torch.device("cuda", 0)])
@pytest.mark.parametrize("host", ["cpu", "cpu:0", torch.device("cpu")])
def test_links_accept_every_spelling_of_a_device(accelerator: Any, host: Any) -> None:
    link = Link(1e9)
    for key in ("cpu", "cpu:0"):
        topology = read_max_memory({"cuda:0": 10, key: 10}, {(accelerator, host): link})
        assert topology.link("cuda:0", key) is topology.link(key, "cuda:0") is link


@pytest.mark.parametrize(
    ("key", "message"), [("CPU", "links: 'CPU' is not a device: did you mean 'cpu'"), ("0", "links: '0' is")]
)
def test_links_of_invalid_devices_raise(key: str, message: str) -> None:
    with pytest.raises(graphplan.DeviceError, match=message):
        read_max_memory({0: 10, "cpu": 10}, {(0, key): Link()})
