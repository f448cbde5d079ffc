from __future__ import annotations

import dataclasses
import enum
import logging
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from builders import largest_difference
from torch import fx, nn

import graphplan
from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.capture.tracers.exported_program import _write_numbers
from graphplan.capture.tracing import capture
from graphplan.passes.frontend.fx_nodes import module_path


class Owner(nn.Module):
    """Every kind of weight: tied, unused, buffers of both kinds, a tensor attribute, a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("dropped", torch.ones(4), persistent=False)
        self.attribute = torch.arange(4.0)

    def forward(self, x: torch.Tensor, scale: int = 3, flag: bool | None = None) -> dict[str, Any]:
        y = self.again(self.norm(self.first(x))) + self.kept + self.dropped
        y = y * scale + self.attribute + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)
        return {"y": y, "scale": scale, "flag": flag, "parts": y.chunk(2, -1)}


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[ModelCopy, Capture]:
    model_copy = ModelCopy(model)
    return model_copy, capture(model_copy, model_copy.bind(args, kwargs))


def test_weights_have_their_original_names_and_ties() -> None:
    weights = ModelWeights(Owner())
    assert weights.names["first.weight"] == ["first.weight", "again.weight"]
    assert weights.first["again.bias"] == "first.bias"
    assert "dropped" in weights.first
    assert "dropped" not in weights.persistent
    assert "unused.weight" in weights.tensors


def test_two_parameters_over_one_memory_are_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert ModelWeights(model).names["0.weight"] == ["0.weight", "1.weight"]


def test_capture_knows_weights_constants_and_structure() -> None:
    _, found = captured(Owner().eval(), torch.randn(3, 4))
    assert set(found.weights.values()) >= {"first.weight", "norm.running_mean", "kept", "dropped"}
    assert set(found.constants) == {"attribute", "lifted_tensor_0"}
    assert len(found.inputs) == 1  # scale and flag are their defaults
    assert found.signature.names == ("x",)
    assert found.method == "export"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_capture_leaves_the_model_unchanged(device: str) -> None:
    model = Owner().to(device)
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    captured(model, torch.randn(3, 4, device=device))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.training
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert device == "meta" or torch.equal(tensor, before[name][1])


def test_a_literal_of_a_meta_model_keeps_its_values() -> None:
    _, found = captured(Owner().to("meta").eval(), torch.randn(3, 4, device="meta"))
    assert found.constants["lifted_tensor_0"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_large_meta_model_takes_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(32768, 32768) for _ in range(8)))  # 34 GB
    _, found = captured(model, torch.zeros(1, 32768, device="meta"))
    assert len(found.weights) == 16


def test_positional_and_named_arguments_are_one_call() -> None:
    model_copy = ModelCopy(Owner())
    x = torch.randn(3, 4)
    assert model_copy.bind((x,), {}).spec == model_copy.bind((), {"x": x, "scale": 3}).spec
    assert model_copy.bind((x, 4), {}).spec != model_copy.bind((x,), {}).spec


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1, 2, 3, 4), {}, "too many positional arguments"),
        ((torch.ones(1),), {"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
        ((torch.ones(1),), {"scal": 1}, "unexpected keyword argument 'scal'; did you mean 'scale'[?]"),
        ((), {"nonsense": 1}, "missing a required argument: 'x'; it takes no 'nonsense'"),
    ],
)
def test_arguments_that_do_not_fit_the_signature(
    args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(graphplan.InputError, match=f"do not fit forward.*: .*{said}$"):
        ModelCopy(Owner()).bind(args, kwargs)


def test_model_errors_differ_from_capture_errors() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        captured(Owner().eval(), torch.randn(3, 7))


class Undecided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_failed_capture_names_the_reason() -> None:
    with pytest.raises(graphplan.CaptureError, match=r"Undecided could not be traced:\s+torch\.export: "):
        captured(Undecided(), torch.randn(3))


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: Any = None


class Paired(nn.Module):
    def forward(self, pair: Pair) -> Pair:
        return Pair(pair.left + 1, {"note": "kept", "value": pair.right})


def test_dataclasses_pass_through() -> None:
    model_copy, found = captured(Paired(), Pair(torch.ones(2), torch.ones(3)))
    assert len(found.inputs) == 2
    assert model_copy.bind((Pair(torch.ones(2), torch.ones(3)),), {}).spec == found.signature.spec


class Named(NamedTuple):
    left: torch.Tensor
    count: int


@dataclasses.dataclass
class Cached:
    """As a hand-written decoder cache: numbers between tensors, and one that is not a field."""

    keys: list[torch.Tensor]
    count: int
    left: torch.Tensor

    def __post_init__(self) -> None:
        self.last = self.count + 1


class Sized(nn.Module):
    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        more = sum(key.sum() for key in getattr(given, "keys", ())) * getattr(given, "last", 1)
        return x + given.left.sum() * given.count + more


@pytest.mark.parametrize("kind", [Named, Cached])
def test_sizes_vary_in_tensors_of_named_tuples_and_dataclasses(kind: Any) -> None:
    def given(size: int) -> Any:
        keys = {"keys": [torch.ones(size, 2)]} if kind is Cached else {}
        return kind(**keys, count=size, left=torch.ones(size, 2))

    model_copy, found = captured(Sized(), torch.ones(3, 4), given(3))
    assert found.signature.mismatch(model_copy.bind((torch.ones(5, 4), given(5)), {})) is None


@dataclasses.dataclass(frozen=True)
class Scaled:
    x: torch.Tensor
    factor: dataclasses.InitVar[float] = 1.0

    def __post_init__(self, factor: float) -> None:
        object.__setattr__(self, "scaled", self.x * factor)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    scaled: torch.Tensor = dataclasses.field(init=False)
    note: str | None = None


class ReadsScaled(nn.Module):
    def forward(self, given: Any) -> Any:
        return given.scaled + given.x


def test_dataclass_keeps_attributes_outside_constructor() -> None:
    scaled, slotted = Scaled(torch.ones(2), 3.0), Slotted(torch.ones(2))
    object.__setattr__(scaled, "note", None)
    slotted.scaled = torch.full((2,), 5.0)
    placed = graphplan.partition(ReadsScaled(), {"cpu": "1MiB"}, (scaled,))
    assert torch.equal(placed(scaled), torch.full((2,), 4.0))
    assert torch.equal(placed(slotted), torch.full((2,), 6.0))
    assert placed.plan.method == "export"


@dataclasses.dataclass
class Ordered(OrderedDict[str, torch.Tensor]):
    """As results of models that nobody has registered."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self["x"] = self.x


@dataclasses.dataclass
class Tree:
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.root, self.log = self, logging.getLogger("a test")


@pytest.mark.parametrize("kind", [Ordered, Tree])
def test_dataclasses_with_more_than_data_are_looked_into(kind: type[Any]) -> None:
    class Adds(nn.Module):
        def forward(self, given: Any) -> Any:
            return kind(given.x + 1)

    placed = graphplan.partition(Adds(), {"cpu": "1MiB"}, (kind(torch.ones(2)),), strict=True)
    found = placed(kind(torch.ones(2)))
    assert type(found) is kind
    assert torch.equal(found.x, torch.full((2,), 2.0))


def test_mismatch_names_the_reason() -> None:
    model_copy, found = captured(Owner().eval(), torch.randn(3, 4))
    signature = found.signature

    def reason(*args: Any) -> str | None:
        return signature.mismatch(model_copy.bind(args, {}))

    assert reason(torch.randn(3, 4)) is None
    assert reason(torch.randn(2, 4)) is None
    assert str(reason(torch.randn(3, 5))).endswith("x has size 5 along dimension 1, not 4")
    assert reason(torch.randn(3, 4, dtype=torch.float64)) == "x has torch.float64, not torch.float32"
    assert reason(torch.randn(3)) == "x has 1 dimensions, not 2"
    assert reason(torch.randn(3, 4), 9) == "other arguments: with scale"


def test_dynamic_sizes_fit_within_their_range() -> None:
    model_copy = ModelCopy(nn.Linear(4, 4))
    call = model_copy.bind((torch.randn(3, 4),), {})
    batch = torch.export.Dim("batch", min=2, max=16)
    found = capture(model_copy, call, {"input": {0: batch}})
    assert found.signature.mismatch(model_copy.bind((torch.randn(16, 4),), {})) is None
    assert "outside (2, 16)" in str(found.signature.mismatch(model_copy.bind((torch.randn(17, 4),), {})))


class Nested(nn.Module):
    def forward(self, first: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return first.sum() + more["all"][0].sum() + more["all"][1].sum()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((17, 4, 4), "first has size 17 along dimension 0, outside of 2 to 16, .* as 'batch'"),
        ((1, 4, 4), "first has size 1 along dimension 0, outside of 2 to 16"),
        ((2, 4, 9), r"more\['all'\]\[1\] has size 9 along dimension 1, outside of 3 to 8"),
    ],
)
def test_sizes_outside_declared_ranges_raise(sizes: tuple[int, int, int], said: str) -> None:
    batch, length = torch.export.Dim("batch", min=2, max=16), torch.export.Dim("length", min=3, max=8)
    shapes = {"first": {0: batch}, "more": {"all": [None, {1: length}]}}

    def inputs(first: int, second: int, third: int) -> tuple[Any, ...]:
        return torch.ones(first, 3), {"all": [torch.ones(second), torch.ones(2, third)]}

    def place(example: tuple[Any, ...]) -> Any:
        return graphplan.partition(Nested(), {"cpu": "1MiB"}, example, dynamic_shapes=shapes)

    with pytest.raises(graphplan.InputError, match=said):
        place(inputs(*sizes))
    placed = place(inputs(4, 4, 4))
    with pytest.raises(graphplan.InputError, match=said):
        placed(*inputs(*sizes))
    assert placed(*inputs(16, 4, 8)) == 16 * 3 + 4 + 16
    assert len(placed.plans) == 1


def test_ranges_of_derived_and_automatic_sizes() -> None:
    dim = torch.export.Dim("batch", min=2, max=4)
    for shapes in ({0: 2 * dim}, {0: torch.export.Dim.AUTO}, (torch.export.Dim.AUTO, None), {1: 4}):
        placed = graphplan.partition(
            nn.Linear(4, 4), {"cpu": "1MiB"}, (torch.ones(6, 4),), dynamic_shapes=(shapes,)
        )
        assert placed(torch.ones(6, 4)).shape == (6, 4)


def test_dynamic_shapes_that_name_nothing() -> None:
    model_copy = ModelCopy(nn.Linear(4, 4))
    with pytest.raises(graphplan.InputError, match="nonsense"):
        capture(
            model_copy, model_copy.bind((torch.randn(3, 4),), {}), {"nonsense": {0: torch.export.Dim.AUTO}}
        )


def test_positional_dynamic_shapes_include_default_arguments() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, scale: float = 1.0, y: torch.Tensor | None = None) -> torch.Tensor:
            found = super().forward(x) * scale
            return found if y is None else found + y

    batch, x = torch.export.Dim("batch", min=2, max=64), torch.ones(4, 4)
    shapes = ({0: batch}, None, {0: batch})
    for scale in (1.0, 2.0):
        placed: Any = graphplan.partition(
            Scaled(4, 4), {"cpu": "1MiB"}, (x, scale, x), dynamic_shapes=shapes, strict=True
        )
        assert placed(torch.ones(8, 4), scale, torch.ones(8, 4)).shape == (8, 4)
        assert len(placed.plans) == 1
    with pytest.raises(graphplan.InputError, match="has 4 entries, but forward takes x, scale, y: give one"):
        graphplan.plan(Scaled(4, 4), {"cpu": "1MiB"}, (x,), dynamic_shapes=(*shapes, None))


def test_weights_and_inputs_may_be_named_as_operations() -> None:
    # "operation 'mean' makes 'mean', which exists already"
    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.full((4,), 0.5))
            self.register_buffer("x", torch.ones(4))
            self.linear = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.linear(x - self.mean, self.linear)
            return y.mean(0) + y.mean(1).sum() + self.x

    model, x = Normal(), torch.randn(2, 4)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,))
        assert torch.allclose(placed(x), model(x))
        assert set(placed.plan.placement) == {"mean", "x", "linear"}


@pytest.mark.slow
def test_generated_causal_mask_is_not_branched_on() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            found: torch.Tensor = self.inner(source, target, tgt_mask=mask)
            return found

    model, example = Translator().eval(), (torch.randn(2, 3, 8), torch.randn(2, 4, 8))
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, example, strict=True)
        for args in (example, (torch.randn(3, 5, 8), torch.randn(3, 6, 8))):
            assert torch.allclose(placed(*args), model(*args), atol=1e-5)


def test_inputs_of_another_dtype_are_cast_by_model() -> None:
    """The exporter would cast them before the trace; transformers models cast images themselves."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**sizes, image_size=32, patch_size=8)
    model = transformers.CLIPVisionModel(config).eval().to(torch.bfloat16)
    images = torch.randn(2, 3, 32, 32)
    placed: Any = graphplan.partition(model, {"cpu": "1GiB"}, kwargs={"pixel_values": images}, strict=True)
    with torch.no_grad():
        for _ in range(2):
            assert largest_difference(placed(pixel_values=images)[0], model(pixel_values=images)[0]) == 0
    assert placed.plan.method == "transformers"
    assert len(placed.plans) == 1


class Moves(nn.Module):
    """Moves its layer to its input before it runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.to(x.device).to(device=x.device, dtype=x.dtype)(x)  # type: ignore[no-any-return]


def test_move_to_same_device_is_traced() -> None:
    model, x = Moves(), torch.randn(2, 8)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), strict=True)
        assert torch.equal(placed(x), model(x))
    with pytest.raises(graphplan.CaptureError, match="could not be traced"):  # it would be converted
        graphplan.partition(model, {"cpu": "1MiB"}, (x.double(),), strict=True)
    assert model.layer.weight.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_no_capture_inside_a_trace_of_torch_jit() -> None:
    model, x, other = nn.Linear(4, 4).eval(), torch.randn(2, 4), torch.randn(2, 3, 4)
    placed: Any = graphplan.partition(model, {"cpu": "1MiB"}, (x,))
    with pytest.raises(graphplan.CaptureError, match=r"inside torch\.jit\.trace: call"):
        torch.jit.trace(placed, (other,))
    assert torch.equal(placed(other), model(other))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_jit_trace_has_streamed_weights() -> None:
    """Regression: copies into the prefetch buffer were not recorded, and a traced module read old weights."""
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(4, 64)
    with graphplan.simulate({0: "1MiB"}), torch.no_grad():
        placed: Any = graphplan.partition(model, {0: "48KiB", "cpu": "1MiB"}, (x,), cpu_compute=False)
        traced = torch.jit.trace(placed, (x,))
        for inputs in (x, x + 1):
            assert torch.allclose(traced(inputs), model(inputs), atol=1e-5)


@torch.no_grad()
def test_graph_of_repeated_tensor_serves_distinct_tensors() -> None:
    # nn.MultiheadAttention asks whether its query is its key: the key was never read
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return self.attention(query, key, key)[0]

    model, x, y = Attends().eval(), torch.randn(2, 4, 16), torch.randn(2, 6, 16)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x, x))
    for query, key in ((x, x), (x, x + 1), (x, y), (y, y)):
        assert torch.allclose(placed(query, key), model(query, key), atol=1e-5)
    assert len(placed.plans) <= 2


def test_modules_in_list_slices_keep_their_paths() -> None:
    """Torch names a module that occurs twice by its slice: ``layers.slice(1, None, None).0``."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.last = self.layers[2]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[1:]:
                x = layer(x)
            return self.last(x).relu()

    _, found = captured(Sliced(), torch.ones(2, 4))
    paths = [module_path(node) for node in found.graph.nodes if node.op == "call_function"]
    assert paths == ["layers.1", "layers.2", "layers.2", ""]


@pytest.mark.filterwarnings("ignore:where received a uint8")
def test_bytes_that_choose_between_values_are_flags() -> None:
    class Chooses(nn.Module):
        def forward(self, mask: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
            method = x.where(condition=mask, other=-x)
            return [torch.where(mask, x, -x), method, torch.where(mask > 1, x, 0.0), *torch.where(mask)]

    mask, x = torch.tensor([0, 1, 2, 0], dtype=torch.uint8), torch.randn(4)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(Chooses(), machine.max_memory, (mask, x), strict=True)
        for given in (mask, 1 - mask):
            found, expected = placed(given, x), Chooses()(given, x)
            assert all(map(torch.equal, found, expected))


def test_settled_numbers_leave_users_in_order() -> None:
    """A plan has results in the order of their users, which must be equal in every process."""
    graph = fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    number.meta["val"] = 3
    sums = [graph.call_function(torch.add, (x, number)) for _ in range(50)]
    _write_numbers(graph)
    assert list(x.users) == sums
    assert all(node.args == (x, 3) for node in sums)


def test_constants_that_the_exporter_refuses_are_traced() -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor, dtype: torch.dtype, others: dict[str, Any]) -> dict[str, Any]:
            cast = x.to(dtype) * others["z"].real * len(others["b"])
            return {"x": cast, "dtype": cast.dtype, **others}

    model, x = Cast(), torch.randn(3, 4)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x, torch.float64, {"z": 2 + 1j, "b": b"abc"}))
    of_dtypes = [(torch.float64, 3, 2 + 1j), (torch.float16, 3, 2 + 1j), (torch.float64, 2, 2 + 1j)]
    of_numbers = [(torch.float64, 3, complex(text)) for text in ("0j", "-0-0j", "nan", "nan")]
    for dtype, rows, z in of_dtypes + of_numbers:
        given = x[:rows], dtype, {"z": z, "b": b"abc"}
        ours, eager = placed(*given), model(*given)
        assert torch.equal(ours.pop("x").nan_to_num(9), eager.pop("x").nan_to_num(9))
        assert repr(ours) == repr(eager)
    assert len(placed.plans) == 5  # one for each dtype and number


def test_an_enum_of_the_first_call_is_traced() -> None:
    class Read(enum.Enum):
        TWICE = 2

    class Times(nn.Module):
        def forward(self, x: torch.Tensor, times: Read | None = None) -> torch.Tensor:
            return x * (1 if times is None else times.value)

    x = torch.randn(3, 4)
    placed = graphplan.partition(Times(), {"cpu": "1GiB"}, (x, Read.TWICE), strict=True)
    assert torch.equal(placed(x[:2], Read.TWICE), x[:2] * 2)
    assert len(placed.plans) == 1


def test_constants_beside_declared_sizes_are_traced() -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor, dtype: torch.dtype, others: list[Any]) -> torch.Tensor:
            return x.to(dtype) * len(others)

    x, others = torch.randn(3, 4), [torch.float16, range(3)]
    shapes = {"x": {0: torch.export.Dim("rows", min=2)}, "dtype": None, "others": [None, None]}
    given = x, torch.float64, others
    placed = graphplan.partition(Cast(), {"cpu": "1GiB"}, given, dynamic_shapes=shapes, strict=True)
    for rows in (3, 2):
        assert torch.equal(placed(x[:rows], torch.float64, others), x[:rows].double() * 2)


def test_operations_with_complex_numbers_are_traced() -> None:
    class Rotated(nn.Module):
        def forward(self, x: torch.Tensor, z: complex) -> list[torch.Tensor]:
            return [torch.exp(x * 1j), x + z, 1j - x, x / z]

    model, x = Rotated(), torch.randn(3, 4)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x, 2j), strict=True)
    for rows in (3, 2):
        for ours, eager in zip(placed(x[:rows], 2j), model(x[:rows], 2j), strict=True):
            assert ours.dtype == eager.dtype
            assert torch.allclose(ours, eager)


class Mode(enum.Enum):
    TEXT = "text"
    IMAGE = "image"


@pytest.mark.parametrize("train", [False, True])
def test_members_of_enums_are_traced(train: bool) -> None:
    class Labelled(nn.Linear):
        def forward(self, x: torch.Tensor, mode: Mode = Mode.TEXT) -> dict[str, Any]:
            return {"mode": [mode, Mode.IMAGE], "y": super().forward(x) * len(mode.value)}

    model, x = Labelled(4, 4), torch.randn(3, 4)
    placed = graphplan.partition(model, {"cpu": "1GiB"}, (x,), strict=True, train=train)
    for mode in Mode:
        for rows in (3, 2):
            assert largest_difference(placed(x[:rows], mode), model(x[:rows], mode)) == 0
