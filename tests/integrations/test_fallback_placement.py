from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from cases import in_turn
from language_models import build, inputs_of
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from versions import needs

import graphplan
from graphplan.api.eager_check import compare
from graphplan.runtime.fallback.module_profile import profile_call

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Runs as often as its input says: no graph has that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.register_buffer("shift", torch.full((16,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x))) * self.scale + self.shift
        return x + y


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 8)
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if float(x.detach().sum()) > 1e6:
                break
        return self.head(x) * self.gain


REASON = r"Undecided could not be traced:[\s\S]*at .*test_fallback_placement\.py:\d+, in forward: if float"


def placed_on(model: nn.Module, budgets: dict[Any, Any], **options: Any) -> Any:
    with pytest.warns(UserWarning, match=REASON) as caught:
        placed = graphplan.partition(model, budgets, (X,), **options)
    assert len(caught) == 1
    return placed


@pytest.mark.parametrize("shares", [(0.7, 0.7), (0.7,), (0.5,), (0.9, 0.4)])
def test_untraceable_model_runs_with_hooks(shares: tuple[float, ...]) -> None:
    model = Undecided().eval()
    with torch.no_grad():
        expected = model(X)
        activations = profile_call(model, model, (X,), {}).peak
    room = {i: int(1.1 * bytes_of(model) * share) + activations for i, share in enumerate(shares)}
    with graphplan.simulate({**room, "cpu": 1 << 24}) as machine:
        placed = placed_on(model, machine.max_memory)
        assert type(placed).__name__ == "Undecided"
        assert isinstance(placed, Undecided)
        machine.reset_peaks()
        result = placed(X)
        assert result.device == X.device
        assert not result.requires_grad
        assert largest_difference(result, expected) < 1e-6
        assert all(machine.peak_bytes(i) <= room[i] for i in room)
        assert sum(machine.peak_bytes(i) > 0 for i in room) == len(room)
        found = placed.state_dict()
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[n].cpu(), t) for n, t in model.state_dict().items())
        assert placed.plan.method == "hooks"
        placed.plan.verify()
        assert set(placed.plan.placement) == {
            n for n, _ in [*model.named_parameters(), *model.named_buffers()]
        }
        assert "Undecided" not in placed.plan.summary()
        del placed, result, found
        gc.collect()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert torch.equal(model(X), expected)


class UndecidedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 1e9:
            x = -x
        heads = [one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)]
        return self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_unfused_attention_on_simulated_devices_is_in_the_peak() -> None:
    model, x = nn.Sequential(UndecidedAttention(), UndecidedAttention()).eval(), torch.randn(1, 128, 16)
    room = 318_000  # each of both fits, not both
    with torch.no_grad(), graphplan.simulate({0: room, 1: room}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        machine.reset_peaks()
        assert largest_difference(placed(x), model(x)) < 1e-5
        for key in (0, 1):
            assert machine.peak_bytes(key) <= placed.plan.peak_bytes[key] <= room


def test_several_calls_fall_back_too() -> None:
    model = Undecided().eval()
    wide = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        activations = profile_call(model, model, (wide,), {}).peak
        expected = [model(X), model(wide)]
    budget = int(0.8 * bytes_of(model)) + activations
    with graphplan.simulate({0: budget, "cpu": 1 << 24}) as machine:
        with pytest.warns(UserWarning, match=REASON) as caught:
            placed = graphplan.partition(
                model, machine.max_memory, calls=[((X,), {}), ((wide,), {})], weights=[9, 1], check=True
            )
        assert len(caught) == 1
        machine.reset_peaks()
        for x, result in zip((X, wide), expected, strict=True):
            assert largest_difference(placed(x), result) < 1e-6
        assert machine.peak_bytes(0) <= budget
        with pytest.raises(graphplan.NoGraphError):
            graphplan.partition(model, machine.max_memory, calls=[((X,), {}), ((wide,), {})], strict=True)


def test_strict_raises_instead() -> None:
    refused = pytest.raises(graphplan.NoGraphError, match=r"could not be traced:\s+torch\.export")
    with graphplan.simulate({0: "1MiB"}) as machine, refused:
        graphplan.partition(Undecided(), machine.max_memory, (X,), strict=True)


def test_the_first_call_may_fall_back_too() -> None:
    model = Undecided().eval()
    with graphplan.simulate({0: "1MiB"}) as machine:
        with pytest.warns(UserWarning, match="the first call will be traced"):
            placed = graphplan.partition(model, machine.max_memory)
        with pytest.warns(UserWarning, match=REASON):
            result = placed(X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(placed(X), result)
        assert largest_difference(result, model(X).detach()) < 1e-6
        assert placed.plan.method == "hooks"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are calling .generate")  # transformers 5.17
def test_first_call_may_be_of_a_submodule() -> None:
    transformers = pytest.importorskip("transformers")

    class Listening(transformers.T5ForConditionalGeneration):  # type: ignore[misc]  # of an optional package
        dummy_inputs = None

    model = build("short t5")
    encoder = type(model.encoder)

    class Asking(encoder):  # type: ignore[misc,valid-type]
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            found = super().forward(input_ids=input_ids, **kwargs)
            return found if float(found.last_hidden_state.sum()) < 1e9 else None

    model.__class__, model.encoder.__class__ = Listening, Asking
    inputs = inputs_of("t5")
    with graphplan.simulate({0: "1MiB", "cpu": "1GiB"}) as machine:
        with pytest.warns(UserWarning, match="the first call will be traced"):
            placed = graphplan.partition(model, machine.max_memory)
        part = placed.get_encoder()
        with pytest.warns(UserWarning, match=r"Asking could not be traced:[\s\S]*runs module by module"):
            found = part(input_ids=inputs["input_ids"]).last_hidden_state
        with torch.no_grad():
            expected = model.encoder(input_ids=inputs["input_ids"]).last_hidden_state
        assert largest_difference(found.cpu(), expected) < 1e-6
        assert placed.plan.method == "hooks"
        tokens = model.generate(**inputs, max_new_tokens=2)
        assert torch.equal(placed.generate(**inputs, max_new_tokens=2), tokens)


def test_profile_without_graph_raises() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = placed_on(Undecided().eval(), machine.max_memory)
        with pytest.raises(graphplan.PlanError, match=r"no graph to profile, .* module by module: Undecided"):
            placed.profile(X)
        with pytest.warns(UserWarning, match="the first call will be traced"):
            waiting = graphplan.partition(Undecided().eval(), machine.max_memory)
        with (
            pytest.warns(UserWarning, match=REASON),
            pytest.raises(graphplan.PlanError, match="no graph to profile"),
        ):
            waiting.profile(X)
        assert waiting(X).shape == (4, 8)


def test_options_unsupported_by_hooks_raise() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        for options in ({"pin": {"head": 0}}, {"balance": True}, {"together": ["blocks.0"]}):
            with pytest.raises(
                graphplan.CaptureError,
                match=f"{next(iter(options))} cannot be used for a model",
            ):
                graphplan.partition(Undecided(), machine.max_memory, (X,), **options)
        placed = placed_on(Undecided(), machine.max_memory)
        with pytest.raises(graphplan.PlanError, match="no generated code: the model runs module by module"):
            _ = placed.code
        assert placed.graph_modules == ()


def test_infeasible_fallback_raises_at_once() -> None:
    with (
        graphplan.simulate({0: 3000}) as machine,
        pytest.raises(graphplan.InfeasibleError, match="These budgets suffice: max_memory="),
    ):
        graphplan.partition(Undecided(), machine.max_memory, (X,))


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_named_budgets_have_room_for_workspaces() -> None:
    model, given = Undecided(), {0: 3000}
    with graphplan.simulate(given, workspace="1MiB"), pytest.raises(graphplan.InfeasibleError) as caught:
        graphplan.partition(model, given, (X,))
    needed = caught.value.needed
    with graphplan.simulate(needed, workspace="1MiB"), torch.no_grad():
        assert largest_difference(graphplan.partition(model, needed, (X,))(X), model(X)) < 1e-6


class Layers(nn.Module):
    """Two blocks of half of the weights each."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
            if float(x.detach().sum()) > 1e9:
                break
        return x


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_named_budgets_grow_on_all_accelerators() -> None:
    model, x = Layers().eval(), torch.randn(4, 64)
    given = {0: bytes_of(model) // 4, 1: bytes_of(model) // 4}
    with graphplan.simulate(given), pytest.raises(graphplan.InfeasibleError) as caught:
        graphplan.partition(model, given, (x,))
    needed = caught.value.needed
    assert sum(needed.values()) < 1.2 * bytes_of(model)
    with graphplan.simulate(needed), torch.no_grad():
        assert largest_difference(graphplan.partition(model, needed, (x,))(x), model(x)) < 1e-6


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_named_budgets_without_accelerator_grow_on_the_cpu() -> None:
    model, x, given = Layers().eval(), torch.randn(4, 64), {"disk": 1 << 30, "cpu": 1000}
    with pytest.raises(graphplan.InfeasibleError) as caught:
        graphplan.partition(model, given, (x,))
    assert caught.value.needed["disk"] == given["disk"]
    graphplan.partition(model, caught.value.needed, (x,))


def test_large_blocks_are_split_instead_of_streamed() -> None:
    model, x = Layers().eval(), torch.ones(1, 64)
    with graphplan.simulate({0: bytes_of(model) // 2}) as machine, torch.no_grad():
        with pytest.warns(UserWarning, match="module by module"):
            placed = graphplan.partition(model, {**machine.max_memory, "cpu": 1 << 24}, (x,))
        assert largest_difference(placed(x), model(x)) < 1e-6
        assert placed.plan.streamed_bytes < 0.7 * bytes_of(model)


@pytest.mark.parametrize("cpu", ["cpu", "cpu:0"])
def test_fallback_respects_offload_false(cpu: str) -> None:
    model = Undecided()
    budgets = {0: int(0.6 * bytes_of(model)), cpu: "1GiB"}
    with graphplan.simulate(budgets), pytest.raises(graphplan.InfeasibleError):
        graphplan.partition(model, budgets, (X,), offload=False)


def test_checkpoint_is_read_to_the_devices_of_hooks(tmp_path: Any) -> None:
    model = Undecided().eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Undecided().eval()
    with graphplan.simulate({0: "48KiB", 1: "48KiB", "cpu": "1GiB"}) as machine:
        placed = placed_on(empty, machine.max_memory, checkpoint=tmp_path)
        assert largest_difference(placed(X), model(X).detach()) < 1e-6


def test_activations_are_unknown_if_run_on_zeros_fails(tmp_path: Any) -> None:
    class Trained(Undecided):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not any(bool(p.any()) for p in self.parameters()):
                raise ValueError("not trained")
            return super().forward(x)

    model = Trained().eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Trained().eval()
    with graphplan.simulate({0: "1MiB", "cpu": "1GiB"}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        placed = graphplan.partition(empty, machine.max_memory, (X,), checkpoint=tmp_path)
        assert not placed.plan.activations_known
        assert "activation sizes are unknown" in placed.plan.summary()
        assert largest_difference(placed(X), model(X).detach()) < 1e-6


@pytest.mark.parametrize("budgets", [{0: "1MiB"}, {0: 30_000, "cpu": 1 << 24}], ids=str)
def test_gradients_pass_through_hooks(budgets: dict[Any, Any]) -> None:
    model = Undecided().eval()
    with graphplan.simulate(budgets | {0: "1MiB"}):  # what autograd saves is not planned
        placed = placed_on(model, budgets, grad=True)
        assert set(placed.plan.placement.values()) == budgets.keys()
        placed(X).sum().backward()
        model(X).sum().backward()
        found = dict(placed.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.allclose(found[name].grad.cpu(), parameter.grad, atol=1e-5)


# -- check ------------------------------------------------------------------------------------------------


class Sly(nn.Module):
    """Does another thing when it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"logits": y + 1 if torch.compiler.is_exporting() else y}


def test_check_detects_a_differing_graph() -> None:
    model = Sly().eval()
    with graphplan.simulate({0: "1MiB"}) as machine:
        quiet = graphplan.partition(model, machine.max_memory, (X,))
        assert largest_difference(quiet(X), model(X)) > 0.9
        with pytest.warns(
            UserWarning, match=r"graph of Sly differs on the example inputs: logits differs from"
        ):
            placed = graphplan.partition(model, machine.max_memory, (X,), check=True)
        with torch.no_grad():
            assert largest_difference(placed(X), model(X)) < 1e-6
        with pytest.raises(graphplan.NoGraphError, match="differs on the example inputs"):
            graphplan.partition(model, machine.max_memory, (X,), check=True, strict=True)


@dataclass
class Logits:
    logits: torch.Tensor


class SlyObject(Sly):
    def forward(self, x: torch.Tensor) -> Any:
        return [Logits(**super().forward(x))]


def test_check_compares_returned_objects() -> None:
    differs = pytest.raises(graphplan.NoGraphError, match=r"\[0\]\.logits differs from eager's")
    with graphplan.simulate({0: "1MiB"}) as machine, differs:
        graphplan.partition(SlyObject().eval(), machine.max_memory, (X,), check=True, strict=True)


class Rows(list[torch.Tensor]):
    """Nothing that a graph takes in or returns."""


class AddsTo(nn.Linear):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor, rows: Rows) -> Rows:
        rows[0] += 1
        return Rows([super().forward(x), rows[0]])


def test_check_compares_list_subclasses() -> None:
    assert compare(Rows([X]), Rows([X + 1])).startswith("[0] differs")


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_check_does_not_change_example_objects() -> None:
    rows = Rows([torch.zeros(2)])
    with graphplan.simulate({0: "1MiB"}) as machine:
        graphplan.partition(AddsTo(16, 4).eval(), machine.max_memory, (X, rows), check=True)
    assert not rows[0].any()


@pytest.mark.parametrize("model", [nn.Linear(16, 4), Undecided()], ids=["graph", "hooks"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_examples_may_be_results_of_other_modules(model: nn.Module, grad: bool) -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        inputs = nn.Linear(16, 16)(X)
        placed = graphplan.partition(model.eval(), machine.max_memory, (inputs,), grad=grad, check=True)
        assert placed(inputs).requires_grad == grad
        assert largest_difference(placed(inputs), model(inputs)) < 1e-6


def test_check_accepts_equal_results_and_names_incomparable_ones(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).train()
    mean = model[1].running_mean.clone()
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), check=True)
        assert torch.equal(model[1].running_mean, mean)
        assert placed.plan.method == "export"
        with pytest.warns(UserWarning, match="eager mode differ from call to call"):
            graphplan.partition(nn.Dropout(), machine.max_memory, (X,), check=True)
        save_file(Sly().state_dict(), tmp_path / "model.safetensors")
        with torch.device("meta"):
            empty = Sly()
        with pytest.warns(UserWarning, match="no weights of its own to compare"):
            graphplan.partition(empty, machine.max_memory, (X,), checkpoint=tmp_path, check=True)


class Sized(Undecided):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x.size()


def test_torch_size_results_keep_their_type() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        with pytest.warns(UserWarning, match="module by module"):
            placed = graphplan.partition(Sized(), machine.max_memory, (X,))
        assert type(placed(X)[1]) is torch.Size


class Drawing(nn.Module):
    """Draws from a generator of its own, and from torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(x.shape, generator=self.generator)
        return self.drop(self.linear(x)) + drawn if float(x.detach().sum()) < 1e6 else x


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_trial_runs_draw_no_random_numbers(check: bool) -> None:
    for model in (Drawing().train(), nn.Sequential(nn.Linear(16, 16), nn.Dropout()).train()):
        torch.manual_seed(7)
        before = torch.get_rng_state()
        graphplan.partition(model, {"cpu": "1MiB"}, (X,), check=check)
        assert torch.equal(torch.get_rng_state(), before)
        if isinstance(model, Drawing):
            fresh = torch.Generator().manual_seed(3)
            assert torch.equal(model.generator.get_state(), fresh.get_state())


def test_the_tracer_does_not_print_its_graph(capfd: pytest.CaptureFixture[str]) -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed_on(Undecided().eval(), machine.max_memory | {"cpu": "1GiB"})
    assert "def forward" not in capfd.readouterr().err


_TRACED_SINCE = needs("torch", "2.13", "nested vmap and jvp are not traced")

TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    # seen on Nemotron's streaming encoder
    "vmap": lambda head, x: torch.vmap(lambda row: head(row) + row.new_ones(()))(x),
    "nested vmap": lambda head, x: torch.vmap(lambda row: torch.vmap(lambda one: head(one * row))(x))(x),
    "jvp": lambda head, x: torch.func.jvp(head, (x,), (x.sin(),)),
    "jacrev": lambda head, x: torch.vmap(torch.func.jacrev(head))(x),
    "hessian": lambda head, x: torch.vmap(torch.func.hessian(lambda row: head(row).tanh().sum()))(x),
    "ensemble": lambda head, x: torch.vmap(
        lambda scale: torch.func.functional_call(head, {"weight": head.weight * scale}, (x,))
    )(torch.arange(1.0, 4.0, device=x.device)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=_TRACED_SINCE) if name in ("nested vmap", "jvp") else name
        for name in TRANSFORMS
    ],
)
@pytest.mark.parametrize("grad", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_transforms_in_forward_equal_eager(name: str, grad: bool) -> None:
    class Transforming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> Any:
            return TRANSFORMS[name](self.head, self.first(x))

    model = Transforming().eval()
    simulated = graphplan.simulate({0: 2560})
    with simulated if not grad else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore" if grad else "error")
        budgets = {"cpu": "1GiB"} if grad else {0: 2560, "cpu": "1GiB"}
        placed = graphplan.partition(model, budgets, (X,), grad=grad, strict=not grad)
        for x in (X, -X, torch.randn(2 * len(X), 16)):
            assert largest_difference(placed(x), model(x)) < 1e-5


def test_gradients_of_functions_are_planned() -> None:
    class Surprise(nn.Module):
        """A layer, and the gradient of another one's error, as of a memory that learns while it is read."""

        def __init__(self) -> None:
            super().__init__()
            self.head, self.memory = nn.Linear(16, 8), nn.Linear(16, 16)

        def error(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.func.functional_call(self.memory, weights, (x,))
            return (found - x).pow(2).mean()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gradients = torch.func.grad(self.error)(dict(self.memory.named_parameters()), x)
            found: torch.Tensor = self.head(x + gradients["bias"])
            return found

    model = Surprise().eval()
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        for x in (X, torch.randn(5, 16)):
            assert largest_difference(placed(x), model(x)) < 1e-6


@pytest.mark.parametrize("name", ["lambda", "self"])
def test_reserved_attribute_name_is_read_by_module_code(name: str) -> None:
    class Reserved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.ones(16)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self._parameters[name]

    with pytest.warns(graphplan.GraphplanWarning, match=f"rename '{name}'"):
        placed = graphplan.partition(Reserved(), {"cpu": "1GiB"}, (X,))
    assert torch.equal(placed(X), X)


def test_unread_reserved_attribute_name_is_traced() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"in": nn.Linear(16, 8), "out": nn.Linear(16, 8)})

        def forward(self, x: torch.Tensor) -> Any:
            return self.heads["out"](x)

    model = Unread()
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,), strict=True)
    assert largest_difference(placed(X), model(X)) < 1e-6


class Whole(Undecided):
    """Undecided, with a shared weight and other state that a copy must have."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
        self.again.weight = self.last.weight
        self.register_buffer("shift", torch.ones(16), persistent=False)
        self.tag = ["mine"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.again(self.last(x)) + self.shift)


def noted(_module: nn.Module, _args: Any, result: torch.Tensor) -> torch.Tensor:
    """A hook of a user's."""
    return result + 1


def reloaded(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.filterwarnings("ignore:Whole could not be traced:graphplan.GraphplanWarning")
def test_optimizer_pickled_with_its_model_trains_it() -> None:
    placed = graphplan.partition(Whole(), {"cpu": "1GiB"}, (X,), grad=True)
    again, optimizer = reloaded((placed, torch.optim.SGD(placed.parameters(), lr=0.1)))  # it had others
    before = [parameter.detach().clone() for parameter in again.parameters()]
    again(X).sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(again.parameters(), before, strict=True))


def unpickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("copied", "shares"), in_turn([copy.deepcopy, unpickled, reloaded], [(), (0.5,), (0.8, 0.7)])
)
def test_hooked_models_are_copied_and_pickled_whole(copied: Any, shares: tuple[float, ...]) -> None:
    model = Whole().eval()
    model.again.register_forward_hook(noted)
    with torch.no_grad():
        expected = model(X)
        room = profile_call(model, model, (X,), {}).peak
    budgets = {i: int(1.1 * bytes_of(model) * share) + room for i, share in enumerate(shares)}
    with graphplan.simulate({**dict.fromkeys(budgets, 1 << 24), "cpu": 1 << 24}) as machine:  # for copies too
        with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
            placed = graphplan.partition(model, {**budgets, "cpu": 1 << 24}, (X,))
        again = copied(placed)
        assert type(again).__name__ == "Whole"
        assert isinstance(again, Whole)
        assert again.plan.method == "hooks"
        assert again.plan.placement == placed.plan.placement
        assert again.tag == ["mine"]
        assert again.tag is not placed.tag
        assert not again.training
        assert again.again.weight is again.last.weight
        assert largest_difference(again(X), expected) < 1e-6
        assert again.shift.device == placed.shift.device
        found = {name: tensor.cpu() for name, tensor in again.state_dict().items()}
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
        twice = copied(again)
        for tensor in again.state_dict().values():
            tensor.zero_()
        assert torch.equal(again(X).cpu(), torch.zeros(4, 8))
        for other in (placed, twice):
            assert largest_difference(other(X), expected) < 1e-6
        del placed, again, twice, other, found, tensor
        gc.collect()
        assert not any(machine.live_bytes(i) for i in budgets)


class _Pair(nn.Module):
    def __init__(self, placed: nn.Module) -> None:
        super().__init__()
        self.empty, self.placed = nn.Linear(2, 2, device="meta"), placed


def test_state_dict_of_a_parent_includes_other_children() -> None:
    model = Undecided().eval()
    with graphplan.simulate({0: 10_000, "cpu": 1 << 24}) as machine:
        found = _Pair(placed_on(model, machine.max_memory)).state_dict()
        assert found["empty.weight"].device.type == "meta"
        for name, tensor in model.state_dict().items():
            assert torch.equal(found[f"placed.{name}"].cpu(), tensor)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_unplace_returns_the_plain_model_without_hooks(share: float) -> None:
    model = Undecided().eval()
    with torch.no_grad():
        expected = model(X)
    with graphplan.simulate({0: 10_000 + int(share * bytes_of(model)), "cpu": 1 << 24}) as machine:
        placed = placed_on(model, machine.max_memory)
        plain = graphplan.unplace(placed)
        assert type(plain) is Undecided
        assert {tensor.device.type for tensor in plain.state_dict().values()} == {"cpu"}
        assert torch.equal(plain(X), expected)
        assert largest_difference(placed(X), expected) < 1e-6


@pytest.mark.parametrize(
    ("share", "assign"),
    [
        (0.5, False),
        (2.0, True),
        pytest.param(0.5, True, marks=pytest.mark.slow),
        pytest.param(2.0, False, marks=pytest.mark.slow),
    ],
)
def test_load_state_dict_keeps_devices_of_hooks(share: float, assign: bool) -> None:
    model = Undecided().eval()
    state = {name: 1.5 * tensor for name, tensor in model.state_dict().items()}
    with graphplan.simulate({0: 10_000 + int(share * bytes_of(model)), "cpu": 1 << 24}) as machine:
        placed = placed_on(model, machine.max_memory)
        assert any(tensor.device.type == "cpu" for tensor in placed.parameters()) == (share < 1)
        places = [(tensor.device, tensor.data_ptr()) for tensor in placed.parameters()]
        said: Any = (
            pytest.warns(graphplan.GraphplanWarning, match="values are written") if assign else nullcontext()
        )
        with said:
            placed.load_state_dict(state, assign=assign)
        assert [(tensor.device, tensor.data_ptr()) for tensor in placed.parameters()] == places
        with torch.no_grad():
            model.load_state_dict(state)
            assert largest_difference(placed(X), model(X)) < 1e-6


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_hooked_model_cannot_be_moved_or_converted(share: float) -> None:
    model = Undecided().eval()
    with torch.no_grad():
        expected = model(X)
    with graphplan.simulate({0: 10_000 + int(share * bytes_of(model)), "cpu": 1 << 24}) as machine:
        placed = placed_on(model, machine.max_memory)
        for convert in (placed.cpu, placed.half, nn.Sequential(placed).double):
            with pytest.raises(graphplan.PlanError, match="unplace"):
                convert()
        nn.Sequential(placed).cpu()
        assert largest_difference(placed(X), expected) < 1e-6


class Stateful(nn.Module):
    """Keeps state in Python, and a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(16, 64), Block(), nn.Linear(16, 8)
        self.register_buffer("history", torch.zeros(0, 16))
        self.calls, self.block.calls = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.block(x + self.first(x)[:, :16])
        if isinstance(self.block, Block):
            self.block.calls.append(tuple(y.shape))
        self.history = torch.cat([self.history, y.detach()[:1]])
        return self.last(y) * (2.0 if float(y.detach().sum()) > 1e6 else 1.0)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)[:, :16] if float(x.detach().sum()) < 1e6 else x


BOTH = pytest.mark.parametrize("share", [0.6, 3.0])


@contextmanager
def stateful_on(share: float) -> Iterator[tuple[Any, Any]]:
    """(model, what hooks run)."""
    model = Stateful().eval()
    budgets = {0: 10_000 + int(share * bytes_of(model)), "cpu": 1 << 24}
    with graphplan.simulate(budgets) as machine, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        placed = graphplan.partition(model, machine.max_memory, (X,))
        warnings.simplefilter("error")
        yield model, placed


@BOTH
def test_state_kept_by_forward_equals_eager(share: float) -> None:
    with stateful_on(share) as (model, placed):
        before = placed.calls, len(placed.block.calls)
        assert len(placed.history) == 0
        for x in (X, X[:2]):
            assert largest_difference(placed(x), model(x)) < 1e-6
        assert (placed.calls, len(placed.block.calls)) == (before[0] + 2, before[1] + 2)
        assert placed.block.calls[-2:] == [(4, 16), (2, 16)]
        assert largest_difference(placed.history[-2:].cpu(), model.history) < 1e-6
        assert len(placed.state_dict()["history"]) == len(placed.history)


class Late(nn.Module):
    """Makes a buffer and a submodule when it is first called, where it has none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "first"):
            self.register_buffer("first", x.detach()[:1].clone())
            self.norm = nn.LayerNorm(16, elementwise_affine=False)
        return self.norm(x + self.first)


def test_trial_run_leaves_no_new_buffers_or_children() -> None:
    model = nn.Sequential(Undecided(), nn.Linear(8, 16), Late()).eval()
    expected = copy.deepcopy(model)(X + 1)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,), check=True)
    assert not list(placed[2].buffers())
    assert not list(placed[2].children())
    assert largest_difference(placed(X + 1), expected) < 1e-6


@BOTH
def test_submodules_and_methods_of_hooked_models_can_be_called(share: float) -> None:
    with stateful_on(share) as (model, placed):
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        assert largest_difference(placed.block(X).cpu(), model.block(X)) < 1e-6
        assert largest_difference(placed.embed(X).cpu(), model.embed(X)) < 1e-6


@BOTH
def test_changes_of_a_hooked_model_take_effect(share: float) -> None:
    seen: list[str] = []
    with stateful_on(share) as (model, placed):
        for one in (model, placed):
            one.block.register_forward_hook(noted)
            one.register_forward_hook(lambda *_: seen.append("whole"))
        assert largest_difference(placed(X), model(X)) < 1e-6
        assert seen == ["whole", "whole"]
        for one in (model, placed):
            one.block = nn.Identity()
        assert largest_difference(placed(X[:2]), model(X[:2])) < 1e-6
        with pytest.raises(graphplan.InputError, match="unexpected keyword argument"):
            placed(X, nothing=1)


class Branches(nn.Module):
    """A branch in the graph's way of writing, and one that no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cond(x.sum() > 0, self.a, self.b, (x,))
        return x * 2 if x.sum() > 1e9 else x


def test_control_flow_over_modules_without_a_graph_raises() -> None:
    with pytest.raises(graphplan.CaptureError, match=r"torch\.cond calls 'a'"):
        graphplan.partition(Branches(), {"cpu": "1GiB"}, (torch.ones(2, 8),))


class Tries(nn.Module):
    """A branch that cannot be taken, and what is done instead."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = torch.cond(x.sum() > 0, lambda x: x @ x, torch.cos, (x,))
        except RuntimeError:
            x = self.a(x)
        return x * 2 if x.sum() > 1e9 else x


def test_untraced_model_runs_after_failed_control_flow() -> None:
    model, x = Tries(), torch.ones(2, 8)
    with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
        placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,))
    assert torch.equal(placed(x), model(x))


class Attends(nn.Module):
    """No graph has its mask, which is made by ``torch.vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(lambda _b, _h, row, column: row >= column, None, None, 4, 4, x.device.type)
        x = flex_attention(*[self.a(x).view(1, 2, -1, 32)] * 3, block_mask=mask).reshape(x.shape[0], 32)
        return self.b(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:the trace contains torch.vmap:graphplan.GraphplanWarning")
@pytest.mark.parametrize("share", [pytest.param(None, marks=pytest.mark.slow), 0.5])
def test_untraceable_attention_equals_eager(share: float | None) -> None:
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(8, 8)
    with torch.no_grad():
        expected = model(x)
        with graphplan.simulate({0: 2048}):
            device = {} if share is None else {0: int(share * bytes_of(model))}
            placed = graphplan.partition(model, {**device, "cpu": "1GiB"}, (x,))
            assert largest_difference(placed(x), expected) < 1e-5


def test_torch_compiles_after_a_trial_and_a_simulation() -> None:
    compiled: list[str] = []

    def counting(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        compiled.append("once")
        return graph

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)
            self.b = torch.compile(nn.Linear(16, 16), backend=counting)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.b(self.a(x))
            return y * 2 if y.sum() > 1e9 else y

    model = Compiled()
    with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
        graphplan.partition(model, {"cpu": "1GiB"}, (X,))
    with torch.no_grad():
        model(X)
    assert compiled
    with graphplan.simulate({0: "1MiB"}):
        there = torch.cond(X.sum() > 1e9, torch.sin, torch.cos, (X.to("sim:0"),)).cpu()
    assert torch.equal(there, torch.cond(X.sum() > 1e9, torch.sin, torch.cos, (X,)))


class ForCpu(nn.Linear):
    """Code that was written for the CPU alone: it makes and keeps tensors there."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.kept, self.listed = torch.rand(16), [torch.rand(16, 16)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * self.kept @ self.listed[0] + torch.arange(16)
        return y if float(y.sum()) < 1e9 else x


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_cpu_only_code_runs_over_accelerators() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(ForCpu() for _ in range(4))).eval()
    room = {0: "8KiB", 1: "8KiB"}
    with graphplan.simulate(room) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (X,))
        for rows in (4, 2):
            assert largest_difference(placed(X[:rows]), model(X[:rows])) < 1e-5
        assert all(0 < machine.peak_bytes(key) <= 8 << 10 for key in (0, 1))
        data = pickle.dumps(placed)
        del placed
        gc.collect()
        assert largest_difference(pickle.loads(data)(X), model(X)) < 1e-5
    with graphplan.simulate(room) as machine, pytest.raises(graphplan.CaptureError, match="same device"):
        graphplan.partition(model, machine.max_memory, (X,), grad=True)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_cpu_only_code_has_gradients_without_a_graph() -> None:
    class Asked(ForCpu):
        def forward(self, x: torch.Tensor, decide: bool = False) -> torch.Tensor:
            y = nn.Linear.forward(self, x) * self.kept
            return y if not decide or float(y.sum()) < 1e9 else x

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = Asked(), Asked()

        def forward(self, x: torch.Tensor, decide: bool = False) -> torch.Tensor:
            found: torch.Tensor = self.b(self.a(x, decide), decide)
            return found

    model = Two()
    model(X).sum().backward()
    with graphplan.simulate({0: "20KiB", 1: "20KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), grad=True, pin={"a": 0, "b": 1})
        with torch.no_grad():
            placed(X, True)  # how it runs is settled by a call without a backward pass
        placed(X, True).sum().backward()
        for mine, own in zip(placed.parameters(), model.parameters(), strict=True):
            assert largest_difference(mine.grad.cpu(), own.grad) < 1e-4


class Tiny(nn.Module):
    """Small layers, each of whose tensors takes a block of the allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if float(x.detach().sum()) > 1e6:
                break
        return x


@pytest.mark.parametrize("budget", [12_000, 18_000])
def test_plans_of_small_tensors_keep_to_the_budget(budget: int) -> None:
    x = torch.randn(3, 5)
    with graphplan.simulate({0: budget, 1: budget, "cpu": 1 << 28}) as machine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            placed = graphplan.partition(Tiny(), machine.max_memory, (x,))
        machine.reset_peaks()
        placed(x)
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0] <= budget
