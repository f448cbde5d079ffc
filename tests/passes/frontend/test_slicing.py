"""Weights that no accelerator holds: sliced by rows, partly resident, partly streamed."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import KIB, bytes_of, run_placed
from safetensors.torch import save_file
from shortcuts import short_search
from torch import nn

import graphplan
from graphplan.capture.captured_graph import Capture, Part
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.tracing import capture
from graphplan.compiler.compile_state import in_parts
from graphplan.compiler.formulation import Member
from graphplan.passes.frontend.simplify import simplify
from graphplan.passes.frontend.slicing import is_sliceable, slice_weights

ROWS, WIDTH = 2048, 64
WHOLE = ROWS * WIDTH * 4
FAST = {(0, "cpu"): graphplan.Link(1e12, 1e-7), ("cpu", 0): graphplan.Link(1e12, 1e-7)}
NARROW = {(0, "cpu"): graphplan.Link(1e9, 1e-7), ("cpu", 0): graphplan.Link(1e9, 1e-7)}
SLOW = {(0, "cpu"): graphplan.Link(1e8, 1e-3), ("cpu", 0): graphplan.Link(1e8, 1e-3)}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Head(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=bias)

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        x = torch.relu(self.body(x))
        return self.head(self.body(x)) if twice else self.head(x)


class Language(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids))))


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    return float((result - expected).detach().abs().max() / expected.detach().abs().max())


def budgets(nbytes: int) -> dict[int | str, int]:
    return {0: nbytes, "cpu": 1 << 30}


def sliced_names(plan: graphplan.Plan) -> set[str]:
    return {part.part_of for part in plan.graph.parts}


def check(
    model: nn.Module,
    args: tuple[Any, ...],
    memory: Mapping[int | str, int],
    expect: set[str],
    further: tuple[tuple[Any, ...], ...] = (),
    **options: Any,
) -> Any:
    """Place and run a model, and compare results with eager mode and bytes with the plan."""
    with graphplan.simulate(memory) as machine:
        placed = graphplan.partition(model, memory, args=args, **options)
        placed.plan.verify()
        assert sliced_names(placed.plan) == expect
        for given in (args, *further):
            assert relative(run_placed(machine, placed, given), model(*given)) <= 1e-6
        assert list(placed.state_dict()) == list(model.state_dict())
    return placed


# -- the pass alone -------------------------------------------------------------------------------


def captured(model: nn.Module, *args: Any) -> Capture:
    model_copy = ModelCopy(model)
    made = capture(model_copy, model_copy.bind(args, {}))
    simplify(made)
    return made


def printed(made: Capture) -> list[str]:
    return [node.format_node() for node in made.graph.nodes if node.op == "call_function"]


def test_linear_before_and_after() -> None:
    before = captured(Head(), numbers(2, WIDTH))
    assert is_sliceable(before, "head.weight")
    after = slice_weights(before, [Part("head.weight", 0, 1000), Part("head.weight", 1000, ROWS)])
    assert "linear.default](args = (%relu, %p_head_weight, %p_head_bias)" in printed(before)[-1]
    lines = [line.split("torch.ops.aten.")[1] for line in printed(after)[2:]]
    assert lines == [
        "slice.Tensor](args = (%p_head_bias, -1, 0, 1000), kwargs = {})",
        "linear.default](args = (%relu, %p_head_weight_rows_0, %linear_1_bias_0), kwargs = {})",
        "slice.Tensor](args = (%p_head_bias, -1, 1000, 2048), kwargs = {})",
        "linear.default](args = (%relu, %p_head_weight_rows_1000, %linear_1_bias_1000), kwargs = {})",
        "cat.default](args = ([%linear_1_rows_0, %linear_1_rows_1000], -1), kwargs = {})",
    ]
    assert after.weights["p_head_weight_rows_0"] == "head.weight[0:1000]"
    assert "p_head_weight" not in after.weights
    assert "p_head_weight" in before.weights  # the capture that went in is as it was
    assert Part.named("head.weight[1000:2048]") == Part("head.weight", 1000, ROWS)
    assert Part.named("head.weight") is None


def test_embedding_before_and_after() -> None:
    before = captured(Language(tied=False), torch.zeros(1, 3, dtype=torch.long))
    parts = [Part("embed.weight", at, at + 512) for at in range(0, ROWS, 512)]
    after = slice_weights(before, parts)
    called = [node.target._opname for node in after.graph.nodes if node.op == "call_function"]
    first = ["clamp", "embedding"]
    assert called[: 2 + 6 * 3] == first + ["sub", "clamp", "embedding", "ge", "unsqueeze", "where"] * 3
    assert [n.meta["val"].shape for n in after.graph.nodes if n.name.startswith("embedding_joined")] == [
        (1, 3, WIDTH)
    ] * 3


class Products(nn.Module):
    """Every supported reader of rows of a weight, and some unsupported ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(96, 16))
        self.bias = nn.Parameter(torch.randn(96))
        self.conv = nn.Conv2d(16, 96, 1)
        self.grouped = nn.Conv2d(16, 96, 1, groups=2)
        self.whole = nn.Parameter(torch.randn(96, 16))

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x @ self.weight.t(),
            torch.matmul(x, self.weight.transpose(-1, -2)),
            torch.mm(x, self.weight.T),
            torch.addmm(self.bias, x, self.weight.mT),
            self.conv(image),
            self.conv(image[0]),
            self.grouped(image),
            self.whole * 2,
        )


def test_convolutions_and_products_with_a_transposed_weight() -> None:
    model, inputs = Products().eval(), (numbers(5, 16), numbers(2, 16, 4, 4))
    before = captured(model, *inputs)
    assert not is_sliceable(before, "grouped.weight")
    assert not is_sliceable(before, "whole")
    assert not is_sliceable(before, "nothing")
    names = ("weight", "conv.weight")
    assert all(is_sliceable(before, name) for name in names)
    parts = [Part(name, at, at + 32) for name in names for at in range(0, 96, 32)]
    after = slice_weights(before, parts)
    tensors = dict(model.named_parameters())
    env: list[torch.Tensor] = []
    for node in after.graph.nodes:
        if node.op == "placeholder" and node.name in after.weights:
            name = after.weights[node.name]
            part = Part.named(name)
            env.append(tensors[part.weight][part.start : part.stop] if part else tensors[name])
    results = torch.fx.Interpreter(after.module).run(*env, *inputs)
    for result, expected in zip(results, model(*inputs), strict=True):
        assert relative(result, expected) <= 1e-6


# -- linear ---------------------------------------------------------------------------------------


SHAPES = ((WIDTH,), (4, WIDTH), (2, 3, WIDTH))
LINEARS = [
    pytest.param(share, shape, bias, marks=[pytest.mark.slow] * (share != 0.3 or bias == (len(shape) == 2)))
    for share, shape, bias in itertools.product((0.3, 0.6, 0.9), SHAPES, (True, False))
]


@pytest.mark.parametrize(("share", "shape", "bias"), LINEARS)
def test_a_linear_larger_than_the_accelerator(share: float, shape: tuple[int, ...], bias: bool) -> None:
    memory = budgets(int(share * WHOLE) + 140 * KIB if share < 0.6 else int(share * WHOLE))
    placed = check(Head(bias=bias), (numbers(*shape),), memory, {"head.weight"}, cpu_compute=False)
    plan = placed.plan
    assert plan.placement["head.weight"] == "cpu"
    assert placed.head.weight.device.type == "cpu"
    assert placed.head.weight.shape == (ROWS, WIDTH)
    assert set(plan.placement) == set(dict(placed.named_parameters()))
    assert {stage.device for stage in plan.stages} == {0}
    assert plan.graph.weight_bytes == bytes_of(Head(bias=bias))
    assert "sliced     head.weight, 512.0 KiB in" in plan.summary()
    assert plan.device_of("head.weight") == "cpu"
    assert plan.stage_of("head.weight").device == 0


def test_resident_in_part_and_streamed_in_part() -> None:
    options = {"cpu_compute": False, "links": NARROW}
    placed = check(Head(), (numbers(4, WIDTH),), budgets(WHOLE), {"head.weight"}, **options)
    plan = placed.plan
    homes = list(plan.parts.values())
    assert homes.count(0) > 0
    assert homes.count("cpu") > 0
    assert 0 < plan.streamed_bytes < WHOLE
    resident = sum(part.nbytes for part in plan.graph.parts if plan.parts[part.name] == 0)
    assert resident + plan.streamed_bytes == WHOLE
    # the whole is on the CPU, and what is kept on the accelerator is a copy of some of it
    whole = plan.graph.weights["head.weight"]
    assert whole.nbytes == 0
    assert plan.peaks["cpu"].weights == WHOLE
    assert plan.peak_bytes[0] > 0.9 * WHOLE
    assert ".current(" in placed.code
    assert "torch.narrow(" in placed.code
    again = graphplan.Plan.from_json(plan.to_json())
    assert again.parts == plan.parts
    assert again.peak_bytes == plan.peak_bytes


def test_two_accelerators_hold_all_parts() -> None:
    memory = {0: int(0.7 * WHOLE), 1: int(0.7 * WHOLE), "cpu": 1 << 30}
    options = {"cpu_compute": False, "links": NARROW}
    placed = check(Head(bias=False), (numbers(4, WIDTH),), memory, {"head.weight"}, **options)
    assert set(placed.plan.parts.values()) == {0, 1}
    assert placed.plan.streams == ()


def test_a_batch_of_any_size() -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    options = {"cpu_compute": False, "dynamic_shapes": {"x": {0: batch}, "twice": None}}
    further = tuple((numbers(size, WIDTH),) for size in (1, 8))
    memory = budgets(int(0.7 * WHOLE))
    with graphplan.simulate(memory) as machine:
        model = Head()
        placed = graphplan.partition(
            model, memory, kwargs={"x": numbers(4, WIDTH), "twice": False}, **options
        )
        assert sliced_names(placed.plan) == {"head.weight"}
        for (x,) in further:
            machine.reset_peaks()
            assert relative(placed(x=x, twice=False), model(x)) <= 1e-6
            assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0] <= memory[0]
        assert len(placed.plans) == 1


# -- embedding ------------------------------------------------------------------------------------


def table(*shape: int) -> torch.Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
def test_an_embedding_larger_than_the_accelerator(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, padding_idx=3), nn.Linear(WIDTH, 8))
    ids = torch.cat([table(2, 3), torch.tensor([[0, ROWS - 1, 3], [1023, 1024, 1025]])]).to(dtype)
    check(model, (ids,), budgets(WHOLE), {"0.weight"}, cpu_compute=False)


@pytest.mark.parametrize("wrong", [ROWS, -1])
def test_an_index_that_is_out_of_range_is_refused(wrong: int) -> None:
    with graphplan.simulate(budgets(WHOLE)) as machine:
        model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 8))
        placed = graphplan.partition(model, machine.max_memory, args=(table(2, 3),), cpu_compute=False)
        assert sliced_names(placed.plan) == {"0.weight"}
        with pytest.raises(IndexError):
            placed(torch.full((2, 3), wrong))


def test_a_tied_head_shares_the_parts() -> None:
    placed = check(
        Language(tied=True), (table(2, 5),), budgets(WHOLE), {"embed.weight"}, cpu_compute=False, links=FAST
    )
    plan = placed.plan
    assert placed.head.weight is placed.embed.weight
    assert plan.placement["head.weight"] == plan.placement["embed.weight"] == "cpu"
    read = {name for op in plan.graph.operations.values() for name in op.inputs}
    assert {part.name for part in plan.graph.parts} <= read
    assert plan.graph.weight_bytes == bytes_of(Language(tied=True))


def test_an_embedding_and_a_head_that_are_not_tied() -> None:
    weights = {"embed.weight", "head.weight"}
    check(Language(tied=False), (table(2, 5),), budgets(WHOLE), weights, cpu_compute=False)


# -- by cost --------------------------------------------------------------------------------------


def test_nothing_is_sliced_if_the_cpu_is_faster() -> None:
    memory = budgets(int(0.7 * WHOLE))
    slow = check(Head(), (numbers(4, WIDTH),), memory, set(), links=SLOW)
    assert slow.plan.device_of("head") == "cpu"


def test_faster_accelerator_computes_sliced_weight() -> None:
    memory = budgets(WHOLE)
    model = Head()
    x = numbers(16, WIDTH)
    fast = check(model, (x,), memory, {"head.weight"}, links=FAST)
    with graphplan.simulate(memory):
        whole = graphplan.plan(model, memory, args=(x,), links=FAST, pin={"head.weight": "cpu"})
    assert fast.plan.makespan < whole.makespan
    assert fast.plan.lower_bound <= fast.plan.makespan


def test_table_is_not_sliced_if_the_cpu_may_read() -> None:
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 8))
    placed = check(model, (table(2, 3),), budgets(WHOLE), set(), links=FAST)
    assert placed.plan.stages[0].device == "cpu"


def test_together_keeps_parts_of_one_module_on_one_device() -> None:
    memory = {0: int(0.7 * WHOLE), 1: int(0.7 * WHOLE), "cpu": 1 << 30}
    options = {"cpu_compute": False, "links": NARROW, "together": ["head"]}
    placed = check(Head(bias=False), (numbers(4, WIDTH),), memory, {"head.weight"}, **options)
    device = placed.plan.schedule.assignment.operations
    assert len({key for name, key in device.items() if name.startswith("linear_1_")}) == 1


def test_head_without_room_for_layers_is_sliced() -> None:
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(24))  # three quarters of the head
    model, x = nn.Sequential(*layers, nn.Linear(WIDTH, ROWS, bias=False)), numbers(16, WIDTH)
    memory = budgets(WHOLE + 17 * ROWS * 4)
    links = {(0, "cpu"): graphplan.Link(5e10, 1e-7)}
    placed = check(model, (x,), memory, {"24.weight"}, links=links)
    with graphplan.simulate(memory):
        whole = graphplan.plan(model, memory, args=(x,), links=links, pin={"24.weight": "cpu"})
    assert placed.plan.lower_bound <= placed.plan.makespan < whole.makespan


def test_fitting_weight_is_not_sliced() -> None:
    check(Head(), (numbers(4, WIDTH),), budgets(2 * WHOLE), set(), cpu_compute=False)


def test_pinned_weight_is_not_sliced() -> None:
    memory = budgets(int(0.7 * WHOLE))
    x = numbers(4, WIDTH)
    for pin in ({"head": "cpu"}, {"head.weight": "cpu"}, {"linear_1": "cpu"}):
        check(Head(), (x,), memory, set(), links=FAST, pin=pin)
    with graphplan.simulate(memory):
        placed = graphplan.partition(Head(), memory, args=(x,), links=FAST, grad=True)
        assert sliced_names(placed.plan) == set()  # gradients belong to the whole
    with graphplan.simulate(memory), pytest.raises(graphplan.InfeasibleError, match="linear_1"):
        graphplan.plan(Head(), memory, args=(x,), offload=False)


def test_a_strided_weight_is_not_sliced() -> None:
    model = Head()
    model.head.weight = nn.Parameter(torch.randn(WIDTH, ROWS).t())
    check(model, (numbers(4, WIDTH),), budgets(int(0.7 * WHOLE)), set(), links=FAST)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "cpu_compute"),
    [
        (0.5, False),
        (0.9, True),
        *(pytest.param(ratio, False, marks=pytest.mark.slow) for ratio in (0.7, 0.9)),
    ],
)
def test_the_segformer_of_the_imbalance_report(ratio: float, cpu_compute: bool) -> None:
    """88 % of its bytes are one convolution, so accelerate puts at most 2.4 % of them on the GPU."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        sr_ratios=[8, 4, 2, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
    )
    model = transformers.SegformerForSemanticSegmentation(config).eval()
    inputs = {"pixel_values": numbers(1, 3, 32, 32)}
    memory = budgets(int(ratio * bytes_of(model)))
    with graphplan.simulate(memory) as machine, torch.no_grad():
        placed = graphplan.partition(model, memory, kwargs=inputs, cpu_compute=cpu_compute)
        assert sliced_names(placed.plan) == {"decode_head.linear_fuse.weight"}
        assert {stage.device for stage in placed.plan.stages} == {0}
        found = run_placed(machine, placed, kwargs=inputs)
        assert relative(found.logits, model(**inputs).logits) <= 1e-6


# -- the model stays the model --------------------------------------------------------------------


def sliced_head(machine: Any, memory: dict[int | str, int]) -> tuple[Any, nn.Module, torch.Tensor]:
    model, x = Head(), numbers(4, WIDTH)
    placed = graphplan.partition(model, memory, args=(x,), cpu_compute=False, links=NARROW)
    assert {0, "cpu"} == set(placed.plan.parts.values())
    assert relative(run_placed(machine, placed, (x,)), model(x)) <= 1e-6
    return placed, model, x


def test_changes_of_the_parameter_are_seen() -> None:
    memory = budgets(WHOLE)
    with graphplan.simulate(memory) as machine:
        placed, _, x = sliced_head(machine, memory)
        torch.manual_seed(7)
        other = nn.Module.state_dict(Head())
        other = {name: torch.randn_like(tensor) for name, tensor in other.items()}
        expected = Head()
        expected.load_state_dict(other)
        placed.load_state_dict(other)
        assert relative(placed(x), expected(x)) <= 1e-6
        with torch.no_grad():
            placed.head.weight.mul_(-0.5)
            expected.head.weight.mul_(-0.5)
        assert relative(placed(x), expected(x)) <= 1e-6
        assert relative(run_placed(machine, placed, (x,)), expected(x)) <= 1e-6  # and copied no more
        new = torch.randn(ROWS, WIDTH)
        placed.head.weight = nn.Parameter(new.clone())
        expected.head.weight = nn.Parameter(new.clone())
        assert relative(placed(x), expected(x)) <= 1e-6
        assert all(
            torch.equal(a.cpu(), b) for a, b in zip(placed.parameters(), expected.parameters(), strict=True)
        )


@pytest.fixture(scope="class")
def sliced() -> Iterator[tuple[Any, nn.Module, torch.Tensor]]:
    """Placed once, with room for copies."""
    with short_search(), graphplan.simulate({0: 4 * WHOLE, "cpu": 1 << 30}) as machine:
        yield sliced_head(machine, budgets(WHOLE))


class TestOneSlicedHead:
    """These change a copy."""

    def test_another_tensor_at_the_same_address_is_seen(self, sliced: Any) -> None:
        (placed, model, x), values = copy.deepcopy(sliced), torch.empty(ROWS, WIDTH).numpy()
        for _ in range(2):
            values[:] = torch.randn(ROWS, WIDTH).numpy()
            placed.head.weight.data = model.head.weight.data = torch.from_numpy(values)
            assert relative(placed(x), model(x)) <= 1e-6

    @pytest.mark.parametrize("called", [True, False])
    def test_a_converted_parameter_is_refused(self, sliced: Any, called: bool) -> None:
        placed, _, x = copy.deepcopy(sliced)
        if called:
            placed(x)
        placed.head.weight.data = placed.head.weight.data.double()
        with pytest.raises(graphplan.PlanError, match=r"'head.weight.*' is torch.float64"):
            placed(x)

    def test_copied_models_have_separate_parts(self, sliced: Any) -> None:
        placed, model, x = sliced
        first, second = copy.deepcopy(placed), copy.deepcopy(placed)
        with torch.no_grad():
            first.head.weight.zero_()
        for one in (placed, second):
            assert relative(one(x), model(x)) <= 1e-6
        assert second.plan.parts == placed.plan.parts

    def test_pickling_keeps_the_slices(self, sliced: Any) -> None:
        placed, model, x = sliced
        again = pickle.loads(pickle.dumps(placed))
        assert relative(again(x), model(x)) <= 1e-6
        assert again.plan.parts == placed.plan.parts
        assert torch.equal(again.head.weight, model.head.weight)

    def test_original_model_is_unchanged(self, sliced: Any) -> None:
        _, model, x = sliced
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        assert torch.equal(model(x), Head()(x))


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_conjugate_in_the_same_memory_is_seen() -> None:
    memory, x = budgets(2 * WHOLE), numbers(4, WIDTH).cfloat()
    with graphplan.simulate(memory):
        model = nn.Linear(WIDTH, ROWS, dtype=torch.cfloat)
        placed = graphplan.partition(copy.deepcopy(model), memory, args=(x,), cpu_compute=False, links=NARROW)
        assert 0 in placed.plan.parts.values()
        for one in (placed, model):
            one.weight.data = one.weight.data.conj()
        torch.testing.assert_close(placed(x), model(x))


def test_a_further_structure_uses_the_same_parts() -> None:
    memory = budgets(WHOLE)
    with graphplan.simulate(memory) as machine:
        placed, model, x = sliced_head(machine, memory)
        machine.reset_peaks()
        assert relative(placed(x, twice=True), model(x, twice=True)) <= 1e-6
        first, second = placed.plans
        assert second.parts == first.parts
        assert machine.peak_bytes(0) <= second.peak_bytes[0] <= memory[0]
        kept = placed._graphplan.parts
        assert len(kept) == list(first.parts.values()).count(0)  # each copied once, for both


class Sometimes(Head):
    """Reads its head in a way that no slice supports, if asked to."""

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        return self.head.weight.sum(1) if twice else super().forward(x)


def test_later_structure_that_reads_the_whole_weight() -> None:
    memory = budgets(WHOLE)
    with graphplan.simulate({0: 4 * WHOLE, "cpu": 1 << 30}) as machine:
        model, x = Sometimes(), numbers(4, WIDTH)
        placed = graphplan.partition(model, memory, args=(x,), links=FAST)
        assert sliced_names(placed.plan) == {"head.weight"}
        machine.reset_peaks()
        assert relative(placed(x, twice=True), model(x, twice=True)) <= 1e-6
        plan = placed.plans[1]
        assert plan.graph.parts == ()
        assert placed.plan.parts.keys() <= plan.graph.weights.keys()  # they take their bytes all the same
        assert machine.peak_bytes(0) <= plan.peak_bytes[0] <= memory[0]
        assert (
            plan.peaks[0].weights
            >= placed.plan.peaks[0].weights - placed.plan.schedule.prefetch_buffers[0].nbytes
        )
        again = pickle.loads(pickle.dumps(placed))
        assert relative(again(x, twice=True), model(x, twice=True)) <= 1e-6
        assert relative(again(x), model(x)) <= 1e-6


def test_parts_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    memory, model, x = budgets(WHOLE), Head(), numbers(4, WIDTH)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Head()
    with graphplan.simulate({**memory, 0: 2 * memory[0]}) as machine:  # with room for a copy
        options = {"cpu_compute": False, "links": NARROW, "checkpoint": str(tmp_path)}
        placed = graphplan.partition(empty, memory, args=(x,), **options)
        assert {0, "cpu"} == set(placed.plan.parts.values())
        assert relative(run_placed(machine, placed, (x,)), model(x)) <= 1e-6
        with torch.no_grad():
            assert relative(copy.deepcopy(placed.graph_module)(x)[0], model(x)) <= 1e-6


@pytest.mark.slow
def test_weight_that_exceeds_budget_by_allocator_overhead_is_sliced() -> None:
    """CUDA's allocator may take 1 MiB more than a large weight has."""
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 256))
    for memory in (4_334_592, 4_834_592, 5_234_592):
        plan = graphplan.plan(model, {0: memory, "cpu": 1 << 30}, (torch.randn(8, 256),), cpu_compute=False)
        assert plan.parts
        assert plan.peak_bytes[0] <= memory


def test_weight_without_room_left_by_pinned_weight_is_sliced() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))
    memory = {0: int(1.7 * 256 * 256 * 4) + 16 * KIB, "cpu": 1 << 30}
    plan = graphplan.plan(model, memory, (torch.randn(1, 256),), pin={"0.weight": 0}, cpu_compute=False)
    assert {part.part_of for part in plan.graph.parts} == {"1.weight"}
    assert plan.peak_bytes[0] <= memory[0]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"offload": False}, "'cpu': .*, without offload=False$"),
        ({}, r"'cpu': \d+\}$"),
    ],
)
def test_error_without_cpu_names_the_cpu(options: dict[str, bool], hint: str) -> None:
    model = nn.Linear(256, 4096, bias=False)
    memory: dict[int | str, int] = dict.fromkeys(range(3), 3_901_132)
    with pytest.raises(graphplan.InfeasibleError, match="with weights in CPU memory: .*" + hint):
        graphplan.plan(
            model, memory | ({"cpu": 1 << 30} if options else {}), (torch.randn(8, 256),), **options
        )


@pytest.mark.parametrize(
    ("memory", "fits"),
    [
        ({0: WHOLE // 500, "cpu": 1 << 30}, True),  # no room beside a sixty-fourth of a weight
        ({0: WHOLE // 2, "cpu": WHOLE // 4}, False),
    ],
)
def test_no_slices_are_made_if_useless(
    monkeypatch: pytest.MonkeyPatch, memory: dict[int | str, int], fits: bool
) -> None:
    """Dozens of parts of each weight of a model take a minute to make."""
    made: list[Part] = []

    def record(member: Member, parts: Sequence[Part]) -> Member:
        made.extend(parts)
        return in_parts(member, parts)

    monkeypatch.setattr("graphplan.compiler.slicing_choice.in_parts", record)
    with nullcontext() if fits else pytest.raises(graphplan.InfeasibleError):
        assert not graphplan.plan(Head(), memory, (numbers(1, WIDTH),)).parts
    assert not made


def test_slices_are_made_if_results_exceed_the_accelerator() -> None:
    """Each part makes its own share of them."""
    with torch.device("meta"):
        head, x = nn.Linear(1024, 8192, bias=False), torch.empty(1024, 1024)
    plan = graphplan.plan(head, {0: int(0.9 * 1024 * 8192 * 4), "cpu": 1 << 30}, (x,), links=FAST)
    whole = graphplan.plan(head, {"cpu": 1 << 30}, (x,))
    assert plan.makespan < 0.5 * whole.makespan
