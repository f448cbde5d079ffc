"""What calls do beside computing, and how they run without a graph, on a real GPU: ``pytest -m gpu``."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphplan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH = 2048
CLOSE = 1e-3  # kernels of a GPU add in another order
X = torch.linspace(-1, 1, 16 * WIDTH).reshape(16, WIDTH)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    torch.manual_seed(0)
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before
    gc.collect()
    torch.cuda.empty_cache()


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


def half_on_the_gpu(model: nn.Module, activations: int = 8 << 20) -> dict[Any, int]:
    """Half of the weights, and what a call and the workspaces of cuBLAS take; the CPU has the rest."""
    return {0: bytes_of(model) // 2 + activations + (80 << 20), "cpu": 64 << 30}


def peak_of(work: Any) -> tuple[Any, int]:
    """A result, and the most bytes allocated on the GPU."""
    torch.cuda.synchronize(0)
    torch.cuda.reset_peak_memory_stats(0)
    result = work()
    torch.cuda.synchronize(0)
    return result, torch.cuda.max_memory_allocated(0)


class Keeps(nn.Module):
    """Fills a list and a dict that it is given, and counts its calls in a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = layers(24), torch.zeros(())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor], state: dict[str, Any]) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            seen.append(x)
        self.calls += 1
        self.last = x.mean() + self.last
        state["mean"], state["calls"] = x.mean(0), state.get("calls", 0) + 1
        return x


@torch.no_grad()
def test_changed_state_equals_eager() -> None:
    model = Keeps().eval()
    placed = graphplan.partition(copy.deepcopy(model), half_on_the_gpu(model), (X, [], {}))
    for _ in range(3):
        (seen, state), (own_seen, own_state) = ([], {"calls": 2}), ([], {"calls": 2})
        found, expected = placed(X, own_seen, own_state), model(X, seen, state)
        assert largest_difference(found, expected) < CLOSE
        assert len(own_seen) == len(seen)
        assert largest_difference(own_seen, seen) < CLOSE
        assert own_state["calls"] == state["calls"]
        assert largest_difference(own_state["mean"], state["mean"]) < CLOSE
    assert float(placed.calls) == float(model.calls)
    assert largest_difference(placed.last.cpu(), model.last) < CLOSE


class Stores(nn.Module):
    """Stores the result of each layer, a loss, and a state that the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.state = layers(24), torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = torch.tanh(self.state + x.mean(0))
        self.results = []
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.state
            self.results.append(x)
        self.loss = x.square().mean()
        return x


@torch.no_grad()
def test_stored_tensors_stay_on_the_gpu_within_the_budget() -> None:
    model = Stores().eval()
    eager, budgets = copy.deepcopy(model), half_on_the_gpu(model)
    placed = graphplan.partition(model, budgets, (X,), strict=True, cpu_compute=False)
    placed(X), eager(X)  # allocates the workspaces of cuBLAS
    for scale in (1.0, 0.5):
        result, peak = peak_of(lambda scale=scale: placed(scale * X))
        assert largest_difference(result, eager(scale * X)) < CLOSE
        assert peak <= budgets[0]
        for found, expected in zip(placed.results, eager.results, strict=True):
            assert found.is_cuda
            assert largest_difference(found.cpu(), expected) < CLOSE
        assert largest_difference(placed.state.cpu(), eager.state) < CLOSE
        assert largest_difference(placed.loss, eager.loss) < CLOSE


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(*layers(12)), nn.Sequential(*layers(12))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(x)
        return found

    def until_small(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encode(x)
        while float(x.abs().max()) > 0.1:
            x = x / 2
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.decoder(self.encode(x))
        return found


@torch.no_grad()
def test_methods_run_over_the_weights_where_they_are() -> None:
    model = Autoencoder().eval()
    placed = graphplan.partition(model, half_on_the_gpu(model), (X,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        for name in ("encode", "until_small", "forward"):
            assert largest_difference(getattr(placed, name)(X), getattr(model, name)(X)) < CLOSE
    assert largest_difference(placed.encoder(X), model.encoder(X)) < CLOSE


class ForCpu(nn.Module):
    """Written for the CPU: it makes and keeps tensors there, and its values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mask = layers(24), torch.rand(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.mask
            if float(x.abs().max()) > 1e6:
                break
        return x + torch.arange(WIDTH) * 1e-3


@torch.no_grad()
def test_code_for_the_cpu_runs_over_the_gpu() -> None:
    model = ForCpu().eval()
    budgets = half_on_the_gpu(model)
    with pytest.warns(graphplan.GraphplanWarning, match="the model runs module by module"):
        placed = graphplan.partition(model, budgets, (X,))
    assert {weight.device.type for weight in placed.parameters()} == {"cpu", "cuda"}
    for rows in (16, 4):
        found, peak = peak_of(lambda rows=rows: placed(X[:rows]))
        assert largest_difference(found, model(X[:rows])) < CLOSE
        assert peak <= budgets[0]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_budgets_that_would_do_have_room_for_the_workspaces() -> None:
    model = ForCpu().eval()
    with pytest.raises(graphplan.InfeasibleError) as caught:
        graphplan.partition(model, {0: "1MiB"}, (X,))
    placed = graphplan.partition(model, caught.value.needed, (X,))
    assert largest_difference(placed(X), model(X)) < CLOSE


class Forces(nn.Module):
    """Energies of positions, and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(3, WIDTH), layers(8), nn.Linear(WIDTH, 1)

    def forward(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            positions = positions.clone().requires_grad_()
            x = torch.tanh(self.first(positions))
            for layer in self.layers:
                x = torch.tanh(layer(x))
            energy = self.last(x).sum()
            (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return {"energy": energy, "forces": -forces}


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_gradients_flow_through_forces() -> None:
    model, positions = Forces(), torch.randn(64, 3)
    placed = graphplan.partition(
        copy.deepcopy(model), half_on_the_gpu(model, 64 << 20), (positions,), grad=True
    )
    for each in (placed, model):
        found = each(positions)
        (found["energy"] + found["forces"].square().sum()).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for name, weight in placed.named_parameters():
        expected = gradients[name]
        assert (weight.grad is None) == (expected is None), name
        if weight.grad is not None and expected is not None:
            assert largest_difference(weight.grad.cpu(), expected) < CLOSE * (1 + float(expected.abs().max()))


class Experts(nn.Module):
    """Each row goes to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 24), layers(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            result.index_add_(0, rows, expert(x[rows]))
        return result


@torch.no_grad()
def test_sizes_that_values_decide_are_within_the_plan() -> None:
    model, x = Experts().eval(), torch.randn(2048, WIDTH)
    budgets = half_on_the_gpu(model, 64 << 20)
    placed = graphplan.partition(model, budgets, (x,))
    before = torch.cuda.memory_allocated(0)
    for given in (x, torch.randn(2048, WIDTH), x[:1].expand(2048, -1).contiguous()):
        found, peak = peak_of(lambda given=given: placed(given))
        assert largest_difference(found, model(given)) < CLOSE
        assert peak - before + sum(w.nbytes for w in placed.parameters() if w.is_cuda) <= budgets[0]


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded"])
def test_a_llama_generates_as_in_eager_mode(cache: str) -> None:
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(0, 500, (2, 24))
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    eager = copy.deepcopy(model).to("cuda:0")
    expected = eager.generate(
        ids.to("cuda:0"), cache_implementation=cache, disable_compile=True, **options
    ).cpu()
    placed = graphplan.partition(
        model, half_on_the_gpu(model, 32 << 20), kwargs={"input_ids": ids}, max_length=64
    )
    assert torch.equal(placed.generate(ids, cache_implementation=cache, **options), expected)


def test_training_step_with_streamed_weights() -> None:
    """BatchNorm's statistics change once a step; weights that stay on the CPU have their gradients there."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layers = nn.BatchNorm1d(WIDTH), layers(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    model, x = Step().train(), torch.randn(256, WIDTH)
    needed = graphplan.plan(model, {0: "64GiB"}, (x,), train=True, optimizer=torch.optim.AdamW).peak_bytes[0]
    budgets = {0: int(0.7 * needed) + (70 << 20), "cpu": 64 << 30}
    placed = graphplan.partition(copy.deepcopy(model), budgets, (x,), train=True, optimizer=torch.optim.AdamW)
    optimizers = {each: torch.optim.AdamW(each.parameters(), lr=1e-4) for each in (placed, model)}

    def step(each: nn.Module) -> float:
        optimizers[each].zero_grad(set_to_none=True)
        loss = each(x)
        loss.backward()
        optimizers[each].step()
        return float(loss.detach())

    for _ in range(3):
        (found, peak), expected = peak_of(lambda: step(placed)), step(model)
        assert abs(found - expected) < CLOSE * max(1.0, abs(expected))
        assert peak <= budgets[0]
    for (name, kept), expected_one in zip(placed.named_buffers(), model.buffers(), strict=True):
        assert largest_difference(kept.cpu().float(), expected_one.float()) < CLOSE, name
