"""Quantised weights, and models with adapters."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Mapping
from typing import Any

import peft
import pytest
import torch
from architectures import TABLE
from builders import largest_difference
from torch import nn
from torch.utils import _pytree as pytree

import graphplan
from graphplan.capture.model.model_weights import tensor_bytes

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
aten = torch.ops.aten


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Scaled(torch.Tensor):
    """The least that a quantised weight is: whole numbers and a scale."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, device=whole.device)

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], _: None, __: Any, ___: Any) -> Scaled:
        return Scaled(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return Scaled(*(func(t) for t in (args[0].whole, args[0].scale)))
        plain = pytree.tree_map_only(cls, lambda t: t.whole.to(t.scale.dtype) * t.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def scaled(linear: nn.Linear) -> None:
    scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
    whole = (linear.weight.detach() / scale).round().to(torch.int8)
    linear.weight = nn.Parameter(Scaled(whole, scale), requires_grad=False)


def hand_made() -> Mlp:
    model = Mlp().eval()
    scaled(model.up)
    scaled(model.down)
    return model


def by_torchao(config: Any) -> Any:
    def make() -> Mlp:
        model = Mlp().eval()
        quantization.quantize_(model, config)
        return model

    return make


KINDS = {
    "by hand": (hand_made, 1),
    "int8": (by_torchao(quantization.Int8WeightOnlyConfig()), 1),
    "int4": (by_torchao(quantization.IntxWeightOnlyConfig(torch.int4)), 1),
    "float8": (by_torchao(quantization.Float8WeightOnlyConfig()), 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_count_their_true_bytes_and_run(kind: str) -> None:
    make, itemsize = KINDS[kind]
    model = make()
    with torch.no_grad():
        expected = model(X)
    count = 2 * 64 * 128 * itemsize
    assert count <= sum(map(tensor_bytes, model.parameters())) < 1.5 * count
    with graphplan.simulate({0: 120_000, 1: 120_000, "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,))
        true = sum(map(tensor_bytes, model.parameters()))
        assert true <= placed.plan.graph.weight_bytes <= true + 4 * 512  # allocated tensor by tensor
        assert {placed.plan.device_of("up.weight"), placed.plan.device_of("down.weight")} <= {0, 1}
        assert type(placed.up.weight) is type(model.up.weight)
        machine.reset_peaks()
        assert largest_difference(placed(X), expected) < 1e-5
        assert all(machine.peak_bytes(i) <= placed.plan.peak_bytes[i] <= 120_000 for i in (0, 1))
        assert set(placed.state_dict()) == set(model.state_dict())
        del placed
        gc.collect()


def test_quantised_weights_without_accelerator_memory_run_on_cpu() -> None:
    model = hand_made()
    with graphplan.simulate({0: 8_000, "cpu": "1GiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,))
        assert placed.plan.device_of("up.weight") == "cpu"
        assert largest_difference(placed(X), model(X).detach()) < 1e-5
        with pytest.raises(graphplan.InfeasibleError):
            graphplan.partition(model, machine.max_memory, (X,), cpu_compute=False)


class Unwrapped(Scaled):
    """One whose copy is a plain tensor, as of optimum-quanto: ``copy.deepcopy`` does not take it."""

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], _: None, __: Any, ___: Any) -> Scaled:
        return Unwrapped(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return Unwrapped(args[0].whole.detach(), args[0].scale.detach())
        if func in (aten.clone.default, aten.alias.default):
            return func(args[0].whole.to(args[0].scale.dtype) * args[0].scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


def unwrapped() -> Mlp:
    model = hand_made()
    for linear in (model.up, model.down):
        weight: Any = linear.weight
        linear.weight = nn.Parameter(Unwrapped(weight.whole, weight.scale), requires_grad=False)
    return model


def test_tensor_wrappers_that_cannot_be_deepcopied() -> None:
    model = unwrapped()
    with torch.no_grad():
        expected = model(X)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    with graphplan.simulate({0: 120_000}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        assert type(placed.up.weight) is Unwrapped
        assert largest_difference(placed(X), expected) < 1e-5
        plain = graphplan.unplace(placed)
        assert plain.up.weight.device.type == "cpu"
        with torch.no_grad():
            assert torch.equal(plain(X), expected)
    assert torch.equal(model(X), expected)


class Twice(nn.Module):
    """Reads one quantised weight at both ends of a stack that no device holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied = nn.Linear(64, 64)
        self.between = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        scaled(self.tied)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.between(self.tied(x)))


def test_readers_of_a_quantised_weight_run_on_its_device() -> None:
    model = Twice().eval()
    with graphplan.simulate({0: 96 << 10, 1: 96 << 10}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,))
        assert set(placed.plan.placement.values()) == {0, 1}
        assert largest_difference(placed(X), model(X)) < 1e-5
        first, last = placed.plan.graph.readers["tied.weight"]
        with pytest.raises(graphplan.PlanError, match=r"contradict each other: .* must share a device"):
            graphplan.partition(model, machine.max_memory, (X,), pin={first: 0, last: 1})


@pytest.mark.slow
def test_a_quantised_llama() -> None:
    (architecture,) = [a for a in TABLE if a.stem == "Llama"]
    model, inputs = architecture.build()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        expected = model(**inputs)
    total = 2 * sum(map(tensor_bytes, {id(p): p for p in model.parameters()}.values()))
    budgets = {0: total, 1: total, "cpu": 1 << 26}
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        machine.reset_peaks()
        assert largest_difference(placed(**inputs), expected) < 1e-5
        assert all(machine.peak_bytes(i) <= placed.plan.peak_bytes[i] <= total for i in (0, 1))
        assert {stage.device for stage in placed.plan.stages} & {0, 1}


# -- adapters ---------------------------------------------------------------------------------------------


def adapted() -> tuple[Any, dict[str, torch.Tensor]]:
    (architecture,) = [a for a in TABLE if a.stem == "Llama"]
    model, inputs = architecture.build()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval(), inputs


class Quantising(Mlp):
    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        scale = found.detach().abs().amax() / 127
        return Scaled((found / scale).round().to(torch.int8), scale)


def test_tensor_subclass_created_in_forward_is_not_traced() -> None:
    """Regression: it became a constant of the trace: planning raised TypeError, or results were fakes."""
    model = Quantising().eval()
    with torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match=r"forward makes a Scaled[\s\S]*module by module"):
            placed = graphplan.partition(model, {"cpu": "1GiB"}, (X,))
        found, expected = placed(X), model(X)
    assert type(found) is Scaled
    assert torch.equal(found.whole, expected.whole)
    assert torch.equal(found.scale, expected.scale)


@pytest.mark.slow
@pytest.mark.parametrize("accelerators", [1, 2])
def test_a_model_with_lora(accelerators: int) -> None:
    model, inputs = adapted()
    with torch.no_grad():
        expected = model(**inputs)
    size = sum(p.nbytes for p in model.parameters())
    budgets = {**{i: int(0.7 * size) for i in range(accelerators)}, "cpu": 1 << 26}
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        assert isinstance(placed, peft.PeftModel)
        machine.reset_peaks()
        assert largest_difference(placed(**inputs), expected) < 1e-5
        assert any("lora_A" in name for name in placed.plan.placement)
        found, want = peft.get_peft_model_state_dict(placed), peft.get_peft_model_state_dict(model)
        assert {n: t.cpu().tolist() for n, t in found.items()} == {n: t.tolist() for n, t in want.items()}


@pytest.mark.slow
def test_adapters_can_be_switched_after_placement() -> None:
    model, inputs = adapted()
    other = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter("other", other)
    model.eval()
    with graphplan.simulate({0: "4MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        assert largest_difference(placed(**inputs), model(**inputs)) < 1e-5
        with placed.disable_adapter(), model.disable_adapter():
            plain = model(**inputs)
            assert largest_difference(placed(**inputs), plain) < 1e-5
        assert largest_difference(placed(**inputs), model(**inputs)) < 1e-5
        assert largest_difference(plain, model(**inputs)) > 1e-3
        assert len(placed.plans) == 2  # and the first serves again
        for each in (placed, model):
            each.set_adapter("other")
        assert largest_difference(placed(**inputs), model(**inputs)) < 1e-5
        for each in (placed, model):
            each.merge_adapter()
        assert largest_difference(placed(**inputs), model(**inputs)) < 1e-5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers that the adapter is not in
            for each in (placed, model):
                each.unmerge_adapter()
        assert largest_difference(placed(**inputs), model(**inputs)) < 1e-5
        for each in (placed, model):
            torch.manual_seed(3)
            each.add_adapter("late", other)
            each.set_adapter("late")
        with pytest.warns(graphplan.GraphplanWarning, match="traced again"):
            assert largest_difference(placed(**inputs), model(**inputs)) < 1e-5


@pytest.mark.slow
def test_merged_and_disabled_adapters() -> None:
    model, inputs = adapted()
    merged = copy.deepcopy(model).merge_and_unload()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(merged, machine.max_memory, kwargs=inputs)
        assert largest_difference(placed(**inputs), merged(**inputs)) < 1e-5
        with model.disable_adapter():
            plain = graphplan.partition(model, machine.max_memory, kwargs=inputs)
            assert largest_difference(plain(**inputs), model(**inputs)) < 1e-5
