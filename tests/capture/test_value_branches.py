"""Code that branches on weights or inputs: one graph for each path taken."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from cases import in_turn
from torch import nn

import graphplan
from graphplan.capture.value_branches import InputBranches

X = torch.randn(8, 16)


class Flagged(nn.Module):
    """Sets its location at the first call, as ActNorm and vector quantisers do."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(16, 16), write
        self.register_buffer("initialized", torch.tensor([False]))
        self.register_buffer("location", torch.zeros(16))

    def begin(self, x: torch.Tensor) -> None:
        if self.initialized:
            return
        self.location.copy_(x.detach().mean(0))
        self.write(self.initialized)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begin(x)
        return torch.relu(self.linear(x - self.location))


def fill(flag: torch.Tensor) -> None:
    flag.fill_(True)


def write_to_data(flag: torch.Tensor) -> None:
    flag.data.copy_(torch.tensor([True]))


class Counting(nn.Module):
    """Counts its calls in a buffer, and branches on the count."""

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.linear, self.assigns = nn.Linear(16, 16), assigns
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.assigns:
            self.count = self.count + 1
        else:
            self.count += 1
        return self.linear(x) * 2 if self.count > 2 else self.linear(x)


class Views(nn.Module):
    """Writes to views of a buffer, and to a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("ticks", torch.tensor([1, 0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ticks[1] += 2
        tail, whole = self.ticks[1:], self.ticks.clone()
        whole += 1
        tail -= 1
        return self.linear(x) * 2 if (self.ticks + whole).sum() > 8 else self.linear(x)


class Asking(nn.Module):
    """Branches on the values of a buffer and of a parameter, read by several methods."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("switches", torch.tensor([1, 0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.switches[0] == 1:
            x = x + 1
        if torch.equal(self.switches, self.switches.abs()):
            x = x - 0.5
        if f"{self.switches.sum().item()}, {self.switches.max().item():.1f}" == "2, 1.0":
            x = x * 0.5
        for _ in range(int(self.switches.sum())):
            x = self.linear(x)
        for switch in self.switches.tolist():
            x = x * 2 if switch else x
        return self.linear(x) if self.linear.weight.norm() > 1e6 else x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "flag": lambda: Flagged(fill),
    "flag, by data": lambda: Flagged(write_to_data),
    "several": lambda: nn.Sequential(*(Flagged(fill) for _ in range(3))),
    "count": lambda: Counting(assigns=False),
    "assigned count": lambda: Counting(assigns=True),
    "views": Views,
}


@pytest.fixture
def machine() -> Iterator[Any]:
    torch.manual_seed(0)
    with graphplan.simulate({0: "1MiB", 1: "1MiB", "cpu": "1MiB"}) as machine:
        yield machine


@pytest.mark.parametrize(("name", "grad"), in_turn(MODELS, [False, True]))
def test_branches_on_state_written_by_calls(machine: Any, name: str, grad: bool) -> None:
    eager = MODELS[name]()
    limits = {0: bytes_of(eager) // 2 + (1 << 14), 1: "1MiB", "cpu": "1MiB"}
    placed = graphplan.partition(copy.deepcopy(eager), limits, (X,), grad=grad, strict=True)
    for _ in range(4):
        x = torch.randn(8, 16)
        assert largest_difference(placed(x), eager(x)) < 1e-6
    buffers = dict(placed.named_buffers())
    assert all(torch.equal(value, buffers[key].cpu()) for key, value in eager.named_buffers())
    assert len(placed.plans) == 2


@pytest.mark.slow
def test_each_path_is_traced_once(machine: Any) -> None:
    eager = Asking()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), strict=True)
    for switches, plans in (((1, 0), 1), ((0, 0), 2), ((1, 1), 3), ((0, 0), 3), ((1, 0), 3), ((-1, 1), 4)):
        for module in (placed, eager):
            module.switches.data.copy_(torch.tensor(switches))  # of which no version tells
        assert largest_difference(placed(X), eager(X)) < 1e-5
        assert len(placed.plans) == plans
    with torch.no_grad():
        placed.linear.weight.fill_(1e6)
        eager.linear.weight.fill_(1e6)
    assert largest_difference(placed(X), eager(X)) / eager(X).abs().max() < 1e-6
    assert len(placed.plans) == 5


@pytest.mark.parametrize("strict", [False, True])
def test_flag_differing_in_each_call_has_few_graphs(machine: Any, strict: bool) -> None:
    class Periodic(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.linear(x) * 2 if int(self.count) % 3 == 0 else self.linear(x)

    eager = Periodic(assigns=False)
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), strict=strict)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", graphplan.GraphplanWarning)
        for _ in range(11):
            assert largest_difference(placed(X), eager(X)) < 1e-6
    assert len(placed.plans) == (11 if strict else 8)
    assert sum("code branches on values" in str(one.message) for one in said) == (not strict)


@pytest.mark.slow
def test_waiting_threads_read_current_flags(machine: Any) -> None:
    eager = Flagged(fill)
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), strict=True)
    results = dict[int, Any]()

    def call(number: int) -> None:
        results[number] = placed(X + number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    with placed._graphplan.run_lock, torch.no_grad():
        for thread in threads:
            thread.start()
            thread.join(0.5)  # all have asked
        call(5)
    for thread in threads:
        thread.join()
    for number in (5, *range(3)):
        assert largest_difference(results[number], eager(X + number)) < 1e-6


@pytest.mark.slow
def test_copy_branches_on_its_own_weights(machine: Any) -> None:
    eager = Asking()
    placed = graphplan.partition(eager, machine.max_memory, (X,), strict=True)
    expected = placed(X)
    for other in (copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))):
        other.switches[0] = 0
        eager_too = copy.deepcopy(eager)
        eager_too.switches[0] = 0
        assert largest_difference(other(X), eager_too(X)) < 1e-5
        assert torch.equal(placed(X), expected)


@pytest.mark.slow
def test_branching_blocks_equal_eager(machine: Any) -> None:
    eager = nn.Sequential(*(Asking() for _ in range(4)))
    for part in list(eager)[1:3]:
        part.switches[1] = 1
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), strict=True)
    assert largest_difference(placed(X), eager(X)) / eager(X).abs().max() < 1e-5


def test_model_keeping_an_answer_warns_and_equals_eager(machine: Any) -> None:
    class Kept(Counting):
        first: int | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.first is None:
                self.first = int(self.count)
            self.count += 1
            return self.linear(x) * (self.first + 1)

    eager = Kept(assigns=False)
    with pytest.warns(graphplan.GraphplanWarning, match="a call changes Kept.first"):
        placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,))
    for _ in range(3):
        assert largest_difference(placed(X), eager(X)) < 1e-6
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), strict=True)
    assert largest_difference(placed(X), eager(X)) < 1e-6


def test_branches_on_floats_or_random_numbers_raise(machine: Any) -> None:
    class ByInputs(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if self.count + x.sum() > 0 else x

    class AtRandom(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if torch.rand_like(self.count.float()) > 0.5 else x

    for kind in (ByInputs, AtRandom):
        with pytest.raises(graphplan.CaptureError, match="depends on the values of tensors"):
            graphplan.partition(kind(assigns=False), machine.max_memory, (X,), strict=True)


def test_meta_model_with_branches_raises() -> None:
    with torch.device("meta"):
        model = Asking()
    with pytest.raises(graphplan.CaptureError, match="depends on the values of tensors"):
        graphplan.plan(model, {"cpu": "1GiB"}, (X,))


def test_traces_with_weight_branches_are_not_saved(tmp_path: Path) -> None:
    with pytest.warns(graphplan.GraphplanWarning, match="branches on values of weights"):
        graphplan.plan(Asking(), {"cpu": "1GiB"}, (X,), capture_cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_data_of_weights_is_read_and_written(machine: Any) -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.linear.weight.data.clamp_(-0.1, 0.1)
            return self.linear(x) + self.linear.weight.data.sum() * x.data

    eager = Clamped()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), grad=True, strict=True)
    for _ in range(2):
        assert largest_difference(placed(X), eager(X)) < 1e-5
        placed(X).sum().backward()
        eager(X).sum().backward()
    found, expected = placed.linear.weight, eager.linear.weight
    assert torch.equal(found.cpu(), expected)
    assert largest_difference(found.grad.cpu(), expected.grad) < 1e-4


def test_running_statistics_are_written_before_branches_read_them(machine: Any) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16, momentum=1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            return x * 2 if self.norm.running_mean[0] > 1 else x

    with pytest.raises(graphplan.CaptureError, match="depends on the values of tensors"):
        graphplan.partition(Normed(), machine.max_memory, (X,), strict=True)
    eager = Normed().eval()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), strict=True)
    assert largest_difference(placed(X), eager(X)) < 1e-6


class Gridded(nn.Module):
    """Goes by a grid as vision models do: a loop over images, sizes, parts of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        counts = grid.prod(-1)
        bounds = torch.cat(
            [torch.tensor([0]), torch.repeat_interleave(counts, torch.tensor([2, 1])).cumsum(0)]
        )
        places = [torch.arange(height).repeat_interleave(width) for height, width in grid.tolist()]
        heights = (0 if height > width else 1 for height, width in grid.tolist())
        parts = torch.split(self.linear(x), counts.tolist())
        scaled = [
            part * (place + add)[:, None] for part, place, add in zip(parts, places, heights, strict=True)
        ]
        return torch.cat(scaled) * torch.tensor([counts.max(), bounds[-1]]).sum()


def gridded(*grid: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(sum(height * width for height, width in grid), 16), torch.tensor(grid)


@pytest.mark.parametrize("grad", [pytest.param(False, marks=pytest.mark.slow), True])
def test_branches_on_integer_inputs(machine: Any, grad: bool) -> None:
    eager = Gridded()
    first = gridded((2, 3), (1, 4))
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, first, grad=grad, strict=True)
    for grid, plans in (
        (((2, 3), (1, 4)), 1),
        (((3, 2), (1, 4)), 2),
        (((2, 3), (2, 2)), 3),
        (((2, 3), (1, 4)), 3),
    ):
        x, sizes = gridded(*grid)
        assert largest_difference(placed(x, sizes), eager(x, sizes)) < 1e-5
        assert largest_difference(placed(grid=sizes, x=x), eager(x, sizes)) < 1e-5
        assert len(placed.plans) == plans


class Padded(nn.Module):
    """Fills masked elements, if the inverted mask has any."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        mask.logical_not_()
        return h.masked_fill(mask[..., None], 0.0) if mask.any() else h


def test_a_graph_serves_all_inputs_with_one_answer(machine: Any) -> None:
    eager = Padded()
    full = torch.ones(2, 4, dtype=torch.bool)
    x = torch.randn(2, 4, 16)
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (x, full.clone()), strict=True)
    for length in (4, 3, 2, 4, 1):
        mask = torch.arange(4).expand(2, 4) < length
        ours, own = mask.clone(), mask.clone()
        assert largest_difference(placed(x, ours), eager(x, own)) < 1e-6
        assert torch.equal(ours, own)
    assert len(placed.plans) == 2


@pytest.mark.slow
def test_many_input_answers_end_in_running_without_graphs(machine: Any) -> None:
    eager = Gridded()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, gridded((1, 1), (1, 1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for width in range(1, 12):
            x, sizes = gridded((1, width), (1, 1))
            assert largest_difference(placed(x, sizes), eager(x, sizes)) < 1e-5
    assert sum("8 graphs have been traced for inputs of one" in str(one.message) for one in caught) == 1
    assert len(placed.plans) == 8


@pytest.mark.slow
def test_branches_on_meta_inputs_raise() -> None:
    x, sizes = gridded((2, 3), (1, 4))
    with pytest.raises(graphplan.NoGraphError, match="tensors on the meta device have none: give integer"):
        graphplan.plan(Gridded(), {"cpu": "1MiB"}, (x.to("meta"), sizes.to("meta")))
    plan = graphplan.plan(Gridded(), {"cpu": "1MiB"}, (x.to("meta"), sizes))
    assert plan.method != "hooks"


class Drawn(nn.Module):
    """Branches on real numbers among its inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Compared(nn.Module):
    """Goes by whether they are others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.equal(x, x.abs()) else x


class Rolled(nn.Module):
    """Computes with them in NumPy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(int(x.argmax(-1).numpy()[0]), 0)


class Packed(nn.Module):
    """A recurrence over sequences that are packed by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((x.shape[0],), 2)
        sequence = x[None, :, :4].expand(2, -1, -1)
        return self.gru(nn.utils.rnn.pack_padded_sequence(sequence, lengths))[0].data


@pytest.mark.parametrize("model", [Drawn(), Compared(), Rolled(), Packed()])
def test_branches_on_float_values_raise(machine: Any, model: nn.Module) -> None:
    with pytest.raises(graphplan.NoGraphError, match="This line depends on the values of tensors"):
        graphplan.partition(model, machine.max_memory, (X,), strict=True)


@pytest.mark.slow
def test_data_sizes_zero_and_one_are_constants(machine: Any) -> None:
    class BySegments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
            means = [self.linear(x[segments == number]).mean(0) for number in segments.unique()]
            marked = [self.linear(x[row]) for row in segments.nonzero()[:, 0]]
            return torch.stack([*means, *marked]).sum(0)

    eager = BySegments()
    first = (X, torch.zeros(8, dtype=torch.long))
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, first, strict=True)
    for segments in ([0] * 8, [1] * 8, [0] * 7 + [1], [0, 1, 2, 3] * 2):
        call = (X, torch.tensor(segments))
        assert largest_difference(placed(*call), eager(*call)) < 1e-5


def test_a_list_of_many_numbers_is_one_question(machine: Any) -> None:
    class ByMarks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            ids.add_(1)
            rows = ids.tolist()
            ids.mul_(2)
            return self.linear(x) * sum(row.index(9) for row in rows)

    eager = ByMarks()
    ids = torch.arange(10).repeat(4, 1)
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, ids.clone()), strict=True)
    for other in (ids, ids.flip(1), ids.flip(0)[:, 1:], ids):
        given, expected = other.clone(), other.clone()
        assert largest_difference(placed(X, given), eager(X, expected)) < 1e-5
        assert torch.equal(given, expected)
    assert len(placed.plans) == 3
    guards = placed._graphplan.programs[0].signature.guards
    assert [len(guard.holds.branches) for guard in guards if isinstance(guard.holds, InputBranches)] == [1]


@pytest.mark.slow
def test_equal_questions_of_layers_are_merged(machine: Any) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for shift in (mask.flip(0) * torch.tensor(2)).tolist():
                x = self.linear(x) + shift
            return x * 2 if (mask.cumsum(0) > torch.tensor(3)).any() else x

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                if number == 2:
                    mask[0] += 1
                x = layer(x, mask)
            return x

    eager = Layers()
    first = (X, torch.tensor([1, 1, 1]))
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, first, strict=True)
    for values in ([1, 1, 1], [1, 1, 2], [2, 2, 2], [1, 1, 1]):
        given, expected = torch.tensor(values), torch.tensor(values)
        difference = largest_difference(placed(X, given), eager(X, expected))
        assert difference / eager(X, expected).abs().max() < 1e-5
    guards = placed._graphplan.programs[0].signature.guards
    kept = [guard.holds.branches for guard in guards if isinstance(guard.holds, InputBranches)]
    assert [len({one.answer for one in branches}) for branches in kept] == [len(kept[0])]


def test_questions_do_not_fix_attribute_values(machine: Any) -> None:
    class Shifting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.shift = nn.Linear(16, 16), torch.zeros(16)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return self.linear(x + self.shift) * (ids * torch.tensor(2)).tolist().index(18)

    eager, ids = Shifting(), torch.arange(20)
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, ids), strict=True)
    for number in range(3):
        eager.shift = torch.full((16,), float(number))
        placed.shift = torch.full((16,), float(number))
        with warnings.catch_warnings():
            warnings.simplefilter("error", graphplan.GraphplanWarning)  # that it is traced again
            assert largest_difference(placed(X, ids), eager(X, ids)) < 1e-5


class OfLength(nn.Module):
    """Asks something of ids and of the length of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2 if (torch.arange(x.shape[0]).max() + ids.sum() > 4) else self.linear(x)


def test_lengths_in_branches_on_integers_vary(machine: Any) -> None:
    eager, ids = OfLength(), torch.tensor([1, 2])
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (torch.randn(13, 16), ids))
    for length in range(2, 13):
        x = torch.randn(length, 16)
        assert largest_difference(placed(x, ids), eager(x, ids)) < 1e-5
    assert len(placed.plans) == 2


class Pruned(nn.Module):
    """Computes with the part of a weight that a mask leaves, whose size is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4))
        self.register_buffer("mask", torch.arange(16) < 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.weight[self.mask]
        return x[:, : kept.shape[0]] @ kept if kept.shape[0] != 5 else x @ self.weight


def test_sizes_that_a_weight_decides(machine: Any) -> None:
    eager = Pruned()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), strict=True)
    for count in (3, 5, 7, 3):
        for module in (placed, eager):
            module.mask.copy_(torch.arange(16) < count)
        with torch.no_grad():
            assert largest_difference(placed(X), eager(X)) < 1e-5
    assert len(placed.plans) == 3


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_parts_of_a_weight_keep_their_gradients(machine: Any) -> None:
    eager = Pruned()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X,), grad=True)
    for module in (placed, eager):
        module(X).square().sum().backward()
    assert largest_difference(placed.weight.grad.cpu(), eager.weight.grad) < 1e-4


class OfMarks(nn.Module):
    """Takes marks, a number in their place, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, marks: torch.Tensor | int | None) -> torch.Tensor:
        if isinstance(marks, torch.Tensor):
            return self.linear(x) * 2 if marks.max() > 3 else self.linear(x)
        return self.linear(x) * (marks or 5)


def test_branch_input_of_another_type_is_retraced(machine: Any) -> None:
    eager = OfMarks()
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, torch.tensor([1, 5])))
    for marks in (torch.tensor([1, 5]), 3, None, torch.tensor([1, 2])):
        assert largest_difference(placed(X, marks), eager(X, marks)) < 1e-5
    assert len(placed.plans) == 4


def test_training_steps_branch_on_inputs(machine: Any) -> None:
    eager, many = OfMarks(), torch.tensor([1, 5])
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, many), train=True, strict=True)
    for marks, plans in ((many, 1), (many - 2, 2), (many + 1, 2)):
        for module in (placed, eager):
            module.zero_grad()
            module(X, marks).square().mean().backward()
        assert largest_difference(placed.linear.weight.grad.cpu(), eager.linear.weight.grad) < 1e-5
        assert len(placed.plans) == plans


class Choosing(nn.Module):
    """Chooses rows twice, by marks of one form, and repeats rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, marks: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if counts.sum() == 0:
            return self.linear(x).sum()
        chosen = [self.linear(x[row.nonzero()[:, 0]]).exp().sum() for row in marks.unbind() if row.any()]
        repeated = self.linear(x[torch.arange(8).repeat_interleave(counts)]).square().sum()
        return torch.stack([*chosen, repeated]).sum()


def chosen(*marks: int, counts: int) -> tuple[torch.Tensor, ...]:
    """A call in which as many rows have each mark, and are repeated as often."""
    rows = torch.arange(8)
    return X, torch.stack([rows < number for number in marks]), torch.full((8,), counts)


@pytest.mark.slow
def test_sizes_that_inputs_decide_in_a_training_step(machine: Any) -> None:
    eager = Choosing()
    placed = graphplan.partition(
        copy.deepcopy(eager), machine.max_memory, chosen(2, 7, counts=2), train=True, strict=True
    )
    for call in (chosen(2, 7, counts=2), chosen(5, 3, counts=1), chosen(4, 0, counts=3)):
        for each in (placed, eager):
            each.zero_grad()
            each(*call).backward()
        assert largest_difference(placed.linear.weight.grad.cpu(), eager.linear.weight.grad) < 1e-3


def test_operations_that_look_alike_may_choose_other_counts(machine: Any) -> None:
    plan = graphplan.plan(Choosing(), machine.max_memory, chosen(2, 7, counts=2))
    of_linear = [op.outputs[0] for op in plan.graph.operations.values() if op.target == "linear"]
    assert [plan.graph.values[name].shape[0] for name in of_linear] == [2, 7, 16]


class Switched(nn.Module):
    """A block that branches on a number, and may increment it before."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts = nn.Linear(16, 16), counts

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        if self.counts:
            number.add_(1)
        return self.linear(x) * 2 if number == 3 else self.linear(x)


class SwitchedStack(nn.Module):
    """Blocks that each get a number of their own, or share one that changes between blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Switched(counts=kind == "counted") for _ in range(6)), kind

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            if self.kind == "written" and place in (3, 4):
                numbers[0] = 3 if place == 3 else 0
            x = layer(x, numbers[place] * 1 if self.kind == "each" else numbers[0])
        return x


@pytest.mark.parametrize("kind", ["each", "counted", "written", "one"])
def test_blocks_branch_on_their_own_inputs(machine: Any, kind: str) -> None:
    eager = SwitchedStack(kind)
    numbers = torch.tensor([0, 0, 3, 0, 0, 0])
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, numbers.clone()), strict=True)
    for other in (numbers, numbers.flip(0), numbers * 0 + 3):
        given, expected = other.clone(), other.clone()
        assert largest_difference(placed(X, given), eager(X, expected)) < 1e-5
        assert torch.equal(given, expected)


class Looking(nn.Module):
    """Looks integers up, which is a question of as many as are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + ids[order].sum() if ids[0] + order[0] > 3 else self.linear(x)


def test_sizes_without_values_have_no_questions(machine: Any) -> None:
    call = X, torch.tensor([4, 5, 2]), torch.tensor([0, 1])
    placed = graphplan.partition(Looking(), machine.max_memory, call, strict=True)
    guards = placed._graphplan.programs[0].signature.guards
    assert [len(one.holds.branches) for one in guards if isinstance(one.holds, InputBranches)] == [1]


class Whole(nn.Module):
    """Masks rows from where each ends, unless all are as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if (lengths == x.shape[1]).all():
            return self.linear(x)
        return self.linear(x) * (torch.arange(x.shape[1]) < lengths[:, None]).unsqueeze(-1)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_branches_on_integers_and_sizes(machine: Any, grad: bool) -> None:
    eager = Whole()
    call = torch.randn(4, 9, 16), torch.tensor([9] * 4)
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, call, train=grad, strict=True)
    for batch, longest, shortest in ((4, 9, 9), (2, 5, 5), (3, 8, 8), (4, 9, 2), (3, 6, 5), (2, 4, 4)):
        x, lengths = torch.randn(batch, longest, 16), torch.full((batch,), longest)
        lengths[0] = shortest
        with torch.set_grad_enabled(grad):
            assert largest_difference(placed(x, lengths), eager(x, lengths)) < 1e-5
    # a training step is traced for the sizes of its example first, and planned again for larger ones
    assert len(placed.plans) == (5 if grad else 2)


class OfElements(nn.Module):
    """Asks how many elements a tensor of real numbers has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2 if (count == x.numel()) else self.linear(x)


def test_numbers_of_elements_vary(machine: Any) -> None:
    eager = OfElements()
    call = torch.randn(9, 16), torch.tensor(9 * 16)
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, call)
    for batch, count in ((9, 144), (5, 80), (5, 81), (8, 128), (4, 80)):
        x = torch.randn(batch, 16)
        assert largest_difference(placed(x, torch.tensor(count)), eager(x, torch.tensor(count))) < 1e-5
    assert len(placed.plans) == 2


class Shifted(nn.Module):
    """Looks integers up at places that a buffer shifts, which may be past the last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("shift", torch.tensor(2))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        for _ in range(int(self.shift)):
            x, ids = self.linear(x), ids + 1
        return x * 2 if marks[ids].max() > 3 else x


def test_question_failing_in_another_call_equals_eager(machine: Any) -> None:
    eager, marks = Shifted(), torch.arange(6)
    first = (X, torch.tensor([1, 2]), marks)
    placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, first, strict=True)
    for shift, ids in ((2, [1, 2]), (0, [4, 5]), (2, [1, 0])):
        for module in (placed, eager):
            module.shift.fill_(shift)
        given = torch.tensor(ids)
        assert largest_difference(placed(X, given, marks), eager(X, given, marks)) < 1e-5


class KeepingFirst(nn.Module):
    """Keeps the value of a number in its first call."""

    first: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = number.item() > 3
        for _ in range(int(number.item())):
            x = self.linear(x)
        return x * (1 + self.first)


def test_model_keeping_its_first_answer_equals_eager(machine: Any) -> None:
    eager = KeepingFirst()
    with pytest.warns(graphplan.GraphplanWarning, match="a call changes KeepingFirst.first"):
        placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (X, torch.tensor(5)))
    for number in (5, 2, 5):
        given = torch.tensor(number)
        assert largest_difference(placed(X, given), eager(X, given)) < 1e-5
