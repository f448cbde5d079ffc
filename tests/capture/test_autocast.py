"""Graphs contain the casts of autocast, and no autocast blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphplan
from graphplan.capture.autocast import write_casts
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.tracers.export_loop import export
from tests.helpers.builders import largest_difference

X = torch.randn(2, 8)


class Mixed(nn.Module):
    """Blocks of all kinds: off, of a type, one in another, around a convolution, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
            y = y + nn.functional.scaled_dot_product_attention(y[None], x[None], x[None])[0]
            with torch.autocast("cpu", enabled=False):
                z = self.norm(y.float() * 2)
            z = torch.cat([z, self.first(z)], -1)
        return torch.softmax(self.last(z[:, :8] + y), -1)


def exported(model: nn.Module, *args: torch.Tensor) -> fx.GraphModule:
    return torch.export.export(model, args).graph_module


def printed(module: fx.GraphModule) -> list[str]:
    kinds = {torch.float32: "f32", torch.bfloat16: "bf16"}
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return [f"{node.name}: {kinds[node.meta['val'].dtype]}" for node in calls]


def test_casts_equal_those_of_autocast() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(x)) + x

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        module = exported(Two(), X)
    write_casts(module, {"p_linear_weight", "p_linear_bias"}, torch.bfloat16, ["cpu"])
    # each weight once, and no cast of what is of the type already
    assert printed(module) == [
        "to_dtype: bf16",
        "to_dtype_1: bf16",
        "to_dtype_2: bf16",
        "linear: bf16",
        "linear_1: bf16",
        "add: f32",
    ]


def test_composite_operations_are_cast_whole() -> None:
    """einsum casts inside, to the result dtype of its arguments."""

    class Contracts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ab,bc->ac", x.exp(), x.T @ x)

    model = Contracts()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), graphplan.simulate({0: "1MiB"}) as machine:
        found, expected = graphplan.partition(model, machine.max_memory, (X,))(X), model(X)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert largest_difference(found, expected) == 0


def test_losses_have_autocast_dtype() -> None:
    """Regression: nll_loss, composite and computed in float32, was cast to the lower dtype."""

    class Loss(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = (x @ x.T).bfloat16()
            return nn.functional.nll_loss(logits, torch.arange(len(x)))

    model = Loss()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        found, expected = placed(X), model(X)
    assert found.dtype == expected.dtype == torch.float32
    assert largest_difference(found, expected) == 0


def test_operations_whose_kernels_need_symbolic_sizes_are_cast() -> None:
    """For example baddbmm of Bloom: its fake kernel runs as in an export."""

    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.baddbmm(x[:, :1], x, y)

    model, x = Adds(), torch.randn(3, 8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), graphplan.simulate({0: "1MiB"}) as machine:
        found, expected = graphplan.partition(model, machine.max_memory, (x, x))(x, x), model(x, x)
    assert found.dtype == expected.dtype
    assert largest_difference(found, expected) == 0


def test_values_after_a_cast_have_its_dtype() -> None:
    module = exported(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), X)  # traced without autocast
    write_casts(module, set(), torch.bfloat16, ["cpu"])
    assert printed(module)[-2:] == ["linear: bf16", "relu: bf16"]


def test_autocast_blocks_for_other_devices_have_no_effect() -> None:
    class OnCuda(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return x @ x.T

    model = OnCuda()
    with pytest.warns(UserWarning, match="CUDA is not available"):
        program = export(ModelCopy(model), (X,), {}, None, keep_grad=False)
    module = program.graph_module
    write_casts(module, set(), None, ["cpu"])
    assert all(line.endswith("f32") for line in printed(module))


@pytest.mark.parametrize("ambient", [None, torch.bfloat16, torch.float16])
def test_blocks_compute_as_in_eager_mode(ambient: torch.dtype | None) -> None:
    model = Mixed()
    # one kernel everywhere: torch 2.14 has another on the CPU than on a simulated device
    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
        torch.autocast("cpu", ambient, enabled=ambient is not None),
    ):
        expected = model(X)
        with graphplan.simulate({0: "1MiB"}) as machine:
            placed = graphplan.partition(model, machine.max_memory, (X,))
            found = placed(X)
            assert machine.peak_bytes(0) == placed.plan.peak_bytes[0]
    assert found.dtype == expected.dtype
    assert largest_difference(found, expected) == 0


def test_call_under_autocast_has_its_own_graph() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with torch.no_grad(), graphplan.simulate({0: 4096, "cpu": "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,))
        for autocast in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found, expected = placed(X), model(X)
            assert found.dtype == expected.dtype
            assert largest_difference(found, expected) < (1e-2 if autocast else 1e-6)
        assert len(placed.plans) == 2
        types = {value.dtype for value in placed.plans[1].graph.values.values()}
        assert "bfloat16" in types


@pytest.mark.slow
def test_autocast_without_graph_on_simulated_devices_raises() -> None:
    model, x = nn.GRU(8, 8), torch.randn(3, 2, 8)  # its hidden state is not cast
    with torch.no_grad(), graphplan.simulate({0: "1MiB"}) as machine:
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(graphplan.CaptureError, match=r"aten\.gru[\s\S]*simulated devices do not support"),
        ):
            graphplan.partition(model, machine.max_memory, (x,))
        placed = graphplan.partition(model, machine.max_memory, (x,))
        assert largest_difference(placed(x), model(x)) < 1e-6


class WithoutGradient(nn.Module):
    """Blocks of autocast and of ``no_grad`` in one another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            z = self.second(x)
        with torch.autocast("cpu", torch.bfloat16):
            u = self.first(y)
            with torch.no_grad():
                v = self.second(u) + self.second(x)
        return y * z.float() + u * v.float()


@pytest.mark.parametrize("keeps", ["grad", "train"])
def test_blocks_without_gradients(keeps: str) -> None:
    model = WithoutGradient()
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,), **{keeps: True})
        found, expected = placed(X), model(X)
        found.sum().backward()
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0] or keeps == "grad"
        gradients = [None if one.grad is None else one.grad.cpu() for one in placed.parameters()]
        found = found.cpu()
    expected.sum().backward()
    assert largest_difference(found, expected) == 0
    assert largest_difference(gradients, [one.grad for one in model.parameters()]) == 0


class Off(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.second(y.float())


def test_a_step_under_autocast_has_its_casts_once() -> None:
    model = Off()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.autocast("cpu", torch.bfloat16):
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,), train=True)
        found, expected = placed(X).cpu(), model(X)
    assert largest_difference(found, expected) == 0


class Alternates(nn.Module):
    """Blocks of one class, every other one under another autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            with torch.autocast("cpu", torch.bfloat16 if number % 2 else torch.float16):
                x = block(x.float())
        return x


def test_copied_block_uses_autocast_of_its_call() -> None:
    model = Alternates()
    with torch.no_grad(), graphplan.simulate({0: "1MiB"}) as machine:
        assert largest_difference(graphplan.partition(model, machine.max_memory, (X,))(X), model(X)) == 0


def test_branches_under_autocast_have_no_graph() -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x @ x.T, lambda x: x @ x.T + 1, (x,))

    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(graphplan.NoGraphError, match="autocast"),
    ):
        graphplan.partition(Decides(), {"cpu": "1MiB"}, (X,), strict=True)
