"""Properties of device maps: those of accelerate's own tests, and others."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import OrderedDict
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import check_device_map
from accelerate.utils.modeling import find_tied_parameters
from architectures import TABLE
from builders import largest_difference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from versions import needs

import graphplan
from graphplan import infer_auto_device_map
from graphplan.integrations.accelerate.module_packing import Block, pack, spill
from graphplan.runtime.simulate.simulated_tensor import SimulatedTensor


class Small(nn.Module):
    """236 bytes: 64, 72, 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


def three() -> nn.Sequential:
    names = ("layer1", "layer2", "layer3")
    return nn.Sequential(OrderedDict((name, Small()) for name in names))


def device_of(found: dict[str, Any], name: str) -> Any:
    while name not in found:
        assert name, found
        name = name.rpartition(".")[0]
    return found[name]


def tensors_on(model: nn.Module, found: dict[str, Any]) -> dict[Any, dict[int, int]]:
    """Device -> each tensor once, with its bytes."""
    placed: dict[Any, dict[int, int]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        placed.setdefault(device_of(found, name), {})[id(tensor)] = tensor.nbytes
    return placed


def used(model: nn.Module, found: dict[str, Any]) -> dict[Any, int]:
    return {device: sum(sizes.values()) for device, sizes in tensors_on(model, found).items()}


def largest_offloaded(model: nn.Module, found: dict[str, Any]) -> int:
    own = [
        sum(p.nbytes for p in module.parameters(recurse=False))
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
        and device_of(found, name + "." + next(iter(module._parameters))) in ("cpu", "disk")
    ]
    return max(own, default=0)


def check(model: nn.Module, budgets: dict[Any, int], found: dict[str, Any], main: Any = 0) -> None:
    check_device_map(model, found)
    taken = used(model, found)
    for device, nbytes in taken.items():
        if device in budgets:
            reserve = largest_offloaded(model, found) if device == main else 0
            assert nbytes + reserve <= budgets[device], (device, found)
    for group in find_tied_parameters(model):
        assert len({device_of(found, name) for name in group}) == 1


@needs("accelerate", "1.2", "there is no fallback_allocation=")
def test_signature_equals_accelerate() -> None:
    theirs = inspect.signature(accelerate.infer_auto_device_map).parameters
    ours = inspect.signature(infer_auto_device_map).parameters
    assert list(ours) == list(theirs)
    assert {name: p.default for name, p in ours.items()} == {name: p.default for name, p in theirs.items()}


def test_fitting_model_is_neither_offloaded_nor_split() -> None:
    model = Small()
    assert infer_auto_device_map(model, {0: 236}) == {"": 0}
    found = infer_auto_device_map(model, {0: 200, 1: 200})
    check(model, {0: 200, 1: 200}, found)
    assert found == {"linear1": 0, "batchnorm": 0, "linear2": 1}
    assert infer_auto_device_map(model, {0: 200, 1: 172, 2: 200}) == found
    model.linear1.weight = model.linear2.weight
    assert infer_auto_device_map(model, {0: 200, 1: 200}) == {"": 0}


def test_models_are_split_at_layers_or_given_classes() -> None:
    model = nn.Sequential(Small(), Small(), Small())
    budgets = {0: 500, 1: 500}
    found = infer_auto_device_map(model, budgets)
    check(model, budgets, found)
    assert set(found.values()) == {0, 1}
    whole = infer_auto_device_map(model, budgets, no_split_module_classes=["Small"])
    check(model, budgets, whole)
    assert whole == {"0": 0, "1": 0, "2": 1}


def buffered(*more: str) -> nn.Module:
    model = Small()
    for name, rows in {"linear1": 2, "batchnorm": 3, "linear2": 3, **dict.fromkeys(more, 2)}.items():
        if name in more:
            setattr(model, name, nn.Linear(4, 5))
        getattr(model, name).register_buffer("table", torch.zeros(10, rows))
    return model


LITERAL = [  # accelerate's tests, what accelerate makes of them, and what graphplan does
    (Small, {0: 200, 1: 200}, {}, {"linear1": 0, "batchnorm": 1, "linear2": 1}, {"batchnorm": 0}),
    (Small, {0: 200, 1: 172, 2: 200}, {}, {"linear1": 0, "batchnorm": 1, "linear2": 1}, {"batchnorm": 0}),
    (three, {0: 500, 1: 500}, {}, {"layer2.linear1": 0, "layer2.linear2": 1}, {"layer2": 0}),
    (
        three,
        {0: 500, 1: 500},
        {"no_split_module_classes": ["Small"]},
        {"layer1": 0, "layer2": 1, "layer3": 1},
        {"layer1": 0, "layer2": 0, "layer3": 1},
    ),
    (buffered, {0: 400, "cpu": 10**9}, {}, {"linear1": 0, "batchnorm": "cpu"}, {"": "cpu"}),
    (
        lambda: buffered("linear3"),
        {0: 400, 1: 400, "cpu": 10**9},
        {},
        {"batchnorm": 1, "linear2": "cpu", "linear3": "cpu"},
        {"batchnorm": 0, "linear2": 1, "linear3": 1},
    ),
    (
        lambda: buffered("linear3"),
        {0: 400, 1: 200, "cpu": 10**9},
        {},
        {"linear1": 0},
        {"linear1": "cpu", "batchnorm": 1},
    ),
]


@pytest.mark.parametrize(("make", "budgets", "options", "theirs", "ours"), LITERAL)
def test_device_maps_of_the_readme(make: Any, budgets: Any, options: Any, theirs: Any, ours: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = accelerate.infer_auto_device_map(make(), dict(budgets), **options)
        found = infer_auto_device_map(make(), dict(budgets), **options)
    assert theirs.items() <= known.items()
    assert ours.items() <= found.items()


def test_no_split_classes_may_be_a_single_name() -> None:
    model, budgets = nn.Sequential(Small(), Small(), Small()), {0: 500, 1: 500}
    listed = infer_auto_device_map(model, budgets, no_split_module_classes=["Small"])
    assert infer_auto_device_map(model, budgets, no_split_module_classes="Small") == listed


@pytest.mark.parametrize("ties", [1, 2, 3])
def test_tied_weights_stay_together(ties: int) -> None:
    model = three()
    model.layer3.linear2.weight = model.layer1.linear2.weight
    if ties > 1:
        model.layer2.linear2.weight = model.layer1.linear2.weight
    if ties > 2:
        model.layer2.linear1.weight = model.layer1.linear1.weight
    budgets = {0: 400, 1: 500}
    found = infer_auto_device_map(model, budgets)
    check(model, budgets, found)
    assert set(found.values()) <= {0, 1}


def test_ties_within_one_module() -> None:
    model = nn.Sequential(
        OrderedDict(
            linear1=nn.Linear(4, 4), linear2=nn.Linear(6, 6), linear3=nn.Linear(4, 4), linear4=nn.Linear(6, 6)
        )
    )
    model.linear3.weight, model.linear3.bias = model.linear1.weight, model.linear1.bias
    found = infer_auto_device_map(model, {0: 250, 1: 400})
    check(model, {0: 250, 1: 400}, found)
    assert found["linear1"] == found["linear3"] == 0
    assert "cpu" not in found.values()


class Reference(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.max(self.parameter)


class LinearWithReference(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 8)
        self.weight_submodule = Reference(self.weight)


def test_tied_modules_with_a_common_name_prefix() -> None:
    model = nn.Module()
    model.compute, model.compute1 = LinearWithReference(), LinearWithReference()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # entries of parameters, which no module has
        found = infer_auto_device_map(model, {0: 4, "cpu": 96000})
        check(model, {0: 4, "cpu": 96000}, found)
    assert set(found.values()) == {"cpu"}


@pytest.mark.parametrize("limit", [500, 550, 600])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_buffers_are_placed_and_counted(limit: int, offload_buffers: bool) -> None:
    model = Small()
    model.linear1.register_buffer("extra1", torch.zeros(10, 2))
    model.batchnorm.register_buffer("extra2", torch.zeros(10, 4))
    model.linear2.register_buffer("extra3", torch.zeros(10, 3))
    budgets = {0: limit, "cpu": 10_000}
    found = infer_auto_device_map(model, budgets, offload_buffers=offload_buffers)
    check(model, budgets, found)
    if not offload_buffers:  # they stay on the accelerator, whatever the map says
        kept = sum(b.nbytes for name, b in model.named_buffers() if device_of(found, name) == "cpu")
        assert used(model, found).get(0, 0) + kept + largest_offloaded(model, found) <= limit


def test_buffers_that_fit_no_accelerator_warn() -> None:
    model = Small()
    model.linear1.register_buffer("extra", torch.zeros(100))
    with pytest.warns(UserWarning, match="440 bytes .* offload_buffers=True"):
        found = infer_auto_device_map(model, {0: 400, "cpu": 10_000})
    assert found == {"": "cpu"}


def test_direct_buffers_of_split_modules_are_mapped() -> None:
    model = nn.Sequential(Small(), Small())
    model[0].register_buffer("own", torch.zeros(3))
    for limit in (100, 150, 200, 300):
        found = infer_auto_device_map(model, {0: limit, "cpu": 10_000})
        covered = [name for name in model.state_dict() if device_of(found, name) is not None]
        assert len(covered) == len(model.state_dict())


def test_accelerator_is_used_if_first_module_does_not_fit() -> None:
    inner = OrderedDict(linear1=nn.Linear(10, 4), linear2=nn.Linear(4, 4), linear3=nn.Linear(4, 8))
    model = nn.Sequential(OrderedDict(module=nn.Sequential(inner)))
    budgets = {0: 256, "cpu": 1000}
    found = infer_auto_device_map(model, budgets)
    check(model, budgets, found)
    theirs = accelerate.infer_auto_device_map(model, dict(budgets))
    assert used(model, found).get(0, 0) > used(model, theirs).get(0, 0)


def test_modules_beyond_all_memory_go_to_disk() -> None:
    model = Small()
    found = infer_auto_device_map(model, {0: 0, "cpu": 172}, offload_buffers=True)
    assert used(model, found) == {"cpu": 64, "disk": 172}  # room for what passes through on its way
    assert infer_auto_device_map(model, {0: 0, "cpu": 300}, offload_buffers=True) == {"": "cpu"}


def test_dtypes_change_the_sizes() -> None:
    model = Small()
    half = infer_auto_device_map(model, {0: 130}, dtype=torch.float16)
    assert half == {"": 0}
    assert infer_auto_device_map(model, {0: 130, "cpu": 1000}) != half
    special = {"linear2.weight": torch.float32, "linear2.bias": "float32"}
    wide = infer_auto_device_map(model, {0: 130, "cpu": 1000}, dtype="float16", special_dtypes=special)
    assert wide != half


def test_uncleaned_maps_list_every_block(capsys: Any) -> None:
    found = infer_auto_device_map(Small(), {0: 236}, clean_result=False, verbose=True)
    assert found == {"linear1": 0, "batchnorm": 0, "linear2": 0}
    assert "Putting 'linear2' (size=100) on 0." in capsys.readouterr().out


def test_main_accelerator_equals_that_of_hooks() -> None:
    model = three()
    for keys in ((1, 8), (8, 1), (0, 3)):
        budgets = {**dict.fromkeys(keys, 300), "cpu": 10_000}
        main = next(iter(set(keys)))
        check(model, budgets, infer_auto_device_map(model, budgets), main)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=12),
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
)
def test_packings_keep_their_limits(sizes: list[int], capacities: list[int]) -> None:
    blocks = [Block((str(i),), size, size) for i, size in enumerate(sizes)]
    places = pack(blocks, capacities)
    left = [b.loaded for b, place in zip(blocks, places, strict=True) if place is None]
    for device, capacity in enumerate(capacities):
        taken = sum(s for s, p in zip(sizes, places, strict=True) if p == device)
        reserve = max(left, default=0) if device == 0 and taken else 0
        assert taken + reserve <= capacity


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=10), st.integers(2, 3), st.data())
def test_packable_blocks_are_packed(sizes: list[int], devices: int, data: Any) -> None:
    drawn = [data.draw(st.integers(0, devices - 1)) for _ in sizes]
    capacities = [sum(s for s, p in zip(sizes, drawn, strict=True) if p == d) for d in range(devices)]
    places = pack([Block((str(i),), size, size) for i, size in enumerate(sizes)], capacities)
    assert None not in places


def test_spilling_keeps_room_for_streamed_blocks() -> None:
    blocks = {i: Block((str(i),), size, size) for i, size in enumerate((50, 30, 20))}
    assert spill(blocks, 100) == {0, 1, 2}
    assert spill(blocks, 99) == {1}


# -- with the hooks ---------------------------------------------------------------------------------------


def architecture(stem: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    (row,) = [a for a in TABLE if a.stem == stem]
    return row.build()


def on_simulated(found: dict[str, Any]) -> dict[str, Any]:
    return {name: key if isinstance(key, str) else f"sim:{key}" for name, key in found.items()}


def run_there(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    with torch.no_grad():
        return model(**inputs).logits.to("cpu")


@pytest.mark.parametrize("stem", ["Llama", "GPT2", "Bert", "T5", "ViT"])
def test_accelerate_runs_our_maps(stem: str) -> None:
    model, inputs = architecture(stem)
    with torch.no_grad():
        expected = model(**inputs).logits
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    budgets = {0: int(0.75 * size), 1: int(0.75 * size), "cpu": 10 * size}
    classes = list(model._no_split_modules or ())
    found = infer_auto_device_map(model, dict(budgets), no_split_module_classes=classes)
    assert "cpu" not in found.values()
    with graphplan.simulate({0: "1GiB", 1: "1GiB"}):
        placed = accelerate.dispatch_model(copy.deepcopy(model), on_simulated(found), main_device="sim:0")
        on_sim = {name: tensor.to("sim:0") for name, tensor in inputs.items()}
        assert largest_difference(run_there(placed, on_sim), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["ViT", "GPT2", "Llama", "T5"])
@pytest.mark.full_search
def test_plan_device_map_works_in_dispatch_and_from_pretrained(
    stem: str, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # simulated devices are those of one thread
    transformers.logging.disable_progress_bar()
    model, inputs = architecture(stem)
    with torch.no_grad():
        expected = model(**inputs).logits
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    plan = graphplan.plan(model, {0: int(0.7 * size), "cpu": 10 * size + (1 << 26)}, kwargs=inputs)
    found = plan.device_map()
    check_device_map(model, found)
    model.save_pretrained(tmp_path)
    with graphplan.simulate({0: "1GiB"}):
        on_sim = {name: tensor.to("sim:0") for name, tensor in inputs.items()}
        ours = accelerate.dispatch_model(copy.deepcopy(model), on_simulated(found), main_device="sim:0")
        # the hooks look for ties by address, which is 0 for a wrapper
        monkeypatch.setattr(SimulatedTensor, "data_ptr", lambda self: self.elem.data_ptr())
        theirs = type(model).from_pretrained(tmp_path, device_map=on_simulated(found))
        for placed in (ours, theirs):
            assert largest_difference(run_there(placed, on_sim), expected) < 1e-5


@pytest.mark.slow
def test_given_device_map_is_kept() -> None:
    (architecture,) = [one for one in TABLE if one.stem == "Llama"]
    model, inputs = architecture.build()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, warnings.catch_warnings():
        warnings.simplefilter("error")
        budgets = machine.max_memory | {"cpu": 1 << 30}
        for devices in (
            {"": 1},
            {
                "model.embed_tokens": 0,
                "model.layers.0": 0,
                "model.layers.1": "cpu",
                "model.norm": 1,
                "lm_head": 0,
            },
        ):
            placed = graphplan.partition(model, budgets, kwargs=inputs, pin=devices)
            for name, key in placed.plan.placement.items():
                if not name.startswith("model.rotary_emb"):  # which that map leaves out
                    assert key == device_of(devices, name), name
            with torch.no_grad():
                assert largest_difference(placed(**inputs), model(**inputs)) < 1e-5
