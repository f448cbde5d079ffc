"""Stages of a captured graph: crossing values, recomputed values, positions that may not be cut."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from cluster_models import EarlyViews
from torch import nn

from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.max_memory import read_max_memory
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_capture import cut_capture


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.size(0)
        h = torch.relu(self.one(x))
        return self.two(h).reshape(rows * 2, 2) + h.sum()


def captured(model: nn.Module, x: torch.Tensor, **options: object) -> tuple[Capture, Boundaries]:
    compiler = Compiler(ModelCopy(model), read_max_memory({"cpu": "1GiB"}), Options(**options))  # type: ignore[arg-type]
    annotator = compiler.captures.annotated(compiler.model_copy.bind((x,), {}))
    return annotator.capture, Boundaries(annotator.graph())


def text(capture: Capture) -> str:
    return "\n".join(str(node.format_node()) for node in capture.graph.nodes if node.op != "output")


def test_stage_receives_crossing_values_and_recomputes_sizes() -> None:
    rows = torch.export.Dim("rows", min=2, max=8)
    whole, boundaries = captured(Net(), torch.ones(4, 4), dynamic_shapes={"x": {0: rows}})
    names = list(boundaries.graph.operations)
    at = names.index("linear_1")
    assert boundaries.crossing(at) == ("relu",)
    first, second = cut_capture(whole, boundaries, 0, at), cut_capture(whole, boundaries, at, len(names))
    assert first.sent == second.received == ("relu",)
    assert first.outputs == ("relu",)
    assert second.inputs == ("relu", "x")  # an input of the model, for its size
    assert set(first.capture.weights.values()) == {"one.weight"}
    assert set(second.capture.weights.values()) == {"two.weight"}
    assert "sym_size" not in text(first.capture)
    assert "sym_size" in text(second.capture)
    assert "linear_1" not in text(first.capture)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.seen.add_(h.sum(0))
        h = torch.relu(h)
        return self.last(h) + self.seen


class ReturnsWritten(nn.Module):
    """Writes to a buffer or to its input, and returns it or an earlier view of it."""

    def __init__(self, of_input: bool, how: str) -> None:
        super().__init__()
        self.of_input, self.how = of_input, how
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.register_buffer("seen", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        written = x if self.of_input else self.seen
        view = written.view(2, 8)
        if self.how == "part":
            written[1].add_(x.sum())
        else:
            written.add_(x.sum())
        h = self.layers(x * 2)
        return h, view if self.how == "view" else written


class ReadsNumber(nn.Module):
    """Keeps a number of a buffer, and then writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = self.seen[0].item()
        self.seen.add_(x.sum())
        return self.layers(x) * number


MODELS = {
    "net": Net,
    "views": EarlyViews,
    "writes": Writes,
    "number": ReadsNumber,
    **{
        f"{how} of {'input' if of_input else 'buffer'}": partial(ReturnsWritten, of_input, how)
        for of_input in (False, True)
        for how in ("view", "part", "itself")
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_stages_together_equal_the_whole(name: str) -> None:
    """Twice, because the first call may write to buffers."""
    model = MODELS[name]().eval()
    x = torch.randn(4, 16 if name == "views" else 4)
    whole, boundaries = captured(model, x)
    count = len(boundaries.graph.operations)
    for position in boundaries.allowed[1:-1]:
        eager, machines = copy.deepcopy(model), [copy.deepcopy(model) for _ in range(2)]
        for _ in range(2):
            values: dict[str, torch.Tensor] = {}
            for machine, start, end in ((0, 0, int(position)), (1, int(position), count)):
                stage = cut_capture(whole, boundaries, start, end)
                taken = {**values, whole.inputs[0]: x.clone()}
                taken |= {n: machines[machine].state_dict()[w] for n, w in stage.capture.weights.items()}
                order = [n.name for n in stage.capture.graph.find_nodes(op="placeholder")]
                with torch.no_grad():
                    made = stage.capture.module(*(taken[name] for name in order))
                values = {**taken, **dict(zip(stage.outputs, made, strict=True))}
            with torch.no_grad():
                torch.testing.assert_close(
                    tuple(values[result.name] for result in whole.outputs), as_tuple(eager(x.clone()))
                )


def as_tuple(result: object) -> tuple[object, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_weight_is_in_stages_that_need_its_data() -> None:
    whole, boundaries = captured(EarlyViews(), torch.ones(4, 16))
    count = len(boundaries.graph.operations)
    for position in boundaries.allowed[1:-1]:
        for start, end in ((0, int(position)), (int(position), count)):
            needed = {
                name
                for name, places in boundaries.needed_at.items()
                if any(start <= place < end for place in places)
            }
            stage = cut_capture(whole, boundaries, start, end)
            assert set(stage.capture.weights.values()) == needed
    assert all(
        len(boundaries.needed_at[f"weights.{index}"]) == (2 if index in {0, 2} else 1) for index in range(6)
    )


def test_written_weight_is_in_one_stage() -> None:
    _, boundaries = captured(Writes(), torch.ones(2, 4))
    at = {name: position for position, name in enumerate(boundaries.graph.operations)}
    graph = boundaries.graph
    readers = [at[o.name] for o in graph.operations.values() if "seen" in map(graph.root, o.inputs)]
    assert min(readers) < max(readers)
    assert not [p for p in boundaries.allowed if min(readers) < p <= max(readers)]
