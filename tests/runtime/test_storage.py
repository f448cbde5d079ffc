"""Weights in one allocation per device: copies, pickles, state dicts and moves of such modules."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import graphplan
from graphplan.devices.simulated_machine import SimulatedMachine
from graphplan.devices.topology import round_up
from graphplan.runtime.memory.arena import Arena

WIDTH = 60  # nothing is a multiple of an allocator's 512 bytes
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


class Layered(nn.Module):
    """Ties, dtypes, buffers of both kinds, and a parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.narrow = nn.Parameter(torch.randn(WIDTH, 7).bfloat16())
        self.turned = nn.Parameter(torch.randn(5, WIDTH).t())
        self.codes = nn.Parameter(torch.randint(0, 255, (WIDTH,), dtype=torch.uint8), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("unsaved", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.tanh(self.first(x))) + self.shift * self.scalar + self.codes
        x = self.last(x) / 100
        return x @ self.turned * self.unsaved.sum() + (x.bfloat16() @ self.narrow).float().mean()


@contextmanager
def placed_model(model: nn.Module | None = None, budget: int = 1 << 20) -> Iterator[tuple[Any, Any, Any]]:
    model = Layered().eval() if model is None else model
    with graphplan.simulate({0: budget, "cpu": 1 << 30}) as machine:
        yield graphplan.partition(model, machine.max_memory, (X,)), model, machine


def storages(module: nn.Module) -> list[torch.UntypedStorage]:
    tensors = [*module.parameters(), *module.buffers()]
    return [t.untyped_storage() for t in tensors if t.numel()]


def assert_same(placed: nn.Module, model: nn.Module) -> None:
    ours = {name: tensor.cpu() for name, tensor in placed.state_dict().items()}
    assert largest_difference(ours, dict(model.state_dict())) == 0


def test_arena_has_the_size_of_its_weights() -> None:
    likes = [torch.ones(7, 3), torch.ones(1000, dtype=torch.bfloat16), torch.ones(4, 6).t(), torch.ones(0, 2)]
    likes.append(torch.tensor(True))
    arena = Arena(torch.device("cpu"), sum(round_up(t.numel() * t.element_size()) for t in likes))
    at = arena.bytes.data_ptr()
    for like in likes:
        place = arena.reserve(like)
        assert (place.dtype, place.shape, place.stride()) == (like.dtype, like.shape, like.stride())
        assert place.untyped_storage().nbytes() == like.numel() * like.element_size()
        if like.numel():
            assert place.data_ptr() == at
            at += round_up(like.numel() * like.element_size())
        place.copy_(like)
        assert torch.equal(place, like)
    assert at == arena.bytes.data_ptr() + arena.bytes.numel()


def test_reserved_tensors_have_dense_strides() -> None:
    arena = Arena(torch.device("cpu"), 1024)
    assert arena.reserve(torch.ones(4, 8)[:, ::2]).stride() == (4, 1)


def test_arena_is_freed_with_its_last_weight() -> None:
    with graphplan.simulate({0: 4096}) as machine:
        arena = Arena(torch.device("sim:0"), 2048)
        first, second = (arena.reserve(torch.ones(100)) for _ in range(2))
        del arena
        gc.collect()
        assert machine.live_bytes(0) == 2048
        del first
        gc.collect()
        assert machine.live_bytes(0) == 2048
        second.fill_(2)
        assert second.tolist() == [2.0] * 100
        del second
        gc.collect()
        assert machine.live_bytes(0) == 0


def test_warming_reserves_exactly_the_planned_activations() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.randn(32, 64)
    with graphplan.simulate({0: "70KiB", 1: "110KiB"}) as machine:
        for warm in (False, True):
            machine.reset_peaks()
            placed = graphplan.partition(model, machine.max_memory, (x,), warm=warm)
            peaks = {key: machine.peak_bytes(key) for key in (0, 1)}
            planned = {key: placed.plan.peaks[key] for key in (0, 1)}
            assert any(peak.nbytes > peak.weights for peak in planned.values())
            wanted = {key: peak.nbytes if warm else peak.weights for key, peak in planned.items()}
            assert peaks == wanted
            del placed
            gc.collect()


def test_placing_without_room_raises_with_bytes() -> None:
    with (
        graphplan.simulate({0: 4096}),
        pytest.raises(graphplan.SimulatedOutOfMemoryError, match=r"8\.0 KiB"),
    ):
        Arena(torch.device("sim:0"), 8192)


def test_planned_bytes_are_measured_bytes() -> None:
    with placed_model() as (placed, model, machine):
        gc.collect()
        assert {n for n, key in placed.plan.placement.items() if key != 0} <= {"empty"}  # nobody reads it
        assert machine.live_bytes(0) == placed.plan.peaks[0].weights
        assert machine.live_bytes(0) < bytes_of(model) + 512 * len(placed.plan.graph.weights)
        assert placed.tied.weight is placed.first.weight
        assert largest_difference(placed(X), model(X)) < 1e-5
        assert_same(placed, model)


def test_every_weight_has_a_separate_storage() -> None:
    with placed_model() as (placed, _, machine):
        found = storages(placed)
        assert len({storage.data_ptr() for storage in found}) == len(found)
        tensors = [t for t in (*placed.parameters(), *placed.buffers()) if t.numel()]
        for tensor, storage in zip(tensors, found, strict=True):
            assert storage.nbytes() == tensor.numel() * tensor.element_size()
        low = min(storage.data_ptr() for storage in found)
        assert all((storage.data_ptr() - low) % 512 == 0 for storage in found)
        assert max(storage.data_ptr() for storage in found) - low < machine.live_bytes(0)


def loading_peak(machine: SimulatedMachine, budgets: Any, **options: Any) -> tuple[Any, int]:
    machine.reset_peaks()
    placed = graphplan.partition(max_memory=budgets, args=(X,), **options)
    return placed, machine.peak_bytes(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.5, 3.0])
def test_loading_never_takes_more_than_the_plan(share: float, dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]).eval()
    save_file({n: t.to(dtype) for n, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    empty = copy.deepcopy(model).to("meta")
    budgets = {0: int(share * bytes_of(model)), "cpu": 1 << 30}
    with graphplan.simulate(budgets) as machine:
        for options in ({"model": model}, {"model": empty, "checkpoint": str(tmp_path)}):
            placed, peak = loading_peak(machine, budgets, cpu_compute=False, **options)
            assert 0 < peak <= placed.plan.peak_bytes[0] <= budgets[0]
            assert bool(placed.plan.schedule.prefetch_buffers) == (share < 1)
            assert largest_difference(placed(X), model(X)) < 1e-5
            del placed
            gc.collect()


def in_an_arena(model: nn.Module) -> nn.Module:
    """A copy whose weights are ordinary tensors in an arena, as on a GPU."""
    copied = copy.deepcopy(model)
    tensors = [*copied.parameters(), *copied.buffers()]
    arena = Arena(torch.device("cpu"), sum(round_up(t.numel() * t.element_size()) for t in tensors))
    for tensor in tensors:
        tensor.data = arena.reserve(tensor.detach()).copy_(tensor.detach())
    return copied


def test_safetensors_saves_state_dict_and_model(tmp_path: Path) -> None:
    with placed_model() as (placed, model, _):
        state = {name: tensor.cpu().contiguous() for name, tensor in placed.state_dict().items()}
        save_file({n: t for n, t in state.items() if n != "tied.weight"}, tmp_path / "file.safetensors")
    ours = in_an_arena(model)
    ours.turned = nn.Parameter(ours.turned.detach().contiguous())  # safetensors wants that of anyone
    save_model(ours, str(tmp_path / "model.safetensors"))
    for name in ("file", "model"):
        saved = load_file(tmp_path / f"{name}.safetensors")
        assert "tied.weight" not in saved or "first.weight" not in saved
        for key, tensor in saved.items():
            assert torch.equal(tensor, model.state_dict()[key]), key
    other = Layered()
    other.turned = nn.Parameter(other.turned.detach().contiguous())
    load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(other.last.weight, model.last.weight)


def test_saving_one_weight_writes_that_weight() -> None:
    with placed_model() as (placed, model, _):
        file = io.BytesIO()
        torch.save(placed.first.bias, file)
        assert len(file.getvalue()) < 3000
        file.seek(0)
        assert torch.equal(torch.load(file), model.first.bias)
        file = io.BytesIO()
        torch.save(placed.state_dict(), file)
        assert len(file.getvalue()) < bytes_of(model) + 1024 * (3 + len(model.state_dict()))


def test_copies_are_independent() -> None:
    with placed_model() as (placed, model, machine):
        live = machine.live_bytes(0)
        model_copy = copy.deepcopy(placed)
        with torch.no_grad():
            for parameter in model_copy.parameters():
                parameter.zero_()
        assert_same(placed, model)
        assert largest_difference(placed(X), model(X)) < 1e-5
        assert model_copy.tied.weight is model_copy.first.weight
        assert not model_copy(X).abs().sum()
        del model_copy, parameter
        gc.collect()
        assert machine.live_bytes(0) == live


class Writing(nn.Module):
    """Batch norms in training, and buffers that calls write to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(4))
        self.register_buffer("cache", torch.zeros(64, 32))
        self.register_buffer("calls", torch.zeros(16, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, (linear, norm) in enumerate(zip(self.linears, self.norms, strict=True)):
            x = torch.relu(norm(linear(x)))
            if index == 1:
                self.cache[:8] = x
            if index == 2:
                self.calls.add_(1)
                x = x + self.cache[:8] * self.calls[:8]
        return x


@pytest.mark.parametrize(
    "budgets",
    [
        pytest.param({0: 21035, 1: 10517, "cpu": 21035}, marks=pytest.mark.slow),
        {0: 23226, 1: 23226},
        pytest.param({0: 24979, 1: 12489, "cpu": 15119}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.full_search
def test_tight_placement_is_repeated_after_pickling(budgets: dict) -> None:
    x = torch.randn(8, 32)
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(Writing().train(), machine.max_memory, (x,))
        data, homes = pickle.dumps(placed), placed.plan.schedule.assignment.weights
        del placed
        gc.collect()
        again = pickle.loads(data)
        expected = Writing().train()(x)
        assert torch.allclose(again(x), expected, atol=1e-6)
        assert again.plans[0].schedule.assignment.weights == homes


def test_pickled_modules_are_placed_again() -> None:
    with placed_model() as (placed, model, machine):
        data = pickle.dumps(placed)
        assert len(data) < 4 * bytes_of(model) + 200_000
        live = machine.live_bytes(0)
        del placed
        gc.collect()
        assert machine.live_bytes(0) == 0
        again = pickle.loads(data)
        assert largest_difference(again(X), model(X)) < 1e-5
        gc.collect()
        assert machine.live_bytes(0) == live == again.plan.peaks[0].weights
        assert again.tied.weight is again.first.weight


def test_load_state_dict_writes_in_place() -> None:
    other = Layered().eval()
    with placed_model() as (placed, _, machine):
        live, places = machine.live_bytes(0), [s.data_ptr() for s in storages(placed)]
        placed.load_state_dict(other.state_dict())
        placed.unsaved.copy_(other.unsaved)
        assert [s.data_ptr() for s in storages(placed)] == places
        gc.collect()
        assert machine.live_bytes(0) == live
        assert largest_difference(placed(X), other(X)) < 1e-5


def test_share_memory_raises_with_advice() -> None:
    with graphplan.simulate({0: 1 << 20, "cpu": 1 << 30}) as machine:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
        placed = graphplan.partition(model, machine.max_memory, (X,), pin={"0.weight": "cpu"})
        with pytest.raises(graphplan.PlanError, match="share those of the plain one"):
            placed.share_memory()
        assert graphplan.unplace(placed).share_memory()[0].weight.is_shared()


def test_unplaced_model_uses_no_accelerator_memory() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    with placed_model(model) as (placed, _, machine):
        live = machine.live_bytes(0)
        plain = graphplan.unplace(placed)
        assert machine.live_bytes(0) == live
        del placed
        gc.collect()
        assert largest_difference(plain(X), model(X)) < 1e-5


def test_unplaced_parameters_over_one_memory_stay_shared() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    model[1].weight = nn.Parameter(model[0].weight.data)
    with placed_model(model) as (placed, _, _):
        plain = graphplan.unplace(placed)
        assert plain[0].weight is not plain[1].weight
        assert plain[0].weight.data_ptr() == plain[1].weight.data_ptr()


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_conjugate_view_is_a_separate_weight() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=torch.cfloat) for _ in range(2)))
    model[1].weight = nn.Parameter(model[0].weight.data.conj())
    x = torch.randn(2, 4, dtype=torch.cfloat)
    with graphplan.simulate({0: "1MiB", "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        torch.testing.assert_close(placed(x), model(x))
        torch.testing.assert_close(graphplan.unplace(placed)(x), model(x))


def test_transformers_finds_ties_and_saves_placed_models(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.pytorch_utils import id_tensor_storage

    config = transformers.GPT2Config(vocab_size=80, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.arange(6)[None]
    with graphplan.simulate({0: 1 << 20, "cpu": 1 << 30}) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": ids})
        assert {p.device.type for p in placed.parameters()} == {"sim"}
        parameters = list(placed.parameters())
        assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)
        assert len({id_tensor_storage(p) for p in parameters}) == len(parameters)
        placed.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert largest_difference(dict(again.state_dict()), dict(model.state_dict())) == 0
