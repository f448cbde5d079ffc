"""Tensors that forward stores in attributes are there after a call, as in eager mode."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import graphplan

X = torch.linspace(-1, 1, 32).reshape(4, 8)
SHAPES = [(4, 8), (4, 8), (6, 8), (4, 8)]
SGD: dict[str, Any] = {"train": True, "optimizer": torch.optim.SGD}


class Attends(nn.Module):
    """Stores scores, some of them in containers, its input, a weight's view and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.scores = nn.Linear(8, 8), nn.Linear(8, 8), None
        self.means, self.table = list[torch.Tensor](), dict[str, Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scores = torch.softmax(self.query(x) @ self.key(x).t(), -1)
        self.means.clear()
        self.means += [self.scores.mean(), self.scores.amax(0)]
        self.table["input"] = x
        self.pair = (self.query.weight.t(), [self.scores[:1], "text", None, x.shape[0]])
        self.last = torch.tanh(self.scores @ x)
        return self.last


class Stack(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends() for _ in range(count))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for layer in self.layers:
            x = layer(x)
        self.out = x
        return {"out": x, "sum": x.sum()}


STORED = ("scores", "means", "table", "pair", "last", "out")


def stored(model: nn.Module) -> list[Any]:
    """All that is stored in a model, tensors on the CPU."""
    values = [getattr(part, name, None) for part in model.modules() for name in STORED]
    return [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in tree_leaves(values)]


def same(found: list[Any], expected: list[Any]) -> None:
    assert list(map(type, found)) == list(map(type, expected))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("budgets", [{0: "24KiB", 1: "24KiB"}, {0: "20KiB", "cpu": "1MiB"}])
@torch.no_grad()
def test_stored_tensors_equal_eager(budgets: dict[Any, str]) -> None:
    model = Stack()
    eager = copy.deepcopy(model)
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True, cpu_compute=False)
        means = placed.layers[0].means
        for shape in SHAPES:  # warnings, such as of a retrace, are errors
            x = torch.randn(shape)
            assert torch.allclose(placed(x)["out"].cpu(), eager(x)["out"], atol=1e-5)
            same(stored(placed), stored(eager))
        assert placed.layers[0].means is means
        placed.layers[0].scores = None  # as code does that frees them
        placed(X)
    assert stored(model) == [None] * len(stored(model))


class Remembers(nn.Module):
    """Reads what its last call has stored, and keeps an average that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden, self.average = nn.Linear(8, 8), torch.zeros(8), torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.linear(self.hidden.detach()) + x.mean(0)).detach()
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.linear(x) + self.hidden


@pytest.mark.parametrize("options", [{}, {"grad": True}, {"train": True, "optimizer": torch.optim.SGD}])
def test_next_call_reads_states_of_one_shape(options: dict[str, Any]) -> None:
    model = nn.Sequential(Remembers(), Remembers())
    eager = copy.deepcopy(model)
    with graphplan.simulate({0: "16KiB", 1: "16KiB"}) as machine, torch.set_grad_enabled(bool(options)):
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True, **options)
        for count in range(4):
            x = torch.randn(4, 8)
            if count == 2:
                for one in (placed, eager):
                    one[0].hidden = torch.zeros(8)
            found, expected = placed(x), eager(x)
            assert torch.allclose(found.cpu(), expected, atol=1e-5)
            for part, other in zip(placed, eager, strict=True):
                assert torch.allclose(part.hidden.cpu(), other.hidden, atol=1e-5)
                assert torch.allclose(part.average.cpu(), other.average, atol=1e-5)
            if options:
                for result in (found, expected):
                    result.square().sum().backward()
                same_gradients(placed, eager)


def same_gradients(placed: nn.Module, eager: nn.Module) -> None:
    for parameter, expected in zip(placed.parameters(), eager.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        assert torch.allclose(parameter.grad.cpu(), expected.grad, atol=1e-5)
        parameter.grad = expected.grad = None


class Lazy(nn.Module):
    """Makes a table at its first call, which later ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.arange(8.0) / 8
        return self.linear(x) + self.kept


class Grows(nn.Module):
    """Adds to a list with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(x.mean())
        return self.linear(x)


class Keeps(nn.Module):
    """Moves what it has stored to another attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept, self.before = nn.Linear(8, 8), torch.zeros(8), torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before, self.kept = self.kept, x.mean(0)
        return self.linear(x)


@torch.no_grad()
def test_moved_tensors_have_no_graph() -> None:
    model = nn.Sequential(Keeps())
    eager = copy.deepcopy(model)
    with pytest.warns(graphplan.GraphplanWarning, match="before is assigned a tensor from before"):
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,))
    for scale in (1.0, 2.0):
        assert torch.allclose(placed(scale * X), eager(scale * X), atol=1e-5)
    for name in ("kept", "before"):
        assert torch.allclose(getattr(placed[0], name), getattr(eager[0], name))


@torch.no_grad()
def test_growing_list_has_what_the_last_call_added() -> None:
    model = nn.Sequential(Grows())
    eager = copy.deepcopy(model)
    with pytest.warns(graphplan.GraphplanWarning, match="kept grows with each call"):
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    for clears in (True, True, False):
        for one in (placed, eager):
            one(X)
        assert torch.allclose(torch.stack(placed[0].kept), torch.stack(eager[0].kept[-1:]), atol=1e-5)
        for one in (placed, eager) if clears else ():
            one[0].kept.clear()


@pytest.mark.filterwarnings("ignore:.*kept grows with each call")
def test_growing_list_of_a_training_model_of_several_sizes() -> None:
    placed = graphplan.partition(nn.Sequential(Grows()), {"cpu": "1MiB"}, (X,), strict=True, **SGD)
    for rows in (4, 6, 4):
        placed(torch.randn(rows, 8)).sum().backward()
        assert len(placed[0].kept) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@torch.no_grad()
def test_tables_and_weights_that_hooks_compute_are_not_stored() -> None:
    normed = nn.utils.weight_norm(nn.Linear(8, 8)), nn.utils.spectral_norm(nn.Linear(8, 8))
    pruned = nn.utils.prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)
    model = nn.Sequential(Lazy(), *normed, pruned).eval()
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    for scale in (1.0, 2.0):
        assert torch.allclose(placed(scale * X), eager(scale * X), atol=1e-5)
    assert placed[0].kept is None
    assert not any(value.stays for value in placed.plan.graph.values.values())


class Scales(nn.Module):
    """Stores a result among its settings."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(8, 8), dict[str, Any](scale=2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.settings["last"] = self.linear(x) * self.settings["scale"]
        return self.settings["last"] + 1


@torch.no_grad()
def test_settings_beside_stored_tensors_are_watched() -> None:
    model = Scales()
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    assert torch.allclose(placed(X), model.linear(X) * 2 + 1, atol=1e-5)
    placed.settings["scale"] = 3.0
    with pytest.warns(graphplan.GraphplanWarning, match=r"'settings' was .*2\.0.* and is .*3\.0"):
        assert torch.allclose(placed(X), model.linear(X) * 3 + 1, atol=1e-5)
    assert placed.settings["scale"] == 3.0


class Gates(nn.Module):
    """Leaves losses for others to add, as an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate, self.losses = nn.Linear(8, 8), nn.Linear(8, 4), list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shares = torch.softmax(self.gate(x), -1)
        self.loss = self.shares.square().mean()
        self.losses.clear()
        self.losses.append(self.loss * 2)
        return torch.tanh(self.linear(x)) * self.shares.amax(-1, keepdim=True)


def auxiliary(model: Any) -> torch.Tensor:
    return model[1].loss.cpu() + model[0].losses[0].cpu()


def of_shares(model: Any) -> torch.Tensor:
    return model[0].shares.square().sum().cpu() + model[1].loss.cpu()


TRAINED = [
    ({"grad": True}, auxiliary),
    ({"grad": True}, of_shares),
    (SGD, auxiliary),
    ({**SGD, "train_outputs": ["", "0.shares", "1.loss"]}, of_shares),
]


@pytest.mark.parametrize(("options", "add"), TRAINED)
def test_losses_in_attributes_have_gradients(
    options: dict[str, Any], add: Callable[[Any], torch.Tensor]
) -> None:
    model = nn.Sequential(Gates(), Gates())
    eager = copy.deepcopy(model)
    with graphplan.simulate({0: "24KiB", 1: "24KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True, **options)
        for _ in range(2):
            x = torch.randn(4, 8)
            for one in (placed, eager):
                (one(x).square().mean().cpu() + add(one)).backward()
            same_gradients(placed, eager)


def test_gradient_of_an_unplanned_attribute_is_an_error() -> None:
    model = nn.Sequential(Gates(), Gates())
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True, **SGD)
    result = placed(X)
    with pytest.raises(
        RuntimeError, match=r"'0\.shares', but the planned step starts only from 'loss' or.*stored"
    ):
        (result.sum() + of_shares(placed)).backward()


@pytest.mark.parametrize(("kind", "stored", "options"), [(Gates, 1, {}), (Gates, 1, SGD), (Remembers, 2, {})])
def test_peak_counts_stored_tensors_of_one_call(
    kind: type[nn.Module], stored: int, options: dict[str, Any]
) -> None:
    model, budgets = nn.Sequential(*(kind() for _ in range(4))), {0: "1MiB", "cpu": "1MiB"}
    plan = graphplan.plan(model, budgets, (X,), **options)
    exact = {0: plan.peaks[0].nbytes, "cpu": "1MiB"}
    assert sum(value.stays and not value.gradient_of for value in plan.graph.values.values()) == 4 * stored
    with graphplan.simulate(exact) as machine, torch.set_grad_enabled(bool(options)):
        placed = graphplan.partition(model, exact, (X,), strict=True, **options)
        for scale in (1.0, 2.0, 3.0):
            result = placed(scale * X)
            if options:
                (result.sum() + auxiliary(placed)).backward()
            del result
        assert machine.peak_bytes(0) == exact[0]


class Codes(nn.Module):
    """Decodes with what encode has stored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.memory = nn.Linear(8, 8), nn.Linear(8, 8), torch.zeros(4, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.memory = torch.tanh(self.first(x))
        return self.memory.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) * self.memory


@torch.no_grad()
def test_one_method_reads_what_another_has_stored() -> None:
    model = Codes()
    eager = copy.deepcopy(model)
    with graphplan.simulate({0: "16KiB", 1: "16KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.allclose(placed(x).cpu(), eager(x), atol=1e-5)
            assert torch.allclose(placed.encode(x).cpu(), eager.encode(x), atol=1e-5)
            assert torch.allclose(placed(x).cpu(), eager(x), atol=1e-5)


@torch.no_grad()
def test_copies_have_the_stored_tensors() -> None:
    model = Stack(2)
    with graphplan.simulate({0: "64KiB", 1: "64KiB"}):
        placed = graphplan.partition(model, {0: "16KiB", 1: "16KiB"}, (X,), strict=True)
        placed(X)
        copied, plain, expected = copy.deepcopy(placed), graphplan.unplace(placed), stored(placed)
        restored = pickle.loads(pickle.dumps(placed))
        for one in (copied, plain, restored):
            same(stored(one), expected)
        placed(2 * X)
        same(stored(copied), expected)
        copied(3 * X)
        plain(3 * X)
        same(stored(copied), stored(plain))
        assert {leaf.device.type for leaf in tree_leaves(plain.layers[0].pair) if torch.is_tensor(leaf)} == {
            "cpu"
        }


@torch.no_grad()
def test_saved_capture_stores(tmp_path: Path) -> None:
    eager = Stack(2)
    for _ in range(2):
        model = copy.deepcopy(eager)
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True, capture_cache=tmp_path)
        placed(X)
        eager_copy = copy.deepcopy(eager)
        eager_copy(X)
        same(stored(placed), stored(eager_copy))


class Caches(nn.Module):
    """Stores tensors, and changes a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        self.last = self.linear(x)
        seen.append(self.last + 1)
        return self.last * 2


@torch.no_grad()
def test_stored_tensors_beside_changed_arguments() -> None:
    model = Caches()
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X, [X]), strict=True)
    for scale in (1.0, 2.0):
        lists = [X], [X]
        assert torch.allclose(placed(scale * X, lists[0]), eager(scale * X, lists[1]), atol=1e-5)
        same(lists[0], lists[1])
        assert torch.allclose(placed.last, eager.last, atol=1e-5)


def test_part_of_a_model_stores_in_its_modules() -> None:
    model = Stack(2)
    eager = copy.deepcopy(model)
    with torch.no_grad():
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
        placed.layers[1](X)
        eager.layers[1](X)
    same(stored(placed), stored(eager))


def test_machines_store_nothing_and_say_so() -> None:
    with pytest.warns(
        graphplan.GraphplanWarning, match=r"stores a tensor in .*; a model over several machines"
    ) as told:
        graphplan.plan(Stack(1), machines=[{"cpu": "1GiB"}], args=(X,))
    assert len(told) == 6
    with pytest.raises(graphplan.NoGraphError, match=r"0\.hidden is read and then assigned"):
        graphplan.plan(nn.Sequential(Remembers()), machines=[{"cpu": "1GiB"}], args=(X,))


class Views(nn.Module):
    """Stores a parameter without its gradient, and views of a weight and of a buffer that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bias, self.turned = self.linear.bias.detach(), self.linear.weight.detach().t()
        self.half = self.count[:2]
        self.count += 1
        return self.linear(x)


@pytest.mark.parametrize("options", [{}, SGD])
def test_stored_views_of_weights_are_copies(options: dict[str, Any]) -> None:
    model = nn.Sequential(Views(), Views())
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True, **options)
    for _ in range(3):
        with torch.set_grad_enabled(bool(options)):
            results = placed(X), eager(X)
        for part, other in zip(placed, eager, strict=True):
            for name in ("bias", "turned", "half"):
                found = getattr(part, name)
                assert torch.allclose(found, getattr(other, name))
                assert not isinstance(found, nn.Parameter)
                assert not found.requires_grad
        if options:
            for result in results:
                result.square().sum().backward()
            same_gradients(placed, eager)


class Steered(nn.Module):
    """Branches on what its user puts into attributes in which it stores tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.found, self.mask = nn.Linear(8, 8), dict[str, Any](), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x) * self.found.get("scale", 1.0)
        if isinstance(self.mask, float):
            h = h + self.mask
        self.found["last"], self.mask = h, h > 0
        return h


@torch.no_grad()
def test_user_changes_of_stored_attributes_are_detected() -> None:
    model = Steered()
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    for _ in range(2):
        assert torch.allclose(placed(X), eager(X), atol=1e-5)
        for one in (placed, eager):  # like what calls store, so not a change
            one.mask = torch.ones(4, 8, dtype=torch.bool)
    for one in (placed, eager):
        one.found["scale"] = 3.0
    with pytest.warns(graphplan.GraphplanWarning, match="'found' is not what a call has stored"):
        assert torch.allclose(placed(X), eager(X), atol=1e-5)
    assert placed.found["scale"] == 3.0
    for one in (placed, eager):
        one.mask = 0.5
    with pytest.warns(graphplan.GraphplanWarning, match="'mask' is not what a call has stored"):
        assert torch.allclose(placed(X), eager(X), atol=1e-5)


class Branches(nn.Module):
    """Stores a large tensor in one branch, and needs the memory in another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.large = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor, store: bool) -> torch.Tensor:
        h = self.linear(x)
        if store:
            self.large = h.repeat(1, 64)
            return h
        return torch.tanh(h).repeat(1, 64).sum(1, keepdim=True) + x


@torch.no_grad()
def test_tensors_of_another_graph_move_to_cpu_memory() -> None:
    model, roomy = Branches(), {0: "1MiB", "cpu": "1MiB"}
    peaks = [graphplan.plan(model, roomy, (X, store)).peaks[0].nbytes for store in (True, False)]
    budgets = {0: max(peaks), "cpu": "1MiB"}
    with graphplan.simulate(budgets):
        placed = graphplan.partition(model, budgets, (X, True), strict=True)
        expected = placed.linear(X).cpu().repeat(1, 64)
        for store in (True, False, True, False):
            placed(X, store)
            assert placed.large.device.type == ("sim" if store else "cpu")
            assert torch.allclose(placed.large.cpu(), expected, atol=1e-5)


class Result(nn.Module):
    """Stores its loss beside its result, which others differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.loss = h.square().mean()
        return torch.tanh(h)


@pytest.mark.parametrize("stored", [True, False])
def test_stored_loss_does_not_replace_the_result(stored: bool) -> None:
    model = Result()
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True, **SGD)
    for one in (placed, eager):
        (one(X).sum() + (one.loss if stored else 0)).backward()
    same_gradients(placed, eager)


class Halves(nn.Module):
    """Its states are halves of one tensor, or a broadcast one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 16), kind
        self.hidden, self.cell = torch.zeros(4, 8), torch.zeros(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x + self.hidden + self.cell))
        if self.kind == "halves":
            self.hidden, self.cell = h.chunk(2, -1)
        else:
            self.hidden = self.cell = h[:1, :8].expand(4, 8)
        return self.hidden


@pytest.mark.parametrize("kind", ["halves", "broadcast"])
@torch.no_grad()
def test_states_that_share_memory_are_not_retraced(kind: str) -> None:
    model = Halves(kind)
    eager = copy.deepcopy(model)
    with graphplan.simulate({0: "32KiB", 1: "32KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        for _ in range(3):  # warnings, such as of a retrace, are errors
            x = torch.randn(4, 8)
            assert torch.allclose(placed(x).cpu(), eager(x), atol=1e-5)
            assert torch.allclose(placed.cell.cpu(), eager.cell, atol=1e-5)


@torch.no_grad()
def test_module_with_a_hook_on_its_inputs_stores() -> None:
    model = nn.Sequential(Remembers(), Remembers())
    for part in model:
        part.register_forward_pre_hook(lambda _part, args: (args[0] * 2,))
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    for _ in range(2):
        assert torch.allclose(placed(X), eager(X), atol=1e-5)
        assert torch.allclose(placed[1].average, eager[1].average, atol=1e-5)


@torch.no_grad()
def test_copy_of_a_model_with_states_is_not_retraced() -> None:
    model = nn.Sequential(Remembers(), Remembers())
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    placed(X)
    copied, eager = copy.deepcopy(placed), graphplan.unplace(placed)
    for scale in (1.0, 2.0):  # warnings, such as of a retrace, are errors
        expected = eager(scale * X)
        for one in (placed, copied):
            assert torch.allclose(one(scale * X), expected, atol=1e-5)


class Asks(nn.Module):
    """Stores in calls of one structure what those of another read, if it is there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kept, self.kind = nn.Linear(8, 8), None, kind

    def forward(self, x: torch.Tensor, ask: bool = False) -> torch.Tensor:
        if ask and self.kept is not None:
            return self.linear(x) * (self.kept if self.kind == "tensor" else self.kept[0])
        h = torch.tanh(self.linear(x))
        self.kept = {"tensor": h, "list": [h], "mixed": [h, "text"]}[self.kind]
        return h.sum()


@torch.no_grad()
def test_a_copy_does_not_find_what_the_original_stores() -> None:
    # regression: both share the copy of the model that is traced, which had the original's tensor
    model = Recalls()
    eager, other = copy.deepcopy(model), copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X, True), strict=True)
    copied = copy.deepcopy(placed)
    for ask in (False, True):
        assert torch.allclose(placed(X, ask), eager(X, ask), atol=1e-5)
    for scale in (2.0, 1.0):
        assert torch.allclose(copied(X, True, scale), other(X, True, scale), atol=1e-5)
    assert torch.allclose(placed(X, True, 3.0), eager(X, True, 3.0), atol=1e-5)


@pytest.mark.parametrize("kind", ["tensor", "list"])
@torch.no_grad()
def test_calls_of_another_structure_read_what_is_stored(kind: str) -> None:
    model = Asks(kind)
    eager = copy.deepcopy(model)
    with graphplan.simulate({0: "16KiB", 1: "16KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        for scale in (1.0, 2.0, 3.0):
            for ask in (False, True, True):
                found, expected = placed(scale * X, ask=ask), eager(scale * X, ask=ask)
                assert torch.allclose(found.cpu(), expected, atol=1e-5)


class Recalls(nn.Module):
    """Answers with what the last call of the other structure has stored, if there was one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor, ask: bool = False, scale: float = 1.0) -> torch.Tensor:
        h = torch.tanh(self.linear(x)) * scale
        if ask:
            return h if self.kept is None else h + self.kept
        self.kept = h
        return h.sum()


@pytest.mark.parametrize("together", [False, True])
@torch.no_grad()
def test_call_that_asked_before_anything_was_stored(together: bool) -> None:
    # regression: the graph of the first question went on to find nothing
    model, calls = Recalls(), [((X, True), {}), ((X,), {})]
    eager = copy.deepcopy(model)
    given = {"calls": calls} if together else {"args": calls[0][0]}
    placed = graphplan.partition(model, {"cpu": "1MiB"}, **given, strict=True)
    for scale, ask in ((1.0, True), (2.0, False), (3.0, True), (4.0, False), (5.0, True)):
        assert torch.allclose(placed(scale * X, ask), eager(scale * X, ask), atol=1e-5)
    copied = copy.deepcopy(placed)
    vars(copied)["kept"], eager.kept = None, None
    assert torch.allclose(copied(X, ask=True), eager(X, ask=True), atol=1e-5)


@pytest.mark.filterwarnings("ignore:this call stores 'kept', which others read")
@pytest.mark.parametrize("ask_first", [False, True])
@torch.no_grad()
def test_reading_a_part_of_what_is_stored(ask_first: bool) -> None:
    model = Asks("mixed")
    if ask_first:
        model(X)
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X, ask_first))
    assert torch.allclose(placed(X, ask_first), eager(X, ask_first), atol=1e-5)
    if ask_first:
        assert torch.allclose(placed(X), eager(X), atol=1e-5)
    with pytest.warns(graphplan.GraphplanWarning, match="reads a part of kept"):
        assert torch.allclose(placed(2 * X, ask=True), eager(2 * X, ask=True), atol=1e-5)
    for scale in (3.0, 4.0):
        for ask in (False, True):  # warnings, such as of a retrace, are errors
            found, expected = placed(scale * X, ask=ask), eager(scale * X, ask=ask)
            assert torch.allclose(found, expected, atol=1e-5)


class Resets(nn.Module):
    """A state that calls of another structure set to something else."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.linear, self.hidden, self.to = nn.Linear(8, 8), torch.zeros(4, 8), to
        self.first = torch.ones(4, 8)

    def forward(self, x: torch.Tensor, begins: bool = False) -> torch.Tensor:
        if begins:
            self.hidden = None if self.to == "none" else self.first
            return self.linear(x)
        before = torch.zeros(4, 8) if self.hidden is None else self.hidden
        self.hidden = torch.tanh(self.linear(x) + before)
        return self.hidden


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("to", ["none", "first"])
@torch.no_grad()
def test_states_that_another_structure_sets_equal_eager(to: str, begins: bool) -> None:
    model = Resets(to)
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X, begins))
    for count in range(7):
        x, first = torch.randn(4, 8), count % 3 == 2
        assert torch.allclose(placed(x, first), eager(x, first), atol=1e-5)


@torch.no_grad()
def test_conflict_between_given_calls_is_an_error() -> None:
    calls = [((X,), {}), ((X, True), {})]
    with pytest.raises(graphplan.NoGraphError, match="one of calls= stores hidden, and another"):
        graphplan.partition(Resets("first"), {"cpu": "1MiB"}, calls=calls, strict=True)


class Experts(nn.Module):
    """Has an auxiliary loss in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aux = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.aux = h.mean() if self.training else None
        return h


@pytest.mark.parametrize("first", [True, False])
def test_attribute_of_one_mode_is_none_in_another(first: bool) -> None:
    placed = graphplan.partition(Experts().train(first), {"cpu": "1MiB"}, (X,), strict=True, grad=True)
    for mode in (first, not first, first, not first, first):
        result = placed.train(mode)(X)
        assert (placed.aux is not None) == mode
        (result.sum() + (placed.aux if mode else 0)).backward()


class Counts(nn.Module):
    """Counts its calls in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(8, 8), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.linear(x) + self.count


@torch.no_grad()
def test_threads_update_a_state_one_after_the_other() -> None:
    placed = graphplan.partition(Counts(), {"cpu": "1MiB"}, (X,), strict=True)

    def run() -> None:
        with torch.no_grad():
            for _ in range(20):
                placed(X)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run) for _ in range(4)]:
            future.result()
    assert placed.count.item() == 80


class Hidden(nn.Module):
    """A state that is None until the first call, and that users set to None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden, self.steps = nn.Linear(8, 8), None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hidden is None:
            self.hidden = torch.zeros_like(x)
        self.steps += 1
        self.hidden = torch.tanh(self.linear(x) + self.hidden)
        return self.hidden * 2


class Pair(nn.Module):
    """Two states in a container, which is None at first or not, and replaced or changed in place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.kind, self.states = nn.LSTMCell(8, 8), kind, None
        if kind == "list":
            self.states = [torch.zeros(4, 8), torch.zeros(4, 8)]
        elif kind == "numbers":
            self.states = [0.0, 0.0]
        elif kind == "dict":
            self.states = {"h": torch.zeros(4, 8), "c": torch.zeros(4, 8)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = tuple(self.states.values()) if self.kind == "dict" else self.states
        if self.kind == "numbers" and isinstance(before[0], float):
            before = [torch.full_like(x, number) for number in before]
        h, c = self.cell(x, before)
        if self.kind == "dict":
            self.states["h"], self.states["c"] = h, c
        elif self.kind in ("list", "numbers"):
            self.states[:] = [h, c]
        else:
            self.states = h, c
        return h + c


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "numbers"])
@torch.no_grad()
def test_states_in_containers(kind: str) -> None:
    model = Pair(kind)
    eager, first = copy.deepcopy(model), copy.deepcopy(model.states)
    with graphplan.simulate({0: "16KiB", 1: "16KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        for count in range(7):
            if count == 4:  # between two texts
                placed.states, eager.states = copy.deepcopy(first), copy.deepcopy(first)
            x = torch.randn(4, 8)
            assert torch.allclose(placed(x).cpu(), eager(x), atol=1e-5)
            held, expected = tree_leaves(placed.states), tree_leaves(eager.states)
            assert all(map(torch.allclose, (one.cpu() for one in held), expected))
        assert len(placed.plans) == 1 + (kind in ("tuple", "numbers"))


class Consumes(nn.Module):
    """Calls of one structure store what the next of the other uses up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor, keep: bool) -> torch.Tensor:
        h = self.linear(x)
        if keep:
            self.kept = torch.tanh(h)
        elif self.kept is not None:
            h, self.kept = h + self.kept, None
        return h


@torch.no_grad()
def test_state_of_the_first_call_is_none() -> None:
    model = Hidden()
    eager = copy.deepcopy(model)
    with graphplan.simulate({0: "16KiB", 1: "16KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        for count in range(8):
            if count in (3, 4):
                placed.hidden = eager.hidden = None
            x = torch.randn(4, 8)
            assert torch.allclose(placed(x).cpu(), eager(x), atol=1e-5)
            assert placed.hidden is not None
            assert torch.allclose(placed.hidden.cpu(), eager.hidden, atol=1e-5)
        assert len(placed.plans) == 2


@pytest.mark.parametrize("keep", [False, True])
@torch.no_grad()
def test_state_that_calls_use_up(keep: bool) -> None:
    model = Consumes()
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X, keep), strict=True)
    for one in (keep, True, False, False, True, False, True, True, False):
        x = torch.randn(4, 8)
        assert torch.allclose(placed(x, one), eager(x, one), atol=1e-5)
        assert (placed.kept is None) == (eager.kept is None)


class First(nn.Module):
    """Stores something in its first call, and the second call stores something else beside a table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first, self.last, self.table = nn.Linear(8, 8), None, None, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = x
        elif self.last is None:
            self.last = x.mean()
        if self.table is None:
            self.table = torch.arange(8) / 8
        return self.linear(x) + self.table


@torch.no_grad()
def test_calls_that_store_once() -> None:
    model = First()
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    for scale in (1.0, 2.0, 3.0, 4.0):
        assert torch.allclose(placed(scale * X), eager(scale * X), atol=1e-5)
        assert torch.equal(placed.first, eager.first)
        assert (placed.last is None) == (eager.last is None)
    assert torch.allclose(placed.last, eager.last, atol=1e-5)
    assert len(placed.plans) == 3


class Begins(nn.Module):
    """A state that is not there at first, in the ways that code asks for it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.steps, self.started = nn.Linear(8, 8), kind, 0, False
        if kind != "absent":
            self.hidden = None
        if kind == "tied":
            self.hidden = (torch.zeros(4, 8),) * 2
        elif kind == "shared":
            self.hidden = torch.zeros(4, 8)
            self.initial = [self.hidden]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.steps += 1
        if self.kind == "tied":
            h, c = self.hidden
            self.hidden = (y + c, y - h)
            return h + c + y
        hidden = getattr(self, "hidden", None)
        if self.kind == "shared":
            y = y * 2 + self.initial[0]
        if self.kind == "mean":
            y = y if hidden is None else hidden + (y - hidden) / self.steps
        elif hidden is not None and (self.kind != "flag" or self.started):
            y = y + hidden
        self.hidden, self.started = y, True
        return y * 2


@pytest.mark.parametrize("kind", ["none", "absent", "tied", "shared", "mean", "flag"])
@torch.no_grad()
def test_states_that_begin(kind: str) -> None:
    # regression: the second call of these models computed what the first does, or counted one call too few
    model = Begins(kind)
    eager = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)  # the others run module by module
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=kind in ("none", "absent"))
    for _ in range(4):
        x = torch.randn(4, 8)
        assert torch.allclose(placed(x), eager(x), atol=1e-5)
        for held, expected in zip(tree_leaves(placed.hidden), tree_leaves(eager.hidden), strict=True):
            assert torch.allclose(held, expected, atol=1e-5)


@torch.no_grad()
def test_each_size_of_a_state_has_a_graph() -> None:
    model = Hidden()
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    for rows in (4, 6, 4, 6, 6, 4):
        placed.hidden = eager.hidden = None
        for x in torch.randn(2, rows, 8):  # warnings, such as of a retrace, are errors
            assert torch.allclose(placed(x), eager(x), atol=1e-5)
    assert len(placed.plans) == 4


@torch.no_grad()
def test_attributes_below_names_with_brackets() -> None:
    model = nn.ModuleDict({"cell[3]": Hidden()})
    model.forward = types.MethodType(lambda self, x: self["cell[3]"](x), model)
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True)
    for x in torch.randn(3, 4, 8):
        assert torch.allclose(placed(x), eager(x), atol=1e-5)


class Large(nn.Module):
    """States as large as its weights, in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.states = nn.Linear(8, 4096), nn.Linear(4096, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        if self.states is not None:
            y = y + self.states[0] * self.states[1]
        self.states = (torch.tanh(y), torch.sigmoid(y))
        return self.second(y)


@torch.no_grad()
def test_first_graph_runs_within_its_budget_beside_states() -> None:
    # regression: its plan does not know of the states that the second graph reads
    with graphplan.simulate({0: "380KiB", 1: "380KiB"}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)  # weights may move
        model = Large()
        eager = copy.deepcopy(model)
        placed = graphplan.partition(model, machine.max_memory, (X,), strict=True)
        for count in range(6):
            if count == 4:
                placed.states = eager.states = None
            assert torch.allclose(placed(X).cpu(), eager(X), atol=1e-5)
        assert all(machine.peak_bytes(key) <= 380 * 1024 for key in (0, 1))


class Restarts(nn.Module):
    """A state that begins again where the batch has another size."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.hidden = nn.Linear(8, 8), kind, None
        self.inner = nn.Linear(8, 8)
        if kind == "tensor":
            self.hidden = torch.zeros(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        hidden = self.hidden[0] if self.kind == "tuple" and self.hidden else self.hidden
        if hidden is not None and hidden.shape == y.shape:
            y = y + self.inner(hidden)
        self.hidden = (y.detach(),) if self.kind == "tuple" else y.detach()
        return y * 2


@pytest.mark.parametrize("options", [{}, {"grad": True}, SGD])
@pytest.mark.parametrize("kind", ["none", "tensor", "tuple"])
def test_states_that_restart_with_each_batch_size(kind: str, options: dict[str, Any]) -> None:
    # regression: a call that did not read the state, since its shape differed, served the next one too
    model = Restarts(kind)
    eager = copy.deepcopy(model)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (X,), strict=True, **options)
    with torch.set_grad_enabled(bool(options)):
        for rows in (4, 4, 6, 6, 6, 4, 4):
            # without backward() between the calls: each has a copy of the state
            inputs = torch.randn(2, rows, 8)
            found, expected = ([one(x) for x in inputs] for one in (placed, eager))
            assert torch.allclose(torch.stack(found), torch.stack(expected), atol=1e-5)
            if options:
                for one, results in ((placed, found), (eager, expected)):
                    one.zero_grad()
                    sum(result.square().sum() for result in results).backward()
                assert torch.allclose(placed.linear.weight.grad, eager.linear.weight.grad, atol=1e-4)
