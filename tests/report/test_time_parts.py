"""The parts of the makespan, in figures and as a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from builders import KIB, chain
from plans import by_hand, hostile_plan, large_plan, llama_plan, unet_plan
from torch import nn

import graphplan
from graphplan import Graph, Operation, Plan, Value
from graphplan.analysis.bottleneck import advice
from graphplan.analysis.explanation import stage_reasons
from graphplan.report.page_data import page_data
from graphplan.report.perfetto import to_trace
from graphplan.report.time_parts import time_parts, what_takes_the_time


@pytest.mark.parametrize("make", [llama_plan, unet_plan, hostile_plan])
def test_time_parts_sum_to_the_makespan(make: Callable[[], Plan]) -> None:
    parts = time_parts(make())
    copies = parts.transfers + parts.streaming + parts.inputs + parts.outputs
    assert sum(parts.compute.values()) + copies == pytest.approx(make().makespan)


def segmenter(flops: int) -> Plan:
    """An encoder on the accelerator, and a head with so many FLOP on the CPU."""
    values = [Value(name, KIB, KIB) for name in ("x", "a", "b", "c")]
    operations = [
        Operation("a", "linear", ("x",), ("a",), (), 10**6, KIB, {}, "encoder"),
        Operation("b", "conv2d", ("a",), ("b",), (), flops, KIB, {}, "decode_head.fuse"),
        Operation("c", "conv2d", ("b",), ("c",), (), flops, KIB, {}, "decode_head.classifier"),
    ]
    graph = Graph(operations, values, [], ["x"], ["c"])
    return by_hand(graph, {0: "1MiB", "cpu": "1MiB"}, {"a": 0, "b": "cpu", "c": "cpu"})


def test_sentence_names_the_innermost_slowest_module() -> None:
    assert what_takes_the_time(segmenter(10**11)) == "100 % of 200.07 ms is `decode_head` on the CPU"


def test_stack_over_several_devices_is_not_the_slowest_module() -> None:
    assert " is computing on " in what_takes_the_time(llama_plan())


def test_sentence_does_not_claim_the_whole_model() -> None:
    plan = by_hand(chain(4), {0: "1MiB", "cpu": "1MiB"}, {"v0": 0, "v1": "cpu", "v2": "cpu", "v3": "cpu"})
    assert "computing on the CPU" in what_takes_the_time(plan)


def test_sentence_names_copied_data() -> None:
    assert what_takes_the_time(hostile_plan()).endswith(
        " is copies of inputs and outputs, 28 % transfers between devices"
    )


def test_advice_suggests_more_memory() -> None:
    assert "more memory on GPU 0 would save" in advice(llama_plan())
    assert advice(replace(llama_plan(), method="hooks")) == ""


@pytest.mark.slow
def test_more_memory_helps_with_fixed_weights() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    plan = graphplan.plan(model, {0: "600KiB", "cpu": "4MiB"}, (torch.ones(64, 256),))
    known = replace(plan, fixed_weights=plan.schedule.assignment.weights)
    assert "more memory on GPU 0 would save" in advice(known)
    assert known.bottleneck(progress=False).binds


def test_stage_shows_its_cost_on_other_devices() -> None:
    plan = segmenter(10**11)
    said = plan.remarks().elsewhere
    assert list(said[0]) == ["cpu"]
    assert said[1][0].endswith(" ms faster")
    small = {spec.key: 700 * KIB if spec.key == 0 else spec.memory for spec in llama_plan().topology.devices}
    tight = replace(llama_plan(), topology=llama_plan().topology.with_memory(small))
    assert "too little on GPU 0, at model" in stage_reasons(tight)[1][0]


def test_advice_suggests_a_faster_device_without_memory_gain() -> None:
    said = advice(segmenter(10**11))
    assert said.startswith(
        "a quick look found no gain from more memory; the CPU twice as fast would save 100"
    )
    assert advice(large_plan()).startswith("a quick look")


def test_the_page_marks_the_phases_of_a_training_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    plan = graphplan.plan(model, {0: "1MiB"}, (torch.ones(4, 8),), train=True, optimizer=torch.optim.AdamW)
    count = len(plan.graph.operations)
    forward = sum(not operation.backward for operation in plan.graph.operations.values())
    phases = page_data(plan)["phases"]
    assert phases == [
        {"name": "forward pass", "at": 0},
        {"name": "backward pass", "at": forward},
        {"name": "optimizer", "at": count},
    ]
    assert page_data(llama_plan())["phases"] == []
    assert "estimated training step" in to_trace(plan)
