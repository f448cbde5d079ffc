"""Schedules written as fx graphs."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from placements import CARD, HOST, equal_cards
from torch import fx, nn

from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.sizes.size_limits import SizeLimits, bounded
from graphplan.capture.tracing import capture
from graphplan.devices.topology import CPU
from graphplan.ir.lowered_ops import arrived
from graphplan.ir.schedule import Assignment
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.simplify import simplify
from graphplan.passes.lowering.emit import lower
from graphplan.passes.lowering.verify_devices import verify_lowered
from graphplan.passes.schedule.transfers import build_schedule


class ThereAndBack(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.tanh(x)
        b = torch.neg(a)
        return torch.exp(b), torch.sin(a)


def lowered(on_cpu: set[str], kind: str = "cuda") -> list[str]:
    """The nodes where ``on_cpu`` run there and all others on an accelerator, without placeholders."""
    model_copy = ModelCopy(ThereAndBack())
    call = model_copy.bind((torch.randn(4, 4),), {})
    found = bounded(capture(model_copy, call), call, SizeLimits(), 0.0)
    simplify(found)
    graph = Annotator(found, model_copy.weights).graph()
    topology = equal_cards(1, HOST, kind=kind)
    places = {name: CPU if name in on_cpu else CARD.key for name in graph.operations}
    schedule = build_schedule(graph, topology, Assignment(places, {}), CPU)
    made, _ = lower(found, graph, schedule, topology)
    verify_lowered(made, graph, schedule, topology)
    return [line_of(node) for node in made.nodes if node.op.startswith("call")]


def line_of(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    given = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    return f"{node.name} = {name}({', '.join(given)})"


def test_copies_to_cpu_are_awaited_before_their_readers() -> None:
    lines = lowered({"neg"})
    copy = "tanh_on_cpu = to(tanh, cpu, non_blocking=True)"
    wait = "tanh_arrived = arrived(tanh_on_cpu, cuda:0)"
    assert lines.index(copy) < lines.index(wait) == lines.index("neg = neg.default(tanh_arrived)") - 1
    assert "neg_on_0 = to(neg, cuda:0)" in lines  # into the stream's order


def test_results_are_all_copied_before_the_host_waits() -> None:
    lines = lowered(set())
    copies = [index for index, line in enumerate(lines) if "non_blocking=True" in line]
    waits = [index for index, line in enumerate(lines) if "= arrived(" in line]
    assert len(copies) == len(waits) == 2
    assert max(copies) < min(waits)


def test_host_waits_for_copies_of_all_devices() -> None:
    assert not [line for line in lowered({"neg"}, kind="xpu") if "non_blocking" in line or "arrived" in line]


def test_arrived_value_is_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", {"cuda:0": stream}.__getitem__)
    value = torch.ones(2)
    assert arrived(value, "cuda:0") is value
    stream.synchronize.assert_called_once_with()
