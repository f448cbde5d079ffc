"""One capture serves all batches and lengths, and all numbers that only enter arithmetic."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from builders import largest_difference
from shortcuts import short_search
from torch import nn
from torch.nn import functional
from versions import needs

import graphplan
from graphplan.capture.sizes.dynamic_axes import BATCH, LENGTH, SIZE, text_roles
from graphplan.capture.tracers import trace_patches

Args = tuple[Any, ...]
LARGE = {0: "8MiB", "cpu": "64MiB"}


@pytest.fixture
def traces(monkeypatch: Any) -> list[int]:
    """An entry for each trace that is made."""
    made: list[int] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(0)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return made


def check(model: nn.Module, calls: Sequence[Args], **options: Any) -> Any:
    """Place a model for the first call, make all calls, and compare them with eager and with their plans."""
    model.eval()
    with graphplan.simulate(LARGE) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, calls[0], **options)
        for args in calls:
            assert largest_difference(placed(*args), model(*args)) < 1e-5
        assert machine.peak_bytes(0) <= max(plan.peak_bytes[0] for plan in placed.plans)
    return placed


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(functional.relu(self.norm(self.conv(x))).mean((2, 3)))


class Quotients(nn.Module):
    """Computes its batch from the number of windows, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = self.layer(x).reshape(-1, 2, 8)
        batch = int(windows.shape[0] / (8 / 2 / 2))
        return windows.view(batch, 4, 8) + batch


class Careful(Quotients):
    """Catches whatever is raised at its quotient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            half = int(x.shape[0] / 2)
        except Exception:
            half = 0
        return self.layer(x) + half


def test_quotient_is_symbolic_if_model_catches_errors(traces: list[int]) -> None:
    check(Careful(), [(torch.randn(rows, 4, 8),) for rows in (4, 7, 2)])
    assert len(traces) == 2


def test_whole_parts_of_quotients_vary(traces: list[int]) -> None:
    sizes = [(2, 4), (3, 4), (1, 4), (5, 4)]
    check(Quotients(), [(torch.randn(*size, 8),) for size in sizes])
    assert len(traces) == 2  # one that finds that the code asks so


@needs("torch", "2.12", "slices of varying sizes have unknown sizes")
def test_halves_of_odd_lengths_vary(traces: list[int]) -> None:
    def half(x: torch.Tensor, number: float) -> torch.Tensor:
        return x[:, : int(x.shape[1] / 2)] * number

    check(Function(half), [(torch.randn(2, length, 8), 2.0) for length in (6, 7, 3, 12)])
    assert len(traces) == 2


class Function(nn.Module):
    """A layer, and a function of its result and a number."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor, number: float) -> torch.Tensor:
        return self.function(self.layer(x), number)


@pytest.mark.parametrize("first", [1, 4])
def test_twenty_batches_are_one_capture_and_few_plans(traces: list[int], first: int) -> None:
    placed = check(Image(), [(torch.randn(size, 3, 8, 8),) for size in (first, *range(1, 21))])
    assert len(traces) == 1
    assert len(placed.plans) <= 6  # up to 1, 2, 4, 8, 16, 32


class Single(Image):
    """Has code of its own for a batch of one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.shape[0] == 1 else super().forward(2 * x)


def test_other_sizes_become_symbols_after_first_change(traces: list[int]) -> None:
    shapes = [(1, 8), (2, 8), (4, 8), (2, 6), (3, 10)]
    placed = check(Single(), [(torch.randn(batch, 3, size, size),) for batch, size in shapes])
    forms = [program.signature.leaves[0].shape for program in placed._graphplan.programs]
    assert (None, 3, 8, 8) in forms[1:3]
    assert (None, 3, None, None) in forms
    assert len(traces) == 3


def test_max_batch_gives_one_plan_and_limit_error(traces: list[int]) -> None:
    placed = check(Image(), [(torch.randn(size, 3, 8, 8),) for size in (4, *range(1, 21))], max_batch=20)
    assert (len(traces), len(placed.plans)) == (1, 1)
    with pytest.raises(graphplan.LimitError, match="max_batch=20"):
        placed(torch.randn(21, 3, 8, 8))


@pytest.mark.slow
def test_twenty_sizes_of_images_are_two_captures(traces: list[int]) -> None:
    check(Image(), [(torch.randn(2, 3, size, size + 3),) for size in range(8, 28)])
    assert len(traces) == 2


@pytest.mark.slow
def test_slow_trace_of_all_sizes_is_not_repeated(traces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_patches, "_MAX_SECONDS", 0.0)
    with pytest.warns(graphplan.GraphplanWarning, match="takes more than 0 seconds"):
        check(Image(), [(torch.randn(2, 3, size, size + 3),) for size in (8, 9)])
    assert len(traces) == 3  # of the first size, of all that is given up, of the second
    with pytest.warns(graphplan.GraphplanWarning, match="takes more than 0 seconds"):
        check(Image(), [(torch.randn(2, 3, size, size + 3),) for size in range(8, 12)])
    assert len(traces) == 3 + 5


def test_image_sizes_give_two_transformers_captures(traces: list[int]) -> None:
    from transformers import ConvNextConfig, ConvNextModel

    torch.manual_seed(0)
    images = ConvNextModel(ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2))
    check(images, [(torch.randn(2, 3, 8 * size, 16),) for size in range(1, 4)])
    assert len(traces) == 2


@pytest.mark.slow
def test_audio_lengths_give_two_transformers_captures(traces: list[int]) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(0)
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    kernels = {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (2, 2), "vocab_size": 8}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    sounds = Wav2Vec2Model(Wav2Vec2Config(**layers, **kernels, **positions))
    check(sounds, [(torch.randn(2, 100 * size),) for size in range(1, 5)])
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("layer", "batch_first"),
    [
        (nn.LSTM, True),
        (nn.GRU, False),
        (nn.RNN, True),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((nn.LSTM, False), (nn.GRU, True), (nn.RNN, False))
        ),
    ],
)
def test_recurrent_layers_serve_all_lengths(traces: list[int], layer: Any, batch_first: bool) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = layer(8, 16, batch_first=batch_first)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)[0]
            return out.tanh()

    sizes = [(2, 5), (3, 5), (2, 9), (4, 12)]
    check(Last(), [(torch.randn(*(size if batch_first else size[::-1]), 8),) for size in sizes])
    assert len(traces) == 1


def timestep(x: torch.Tensor, number: float) -> torch.Tensor:
    """As the pipelines of diffusers, which make a tensor of a number by its type."""
    if not torch.is_tensor(number):
        number = torch.tensor([number], dtype=torch.float64 if isinstance(number, float) else torch.int64)
        assert number.dtype is not torch.bool
    return x + number.expand(x.shape[0])[:, None].sin()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, number: x * number + 1 / (number + 0.5),
        lambda x, number: (x / number).softmax(-1),
        lambda x, number: torch.where(x > number, x, number),
        timestep,
    ],
)
@pytest.mark.parametrize("numbers", [(0.5, 0.75, 1e-3, 7.5, 1.0, 20.25), (981, 961, 7, 2, 1)])
def test_numbers_in_arithmetic_are_one_capture(
    traces: list[int], function: Any, numbers: Sequence[float]
) -> None:
    placed = check(Function(function), [(torch.randn(4, 8), number) for number in numbers])
    assert (len(traces), len(placed.plans)) == (1, 1)


def test_negative_ints_share_a_plan() -> None:
    placed = check(Function(lambda x, number: x + number), [(torch.randn(4, 8), n) for n in (-3, 4, 0)])
    assert len(placed.plans) == 1


@pytest.mark.parametrize(
    ("function", "graphs"),
    [
        (lambda x, number: x * number if number > 1 else x - number, 2),  # two branches
        (lambda x, number: x * round(float(number), 1), 4),  # no symbol goes through
        (lambda x, number: x * number if isinstance(number, float) else x, 1),
        (lambda x, number: x if number != 1.0 else x * 2, 2),
    ],
)
def test_numbers_used_in_branches_are_retraced(traces: list[int], function: Any, graphs: int) -> None:
    numbers = (0.5, 1.5, 1.0, 3.0, 0.5)
    check(Function(function), [(torch.randn(4, 8), number) for number in numbers])
    assert len(traces) == graphs


def test_numbers_used_as_keys_are_retraced(traces: list[int]) -> None:
    # seen on CLIP in LLaVA, which is told of the layer whose result is wanted: each batch was another trace
    def looked_up(y: torch.Tensor, number: int) -> torch.Tensor:
        return {2: y, 3: -y}[number] * (number in {2, 4})

    calls = [(torch.randn(batch, 8), number) for batch in (4, 5, 9) for number in (2, 3)]
    traces.clear()
    check(Function(looked_up), calls)
    assert len(traces) == 4  # two for each number: one with the number as a symbol fails


def test_ints_of_which_sizes_are_made_are_planned_for(traces: list[int]) -> None:
    calls = [(torch.randn(4, 8), number) for number in (3, 5, 2, 200, 1)]
    placed = check(Function(lambda x, number: torch.ones(number, 8) @ x.T), calls)
    assert len(traces) == 1
    assert 1 < len(placed.plans) <= 3


class Cached(nn.Module):
    """Attention over buffers of keys and values, cut at a number that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("keys", torch.zeros(1, 48, 16))
        self.register_buffer("values", torch.zeros(1, 48, 16))

    def forward(self, x: torch.Tensor, at: torch.Tensor, end: int) -> torch.Tensor:
        new = self.query(x)
        keys, values = (one[: len(x)].index_copy_(1, at, new) for one in (self.keys, self.values))
        keys, values = keys[:, None, :end], values[:, None, :end]
        mask = torch.ones(48, 48, dtype=torch.bool).tril().index_select(0, at)[:, :end]
        found = functional.scaled_dot_product_attention(new[:, None], keys, values, attn_mask=mask)
        return self.out(found[:, 0])  # type: ignore[no-any-return]


@pytest.mark.slow
@needs("torch", "2.12", "a slice of an open size cannot be traced")
def test_slices_with_equal_int_end_have_equal_size(traces: list[int]) -> None:
    steps = [(torch.full((1, 1, 16), float(n)), torch.tensor([n]), n + 1) for n in range(5, 40)]
    check(Cached(), [(torch.ones(1, 5, 16), torch.arange(5), 5), *steps])
    assert len(traces) <= 4


class Rotated(nn.Module):
    """A layer, times a part of a table's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.layer = nn.Linear(16, 4)
        self.register_buffer("table", torch.randn(48, 16))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found * self.table.index_select(0, at)[:, :4].reshape(1, x.shape[1], 4)


def test_length_fixed_at_one_is_planned_as_one() -> None:
    calls = [(torch.ones(1, length, 16), torch.arange(length)) for length in (5, 1)]
    placed = check(Rotated(), calls)
    assert placed._graphplan.programs[1].signature.leaves[0].ranges[1] == (1, 1)


def test_ints_used_as_loop_count_or_index_are_retraced(traces: list[int]) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor, index: int, steps: int) -> torch.Tensor:
            for _ in range(steps):
                x = self.layers[index](x)
            return x

    x = torch.randn(4, 8)
    check(Steps(), [(x, 0, 2), (x, 1, 2), (x, 1, 3), (x, 0, 2)])
    assert len(traces) == 3


COMPARED = {  # as code compares what it knows to be a bool
    "equal to 1": lambda flag: flag == 1,
    "other than 0": lambda flag: flag != 0,
    "is True": lambda flag: flag is True,
    "is False": lambda flag: flag is False,
    "a bool": lambda flag: isinstance(flag, bool) and flag,
}


@pytest.mark.parametrize("how", COMPARED)
def test_comparisons_of_sizes_and_numbers_are_bools(how: str) -> None:
    decide = COMPARED[how]

    def function(y: torch.Tensor, number: float) -> torch.Tensor:
        return y * (2 if decide(y.shape[0] > 4) else 3) * (5 if decide(number < 1) else 7)

    batches = [6, 3, 8, 2, 1]
    check(Function(function), [(torch.ones(n, 8), number) for n in batches for number in (0.5, 2.5)])


@pytest.mark.parametrize("how", COMPARED)
def test_flags_read_from_tensors_are_data_dependent(how: str) -> None:
    decide = COMPARED[how]

    def function(y: torch.Tensor, _: float) -> torch.Tensor:
        return y * (2 if decide((y > 0).all().item()) else 3)

    model = Function(function)
    with pytest.warns(graphplan.GraphplanWarning, match="data-dependent"):
        placed = graphplan.partition(model, {"cpu": "1MiB"}, (torch.ones(2, 8), 0.5))
    nn.init.eye_(placed.layer.weight)
    nn.init.zeros_(placed.layer.bias)
    for x in (torch.ones(2, 8), -torch.ones(2, 8)):
        assert largest_difference(placed(x, 0.5), graphplan.unplace(placed)(x, 0.5)) < 1e-5


def test_torch_check_is_not_a_branch() -> None:
    def function(y: torch.Tensor, _: float) -> torch.Tensor:
        torch._check_tensor_all(y < 1e9, lambda: "too large")
        torch._check(y.shape[0] < 64)
        return y * 2

    check(Function(function), [(torch.ones(n, 8), 0.5) for n in (4, 2)], strict=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, _: y * (y.shape[0] > 4),
        lambda y, _: torch.cond(y.shape[0] > 4, lambda t: t * 2, lambda t: t * 3, (y,)),
    ],
)
def test_comparisons_do_not_narrow_declared_sizes(traces: list[int], function: Any) -> None:
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}, "number": None}
    batches = [(torch.ones(n, 8), 0.5) for n in (6, 3, 8)]
    check(Function(function), batches, dynamic_shapes=shapes, strict=True)
    assert len(traces) == 1


def test_squeezed_batch_of_one_is_another_graph(traces: list[int]) -> None:
    calls = [(torch.randn(size, 8), 0.5) for size in (4, 1, 7, 1, 2)]
    check(Function(lambda x, number: (x[:, :1] * number).squeeze()), calls)
    assert len(traces) == 2  # of many, of one


_squeeze = torch.squeeze  # as ``from torch import squeeze``
SQUEEZES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    _squeeze,
    torch.squeeze_copy,
    torch.ops.aten.squeeze,
    lambda x: torch.ops.aten.squeeze.dim(x, 0),
    lambda x: x.clone().squeeze_(),
    lambda x: x.squeeze(axis=0),  # type: ignore[call-overload]  # as numpy names it
    lambda x: x.unsqueeze(1).squeeze(0, 1),  # type: ignore[call-overload]  # torch takes it
    lambda x: x.squeeze((0,)),
]


@pytest.mark.parametrize("squeeze", SQUEEZES)
def test_squeeze_of_batch_one_is_another_graph(
    squeeze: Callable[[torch.Tensor], torch.Tensor], traces: list[int]
) -> None:
    def rows(x: torch.Tensor, number: float) -> torch.Tensor:
        found = squeeze(x[:, :2] * number)
        return torch.ones(found.size(0)) * found.sum()

    check(Function(rows), [(torch.randn(size, 8), 0.5) for size in (4, 1, 7, 1, 2)])
    assert len(traces) == 2  # of many, of one


def test_sizes_vary_with_squeezed_data_size(traces: list[int]) -> None:
    # each size was another graph
    calls = [(torch.randn(size, 8), 0.5) for size in (4, 3, 7)]
    check(Function(lambda x, number: x[x[:, 0] > number].squeeze() * number), calls)
    assert len(traces) == 1


def test_a_computed_size_that_is_squeezed_varies(traces: list[int]) -> None:
    # each size was another graph
    calls = [(torch.randn(size, 8), 0.5) for size in (4, 1, 7)]
    check(Function(lambda x, number: torch.cat([x, x * number])[:, :1].squeeze()), calls)
    assert len(traces) == 1


def test_masked_size_is_planned_at_its_upper_bound() -> None:
    def chosen(x: torch.Tensor, number: float) -> torch.Tensor:
        return x + x[x > -number].repeat(20).sin().sum()

    placed = check(Function(chosen), [(torch.randn(size, 8), 100.0) for size in (16, 4, 64)])
    assert placed.plans[1].peak_bytes[0] > 64 * 8 * 20 * 4


def test_fixed_sizes_warn_once_and_run(traces: list[int]) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * {4: 1.0, 5: 2.0}[x.shape[0]]

    with pytest.warns(graphplan.GraphplanWarning, match="retraced for each new size of its inputs") as caught:
        check(Text(), [(torch.randn(4, 8),), (torch.randn(5, 8),), (torch.randn(4, 8),)])
    assert len(caught) == 1
    assert len(traces) == 3  # an attempt, and one for each size


@pytest.mark.filterwarnings("ignore:.*retraced for each:graphplan.GraphplanWarning")
def test_float_outside_float32_is_recaptured() -> None:
    class Divides(nn.Module):
        def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
            return x / torch.tensor(by)

    placed = graphplan.partition(Divides(), {"cpu": "1GiB"}, (torch.ones(2), 1.0))
    for by in (2.0, 1e300, float("inf"), 0.5):
        assert torch.equal(placed(torch.ones(2), by), torch.ones(2) / torch.tensor(by))
    assert len(placed.plans) == 3


@pytest.mark.parametrize(
    ("name", "shape", "roles"),
    [
        ("input_ids", (2, 5), {0: BATCH, 1: LENGTH}),
        ("attention_mask", (2, 1, 5, 5), {0: BATCH, 2: LENGTH, 3: LENGTH}),
        ("inputs_embeds", (2, 5, 8), {0: BATCH, 1: LENGTH}),
        ("encoder_outputs", (2, 5, 8), {0: BATCH, 1: LENGTH}),
        ("labels", (2,), {0: BATCH}),
        ("pixel_values", (2, 3, 8, 8), {0: BATCH}),
        ("cache_position", (5,), {0: LENGTH}),
        ("cache_position", (1,), {}),
    ],
)
def test_dynamic_axes_of_text_model_arguments(
    name: str, shape: tuple[int, ...], roles: dict[int, str]
) -> None:
    assert text_roles(name, torch.zeros(shape), 2) == roles


def test_sizes_of_a_text_model_without_batch_vary() -> None:
    assert text_roles("values", torch.zeros(5), None, sizes=True) == {0: SIZE}
    assert text_roles("cache_position", torch.zeros(5), None) == {}
    assert text_roles("cache_position", torch.zeros(()), 2) == {}


def test_batches_of_images_share_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)).eval()
    images = torch.linspace(-1, 1, 4 * 3 * 64).reshape(4, 3, 8, 8)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, kwargs={"pixel_values": images})
    caplog.set_level("INFO", "graphplan")
    with torch.no_grad():
        for count in (3, 1, 4):
            found, expected = placed(pixel_values=images[:count]), model(pixel_values=images[:count])
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)
    assert "capturing another graph" not in caplog.text


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(rows_of(x)) / len(self.layers)
        return x.view(len(x), 3, -1)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(len(x), -1)


def test_the_length_of_a_tensor_is_its_first_size(traces: list[int]) -> None:
    """Regression: ``len`` returned an int, so each batch was retraced."""
    check(Counted(), [(torch.randn(batch, 3, 4),) for batch in (2, 3, 5)])
    assert len(traces) == 1
    assert "len" not in globals()


def wide(size: Any) -> float:
    """In the code of a function that the model calls."""
    return 2.0 if isinstance(size, numbers.Integral) else 1.0


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x * (2.0 if isinstance(x.shape[0], int) else 1.0),
        lambda x, n: x * (2.0 if isinstance(n + 1, int | tuple) else 1.0),
        lambda x, n: x * (2.0 if isinstance(x.shape[0] / 2, float) and not isinstance(n, float) else 1.0),
        lambda x, n: x * wide(x.shape[0]) * wide(n) * wide(x.shape[0] / 2) * wide(x),
        lambda x, n: x * (1.0 if isinstance(x, torch.Tensor) and isinstance(n > 2, bool) else 2.0),
    ],
)
def test_sizes_are_instances_of_int_and_vary(traces: list[int], function: Any) -> None:
    """Regression: sizes were not ints in a trace, which silently took the other branch."""
    check(Function(function), [(torch.randn(batch, 8), batch + 1) for batch in (3, 4, 7)])
    assert len(traces) == 1
    assert "isinstance" not in globals()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x * {"3": 2.0, "4": 3.0}.get(str(n), 1.0),
        lambda x, n: x * {"3x8": 2.0, "4x8": 3.0}.get(f"{len(x)}x{x.shape[1]}", 1.0),
        lambda x, n: x * {"4/2": 2.0}.get("%s/2" % x.shape[0], 1.0),  # noqa: UP031
        lambda x, n: x * {"(4, 8)": 2.0}.get(str(tuple(x.shape)), 1.0),
        lambda x, n: {"x": x, "text": str(x.shape[0])}["x"] * len(f"{n * 5}"),
    ],
)
def test_texts_of_sizes_and_numbers_are_looked_up(function: Any) -> None:
    """Regression: the text was that of the symbol (``"s77"``), so the lookup failed."""
    check(Function(function), [(torch.randn(batch, 8), batch) for batch in (3, 4, 7)])


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("a model's").debug("got %s of %s", x.shape, len(x))
        return self.layer(x)


class Texts(Logging):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1.0 if f"{x.shape[0]}" else 2.0)


def test_formatting_declared_or_logged_sizes_fixes_none(traces: list[int], caplog: Any) -> None:
    caplog.set_level("DEBUG", "a model's")
    check(Logging(), [(torch.randn(batch, 8),) for batch in (3, 4, 7)])
    assert len(traces) == 1
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    check(Texts(), [(torch.randn(batch, 8),) for batch in (3, 4, 7)], dynamic_shapes=shapes, strict=True)
    assert len(traces) == 2


class Replacing(nn.Module):
    """As a model of text and sounds, which has as many tokens for sounds as there are features of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).expand_as(x)
        torch._check(x[mask].numel() == sound.numel())
        return self.layer(x.masked_scatter(mask, sound))


def test_batches_vary_with_data_sizes_that_are_multiples(traces: list[int]) -> None:
    """Regression: torch rejected its own bounds, so each batch was retraced."""

    def given(batch: int) -> Args:
        x = torch.ones(batch, 5, 4)
        x[:, 2:] = -1.0
        return x, torch.randn(batch, 8)

    check(Replacing(), [given(batch) for batch in (2, 3, 5)])
    assert len(traces) == 1


class ByItsResults(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


def test_branching_model_without_integers_is_not_retraced(traces: list[int]) -> None:
    with pytest.raises(graphplan.NoGraphError, match=r"torch\.cond"):
        graphplan.plan(ByItsResults(), LARGE, (torch.randn(3, 8),))
    assert len(traces) == 2  # with sizes that vary, and without


class Decoder(nn.Module):
    """Attention over keys and values that the caller passes back as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, ids: torch.Tensor, past: Any = None) -> tuple[torch.Tensor, Any]:
        x = self.embed(ids)
        keys, values = self.key(x), self.value(x)
        if past is not None:
            keys, values = torch.cat([past[0], keys], 1), torch.cat([past[1], values], 1)
        scores = self.query(x) @ keys.transpose(1, 2)
        return self.head(x + scores.softmax(-1) @ values), (keys, values)


@torch.no_grad()
def decoded(model: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    past, tokens = None, [ids]
    for _ in range(count):
        logits, past = model(tokens[-1], past)
        tokens.append(logits[:, -1:].argmax(-1))
    return torch.cat(tokens, 1)


def test_decoding_over_tuples_is_planned_ahead_with_little_memory() -> None:
    torch.manual_seed(0)
    model, ids = Decoder().eval(), torch.randint(0, 40, (2, 5))
    budget = {0: "48KiB", 1: "48KiB", "cpu": "1GiB"}
    with short_search(), graphplan.simulate(budget) as machine:
        placed: Any = graphplan.partition(model, machine.max_memory, (ids,))
        assert torch.equal(decoded(placed, ids, 10), decoded(model, ids, 10))
        assert len(placed.plans) <= 3
