"""New constants of later plans stay within the room that earlier plans leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphplan
from graphplan.compiler.earlier_plans import Commitments
from graphplan.devices.topology import Topology

KIB = 1024


def committed(**peaks: int) -> Commitments:
    peak_bytes = {0: peaks["gpu"] * KIB, "cpu": peaks["cpu"] * KIB}
    commitments, plan = Commitments({}), SimpleNamespace(peak_bytes=peak_bytes)
    commitments.plans.append(plan)  # type: ignore[arg-type]  # only its peaks are read
    return commitments


@pytest.fixture
def topology() -> Topology:
    with graphplan.simulate({0: "1000KiB", "cpu": "1000KiB"}) as machine:
        return graphplan.plan(torch.nn.Linear(2, 2), machine.max_memory, (torch.ones(1, 2),)).topology


@pytest.mark.parametrize(
    ("gpu", "cpu", "homes"), [(0, 0, {}), (700, 0, {"a": "cpu", "b": 0}), (900, 0, {"a": "cpu", "b": "cpu"})]
)
def test_constants_are_where_earlier_peaks_leave_room(
    topology: Topology, gpu: int, cpu: int, homes: dict[str, Any]
) -> None:
    constants = {"a": torch.zeros(100 * KIB), "b": torch.zeros(50 * KIB)}
    found = committed(gpu=gpu, cpu=cpu).homes_of_constants(constants, topology)
    assert found == homes
    assert Commitments().homes_of_constants(constants, topology) == {}


def test_error_names_a_constant_without_room(topology: Topology) -> None:
    with pytest.raises(
        graphplan.InfeasibleError, match=r"'a' needs 409600 .*307200 bytes are free, on device 0"
    ):
        committed(gpu=700, cpu=800).homes_of_constants({"a": torch.zeros(100 * KIB)}, topology)
