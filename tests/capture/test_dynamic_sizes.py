"""The bytes that a plan counts for data-dependent sizes."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from builders import largest_difference, run_placed
from torch import nn

import graphplan

LARGE = {0: "64MiB", "cpu": "1GiB"}


class Experts(nn.Module):
    """Each token goes to one of them: how many tokens each is given, the weights decide."""

    def __init__(self, skewed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(16, 3)
        if skewed:
            nn.init.constant_(self.router.bias[:1], 100.0)
        self.experts = nn.ModuleList(nn.Linear(16, 512) for _ in range(3))
        self.down = nn.Linear(512, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.router(x).argmax(-1)
        counts = (choice[:, None] == torch.arange(3)).sum(0).tolist()
        parts = x[choice.argsort()].split(counts)
        made = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        return self.down(torch.cat(made))


@pytest.mark.parametrize("skewed", [True, False])
def test_peak_bounds_tensors_split_by_data(skewed: bool) -> None:
    model = Experts(skewed).eval()
    x = torch.randn(64, 16)
    with graphplan.simulate(LARGE) as machine, warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = graphplan.partition(model, machine.max_memory, (x,))
        gc.collect()
        machine.reset_peaks()
        with torch.no_grad():
            assert largest_difference(placed(x), model(x)) < 1e-5
        assert 64 * 512 * 4 < machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


class Kept(nn.Module):
    """Only the rows that its input marks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 256)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.linear(x[keep]).sin()


def test_elements_kept_by_input_mask_are_bounded() -> None:
    model, few = Kept().eval(), torch.arange(64) < 4
    with graphplan.simulate(LARGE) as machine, warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = graphplan.partition(model, machine.max_memory, (torch.randn(64, 16), few))
        for rows in (64, 96):
            x, keep = torch.randn(rows, 16), torch.ones(rows, dtype=torch.bool)
            gc.collect()
            machine.reset_peaks()
            with torch.no_grad():
                assert largest_difference(placed(x, keep), model(x, keep)) < 1e-6
            assert 64 * 256 * 4 < machine.peak_bytes(0) <= placed.plans[-1].peak_bytes[0]


class Chosen(Kept):
    """The rows that it marks itself; a trace has three operations for that."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.score, self.choose = nn.Linear(16, 1), choose

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        rows = self.choose(self.score(x)[:, 0].sigmoid())
        return self.linear(x[rows]).sin()


if not hasattr(torch.ops.torchvision, "nms"):  # it need not be installed

    @torch.library.custom_op("torchvision::nms", mutates_args=())
    def nms(boxes: torch.Tensor, scores: torch.Tensor, limit: float) -> torch.Tensor:
        """None overlap."""
        return scores.argsort(descending=True)

    @nms.register_fake
    def _(boxes: torch.Tensor, *_args: Any) -> torch.Tensor:
        return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)


@pytest.mark.parametrize(
    "choose",
    [
        lambda score: torch.where(score > 0)[0],
        lambda score: (score > 0).nonzero(as_tuple=True)[0],
        lambda score: torch.argwhere(score > 0)[:, 0],
        lambda score: torch.unique((score * 1e6).long()) % 7,
        lambda score: torch.unique_consecutive((score * 1e6).long()) % 7,
        lambda score: torch.ops.torchvision.nms(score[:, None].expand(-1, 4), score, 0.5),
    ],
    ids=["where", "nonzero", "argwhere", "unique", "unique_consecutive", "nms"],
)
def test_selected_elements_are_bounded_by_the_mask(choose: Any) -> None:
    model, x = Chosen(choose).eval(), torch.randn(64, 16)
    with graphplan.simulate(LARGE) as machine, warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = graphplan.partition(model, machine.max_memory, (x,), strict=True)
        gc.collect()
        machine.reset_peaks()
        with torch.no_grad():
            assert largest_difference(placed(x), model(x)) < 1e-6
        assert 64 * 256 * 4 < machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


class Drawn(nn.Module):
    """Draws as many rows as its input says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 256)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        count = rows[0].item() * rows[1].item()
        return self.linear(x.mean(0).expand(count, 16) * 2)


def test_sizes_from_input_values_are_planned_as_in_example() -> None:
    model = Drawn().eval()
    x, rows = torch.randn(4, 16), torch.tensor([9, 7])
    with graphplan.simulate(LARGE) as machine:
        with pytest.warns(
            UserWarning, match="the plan counts data-dependent sizes as they are in the example"
        ):
            placed = graphplan.partition(model, machine.max_memory, (x, rows))
        with torch.no_grad():
            assert largest_difference(run_placed(machine, placed, (x, rows)), model(x, rows)) < 1e-6
        assert placed.plan.peak_bytes[0] > 63 * 256 * 4


class Padded(nn.Module):
    """As far as a buffer says."""

    pad: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("pad", torch.tensor(50))
        self.linear = nn.Linear(16, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count: Any = self.pad.item()
        return self.linear(torch.nn.functional.pad(x, (0, 0, count, count)))


def test_sizes_from_buffers_are_planned() -> None:
    model = Padded().eval()
    x = torch.randn(4, 16)
    with graphplan.simulate(LARGE) as machine, warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = graphplan.partition(model, machine.max_memory, (x,))
        with torch.no_grad():
            assert largest_difference(run_placed(machine, placed, (x,)), model(x)) < 1e-6
        assert placed.plan.peak_bytes[0] > 104 * 256 * 4


class Counted(nn.Module):
    """Adds up rows by their groups, of which there are as many as the largest index says."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.count = nn.Linear(16, 256), count

    def forward(self, x: torch.Tensor, groups: torch.Tensor, scale: int = 2) -> torch.Tensor:
        count = self.count(groups) + 1
        kinds = isinstance(scale, int), isinstance(3, int), not isinstance(x, int), issubclass(bool, int)
        assert all((*kinds, int("7", base=8) == 7, int(2.5) == 2, int in [type(groups.ndim)]))
        return self.linear(x.new_zeros(count, 16).index_add(0, groups, x * scale))


@pytest.mark.parametrize("count", [lambda groups: int(groups.max()), lambda groups: int(groups.max().item())])
def test_int_of_tensor_value_is_traced(count: Any) -> None:
    model = Counted(count).eval()
    with graphplan.simulate(LARGE) as machine, torch.no_grad():
        with pytest.warns(
            UserWarning, match="the plan counts data-dependent sizes as they are in the example"
        ):
            placed = graphplan.partition(
                model, machine.max_memory, (torch.randn(6, 16), torch.tensor([0, 1, 2, 2, 1, 0]))
            )
        for groups in ([0, 0, 1], [4, 2, 0, 1], [3]):
            given = torch.randn(len(groups), 16), torch.tensor(groups)
            assert largest_difference(placed(*given, scale=3), model(*given, scale=3)) < 1e-6
        assert placed.plan.method == "export"
    assert "int" not in globals()


@pytest.mark.parametrize("count", [lambda x: int(x.sum()), lambda x: int(x.long().sum()) > 3])
def test_int_in_branch_raises_data_dependent_error(count: Any) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if count(x) else x

    with pytest.raises(graphplan.CaptureError, match="data-dependent"):
        graphplan.plan(Branches(), {"cpu": "1MiB"}, (torch.ones(2, 4),))
    assert "int" not in globals()


def test_one_element_simulated_tensor_formats_as_its_value() -> None:
    with graphplan.simulate({0: "1MiB"}):
        assert f"expert_{torch.tensor(3, device='sim:0')}" == "expert_3"
        assert f"{torch.tensor(0.5, device='sim:0'):.2f}" == "0.50"


class NormedChoice(nn.Module):
    """Selects rows by the result of a norm with running statistics and no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.linear(y[y[:, 0] > 0])


def test_example_sizes_leave_running_statistics_unchanged() -> None:
    model = NormedChoice()
    placed: Any = graphplan.partition(model, {"cpu": "1MiB"}, (torch.randn(8, 4) + 3,))
    assert torch.equal(placed.norm.running_mean, torch.zeros(4))
    assert torch.equal(model.norm.running_mean, torch.zeros(4))
