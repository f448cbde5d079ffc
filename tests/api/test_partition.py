"""The whole path on simulated devices: values, budgets, names, structures, bad input."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch
from builders import assert_kept, bytes_of, largest_difference, run_placed
from torch import nn
from versions import has

import graphplan
from graphplan.api.plan_options import PlanKeywords, PlanOptions


class Tied(nn.Module):
    """An embedding, blocks, and a head that is tied to the embedding."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, *, double: bool = False
    ) -> dict[str, Any]:
        x = self.embed(ids) + torch.arange(ids.shape[1], device=ids.device)[:, None]
        if mask is not None:
            x = x * mask[..., None]
        for block in self.blocks:
            x = block(x) + x
        x = x * self.scale
        return {"logits": self.head(x) * (2 if double else 1), "hidden": (x, None), "double": double}


IDS = torch.arange(12).reshape(2, 6)


def budgets_of(model: nn.Module, shares: dict[Any, float], slack: int = 16384) -> dict[Any, int]:
    return {key: int(share * bytes_of(model)) + slack for key, share in shares.items()}


SHARES: list[dict[Any, float]] = [
    {0: 2.0},
    {0: 0.6, 1: 0.6},
    {2: 0.4, 0: 0.4, 5: 0.4},
    {0: 0.3, "cpu": 3.0},
    {0: 0.0, 1: 0.3, "cpu": 3.0},
    {"cpu": 3.0},
]


@pytest.mark.parametrize("shares", SHARES)
def test_results_equal_and_budgets_hold(shares: dict[Any, float]) -> None:
    model = Tied().eval()
    expected = model(IDS)
    with graphplan.simulate(budgets_of(model, {**shares, 9: 0.0})) as machine:
        budgets = {k: v for k, v in machine.max_memory.items() if k in shares}
        placed = graphplan.partition(model, budgets, kwargs={"ids": IDS})
        assert list(placed.plan.devices) == [k for k in shares if k in budgets]
        placed.plan.verify()
        for _ in range(2):
            assert largest_difference(run_placed(machine, placed, kwargs={"ids": IDS}), expected) < 1e-5


def test_a_model_that_fits_one_device_stays_on_it() -> None:
    model = Tied().eval()
    with graphplan.simulate(budgets_of(model, {1: 1.3, 0: 1.3, "cpu": 9.0})) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(IDS,))
        plan = placed.plan
        assert [stage.device for stage in plan.stages] == [1]
        assert (plan.transfers, plan.transfer_bytes, plan.streams) == ((), 0, ())
        read = {n: k for n, k in plan.placement.items() if not n.startswith("unused")}
        assert set(read.values()) == {1}


def test_tied_weight_is_placed_once() -> None:
    model = Tied().eval()
    with graphplan.simulate(budgets_of(model, {0: 0.75, 1: 0.75})) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(IDS,))
        assert placed.head.weight is placed.embed.weight
        weights = sum(placed.plan.peaks[key].weights for key in (0, 1))
        assert weights < 1.05 * bytes_of(model) + 512 * 12


@pytest.mark.full_search
def test_placed_model_keeps_names_and_types() -> None:
    model = Tied().eval()
    with graphplan.simulate(budgets_of(model, {0: 0.3, "cpu": 3.0})) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(IDS,))
        assert isinstance(placed, Tied)
        assert type(placed).__name__ == "Tied"
        assert list(placed.state_dict()) == list(model.state_dict())
        assert list(placed.graph_module.state_dict()) == list(model.state_dict())
        assert [n for n, _ in placed.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert [n for n, _ in placed.named_modules()] == [n for n, _ in model.named_modules()]
        assert isinstance(placed.graph_module, torch.fx.GraphModule)
        for name, tensor in placed.state_dict().items():
            assert tensor.device == placed.plan.devices[placed.plan.placement[name]]
            assert torch.equal(tensor.cpu(), model.state_dict()[name])
        assert {t.device.type for t in placed.parameters()} == {"cpu", "sim"}


def test_code_shows_every_transfer() -> None:
    model = Tied().eval()
    with graphplan.simulate(budgets_of(model, {0: 0.6, 1: 0.6})) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(IDS,))
        code = placed.code
        assert code.count(".to(") == len(list(placed.plan.schedule.moves()))
        assert "self.blocks" in code
        assert "device(type='sim', index=" in code  # arange's own, rewritten
        assert "'cpu'" not in code
        assert "assert" not in code


def test_original_model_is_unchanged() -> None:
    model = Tied().eval()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    with graphplan.simulate(budgets_of(model, {0: 0.6, 1: 0.6})) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(IDS,))
        placed(IDS)
        assert type(model) is Tied
        for name, tensor in model.state_dict().items():
            assert tensor.data_ptr() == before[name][0]
            assert torch.equal(tensor, before[name][1])
        model(IDS)


def test_deepcopy_is_independent() -> None:
    model = Tied().eval()
    with graphplan.simulate({0: 2 * bytes_of(model), 1: bytes_of(model), "cpu": 10**9}) as machine:
        placed = graphplan.partition(model, budgets_of(model, {0: 0.3, "cpu": 3.0}), args=(IDS,))
        placed(IDS)
        model_copy = copy.deepcopy(placed)
        with torch.no_grad():
            for parameter in model_copy.parameters():
                parameter.zero_()
        assert float(model_copy(IDS)["logits"].abs().max()) == 0
        assert largest_difference(placed(IDS), model(IDS)) < 1e-5
        assert model_copy.head.weight is model_copy.embed.weight
        assert model_copy.plan == placed.plan
        assert machine.live_bytes(0) > 0


def test_state_dict_saves_and_loads() -> None:
    model, other = Tied().eval(), Tied().eval()
    with graphplan.simulate(budgets_of(model, {0: 0.3, "cpu": 3.0})) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(IDS,))
        file = io.BytesIO()
        torch.save(placed.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu")
        assert largest_difference(dict(loaded), dict(model.state_dict())) == 0
        placed.load_state_dict(copy.deepcopy(other.state_dict()))
        assert largest_difference(placed(IDS), other(IDS)) < 1e-5


def test_results_return_to_the_device_of_the_inputs() -> None:
    model = Tied().eval()
    expected = model(IDS)
    with graphplan.simulate({0: "1MiB", 1: "1MiB", "cpu": "1GiB"}):
        budgets = budgets_of(model, {0: 0.6, 1: 0.6})
        placed = graphplan.partition(model, budgets, args=(IDS,))
        assert placed(IDS)["logits"].device == torch.device("cpu")
        for index in (0, 1):
            result = placed(IDS.to(f"sim:{index}"))
            assert result["logits"].device == torch.device(f"sim:{index}")
            assert (
                largest_difference(
                    torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result), expected
                )
                < 1e-5
            )
        on_cpu = graphplan.partition(model, {"cpu": "1GiB"}, args=(IDS,))
        assert on_cpu(IDS.to("sim:1"))["logits"].device == torch.device("sim:1")
        left = graphplan.partition(model, budgets, args=(IDS,), return_outputs=False)
        assert left(IDS)["logits"].device.type == "sim"
        assert [move.kind for move in left.plan.schedule.moves("input", "output")] == ["input"]


def test_example_device_is_the_planned_input_device() -> None:
    model = Tied().eval()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        ids = IDS.to("sim:1")
        placed = graphplan.partition(model, budgets_of(model, {0: 0.6, 1: 0.6}), args=(ids,))
        assert placed.plan.schedule.host == 1
        run_placed(machine, placed, (ids,))


def test_new_structures_are_captured_without_moving_weights() -> None:
    model = Tied().eval()
    with graphplan.simulate(budgets_of(model, {0: 0.7, 1: 0.7})) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(IDS,))
        homes = {name: tensor.device for name, tensor in placed.named_parameters()}
        mask = torch.ones(2, 6)
        calls: list[dict[str, Any]] = [
            {"ids": IDS, "mask": mask},
            {"ids": IDS, "double": True},
            {"ids": IDS[:1]},
            {"ids": IDS, "mask": mask * 0, "double": True},
        ]
        for kwargs in calls:
            assert largest_difference(placed(**kwargs), model(**kwargs)) < 1e-5
        assert len(placed.graph_modules) == 4  # one serves both batches
        for kwargs in calls:
            placed(**kwargs)
        assert len(placed.graph_modules) == 4
        assert {name: tensor.device for name, tensor in placed.named_parameters()} == homes
        for call, plan in zip([calls[0], calls[1], calls[3]], placed.plans[1:], strict=True):
            machine.reset_peaks()
            placed(**call)
            assert_kept(machine, plan, larger=True)


def test_dynamic_shapes_serve_other_sizes_from_one_graph() -> None:
    model = Tied().eval()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        batch = torch.export.Dim("batch", min=1, max=8)
        placed = graphplan.partition(
            model,
            budgets_of(model, {0: 0.7, 1: 0.7}, 24_000),
            kwargs={"ids": IDS},
            dynamic_shapes={"ids": {0: batch}},
        )
        machine.reset_peaks()
        for size in (2, 1, 5, 8):
            ids = torch.randint(0, 100, (size, 6))
            assert largest_difference(placed(ids), model(ids)) < 1e-5
        assert len(placed.graph_modules) == 1
        assert all(machine.peak_bytes(key) <= placed.plan.peak_bytes[key] for key in (0, 1))  # planned for 8
        with pytest.raises(graphplan.GraphplanError):
            placed(torch.randint(0, 100, (64, 6)))  # another plan, which does not fit


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flipped = torch.cond(
            x.sum() > 0, lambda y: y + torch.ones(32), lambda y: y - torch.ones(32), (self.a(x),)
        )
        return self.b(flipped)


def test_control_flow_operations_run_on_their_device() -> None:
    model = Branching().eval()
    x = torch.ones(2, 32)
    # outside the simulation: torch compiles eager control flow, which cannot see simulated devices
    with torch.no_grad():
        expected = [(inputs, model(inputs)) for inputs in (x, -x)]
    with graphplan.simulate(budgets_of(model, {0: 0.6, 1: 0.6}, 6144)) as machine:
        placed = graphplan.partition(model, machine.max_memory, args=(x,))
        for inputs, result in expected:
            assert largest_difference(placed(inputs), result) < 1e-5


@pytest.mark.parametrize(
    "same", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["", "copy", "pickle"]
)
def test_without_inputs_the_first_call_is_placed(same: Any) -> None:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(4))
    ).eval()
    x = torch.randn(7, 32)
    with graphplan.simulate(budgets_of(model, {0: 0.6, 1: 0.6}, 8192)) as machine:
        with pytest.warns(graphplan.GraphplanWarning, match="first call"):
            placed = graphplan.partition(model, machine.max_memory)
        with pytest.raises(graphplan.PlanError, match="run the model once"):
            _ = placed.plan
        made = same(placed)
        assert largest_difference(made(x), model(x)) < 1e-5
        assert made.plan.activations_known
        assert len(made.plan.stages) == 2
        machine.reset_peaks()
        made(x)
        assert_kept(machine, made.plan)
        assert largest_difference(made(x[:2]), model(x[:2])) < 1e-5


class Counting(nn.Module):
    """Adds to a buffer by ``+=``, fills another, and multiplies a view in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))
        self.register_buffer("before", torch.zeros(8))

    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.before.copy_(self.count)
        self.count.fill_(3.0)
        y = self.linear(x)
        alias = y
        alias *= 2
        return y * (a & b) + a * self.count + self.before


def test_writes_before_the_first_call_are_kept() -> None:
    # a trace by torch.fx's proxies lost all of it: they have no in-place operators
    model = Counting().eval()
    inputs = torch.randn(4, 8), torch.rand(4, 8) > 0.5, torch.rand(4, 8) > 0.5
    with pytest.warns(graphplan.GraphplanWarning, match="first call"):
        placed = graphplan.partition(copy.deepcopy(model), {"cpu": "1MiB"})
    for _ in range(2):
        with torch.no_grad():
            assert largest_difference(placed(*inputs), model(*inputs)) < 1e-6
        assert torch.equal(placed.count, model.count)
        assert torch.equal(placed.before, model.before)


def test_first_call_raises_the_errors_of_partition() -> None:
    model = Tied().eval()
    with pytest.warns(graphplan.GraphplanWarning, match="first call"):
        placed = graphplan.partition(model, {"cpu": 2000})
    with pytest.raises(graphplan.InfeasibleError):
        placed(IDS)


def test_plan_without_inputs_raises() -> None:
    with pytest.raises(graphplan.InputError, match="Tied is planned for example inputs"):
        graphplan.plan(Tied().eval(), {"cpu": "1GiB"})


def test_dummy_inputs_of_the_model_serve_as_examples() -> None:
    class WithDummies(Tied):
        @property
        def dummy_inputs(self) -> dict[str, torch.Tensor]:
            return {"ids": IDS}

    placed = graphplan.partition(WithDummies().eval(), {"cpu": "1GiB"})
    assert placed.plan.method == "export"


def test_gradients_flow_with_grad() -> None:
    model = Tied().eval()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}):
        budgets = budgets_of(model, {0: 0.7, 1: 0.7})
        placed = graphplan.partition(model, budgets, args=(IDS,), grad=True)
        placed(IDS)["logits"].sum().backward()
        model(IDS)["logits"].sum().backward()
        for (name, ours), theirs in zip(placed.named_parameters(), model.parameters(), strict=True):
            if theirs.grad is not None:
                assert ours.grad is not None, name
                assert largest_difference(ours.grad.cpu(), theirs.grad) < 1e-4
        assert not graphplan.partition(model, budgets, args=(IDS,))(IDS)["logits"].requires_grad


@torch.no_grad()
def test_train_mode_is_another_structure() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32)).eval()
    x = torch.randn(4, 32)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, args=(x,))
    placed.train()
    assert largest_difference(placed(x), placed(x)) > 0
    placed.eval()
    assert largest_difference(placed(x), model(x)) == 0


def test_a_deleted_model_frees_its_memory_at_once() -> None:
    model = Tied().eval()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        placed = graphplan.partition(model, budgets_of(model, {0: 0.7, 1: 0.7}), args=(IDS,))
        placed(IDS)
        gc.collect()
        gc.disable()
        try:
            del placed
            assert (machine.live_bytes(0), machine.live_bytes(1)) == (0, 0)
        finally:
            gc.enable()


# -- planning only ------------------------------------------------------------------------------------


def test_plan_needs_neither_weights_nor_devices() -> None:
    with torch.device("meta"):
        model = Tied()
    plan = graphplan.plan(model, {4: "40KiB", 2: "40KiB", "cpu": "1GiB"}, kwargs={"ids": IDS.to("meta")})
    plan.verify()
    assert [spec.key for spec in plan.topology.devices] == [4, 2, "cpu"]
    assert all(p.device.type == "meta" for p in model.parameters())


def test_plans_are_deterministic() -> None:
    texts = {
        graphplan.plan(Tied().eval(), {0: "20KiB", 1: "30KiB", "cpu": "1GiB"}, (IDS,)).to_json()
        for _ in range(3)
    }
    assert len(texts) == 1


# -- bad input -----------------------------------------------------------------------------------------


def test_too_small_budget_error_names_sufficient_budget() -> None:
    model = Tied().eval()
    size = bytes_of(model)
    with graphplan.simulate({0: 10 * size, 1: 10 * size}):
        with pytest.raises(graphplan.InfeasibleError) as caught:
            graphplan.partition(model, {0: size // 4, 1: size // 8}, args=(IDS,))
        error = caught.value
        assert error.available == {0: size // 4, 1: size // 8}
        assert error.device in (0, 1)
        assert error.operation in str(error)
        assert str(error.needed[error.device]) in str(error)
        placed = graphplan.partition(model, error.needed, args=(IDS,))
        assert largest_difference(placed(IDS), model(IDS)) < 1e-5
        with pytest.raises(graphplan.InfeasibleError):
            graphplan.partition(model, {k: int(v * 0.9) for k, v in error.needed.items()}, args=(IDS,))


def test_errors_leave_the_model_unchanged() -> None:
    model = Tied().eval()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    attributes = set(vars(model))
    failures: list[tuple[type[Exception], dict[str, Any]]] = [
        (graphplan.BudgetError, {"max_memory": {}}),
        (graphplan.BudgetError, {"max_memory": {"cpu": "lots"}}),
        (graphplan.DeviceError, {"max_memory": {7: "1GiB"}}),
        (graphplan.DeviceError, {"max_memory": {"gpu": "1GiB"}}),
        (graphplan.InfeasibleError, {"max_memory": {"cpu": 2000}}),
        (graphplan.InputError, {"kwargs": {"nonsense": IDS}}),
        *([(RuntimeError, {"kwargs": {"ids": IDS.float()}})] if has("torch", "2.12") else []),
        (RuntimeError, {"kwargs": {"ids": IDS, "mask": torch.ones(3, 5)}}),
        (graphplan.InputError, {"args": IDS}),
    ]
    for expected, arguments in failures:
        call: dict[str, Any] = {"max_memory": {"cpu": "1GiB"}, "kwargs": {"ids": IDS}, **arguments}
        if "args" in arguments:
            del call["kwargs"]
        with pytest.raises(expected) as caught:
            graphplan.partition(model, **call)
        assert isinstance(caught.value, graphplan.GraphplanError) == (expected is not RuntimeError)
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
        assert set(vars(model)) == attributes
    model(IDS)


def test_a_meta_model_without_a_checkpoint() -> None:
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(graphplan.InputError, match=r"'embed.weight' and .* more.*graphplan\.plan"):
        graphplan.partition(model, {"cpu": "1GiB"}, args=(IDS,))


def test_full_device_is_named() -> None:
    model = nn.Linear(256, 256)
    with graphplan.simulate({0: 300_000}):
        taken = torch.empty(100_000, dtype=torch.uint8, device="sim:0")
        with pytest.raises(graphplan.GraphplanError, match=r"sim:0"):
            graphplan.partition(model, {0: 300_000}, args=(torch.ones(1, 256),))
        del taken


@pytest.mark.full_search
def test_bound_holds_if_cpu_kernels_return_other_strides() -> None:
    """Attention's result is dense on the CPU, and ``contiguous`` then copies nothing."""

    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.first(x).reshape(2, 9, 4, 8).transpose(1, 2)
            mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            found: torch.Tensor = self.last(mixed.transpose(1, 2).reshape(2, 9, 32))
            return found

    with graphplan.simulate({0: 1 << 30}) as machine, warnings.catch_warnings():
        warnings.simplefilter("error")
        budgets = machine.max_memory | {"cpu": 1 << 30}
        plan = graphplan.plan(Attends(), budgets, (torch.ones(2, 9, 32),), pin={"": "cpu"})
        assert 0 < plan.lower_bound <= plan.makespan


class _AsItIs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("budgets", [{0: "1MiB"}, {0: "1MiB", 1: "1MiB"}])
def test_a_model_without_operations(budgets: dict[Any, str]) -> None:
    model, x = _AsItIs(), torch.ones(3)
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, machine.max_memory, calls=[((x,), {}), ((x[None],), {})])
        assert (placed(x) == x).all()
        assert placed.plan.lower_bound == placed.plan.makespan == 0
        assert placed.plan.summary()


def test_option_types_match_plan_options() -> None:
    """`PlanKeywords` and `PlanOptions` must have the same names."""
    written = {name: hint.__forward_arg__ for name, hint in PlanKeywords.__annotations__.items()}
    assert written == {one.name: one.type for one in fields(PlanOptions)}
    shown = inspect.signature(graphplan.partition).parameters
    assert written.keys() <= shown.keys()
    assert all(shown[one.name].default == one.default for one in fields(PlanOptions))


def test_placed_model_repr_shows_model_and_placement() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.ones(2, 64)
    with graphplan.simulate({0: "24KiB", 1: "24KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        first, said, *rest = repr(placed).splitlines()
        assert [first, *rest] == repr(model).splitlines()
        assert said == "  placed: 2 stages on GPU 0, GPU 1"
        assert repr(graphplan.unplace(placed)) == repr(model)


def test_placed_model_repr_follows_the_models_own() -> None:
    with pytest.warns(graphplan.GraphplanWarning, match="no example inputs"):
        placed = graphplan.partition(nn.Linear(4, 4), {"cpu": "1MiB"})
    own = "Linear(in_features=4, out_features=4, bias=True, "
    assert repr(placed) == own + "placed at its first call)"
    placed(torch.ones(1, 4))
    assert repr(placed) == own + "placed: 1 stage on CPU)"


@pytest.mark.parametrize(("bandwidth", "warned"), [(1e6, 1), (25e9, 0)])
def test_much_faster_cpu_is_named_in_a_warning(bandwidth: float, warned: int) -> None:
    """Accelerators that hold the model compute, even if a slow link makes the CPU faster."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.ones(64, 64)
    links = {("cpu", 0): graphplan.Link(bandwidth, 1e-5)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan = graphplan.plan(model, {0: "1MiB", "cpu": "1MiB"}, (x,), links=links)
    assert {run.device for run in plan.schedule.runs()} == {0}
    assert [str(one.message).count("everything on the CPU") for one in found] == [1] * warned
