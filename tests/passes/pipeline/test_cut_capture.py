"""A stage is a stretch of a captured graph: what crosses, what is made again, where nothing may be cut."""

from __future__ import annotations

import torch
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


def test_a_stage_takes_what_crosses_and_makes_sizes_again() -> None:
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


def test_together_the_stages_compute_the_same() -> None:
    model, x = Net(), torch.randn(4, 4)
    whole, boundaries = captured(model, x)
    weights = dict(model.named_parameters())
    count = len(boundaries.graph.operations)
    for position in boundaries.allowed[1:-1]:
        values = {"x": x}
        for start, end in ((0, int(position)), (int(position), count)):
            stage = cut_capture(whole, boundaries, start, end)
            taken = {**values, **{n: weights[w] for n, w in stage.capture.weights.items()}}
            order = [n.name for n in stage.capture.graph.find_nodes(op="placeholder")]
            made = stage.capture.module(*(taken[name] for name in order))
            values |= zip(stage.outputs, made, strict=True)
        (result,) = stage.sent
        torch.testing.assert_close(values[result], model(x))


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


def test_a_weight_that_is_written_to_is_in_one_stage() -> None:
    _, boundaries = captured(Writes(), torch.ones(2, 4))
    at = {name: position for position, name in enumerate(boundaries.graph.operations)}
    graph = boundaries.graph
    readers = [at[o.name] for o in graph.operations.values() if "seen" in map(graph.root, o.inputs)]
    assert min(readers) < max(readers)
    assert not [p for p in boundaries.allowed if min(readers) < p <= max(readers)]
