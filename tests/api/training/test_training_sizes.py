"""Steps of other sizes than the first: one more trace serves them, within the budgets, equal to eager."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from training_steps import gap, gradients_of, needed, step_of

import graphplan
from graphplan.capture import differentiate


class Block(nn.Module):
    """Causal attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.drop(self.out(found.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Text(nn.Module):
    """Blocks over tokens, with their own loss."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layers = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.head(self.layers(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())}


class Image(nn.Module):
    """Convolutions and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for width in (3, 8)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Larger(nn.Module):
    """Twice as long, by a kernel that asks for each size by itself where sizes are symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.linear(x).transpose(1, 2), scale_factor=2)


def text_of(batch: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(batch * length).reshape(batch, length) % 40
    return {"input_ids": tokens, "labels": tokens.flip(1).clone()}


def image_of(batch: int, side: int) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, batch * 3 * side * side).reshape(batch, 3, side, side)}


def same_steps(placed: nn.Module, eager: nn.Module, calls: list[dict[str, torch.Tensor]]) -> None:
    for turn, inputs in enumerate(calls):
        for model in (placed, eager):
            model.zero_grad()
        loss, expected = step_of(placed, inputs, turn), step_of(eager, inputs, turn)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        assert gap(gradients_of(placed), gradients_of(eager)) < 1e-4
    buffers = dict(placed.named_buffers())
    for name, value in eager.named_buffers():
        torch.testing.assert_close(buffers[name].cpu(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("image", 1.5),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("text", 0.5), ("image", 0.5), ("text", 1.5))
        ),
    ],
)
def test_a_second_trace_serves_all_other_sizes(kind: str, share: float) -> None:
    made, of = (Text(), text_of) if kind == "text" else (Image(), image_of)
    eager, first = copy.deepcopy(made), of(4, 8)
    budgets: Mapping[Any, int] = {0: int(share * needed(made, first)), "cpu": 1 << 30}
    with graphplan.simulate(budgets) as machine:
        options: dict[str, Any] = {"kwargs": first, "train": True, "time_limit": 0.5, "strict": True}
        placed = graphplan.partition(made, budgets, **options)
        calls = [of(4, 8), of(3, 8), of(2, 8), of(4, 8), of(3, 8)]
        calls += [text_of(2, 5), text_of(3, 7)] if kind == "text" else []
        same_steps(placed, eager, calls)
        assert machine.peak_bytes(0) <= budgets[0]
        captures = {id(program.signature) for program in placed._graphplan.programs}
        assert len(captures) == 2


@pytest.mark.slow
def test_image_sizes_become_dynamic_after_the_first_change() -> None:
    made = Image()
    eager, budgets = copy.deepcopy(made), {0: 1 << 26, "cpu": 1 << 30}
    with graphplan.simulate(budgets):
        placed = graphplan.partition(made, budgets, kwargs=image_of(4, 8), train=True, time_limit=0.5)
        same_steps(placed, eager, [image_of(*sizes) for sizes in ((3, 8), (3, 6), (3, 10), (2, 7), (3, 6))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "blocks"),
    [((1, 8), 0), *(pytest.param((4, 8), n, marks=pytest.mark.slow) for n in (0, 1))],
)
def test_a_size_of_one_is_another_structure(first: tuple[int, int], blocks: int) -> None:
    made = Text(blocks)
    eager, budgets = copy.deepcopy(made), {0: 1 << 26, "cpu": 1 << 30}
    with graphplan.simulate(budgets):
        placed = graphplan.partition(made, budgets, kwargs=text_of(*first), train=True, time_limit=0.5)
        same_steps(placed, eager, [text_of(*sizes) for sizes in ((3, 6), (1, 6), (1, 5), (3, 1), (2, 4))])


def test_kernel_that_reads_symbolic_sizes_is_traced_in_simulation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Larger()
    eager, budgets = copy.deepcopy(made), {0: 1 << 26, "cpu": 1 << 30}
    caplog.set_level("INFO", "graphplan")
    with graphplan.simulate(budgets):
        placed = graphplan.partition(made, budgets, kwargs={"x": torch.ones(4, 6, 8)}, train=True)
        same_steps(placed, eager, [{"x": torch.full((*s, 8), 0.1)} for s in ((4, 6), (3, 6), (2, 5))])


class Halves(nn.Module):
    """Two results, which are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.linear(x).exp().split(4, dim=-1)
        return first, second.log()


@pytest.mark.parametrize("used", [0, 1])
def test_unused_result_gradient_has_the_size_of_the_call(used: int) -> None:
    made = Halves()
    eager, budgets = copy.deepcopy(made), {0: 1 << 26, "cpu": 1 << 30}
    with graphplan.simulate(budgets):
        placed = graphplan.partition(made, budgets, (torch.ones(4, 8),), train=True)
        for rows in (3, 2, 4, 3):
            for model in (placed, eager):
                model.zero_grad()
                model(torch.linspace(0, 1, rows * 8).reshape(rows, 8))[used].sum().backward()
            assert gap(gradients_of(placed), gradients_of(eager)) < 1e-5


def test_step_untraceable_with_symbols_has_one_size_per_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[bool] = []
    own = differentiate._Tracing.step

    def step(self: Any, *values: Any) -> Any:
        tries.append(bool(self.sizes))
        if self.sizes:
            raise RuntimeError("no symbols here")
        return own(self, *values)

    monkeypatch.setattr(differentiate._Tracing, "step", step)
    made = Text(0)
    eager, budgets = copy.deepcopy(made), {0: 1 << 26, "cpu": 1 << 30}
    with graphplan.simulate(budgets):
        placed = graphplan.partition(made, budgets, kwargs=text_of(4, 8), train=True, time_limit=0.5)
        with pytest.warns(
            graphplan.GraphplanWarning, match="sizes cannot vary in the trace.*no symbols here"
        ):
            same_steps(placed, eager, [text_of(*sizes) for sizes in ((4, 8), (3, 8), (2, 7), (3, 8))])
    assert tries == [False, True, False, False]


@pytest.mark.slow
def test_limits_plan_for_the_largest_sizes_at_once() -> None:
    made = Text()
    eager, budget = copy.deepcopy(made), needed(made, text_of(6, 12))
    with graphplan.simulate({0: budget}) as machine:
        options: dict[str, Any] = {"kwargs": text_of(2, 4), "train": True, "max_batch": 6, "max_length": 12}
        placed = graphplan.partition(made, {0: budget}, strict=True, **options)
        same_steps(placed, eager, [text_of(*sizes) for sizes in ((2, 4), (6, 12), (3, 7), (4, 4))])
        assert len(placed._graphplan.programs) == 1
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0] <= budget
        with pytest.raises(graphplan.LimitError, match="max_length=12"):
            placed(**text_of(2, 13))
        del options["max_batch"], options["max_length"]
        with pytest.raises(graphplan.PlanError, match="max_batch= and max_length="):
            graphplan.partition(Text(), {0: budget}, plan=placed.plan, **options)


@pytest.mark.slow
def test_images_of_transformers_vary_in_the_second_trace(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    made = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4))
    eager, budgets = copy.deepcopy(made), {0: 1 << 26, "cpu": 1 << 30}
    calls = [
        {"pixel_values": image_of(count, 8)["x"], "labels": torch.arange(count) % 2} for count in (4, 3, 2, 3)
    ]
    caplog.set_level("INFO", "graphplan")
    with graphplan.simulate(budgets):
        placed = graphplan.partition(made, budgets, kwargs=calls[0], train=True, time_limit=0.5)
        same_steps(placed, eager, calls)
    assert caplog.text.count("capturing another graph") == 1


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, count: int, scale: float) -> torch.Tensor:
        return self.linear(x).square().sum() / count * scale


def test_numbers_become_dynamic_after_the_first_change(caplog: pytest.LogCaptureFixture) -> None:
    made, x = Divided(), torch.linspace(0, 1, 32).reshape(4, 8)
    eager, budgets = copy.deepcopy(made), {0: 1 << 26, "cpu": 1 << 30}
    calls = [
        {"x": x, "count": count, "scale": scale} for count, scale in ((3, 0.5), (5, 0.5), (7, 2.0), (2, 0.1))
    ]
    caplog.set_level("INFO", "graphplan")
    with graphplan.simulate(budgets):
        placed = graphplan.partition(made, budgets, kwargs=calls[0], train=True)
        same_steps(placed, eager, calls)
    assert caplog.text.count("capturing another graph") == 1
