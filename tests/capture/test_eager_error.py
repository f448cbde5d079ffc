"""Errors of the model itself are raised unchanged; capture errors name the reason and the line."""

from __future__ import annotations

import json
import traceback
import warnings
from collections import UserDict
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from language_models import build
from torch import nn
from versions import needs

import graphplan
from graphplan.capture.source_lines import failed_line
from graphplan.capture.tracers import transformers_export

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class OwnError(Exception):
    """Of a user."""


ERRORS = [
    RuntimeError("mine"),
    ValueError("mine"),
    OwnError("mine"),
    KeyError("mine"),
    NotImplementedError("mine"),
    AttributeError("mine"),
    AssertionError(),
]


class Failing(nn.Module):
    """Raises where it is told to: at once, or where the data says so, which no graph has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down, self.number = nn.Linear(16, 256), nn.Linear(256, 16), number

    def forward(self, x: torch.Tensor, where: str = "") -> torch.Tensor:
        y = self.up(x)
        if where == "here" or (where == "there" and float(x.sum()) < 1e9):
            raise ERRORS[self.number]
        return self.down(y)


def raised(call: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # compared with what was to be raised
        call()
    return caught.value


@pytest.mark.parametrize(
    ("where", "number"),
    [
        pytest.param(where, number, marks=[pytest.mark.slow] * (number not in numbers))
        for where, numbers in (("here", range(len(ERRORS))), ("there", (2, 5)))
        for number in range(len(ERRORS))
    ],
)
def test_model_error_is_raised_unchanged(number: int, where: str) -> None:
    error = ERRORS[number]
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        placed = graphplan.partition(Failing(number), machine.max_memory, (X,))
        first = raised(lambda: graphplan.partition(Failing(number), machine.max_memory, (X, where)))
        later = raised(lambda: placed(X, where))
        for found in (first, later):
            assert found is error
            assert found.__cause__ is None
            assert found.__context__ is None
            lines = traceback.extract_tb(found.__traceback__)
            assert (lines[-1].filename, lines[-1].name) == (__file__, "forward")
        assert placed(X).shape == X.shape


def test_wrong_input_shape_raises_torch_error() -> None:
    model, wrong = nn.Linear(16, 16), torch.ones(4, 5)
    eager = raised(lambda: model(wrong))
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,))
        for found in (
            raised(lambda: placed(wrong)),
            raised(lambda: graphplan.partition(model, machine.max_memory, (wrong,))),
            raised(lambda: graphplan.plan(model, machine.max_memory, (wrong,))),
        ):
            assert (type(found), str(found)) == (type(eager), str(eager))


class Checkpointed(nn.Module):
    """Raises by its data; its weights are in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) < 1e9:
            raise NotImplementedError("mine")
        return self.up(x)


def test_meta_model_raises_its_own_error(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "weights.safetensors"
    save_file(Checkpointed().state_dict(), file)
    with torch.device("meta"):
        model = Checkpointed()
    with graphplan.simulate({0: "1MiB"}) as machine, pytest.raises(NotImplementedError, match=r"^mine$"):
        graphplan.partition(model, machine.max_memory, (X,), checkpoint=file)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


def test_error_names_model_line_not_standard_library() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert "test_eager_error.py" in failed_line(caught.value)


@pytest.mark.parametrize("strict", [True, None])
def test_data_dependent_branch_error_names_line_and_remedy(strict: bool | None) -> None:
    said = (
        r"at .*test_eager_error\.py:\d+, in forward: if x\.sum\(\) > 0:\n.*torch\.cond.*graphplan\.partition"
    )
    with graphplan.simulate({0: "1MiB"}) as machine:
        if strict:
            with pytest.raises(graphplan.NoGraphError, match=said):
                graphplan.partition(Branching(), machine.max_memory, (X,), strict=True)
        else:
            with pytest.raises(graphplan.NoGraphError, match=said):
                graphplan.plan(Branching(), machine.max_memory, (X,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("export_transformers", "exporters does not support it"),
        pytest.param("_roles", "exporters does not support it", marks=pytest.mark.slow),
    ],
)
def test_missing_exporter_warns_once(monkeypatch: pytest.MonkeyPatch, broken: str, said: str) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise LookupError("an odd one")

    from graphplan.capture import tracing

    monkeypatch.setattr(tracing if broken == "export_transformers" else transformers_export, broken, refuse)
    check_that_it_says_why_once(f"{said} .LookupError: an odd one.*retraced for each new size of its inputs")


@pytest.mark.slow
def test_fixed_transformers_sizes_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphplan.capture import tracing

    def only_fixed(model_copy: Any, call: Any, varying: Any, **kwargs: Any) -> Any:
        if varying:
            raise LookupError("an odd one")
        return transformers_export.export_transformers(model_copy, call, varying, **kwargs)

    monkeypatch.setattr(tracing, "export_transformers", only_fixed)
    check_that_it_says_why_once(
        "sizes cannot vary in a trace .LookupError: an odd one.*retraced for each new size of its inputs"
    )


def check_that_it_says_why_once(said: str) -> None:
    model = build("short llama")
    with graphplan.simulate({0: "10MiB"}) as machine, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kwargs = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
        placed = graphplan.partition(model, machine.max_memory, kwargs=kwargs)
        for length in (9, 10):
            with suppress(graphplan.InfeasibleError):
                placed(torch.zeros(2, length, dtype=torch.long))
    ours = [one for one in caught if issubclass(one.category, graphplan.GraphplanWarning)]
    assert len(ours) == 1
    assert ours[0].filename == __file__
    with pytest.warns(graphplan.GraphplanWarning, match=said):
        warnings.warn(ours[0].message, stacklevel=2)


@needs("torch", "2.12", "nested tensors have no numel under a dispatch mode")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("around", [nullcontext(), graphplan.simulate({0: "1MiB"})])
def test_nested_tensors_are_run_by_modules_or_refused(around: Any) -> None:
    model, parts = nn.Sequential(nn.Linear(4, 4)), [torch.ones(2, 4), torch.ones(3, 4)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    with around, torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="an input is a nested tensor"):
            placed = graphplan.partition(model, {"cpu": "1MiB"}, (jagged,))
        for found, part in zip(placed(jagged).unbind(), parts, strict=True):
            assert torch.allclose(found, model(part))
    with pytest.raises(graphplan.InputError, match=r"make it torch\.jagged"):
        graphplan.partition(model, {"cpu": "1MiB"}, (torch.nested.nested_tensor(parts),))


class Product(nn.Module):
    def forward(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(a, x)


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support", "ignore:.*retraced for each")
def test_compressed_sparse_input_raises_with_remedy() -> None:
    # torch's own error, of storages and strides, came through
    dense, x = torch.eye(4), torch.ones(4, 2)
    with pytest.raises(
        graphplan.InputError, match=r"torch\.sparse_csr, which torch cannot copy: pass it \.to_sparse"
    ):
        graphplan.partition(Product(), {"cpu": "1MiB"}, (dense.to_sparse_csr(), x))
    placed = graphplan.partition(Product(), {"cpu": "1MiB"}, (dense, x))
    with pytest.raises(graphplan.InputError, match=r"torch\.sparse_csc"):
        placed(dense.to_sparse_csc(), x)
    for given in (dense, dense.to_sparse_csr().to_sparse(layout=torch.sparse_coo)):
        assert torch.equal(placed(given, x), x)


class Forces(nn.Module):
    """Of an energy: its gradient, which needs gradients of the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        positions = positions.clone().requires_grad_()
        return torch.autograd.grad(self.energy(positions).sum(), positions)[0]


@pytest.mark.parametrize("budgets", [{0: "1MiB"}, {"cpu": "1MiB"}])
@pytest.mark.filterwarnings("ignore:the training step cannot be traced")
@pytest.mark.parametrize("options", [{"grad": True, "check": True}, {"train": True}])
def test_model_that_requires_gradients_runs_with_grad(budgets: Any, options: Any) -> None:
    model, x = Forces(), torch.randn(5, 3)
    with graphplan.simulate({0: "1MiB"}):
        with pytest.raises(RuntimeError, match="does not require grad") as caught:
            graphplan.partition(model, budgets, (x,))
        assert any("grad=True" in note for note in caught.value.__notes__)
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(model, budgets, (x,), **options)
        assert torch.allclose(placed(x), model(x), atol=1e-6)


class Adapts(nn.Module):
    """A step of its own before it answers, through which the caller's gradients do not flow."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.head, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        error = self.layer(x).pow(2).mean()
        if self.way == "grad":
            (step,) = torch.autograd.grad(error, [self.layer.weight])
        elif self.way == "of input":
            (step,) = torch.autograd.grad(error, [x], create_graph=True)
            return self.head(x) + step  # type: ignore[no-any-return]
        else:
            inner = x.detach().clone().requires_grad_()
            self.layer(inner).pow(2).mean().backward()
            assert inner.grad is not None
            return self.head(self.layer(x) + inner.grad)  # type: ignore[no-any-return]
        found: torch.Tensor = self.head(nn.functional.linear(x, self.layer.weight - step))
        return found


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.parametrize("options", [{"grad": True, "check": True}, {"train": True}])
@pytest.mark.parametrize("way", ["grad", "backward", "of input"])
def test_gradients_that_forward_computes_are_those_of_eager(way: str, options: Any) -> None:
    model, x = Adapts(way), torch.randn(5, 4, requires_grad=True)
    model.layer.bias.grad = torch.ones(4)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), **options)
        assert torch.equal(model.layer.bias.grad, torch.ones(4))
        assert all(one.grad is None for one in (model.layer.weight, *placed.head.parameters()))
        model.layer.bias.grad = None
        placed.zero_grad()
        found, wanted = placed(x), model(x)
        assert torch.allclose(found, wanted, atol=1e-6)
        found.sum().backward()
        wanted.sum().backward()
        for ours, own in zip(placed.parameters(), model.parameters(), strict=True):
            assert ours.grad is None if own.grad is None else torch.allclose(ours.grad.cpu(), own.grad)


class Ready(nn.Module):
    """Has its weight from its first call on, as models of compressed-tensors do."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.ones(16, 16, dtype=torch.int8), requires_grad=False)
        self.register_forward_pre_hook(type(self).unpack)

    def unpack(self, _args: Any) -> None:
        self.weight = nn.Parameter(self.packed.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_error_names_preparing_pre_hook() -> None:
    model = Ready()
    error = raised(lambda: graphplan.partition(model, {"cpu": "1GiB"}, (X,)))
    assert isinstance(error, AttributeError)
    assert "first call" in error.__notes__[-1]
    want = model(X)
    assert torch.equal(graphplan.partition(model, {"cpu": "1GiB"}, (X,))(X), want)


class Handed(UserDict[str, Any]):
    """A table of parameters that hands out copies, as those of compressed-tensors do."""


def test_module_with_foreign_tensor_table_raises() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    table: Any = Handed(model[0]._parameters)
    model[0]._parameters = table
    with pytest.raises(graphplan.CaptureError, match=r"0 \(Linear\) has its tensors in a Handed"):
        graphplan.partition(model, {"cpu": "1GiB"}, (X,))


def test_foreign_tensor_table_of_first_call_raises() -> None:
    """Regression: it was a TypeError, for models of compressed-tensors whose weights have a byte each."""

    def hand_out(model: nn.Module, _args: Any) -> None:
        linear: Any = model.get_submodule("0")
        linear._parameters, linear.is_ready = Handed(linear._parameters), True

    model = nn.Sequential(nn.Linear(16, 16))
    model.register_forward_pre_hook(hand_out)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    with pytest.raises(graphplan.CaptureError, match=r"0 \(Linear\) has its tensors in a Handed"):
        placed(X)


def test_compiled_code_is_not_given_fake_tensors() -> None:
    """Regression: it was, and accessed memory that they lack: a segmentation fault, with inductor."""
    given: list[type] = []

    def recording(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        def run(*args: Any) -> Any:
            given.extend(map(type, args))
            return graph(*args)

        return run

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sine = torch.compile(torch.sin, backend=recording)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.sine(x)
            return x if float(y.sum()) > 1e9 else y

    with pytest.warns(graphplan.GraphplanWarning, match="runs module by module"):
        placed = graphplan.partition(Compiled(), {"cpu": "1GiB"}, (X,))
    assert torch.equal(placed(X), X.sin())
    assert set(given) <= {torch.Tensor}
