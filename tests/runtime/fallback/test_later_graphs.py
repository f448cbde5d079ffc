"""A model whose example cannot be traced: calls of other structures may be, with the same weights."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from torch import nn

import graphplan
from graphplan.compiler import pipeline
from graphplan.errors import VerificationError

X, IMAGE = torch.randn(4, 32), torch.rand(4, 32)
pytestmark = pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")


class Seeing(nn.Module):
    """Calls with an image have no graph, and leave an offset for those without."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.vision = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.text = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.offset = torch.zeros(32)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None, name: str = "") -> torch.Tensor:
        if image is not None:
            for layer in self.vision:
                image = layer(image)
                if float(image.sum()) > 1e9:
                    break
            self.offset = image.detach().mean(0).cpu()
            x = x + image
        for layer in self.text:
            x = torch.relu(layer(x))
        return x + self.offset.to(x.device)

    def describe(self, image: torch.Tensor) -> torch.Tensor:
        return self.vision[0](image) if float(image.sum()) < 1e9 else image


@pytest.fixture
def machine() -> Iterator[Any]:
    torch.manual_seed(0)
    nbytes = bytes_of(Seeing())
    with graphplan.simulate({0: nbytes // 2, 1: nbytes // 3, "cpu": "1MiB"}) as machine, torch.no_grad():
        yield machine


def test_later_structures_are_traced(machine: Any) -> None:
    eager = Seeing().eval()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, IMAGE))
    assert placed.plan.method == "hooks"
    homes = {name: tensor.device for name, tensor in placed.named_parameters()}
    for scale in (1, 2, 3):
        assert largest_difference(placed(X, scale * IMAGE), eager(X, scale * IMAGE)) < 1e-5
        assert largest_difference(placed(X), eager(X)) < 1e-5
    assert [plan.method for plan in placed.plans] == ["export"]
    assert {name: tensor.device for name, tensor in placed.named_parameters()} == homes
    for key in (0, 1):
        assert machine.peak_bytes(key) <= machine.max_memory[key]


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def tried_in_vain(function: Callable[[], Any]) -> int:
    """The number of failed traces."""
    handler = Listener()
    logger = logging.getLogger("graphplan")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        function()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return sum("such inputs run module by module too" in text for text in handler.heard)


def test_untraceable_structure_is_traced_once(machine: Any) -> None:
    eager = Seeing().eval()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, IMAGE))

    def twice() -> None:
        for _ in range(2):
            assert largest_difference(placed.describe(IMAGE), eager.describe(IMAGE)) < 1e-5

    assert tried_in_vain(twice) == 1
    assert largest_difference(placed(X), eager(X)) < 1e-5
    assert placed.plans[0].method == "export"


def test_number_of_trace_attempts_is_limited(machine: Any) -> None:
    """A text argument that differs in each call is a new structure each time."""
    eager = Seeing().eval()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, IMAGE))

    def often() -> None:
        for number in range(8):
            result = placed(X, IMAGE, name=str(number))
            assert largest_difference(result, eager(X, IMAGE)) < 1e-5

    assert tried_in_vain(often) == 4


def test_no_later_trace_after_results_differed(machine: Any) -> None:
    class Differing(Seeing):
        def forward(self, x: torch.Tensor, image: Any = None, name: str = "") -> torch.Tensor:
            return x + 1 if torch.compiler.is_exporting() else self.text[0](x)

    eager = Differing().eval()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, IMAGE), check=True)
    assert largest_difference(placed(X), eager(X)) < 1e-5
    assert [plan.method for plan in placed.plans] == ["hooks"]


@torch.no_grad()
def test_copies_and_pickles_run_and_trace() -> None:
    eager = Seeing().eval()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, IMAGE))
        before = copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))
        assert largest_difference(placed(X), eager(X)) < 1e-5
        for one in (*before, copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))):
            twin = copy.deepcopy(eager)
            assert largest_difference(one(X, IMAGE), twin(X, IMAGE)) < 1e-5
            assert largest_difference(one(X), twin(X)) < 1e-5
            assert largest_difference(one(X, IMAGE), twin(X, IMAGE)) < 1e-5
            assert one.plans[-1].method == "export"


@torch.no_grad()
def test_prefetch_buffers_leave_room_for_hooked_calls() -> None:
    """Prefetch buffers leave the memory that calls without a graph need."""
    eager = Seeing(layers=8).eval()
    big = torch.randn(64, 32), torch.rand(64, 32)
    with graphplan.simulate({0: bytes_of(eager) // 3, "cpu": "1MiB"}) as small:
        placed = graphplan.partition(copy.deepcopy(eager), small.max_memory, big)
        assert largest_difference(placed(X), eager(X)) < 1e-5
        assert largest_difference(placed(*big), eager(*big)) < 1e-4
        assert largest_difference(placed(X), eager(X)) < 1e-5
        assert small.peak_bytes(0) <= small.max_memory[0]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:hooks were added:graphplan.GraphplanWarning")
@pytest.mark.filterwarnings("ignore:.*traced again:graphplan.GraphplanWarning")
def test_hooked_calls_equal_eager_within_budget_after_retrace() -> None:
    eager = Seeing(layers=6).eval()
    x, image = torch.randn(2, 32), torch.rand(2, 32)
    with graphplan.simulate({0: bytes_of(eager) // 3, "cpu": "1MiB"}) as small:
        placed = graphplan.partition(copy.deepcopy(eager), small.max_memory, (x, image))
        added = [
            one.text[0].register_forward_hook(lambda _m, _a, result: 2 * result) for one in (placed, eager)
        ]
        for hooks in (added, []):
            for call in ((x,), (x, image), (x,), (x, image)):
                assert largest_difference(placed(*call), eager(*call)) < 1e-4
            for hook in hooks:
                hook.remove()
        assert small.peak_bytes(0) <= small.max_memory[0]


def test_plan_below_its_bound_raises(machine: Any, monkeypatch: Any) -> None:
    def breaks(*_: Any) -> None:
        raise VerificationError("a peak exceeds its budget")

    placed = graphplan.partition(Seeing().eval(), machine.max_memory, (X, IMAGE))
    monkeypatch.setattr(pipeline, "check_schedule", breaks)
    with pytest.raises(VerificationError):
        placed(X)
