"""Tensors in attributes of parameters, as in bitsandbytes: they are placed with the parameters."""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import largest_difference
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import graphplan
from graphplan.capture.model.model_weights import ModelWeights

SIZE = 64
X = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0))
ROOMY = 1 << 20


class Scales:
    """Nested objects, as libraries keep them."""

    def __init__(self, rows: torch.Tensor, inner: Scales | None = None) -> None:
        self.rows, self.inner = rows, inner


class Noted(nn.Parameter):
    """Quantised bytes, with the scales in attributes."""

    def tripled(self) -> torch.Tensor:
        return 3 * self


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        whole = torch.randint(-127, 127, (SIZE, SIZE), generator=draw).to(torch.int8)
        self.weight: Any = Noted(whole, requires_grad=False)
        self.weight.scales = Scales(
            torch.rand(SIZE, 1, generator=draw), Scales(torch.rand(1, generator=draw))
        )
        self.weight.layer, self.weight.steps = self, 127

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = self.weight.scales
        return x @ (self.weight.to(x.dtype) / self.weight.steps * scales.rows * scales.inner.rows).T


class Stack(nn.Module):
    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        self.layers, self.branches = nn.ModuleList(map(Layer, range(6))), branches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return -x if self.branches and int(x.shape[0] + 0 * x.sum()) < 0 else x


def devices_of_notes(model: nn.Module) -> set[str]:
    found = set()
    for layer in model.layers:  # type: ignore[union-attr]  # of Stack
        scales = layer.weight.scales
        assert layer.weight.layer is layer
        found |= {str(scales.rows.device), str(scales.inner.rows.device)}
    return found


@pytest.mark.parametrize("budget", [ROOMY, 48 << 10])
def test_attribute_tensors_are_weights_of_the_graph(budget: int) -> None:
    model, want = Stack(), Stack()(X)
    with graphplan.simulate({0: budget}) as machine:
        placed = graphplan.partition(
            model, {**machine.max_memory, "cpu": ROOMY}, (X,), strict=True, cpu_compute=False
        )
        names = {"layers.0.weight.scales.rows", "layers.5.weight.scales.inner.rows"}
        assert placed.plan.placement.keys() >= {"layers.0.weight", *names}
        assert largest_difference(placed(X), want) < 1e-5
        assert largest_difference(placed(X[:2]), Stack()(X[:2])) < 1e-5
        assert placed.plan.peak_bytes[0] >= machine.peak_bytes(0) > 0
        plain = graphplan.unplace(placed)
        assert devices_of_notes(plain) == {"cpu"}
        assert largest_difference(plain(X), want) < 1e-5
        assert "sim:0" in devices_of_notes(placed)
        streamed = placed.plan.schedule.prefetch_buffers
        assert bool(streamed) == (budget < ROOMY)
    assert devices_of_notes(model) == {"cpu"}
    assert torch.equal(model(X), want)


def test_bound_code_reads_replaced_attribute_tensors() -> None:
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = graphplan.partition(Stack(), machine.max_memory, (X,))
        placed(X)
        (code,) = vars(placed)["_graphplan"].codes.values()
        assert code.bound.binding.function is not None
        zeros = torch.zeros(SIZE, 1, device="sim:0")
        placed.layers[0].weight.scales.rows = zeros
        assert not placed(X).cpu().any()


@pytest.mark.slow
def test_model_without_graph_moves_attribute_tensors() -> None:
    model, want = Stack(branches=True), Stack()(X)
    for budget in (ROOMY, 6 * SIZE * SIZE // 2):
        with graphplan.simulate({0: budget}) as machine:
            with pytest.warns(graphplan.GraphplanWarning, match="could not be traced"):
                placed = graphplan.partition(model, {**machine.max_memory, "cpu": ROOMY}, (X,))
            assert largest_difference(placed(X), want) < 1e-5
            assert largest_difference(graphplan.unplace(placed)(X), want) < 1e-5
    assert devices_of_notes(model) == {"cpu"}


def test_attribute_tensors_move_with_the_weights() -> None:
    model, many = Stack(), X.repeat(200, 1)
    with graphplan.simulate({0: 4 * SIZE * SIZE + 3 * many.nbytes, 1: ROOMY}) as machine:
        placed = graphplan.partition(model, {0: machine.max_memory[0], "cpu": ROOMY}, (X,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", graphplan.GraphplanWarning)
            assert largest_difference(placed(many), Stack()(many)) < 1e-5
        assert largest_difference(placed(X), Stack()(X)) < 1e-5


def test_parameter_keeps_class_and_copies_attributes() -> None:
    model = Stack()
    placed = graphplan.partition(model, {"cpu": ROOMY}, (X,))
    weight, own = placed.layers[0].weight, model.layers[0].weight
    assert type(weight) is Noted
    assert weight.tripled().shape == own.shape
    assert weight.scales is not own.scales
    assert weight.steps == 127


@pytest.mark.parametrize("branches", [False, True])
def test_placed_at_first_call_keeps_parameter_objects(branches: bool) -> None:
    with graphplan.simulate({0: ROOMY}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        placed = graphplan.partition(Stack(branches=branches), machine.max_memory)
        weight = placed.layers[0].weight
        assert largest_difference(placed(X), Stack()(X)) < 1e-5
        assert placed.layers[0].weight is weight
        assert devices_of_notes(placed) == {"sim:0"}


class Remembers(nn.Module):
    """A layer with another attribute over the memory of its weight, as bitsandbytes' 8-bit layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE))
        self.state = Scales(self.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.state.rows
        return x @ self.weight


def test_attribute_shared_with_a_weight_stays_shared() -> None:
    model = nn.Sequential(Remembers(), Remembers())
    with graphplan.simulate({0: ROOMY}) as machine:
        with pytest.warns(graphplan.GraphplanWarning, match="module by module"):
            placed = graphplan.partition(model, machine.max_memory, (X,))
        assert largest_difference(placed(X), model(X)) < 1e-5
        plain = graphplan.unplace(placed)
        for part, device in ((placed[0], "sim:0"), (plain[0], "cpu")):
            assert str(part.weight.device) == str(part.state.rows.device) == device
            assert part.state.rows.untyped_storage().data_ptr() == part.weight.untyped_storage().data_ptr()
        assert plain[0].weight.data_ptr() != model[0].weight.data_ptr()


def test_attribute_tensors_go_to_their_parameters_machine() -> None:
    plan = graphplan.plan(Stack(), machines=[{0: 60 << 10}] * 2, args=(X,))
    assert len(plan.stages) == 2
    for stage in plan.stages:
        names = stage.plan.placement.keys()
        own = {name for name in names if name.endswith("weight")}
        noted = {f"{name}.scales{inner}.rows" for name in own for inner in ("", ".inner")}
        assert names == own | noted


def test_attribute_tensor_of_two_machines_raises() -> None:
    model: Any = Stack()
    model.layers[5].weight.scales.rows = model.layers[0].weight.scales.rows
    with pytest.raises(graphplan.PlanError, match=r"layers\.0\.weight\.scales\.rows.*another stage"):
        graphplan.plan(model, machines=[{0: 60 << 10}] * 2, args=(X,))


def test_uncopyable_attribute_is_shared_with_warning() -> None:
    model = Stack()
    model.layers[2].weight.lock = lock = (i for i in range(3))
    with graphplan.simulate({0: ROOMY}) as machine:
        with pytest.warns(graphplan.GraphplanWarning, match=r"layers\.2\.weight\.lock"):
            placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        assert placed.layers[2].weight.lock is lock
        assert largest_difference(placed(X), Stack()(X)) < 1e-5


def test_attribute_tensors_are_in_saved_traces(tmp_path: Path) -> None:
    for _ in range(2):
        with graphplan.simulate({0: ROOMY}) as machine:
            placed = graphplan.partition(Stack(), machine.max_memory, (X,), capture_cache=tmp_path)
            assert largest_difference(placed(X), Stack()(X)) < 1e-5
    assert len(list(tmp_path.iterdir())) == 1


class Scaled(nn.Module):
    """A layer that reads more than tensors from its parameter."""

    def __init__(self, seed: int, factor: float = 1.0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight: Any = nn.Parameter(torch.rand(SIZE, SIZE, generator=draw) / SIZE)
        self.weight.factor, self.weight.calls, self.weight.shift = factor, 0, [torch.zeros(SIZE)]
        self.weight.scales = Scales(torch.rand(SIZE, generator=draw))
        self.weight.scales.power = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, scales = self.weight, self.weight.scales
        return x @ weight * weight.factor * scales.rows**scales.power + weight.shift[0].to(x.device)


def stack(*factors: float, of: type[nn.Module] = Scaled) -> nn.Module:
    return nn.Sequential(*(of(index, factor) for index, factor in enumerate(factors)))


class Multiplied(nn.Module):
    def __init__(self, seed: int, factor: float) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weight: Any = nn.Parameter(torch.rand(SIZE, SIZE, generator=draw) / SIZE)
        self.weight.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight * self.weight.factor


def test_blocks_with_different_attributes_are_traced_separately() -> None:
    model = Stack()
    model.layers = nn.ModuleList(stack(1, 1, 1, 3, 1, 1, of=Multiplied))
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        assert largest_difference(placed(X), model(X)) < 1e-5


def test_saved_trace_requires_equal_attributes(tmp_path: Path) -> None:
    for factor in (1.0, 3.0):
        model = stack(factor)
        placed = graphplan.partition(model, {"cpu": ROOMY}, (X,), capture_cache=tmp_path)
        assert largest_difference(placed(X), model(X)) < 1e-5


def _set_factor(weight: Any) -> None:
    weight.factor = 3.0


def _set_power(weight: Any) -> None:
    weight.scales.power = 2


def _write_to_a_list(weight: Any) -> None:
    weight.shift[0].add_(1.0)


def _replace_object(weight: Any) -> None:
    weight.scales = copy.copy(weight.scales)
    weight.scales.power = 3


@pytest.mark.parametrize("change", [_set_factor, _set_power, _write_to_a_list, _replace_object])
def test_changed_parameter_attribute_is_retraced(change: Any) -> None:
    model = stack(1, 1)
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        for part in (placed, model):
            change(part[0].weight)  # type: ignore[index]
        with pytest.warns(graphplan.GraphplanWarning, match=r"'0\.weight\..* is traced again"):
            found = placed(X)
        assert largest_difference(found, model(X)) < 1e-5


def test_shared_attribute_tensor_may_become_unshared() -> None:
    model = stack(1, 1)
    model[1].weight.scales.rows = model[0].weight.scales.rows  # type: ignore[index]
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        placed[1].weight.scales.rows = torch.zeros(SIZE, device="sim:0")  # type: ignore[index]
        with pytest.warns(graphplan.GraphplanWarning, match="the memory of"):
            assert not placed(X).cpu().any()


def test_functional_call_weights_need_no_attributes() -> None:
    model = nn.Linear(SIZE, SIZE)
    for parameter in model.parameters():
        parameter.is_loaded = True  # type: ignore[attr-defined]
    placed = graphplan.partition(model, {"cpu": ROOMY}, (X,))
    doubled = {name: 2 * one.detach() for name, one in model.named_parameters()}
    for found in (placed, model):
        found.twice = torch.func.functional_call(found, doubled, (X,)).detach()  # type: ignore[assignment]
    assert largest_difference(placed.twice, model.twice) < 1e-5


class Counts(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.calls += 1
        self.weight.scales.rows += 1.0
        return super().forward(x) * self.weight.calls


@pytest.mark.parametrize("budget", [ROOMY, 5 * SIZE * SIZE])
def test_attributes_set_by_a_call_persist(budget: int) -> None:
    model, eager = (stack(1, 1, of=Counts) for _ in range(2))
    locked = (i for i in range(3))  # cannot be copied
    model[1].weight.lock = locked  # type: ignore[index]
    with graphplan.simulate({0: budget}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        placed = graphplan.partition(model, {**machine.max_memory, "cpu": ROOMY}, (X,))
        for _ in range(3):
            assert largest_difference(placed(X), eager(X)) < 1e-3
    assert model[0].weight.calls == 0  # type: ignore[index]


@pytest.mark.parametrize("mode", ["train", "grad"])
def test_trained_attribute_tensor_gets_a_gradient(mode: str) -> None:
    model, eager = stack(1), stack(1)
    with graphplan.simulate({0: ROOMY}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        for part in (model, eager):
            part[0].weight.scales.rows.requires_grad_()  # type: ignore[index]
        placed = graphplan.partition(model, machine.max_memory, (X,), **{mode: True})
        for part in (placed, eager):
            part(X).sum().backward()
        mine, theirs = (part[0].weight.scales.rows.grad for part in (placed, eager))  # type: ignore[index]
        assert largest_difference(mine.cpu(), theirs) < 1e-4


def test_cyclic_objects_in_attributes_are_searched_once() -> None:
    model, objects = stack(1), [Scales(torch.zeros(1)) for _ in range(40)]
    for index, one in enumerate(objects):
        one.first, one.second = objects[index - 1], objects[index - 2]  # type: ignore[attr-defined]
    model[0].weight.net = objects[0]  # type: ignore[index]
    assert len(ModelWeights(model).parameter_attributes) == 41


def test_uncopyable_attributes_warn_once() -> None:
    model = stack(1, 1, 1)
    for part in model:
        part.weight.lock = threading.Lock()
    with pytest.warns(graphplan.GraphplanWarning, match=r"'0\.weight\.lock' and 2 more \(lock\)") as told:
        graphplan.partition(model, {"cpu": ROOMY}, (X,))
    assert len(told) == 1


@pytest.fixture
def quantised(tmp_path: Path) -> Any:
    """A quantised Llama, as ``from_pretrained`` builds it."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 128)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    config = LlamaConfig(vocab_size=200, num_hidden_layers=1, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(tmp_path)

    def load(bits: int, **options: Any) -> LlamaForCausalLM:
        config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, **options)
        found = LlamaForCausalLM.from_pretrained(
            tmp_path, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
        )
        return found.eval()

    return load


IDS = torch.arange(2, 20).reshape(2, 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nested", "called"),
    [
        (False, True),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(True, True, marks=pytest.mark.slow),
    ],
)
def test_four_bit_model_equals_reference(quantised: Any, nested: bool, called: bool) -> None:
    options = {"bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": torch.float32}
    model, reference = (quantised(4, **options) for _ in range(2))
    asked = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    with torch.no_grad():
        want = reference(**asked).logits
        tokens = reference.generate(**asked, max_new_tokens=4, do_sample=False)
        if called:  # on a CPU that has such a kernel, weights are packed then
            model(**asked)
    with graphplan.simulate({0: 180 << 10, 1: 280 << 10}) as machine:
        budgets = {**machine.max_memory, "cpu": 1 << 30}
        options = {"strict": True, "max_length": 16}
        placed = graphplan.partition(model, budgets, kwargs={**asked, "use_cache": False}, **options)
        with torch.no_grad():
            # a CPU's own kernel has its scales in 16 bits
            assert largest_difference(placed(**asked, use_cache=False).logits, want) < 0.05
            assert torch.equal(placed.generate(**asked, max_new_tokens=4, do_sample=False).cpu(), tokens)
        assert placed.state_dict().keys() == reference.state_dict().keys()
    with torch.no_grad():
        assert largest_difference(model(**asked).logits, want) < 0.05


@pytest.mark.slow
def test_eight_bits_run_module_by_module(quantised: Any) -> None:
    model = quantised(8)
    with torch.no_grad():
        want = copy.deepcopy(model)(IDS).logits
        with graphplan.simulate({0: 1 << 20}) as machine:
            budgets = {**machine.max_memory, "cpu": 1 << 30}
            with pytest.warns(graphplan.GraphplanWarning, match="module by module"):
                placed = graphplan.partition(model, budgets, (IDS,))
            assert largest_difference(placed(IDS).logits, want) < 1e-5
            assert placed.model.layers[0].mlp.up_proj.state.CB.device.type == "sim"
        assert largest_difference(model(IDS).logits, want) < 1e-5
