"""Regressions found by users: models and calls that once failed."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import MethodType
from typing import Any, cast

import numpy as np
import pytest
import torch
from builders import bytes_of, largest_difference, run_placed
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from versions import needs

import graphplan
from graphplan.compiler import capture_cache

X = torch.randn(4, 64)


def linear() -> nn.Linear:
    return nn.Linear(64, 64)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def check(model: nn.Module, *args: Any, budgets: dict[Any, float] | None = None, **kwargs: Any) -> Any:
    """Place over two devices, call, compare with eager; the placed module is returned."""
    # outside the simulation: torch compiles eager control flow, which cannot see simulated devices
    with torch.no_grad():
        expected = copy.deepcopy(model)(*args, **kwargs)
    size = bytes_of(model)
    shares = budgets or {0: 0.7, 1: 0.7, "cpu": 4.0}
    with graphplan.simulate({0: "16MiB", 1: "16MiB", "cpu": "1GiB"}) as machine:
        limits = {key: int(share * size) + 16384 for key, share in shares.items()}
        placed = graphplan.partition(model, limits, args, kwargs)
        assert largest_difference(run_placed(machine, placed, args, kwargs), expected) < 1e-5
        return placed


# -- arguments ------------------------------------------------------------------------------------------


class Variadic(Two):
    def forward(self, *xs: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(sum(xs))
        return y if scale is None else y * scale


class Named(Two):
    def forward(self, **parts: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.cat(list(parts.values()))[:4])


def test_keyword_only_arguments_after_varargs() -> None:
    check(Variadic(), X, X, scale=torch.full((1,), 3.0))
    check(Variadic(), X, X, X)


@needs("torch", "2.12", "a slice of an open size counts as one that the data decides")
def test_keyword_arguments_keep_their_order() -> None:
    check(Named(), z=X, b=X + 1)


def test_tensor_passed_twice_and_written() -> None:
    class Writes(Two):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x.add_(1)
            return super().forward(x) + y

    placed = graphplan.partition(Writes(), {"cpu": "1GiB"}, (X.clone(), X.clone()))
    shared = X.clone()
    with pytest.raises(graphplan.InputError, match="x and y share memory"):
        placed(shared, shared)


def test_strided_inputs_are_another_structure() -> None:
    class Flat(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.contiguous()
            y.add_(1)
            return self.a(y.view(-1)[:64]) + self.b(y[0])

    square = torch.randn(64, 64)
    model = Flat()
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (square.clone(),))
    strided = square.t()
    before = strided.clone()
    assert largest_difference(placed(strided), model(before.t().clone().t())) < 1e-5
    assert torch.equal(strided, before)  # eager works on a copy here, and so does this


@pytest.mark.parametrize(
    "view",
    [lambda x: x[:1].expand(8, -1), lambda x: x[:, ::2], lambda x: x.t(), lambda x: x[:, :0]],
    ids=["expanded", "slice", "transposed", "empty"],
)
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_strided_inputs_are_traced_once(
    view: Callable[[torch.Tensor], torch.Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seen on BLIP-2, which expands its queries: traced twice at each call
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1) * self.w[: x.shape[0]]

    traced: list[object] = []
    own = capture_cache.capture
    monkeypatch.setattr(capture_cache, "capture", lambda *a, **k: traced.append(a) or own(*a, **k))
    model = Sums()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        x = torch.randn(8, 8)
        placed = graphplan.partition(model, machine.max_memory, (x,))
        traced.clear()
        for _ in range(3):
            assert largest_difference(placed(view(x.to(device))).cpu(), model(view(x))) < 1e-5
    assert len(traced) <= 1


def test_inputs_on_an_accelerator_are_planned_from_there() -> None:
    model = Two()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        placed = graphplan.partition(model, {0: 22_000, 1: 22_000}, (X,))
        ours = X.to("sim:0")
        placed(ours)
        gc.collect()
        machine.reset_peaks()
        result = placed(ours)
        assert result.device == ours.device
        assert machine.peak_bytes(0) <= placed.plans[1].peak_bytes[0]
        assert placed.plans[1].schedule.host == 0


def test_many_structures_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    """The warning has the reason of the last trace; the log has every reason."""

    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, by: str) -> torch.Tensor:
            return x * float(by)

    placed = graphplan.partition(Scaled(), {"cpu": "1GiB"}, (torch.ones(2), "0.5"))
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "graphplan"):
        warnings.simplefilter("always")
        for i in range(10):
            placed(torch.ones(2), str(i))
    (many,) = [str(w.message) for w in caught if "graphs have been traced" in str(w.message)]
    assert "by is '6', not '5'" in many
    assert "planning another call of Scaled: by is '9', not '8'" in caplog.messages


def test_many_plans_of_one_graph_warn_of_limits() -> None:
    placed = graphplan.partition(nn.Linear(8, 8), {"cpu": "1GiB"}, (torch.ones(2, 8),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for exponent in range(1, 11):
            placed(torch.ones(2**exponent + 1, 8))
    (message,) = [str(one.message) for one in caught]
    assert "planned 8 times more for larger inputs" in message
    assert "input has size 257 along dimension 0" in message
    assert "max_batch and max_length" in message


# -- forward, hooks, modes ------------------------------------------------------------------------------


def doubled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that reads its arguments by position."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return method(args[0], 2 * args[1], *args[2:], **kwargs)

    return run


@pytest.mark.parametrize("branches", [False, True])
def test_wrapper_gets_positional_arguments(branches: bool) -> None:
    class Wrapped(Two):
        @doubled
        def forward(self, x: torch.Tensor, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
            y = self.scaled(x, scale) + shift
            return -y if branches and x.sum() > 0 else y

        @doubled
        def scaled(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return super().forward(x) * scale

    model = Wrapped()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Wrapped could not be traced")
        placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
        for args, kwargs in ((X,), {}), ((X[:2], 3.0), {}), ((X, 1.0), {"shift": 2.0}):
            torch.testing.assert_close(placed(*args, **kwargs), model(*args, **kwargs))
        torch.testing.assert_close(placed.scaled(X, 3.0), model.scaled(X, 3.0))
    with pytest.raises(IndexError):  # as in eager
        placed(x=X)


def test_patched_forward_is_traced() -> None:
    model = Two()
    original = model.forward
    model.forward = lambda x: original(x) * 2  # type: ignore[method-assign]  # what is tested
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        placed = graphplan.partition(model, {0: 22_000, 1: 22_000}, (X,))
        assert largest_difference(run_placed(machine, placed, (X,)), model(X)) < 1e-5


class Scaling(nn.Module):
    """A layer, and an attribute of which each graph has the value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.by = nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.layer(x) * self.by)


VECTOR = torch.randn(3, 4)


def scaling(**options: Any) -> tuple[Any, Any]:
    """A placed model, and the same by itself."""
    torch.manual_seed(0)
    model = Scaling().eval()
    return graphplan.partition(copy.deepcopy(model), {"cpu": "1GiB"}, (VECTOR,), **options), model


def double(self: Any, x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, self.layer(x) * self.by * 2)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.parametrize("example", [True, False])
def test_patched_forward_survives_a_retrace(example: bool) -> None:
    model = Scaling().eval()
    model.forward = MethodType(double, model)  # type: ignore[method-assign]  # what is tested
    placed: Any = graphplan.partition(model, {"cpu": "1GiB"}, (VECTOR,) if example else ())
    assert largest_difference(placed(VECTOR), model(VECTOR)) < 1e-6
    placed.by = model.by = 3.0
    assert largest_difference(placed(VECTOR), model(VECTOR)) < 1e-6
    assert largest_difference(graphplan.unplace(placed)(VECTOR), model(VECTOR)) < 1e-6


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_forward_patched_after_placement_calls_the_graphs() -> None:
    placed, model = scaling()
    own = placed.forward
    placed.forward = lambda x: own(x) + 1
    assert largest_difference(placed(VECTOR), model(VECTOR) + 1) < 1e-6
    placed.by = model.by = 3.0
    assert largest_difference(placed(VECTOR), model(VECTOR) + 1) < 1e-6
    placed.forward = MethodType(double, placed)
    for one in (placed, graphplan.unplace(placed), copy.deepcopy(placed)):
        assert largest_difference(one(VECTOR), 2 * model(VECTOR)) < 1e-6
    del placed.forward
    assert largest_difference(placed(VECTOR), model(VECTOR)) < 1e-6
    assert placed.layer.weight.device.type == "cpu"


class Deciding(Scaling):
    """Has no graph: the data decides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return -found if x.sum() > 0 else found


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.parametrize("bound", [False, True])
def test_patched_forward_is_kept_module_by_module(bound: bool) -> None:
    model = Deciding().eval()
    own = model.forward
    model.forward = (  # type: ignore[method-assign]  # what is tested
        MethodType(lambda self, x: Deciding.forward(self, x) + 1, model) if bound else lambda x: own(x) + 1
    )
    placed: Any = graphplan.partition(model, {"cpu": "1GiB"}, (VECTOR,))
    inputs = (VECTOR.abs(), -VECTOR.abs())
    for one in (placed, graphplan.unplace(placed), copy.deepcopy(placed)):
        assert all(largest_difference(one(x), model(x)) < 1e-6 for x in inputs)
    given = placed.forward
    placed.forward = lambda x: given(x) * 2
    for one in (placed, copy.deepcopy(placed)):
        assert all(largest_difference(one(x), model(x) * 2) < 1e-6 for x in inputs)


def test_a_hook_of_accelerate_on_a_placed_model() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class More(hooks.ModelHook):  # type: ignore[misc]  # no types
        def post_forward(self, module: Any, output: Any) -> Any:
            return output + 5

    placed, model = scaling()
    hooks.add_hook_to_module(placed, More())
    for _ in range(2):
        assert largest_difference(placed(VECTOR), model(VECTOR) + 5) < 1e-6


def test_methods_without_their_own_name() -> None:
    torch.manual_seed(0)
    model: Any = Scaling().eval()
    model.kept = MethodType(functools.partial(lambda by, self, x: self.layer(x) * by, 2.0), model)
    placed: Any = graphplan.partition(model, {"cpu": "1GiB"}, (VECTOR,))
    assert largest_difference(placed(VECTOR), model(VECTOR)) < 1e-6
    placed.other = placed.forward
    plain: Any = graphplan.unplace(placed)
    assert largest_difference(plain.kept(VECTOR), model.kept(VECTOR)) < 1e-6
    assert largest_difference(plain.other(VECTOR), model(VECTOR)) < 1e-6


def test_hooks_of_the_whole_model_run_once() -> None:
    model = Two()
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    check(model, X)
    model = Two()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    check(model, X)


def test_submodule_hooks_are_traced() -> None:
    model = Two()
    model.a.register_forward_hook(lambda module, inputs, output: output * 2)
    check(model, X)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = linear(), nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x))


@torch.no_grad()
def test_each_module_has_its_own_mode() -> None:
    model = Normed().train()
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    model.norm.eval()
    placed.norm.eval()
    assert largest_difference(placed(X), model(X)) < 1e-5
    frozen = Normed().train()
    frozen.norm.eval()
    placed = graphplan.partition(frozen, {"cpu": "1GiB"}, (X,))
    assert largest_difference(placed(X), frozen(X)) < 1e-5
    placed.eval()
    placed.train()
    assert largest_difference(placed(X), copy.deepcopy(frozen).train()(X)) < 1e-5


@torch.no_grad()
def test_later_training_does_not_write_the_callers_buffers() -> None:
    model = Normed().eval()
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    placed.train()
    placed(X)
    assert float(model.norm.running_mean.abs().sum()) == 0
    assert float(placed.norm.running_mean.abs().sum()) > 0


# -- results and constants ------------------------------------------------------------------------------


def test_returned_constant_can_be_changed_by_the_caller() -> None:
    class Constant(Two):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), torch.tensor([1.0, 2.0]).view(2, 1)

    placed = graphplan.partition(Constant(), {"cpu": "1GiB"}, (X,))
    placed(X)[1].add_(1)
    assert placed(X)[1].tolist() == [[1.0], [2.0]]


def test_results_of_the_first_call_are_plain_containers() -> None:
    class Dicts(Two):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.a(x)
            return {"y": y, "parts": [self.b(y), (y, None)]}

    with pytest.warns(graphplan.GraphplanWarning, match="first call"):
        placed = graphplan.partition(Dicts(), {"cpu": "1GiB"})
    result = placed(X)
    assert type(result) is dict
    assert type(result["parts"]) is list
    assert type(result["parts"][1]) is tuple


def test_written_tensor_attribute_is_separate_in_each_copy() -> None:
    class Scratch(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scratch = torch.zeros(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scratch.add_(1)
            return super().forward(x) + self.scratch

    with pytest.warns(graphplan.GraphplanWarning, match=r"Scratch.scratch is written to in place"):
        placed = graphplan.partition(Scratch(), {"cpu": "1GiB"}, (X,))
    model_copy = copy.deepcopy(placed)
    placed(X)
    second = placed(X)
    assert largest_difference(model_copy(X) + 1, second) < 1e-5


# -- sizes that only the data decides -------------------------------------------------------------------


def test_data_dependent_sizes_count_at_their_bound() -> None:
    class Masked(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            chosen = y[x > -100].repeat(20).sin()
            return self.b(y) + chosen.sum()

    model = Masked()
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,))
        machine.reset_peaks()
        assert largest_difference(placed(X), model(X)) < 1e-3
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


def test_while_loops_are_measured() -> None:
    class Loop(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def condition(i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return i < 3

            def body(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                return i + 1, y * 2 + 1

            start = torch.zeros((), dtype=torch.long, device=x.device)
            return self.b(torch.while_loop(condition, body, (start, self.a(x)))[1])

    model = Loop()
    with torch.no_grad():
        expected = model(X)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,))
        machine.reset_peaks()
        assert largest_difference(placed(X), expected) < 1e-5
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


def scanned(model: Two, x: torch.Tensor) -> Any:
    def step(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(model.b(carried + row)), carried * 2

    return scan(step, x[0] * 0, x)


def mapped(model: Two, x: torch.Tensor) -> Any:
    return map_rows(lambda row: model.b(row).tanh() + 1, x)


@pytest.mark.parametrize(
    ("rows", "rounds"),
    [
        (2, scanned),
        (40, mapped),
        pytest.param(2, mapped, marks=pytest.mark.slow),
        pytest.param(40, scanned, marks=pytest.mark.slow),
    ],
)
def test_loops_over_rows_are_measured(rounds: Callable[..., Any], rows: int) -> None:
    class Rounds(Two):
        def forward(self, x: torch.Tensor) -> Any:
            return rounds(self, self.a(x))

    model, x = Rounds(), torch.randn(rows, *X.shape[1:])
    with torch.no_grad():
        expected = model(x)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        machine.reset_peaks()
        assert largest_difference(placed(x), expected) < 1e-5
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


def test_branches_with_weights() -> None:
    class Branch(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return torch.cond(y.sum() > 0, lambda t: self.b(t), lambda t: t * 2, (y,))

    check(Branch(), X)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: type[nn.Module]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = kind(32, 32, batch_first=True), kind(32, 32, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)[0])[0]

    check(Recurrent(), torch.randn(2, 5, 32))


# -- objects ----------------------------------------------------------------------------------------------


def test_unpickled_model_is_placed(tmp_path: Path) -> None:
    model = Two()
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    again = pickle.loads(pickle.dumps(placed))
    assert again.plan == placed.plan
    assert list(again.state_dict()) == list(placed.state_dict())
    assert largest_difference(again(X), model(X)) < 1e-6
    torch.save(placed, tmp_path / "placed.pt")
    loaded = torch.load(tmp_path / "placed.pt", weights_only=False)
    assert largest_difference(loaded(X), model(X)) < 1e-6


class Waits(Two):
    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_changes_before_the_first_call_are_kept() -> None:
    model, other = Waits(), Waits()
    with pytest.warns(UserWarning, match="first call"):
        placed = graphplan.partition(model, {"cpu": "1GiB"})
    placed.eval()
    placed.note = "kept"
    placed.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert largest_difference(placed(X), other.eval()(X)) < 1e-6
    assert not placed.training
    assert placed.note == "kept"


def test_custom_load_method_is_used() -> None:
    class Loads(Two):
        def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
            return super().load_state_dict({name: 2 * value for name, value in state_dict.items()})

    model = Loads()
    state = copy.deepcopy(model.state_dict())
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    placed.load_state_dict(state)
    assert torch.equal(placed.a.weight, 2 * state["a.weight"])


def test_a_model_without_inputs() -> None:
    class Alone(Two):
        def forward(self) -> torch.Tensor:  # type: ignore[override]
            return self.a.weight @ self.b.weight

    with graphplan.simulate({0: 52_000}) as machine:
        placed = graphplan.partition(Alone(), machine.max_memory)
        assert placed.plan.activations_known
        machine.reset_peaks()
        assert placed().device.type == "cpu"
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


def test_torch_compile_wrapper_is_removed() -> None:
    assert isinstance(graphplan.partition(torch.compile(Two()), {"cpu": "1GiB"}, (X,)), Two)


def test_export_of_a_placed_model_raises() -> None:
    placed = graphplan.partition(Two(), {"cpu": "1GiB"}, (X,))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", graphplan.GraphplanWarning)
        expected = placed(X)
        with pytest.raises(graphplan.PlanError, match=r"graphplan\.unplace"):
            torch.export.export(placed, (X,))
        assert torch.equal(placed(X), expected)  # not traced again
        assert (
            largest_difference(torch.export.export(graphplan.unplace(placed), (X,)).module()(X), expected)
            < 1e-5
        )


def test_placed_model_runs_during_export_in_another_thread() -> None:
    """torch's export flag is global to the process."""
    placed, runs, goes_on = graphplan.partition(Two(), {"cpu": "1GiB"}, (X,)), Event(), Event()

    class Waiting(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.set()
            assert goes_on.wait(60)
            return super().forward(x)

    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        expected, exported = placed(X), pool.submit(torch.export.export, Waiting(), (X,))
        try:
            assert runs.wait(60)
            assert torch.equal(placed(X), expected)
        finally:
            goes_on.set()
        exported.result()


def test_torch_compile_does_not_change_placed_models() -> None:
    model, other = Two(), torch.randn(2, 3, 64)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    graphs = []

    def backend(graph: Any, _example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: placed(x + 1).sin(), backend=backend)
    for x in (X, other):  # the second has no graph yet
        assert torch.allclose(compiled(x), model(x + 1).sin(), atol=1e-6)
        assert [node.name for graph in graphs for node in graph.graph.nodes if node.name == "linear"] == []
    assert len(placed.plans) == 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="give partition compile=True"):
        torch.compile(placed, backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (Two, {}, "make an instance"),
        (lambda x: x, {}, "not function"),
        (Two(), {"kwargs": X}, "kwargs must map"),
        (Two(), {"links": 3}, "links must map"),
        (Two(), {"grad": "no"}, "grad must be True or False, not 'no'"),
        (Two(), {"check": 1}, "check must be True or False, not 1"),
        (Two(), {"warm": None}, "warm must be True or False, not None"),
        (Two(), {"strict": "x"}, "strict must be True or False, not 'x'"),
        (Two(), {"return_outputs": "none"}, "return_outputs must be True or False, not 'none'"),
    ],
)
def test_invalid_arguments_raise_graphplan_errors(
    model: Any, arguments: dict[str, Any], message: str
) -> None:
    call = {"args": (X,), **arguments}
    with pytest.raises(graphplan.GraphplanError, match=message):
        graphplan.partition(model, {"cpu": "1GiB"}, **call)


def test_placing_a_placed_model_raises() -> None:
    placed = graphplan.partition(Two(), {"cpu": "1GiB"}, (X,))
    with pytest.raises(graphplan.InputError, match=r"^the model is placed already: .* graphplan\.unplace"):
        graphplan.partition(placed, {"cpu": "1GiB"}, (X,))
    with pytest.raises(graphplan.InputError, match="'0' is placed already"):
        graphplan.plan(nn.Sequential(placed), {"cpu": "1GiB"}, (X,))
    assert isinstance(graphplan.partition(graphplan.unplace(placed), {"cpu": "1GiB"}, (X,)), Two)


def test_a_scripted_module_is_named() -> None:
    scripted = torch.jit.script(nn.Linear(16, 16))  # type: ignore[no-untyped-call]  # of torch
    for model, named in ((scripted, "the model"), (nn.Sequential(nn.Linear(16, 16), scripted), "'1'")):
        with pytest.raises(graphplan.InputError, match=f"^{named} is a ScriptModule"):
            graphplan.plan(model, {"cpu": "1MiB"}, (X,))


def test_model_with_accelerate_hooks_raises_with_remedy() -> None:
    from accelerate import cpu_offload

    with pytest.raises(graphplan.InputError, match="remove_hook_from_submodules"):
        graphplan.partition(cpu_offload(Two(), torch.device("cpu")), {"cpu": "1GiB"}, (X,))


def test_moved_weights_raise() -> None:
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}):
        placed = graphplan.partition(Two(), {0: 22_000, 1: 22_000}, (X,))
        placed.a.to("sim:1")
        with pytest.raises(
            graphplan.PlanError, match=r"'a.weight' is on sim:1, but the plan has it on sim:0"
        ):
            placed(X)


def test_budgets_may_be_any_number_type() -> None:
    for budget in (np.int64(10**9), 1e9, "1000000000", np.float32(1e9)):
        graphplan.plan(Two(), {"cpu": budget}, (X,))
    plan = graphplan.plan(Two(), {np.int64(3): 10**9}, (X,))
    assert list(plan.devices) == [3]
    assert type(next(iter(plan.devices))) is int


# -- a second round --------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize("budget", [30_000, 100_000])
@torch.no_grad()
def test_training_after_evaluation_writes_buffers_in_place(budget: int) -> None:
    model, x = Conv().eval(), torch.randn(2, 3, 10, 10)
    with graphplan.simulate({0: budget, "cpu": 1 << 28}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        assert largest_difference(placed(x), model(x)) < 1e-5
        assert largest_difference(placed.train()(x), model.train()(x)) < 1e-5
        ours = {name: buffer.cpu() for name, buffer in placed.named_buffers()}
        assert largest_difference(ours, dict(model.named_buffers())) < 1e-5


def test_buffers_are_caches_over_calls_of_other_lengths() -> None:
    class Cache(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(16, 64))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            self.keys.index_put_((at,), self.a(x))
            return self.b(self.keys).sum(0)

    model = Cache()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}):
        example = (torch.randn(3, 64), torch.arange(3))
        placed = graphplan.partition(model, {0: 32_000, 1: 32_000}, example)
        for start, length in ((0, 3), (3, 1), (4, 1), (5, 4)):
            x, at = torch.randn(length, 64), torch.arange(start, start + length)
            with torch.no_grad():
                assert largest_difference(placed(x, at), model(x, at)) < 1e-4


def test_batch_norm_of_a_transposed_input() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.out = nn.BatchNorm1d(32), nn.Linear(32, 64), nn.Linear(64, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x.transpose(1, 2)).transpose(1, 2)
            return self.out(torch.relu(self.up(y)))

    model, x = Patches().eval(), torch.randn(4, 256, 32)
    with graphplan.simulate({0: 1 << 20, "cpu": 1 << 28}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        assert largest_difference(run_placed(machine, placed, (x,)), model(x)) < 1e-5


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask, self.last = torch.randn(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x @ self.mask) + torch.tensor(x.shape[0])


def test_constants_are_placed_once_for_all_structures() -> None:
    model = Masked()
    with graphplan.simulate({0: 700_000, "cpu": 1 << 30}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (torch.randn(1, 256),))
        for size in range(1, 6):
            x = torch.randn(size, 256)
            placed(x)
            gc.collect()
            machine.reset_peaks()
            assert largest_difference(placed(x), model(x)) < 1e-4
            assert machine.peak_bytes(0) <= placed.plans[-1].peak_bytes[0] <= 700_000


def test_written_attributes_with_equal_values_stay_separate() -> None:
    class Counters(Two):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.zeros(64), torch.zeros(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.one.add_(1)
            return super().forward(x) + self.one + self.two

    model = Counters()
    with pytest.warns(graphplan.GraphplanWarning, match=r"Counters.one is written to in place"):
        placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    for x in (X, X[:2], X):  # the second is another structure, over the same counters
        with torch.no_grad():
            assert largest_difference(placed(x), model(x)) < 1e-5


@pytest.mark.parametrize("mode", [{}, {"grad": True}, {"train": True}])
def test_patched_forward_results_return_to_the_input_device(mode: dict[str, bool]) -> None:
    def loss(self: nn.Sequential, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self[0](x).to(self[2].weight.device)  # as trainers that compute the loss by parts do
        return {"loss": (hidden @ self[2].weight).sum()}

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randn(4, 16)
    expected = loss(model, x)["loss"]
    with graphplan.simulate({0: 1 << 20}) as machine, torch.set_grad_enabled(bool(mode)):
        placed = graphplan.partition(model, {0: machine.max_memory[0]}, (x,), **mode)
        placed.forward = MethodType(loss, placed)
        found = placed(x)["loss"]
        assert found.device == x.device
        torch.testing.assert_close(found, expected, check_device=False)
        if mode:
            found.backward()
            expected.backward()
            for ours, theirs in zip(placed.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(None if ours.grad is None else ours.grad.cpu(), theirs.grad)


def test_pickling_keeps_parameters_of_simulated_devices() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with graphplan.simulate({0: 1 << 28, "cpu": 1 << 28}):
        placed = graphplan.partition(model, {0: 1 << 20, "cpu": 1 << 28}, (torch.randn(2, 4),))
        again = pickle.loads(pickle.dumps(placed))
        assert isinstance(again[0].weight, nn.Parameter)
        x = torch.randn(2, 4)
        assert largest_difference(again(x), model(x)) < 1e-6
        assert again.plan.placement == placed.plan.placement


@pytest.mark.parametrize("train", [False, True])
def test_conjugate_copies_are_planned(train: bool) -> None:
    class Conjugate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = torch.complex(x @ self.weight, x)
            return (z.conj() * torch.fft.fft(z * 1j)).real + z.conj().imag

    model, x = Conjugate(), torch.randn(256, 64)
    with graphplan.simulate({0: "4MiB"}) as machine:
        placed = graphplan.partition(model, {0: machine.max_memory[0]}, (x,), train=train)
        machine.reset_peaks()
        result, expected = placed(x), model(x)
        torch.testing.assert_close(result, expected)
        if train:
            expected.sum().backward()
            result.sum().backward()
            torch.testing.assert_close(placed.weight.grad.cpu(), model.weight.grad)
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


def test_unbounded_sizes_warn() -> None:
    class Repeats(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = super().forward(x)
            return made.repeat_interleave(made[:, 0].abs().long() + 1, 0).sum(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placed = graphplan.partition(Repeats(), {"cpu": "1GiB"}, (X,))
    assert any("no upper bound" in str(w.message) for w in caught)
    placed(X)


def test_data_dependent_non_sizes_do_not_warn() -> None:
    class Chosen(Two):
        def forward(self, x: torch.Tensor) -> list[int]:  # type: ignore[override]
            return super().forward(x).argmax(-1).tolist()

    model = Chosen()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    assert placed(X) == model(X)


def test_later_infeasible_call_raises_with_remedy() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    with graphplan.simulate({0: 40_000}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (torch.randn(2, 64),))
        with pytest.raises(graphplan.InfeasibleError, match="in calls=") as caught:
            placed(torch.randn(64, 64))
        assert caught.value.needed[0] > 40_000
        placed(torch.randn(2, 64))


def test_unknown_argument_error_suggests_a_similar_one() -> None:
    model, x = nn.Linear(4, 4), torch.ones(1, 4)
    plan: Any = graphplan.plan
    partition: Any = graphplan.partition
    with pytest.raises(TypeError, match=r"plan\(\) got .* 'togehter'; did you mean 'together'\?"):
        plan(model, {"cpu": "1GiB"}, (x,), togehter=["a"])
    with pytest.raises(TypeError, match=r"partition\(\) got .* 'chekpoint'; did you mean 'checkpoint'\?"):
        partition(model, {"cpu": "1GiB"}, (x,), chekpoint="file")
    with pytest.raises(TypeError, match=r"plan\(\) got .* 'check'; it is an argument of partition"):
        plan(model, {"cpu": "1GiB"}, (x,), check=True)
    largest_batch: Any = graphplan.largest_batch
    with pytest.raises(TypeError, match=r"largest_batch\(\) got .* 'ofload'; did you mean 'offload'\?"):
        largest_batch(model, {"cpu": "1GiB"}, (x,), ofload=False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("device_map", "budgets as max_memory=, and a map of your own as pin="),
        ("torch_dtype", "load takes dtype="),
        ("input", r"an input of the model goes into kwargs=\{'input': \.\.\.\}"),
        ("pinn", r"did you mean 'pin'\?"),
    ],
)
def test_arguments_of_other_libraries_and_inputs_of_the_model(name: str, said: str, tmp_path: Path) -> None:
    model, functions = nn.Linear(4, 4), {"plan": graphplan.plan, "partition": graphplan.partition}
    called: dict[str, Any] = {**functions, "load": graphplan.load}
    for function, place in called.items():
        where = tmp_path if function == "load" else model
        with pytest.raises(TypeError, match=rf"{function}\(\) got .* '{name}'; .*{said}"):
            place(where, {"cpu": "1GiB"}, **{name: torch.ones(1, 4)})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": [1, 2]}, "weights= goes with calls="),
        ({"microbatches": 4}, "microbatches= goes with machines="),
        ({"schedule": "1f1b"}, "schedule= goes with machines="),
    ],
)
def test_argument_without_its_companion_raises(options: dict[str, Any], said: str) -> None:
    for function in (graphplan.plan, graphplan.partition):
        with pytest.raises(graphplan.InputError, match=said):
            function(nn.Linear(4, 4), {"cpu": "1GiB"}, (torch.ones(1, 4),), **options)


def test_mapping_passed_as_args_raises() -> None:
    inputs: Any = {"input": torch.ones(1, 4)}
    with pytest.raises(graphplan.InputError, match="kwargs=inputs"):
        graphplan.plan(nn.Linear(4, 4), {"cpu": "1GiB"}, inputs)


def test_slice_of_a_placed_sequential_is_a_plain_sequential() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    with graphplan.simulate({0: "64KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X,))
        assert largest_difference(placed[:2](X), model[:2](X)) < 1e-5
        assert type(placed[:2]) is nn.Sequential


def test_a_parametrized_model_is_copied_with_its_plan() -> None:
    model = nn.utils.parametrizations.weight_norm(linear())
    with graphplan.simulate({0: "128KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X,))
        assert largest_difference(copy.deepcopy(placed)(X), model(X)) < 1e-5


def test_module_parametrized_after_placement_is_freed() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    with graphplan.simulate({0: "256KiB"}) as machine, torch.no_grad():
        before = machine.live_bytes(0)
        placed = graphplan.partition(model, machine.max_memory, (X,))
        nn.utils.parametrizations.weight_norm(placed[2])
        with pytest.warns(graphplan.GraphplanWarning, match="traced again"):
            assert largest_difference(placed(X), model(X)) < 1e-5
        del placed
        gc.collect()
        assert machine.live_bytes(0) == before


def test_forward_that_seeds_is_not_traced() -> None:
    class Seeds(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                x = x + torch.randn(64)
            return super().forward(x)

    model = Seeds()
    with pytest.warns(graphplan.GraphplanWarning, match=r"by torch\.manual_seed"):
        placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    for _ in range(2):
        assert largest_difference(placed(X), model(X)) < 1e-6


@pytest.mark.parametrize("name", ["initial_seed", "get_rng_state"])
def test_forward_that_reads_random_state_is_not_traced(name: str) -> None:
    class Reads(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.as_tensor(getattr(torch, name)()).double().sum().float()

    model = Reads()
    with pytest.warns(graphplan.GraphplanWarning, match=rf"by torch\.{name}"):
        placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    for seed in range(2):
        torch.manual_seed(seed)
        found = placed(X)
        torch.manual_seed(seed)
        assert torch.allclose(found, model(X), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_saving_a_model_keeps_its_modes(
    dtype: torch.dtype | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a model whose configuration had no dtype was traced again after a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 60}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, dtype=dtype)).eval()
    inputs = {"input_ids": torch.arange(6)[None]}
    placed = graphplan.partition(model, {"cpu": "1GiB"}, kwargs=inputs)
    placed.save_pretrained(tmp_path)
    assert placed.config.architectures == ["LlamaForCausalLM"]
    caplog.set_level("INFO", "graphplan")
    placed(**inputs)
    assert "capturing another graph" not in caplog.text
