"""Code that changes gradients outside a graph: custom backward passes, hooks, checkpoints."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import in_turn
from shortcuts import short_search
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_steps import ROOMY, gap, gradients_of

import graphplan

WAYS = ({"train": True}, {"grad": True})
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # at its end, gradients are off as before
            return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


stored = Round.apply


@torch.library.custom_op("graphplan_tests::double", mutates_args=())
def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


_double.register_fake(torch.empty_like)
_double.register_autograd(lambda ctx, gradient: 5 * gradient)


def double(x: torch.Tensor) -> torch.Tensor:
    """An operation of which torch knows the backward pass."""
    return _double(x)


class Net(nn.Module):
    """Two layers, and something between or around them."""

    def __init__(self, between: Callable[..., Any] = lambda x: x, *, data: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between, self.data = between, data
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.a(self.between(x)) if self.data else self.between(self.a(x))
        return {"loss": self.b(h).pow(2).mean()}


class Blocks(Net):
    """A stack whose blocks are copied in the graph, each behind a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(Round.apply)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = checkpoint(self.between, x, use_reentrant=self.reentrant) + self.a(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return {"loss": self.b(x).pow(2).mean()}


class Behind(Net):
    """Layers behind a reentrant checkpoint, whose gradients are lost where its inputs require none."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.b(checkpoint(self.a, x, use_reentrant=True)).pow(2).mean()}


def tripled(h: torch.Tensor) -> torch.Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: 3 * gradient)
    return h


def placed_like(model: nn.Module, add: Callable[[Any], Any], **options: Any) -> list[str]:
    """Require eager's gradients of a placed model; the warnings of graphplan.

    ``add``: what to do to the model, and to eager's, before it is placed.
    """
    eager = copy.deepcopy(model)
    add(model)
    add(eager)
    with warnings.catch_warnings(record=True) as said, short_search():
        warnings.simplefilter("always")
        placed = graphplan.partition(model, {"cpu": ROOMY}, kwargs={"x": X}, **options)
        for one in (placed, eager):
            one(x=X)["loss"].backward()
    assert gap(gradients_of(placed), gradients_of(eager)) < 1e-6
    return [str(one.message) for one in said if one.category is graphplan.GraphplanWarning]


LOST: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], str]] = {
    "function": (lambda: Net(Reverse.apply), lambda _: None, "Reverse has a backward of its own"),
    "stored": (lambda: Net(stored), lambda _: None, "Round has a backward of its own"),
    "tensor": (lambda: Net(tripled), lambda _: None, "calls register_hook"),
    "module": (
        Net,
        lambda net: net.b.register_full_backward_hook(lambda _, given, out: (3 * given[0],)),
        "'b' has backward hooks",
    ),
    "before module": (
        Net,
        lambda net: net.b.register_full_backward_pre_hook(lambda _, out: (3 * out[0],)),
        "'b' has backward hooks",
    ),
}


@pytest.mark.parametrize(("what", "way"), in_turn(LOST, WAYS))
def test_custom_backward_runs_with_autograd(what: str, way: dict[str, bool]) -> None:
    make, add, why = LOST[what]
    assert any(why in text for text in placed_like(make(), add, **way))
    strict = make()
    add(strict)
    with pytest.raises(graphplan.NoGraphError, match=why):
        graphplan.partition(strict, {"cpu": ROOMY}, kwargs={"x": X}, strict=True, **way)
    graphplan.partition(strict.eval(), {"cpu": ROOMY}, kwargs={"x": X}, strict=True)(x=X)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_hooks_that_parameters_have_already_are_kept(way: dict[str, bool]) -> None:
    def add(net: Net) -> None:
        net.a.weight.register_hook(lambda gradient: 3 * gradient)
        net.b.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 2 * p.grad))

    assert not placed_like(Net(), add, strict=True, **way)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_gradients_equal_those_of_its_function(way: dict[str, bool], reentrant: bool) -> None:
    assert not placed_like(Blocks(reentrant=reentrant), lambda _: None, strict=True, **way)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in eager, too
@pytest.mark.parametrize(
    "make", [Net(Reverse.apply, data=True), Blocks(reentrant=True)], ids=["own", "reentrant"]
)
def test_inputs_may_require_gradients_that_the_example_did_not(make: nn.Module) -> None:
    require_gradients_of_each_call(make, X, grad=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in eager, too
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_checkpointed_layers_have_gradients_of_each_call(way: dict[str, bool], required: bool) -> None:
    require_gradients_of_each_call(Behind(), X.clone().requires_grad_(required), strict=True, **way)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # in eager, too
def test_steps_follow_parameters_that_are_frozen_later() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Behind())
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": ROOMY}, (X,), train=True)
    for trained in (False, True):
        for one in (placed, eager):
            one[0].requires_grad_(trained)
            one.zero_grad()
            one(X)["loss"].backward()
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-6
    reversing = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), Net(Reverse.apply, data=True))
    placed = graphplan.partition(reversing, {"cpu": ROOMY}, (X,), train=True)
    placed[0].requires_grad_()
    with pytest.raises(graphplan.NoGraphError, match="Reverse has a backward of its own"):
        placed(X)


def require_gradients_of_each_call(model: nn.Module, example: torch.Tensor, **options: Any) -> None:
    eager = copy.deepcopy(model)
    with short_search():
        placed = graphplan.partition(model, {"cpu": ROOMY}, kwargs={"x": example}, **options)
        for required in (False, True, False):
            given = [X.clone().requires_grad_(required) for _ in range(2)]
            for one, x in zip((placed, eager), given, strict=True):
                one.zero_grad()
                one(x=x)["loss"].backward()
            assert gap({"x": given[0].grad}, {"x": given[1].grad}) < 1e-6
            assert gap(gradients_of(placed), gradients_of(eager)) < 1e-6


def test_calls_without_such_gradients_have_graphs_of_their_own() -> None:
    placed: Any = graphplan.partition(
        Net(Reverse.apply, data=True), {"cpu": ROOMY}, kwargs={"x": X}, grad=True
    )
    with pytest.warns(graphplan.GraphplanWarning, match="Reverse has a backward of its own"):
        placed(x=X.clone().requires_grad_())
    placed(x=torch.cat([X, X]))
    assert len(placed._graphplan.programs) == 2


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_examples_of_the_meta_device_may_require_gradients(way: dict[str, bool]) -> None:
    model, example = Net(Reverse.apply, data=True), X.to("meta").requires_grad_()
    with pytest.raises(graphplan.NoGraphError, match="Reverse has a backward of its own"):
        graphplan.partition(model, {"cpu": ROOMY}, kwargs={"x": example}, strict=True, **way)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("net", [Net(double), Net(Reverse.apply, data=True)], ids=["operation", "data"])
def test_custom_backward_without_gradients_is_traced(net: Net, way: dict[str, bool]) -> None:
    assert not placed_like(net, lambda _: None, strict=True, **way)


class Forces(nn.Module):
    """Energies of positions, their gradients, and that of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.mixed = nn.TransformerEncoderLayer(16, 2, 16, 0.1, batch_first=True)

    def forward(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            positions = positions.clone().requires_grad_()
            x = torch.tanh(self.first(positions)) * torch.tensor(0.5)
            x = self.mixed(self.norm(x.mT).mT)
            energies = self.last(x).sum((1, 2))
            (slopes,) = torch.autograd.grad(energies, positions, torch.ones_like(energies), create_graph=True)
            of_weight = torch.autograd.grad(energies.sum(), self.first.weight)[0]
        return {"energies": energies.detach(), "forces": -slopes.detach(), "of_weight": of_weight}


@pytest.mark.slow
@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
def test_gradients_that_forward_computes_are_in_the_graph(training: bool) -> None:
    model, positions = Forces().train(training), torch.randn(4, 6, 3)
    own = copy.deepcopy(model)
    with graphplan.simulate({0: "48KiB", 1: "48KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (positions,), strict=True)
        for batch in (4, 3):
            given = torch.randn(batch, 6, 3)
            torch.manual_seed(batch)
            wanted = own(given)
            torch.manual_seed(batch)
            found = placed(given)
            assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)
        for key in (0, 1):
            assert machine.peak_bytes(key) <= placed.plan.peak_bytes[key]
        for name, value in own.named_buffers():
            assert torch.allclose(placed.get_buffer(name).cpu(), value)


class Guarded(nn.Module):
    """Slopes, of which the model does without after an error; of the first calls, or not."""

    def __init__(self, *, later: bool = False) -> None:
        super().__init__()
        self.layer, self.ready = nn.Linear(8, 1), not later

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.ready = True
            return x
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            try:
                return torch.autograd.grad(self.layer(x).pow(2).sum(), x)[0]
            except Exception:
                return torch.zeros_like(x)


def test_handled_error_does_not_lose_gradients() -> None:
    model = Guarded()
    placed = graphplan.partition(model, {"cpu": ROOMY}, (X,), strict=True)
    assert torch.allclose(placed(2 * X), model(2 * X), atol=1e-6)


def test_gradients_computed_only_by_next_call_raise() -> None:
    with pytest.raises(graphplan.NoGraphError, match="the next computes something else"):
        graphplan.partition(Guarded(later=True), {"cpu": ROOMY}, (X,), strict=True)


class Recurrent(nn.Module):
    """Slopes of a sequence, through a recurrent layer and around it."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            y = x + self.layer(x)[0]
            return y.detach(), torch.autograd.grad(y.pow(2).sum(), x)[0]


@pytest.mark.parametrize(
    "kind", [nn.RNN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (nn.LSTM, nn.GRU))]
)
def test_gradients_pass_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    model = Recurrent(kind)
    placed = graphplan.partition(model, {"cpu": ROOMY}, (torch.randn(2, 5, 8),), strict=True)
    for batch, length in ((2, 5), (3, 4)):
        x = torch.randn(batch, length, 8)
        for found, wanted in zip(placed(x), model(x), strict=True):
            assert torch.allclose(found, wanted, atol=1e-5)
