"""Custom caches, with attributes whose tensors a trace cannot find."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from builders import largest_difference
from plain_modules import StoreCache
from torch import nn

import graphplan

transformers = pytest.importorskip("transformers")
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticCache

# transformers 5.24 has another name for the argument
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

IDS = torch.arange(10).reshape(2, 5) + 3


class Slotted:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Any = None


class Open:
    """Has a ``__dict__``."""


class Veiled(Open):
    __slots__ = ("__last",)  # whose name in the object is another

    @property
    def last(self) -> Any:
        return self.__last

    @last.setter
    def last(self, value: Any) -> None:
        self.__last = value


class Watching(DynamicLayer):
    """Keeps the last keys somewhere else too."""

    make: Callable[[], Any] = deque

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = type(self).make()

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.seen, deque):
            self.seen.append(key_states)
        elif isinstance(self.seen, Slotted | Veiled):
            self.seen.last = key_states
        elif isinstance(self.seen, defaultdict):
            self.seen["keys"].append(key_states)
        return super().update(key_states, value_states, *args, **kwargs)


class WatchingCache(DynamicCache):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        kind = type("WatchingLayer", (Watching,), {"make": staticmethod(make)})
        self.layers, self.layer_class_to_replicate = [kind(), kind()], kind


def kept(cache: Any) -> list[Any]:
    """The tensors that were kept elsewhere."""
    found = []
    for layer in cache.layers:
        if isinstance(layer.seen, deque):
            found += list(layer.seen)
        elif isinstance(layer.seen, Slotted | Veiled):
            found.append(layer.seen.last)
        elif isinstance(layer.seen, defaultdict):
            found += layer.seen["keys"]
    return found


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).eval()


def agree(placed: Any, model: Any, ours: Any, theirs: Any, counts: Sequence[int] = (5, 1, 2, 1)) -> None:
    """Calls with a cache that grows give the same."""
    for count in counts:
        found = placed(input_ids=IDS[:, :count], past_key_values=ours).logits
        expected = model(input_ids=IDS[:, :count], past_key_values=theirs).logits
        assert largest_difference(found, expected) < 1e-5


@pytest.mark.slow
def test_opaque_cache_attributes_run_module_by_module() -> None:
    # they were constants of the trace: the caller's own had fake tensors afterwards
    model = llama()
    kinds: dict[str, Callable[[], Any]] = {
        "deque": deque,
        "Slotted": Slotted,
        "Veiled": Veiled,
        "defaultdict": lambda: defaultdict(list),
        "ndarray": lambda: np.zeros(2),
    }
    with graphplan.simulate({0: "400KiB", 1: "400KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS})
        for name, make in kinds.items():
            ours, theirs = WatchingCache(make), WatchingCache(make)
            with pytest.warns(graphplan.GraphplanWarning, match=f"'seen', a {name}"):
                agree(placed, model, ours, theirs, (5, 1))
            for one, other in zip(kept(ours), kept(theirs), strict=True):
                assert largest_difference([one.cpu()], [other]) < 1e-5


class History(deque[Any]):
    """Has a ``__dict__``, and more than that."""


class PlainCache:
    """Of the caller's: ``kind`` of its keys that a graph cannot look into."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        self.keys = kind()


@dataclasses.dataclass(slots=True)
class SlotsCache:
    keys: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Returning(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.make, self.linear = make, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
        cache = self.make() if cache is None else cache
        cache.keys.append(self.linear(x))
        return cache.keys[-1].sum(-1), cache


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("make", [partial(PlainCache, History), partial(PlainCache, deque), SlotsCache])
def test_returned_cache_equals_eager(make: Callable[[], Any], given: bool) -> None:
    model, x = Returning(make).eval(), torch.randn(2, 8)
    args = (x, make()) if given else (x,)
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="module by module"):
            placed = graphplan.partition(model, machine.max_memory, args)
        (found, ours), (expected, theirs) = (run(x, *map(copy.deepcopy, args[1:])) for run in (placed, model))
        assert largest_difference(found, expected) < 1e-5
        assert largest_difference([one.cpu() for one in ours.keys], list(theirs.keys)) < 1e-5


class KeyCache:
    """Keys and values in lists, as transformers' older caches had them."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer] = torch.cat([self.keys[layer], k], 2)
            self.values[layer] = torch.cat([self.values[layer], v], 2)
        return self.keys[layer], self.values[layer]


class PlainDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, cache: KeyCache) -> torch.Tensor:
        x = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            q, k, v = (part[:, None] for part in layer(x).chunk(3, -1))
            k, v = cache.update(k, v, index)
            new, all_ = q.shape[2], k.shape[2]
            seen = torch.ones(new, all_, dtype=torch.bool, device=q.device).tril(all_ - new)
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0]
        return self.head(x)


class Layout(Enum):
    ROWS = 1
    COLUMNS = 2


class LayoutCache:
    """Of the caller's, with a constant that is an object."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.layout = Layout.ROWS


class ReadsLayout(nn.Module):
    def forward(self, x: torch.Tensor, cache: LayoutCache) -> torch.Tensor:
        cache.keys.append(x)
        return x.sum(0 if cache.layout is Layout.ROWS else 1)


def test_an_enum_in_a_cache_is_a_constant() -> None:
    model, x = ReadsLayout(), torch.randn(3, 3)
    with graphplan.simulate({0: "1MiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x, LayoutCache()))
        for layout in (*Layout, *Layout):
            ours, theirs = LayoutCache(), LayoutCache()
            ours.layout = theirs.layout = layout
            assert largest_difference(placed(x, ours), model(x, theirs)) < 1e-5
            assert len(ours.keys) == 1


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [64, pytest.param(None, marks=pytest.mark.slow)])
def test_cache_of_a_plain_decoder_has_two_plans(max_length: int | None) -> None:
    model, ids = PlainDecoder().eval(), torch.randint(0, 50, (1, 5))
    with graphplan.simulate({0: "4MiB"}) as machine, torch.no_grad():
        budgets = {**machine.max_memory, "cpu": "4MiB"}
        placed = graphplan.partition(model, budgets, (ids, KeyCache()), max_length=max_length)
        ours, theirs = KeyCache(), KeyCache()
        for step in range(20):
            new = ids[:, : 1 + step % 3] if step else ids
            assert largest_difference(placed(new, ours), model(new, theirs)) < 1e-5
        assert len(placed.plans) == 2
        if max_length is not None:
            with pytest.raises(graphplan.LimitError, match="max_length=64"):
                placed(torch.randint(0, 50, (1, 70)), ours)


@pytest.mark.filterwarnings("error::graphplan.GraphplanWarning")
@pytest.mark.slow
def test_a_generator_holds_no_tensors() -> None:
    model = llama()
    ours, theirs = WatchingCache(torch.Generator), WatchingCache(torch.Generator)
    with graphplan.simulate({0: "400KiB", 1: "400KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS})
        agree(placed, model, ours, theirs)


def offloading(cache: Any) -> Any:
    """The cache as transformers makes one that is offloaded, which it can do only with CUDA."""
    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, True, object()
    return cache


@pytest.mark.slow
@pytest.mark.filterwarnings("error::graphplan.GraphplanWarning")
@pytest.mark.parametrize(
    "make",
    [DynamicCache, pytest.param(lambda: StaticCache(llama().config, 16), marks=pytest.mark.slow)],
)
def test_offloaded_cache_is_on_its_planned_device(make: Callable[[], Any]) -> None:
    # transformers asked for CUDA's stream of a layer on the CPU
    model = llama()
    with graphplan.simulate({0: "400KiB", 1: "400KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS})
        agree(placed, model, ours := offloading(make()), make())
        assert ours.offloading
        known = len(placed.plans)
        placed(input_ids=IDS, past_key_values=offloading(make()))
        assert len(placed.plans) == known  # another stream is not another structure


@pytest.mark.slow
def test_self_referencing_cache_runs_module_by_module() -> None:
    """Offloaded, too."""
    model = llama()
    with graphplan.simulate({0: "400KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, kwargs={"input_ids": IDS})
        for ours in (DynamicCache(), offloading(DynamicCache())):
            ours.owner = ours
            with pytest.warns(graphplan.GraphplanWarning, match="'owner', a DynamicCache"):
                agree(placed, model, ours, DynamicCache())


class Decoder(nn.Module):
    """Of no class of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        x = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            q, k, v = (part[:, None] for part in layer(x).chunk(3, -1))
            k, v = cache.update(k, v, index)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0]
        found: torch.Tensor = self.head(x)
        return found


@pytest.mark.filterwarnings("error::graphplan.GraphplanWarning")
@pytest.mark.parametrize("make", [StoreCache, pytest.param(DynamicCache, marks=pytest.mark.slow)])
def test_caches_of_plain_modules_are_extended_by_graphs(make: Callable[[], Any]) -> None:
    """Neither class is defined in the model's file."""
    model = Decoder().eval()
    steps = [torch.randint(0, 50, (1, count)) for count in (5, 1, 3, 1, 7, 4, 1)]
    with graphplan.simulate({0: "200KiB", 1: "200KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(
            model, machine.max_memory, (steps[0], make()), max_length=32, balance=True
        )
        assert set(placed.plan.placement.values()) == {0, 1}
        ours, theirs = make(), make()
        for step in steps:
            assert largest_difference(placed(step, ours), model(step, theirs)) < 1e-5
        graphs = len(placed.plans)
        placed(steps[1], ours)
        assert len(placed.plans) == graphs < len(steps)


class KVCache(nn.Module):
    """A module of the model, and no argument: buffers that its calls fill."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(8, 32))

    def forward(self, x: torch.Tensor, at: int) -> torch.Tensor:
        self.rows[at : at + x.shape[0]] = x
        return self.rows


class FieldsCache(dict[str, torch.Tensor]):
    """A dict, and how many tokens it has."""

    tokens = 0


class OwnCaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.cache = nn.Linear(32, 32), KVCache()

    def forward(self, x: torch.Tensor, fields: FieldsCache) -> torch.Tensor:
        found: torch.Tensor = self.cache(self.layer(x), 2)
        fields["last"] = found[-1]
        fields.tokens += 1
        return found.sum(1)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_modules_and_dicts_named_like_caches_keep_their_type() -> None:
    model, ours, theirs, x = OwnCaches().eval(), FieldsCache(), FieldsCache(), torch.randn(3, 32)
    with graphplan.simulate({0: "64KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(model, machine.max_memory, (x, FieldsCache()))
        for _ in range(2):
            assert largest_difference(placed(x, ours), model(x, theirs)) < 1e-5
            assert largest_difference(dict(ours), dict(theirs)) < 1e-5
            assert ours.tokens == theirs.tokens


class ArrayCache:
    """Read only, with what a graph does not see."""

    def __init__(self, lock: bool = False) -> None:
        self.table, self.rows = np.ones(3), torch.ones(32)
        self.lock = threading.Lock() if lock else None


class Reads(nn.Linear):
    def forward(self, x: torch.Tensor, cache: ArrayCache) -> torch.Tensor:
        return super().forward(x) * float(cache.table.sum()) + cache.rows


def test_opaque_example_cache_is_copied_or_raises() -> None:
    torch.manual_seed(0)
    model, x, cache = Reads(32, 32).eval(), torch.randn(2, 32), ArrayCache()
    with graphplan.simulate({0: "64KiB"}) as machine, torch.no_grad():
        with pytest.warns(graphplan.GraphplanWarning, match="'table', a ndarray"):
            placed = graphplan.partition(model, machine.max_memory, (x, cache))
        assert largest_difference(placed(x, cache), model(x, cache)) < 1e-5
        with pytest.raises(graphplan.InputError, match=r"must be copied \(cache, ArrayCache\)"):
            graphplan.partition(model, machine.max_memory, (x, ArrayCache(lock=True)))


def test_object_not_named_cache_raises_with_remedy() -> None:
    class Memory:
        table, rows = np.ones(3), torch.ones(32)

    with pytest.raises(graphplan.NoGraphError, match=r"Memory'>(.|\n)*has a name that ends with Cache"):
        graphplan.plan(Reads(32, 32), {"cpu": "1MiB"}, (torch.randn(2, 32), Memory()))
