"""Stages cut from a graph, and compiled."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import fx, nn

import graphplan
from graphplan.passes.lowering.stage_modules import cut_stages

X = torch.randn(4, 16)
EAGER = {"backend": "eager"}


def chain_over(*devices: Any, branches: tuple[int, ...] = ()) -> fx.Graph:
    """Operations one after another, and a move wherever the device changes."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    weight = graph.get_attr("w")
    branch = graph.get_attr("branch")
    here = devices[0]
    for index, device in enumerate(devices):
        if device != here:
            value, here = graph.call_method("to", (value, str(device))), device
        arguments = (value, branch) if index in branches else (value, weight)
        value = graph.call_function(torch.add, arguments)
        value.meta["operation"] = f"op{index}"
    graph.output((value,))
    return graph


def outline(*devices: Any, branches: tuple[int, ...] = ()) -> list[str]:
    graph = chain_over(*devices, branches=branches)
    staged, stages = cut_stages(graph, {f"op{i}": device for i, device in enumerate(devices)}, {"branch"})
    sizes = {
        name: sum(node.op == "call_function" for node in stage.graph.nodes) for name, stage in stages.items()
    }
    calls = [n for n in staged.nodes if n.op.startswith("call") and n.target is not operator.getitem]
    return [
        f"{node.target}: {sizes[str(node.target)]}"
        if node.op == "call_module"
        else getattr(node.target, "__name__", node.target)
        for node in calls
    ]


def test_each_run_on_one_device_is_a_stage() -> None:
    assert outline(0, 0, 0) == ["_stage_0: 3"]
    assert outline(0, 0, 1, 1, 1) == ["_stage_0: 2", "to", "_stage_1: 3"]
    assert outline(0, 0, 1, 0, 0) == ["_stage_0: 2", "to", "add", "to", "_stage_1: 2"]


def test_control_flow_is_in_no_stage() -> None:
    assert outline(0, 0, 0, 0, 0, branches=(2,)) == ["_stage_0: 2", "add", "_stage_1: 2"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> Any:
        first, second = torch.relu(self.a(x)).chunk(2, -1)
        y = torch.cat([second, first], -1)
        y.add_(1)
        z = self.norm(self.b(y))
        return {"z": z, "y": y, "first": first}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("training", [False, True])
def test_compiled_stages_equal_eager(backend: str, training: bool) -> None:
    model = Net().train(training)
    compiled: list[str] = []

    def watch(module: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(module.code)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,), compile={"backend": watch})
    assert not compiled  # not before the first call
    assert "_stage_0(" in placed.code
    ours = copy.deepcopy(model)
    for _ in range(2):
        with torch.no_grad():
            assert largest_difference(placed(X), ours(X)) < 1e-5
    assert len(compiled) == 1
    assert largest_difference(dict(placed.named_buffers()), dict(ours.named_buffers())) < 1e-5


def test_copies_and_changed_weights_of_compiled_stages() -> None:
    model = Net().eval()
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,), compile=EAGER)
    placed(X)
    model_copy = copy.deepcopy(placed)
    with torch.no_grad():
        model_copy.a.weight.zero_()
        assert largest_difference(placed(X), model(X)) < 1e-5
        assert largest_difference(model_copy(X), Net.forward(model_copy, X)) < 1e-5


def test_branch_with_compiled_stages() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.a(x))
            z = torch.cond(y.sum() > 0, lambda t: t * 2, lambda t: t - 1, (y,))
            return torch.tanh(self.b(z))

    model = Branch()
    with torch.no_grad():
        expected = model(X)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,), compile=EAGER)
    assert largest_difference(placed(X), expected) < 1e-5


def test_simulated_devices_are_refused() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine, pytest.raises(graphplan.DeviceError, match="simulated"):
        graphplan.partition(Net(), machine.max_memory, (X,), compile=True)


def test_other_values_of_compile_are_refused() -> None:
    with pytest.raises(graphplan.InputError, match="compile must be"):
        graphplan.partition(Net(), {"cpu": "1GiB"}, (X,), compile="inductor")
