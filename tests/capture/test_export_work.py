"""The export omits work that no capture needs, and its graph equals that of torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_models import build
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical, Normal
from torch.export import _trace as export_trace
from torch.nn.modules import module

import graphplan
from graphplan._compat import export_work
from graphplan.capture.captured_graph import Capture
from graphplan.capture.changes.assigned_state import AssignedState
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.tracers import trace_patches
from graphplan.capture.tracing import capture
from graphplan.capture.value_branches import Branches
from graphplan.passes.frontend.annotate import Annotator


class Switching(nn.Module):
    """Changes the gradient mode on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.linear(x)
        with torch.enable_grad():
            x = self.linear(x).chunk(2, -1)[0]
        return x.relu()


def captured(model: nn.Module, **kwargs: Any) -> Capture:
    model_copy = ModelCopy(model)
    return capture(model_copy, model_copy.bind((), kwargs))


def lines(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Each node with its value; numbers in the place of names."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    return [
        (
            node.target if node.op == "call_function" else node.op,
            str(node.meta.get("val")),
            fx.map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}"),
        )
        for node in graph.nodes
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["short llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "gemma3", "t5"))]
)
def test_graph_equals_export_without_patches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build(family), torch.randint(1, 20, (2, 7))
    kwargs = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "t5" else {})}
    short = captured(model, **kwargs)
    monkeypatch.setattr(trace_patches, "less_work", lambda **_: [])
    whole = captured(model, **kwargs)
    assert lines(short.graph) == lines(whole.graph)
    assert [guard.text for guard in short.signature.guards] == [g.text for g in whole.signature.guards]
    assert str(short.signature.leaves) == str(whole.signature.leaves)


def test_no_python_code_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[fx.Graph] = []
    own = fx.Graph.python_code
    monkeypatch.setattr(
        fx.Graph, "python_code", lambda graph, *a, **k: generated.append(graph) or own(graph, *a, **k)
    )
    captured(Switching(), x=torch.ones(2, 4))
    assert not generated


def test_graph_module_generates_code_at_first_call() -> None:
    found = captured(Switching(), x=torch.ones(2, 4))
    parameters = [dict(Switching().named_parameters())[f"linear.{name}"] for name in ("weight", "bias")]
    assert found.module(*parameters, torch.ones(2, 4))[0].shape == (2, 2)


def test_grad_modes_without_gradients_add_no_subgraphs() -> None:
    found = captured(Switching(), x=torch.ones(2, 4))
    assert {node.op for node in found.graph.nodes} == {"placeholder", "call_function", "output"}
    assert not any("grad" in str(node.target) for node in found.graph.nodes)


def test_fake_result_is_recomputed_once_per_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    own = FakeTensorMode._output_from_cache_entry
    monkeypatch.setattr(
        FakeTensorMode, "_output_from_cache_entry", lambda *args: made.append(args) or own(*args)
    )
    note = export_work._tried_once(FakeTensorMode._get_output_info_for_cache_entry)
    monkeypatch.setattr(FakeTensorMode, "_get_output_info_for_cache_entry", note)
    monkeypatch.setattr(export_work, "_ALIKE", set())
    FakeTensorMode.cache_clear()
    with FakeTensorMode() as mode:
        x = torch.ones(3, 5)
        assert len(made) == 1
        assert ((x + 1).shape, x.t().stride(), (x * x).dtype) == ((3, 5), (1, 5), torch.float32)
        assert len(made) == 1
        assert ((x + 1).shape, x.t().stride(), (x * x).dtype) == ((3, 5), (1, 5), torch.float32)
        assert len(made) == 4  # from the cache
        for _ in range(2):  # a note would make a tensor with memory
            assert (torch._efficientzerotensor(3) * torch.ones(3))._is_zerotensor()
        assert FakeTensorMode.cache_bypasses["dispatch_key_set mismatch"] > 0
    assert "_output_from_cache_entry" not in vars(mode)


def test_source_line_is_model_line_or_torch_line() -> None:
    def sources(model: nn.Module, **kwargs: Any) -> list[str]:
        model_copy = ModelCopy(model)
        graph = Annotator(capture(model_copy, model_copy.bind((), kwargs)), model_copy.weights).graph()
        return [operation.source.partition(":")[0] for operation in graph.operations.values()]

    assert {source.rpartition("/")[2] for source in sources(Switching(), x=torch.ones(2, 4))} == {
        "test_export_work.py"
    }
    assert sources(nn.Sequential(nn.Linear(4, 4)), input=torch.ones(2, 4)) == ["torch/nn/modules/linear.py"]


def test_export_leaves_no_hook() -> None:
    """torch 2.11 leaves a hook that every module calls for each assigned buffer."""
    hooks = module._global_buffer_registration_hooks
    before, layer = dict(hooks), nn.Linear(2, 2)
    branches = Branches(layer, lambda _: None)
    with trace_patches.exporting(keep_grad=False, state=AssignedState(layer, branches)):
        export_trace.register_buffer_assignment_hook(nn.Linear(2, 2), {})
    assert dict(hooks) == before


def test_distributions_are_traced_without_their_checks() -> None:
    # a trace cannot branch on values: policies and variational models ran module by module
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.prior = nn.Linear(8, 4), Normal(0.0, 1.0)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.body(x)
            chosen, latent = Categorical(logits=y), Normal(y, y.exp(), validate_args=True)
            best = y.argmax(-1)
            return chosen.log_prob(best), chosen.entropy(), self.prior.log_prob(y), latent.rsample()

    model, x = Policy().eval(), torch.randn(3, 8)
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (x,), strict=True)
        for given in (x, torch.randn(5, 8)):
            torch.manual_seed(0)
            found = placed(given)
            torch.manual_seed(0)
            assert all(map(torch.allclose, found, model(given)))
    with pytest.raises(ValueError, match="Expected parameter logits"):
        Categorical(logits=torch.full((2,), torch.nan), validate_args=True)  # elsewhere they check
