from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree

import graphplan
from graphplan import Graph, Operation, Value, simulate
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.sizes.size_limits import SizeLimits, bounded
from graphplan.capture.tracing import capture
from graphplan.devices.max_memory import read_max_memory
from graphplan.ir.schedule import Assignment
from graphplan.passes.frontend import fake_interpreter, fake_operation
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.fake_operation import Effect, run_fake
from graphplan.passes.frontend.flop_formulas import flops_of
from graphplan.passes.frontend.simplify import simplify
from graphplan.passes.frontend.tensor_meta import TensorMeta, describe, is_tensor_meta
from graphplan.passes.frontend.two_readings import upper_bound_graph
from graphplan.passes.schedule.transfers import build_schedule
from graphplan.runtime.simulate.simulation import SimulationMode


def graph_of(model: nn.Module, *args: Any, types: tuple[str, ...] = ("cpu",), **kwargs: Any) -> Graph:
    model_copy = ModelCopy(model)
    call = model_copy.bind(args, kwargs)
    found = bounded(capture(model_copy, call), call, SizeLimits(), 0.0)
    simplify(found)
    return Annotator(found, model_copy.weights, types).graph()


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x @ x
        b = a.transpose(0, 1)[:2]
        c, d = a.chunk(2)
        return b.reshape(-1).sum() + (c * d).sum()


def test_views_cost_nothing_and_copies_their_elements() -> None:
    graph = graph_of(Views(), torch.randn(4, 4))
    values = graph.values
    assert (values["matmul"].nbytes, values["matmul"].alias_of) == (64, None)
    assert (values["transpose"].nbytes, values["transpose"].alias_of) == (0, "matmul")
    assert (values["slice_1"].nbytes, values["slice_1"].copy_bytes) == (0, 32)
    assert graph.operations["chunk"].outputs == ("getitem", "getitem_1")
    assert values["getitem_1"].alias_of == "matmul"
    assert values["reshape"].nbytes == 32  # not a view of a transposed slice
    assert graph.operations["matmul"].flops == 2 * 4**3
    assert graph.operations["chunk"].bytes_accessed == 0


def test_expanded_tensor_is_a_view_with_dense_copy() -> None:
    class Expand(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1).expand(100, 4) * 2

    value = graph_of(Expand(), torch.randn(1, 4)).values["expand"]
    assert (value.nbytes, value.copy_bytes) == (0, 1600)


def test_unused_results_are_separate_allocations() -> None:
    # seen in a training step with a BatchNorm of which only the statistics are kept: 512 bytes too few
    class Watches(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            statistics = self.running_mean, self.running_var
            torch.native_batch_norm(x, self.weight, self.bias, *statistics, True, 0.1, 1e-5)
            return x * 2

    graph = graph_of(Watches(10), torch.randn(4, 10))
    assert graph.values["native_batch_norm"].nbytes == 3 * 512


def test_true_dtypes_count() -> None:
    graph = graph_of(nn.Linear(8, 8, dtype=torch.bfloat16), torch.randn(2, 8, dtype=torch.bfloat16))
    assert graph.weights["weight"].nbytes == 128
    assert graph.values["linear"].nbytes == 32


def test_long_graph_text_is_readable() -> None:
    text = str(graph_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)))
    assert "linear = linear(input, 0.weight, 0.bias) : 32 bytes, 64 FLOP  # 0" in text
    assert "relu = relu(linear) : 32 bytes  # 1" in text


def test_unused_results_count_as_workspace() -> None:
    class TopValues(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.topk(x, 2)[0]

    operation = graph_of(TopValues(), torch.randn(4, 8)).operations["topk"]
    assert operation.outputs == ("getitem",)
    assert operation.workspace_on("cpu") == 512  # the indices, rounded


def test_attention_without_fused_kernel_needs_workspace() -> None:
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, q, q)

    with simulate({0: "1GiB"}):
        graph = graph_of(Attention(), torch.randn(1, 4, 64, 16), types=("sim", "cpu"))
    operation = graph.operations["scaled_dot_product_attention"]
    assert operation.workspace_on("sim") > 4 * 64 * 64 * 4 > operation.workspace_on("cpu")
    assert operation.flops == 2 * 2 * 4 * 64 * 64 * 16


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_fused_cells_need_their_workspace(cell: type[nn.RNNCellBase]) -> None:
    model, x = cell(32, 40), torch.randn(64, 32)  # type: ignore[call-arg]  # of the subclasses
    with simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        gc.collect()
        machine.reset_peaks()
        placed(x)
        assert machine.peak_bytes(0) == placed.plan.peak_bytes[0]


def test_operations_with_kernels_need_no_workspace_of_their_decomposition() -> None:
    gate = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
    x = torch.randn(512, 8)
    backward = graphplan.plan(gate, {0: "1GiB"}, (x,), train=True).graph.operations["silu_backward"]
    assert backward.workspace_on("cuda") == 0
    with simulate({0: "1GiB"}) as machine:  # simulated devices have the formula alone
        plan = graphplan.plan(gate, machine.max_memory, (x,), train=True)
    assert plan.graph.operations["silu_backward"].workspace_on("sim") > x.nbytes


class Channels(nn.Module):
    """BatchNorm over rows that lie the other way, from a layer to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.norm(self.up(x).transpose(1, 2)).transpose(1, 2))
        return found.square().mean()


def test_batch_norm_of_a_training_step_makes_contiguous_tensors() -> None:
    x = torch.randn(4, 16, 8)
    graph = graphplan.plan(Channels(), {0: "1GiB"}, (x,), train=True).graph
    turned = {op.outputs[0] for op in graph.operations.values() if op.type == "transpose"}
    copied = [
        op.name
        for op in graph.operations.values()
        if op.type == "reshape" and turned.intersection(op.inputs) and graph.values[op.outputs[0]].nbytes
    ]
    assert len(copied) == 2  # what the next layer reads each way: kernels turn nothing around


def test_branches_and_rounds_have_the_work_of_their_operations() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.a(y) * 2, (x,))
            rounds: torch.Tensor = map_rows(lambda row: self.a(row), x)
            return rounds

    graph = graph_of(Both(), torch.ones(8, 16))
    assert graph.operations["cond"].flops == 2 * 8 * 16 * 16 == graph.operations["map_impl"].flops


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_the_work_of_their_matrices(kind: Any) -> None:
    model = kind(16, 32, num_layers=2, bidirectional=True, batch_first=True)
    graph = graph_of(model, torch.randn(3, 5, 16))
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)
    assert sum(operation.flops for operation in graph.operations.values()) == 2 * 3 * 5 * matrices


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("rows", [5, 50])
def test_distances_have_the_work_of_all_pairs(p: float, rows: int) -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cdist(x * self.scale, y, p=p)

    given = torch.randn(1, rows, 16), torch.randn(3, rows, 16)
    for train in (False, True):
        plan = graphplan.plan(Distances(), {0: "1GiB"}, given, train=train)
        found = sum(operation.flops for operation in plan.graph.operations.values())
        assert found == (1 + train) * 2 * 3 * rows * rows * 16


@pytest.mark.parametrize(
    ("left", "right"),
    [((48, 16), (3, 16, 32)), ((3, 16, 32), (32, 48)), ((16, 48), (48, 32)), ((3, 16, 32), (3, 32, 16))],
)
def test_grouped_products_have_the_work_of_their_groups(left: Any, right: Any) -> None:
    a, b = (torch.empty(size, dtype=torch.bfloat16) for size in (left, right))
    ends = torch.tensor([16, 32, 48], dtype=torch.int32) if 2 in (a.dim(), b.dim()) else None
    grouped = torch.ops.aten._grouped_mm.default
    assert flops_of(grouped, (a, b), {}, grouped(a, b, ends)) == 2 * 48 * 16 * 32


def test_layers_of_experts_have_the_work_of_their_matrices() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    plan = graphplan.plan(
        MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval(),
        {0: "1GiB"},
        kwargs={"input_ids": torch.zeros(2, 8, dtype=torch.long), "use_cache": False},
    )
    of_experts = [o.flops for o in plan.graph.operations.values() if "grouped_mm" in o.target]
    rows = 2 * 2 * 8  # each token goes to two experts
    assert sum(of_experts) == 2 * rows * 32 * (64 + 64) + 2 * rows * 64 * 32


@pytest.mark.filterwarnings("error::graphplan.GraphplanWarning")
def test_attention_of_fewer_heads_of_keys_is_measured() -> None:
    # torch 2.11 refuses to count its FLOPs: its workspace was 0 bytes
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    with simulate({0: "1GiB"}):
        inputs = torch.randn(1, 4, 64, 16), torch.randn(1, 2, 64, 16)
        graph = graph_of(Attention(), *inputs, types=("sim", "cpu"))
    operation = graph.operations["scaled_dot_product_attention"]
    assert operation.workspace_on("sim") > 4 * 64 * 64 * 4 > operation.workspace_on("cpu")
    assert operation.flops == 2 * 2 * 4 * 64 * 64 * 16


def test_equal_operations_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import graphplan.passes.frontend.fake_interpreter as module

    measured = []
    original = module.run_fake

    def spy(*args: Any) -> Any:
        measured.append(args[0])
        return original(*args)

    monkeypatch.setattr(module, "run_fake", spy)
    graph_of(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))), torch.randn(2, 4))
    assert len(measured) == 1


def test_a_graph_is_read_once() -> None:
    model_copy = ModelCopy(nn.Linear(4, 4))
    found = capture(model_copy, model_copy.bind((torch.ones(2, 4),), {}))
    annotator = Annotator(found, model_copy.weights)
    assert annotator.graph() is annotator.graph()


def test_written_weights_and_inputs_are_recorded() -> None:
    graph = graph_of(nn.BatchNorm1d(4).train(), torch.randn(8, 4))
    written = {name for op in graph.operations.values() for name in op.mutates}
    assert written == {"running_mean", "running_var", "num_batches_tracked"}
    assert all(graph.weights[name].mutated for name in written)
    assert not graph_of(nn.BatchNorm1d(4).eval(), torch.randn(8, 4)).weights["running_mean"].mutated


class Cached(nn.Module):
    """Writes to a buffer through a view of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[1][:4].copy_(x[0])
        return x + self.cache.sum(0)


def test_write_through_view_mutates_the_weight() -> None:
    assert graph_of(Cached(), torch.ones(2, 4)).weights["cache"].mutated


def test_sizes_are_host_scalars() -> None:
    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0] * 2, -1) / x.shape[0]

    model_copy = ModelCopy(Sizes())
    call = model_copy.bind((torch.randn(6, 4),), {})
    found = capture(model_copy, call, {"x": {0: torch.export.Dim("n", min=2, max=64)}})
    simplify(found)
    graph = Annotator(found, model_copy.weights).graph()
    hosts = [op.name for op in graph.operations.values() if op.host_only]
    assert hosts
    assert graph.values["div"].shape == (128, 2)  # a dynamic size counts at its bound


def test_unread_weights_are_in_the_graph() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    graph = graph_of(Holder(), torch.randn(2, 4))
    assert "unused.weight" in graph.weights
    assert "unused.weight" not in graph.consumers


class FoldsOrNot(nn.Module):
    """A product of a strided input with a parameter, which torch folds and copies, or does not."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 48), learned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) @ self.weight


def test_requires_grad_of_parameters_increases_workspace() -> None:
    # seen on FalconMamba: the plan's peak was 4,608 bytes too low
    x = torch.randn(2, 16, 9)
    frozen, learned = (graph_of(FoldsOrNot(flag), x).operations["matmul"] for flag in (False, True))
    assert learned.workspace_on("cpu") >= frozen.workspace_on("cpu") + 2 * 16 * 9 * 4


@pytest.mark.parametrize(
    "part", [lambda x: x[:, :4], lambda x: x[:1].expand(4, 8)], ids=["slice", "expanded"]
)
def test_moved_tensors_arrive_dense(part: Any) -> None:
    class Sliced(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return part(x * 2).reshape(-1) + 1

    model_copy = ModelCopy(Sliced())
    call = model_copy.bind((torch.randn(8, 8),), {})
    found = bounded(capture(model_copy, call), call, SizeLimits(), 0.0)
    simplify(found)
    annotator = Annotator(found, model_copy.weights)
    stays = annotator.graph()
    assert stays.values["reshape"].alias_of is None  # a strided slice is copied
    devices = dict.fromkeys(stays.operations, 0) | {"reshape": 1, "add": 1}
    topology = read_max_memory({0: "1MiB", 1: "1MiB", "cpu": "1MiB"})
    moved = annotator.graph(build_schedule(stays, topology, Assignment(devices, {}), "cpu"))
    assert moved.values["reshape"].alias_of == moved.operations["reshape"].inputs[0]
    both = upper_bound_graph(stays, moved)
    assert both.values["reshape"].nbytes == 128
    # bounds are of the graph without moves: it may not count the copy that a move makes unnecessary
    assert stays.operations["reshape"].bytes_accessed == moved.operations["reshape"].bytes_accessed == 0
    together = build_schedule(stays, topology, Assignment(dict.fromkeys(devices, 0), {}), 0)
    assert annotator.graph(together).operations["reshape"].bytes_accessed == 256


def test_operations_for_absent_gpu_run_once_as_on_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Any] = []

    def run(target: Any, *rest: Any) -> Effect:
        ran.append(target)
        return run_fake(target, *rest)

    monkeypatch.setattr(fake_interpreter, "run_fake", run)
    graph = graph_of(nn.Linear(4, 4), torch.ones(2, 4), types=("cpu", "cuda"))
    assert ran == [torch.ops.aten.linear.default]
    assert set(graph.operations["linear"].workspace) == {"cpu", "cuda"}


def test_fake_tensors_take_no_simulated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def dispatch(_mode: Any, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(func)
        return func(*args, **(kwargs or {}))

    model_copy = ModelCopy(nn.Linear(37, 3))
    with simulate({0: "1MiB"}):
        found = capture(model_copy, model_copy.bind((torch.ones(2, 37),), {}))
        monkeypatch.setattr(SimulationMode, "__torch_dispatch__", dispatch)
        graph = Annotator(found, model_copy.weights, ["sim", "cpu"]).graph()
    assert not asked
    assert set(graph.operations["linear"].workspace) == {"cpu", "sim"}


def test_upper_bound_graph_has_larger_bytes_of_each_value() -> None:
    def reading(nbytes: int, view_bytes: int, *together: set[str]) -> Graph:
        values = [
            Value("x", 8),
            Value("a", nbytes),
            Value("b", 0, alias_of="a", copy_bytes=view_bytes),
            Value("c", 8),
        ]
        operations = [Operation(name, "f", ("x",), (name,)) for name in "abc"]
        return Graph(operations, values, inputs=("x",), outputs=("c",), together=map(frozenset, together))

    both = upper_bound_graph(reading(8, 4, {"a", "b"}), reading(16, 2, {"b", "c"}))
    assert both.values["a"].nbytes == 16
    assert both.values["b"].copy_bytes == 4
    assert both.together == ({"a", "b", "c"},)  # no operation is in two groups


def test_strides_depend_on_kernels_of_the_device() -> None:
    # seen on EmbeddingGemma: attention's result is dense on an accelerator, and not on the CPU
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return mixed.transpose(1, 2).reshape(2, 9, 32) + 1

    with simulate({0: 1 << 30, 1: 1 << 30}) as machine:
        model_copy = ModelCopy(Attends())
        found = capture(model_copy, model_copy.bind((torch.randn(2, 9, 4, 8),), {}))
        simplify(found)
        annotator = Annotator(found, model_copy.weights, ["sim", "cpu"])
        usual = annotator.graph()
        topology = read_max_memory(machine.max_memory | {"cpu": 1 << 30})
        kinds = {spec.key: spec.type for spec in topology.devices}
        for key, alias in (("cpu", True), (0, False)):
            devices = dict.fromkeys(usual.operations, key)
            schedule = build_schedule(usual, topology, Assignment(devices, {}), "cpu")
            value = annotator.graph(schedule, kinds).values["reshape"]
            assert (value.alias_of is not None) is alias
            assert (value.nbytes == 0) is alias
        assert usual.values["reshape"].alias_of is None
        assert usual.operations["reshape"].bytes_accessed == 0  # as where it costs least


@pytest.mark.parametrize("batch", [1, 2])
def test_view_of_one_image_has_kernel_strides(batch: int) -> None:
    # seen on Segformer: fakes give a batch of one a stride by which convolutions take it for channels-last
    class Convolves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            image = tokens.transpose(1, 2).view(-1, 8, 2, 2)
            return self.conv(image).flatten(2).transpose(1, 2)

    model, tokens = Convolves(), torch.randn(batch, 4, 8)
    dense = model(tokens).is_contiguous()
    assert dense is (batch == 2)
    graph = graph_of(nn.Sequential(model, Computes(lambda x: x.reshape(-1))), tokens)
    assert (graph.values["reshape"].alias_of is not None) is dense


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((4, 4), (8, 1)),
        ((4, 4), (1, 8)),
        ((2, 3, 4), (40, 1, 5)),
        ((3, 1, 4), (0, 4, 1)),
        ((2, 2), (2, 1)),
        ((5,), (3,)),
    ],
)
def test_copies_have_torch_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    source = torch.empty_strided(shape, stride)
    copied = TensorMeta(shape, stride, torch.float32).copied()
    assert copied.stride == source.to(torch.float64).stride()


class Computes(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


PAIR = (torch.rand(128, 64), torch.rand(128, 64))
WINDOW = torch.hann_window(32)
SPECTRUM = torch.stft(torch.randn(4, 512), 32, 8, window=WINDOW, return_complex=True)
LARGER = {
    "mse_loss": (functional.mse_loss, PAIR),
    "smooth_l1_loss": (functional.smooth_l1_loss, PAIR),
    "soft_margin_loss": (functional.soft_margin_loss, PAIR),
    "binary_cross_entropy": (functional.binary_cross_entropy, PAIR),
    "fold": (lambda x: functional.fold(x, (16, 16), 3), (torch.randn(2, 36, 196),)),
    "istft": (lambda x, window: torch.istft(x, 32, 8, window=window, length=512), (SPECTRUM, WINDOW)),
    "window": (lambda x: x * torch.hann_window(128, device=x.device), (torch.randn(128),)),
}


@pytest.mark.parametrize("name", LARGER)
@torch.no_grad()
def test_memory_that_is_larger_than_a_result_is_planned(name: str) -> None:
    function, inputs = LARGER[name]
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(Computes(function), machine.max_memory, inputs)
        assert torch.allclose(placed(*inputs), function(*inputs), atol=1e-5)
        planned = placed.plan.peak_bytes[0]
        assert machine.peak_bytes(0) <= planned
        assert function(*inputs).untyped_storage().nbytes() < planned
    with graphplan.simulate({0: planned}) as machine:
        placed = graphplan.partition(Computes(function), machine.max_memory, inputs)
        placed(*inputs)
        assert placed.plan.peak_bytes[0] == planned


@torch.no_grad()
def test_bitwise_operations_on_numbers_write_nothing() -> None:
    model = Computes(lambda x, n: x * (n | 1) + (n & 3))
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (PAIR[0], 5))
    for number in (5, 6, 12):
        assert torch.allclose(placed(PAIR[0], number), model(PAIR[0], number))


def test_map_over_many_rows_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def body(row: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(row)
        wide = row @ weight
        return wide.sin().sum(), row + 1

    def measured() -> Effect:
        del calls[:]
        rows, weight = (describe(torch.empty(size, device="meta")) for size in ((50, 2, 30), (30, 40_000)))
        leaves, spec = pytree.tree_flatten(((body, [rows], [weight]), {}), is_leaf=is_tensor_meta)
        operation = torch.ops.higher_order.map_impl
        return run_fake(operation, leaves, spec, torch.device("cpu"), FakeTensorMode())

    found = measured()
    assert len(calls) < 10
    monkeypatch.setattr(fake_operation, "_ROUNDS", 50)
    assert measured() == found
    assert len(calls) > 50
    assert found.workspace[""] >= 2 * 4 * 2 * 40_000  # of a row, and its sines


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 32, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.weight, offs=ends)


@pytest.mark.parametrize(("rows", "matrices"), [(3, 3), (64, 8)])
def test_a_row_reads_the_matrix_of_its_group(rows: int, matrices: int) -> None:
    ends = torch.full((8,), rows, dtype=torch.int32)
    (product,) = graph_of(Experts(), torch.randn(rows, 16, dtype=torch.bfloat16), ends).operations.values()
    assert product.bytes_accessed == 2 * (rows * 16 + matrices * 16 * 32 + rows * 32) + 4 * 8


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(1000, 16, mode="sum")
        self.register_buffer("kept", torch.zeros(64, 16))

    def forward(self, indices: torch.Tensor, starts: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        summed = self.bag(indices, starts)
        self.kept.index_copy_(0, where, summed)
        self.kept[where] = summed
        self.kept[where] = 0.0
        self.kept[self.kept[:, 0] > 0] = summed[0]
        return summed


def test_bags_and_writes_of_rows_touch_only_these_rows() -> None:
    indices, starts, where = torch.arange(6), torch.tensor([0, 3]), torch.tensor([1, 5])
    operations = graph_of(Rows(), indices, starts, where).operations.values()
    accessed = {operation.target: operation.bytes_accessed for operation in operations}
    rows, index = 2 * 16 * 4, 2 * 8
    assert accessed["index_copy_"] == rows + index + rows
    bag = next(nbytes for target, nbytes in accessed.items() if "embedding_bag" in target)
    assert 6 * 16 * 4 + 6 * 8 + index + rows <= bag < 1000 * 16 * 4
    writes = [operation.bytes_accessed for operation in operations if operation.type == "index_put"]
    assert writes == [rows + index + rows, rows + index + 4, 64 * 16 * 4 + 64 + 16 * 4]
