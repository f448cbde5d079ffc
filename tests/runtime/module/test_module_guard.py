"""Changes of a placed module are retraced or refused: no stale graph runs."""

from __future__ import annotations

import copy
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import copy_context
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import graphplan
from graphplan import GraphplanWarning
from graphplan.capture.thread_patches import CAPTURE_LOCK


class Net(nn.Module):
    """Ties, plain attributes, a container, several kinds of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.embed.weight
        self.act, self.norm, self.drop = nn.ReLU(), nn.LayerNorm(8), nn.Dropout(0.0)
        self.k, self.steps = 2.0, [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = x * step
        return self.head(self.drop(self.norm(self.act(self.embed(x))))) * self.k


@pytest.fixture(scope="module")
def machine() -> Iterator[Any]:
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as found:
        yield found


def placed_net(machine: Any) -> tuple[nn.Module, Net, torch.Tensor]:
    net, x = Net().eval(), torch.randn(3, 8)
    placed = graphplan.partition(net, machine.max_memory, (x,))
    assert torch.allclose(placed(x), net(x))
    return placed, copy.deepcopy(net), x


def replace_weight(net: Any) -> None:
    net.head.weight = nn.Parameter(torch.full_like(net.head.weight, 0.5, device="cpu"))


def assign_weights(net: nn.Module) -> None:
    state = {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}
    state["head.weight"] = state["head.weight"] + 1
    net.load_state_dict(state, assign=True)


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(input)


def wrap_linear(net: Any) -> None:
    class Wrapped(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.low = base, nn.Linear(8, 8)
            nn.init.constant_(self.low.weight, 0.25)
            nn.init.zeros_(self.low.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.low(x)

    net.embed = Wrapped(net.embed)


def subclass_linear(net: Any) -> None:
    found = Scaled(8, 8)
    found.load_state_dict({name: value.cpu() for name, value in net.embed.state_dict().items()})
    net.embed = found


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an untied weight": replace_weight,
    "other values of a tied name": assign_weights,
    "a module": lambda net: setattr(net, "act", nn.Sigmoid()),
    "a subclass": subclass_linear,
    "a wrapper": wrap_linear,
    "the class of a module": lambda net: setattr(net.embed, "__class__", Scaled),
    "eps": lambda net: setattr(net.norm, "eps", 1.0),
    "a number": lambda net: setattr(net, "k", 5.0),
    "a list in place": lambda net: net.steps.append(3),
    "no bias": lambda net: setattr(net.embed, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_retraced_once(machine: Any, change: Callable[[Any], Any]) -> None:
    placed, net, x = placed_net(machine)
    change(net)
    change(placed)
    with pytest.warns(GraphplanWarning, match="traced again") as found:
        assert torch.allclose(placed(x), net(x), atol=1e-5)
    assert len(found) == 1
    assert not torch.allclose(placed(x + 1), Net().eval()(x + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(placed(2 * x), net(2 * x), atol=1e-5)  # once


def test_warning_of_a_retrace_names_the_removed_module(machine: Any) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model[0].internal_flag = True
    placed = graphplan.partition(model, machine.max_memory, (torch.ones(1, 8),))
    placed[0] = placed[0][:1]
    with pytest.warns(GraphplanWarning, match="'0.1' is gone"):
        placed(torch.ones(1, 8))


def test_retrace_keeps_module_and_weight_objects(machine: Any) -> None:
    placed, net, x = placed_net(machine)
    norm, weight = placed.norm, placed.embed.weight
    norm.eps = net.norm.eps = 0.5
    with pytest.warns(GraphplanWarning, match=r"'norm.eps' was 1e-05 and is 0.5"):
        placed(x)
    assert placed.norm is norm
    assert placed.embed.weight is weight
    norm.eps = net.norm.eps = 0.25
    with pytest.warns(GraphplanWarning, match="traced again"):
        assert torch.allclose(placed(x), net(x), atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_have_the_changes(machine: Any, copied: Callable[[Any], Any]) -> None:
    placed, net, x = placed_net(machine)
    placed.k = net.k = 7.0
    with pytest.warns(GraphplanWarning, match="traced again"):
        other = copied(placed)
    assert torch.allclose(other(x), net(x), atol=1e-5)
    other.k = net.k = 8.0
    with pytest.warns(GraphplanWarning, match="traced again"):
        assert torch.allclose(other(x), net(x), atol=1e-5)


class Width(Enum):
    """An enum member may hold an attribute that changes."""

    WIDE = 1


class Enumerated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), Width.WIDE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.kind.factor  # type: ignore[attr-defined]  # set on the member


def test_changed_enum_member_is_retraced(machine: Any) -> None:
    net, x = Enumerated().eval(), torch.randn(3, 8)
    Width.WIDE.factor = 2.0  # type: ignore[attr-defined]
    placed = graphplan.partition(net, machine.max_memory, (x,))
    assert torch.allclose(placed(x), net(x))
    Width.WIDE.factor = 3.0  # type: ignore[attr-defined]
    with pytest.warns(GraphplanWarning, match="'kind.factor' was 2.0 and is 3.0"):
        assert torch.allclose(placed(x), net(x))


class Stepping(nn.Module):
    """A layer that keeps its own method in an attribute, and a value that the method reads in another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), torch.ones(())
        self.step = self._step

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = x.abs().mean()
        return self.step(x)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), graphplan.unplace]
)
def test_method_in_an_attribute_is_bound_to_the_copy(machine: Any, copied: Callable[[Any], Any]) -> None:
    net, x = nn.Sequential(Stepping(), Stepping()).eval(), torch.randn(3, 8)
    placed = graphplan.partition(net, machine.max_memory, (x,))
    placed(x)
    other = copied(placed)
    assert all(layer.step.__self__ is layer for layer in other)
    with torch.no_grad():
        assert torch.allclose(other(2 * x), net(2 * x), atol=1e-5)


def test_ignored_attributes_do_not_cause_a_retrace(machine: Any) -> None:
    placed, net, x = placed_net(machine)
    placed.note = "mine"
    placed.train()
    placed.eval()
    placed.norm.eps = 10 / 1e6  # another object, the same number
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(placed(x), net(x), atol=1e-5)


def test_step_name_of_lightning_does_not_cause_a_retrace() -> None:
    """Regression: each epoch of a Lightning trainer traced its module twice."""
    net, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8)
    net._current_fx_name = None  # type: ignore[assignment]  # as a LightningModule has it
    placed = graphplan.partition(net, {"cpu": "1MiB"}, (x,))
    placed._current_fx_name = "validation_step"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed(x)


def test_model_tags_do_not_cause_a_retrace() -> None:
    """Regression: the trainers of trl tag a model for its model card, and it was traced again."""

    class Tagged(nn.Linear):
        model_tags: list[str] | None = None  # as of transformers' models

    x = torch.randn(3, 8)
    placed = graphplan.partition(Tagged(8, 8), {"cpu": "1MiB"}, (x,))
    placed.model_tags = ["trl"]  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed(x)
        placed.model_tags.append("sft")
        placed(x)


PLAIN_VALUES = [1.5 + 2j, b"text", [1j], {"a": 1j}, [b"text"], range(1, 3), slice(1, 3), Path("a"), [...]]


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=repr)
def test_equal_values_do_not_cause_a_retrace(machine: Any, value: Any) -> None:
    net, x = Net().eval(), torch.randn(3, 8)
    net.note = value
    placed = graphplan.partition(net, machine.max_memory, (x,))
    placed(x)
    placed.note = pickle.loads(pickle.dumps(value))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed(x)
    placed.note = "another"
    with pytest.warns(GraphplanWarning, match="traced again"):
        placed(x)


def test_item_of_another_type_is_retraced(machine: Any) -> None:
    class Scaling(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.int() * self.steps[0]

    x = torch.randn(3, 8)
    placed = graphplan.partition(Scaling(), machine.max_memory, (x,))
    assert placed(x).dtype == torch.int32
    placed.steps = [1.0, 2]
    with pytest.warns(GraphplanWarning, match=r"'steps' was \[1, 2\] and is \[1.0, 2\]"):
        assert placed(x).dtype == torch.float32


class Kind(Enum):
    FIRST, SECOND = 1, 2


@pytest.mark.parametrize(
    ("before", "after"), [(1j, 2j), (b"a", b"b"), (range(2), range(3)), (Kind.FIRST, Kind.SECOND), (int, str)]
)
def test_changed_class_attribute_is_retraced(machine: Any, before: Any, after: Any) -> None:
    class Doubling(nn.Module):
        kind = before

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x if self.kind == before else x

    x = torch.randn(3, 8)
    placed = graphplan.partition(Doubling(), machine.max_memory, (x,))
    assert torch.equal(placed(x), 2 * x)
    Doubling.kind = after
    with pytest.warns(GraphplanWarning, match=r"'Doubling.kind' was .* traced again"):
        assert torch.equal(placed(x), x)


def test_hooks_of_submodules_are_called(machine: Any) -> None:
    placed, net, x = placed_net(machine)
    seen: list[str] = []

    def double(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        seen.append(type(module).__name__)
        return 2 * result

    net.act.register_forward_hook(double)
    expected = net(x)
    seen.clear()
    hook = placed.act.register_forward_hook(double)
    with pytest.warns(GraphplanWarning, match="hooks"):
        assert torch.allclose(placed(x), expected, atol=1e-5)
    assert seen == ["ReLU"]
    assert torch.allclose(placed(x), expected, atol=1e-5)
    assert seen == ["ReLU"] * 2
    hook.remove()
    assert not torch.allclose(placed(x), expected, atol=1e-5)
    assert seen == ["ReLU"] * 2


def test_hooks_added_with_another_change_are_not_traced(machine: Any) -> None:
    """Regression: hooks that a hook point lists were called in the trace, with tensors without values."""
    placed, net, x = placed_net(machine)
    seen: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
        seen.append(result)
        return 2 * result

    hooks = [whole.get_submodule("act").register_forward_hook(keep) for whole in (net, placed)]
    net.steps, placed.steps = [3], [3]
    expected = net(x)
    with pytest.warns(GraphplanWarning) as told:
        assert torch.allclose(placed(x), expected, atol=1e-5)
    assert ["traced again" in str(one.message) for one in told] == [True, False]
    assert torch.allclose(placed(x), expected, atol=1e-5)
    assert len(seen) == 3
    assert all(torch.allclose(one.cpu(), seen[0], atol=1e-5) for one in seen)
    for hook in hooks:
        hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(placed(x), net(x), atol=1e-5)
    assert len(seen) == 3


def test_parametrization_hooks_are_traced(machine: Any) -> None:
    placed, net, x = placed_net(machine)
    for whole in (net, placed):
        prune.l1_unstructured(whole.get_submodule("embed"), "weight", amount=0.5)
    with pytest.warns(GraphplanWarning) as told:
        assert torch.allclose(placed(x), net(x), atol=1e-5)
    assert all("hooks were added" not in str(one.message) for one in told)
    assert torch.allclose(placed(x), net(x), atol=1e-5)


def test_hook_receives_the_placed_submodule(machine: Any) -> None:
    net, x = Net().eval(), torch.randn(3, 8)
    torch.nn.utils.spectral_norm(net.head)  # its hook, which is traced, computes the weight of what runs
    placed = graphplan.partition(net, machine.max_memory, (x,), grad=True)
    names, seen = {part: name for name, part in placed.named_modules()}, []

    def keep(module: Any, *_: Any) -> None:
        seen.append(names[module])
        module.kept = True

    placed.norm.register_forward_pre_hook(keep)
    placed.act.register_forward_hook(keep)
    with pytest.warns(GraphplanWarning, match="hooks"):
        placed(x)
    seen.clear()
    placed.drop.register_full_backward_hook(keep)  # as the modules that run are there
    result = placed(x)
    result.sum().backward()
    assert torch.allclose(result, net(x))
    assert seen == ["act", "norm", "drop"]
    assert placed.norm.kept


class Weighs(nn.Module):
    """Sets an attribute that hooks read; it calls the same activation twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.scale = nn.Linear(8, 8), nn.ReLU(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found = self.act(self.layer(self.act(x))) * self.scale
        return x + self.found


def test_hooks_and_forward_share_attributes(machine: Any) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Weighs()).eval(), torch.randn(3, 8)
    placed: Any = graphplan.partition(model, machine.max_memory, (x,))

    def calls(whole: Any) -> tuple[list[torch.Tensor], int, int]:
        results, once = list[torch.Tensor](), list[int]()

        def before(module: Any, args: Any) -> None:
            module.calls, module.scale = getattr(module, "calls", 0) + 1, 3.0
            module.kept = True

        def after(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
            del module.kept
            results.append(module.found.detach().cpu())
            return result + module.found

        def stops(module: nn.Module, *_: Any) -> None:
            once.append(1)
            handles[-1].remove()

        handles = [
            whole[1].register_forward_pre_hook(before),
            whole[1].register_forward_hook(after),
            whole[1].act.register_forward_hook(stops),
        ]
        results += [whole(x), whole(x + 1)]
        for handle in handles:
            handle.remove()
        return results, whole[1].calls, len(once)

    with torch.no_grad(), pytest.warns(GraphplanWarning, match="hooks"):
        found, *counted = calls(placed)
    wanted, *counts = calls(model)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
    assert counted == counts == [2, 1]
    assert torch.allclose(placed[1].found.cpu(), model[1].found, atol=1e-6)
    assert not hasattr(placed[1], "kept")


def test_copy_has_hooks_added_later(machine: Any) -> None:
    placed, net, x = placed_net(machine)
    seen: list[nn.Module] = []
    placed.act.register_forward_hook(lambda module, *_: seen.append(module))
    made = copy.deepcopy(placed)
    with pytest.warns(GraphplanWarning, match="hooks"):
        assert torch.allclose(made(x), net(x), atol=1e-5)
    assert seen == [made.act]


@pytest.mark.filterwarnings("error", "ignore:hooks were added")
def test_hooks_temporary_assignment_does_not_retrace_other_threads(machine: Any) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Weighs()).eval(), torch.randn(3, 8)
    placed: Any = graphplan.partition(model, machine.max_memory, (x,))
    model[1].scale = 2.0
    wanted, inside, results = model(x).detach(), threading.Event(), list[torch.Tensor]()

    def before(module: Any, _: Any) -> None:
        module.scale = 2.0
        inside.set()
        time.sleep(0.5)  # while the other thread looks

    def call() -> None:
        assert inside.wait(60)
        results.append(placed(x))

    placed[1].register_forward_pre_hook(before)
    other = threading.Thread(target=copy_context().run, args=(call,))
    other.start()
    results.append(placed(x))
    other.join(60)
    assert len(results) == 2
    assert all(torch.allclose(one, wanted, atol=1e-5) for one in results)


@pytest.mark.filterwarnings("error", "ignore:hooks were added")
def test_thread_does_not_wait_for_another_threads_capture(machine: Any) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Weighs()).eval(), torch.randn(3, 8)
    placed: Any = graphplan.partition(model, machine.max_memory, (x,))
    model[1].scale = 2.0
    wanted, inside, results = model(x).detach(), threading.Semaphore(0), list[torch.Tensor]()

    def before(module: Any, _: Any) -> None:
        module.scale = 2.0
        inside.release()
        time.sleep(0.5)

    def call() -> None:
        results.append(placed(x))

    placed[1].register_forward_pre_hook(before)
    placed(x)
    assert inside.acquire(timeout=60)
    threads = [threading.Thread(target=copy_context().run, args=(call,)) for _ in range(2)]
    with CAPTURE_LOCK:
        for thread in threads:  # the second sees what the hook has assigned, and has its turn
            thread.start()
            assert inside.acquire(timeout=20)
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert all(torch.allclose(one, wanted, atol=1e-5) for one in results)


@pytest.mark.filterwarnings("ignore:hooks were added")
def test_hook_calling_placed_model_does_not_deadlock_waiting_thread(
    machine: Any,
) -> None:
    placed, net, x = placed_net(machine)
    inside, results = threading.Event(), list[torch.Tensor]()

    def change(*_: Any) -> None:
        if not inside.is_set():
            inside.set()
            time.sleep(0.5)  # until the other thread waits for its turn
            placed.steps = [1, 2, 3]
            results.append(placed(x[:2]))

    def call() -> None:
        assert inside.wait(60)
        results.append(placed(x))

    placed.act.register_forward_hook(change)
    other = threading.Thread(target=copy_context().run, args=(call,))
    other.start()
    assert torch.allclose(placed(x), net(x), atol=1e-5)
    other.join(60)
    net.steps = [1, 2, 3]
    assert torch.allclose(results[0], net(x[:2]), atol=1e-5)
    assert torch.allclose(results[1], net(x), atol=1e-5)


def test_hook_may_call_the_placed_model(machine: Any) -> None:
    placed, net, x = placed_net(machine)

    def calls(whole: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
        seen: list[torch.Tensor] = []

        def call_again(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
            if not seen:
                seen.append(x)
                seen.append(whole(x[:2]))
            return 2 * result

        hook = whole.act.register_forward_hook(call_again)
        result = whole(x)
        hook.remove()
        return result, seen

    with pytest.warns(GraphplanWarning, match="hooks"):
        result, seen = calls(placed)
    expected, wanted = calls(net)
    assert torch.allclose(result, expected, atol=1e-5)
    assert torch.allclose(seen[1], wanted[1], atol=1e-5)
    assert torch.allclose(placed(x), net(x), atol=1e-5)


class Assigning(nn.Module):
    """Replaces a buffer before and after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen / 2 + 1
        y = self.act(self.a(x))
        self.seen = self.seen + 1
        return self.b(y) + self.seen


def test_hook_calling_placed_model_sees_current_buffers(machine: Any) -> None:
    net, x = Assigning().eval(), torch.randn(3, 8)
    placed = graphplan.partition(net, machine.max_memory, (x,))

    def calls(whole: nn.Module) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def call_again(module: nn.Module, args: Any, result: torch.Tensor) -> None:
            if len(found) < 2:
                found.append(x)
                found.append(whole(x[:2]))

        hook = whole.get_submodule("act").register_forward_hook(call_again)
        found += [whole(x), whole(x)]
        hook.remove()
        return [*found, whole(x), whole.get_buffer("seen").cpu()]

    with torch.no_grad(), pytest.warns(GraphplanWarning, match="hooks"):
        results = calls(placed)
    with torch.no_grad():
        wanted = calls(net)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results, wanted, strict=True))


def test_buffers_assigned_before_a_hook_raises_stay(machine: Any) -> None:
    def stop(module: nn.Module, args: Any, result: torch.Tensor) -> None:
        raise ValueError("enough")

    net, x = Assigning().eval(), torch.randn(3, 8)
    placed = graphplan.partition(net, machine.max_memory, (x,))
    with torch.no_grad():
        hooks = [whole.get_submodule("act").register_forward_hook(stop) for whole in (placed, net)]
        with pytest.warns(GraphplanWarning, match="hooks"), pytest.raises(ValueError, match="enough"):
            placed(x)
        with pytest.raises(ValueError, match="enough"):
            net(x)
        for hook in hooks:
            hook.remove()
        assert torch.equal(placed.get_buffer("seen").cpu(), net.get_buffer("seen"))
        assert torch.allclose(placed(x), net(x), atol=1e-5)


def test_hooks_registered_before_placing_are_traced(machine: Any) -> None:
    net, x = Net().eval(), torch.randn(3, 8)
    net.act.register_forward_hook(lambda module, args, result: 2 * result)
    placed = graphplan.partition(net, machine.max_memory, (x,))
    assert torch.allclose(placed(x), net(x), atol=1e-5)


def test_wrapped_forward_runs_once(machine: Any) -> None:
    class Counting(nn.Linear):
        def __call__(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * super().__call__(input)

    net, x = Counting(4, 4), torch.randn(2, 4)
    placed = graphplan.partition(net, machine.max_memory, (x,))
    assert torch.allclose(placed(x), net(x), atol=1e-5)


def test_config_changed_in_place_is_retraced(machine: Any) -> None:
    class Config:
        def __init__(self) -> None:
            self.scales = {"a": 2.0}

        def to_dict(self) -> dict[str, Any]:
            return vars(self)

    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.config = Config()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.config.scales["a"]

    net, x = Model(), torch.randn(2, 4)
    placed = graphplan.partition(net, machine.max_memory, (x,))
    net.config.scales["a"] = placed.config.scales["a"] = 5.0
    assert torch.allclose(placed(x), net(x), atol=1e-5)


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_moving_a_placed_module_raises(machine: Any, move: Callable[[nn.Module], Any]) -> None:
    placed, net, x = placed_net(machine)
    with pytest.raises(graphplan.PlanError, match=r"graphplan\.unplace"):
        move(placed)
    assert torch.allclose(placed(x), net(x), atol=1e-5)


def test_unplace_returns_the_plain_model(machine: Any) -> None:
    placed, net, x = placed_net(machine)
    placed.head.weight.grad = torch.full_like(placed.head.weight, 2)
    plain = graphplan.unplace(placed)
    assert type(plain) is Net
    assert {tensor.device.type for tensor in plain.state_dict().values()} == {"cpu"}
    assert plain.head.weight is plain.embed.weight
    assert plain.head.weight.grad is not None
    assert torch.equal(plain.head.weight.grad, torch.full_like(plain.head.weight, 2))
    assert torch.allclose(plain(x), net(x))
    assert torch.allclose(plain.half()(x.half()).float(), net(x), atol=1e-2)


class Card:
    """An object that a library attaches to a model."""

    model: nn.Module


class Carded(Net):
    """Has an object that refers back to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.card = Card()
        self.card.model = self


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.parametrize("later", [False, True])
def test_back_references_point_to_the_placed_model(machine: Any, later: bool) -> None:
    torch.manual_seed(0)
    net, x = Carded().eval(), torch.randn(2, 8)
    placed = graphplan.partition(net, machine.max_memory, () if later else (x,))
    for net.k in (2.0, 3.0):
        placed.k = net.k
        assert torch.allclose(placed(x), net(x), atol=1e-5)
        assert placed.card.model is placed
    plain = graphplan.unplace(placed)
    assert plain.card.model is plain
    assert torch.allclose(plain(x), net(x), atol=1e-5)


class Pairs(tuple[int, ...]):
    """A sequence class without ``__len__``."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_sequence_without_a_length_is_a_plain_attribute(machine: Any) -> None:
    net, x = Net().eval(), torch.randn(2, 8)
    net.steps = Pairs((1, 2))  # type: ignore[assignment]  # for the loop
    placed = graphplan.partition(net, machine.max_memory, (x,))
    assert torch.allclose(placed(x), net(x), atol=1e-5)


def test_replacement_module_of_the_same_class_sets_mode(machine: Any) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.9)).eval(), torch.ones(4, 16)
    placed = graphplan.partition(model, machine.max_memory, (x,))
    with torch.no_grad():
        placed(x)
        placed[1] = nn.Dropout(0.9)
        assert (placed(x) == 0).any()  # it trains
        placed.eval()
        assert not (placed(x) == 0).any()
