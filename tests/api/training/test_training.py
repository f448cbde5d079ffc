"""Training steps of placed models: the user's loop, compared with eager mode."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from builders import bytes_of
from shortcuts import short_search
from torch import nn
from training_steps import ROOMY, check_training, gap, gradients_of, needed, step_of, weights_of

import graphplan
from graphplan.runtime.memory.copy_queues import Queues
from graphplan.runtime.weights.weight_streams import ModuleStreams

ADAMW = torch.optim.AdamW
CPU = {"cpu": ROOMY}


class Layer(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Residual blocks with a loss, as of transformers' models."""

    def __init__(self, layers: int = 1, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(rows: int = 8, length: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (rows, length), generator=generator)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def stack(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Stack(**options).train()


def deep_stack() -> nn.Module:
    """Of which much can be computed again, or wait in CPU memory."""
    return stack(layers=4)


@pytest.fixture(scope="module")
def size() -> int:
    with short_search():
        return needed(stack(), batch(), optimizer=ADAMW)


@pytest.mark.full_search
@pytest.mark.parametrize("share", [1.0, pytest.param(0.8, marks=pytest.mark.slow), 0.6])
def test_one_accelerator_with_the_cpu(size: int, share: float) -> None:
    with short_search():
        plan = check_training(stack(), batch(), {0: int(share * size), **CPU})
    saves_less = any(op.repeats or op.offloads for op in plan.graph.operations.values())
    assert (bool(plan.streams) or saves_less) == (share < 1)


def test_two_accelerators(size: int) -> None:
    plan = check_training(stack(), batch(), {0: int(0.65 * size), 1: int(0.65 * size)})
    assert {stage.device for stage in plan.stages} == {0, 1}


@pytest.mark.slow
def test_fifty_steps_equal_eager_weights(size: int) -> None:
    eager, own = stack(), stack()
    with graphplan.simulate({0: int(0.6 * size), **CPU}) as machine, short_search():
        placed = graphplan.partition(own, machine.max_memory, kwargs=batch(), train=True, optimizer=ADAMW)
        optimizers = [ADAMW(model.parameters(), lr=1e-3) for model in (placed, eager)]
        for turn in range(50):
            for model, optimizer in zip((placed, eager), optimizers, strict=True):
                step_of(model, batch(), turn)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        weights = {name: tensor.cpu() for name, tensor in placed.state_dict().items()}
        assert gap(weights, eager.state_dict()) < 1e-4
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0] <= machine.capacities[0]


def partitioned(machine: Any, model: nn.Module, **options: Any) -> Any:
    given = {"kwargs": batch(), "train": True, "optimizer": ADAMW, **options}
    return graphplan.partition(model, machine.max_memory, strict=True, **given)


@pytest.mark.slow
def test_model_that_returns_caches_and_loss() -> None:
    """transformers models return caches unless ``use_cache=False``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).train()
    ids = torch.randint(0, 60, (2, 8))
    inputs = {"input_ids": ids, "labels": ids}
    eager = copy.deepcopy(model)
    with graphplan.simulate({0: ROOMY}) as machine, short_search():
        placed = graphplan.partition(model, machine.max_memory, kwargs=inputs, train=True, optimizer=ADAMW)
        assert placed(**inputs).past_key_values.get_seq_length() == 8
        for each in (placed, eager):
            step_of(each, inputs)
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


def test_gradients_accumulate_and_scale_as_in_eager() -> None:
    eager, own = stack(), stack()
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own)
        for model in (placed, eager):
            for seed in range(3):
                torch.manual_seed(seed)
                (model(**batch())["loss"] / 3).backward()
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


def test_a_gradient_scaler_and_clipping_over_two_devices() -> None:
    eager, own = stack(), stack()
    with graphplan.simulate({0: ROOMY, 1: ROOMY}) as machine:
        placed = graphplan.partition(
            own, machine.max_memory, kwargs=batch(), train=True, optimizer=ADAMW, pin={"head": 1, "embed": 0}
        )
        assert len({p.device for p in placed.parameters()}) == 2
        for model in (placed, eager):
            optimizer, scaler = ADAMW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
            for seed in range(3):
                torch.manual_seed(seed)
                scaler.scale(model(**batch())["loss"]).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        weights = [{n: p.detach().cpu() for n, p in model.named_parameters()} for model in (placed, eager)]
        assert gap(*weights) < 1e-5


def test_hooks_of_parameters_see_gradients_as_in_eager() -> None:
    eager, own = stack(), stack()
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own)
        seen: dict[str, list[float]] = {"placed": [], "eager": []}
        for what, model in (("placed", placed), ("eager", eager)):
            weight = model.head.weight
            weight.register_hook(lambda gradient: 2 * gradient)
            weight.register_post_accumulate_grad_hook(
                lambda p, found=seen[what]: found.append(float(p.grad.norm()))
            )
            for _ in range(2):
                step_of(model, batch())
        assert seen["placed"] == pytest.approx(seen["eager"])
        assert len(seen["placed"]) == 2
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


class Products(nn.Module):
    """The gradients of its weights are computed before those of what they are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.other = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(x @ self.first)
        return {"one": hidden @ self.second, "two": hidden @ self.other @ self.other}


@pytest.mark.parametrize("both", [True, False])
def test_weights_are_read_before_their_hooks_change_them(both: bool) -> None:
    def step(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.01)
        weight.grad = None

    eager, x = Products(), torch.randn(4, 8)
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, copy.deepcopy(eager), kwargs={"x": x}, train_outputs=["one", "two"])
        for model in (placed, eager):
            for weight in model.parameters():
                weight.register_post_accumulate_grad_hook(step)
            for _ in range(3):
                found = model(x)
                (found["one"].sum() + found["two"].pow(2).sum() if both else found["one"].sum()).backward()
        assert all(weight.grad is None for weight in placed.parameters())
        assert gap(weights_of(placed), weights_of(eager)) < 1e-5
        given = x.clone().requires_grad_()
        before = weights_of(placed)
        torch.autograd.grad(placed(given)["one"].sum(), given)  # for the input alone
        assert gap(weights_of(placed), before) == 0


def test_weights_are_copied_before_their_hooks_change_them() -> None:
    eager, x, done = Products(), torch.randn(4, 8), list[str]()

    class Waited(Queues):
        def synchronize_event(self, event: Any) -> None:
            done.append("waited")

    def step(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.01)
        done.append("second" if any(weight is model.second for model in (placed, eager)) else "first")

    pin = {name: "cpu" for name, _ in eager.named_parameters()}
    with graphplan.simulate({0: ROOMY, "cpu": ROOMY}) as machine:
        placed = partitioned(
            machine, copy.deepcopy(eager), kwargs={"x": x}, train_outputs="one", pin=pin, cpu_compute=False
        )
        placed._graphplan.streams = ModuleStreams(lambda device: Waited())
        placed._graphplan.codes.clear()
        for model in (placed, eager):
            for weight in model.parameters():
                weight.register_post_accumulate_grad_hook(step)
            for _ in range(2):
                model(x)["one"].sum().backward()
        assert gap(weights_of(placed), weights_of(eager)) < 1e-5
        ours, eagers = ["waited", "second", "first"], ["second", "first"]  # a GPU copies, the host goes on
        assert done == [*ours, *ours, *eagers, *eagers]


def test_later_submodule_hooks_see_both_passes() -> None:
    eager, own = stack(layers=2), stack(layers=2)
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own, kwargs=batch())
        seen: dict[nn.Module, list[str]] = {placed: [], eager: []}
        for model, calls in seen.items():
            first, second, *_ = model.layers
            first.register_forward_hook(lambda *_, calls=calls: calls.append("forward"))
            second.register_full_backward_hook(lambda *_, calls=calls: calls.append("backward"))
        with pytest.warns(graphplan.GraphplanWarning, match="hooks were added"):
            step_of(placed, batch())
        with torch.no_grad(), pytest.warns(graphplan.GraphplanWarning, match="hooks were added"):
            assert not placed(**batch())["loss"].requires_grad
        step_of(eager, batch())
        assert seen[eager] == ["forward", "backward"]
        assert seen[placed] == [*seen[eager], "forward"]
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


def test_custom_loss_of_results_outside_of_the_model() -> None:
    eager, own, inputs = stack(), stack(), {"ids": batch()["ids"]}
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own, kwargs=inputs, train_outputs="logits")
        for model in (placed, eager):
            torch.manual_seed(1)
            logits = model(**inputs)["logits"]
            (logits.softmax(-1)[..., 3].mean() + logits.pow(2).mean()).backward()
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


def test_gradient_through_an_untrained_result_raises() -> None:
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, stack())
        result = placed(**batch())
        with pytest.raises(RuntimeError, match=r"'logits'.*only from 'loss'.*train_outputs="):
            (result["loss"] + result["logits"].pow(2).mean()).backward()
        result = placed(**batch())
        (result["loss"] + result["logits"].detach().mean()).backward()


def test_one_of_two_results_in_the_loss() -> None:
    eager, own = stack().eval(), stack().eval()
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own, train_outputs=["loss", "logits"])
        for model in (placed, eager):
            result = model(**batch())
            (result["loss"] + result["logits"].pow(2).mean()).backward()
            model(**batch())["loss"].backward()
            model(**batch())["logits"].mean().backward()
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


def test_forward_under_no_grad_saves_nothing_and_equals_eager() -> None:
    eager, own = stack().eval(), stack().eval()
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own)
        before = machine.live_bytes(0)
        with torch.no_grad():
            result, expected = placed(**batch()), eager(**batch())
        assert torch.allclose(result["loss"], expected["loss"], atol=1e-6)
        assert not result["loss"].requires_grad
        assert machine.live_bytes(0) == before


def test_evaluation_between_forward_and_backward(size: int) -> None:
    eager, own = stack(), stack()
    budgets = {0: int(0.7 * size), **CPU}  # what is evaluated in between takes more
    with graphplan.simulate({0: 2 * size, **CPU}):
        placed = graphplan.partition(
            own,
            budgets,
            kwargs=batch(),
            train=True,
            optimizer=ADAMW,
            recompute=False,
            offload_activations=False,
        )
        assert placed.plan.streams
        for model in (placed, eager):
            torch.manual_seed(0)
            loss = model(**batch())["loss"]
            with torch.no_grad():
                model(**batch())
            loss.backward()
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    model = stack(layers=2)
    model.layers[0].requires_grad_(False)
    model.embed.requires_grad_(False)
    plan = check_training(model, batch(), {0: ROOMY})
    beside = {weight.name: weight.beside for weight in plan.graph.weights.values()}
    assert beside["layers.0.up.weight"] == ()
    assert len(beside["layers.1.up.weight"]) == 3
    backward = [op for op in plan.graph.operations.values() if op.backward]
    assert not any(op.module_path.startswith("layers.0") for op in backward)


def test_requires_grad_switched_later_is_another_structure() -> None:
    eager, own = stack(), stack()
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own)
        for model in (placed, eager):
            step_of(model, batch())
            model.zero_grad()
            model.layers[0].requires_grad_(False)
            step_of(model, batch())
        assert placed.layers[0].up.weight.grad is None
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
        assert len(placed.plans) == 2


def test_parameters_unfrozen_later_have_planned_optimizer_state() -> None:
    with graphplan.simulate({0: ROOMY}) as machine:
        model = stack()
        model.embed.requires_grad_(False)
        placed = partitioned(machine, model)
        placed.embed.requires_grad_(True)
        placed.head.requires_grad_(False)
        step_of(placed, batch())
        first, second = ({w.name: len(w.beside) for w in p.graph.weights.values()} for p in placed.plans)
    assert (first["embed.weight"], first["head.weight"]) == (0, 3)
    assert (second["embed.weight"], second["head.weight"]) == (3, 3)


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}])
def test_multi_tensor_optimizer_steps_over_two_devices(how: dict[str, bool]) -> None:
    eager, own = stack(), stack()
    made = functools.partial(ADAMW, lr=1e-3, **how)
    with graphplan.simulate({0: ROOMY, 1: ROOMY}) as machine:
        placed = partitioned(machine, own, optimizer=made, pin={"head": 1, "embed": 0})
        for model in (placed, eager):
            optimizer = made(model.parameters())
            for seed in range(3):
                step_of(model, batch(), seed)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
                optimizer.step()
                optimizer.zero_grad()
        assert gap(weights_of(placed), weights_of(eager)) < 1e-5
        assert all(machine.peak_bytes(key) <= placed.plan.peak_bytes[key] for key in (0, 1))


def test_autocast_in_bfloat16() -> None:
    eager, own = stack(), stack()
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own, train=True)
        for model in (placed, eager):
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch())["loss"]
            loss.backward()
        gradients = gradients_of(placed)
        assert {g.dtype for g in gradients.values() if g is not None} == {torch.float32}
        assert gap(gradients, gradients_of(eager)) < 1e-2
        assert any("bfloat16" in value.dtype for value in placed.plans[-1].graph.values.values())


def test_an_lstm_on_the_cpu() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.lstm(x)[0].pow(2).mean()}

    torch.manual_seed(0)
    own, inputs = Recurrent(), {"x": torch.randn(2, 3, 8)}
    eager = copy.deepcopy(own)
    placed = graphplan.partition(own, CPU, kwargs=inputs, strict=True, train=True)
    for model in (placed, eager):
        step_of(model, inputs)
    assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow)])
def test_optimizer_step_does_not_retrace_a_recurrent_layer(kind: Any) -> None:
    """These layers have their weights in a list too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_training(kind(8, 8), {"input": torch.randn(3, 2, 8)}, {0: ROOMY}, exact=False)


def test_a_fused_optimizer() -> None:
    fused = functools.partial(ADAMW, fused=True)
    check_training(stack(), batch(), {0: ROOMY}, optimizer=fused, exact=False)


@pytest.mark.parametrize(
    ("foreach", "kind"),
    [
        (False, torch.optim.ASGD),
        (True, torch.optim.Adafactor),
        pytest.param(False, torch.optim.Adafactor, marks=pytest.mark.slow),
        pytest.param(True, torch.optim.ASGD, marks=pytest.mark.slow),
    ],
)
def test_optimizer_that_reads_numbers_from_its_state(kind: Any, foreach: bool) -> None:
    made = functools.partial(kind, foreach=foreach)
    check_training(stack(), batch(), {0: ROOMY}, optimizer=made, exact=False)


def test_data_dependent_optimizer_step_is_not_measured() -> None:
    class Careful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if any(p.grad.isnan().any() for group in self.param_groups for p in group["params"]):
                return None
            return super().step(closure)

    with pytest.raises(graphplan.InputError, match="optimizer_bytes_per_element"):
        graphplan.plan(stack(), {0: "1GiB"}, kwargs=batch(), train=True, optimizer=Careful)


def test_dropout_depends_on_the_seed() -> None:
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, stack())
        losses = [float(step_of(placed, batch(), seed)) for seed in (1, 1, 2)]
        assert losses[0] == losses[1] != losses[2]


def test_batch_norm_statistics_change_once_per_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    )
    inputs = {"input": torch.randn(4, 3, 16, 16)}
    room = needed(model, inputs, optimizer=ADAMW)
    check_training(model, inputs, {0: int(0.8 * room), **CPU})


def test_scalar_parameter_has_its_state_on_its_device() -> None:
    # seen on CLIP's logit_scale: the plan was 1,024 bytes below what was measured
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(64, 64), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) * self.scale.exp()

    plan = check_training(Scaled(), {"x": torch.randn(256, 64)}, {0: ROOMY})
    assert plan.graph.weights["scale"].beside == (4, 4, 4)


def test_copies_and_pickles_train_too() -> None:
    eager, own = stack(), stack()
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own)
        copied, unpickled = copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))
        step_of(eager, batch())
        for model in (copied, unpickled):
            step_of(model, batch())
            assert gap(gradients_of(model), gradients_of(eager)) < 1e-5
        assert all(parameter.grad is None for parameter in placed.parameters())


class Asking(nn.Module):
    """Its path depends on its data: its modules run one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.stack(ids, labels)
        return found if found["loss"] < 1e9 else {}


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The weights afterwards."""
    for _ in range(2):
        model(**batch())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Stack, {"train": True}),
        pytest.param(Asking, {"grad": True}, marks=pytest.mark.slow),
        pytest.param(Stack, {"grad": True}, marks=pytest.mark.slow),
        pytest.param(Asking, {"train": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_optimizer_created_before_first_call_trains(kind: type[nn.Module], options: dict[str, bool]) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return kind().eval()  # without dropout

    eager = fresh()
    expected = two_steps(eager, sgd(eager))
    with graphplan.simulate({0: ROOMY}), short_search():
        own = fresh()
        later = graphplan.partition(own, {0: ROOMY}, **options)
        now = graphplan.partition(fresh(), {0: ROOMY}, kwargs=batch(), **options)
        for placed in (later, pickle.loads(pickle.dumps(now)), pickle.loads(pickle.dumps(later))):
            held = dict(placed.named_parameters())
            found = two_steps(placed, sgd(placed))
            assert all(parameter is held[name] for name, parameter in placed.named_parameters())
            assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 1e-4
        untouched = zip(own.parameters(), fresh().parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in untouched)


class Recurrent(nn.Module):
    """Its layer has weak references to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)[0]
        return found


@pytest.mark.parametrize("options", [{}, {"train": True}, {"grad": True}], ids=str)
def test_referenced_parameters_warn_at_the_first_call(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 2, 8)
    with graphplan.simulate({0: ROOMY}):
        with pytest.warns(graphplan.GraphplanWarning, match="first call"):
            placed = graphplan.partition(model, {0: ROOMY}, **options)
        with pytest.warns(graphplan.GraphplanWarning, match="holds on to 'layer.weight_ih_l0'"):
            result = placed(x)
        assert gap({"": result.detach().cpu()}, {"": model(x).detach()}) < 1e-5


@pytest.mark.filterwarnings("ignore:.*is traced again:graphplan.GraphplanWarning")
@pytest.mark.parametrize("options", [{"grad": True}, {"train": True}], ids=str)
def test_optimizer_trains_a_replaced_head_and_the_rest(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)), torch.randn(4, 8)
    found = []
    with graphplan.simulate({0: ROOMY}):
        for one in (model, graphplan.partition(model, {0: ROOMY, "cpu": ROOMY}, (x,), **options)):
            torch.manual_seed(1)
            optimizer = torch.optim.SGD(one.parameters(), 0.1)
            one(x).sum().backward()
            optimizer.step()
            one[2] = nn.Linear(8, 4)
            optimizer.add_param_group({"params": list(one[2].parameters())})
            for _ in range(2):
                optimizer.zero_grad()
                one(x).square().sum().backward()
                optimizer.step()
            found.append({name: weight.detach().cpu() for name, weight in one.named_parameters()})
    assert gap(*found) < 1e-5


class Held(nn.Module):
    """Without a graph, and with a parameter in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.held = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x @ self.held[0]
        return found if found.sum() < 1e9 else self.layer(found)


@pytest.mark.parametrize("budgets", [{"cpu": ROOMY}, {0: ROOMY, "cpu": ROOMY}, {0: ROOMY, 1: ROOMY}], ids=str)
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_untraced_model_shares_parameters_held_in_lists(budgets: dict[Any, int]) -> None:
    torch.manual_seed(0)
    model, x = Held(), torch.randn(2, 8)
    with graphplan.simulate({0: ROOMY, 1: ROOMY}):
        later = graphplan.partition(model, budgets, grad=True, check=True)
        now = graphplan.partition(model, budgets, (x,), grad=True)
        model(x).square().sum().backward()
        for placed in (later, now, pickle.loads(pickle.dumps(now))):
            placed(x).square().sum().backward()
            assert placed.held[0] is placed.layer.weight
            assert gap({"": placed.layer.weight.grad.cpu()}, {"": model.layer.weight.grad}) < 1e-5


def test_inference_mode_parameters_are_placed_at_first_call() -> None:
    with torch.inference_mode():
        model, x = nn.Linear(8, 8), torch.ones(2, 8)
        for budgets in ({0: ROOMY}, {"cpu": ROOMY}):
            with graphplan.simulate({0: ROOMY}):
                with pytest.warns(graphplan.GraphplanWarning, match="first call"):
                    placed = graphplan.partition(model, budgets)
                assert gap({"": placed(x).cpu()}, {"": model(x)}) < 1e-5


def test_custom_attributes_of_parameters_are_kept() -> None:
    own = stack()
    own.head.bias.no_decay = True  # type: ignore[union-attr]  # a mark for optimizers
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, own)
        assert placed.head.bias.no_decay
        assert copy.deepcopy(placed).head.bias is not placed.head.bias
        assert graphplan.unplace(placed).head.bias.no_decay


ONE_BATCH: dict[str, Any] = {"optimizer": ADAMW, "accumulate_gradients": False}


@pytest.fixture(scope="module")
def size_of_one_batch() -> int:
    with short_search():
        return needed(stack(), batch(), **ONE_BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.8])
def test_non_accumulated_gradients_take_memory_once_computed(
    size: int, size_of_one_batch: int, share: float
) -> None:
    own, inputs, peak = stack(), batch(), size_of_one_batch
    assert peak < size
    with graphplan.simulate({0: int(share * peak), **CPU}) as machine:
        placed = graphplan.partition(
            copy.deepcopy(own), machine.max_memory, kwargs=inputs, train=True, **ONE_BATCH
        )
        optimizers = [ADAMW(each.parameters()) for each in (placed, own)]
        for turn in range(3):
            found, expected = step_of(placed, inputs, turn), step_of(own, inputs, turn)
            assert abs(float(found) - float(expected)) < 1e-5
            assert gap(gradients_of(placed), gradients_of(own)) < 1e-5
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]
        with torch.no_grad():
            placed(**inputs)
        step_of(placed, inputs)
        refusal = r"has a gradient of \d+ bytes on (cpu|sim:0) when a forward pass begins.*zero_grad"
        with pytest.raises(graphplan.PlanError, match=refusal):
            placed(**inputs)
        with torch.no_grad(), pytest.raises(graphplan.PlanError, match=refusal):
            placed(**inputs)  # whose plan counts none either
        placed.embed.requires_grad_(False)
        placed.embed.weight.grad, kept = None, placed.embed.weight.grad
        placed.zero_grad()
        placed.embed.weight.grad = kept  # frozen since
        with pytest.raises(graphplan.PlanError, match=r"'embed.weight' " + refusal):
            placed(**inputs)
        kept = placed.embed.weight.grad = None
        step_of(placed, inputs)
        assert "embed.weight" not in {v.gradient_of for v in placed.plans[-1].graph.values.values()}
        beside = {w.name: w.beside for w in placed.plans[-1].graph.weights.values()}
        size = placed.embed.weight.nbytes
        assert beside["embed.weight"] == (size, size)  # the optimizer's state, and no gradient


def test_gradients_kept_by_a_hook_are_not_overwritten() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), train=True)
        kept: list[torch.Tensor] = []
        for parameter in placed.parameters():
            parameter.register_hook(kept.append)
        placed(x).square().sum().backward()
        first = [gradient.cpu().clone() for gradient in kept]
        placed(x).square().sum().backward()  # adds up
        assert all(a.equal(b.cpu()) for a, b in zip(first, kept, strict=False))


def test_training_leaves_no_weights_on_disk() -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.randn(8, 64)
    options: dict[str, Any] = {"train": True, "optimizer": torch.optim.SGD}
    budgets = {0: 100 << 10, "cpu": 100 << 10, "disk": ROOMY}
    with pytest.raises(graphplan.InfeasibleError, match="no placement fits") as caught:
        graphplan.plan(model, budgets, (x,), **options)
    assert "save_pretrained" not in str(caught.value)
    plan = graphplan.plan(model, dict(caught.value.needed), (x,), **options)
    assert "disk" not in plan.placement.values()
    assert "optimizer" in str(plan)


def test_accumulate_gradients_requires_train_and_one_machine() -> None:
    machines = [{0: "1GiB"}, {0: "1GiB"}]
    with pytest.raises(graphplan.InputError, match="accumulate_gradients"):
        graphplan.plan(stack(), kwargs=batch(), machines=machines, train=True, accumulate_gradients=False)
    with pytest.raises(graphplan.InputError, match="accumulate_gradients= goes with train=True"):
        graphplan.plan(stack(), {0: "1GiB"}, kwargs=batch(), accumulate_gradients=False)


def test_backward_operations_belong_to_forward_modules() -> None:
    with graphplan.simulate({0: ROOMY, 1: ROOMY}) as machine:
        pin = {"layers.1": 1, "layers.0": 0}
        plan = graphplan.plan(stack(layers=2), machine.max_memory, kwargs=batch(), train=True, pin=pin)
    operations, devices = plan.graph.operations, plan.schedule.assignment.operations
    for module, device in (("layers.0", 0), ("layers.1", 1)):
        named = [op for op in operations.values() if op.module_path.startswith(module)]
        assert {op.backward for op in named} == {True, False}
        assert {devices[op.name] for op in named if not op.host_only} == {device}
    gelu = next(op for op in operations.values() if op.target == "gelu_backward")
    assert gelu.module_path == "layers.1"


def test_second_backward_and_changed_weights_raise() -> None:
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, stack())
        loss = placed(**batch())["loss"]
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        loss = placed(**batch())["loss"]
        with torch.no_grad():
            placed.head.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"'head.weight' has been changed"):
            loss.backward()


@pytest.mark.parametrize("name", ["0.weight", "an input"])
def test_refused_backward_frees_saved_activations(name: str) -> None:
    with graphplan.simulate({0: ROOMY}) as machine:
        x = torch.randn(512, 8, device="sim:0")
        model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
        placed = graphplan.partition(model, machine.max_memory, (x,), train=True)
        loss = placed(x).sum()
        held = machine.live_bytes(0)
        with torch.no_grad():
            dict(placed.named_parameters()).get(name, x).add_(1)
        with pytest.raises(RuntimeError, match=f"(?i){name}.* has been changed"):
            loss.backward()
        gc.collect()
        assert machine.live_bytes(0) < held


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


def _write_data(model: nn.Module) -> None:
    weight = model.get_parameter("0.weight")
    weight.data = weight.data * 2


def _replace(model: nn.Module) -> None:
    model.get_submodule("0").weight = nn.Parameter(model.get_parameter("0.weight") * 2)


@pytest.mark.parametrize("change", [_assign, _write_data, _replace])
def test_weights_replaced_before_backward_raise(change: Callable[[nn.Module], None]) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with graphplan.simulate({0: ROOMY}) as machine:
        model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
        placed = graphplan.partition(model, machine.max_memory, (x,), train=True)
        loss = placed(x).sum()
        change(placed)
        with pytest.raises(RuntimeError, match=r"'0\.weight' has been replaced"):
            loss.backward()


def test_functional_call_raises_with_remedy() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    placed = graphplan.partition(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), CPU, (x,), train=True)
    others = {name: value.detach() * 2 for name, value in placed.named_parameters()}
    loss = torch.func.functional_call(placed, others, (x,)).sum()
    with pytest.raises(RuntimeError, match="grad=True instead of train=True"):
        loss.backward()


@pytest.mark.parametrize("what", ["result", "input"])
def test_saved_tensor_changed_before_backward_raises(what: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), torch.randn(3, 8)
    placed = graphplan.partition(model, CPU, kwargs={"input": x}, train=True)
    for each in (placed, model):
        result = each(x)
        loss = result.sum()
        with torch.no_grad():
            (result if what == "result" else x).mul_(2)
        with pytest.raises(RuntimeError, match=r"in-?place operation"):
            loss.backward()


def test_inputs_that_require_gradients_later_get_gradients() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(3, 8)
    eager, mine, theirs = copy.deepcopy(model), nn.Linear(8, 8), nn.Linear(8, 8)
    theirs.load_state_dict(mine.state_dict())
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, model, kwargs={"input": x})
        for each, before in ((placed, mine), (eager, theirs)):
            each(x).pow(2).sum().backward()
            each(before(x)).pow(2).sum().backward()
            each.requires_grad_(False)  # as a discriminator is, while the generator trains
            (each(before(x)).sum() + before.weight.sum()).backward()
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
        assert gap(gradients_of(mine), gradients_of(theirs)) < 1e-5


@pytest.mark.parametrize("budgets", [{"cpu": ROOMY}, {0: ROOMY}], ids=str)
def test_gradient_of_an_input_leaves_parameter_gradients(budgets: dict[Any, int]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8)

    def adversarial(of: nn.Module) -> list[torch.Tensor]:
        found = []
        for _ in range(2):
            near = x.clone().requires_grad_()
            (of(near).square().mean()).backward(inputs=[near])
            assert near.grad is not None
            again = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(of(again).square().mean(), again)
            assert torch.equal(gradient, near.grad)
            of(x + 0.1 * gradient.sign()).square().mean().backward()
            found += [
                parameter.grad.cpu().clone() for parameter in of.parameters() if parameter.grad is not None
            ]
        return found

    with graphplan.simulate({0: ROOMY}):
        inputs = (x.clone().requires_grad_(),)
        placed = graphplan.partition(copy.deepcopy(model), budgets, inputs, train=True, strict=True)
        for a, b in zip(adversarial(placed), adversarial(model), strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(3, 8)
    eager, mine, theirs = copy.deepcopy(model), x.clone().requires_grad_(), x.clone().requires_grad_()
    with graphplan.simulate({0: ROOMY}) as machine:
        placed = partitioned(machine, model, kwargs={"input": mine})
        placed(mine).pow(2).sum().backward()
        eager(theirs).pow(2).sum().backward()
    assert mine.grad is not None
    assert torch.allclose(mine.grad, theirs.grad, atol=1e-6)


def test_input_gradients_are_on_the_device_of_the_input() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * y).sum()

    model, x, y = Product(), *torch.randn(2, 3, 8)
    eager = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    with graphplan.simulate({0: ROOMY, "cpu": ROOMY}) as machine:
        mine = [x.clone().requires_grad_(), y.to("sim:0").requires_grad_()]
        placed = partitioned(machine, model, kwargs=dict(zip("xy", eager, strict=True)))
        placed(*mine).backward()
        model(*eager).backward()
        for one, other in zip(mine, eager, strict=True):
            assert one.grad is not None
            assert one.grad.device == one.device
            assert torch.allclose(one.grad.cpu(), other.grad, atol=1e-6)


# -- what is saved less ---------------------------------------------------------------------------------


def wide_batch() -> dict[str, torch.Tensor]:
    return batch(16, 64)  # activations are most of a step


@pytest.fixture(scope="module")
def wide() -> int:
    with short_search():
        return needed(deep_stack(), wide_batch(), optimizer=ADAMW)


def test_recomputation_does_not_repeat_random_draws(wide: int) -> None:
    plan = check_training(deep_stack(), wide_batch(), {0: int(0.6 * wide), **CPU}, offload_activations=False)
    again = [op for op in plan.graph.operations.values() if op.repeats]
    assert again
    assert all(op.backward for op in again)
    assert not any("bernoulli" in op.target for op in again)
    assert 0 < plan.recompute_seconds < plan.makespan
    assert f"recomputes {len(plan.recomputed)} operations" in plan.summary()


def test_activations_are_offloaded_to_cpu_memory(wide: int) -> None:
    plan = check_training(deep_stack(), wide_batch(), {0: int(0.4 * wide), **CPU}, recompute=False)
    kept = [op.name for op in plan.graph.operations.values() if op.offloads]
    assert kept
    assert {plan.schedule.assignment.operations[name] for name in kept} == {"cpu"}
    assert sum(plan.offloaded_activations.values()) > 0.1 * wide
    assert "to CPU memory until the backward pass" in plan.summary()


@pytest.mark.slow
@pytest.mark.full_search
def test_bound_holds_for_any_saved_activations() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    planned = functools.partial(graphplan.plan, model, kwargs={"input": torch.randn(256, 64)}, train=True)
    with graphplan.simulate({0: ROOMY, **CPU}) as machine:
        roomy = planned(machine.max_memory)
        tight = planned({0: int(0.6 * roomy.peak_bytes[0]), **CPU})
    assert tight.lower_bound <= roomy.makespan  # which saves everything
    assert "whatever is saved" in tight.proof


def test_explain_shows_saved_bytes_and_recompute_seconds() -> None:
    with graphplan.simulate({0: ROOMY}) as machine:
        plan = graphplan.plan(deep_stack(), machine.max_memory, kwargs=wide_batch(), train=True)
        found = plan.explain("layers.1")
    rows = 16 * 64
    assert found.saved_bytes >= 4 * rows * 128  # the input of gelu
    assert 0 < found.recompute_seconds < plan.makespan / 4
    assert "saves" in str(found)


@pytest.mark.slow
def test_largest_batch_is_the_last_that_fits(size: int) -> None:
    with graphplan.simulate({0: size}) as machine, short_search():
        found = graphplan.largest_batch(
            stack(),
            machine.max_memory,
            kwargs=batch(),
            limit=16,
            train=True,
            optimizer=ADAMW,
            recompute=False,
        )
        assert 8 <= found < 12  # 8 were planned for


@pytest.mark.slow
def test_recomputation_can_be_forbidden(wide: int) -> None:
    with graphplan.simulate({0: int(0.6 * wide)}) as machine:
        with pytest.raises(graphplan.InfeasibleError):
            partitioned(machine, deep_stack(), kwargs=wide_batch(), recompute=False)
        plan = partitioned(machine, deep_stack(), kwargs=wide_batch()).plan
    assert any(op.repeats for op in plan.graph.operations.values())


class Branching(Stack):
    """Data decides what it computes."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        result = super().forward(ids, labels)
        return (
            result if float(result["logits"].detach().sum()) > 1e9 else {**result, "loss": result["loss"] * 2}
        )


def test_untraceable_step_trains_through_autograd_with_a_warning() -> None:
    torch.manual_seed(0)
    model = Branching().eval()
    eager = copy.deepcopy(model)
    with graphplan.simulate({0: ROOMY}) as machine:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            placed = graphplan.partition(model, machine.max_memory, kwargs=batch(), train=True)
        texts = [str(one.message) for one in said if one.category is graphplan.GraphplanWarning]
        assert any(re.search(r"that autograd saves \(about [\d.]+ KiB", text) for text in texts)
        for one in (placed, eager):
            step_of(one, batch())
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
        with pytest.raises(graphplan.CaptureError):
            graphplan.partition(Branching(), machine.max_memory, kwargs=batch(), train=True, strict=True)


def test_sparse_gradient_uses_autograd() -> None:
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8)), batch()["ids"]
    eager = copy.deepcopy(model)
    with pytest.warns(graphplan.GraphplanWarning, match="gradient of '0.weight' is sparse"):
        placed = graphplan.partition(model, CPU, args=(ids,), train=True)
    for each in (placed, eager):
        each(ids).sum().backward()
    assert torch.equal(placed[0].weight.grad.to_dense(), eager[0].weight.grad.to_dense())


def test_lengths_vary_with_features_scattered_by_a_mask() -> None:
    class WithFeatures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(ids)
            mask = (ids == 1).unsqueeze(-1)
            return hidden.masked_scatter(mask, self.linear(features)).square().mean()

    torch.manual_seed(0)
    model = WithFeatures()
    placed = graphplan.partition(
        copy.deepcopy(model), CPU, args=(torch.ones(2, 3, dtype=torch.long), torch.randn(6, 4)), train=True
    )
    for length in (6, 7, 8):
        ids, features = torch.tensor([[1] * 3 + [2] * length] * 2), torch.randn(6, 4)
        for each in (placed, model):
            each.zero_grad()
            each(ids, features).backward()
        assert gap(gradients_of(placed), gradients_of(model)) < 1e-5
    assert len(placed.plans) == 2


@pytest.mark.slow
def test_size_conditions_with_specialized_sizes() -> None:
    class OfTwo(nn.Linear):
        """Has rows of which all pairs are compared, and two of ids."""

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            rows = super().forward(x.reshape(-1, 4))
            pairs = rows @ rows.T
            return (pairs.softmax(-1) @ rows).sum() * (2 if ids.shape[0] == 2 else 1)

    torch.manual_seed(0)
    model, call = OfTwo(4, 4), (torch.randn(8, 8), torch.ones(2, 3))
    placed = graphplan.partition(copy.deepcopy(model), CPU, args=call, train=True, strict=True)
    for batch_size, rows in ((6, 2), (9, 2), (9, 3)):
        x, ids = torch.randn(batch_size, 8), torch.ones(rows, batch_size)
        for each in (placed, model):
            each.zero_grad()
            each(x, ids).backward()
        assert gap(gradients_of(placed), gradients_of(model)) < 1e-5


# -- arguments ------------------------------------------------------------------------------------------


def test_the_optimizers_state_is_counted(size: int) -> None:
    with graphplan.simulate({0: ROOMY}) as machine:
        plan = functools.partial(graphplan.plan, stack(), machine.max_memory, kwargs=batch(), train=True)
        held = [
            plan(**options).peaks[0].weights
            for options in (
                {},
                {"optimizer": torch.optim.SGD},
                {"optimizer": functools.partial(torch.optim.SGD, momentum=0.9)},
                {"optimizer": ADAMW},
                {"optimizer_bytes_per_element": 8},
            )
        ]
    weights = bytes_of(stack())
    assert held[0] == held[1] < held[2] < held[3]
    assert held[0] >= 2 * weights
    assert held[3] >= 4 * weights
    assert abs(held[4] - held[3]) < 0.05 * held[3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": ADAMW}, "train=True"),
        ({"train": 1}, "train must be"),
        ({"train": True, "optimizer": 3}, "give the class"),
        ({"train": True, "optimizer": "adam"}, "optimizer='adam': give the class"),
        ({"train": True, "optimizer": ADAMW, "optimizer_bytes_per_element": 8}, "not both"),
        ({"train": True, "optimizer_bytes_per_element": -1}, "0 or more"),
        ({"train": True, "train_outputs": "scores"}, "'scores'"),
        ({"train": True, "train_outputs": []}, "train_outputs"),
        ({"train": True, "train_outputs": 0}, "train_outputs must be names"),
        ({"train": True, "max_batch": 0}, "max_batch"),
        ({"train": True, "calls": [((), {})]}, "calls"),
    ],
)
def test_invalid_arguments_raise_with_remedy(options: dict[str, Any], said: str) -> None:
    model = stack()
    with pytest.raises(graphplan.InputError, match=said):
        graphplan.plan(model, {0: "1GiB"}, kwargs=batch(), **options)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_unnamed_results_raise_for_train_outputs() -> None:
    options = {"train": True, "train_outputs": "logits"}
    with pytest.raises(graphplan.InputError, match="train_outputs='logits': the results are without names"):
        graphplan.plan(nn.Linear(4, 4), {"cpu": "1GiB"}, (torch.ones(2, 4),), **options)


def test_plan_of_a_step_without_inputs_raises() -> None:
    with pytest.raises(graphplan.InputError, match="example inputs"):
        graphplan.plan(stack(), {0: "1GiB"}, train=True)


def test_model_without_loss_or_trainable_parameters_raises() -> None:
    frozen = stack().requires_grad_(False)
    with pytest.raises(graphplan.InputError, match="grad=True instead if only inputs"):
        graphplan.plan(frozen, {0: "1GiB"}, kwargs=batch(), train=True)

    class Silent(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids)["logits"].argmax(-1)

    with pytest.raises(graphplan.InputError, match="no result"):
        graphplan.plan(Silent(), {0: "1GiB"}, kwargs={"ids": batch()["ids"]}, train=True)


def test_a_plan_of_a_step_is_data() -> None:
    with graphplan.simulate({0: ROOMY, **CPU}) as machine:
        plan = graphplan.plan(stack(), machine.max_memory, kwargs=batch(), train=True, optimizer=ADAMW)
        again = graphplan.Plan.from_json(plan.to_json())
        again.verify()
    assert again.graph == plan.graph
    assert again.peak_bytes == plan.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "forbidden"),
    [(0.4, "recompute"), pytest.param(0.6, "offload_activations", marks=pytest.mark.slow)],
)
def test_given_plan_of_a_step_needs_no_search(
    wide: int, share: float, forbidden: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"kwargs": wide_batch(), "train": True, "optimizer": ADAMW}
    eager, own, file = deep_stack(), deep_stack(), tmp_path / "plan.json"
    with graphplan.simulate({0: int(share * wide), **CPU}) as machine, short_search():
        plan = graphplan.plan(own, machine.max_memory, **options, **{forbidden: False})
        assert any(op.repeats or op.offloads for op in plan.graph.operations.values())
        file.write_text(plan.to_json())
        with patch("graphplan.compiler.activation_choice.probe", side_effect=AssertionError):
            placed = graphplan.partition(own, plan=file, **options)
        assert placed.plan.graph == plan.graph
        assert placed.plan.schedule == plan.schedule
        for model in (placed, eager):
            step_of(model, wide_batch())
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
        assert machine.peak_bytes(0) <= plan.peak_bytes[0]
        with pytest.raises(graphplan.PlanError, match="the optimizer"):
            graphplan.partition(own, plan=plan, **{**options, "optimizer": None})
        with pytest.raises(graphplan.PlanError, match=r"is of a training step.*train="):
            graphplan.partition(own, plan=plan, kwargs=wide_batch())


def test_a_step_is_profiled(wide: int, tmp_path: Path) -> None:
    eager = deep_stack()
    with graphplan.simulate({0: int(0.6 * wide), **CPU}) as machine:
        placed = partitioned(machine, deep_stack(), kwargs=wide_batch())
        machine.reset_peaks()
        step_of(placed, wide_batch())
        peak = machine.peak_bytes(0)
        placed.zero_grad()
        torch.manual_seed(0)
        profile = placed.profile(**wide_batch())
        step_of(eager, wide_batch())
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5
    plan, measured = profile.plan, {e.name for e in profile.timeline.events if e.kind == "run"}
    assert {op.name for op in plan.graph.operations.values() if op.flops} <= measured
    assert any(plan.graph.operations[name].backward for name in measured)
    assert profile.peak_bytes[0] == peak <= plan.peak_bytes[0]
    assert "one training step" in str(profile)
    profile.save_html(tmp_path / "page.html")


def test_training_leaves_nothing_on_the_devices() -> None:
    with graphplan.simulate({0: ROOMY}) as machine, warnings.catch_warnings():
        placed = partitioned(machine, stack())
        result = placed(**batch())
        del placed, result
        gc.collect()
        assert machine.live_bytes(0) == 0


class Changed(nn.Module):
    """A loss of a parameter that is changed on its way, with another and the batch."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change
        self.w, self.d = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (x @ self.change(self.w, self.d)).pow(2).mean()}


def written(w: torch.Tensor, where: Any, value: Any) -> torch.Tensor:
    w = w.clone()
    w[where] = value
    return w


ROWS, SOME = slice(1, 3), torch.tensor([0, 2])
CHANGES = {
    "rows filled": lambda w, d: written(w, ROWS, 0),
    "rows set": lambda w, d: written(w, ROWS, d),
    "a column set": lambda w, d: written(w, (slice(None), 1), d.flatten()),
    "a filled copy of another's product": lambda w, d: written(w * d.sum(), ROWS, 1),
    "index_copy": lambda w, d: w.index_copy(0, SOME, d),
    "index_copy of both": lambda w, d: w.index_copy(0, SOME, d).index_add(0, SOME, d),
    "index_add": lambda w, d: w.index_add(0, SOME, d),
    "as_strided_scatter": lambda w, d: w.as_strided_scatter(d, (2, 2), (2, 1), 2),
    "the same shape": lambda w, d: w.expand(4, 2).reshape(4, 2).view(4, 2) + d.expand(2, 2).repeat(2, 1),
    "the same type": lambda w, d: w.to(torch.float32).contiguous() + torch.cat([d, d[:]]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_gradients_of_parameters_changed_during_forward(change: Any) -> None:
    torch.manual_seed(0)
    model = Changed(change).train()
    x = torch.randn(3, 4)
    model(x)["loss"].backward()
    expected = gradients_of(model)
    model.zero_grad()
    placed: Any = graphplan.partition(model, CPU, kwargs={"x": x}, train=True, strict=True)
    placed(x=x)["loss"].backward()
    assert gap(gradients_of(placed), expected) < 1e-6


class Detaches(nn.Module):
    """Returns a result and its detached copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y.detach(), y, y


def test_result_and_its_detached_copy_are_returned() -> None:
    # both required one, and backward() ended in an error of zip
    model, x = Detaches(), torch.randn(3, 4)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,), train=True)
    for one in (placed, model):
        detached, first, second = one(x)
        assert [r.requires_grad for r in (detached, first, second)] == [False, True, True]
        assert torch.equal(detached, first)
        (first.sum() + second.square().sum()).backward()
    assert gap(gradients_of(placed), gradients_of(model)) < 1e-5


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        loss = self.linear(x).square().mean()
        return {"loss": loss, "log": {"loss": loss, "value": loss.detach()}}


def test_detached_loss_may_be_returned_too() -> None:
    # the gradient was taken for one of the logged loss
    model, x = Logs(), torch.randn(3, 4)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,), train=True)
    for one in (placed, model):
        found = one(x)
        assert not found["log"]["value"].requires_grad
        found["loss"].backward()
    assert gap(gradients_of(placed), gradients_of(model)) < 1e-5


class Halves(nn.Module):
    """Results that one operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x).chunk(2, -1)


@pytest.mark.parametrize("used", [0, 1])
def test_loss_of_one_slice_of_a_tensor(used: int) -> None:
    model, x = Halves(), torch.randn(4, 8)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,), train=True)
    for one in (placed, model):
        one(x)[used].square().sum().backward()  # it ended in an IndexError
    assert gap(gradients_of(placed), gradients_of(model)) < 1e-5


class Normed(nn.Module):
    """Writes to weights, and counts, in blocks without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.div_(layer.weight.norm(dim=1, keepdim=True))
                self.seen += x.sum(0)
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("budget", [150_000, 10_000_000])
def test_writes_under_no_grad_are_traced(budget: int) -> None:
    # those to prefetched weights were lost, those to buffers failed
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(32, 64)
    with graphplan.simulate({0: 1 << 30, "cpu": 1 << 32}):
        placed = graphplan.partition(copy.deepcopy(model), {0: budget, "cpu": 1 << 32}, (x,), grad=True)
        for _ in range(2):
            assert torch.allclose(placed(x), model(x), atol=1e-5)
        assert gap(weights_of(placed), weights_of(model)) < 1e-5
        assert torch.allclose(placed.seen.cpu(), model.seen, atol=1e-3)


class Balanced(nn.Module):
    """Computes something that it does not use, before a block without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        unused = y * 3  # noqa: F841  # what is tested
        with torch.no_grad():
            mean = y.abs().mean()
        return (y / mean).square().sum()


@pytest.mark.parametrize("options", [{"grad": True}, {"train": True}])
def test_unused_values_next_to_a_no_grad_block(options: dict[str, bool]) -> None:
    model, x = Balanced(), torch.randn(2, 4)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,), **options)  # a SystemError
    for one in (placed, model):
        one(x).backward()
    assert gap(gradients_of(placed), gradients_of(model)) < 1e-5


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 4), name
        self.register_parameter(name, nn.Parameter(torch.ones(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = torch.relu(self.linear(x) * self.get_parameter(self.name))
        return (scaled + self.get_parameter(self.name)).sum()


@pytest.mark.parametrize(
    "name", ["t", "t_1", "mul", "relu", "threshold_backward", "sum_2", "clone", "arg0_1"]
)
def test_parameter_named_like_an_operation(name: str) -> None:
    # planning failed: "operation 't' outputs 't', which exists already"
    model, x = Named(name), torch.randn(3, 4)
    check_training(model, {"x": x}, {0: 1 << 20, "cpu": ROOMY})


class Prototypes(nn.Module):
    """Distances to prototypes that a submodule computes from its weights alone."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.mix = nn.Parameter(torch.ones(4, 8)), nn.Linear(8, 8)

        def forward(self) -> torch.Tensor:
            return self.mix(self.start)

    def __init__(self) -> None:
        super().__init__()
        self.table, self.project = Prototypes.Table(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(self.project(x), self.table())


def test_step_of_a_submodule_without_inputs_equals_eager() -> None:
    torch.manual_seed(0)
    model, x = Prototypes(), torch.randn(3, 8)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), train=True)
        for one in (model, placed):
            (one(x).mean() + one.table().square().mean()).backward()
        assert gap(gradients_of(placed), gradients_of(model)) < 1e-6
