"""Methods and submodules of a placed model can be called separately, over the placed weights."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from torch import nn

import graphplan
from graphplan import GraphplanWarning


def stack(count: int = 3, width: int = 32) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count)))


class Autoencoder(nn.Module):
    """As in diffusers: encoder and decoder have their own convolutions, and so has the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.quant = stack(), stack(), nn.Linear(32, 32)
        self.shift = nn.Parameter(torch.randn(32))
        self.tiled, self.kept = False, list[Any]()

    def encode(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"latent": self.quant(self.encoder(x)) + self.shift}

    def decode(self, z: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = self.decoder(z - self.shift) * scale
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x)["latent"])

    def use_tiling(self) -> str:
        self.tiled = True
        return "tiled"

    def keep(self, x: torch.Tensor) -> None:
        self.kept.append(x)

    def repeat(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self(x)
        return x

    def until_small(self, x: torch.Tensor) -> torch.Tensor:
        x = self.quant(x) + self.shift
        while float(x.abs().max()) > 0.5:
            x = x / 2
        return self.decoder(x)


class Pair(nn.Module):
    """A model whose part has methods."""

    def __init__(self) -> None:
        super().__init__()
        self.vae, self.head = Autoencoder(), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.vae(x))


class Features(nn.Module):
    """As in timm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = stack(4), nn.BatchNorm1d(32), nn.Linear(32, 10)
        self.register_buffer("offset", torch.randn(32))

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x + self.offset))

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


X = torch.randn(4, 32)


def over_two_devices(model: nn.Module) -> dict[Any, Any]:
    room = int(0.6 * bytes_of(model)) + 8192
    return {0: room, 1: room}


@contextmanager
def placed(model: nn.Module, *, called: bool = True, **options: Any) -> Iterator[tuple[Any, Any]]:
    """(machine, the model over two devices of which none holds it)."""
    with graphplan.simulate(over_two_devices(model)) as machine:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*first call")
            made: Any = graphplan.partition(model, machine.max_memory, (X,) if called else (), **options)
        machine.reset_peaks()
        yield machine, made
        for key in (0, 1):
            assert machine.peak_bytes(key) <= machine.max_memory[key]
        del made
        gc.collect()


def eager(model: nn.Module, call: Callable[[Any], Any]) -> Any:
    with torch.no_grad():
        return call(copy.deepcopy(model))


ENTRIES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "a method": (Autoencoder, lambda m: m.encode(X)),
    "a method with an option": (Autoencoder, lambda m: m.decode(X, scale=2.0)),
    "a submodule": (Autoencoder, lambda m: m.decoder(X)),
    "one of a Sequential": (lambda: stack(8), lambda m: m[1](X)),
    "a deep submodule": (Autoencoder, lambda m: m.encoder[0][0](X)),
    "a method of a submodule": (Pair, lambda m: m.vae.decode(X)),
    "features": (Features, lambda m: m.forward_features(X)),
    "features and head": (Features, lambda m: m.forward_head(m.forward_features(X))),
    "no head": (Features, lambda m: m.forward_head(X, pre_logits=True)),
    "by its path": (Pair, lambda m: m.get_submodule("vae").encode(X)),
    "layers one by one": (lambda: stack(8), lambda m: [layer(X) for layer in m]),
    "around the model": (Autoencoder, lambda m: m.repeat(X, 3)),
}


FIRST = ("a method", "a submodule")


@pytest.mark.parametrize(
    ("name", "called"),
    [
        pytest.param(name, called, marks=[pytest.mark.slow] * (not called and name not in FIRST))
        for name in ENTRIES
        for called in (True, False)
    ],
)
def test_entries_equal_eager(name: str, called: bool) -> None:
    make, call = ENTRIES[name]
    model = make().eval()
    with placed(model, called=called) as (_, made), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert largest_difference(call(made), eager(model, call)) < 1e-5
        assert largest_difference(made(X), eager(model, lambda m: m(X))) < 1e-5
        assert {p.device.index for p in made.parameters()} == {0, 1}
        assert isinstance(made, type(model))
        assert call(made)[0].device == X.device if name == "layers one by one" else True


def test_each_entry_has_one_graph_over_shared_weights() -> None:
    with placed(Autoencoder().eval()) as (machine, made):
        gc.collect()
        live = {key: machine.live_bytes(key) for key in (0, 1)}
        for _ in range(3):
            made.encode(X)
            made.decoder(X)
        gc.collect()
        assert len(made.plans) == 3
        assert {key: machine.live_bytes(key) for key in (0, 1)} == live


def test_submodule_forward_equals_its_call() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stack(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(x) + 1

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Wrapped()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part.forward(x) * 2

    model, x = Whole().eval(), torch.randn(2, 32)
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (x,))
        for call in (placed.part.forward, placed.part):
            assert largest_difference(call(x), model.part(x)) < 1e-6
        assert len(placed.plans) == 2
        plain = copy.deepcopy(placed.part)
        assert largest_difference(plain.cpu().forward(x), model.part(x)) < 1e-6
        assert largest_difference(placed(x), model(x)) < 1e-6


def test_method_without_tensor_operations_runs_untraced() -> None:
    with placed(Autoencoder().eval()) as (_, made), warnings.catch_warnings():
        warnings.simplefilter("error")
        made.keep(X)
        made.keep(X)
        assert [one is X for one in made.kept] == [True, True]
        assert made.use_tiling() == "tiled"
        assert made.tiled
        assert len(made.plans) == 1


def test_transformers_method_that_changes_the_model_runs_untraced() -> None:
    # it was a graph, which did not
    from transformers import PretrainedConfig, PreTrainedModel

    class Counting(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.net, self.count = stack(), 0

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def encode(self, x: torch.Tensor) -> Any:
            self.count += 1
            return self.net(x) * 2

    model = Counting().eval()
    with placed(model) as (_, made):
        with pytest.warns(GraphplanWarning, match="traced again"):
            found = [made.encode(X) for _ in range(2)]
        assert made.count == 2
        assert largest_difference(found[1], 2 * model.net(X)) < 1e-5


def test_untraceable_method_runs_module_by_module() -> None:
    model = Autoencoder().eval()
    with placed(model) as (_, made):
        expected = eager(model, lambda m: m.until_small(X))
        with pytest.warns(GraphplanWarning, match="module by module"):
            assert largest_difference(made.until_small(X), expected) < 1e-5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert largest_difference(made.until_small(X), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_untraceable_method_can_be_called_first_after_a_change(cpu: bool) -> None:
    model = Autoencoder().eval()
    room = over_two_devices(model)
    with graphplan.simulate({**room, "cpu": "1MiB"} if cpu else room) as machine:
        made: Any = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        for one in (model, made):
            one.register_buffer("unused", torch.ones(3))
            one.quant = nn.Sequential(one.quant, nn.Linear(32, 32))
        made.quant[1].load_state_dict(model.quant[1].state_dict())
        again = pytest.warns(GraphplanWarning, match="traced again")
        with again, pytest.warns(GraphplanWarning, match="module by module"):
            found = made.until_small(X)
        assert largest_difference(found, eager(model, lambda m: m.until_small(X))) < 1e-5
        assert largest_difference(made(X), eager(model, lambda m: m(X))) < 1e-5
        where = {tensor.device.type for tensor in (made.unused, *made.quant[1].parameters())}
        assert where == {"cpu" if cpu else "sim"}
        assert all(machine.peak_bytes(key) <= room[key] for key in (0, 1))


class Gaussian:
    """As in diffusers: a result that no graph has."""

    def __init__(self, moments: torch.Tensor) -> None:
        self.mean, self.logvar = moments.chunk(2, dim=1)


class Sampling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = stack(), nn.Linear(16, 32)

    def encode(self, x: torch.Tensor) -> Gaussian:
        return Gaussian(self.encoder(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x)[:, :16])


@pytest.mark.parametrize("called", [True, False], ids=["with", "without examples"])
def test_method_over_untraceable_submodules_runs_its_own_code(called: bool) -> None:
    model = Sampling().eval()
    with placed(model, called=called) as (_, made):
        with pytest.warns(GraphplanWarning, match=r"Sampling.encode could not be traced(?s:.*)own code"):
            made.encode(X)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = eager(model, lambda m: m.encode(X).mean)
            assert largest_difference(made.encode(X).mean, expected) < 1e-5
        assert len(made.plans) == 1 + called
    with placed(model, called=called, strict=True) as (_, made), pytest.raises(graphplan.NoGraphError):
        made.encode(X)


def test_strict_untraceable_method_raises() -> None:
    with placed(Autoencoder().eval(), strict=True) as (_, made):
        with pytest.raises(graphplan.NoGraphError):
            made.until_small(X)
        assert largest_difference(made.repeat(X, 2), made(made(X))) < 1e-6


def test_method_raises_the_errors_of_the_model() -> None:
    with placed(Features().eval()) as (_, made), pytest.raises(RuntimeError, match="size of tensor"):
        made.forward_features(torch.randn(4, 31))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_have_their_own_entries(copied: Callable[[Any], Any]) -> None:
    model = Pair().eval()
    with placed(model) as (machine, made), machine.unmetered():
        made.vae.decode(X)
        other = copied(made)
        assert largest_difference(other.vae.decode(X), eager(model, lambda m: m.vae.decode(X))) < 1e-5
        assert largest_difference(other.head(X), eager(model, lambda m: m.head(X))) < 1e-5
        with torch.no_grad():
            other.head.weight.zero_()
        assert largest_difference(made.head(X), eager(model, lambda m: m.head(X))) < 1e-5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_submodule_is_a_plain_module(copied: Callable[[Any], Any]) -> None:
    model = Pair().eval()
    with placed(model) as (machine, made), machine.unmetered():
        part = copied(made.vae).cpu()
        assert type(part) is Autoencoder
        del made
        gc.collect()
        assert largest_difference(part.decode(X), eager(model, lambda m: m.vae.decode(X))) < 1e-5
        assert type(graphplan.unplace(copied(_placed_again(model, machine))).vae) is Autoencoder


def _placed_again(model: nn.Module, machine: Any) -> nn.Module:
    return graphplan.partition(model, machine.max_memory, (X,))


def test_submodule_of_a_deleted_model_raises() -> None:
    with graphplan.simulate({0: "1MiB"}):
        part = graphplan.partition(Pair().eval(), {"cpu": "1MiB"}, (X,)).head
        with pytest.raises(graphplan.PlanError, match="keep the model"):
            part(X)


def test_submodules_keep_names_weights_and_classes() -> None:
    model = Pair().eval()
    with placed(model) as (_, made):
        assert list(made.state_dict()) == list(model.state_dict())
        assert [type(part).__name__ for part in made.modules()][1:] == [
            type(part).__name__ for part in model.modules()
        ][1:]
        assert type(made.head) is nn.Linear
        assert isinstance(made.vae, Autoencoder)
        assert made.vae is made.get_submodule("vae")
        assert made.head.weight is dict(made.named_parameters())["head.weight"]


def test_submodule_hooks_run_in_its_calls() -> None:
    model, seen = Pair().eval(), list[int]()
    with placed(model) as (_, made):
        made.vae.register_forward_hook(lambda *_: seen.append(1))
        with pytest.warns(GraphplanWarning, match="hooks were added"):
            result = made.vae(X)
        assert largest_difference(result, eager(model, lambda m: m.vae(X))) < 1e-5
        assert seen == [1]


def test_changes_of_a_submodule_are_followed() -> None:
    model = Pair().eval()
    with placed(model) as (_, made):
        made.vae.decode(X)
        part = made.vae
        model.vae.decoder[0][1] = nn.ReLU()
        made.vae.decoder[0][1] = nn.ReLU()
        with pytest.warns(GraphplanWarning, match="traced again"):
            assert largest_difference(made.vae.decode(X), eager(model, lambda m: m.vae.decode(X))) < 1e-5
        assert largest_difference(made.head(X), eager(model, lambda m: m.head(X))) < 1e-5
        assert part is made.vae


def test_submodule_referenced_before_first_call_is_placed() -> None:
    model = Pair().eval()
    with placed(model, called=False) as (_, made):
        part = made.vae
        for _ in range(2):
            assert largest_difference(part.decode(X), eager(model, lambda m: m.vae.decode(X))) < 1e-5
        assert part is made.vae
        assert len(made.plans) == 1


@pytest.mark.slow
def test_calls_may_name_methods() -> None:
    model = Pair().eval()
    calls = [("vae.encode", (X,), {}), ("vae.decode", (X,), {}), ("head", (X,), {}), ((X,), {})]
    with placed(model) as (machine, made), machine.unmetered():
        assert len(graphplan.plan(model, machine.max_memory, calls=calls).others) == 3
    with graphplan.simulate(over_two_devices(model)) as machine:
        made = graphplan.partition(model, machine.max_memory, calls=calls, check=True)
        assert len(made.plans) == 4
        made.vae.encode(X), made.vae.decode(X), made.head(X), made(X)
        assert len(made.plans) == 4
    with pytest.raises(graphplan.InputError, match=r"no submodule and no method 'vae\.code'"):
        graphplan.plan(model, {"cpu": "1GiB"}, calls=[("vae.code", (X,), {})])


def test_dynamic_shapes_of_forward_do_not_apply_to_methods() -> None:
    model = Features().eval()
    batch = torch.export.Dim("batch", min=1, max=8)
    with placed(model, dynamic_shapes={"x": {0: batch}}) as (_, made):
        assert largest_difference(made.head(X), eager(model, lambda m: m.head(X))) < 1e-5


@pytest.mark.slow
def test_clip() -> None:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**small, "vocab_size": 99, "max_position_embeddings": 16}
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config={**small, "image_size": 32, "patch_size": 16})
    ).eval()
    ids, image = torch.arange(1, 13).reshape(2, 6), torch.randn(2, 3, 32, 32)
    entries: list[Callable[[Any], Any]] = [
        lambda m: m.get_text_features(input_ids=ids).pooler_output,
        lambda m: m.vision_model(pixel_values=image).pooler_output,
        lambda m: m.visual_projection(torch.ones(2, 32)),
    ]
    inputs = {"input_ids": ids, "pixel_values": image}
    with graphplan.simulate(over_two_devices(model)) as machine:
        made = graphplan.partition(model, machine.max_memory, kwargs=inputs)
        machine.reset_peaks()
        for entry in entries:
            assert largest_difference(entry(made), eager(model, entry)) < 1e-5
        assert len(made.plans) == 1 + len(entries)
        assert all(machine.peak_bytes(key) <= machine.max_memory[key] for key in (0, 1))


class Handing(nn.Module):
    """As a model of PEFT: what it lacks is its part's."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Autoencoder()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "part":
                raise
            return getattr(self.part, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part.decoder(x) + 1


def test_model_with_delegating_getattr_is_copied_whole() -> None:
    model = Handing().eval()
    with graphplan.simulate({0: "1MiB"}) as machine:
        made = graphplan.partition(model, machine.max_memory, (X,))
        again = copy.deepcopy(made)
        assert isinstance(again, Handing)
        assert torch.allclose(again(X), eager(model, lambda m: m(X)), atol=1e-6)
        made.part.decoder[0][1] = nn.ReLU()
        with pytest.warns(GraphplanWarning, match="traced again"):
            found = made(X)
        model.part.decoder[0][1] = nn.ReLU()
        assert torch.allclose(found, eager(model, lambda m: m(X)), atol=1e-6)


def test_method_replaced_on_the_class_is_retraced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Autoencoder(), torch.ones(2, 32)
    placed = graphplan.partition(model, {"cpu": "1MiB"}, (x,))
    assert largest_difference(placed.encode(x), model.encode(x)) < 1e-6
    monkeypatch.setattr(Autoencoder, "encode", lambda self, x, by: self.quant(x * by))
    with pytest.warns(GraphplanWarning, match="traced again"), torch.no_grad():
        assert largest_difference(placed.encode(x, x * 2), model.encode(x, x * 2)) < 1e-6


class Wrapper(nn.Module):
    """Generates by calls of what it is around, as the wrappers of many libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = stack()
        self.register_buffer("bias", torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x) + self.bias
        return found

    @torch.inference_mode()
    def step(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x) * torch.full((32,), 2.0).unsqueeze(0)
        return found

    def generate(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = torch.cat([x, self.net(x)[-1:]])
        return x

    @torch.inference_mode()
    def sample(self, count: int) -> torch.Tensor:
        return self.denoise(torch.ones(2, 32), count)

    def denoise(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for index in range(count):
            x = self.net(x) * self.bias[index] + self.bias
            self.bias.mul_(x[0].abs().clamp(max=1))
        return x


@torch.no_grad()
def test_loop_of_a_wrapper_runs_untraced() -> None:
    model, x = Wrapper().eval(), torch.randn(4, 32)
    with graphplan.simulate({0: "20KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), strict=True)
        assert torch.allclose(placed.generate(x, 3), model.generate(x, 3), atol=1e-5)
        for plan in placed.plans:  # none has several steps
            assert sum(one.target == "linear" for one in plan.graph.operations.values()) <= 3


class Translator(nn.Module):
    """Its loop calls the submodule with most parameters; another one is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.writer = stack(2), stack(3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.writer(y + self.reader(x).mean(0))
        return found

    def write(self, x: torch.Tensor, count: int) -> torch.Tensor:
        read = self.reader(x).mean(0)
        y = torch.zeros(1, 32)
        for _ in range(count):
            y = torch.cat([y, self.writer(y + read)[-1:]])
        return y * self.writer[0][0].bias


@torch.no_grad()
@pytest.mark.parametrize(("count", "steps"), [(2, 2), (8, 1)])
def test_loop_over_most_of_a_model_runs_untraced(count: int, steps: int) -> None:
    model, x = Translator().eval(), torch.randn(4, 32)
    with graphplan.simulate({0: "30KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x, x), strict=True)
        assert torch.allclose(placed.write(x, count), model.write(x, count), atol=1e-5)
        linear = [sum(one.target == "linear" for one in p.graph.operations.values()) for p in placed.plans]
        assert max(linear) == 2 + 3 * steps


def test_untraced_method_has_module_tensors_on_its_device() -> None:
    model, x = Wrapper().eval(), torch.randn(4, 32)
    with graphplan.simulate({0: "20KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), strict=True)
        assert placed.bias.device.type == "sim"
        for _ in range(2):
            found = placed.sample(3)
            assert found.device.type == "cpu"
            assert torch.allclose(found, model.sample(3), atol=1e-5)
            with torch.no_grad():
                assert torch.allclose(placed.denoise(x, 3), model.denoise(x, 3), atol=1e-5)
            assert torch.allclose(placed.bias.cpu(), model.bias)
        assert placed.bias.device.type == "sim"


def test_method_in_inference_mode_is_traced() -> None:
    model, x = Wrapper().eval(), torch.randn(4, 32)
    for options in ({}, {"grad": True}):
        with graphplan.simulate({0: "20KiB"}) as machine:
            placed = graphplan.partition(model, machine.max_memory, (x,), strict=True, **options)
            found = placed.step(x)
            assert torch.allclose(found.cpu(), model.step(x), atol=1e-5)
            assert not found.requires_grad


class Sampler(nn.Module):
    """Calls what it is around several times, and computes between with what it has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = stack()
        self.register_buffer("alpha", torch.rand(10) + 0.5)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x * self.alpha[t][:, None])
        return found

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        for t in range(3):
            x = x - self.alpha[t] * self.net(x)
        return x

    def views(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.net(x), self.net(-x)
        return (first @ second.T) * self.alpha[0]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"return_outputs": False}])
def test_inner_calls_are_traced_and_a_loop_is_not(options: Any) -> None:
    model, x = Sampler().eval(), torch.randn(4, 32)
    with graphplan.simulate({0: "64KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x, torch.arange(4)), strict=True, **options)
        assert torch.allclose(placed.views(x).cpu(), model.views(x), atol=1e-4)
        assert len(placed.plans) == 2
        assert torch.allclose(placed.sample(x).cpu(), model.sample(x), atol=1e-4)


def test_inference_mode_outside_modules_is_traced() -> None:
    names: dict[str, Any] = {"torch": torch}
    exec("def forward(self, x):\n    with torch.inference_mode():\n        return self.net(x)\n", names)
    model, x = type("Made", (Wrapper,), {"forward": names["forward"]})().eval(), torch.randn(4, 32)
    with graphplan.simulate({0: "20KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), strict=True)
        assert torch.allclose(placed(x).cpu(), model(x), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"grad": True}, {"train": True}])
def test_differentiated_loop_is_traced(options: Any) -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.scale = stack(), nn.Parameter(torch.rand(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.net(x) * self.scale
            return found

        def loop(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = self.net(x) * self.scale
            return x

    model, x = Repeated().eval(), torch.randn(2, 32)
    own = copy.deepcopy(model)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), **options)
        with torch.no_grad():
            assert torch.allclose(placed.loop(x), own.loop(x), atol=1e-4)  # as it is written, call by call
        placed.loop(x).sum().backward()
        own.loop(x).sum().backward()
        for mine, theirs in zip(placed.parameters(), own.parameters(), strict=True):
            assert torch.allclose(mine.grad.cpu(), theirs.grad, atol=1e-4)
