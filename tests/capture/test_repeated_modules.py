"""Blocks of a stack are traced once; the graph equals that of a trace of every block."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import architectures
import pytest
import torch
from torch import fx, nn
from transformers import DynamicCache, LlamaConfig, LlamaModel

import graphplan
from graphplan._compat.torch import set_call
from graphplan.capture.captured_graph import Capture
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.repeated.copied_call import CallCopy
from graphplan.capture.repeated.module_traits import traits_of
from graphplan.capture.tracers import trace_patches
from graphplan.capture.tracing import capture
from graphplan.capture.transformers.caches import caches_at
from graphplan.errors import CaptureError

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers")
_NAME = re.compile(r" on node '\w+'")
_BLOCKS = 5  # of the stacks here: the first, the recorded, two copies, and the last


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the blocks that were copied."""
    found: list[str] = []
    run = CallCopy.run

    def recording_run(self: CallCopy) -> Any:
        found.append(list(self._other.stack.values())[-1][0].removeprefix("_export_root."))
        return run(self)

    monkeypatch.setattr(CallCopy, "run", recording_run)
    return found


def captured(model: nn.Module, *args: Any, train: bool = False, **kwargs: Any) -> Capture:
    model_copy = ModelCopy(model)
    return capture(model_copy, model_copy.bind(args, kwargs), keep_grad=train, step=train)


def traced_whole(model: nn.Module, *args: Any, train: bool = False, **kwargs: Any) -> Capture:
    """The capture in which each block is traced."""
    with pytest.MonkeyPatch.context() as patch:
        calling = trace_patches._calling
        patch.setattr(trace_patches, "_calling", lambda *given: calling(*given[:-1], None))
        return captured(model, *args, train=train, **kwargs)


def lines(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Each node with its value, its module and its line of code; numbers in the place of names.

    The text of an assertion may have a name in it.
    """
    number = {node: index for index, node in enumerate(graph.nodes)}
    return [
        (
            node.target if node.op == "call_function" else node.op,
            str(node.meta.get("val")),
            _NAME.sub("", str(fx.map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}"))),
            str(node.meta.get("nn_module_stack")),
            node.meta.get("stack_trace"),
        )
        for node in graph.nodes
    ]


def test_repeated_trace_copies_blocks(copies: list[str]) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(_BLOCKS)))

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.blocks(x)[: int(lengths.max())]

    with pytest.warns(graphplan.GraphplanWarning, match="data-dependent sizes"):
        captured(Padded(), torch.randn(8, 4), torch.tensor([3, 5]))
    assert copies == 2 * ["blocks.2", "blocks.3"]


def test_copied_blocks_equal_whole_trace(copies: list[str]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(_BLOCKS)))
    found = captured(model, torch.randn(2, 4))
    assert copies == ["2", "3"]
    assert lines(found.graph) == lines(traced_whole(model, torch.randn(2, 4)).graph)


_COPIED = 62
"""Of the architectures below, how many have at least one block that is copied."""


def _deeper(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _LAYERS:
        monkeypatch.setitem(architectures.SMALL, name, _BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["Gemma3", "Mamba"])
def test_architectures(
    stem: str, copies: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "graphplan")
    _deeper(monkeypatch)
    (architecture,) = (one for one in architectures.TABLE if one.stem == stem)
    model, inputs = architecture.build()
    assert lines(captured(model, **inputs).graph) == lines(traced_whole(model, **inputs).graph)
    assert copies
    assert not [text for text in caplog.messages if "without copies" in text]


def _decode_step(stem: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and the call of one more token after a prefill."""
    (architecture,) = (one for one in architectures.TABLE if one.stem == stem)
    model, inputs = architecture.build()
    with torch.no_grad():
        result = model(**inputs, use_cache=True)
    name = "cache_params" if "cache_params" in result else "past_key_values"
    tokens = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    return model, {**inputs, tokens: inputs[tokens][:, -1:], name: result[name], "use_cache": True}


@pytest.mark.parametrize(
    "stem", ["GPT2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("Gemma3", "Mamba", "Bart"))]
)
def test_a_decode_step(stem: str, copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _deeper(monkeypatch)
    model, inputs = _decode_step(stem)
    found = captured(model, **copy.deepcopy(inputs))
    assert copies
    assert lines(found.graph) == lines(traced_whole(model, **inputs).graph)


def _small_llama() -> nn.Module:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 8}
    return LlamaModel(LlamaConfig(num_hidden_layers=_BLOCKS, **small)).eval()


class Counting(DynamicCache):
    updates = 0

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class CountingAll(DynamicCache):
    updates = 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        return super().update(*args, **kwargs)


class Nested(Counting):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        return super().update(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache", [Counting, *(pytest.param(one, marks=pytest.mark.slow) for one in (CountingAll, Nested))]
)
def test_methods_of_callers_cache_run_for_each_block(cache: type[DynamicCache], copies: list[str]) -> None:
    # what a subclass does beside transformers' own was done for the traced blocks alone
    found = captured(_small_llama(), input_ids=torch.ones(1, 4, dtype=torch.long), past_key_values=cache())
    assert copies
    (layout,) = [spec.context for _, spec in caches_at(found.out_spec)][:1]
    assert dict(zip(layout.keys, layout.parts, strict=True))["updates"].value == 5


class Tallies(nn.Module):
    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.updates += 1
        return x + 1


class Tallied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tallies() for _ in range(7))

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, cache)
        return x


def test_block_changing_a_cache_directly_is_traced(copies: list[str]) -> None:
    # the changes of the traced blocks were all
    found = captured(Tallied(), torch.ones(2), cache=Counting())
    assert not copies
    (layout,) = [spec.context for _, spec in caches_at(found.out_spec)]
    assert dict(zip(layout.keys, layout.parts, strict=True))["updates"].value == 7


@pytest.mark.slow
def test_training(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _deeper(monkeypatch)
    (architecture,) = (one for one in architectures.TABLE if one.stem == "GPT2")
    model, inputs = architecture.build()
    found = captured(model.train(), train=True, **inputs)
    assert copies
    assert lines(found.graph) == lines(traced_whole(model, train=True, **inputs).graph)


class Block(nn.Module):
    """A block that knows its place."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * 2


class Stack(nn.Module):
    """Calls its blocks in order."""

    def __init__(self, block: Callable[[int], nn.Module], size: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(block, range(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_unread_layer_index_does_not_prevent_copies(copies: list[str]) -> None:
    captured(Stack(Block), torch.randn(2, 4))
    assert len(copies) == 5


class Compares(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x).relu() if self.index in (3, 5) else self.linear(x)


class Indexes(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * [1, 1, 1, 1, 2, 1, 1, 1][self.index]


class Multiplies(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * self.index


class Keeps(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * [self.index][0]


class Counts(Block):
    calls = 0

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        Counts.calls += 1
        return self.linear(x) * (2 if Counts.calls % 3 else 1)


_HIDDEN = SimpleNamespace(calls=0)
_TOLD: dict[str, int] = {"calls": 0}
_LISTED = [0]
_NESTED = ({"calls": deque([0])},)
_MEMBERS = set[int]()
_CALLS = 0


class CountsInFile(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        global _CALLS
        _CALLS += 1
        return self.linear(x) * (2 if _CALLS % 3 else 1)


class CountsInDict(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        _TOLD["calls"] += 1
        return self.linear(x) * (2 if _TOLD["calls"] % 3 else 1)


class CountsInList(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        _LISTED[0] += 1
        return self.linear(x) * (2 if _LISTED[0] % 3 else 1)


class CountsInContainers(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        _NESTED[0]["calls"].append(1)
        return self.linear(x) * (2 if len(_NESTED[0]["calls"]) % 3 else 1)


class CountsInSet(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        _MEMBERS.add(len(_MEMBERS))
        return self.linear(x) * (2 if len(_MEMBERS) % 3 else 1)


class Marks(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.was_called = True
        return self.linear(x)


class OneDiffers(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scale = 3.0 if index == 4 else 1.0

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * self.scale


class LastDiffers(Block):
    """Depends on an object of the file that is not searched."""

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * (1 if _HIDDEN.calls % 8 else 2)


class Tells(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            _HIDDEN.calls = index + 1
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (Compares, 3),
        (Indexes, 0),
        (Multiplies, 0),
        (Keeps, 0),
        (Counts, 0),
        (CountsInFile, 0),
        (CountsInDict, 0),
        (CountsInList, 0),
        (CountsInContainers, 0),
        (CountsInSet, 0),
        (Marks, 0),
        (OneDiffers, 4),
    ],
)
def test_blocks_are_copied_unless_their_reads_differ(
    block: type[Block], expected: int, copies: list[str]
) -> None:
    """The number of copies is ``expected``; the graph equals that of a whole trace."""
    Counts.calls = _TOLD["calls"] = _LISTED[0] = 0
    model = Stack(block)
    found = captured(model, torch.randn(2, 4))
    assert len(copies) == expected
    Counts.calls = _TOLD["calls"] = _LISTED[0] = 0
    whole = traced_whole(model, torch.randn(2, 4))
    if block not in (
        CountsInFile,
        CountsInContainers,
        CountsInSet,
    ):  # it goes on counting from one trace to the next
        assert lines(found.graph) == lines(whole.graph)
    assert all(type(one.index) is int for one in model.blocks)


class Sets(Stack):
    """Gives its fifth block another attribute at each call, after which it is as before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            block.scale = 2.0 if index == 4 else 1.0
            x = block(x)
            block.scale = 1.0
        return x


class Scaled(OneDiffers):
    def __init__(self, index: int) -> None:
        super().__init__(0)


def test_attribute_set_before_the_call_is_used(copies: list[str]) -> None:
    model = Sets(Scaled)
    found = captured(model, torch.randn(2, 4))
    assert copies == ["blocks.2", "blocks.3", "blocks.5", "blocks.6"]
    assert lines(found.graph) == lines(traced_whole(model, torch.randn(2, 4)).graph)


class Counter:
    """An object that all blocks share: its number is another object each time, maybe where one was before."""

    def __init__(self) -> None:
        self.number = 1000


class Reads(Block):
    def __init__(self, counter: Counter) -> None:
        super().__init__(0)
        self.counter = counter

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * self.counter.number


class CountsUp(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counter = self.blocks[0].counter
        counter.number = 1000
        for block in self.blocks:
            counter.number += 1
            x = block(x)
        return x


def test_blocks_reading_a_changing_counter_are_not_copied(copies: list[str]) -> None:
    counter = Counter()
    model = CountsUp(lambda _: Reads(counter))
    found = captured(model, torch.randn(2, 4))
    assert not copies
    assert lines(found.graph) == lines(traced_whole(model, torch.randn(2, 4)).graph)


class Slots:
    """An object whose contents cannot be read."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1000


def test_blocks_with_opaque_objects_are_traced(copies: list[str]) -> None:
    counter: Any = Slots()
    model = CountsUp(lambda _: Reads(counter))
    found = captured(model, torch.randn(2, 4))
    assert not copies
    assert lines(found.graph) == lines(traced_whole(model, torch.randn(2, 4)).graph)


class AsksType(Block):
    """Sees that its index is guarded."""

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) if type(self.index) is int else self.linear(x).relu()


class AsksReal(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * self.index.real


class CopiesIndex(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) * copy.deepcopy(self.index)


@pytest.mark.parametrize(("block", "expected"), [(AsksType, 5), (AsksReal, 0), (CopiesIndex, 0)])
def test_every_read_of_a_layer_index_is_guarded(block: type[Block], expected: int, copies: list[str]) -> None:
    model = Stack(block)
    found = captured(model, torch.randn(2, 4))
    assert len(copies) == expected
    assert lines(found.graph) == lines(traced_whole(model, torch.randn(2, 4)).graph)


_TABLE = torch.arange(4.0)


class ReadsTable(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) + _TABLE


def test_a_tensor_of_the_file_is_one_constant(copies: list[str]) -> None:
    model = Stack(ReadsTable)
    found = captured(model, torch.randn(2, 4))
    whole = traced_whole(model, torch.randn(2, 4))
    assert len(copies) == 5
    assert lines(found.graph) == lines(whole.graph)
    assert found.constants.keys() == whole.constants.keys()


def test_differing_last_block_retraces_all_blocks(
    copies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "graphplan"):
        captured(Stack(Block), torch.randn(2, 4))
        assert not caplog.messages
        copies.clear()
        found = captured(Tells(LastDiffers), torch.randn(2, 4))
    assert len(copies) == 5
    assert [text for text in caplog.messages if "LastDiffers: the last block differs from the others" in text]
    assert lines(found.graph) == lines(traced_whole(Tells(LastDiffers), torch.randn(2, 4)).graph)


class DataDecides(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        return x if int(x.max()) > 3 else -x


def test_data_dependent_failure_is_not_retried_without_copies(
    copies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", "graphplan"),
        pytest.raises(CaptureError, match="depends on the values of tensors"),
    ):
        captured(DataDecides(Block), torch.randn(2, 4))
    assert copies
    assert not caplog.messages


class PassesMore(nn.Module):
    """Passes other things than tensors to its blocks, of which ``change`` makes those of the fifth."""

    def __init__(self, change: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(TakesMore, range(8)))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[Any] = []
        for index, block in enumerate(self.blocks):
            given: list[Any] = [1.0, seen, {"add": None}]
            if index == 4:
                self.change(given)
            x = block(x, *given)
        return x


class TakesMore(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        factor, seen, options = args
        x = self.linear(x) * factor + len(seen)
        return x if options["add"] is None else x + options["add"]


def _doubled(given: list[Any]) -> None:
    given[0] = 2.0


def _longer(given: list[Any]) -> None:
    given[1].append(1)


def _added(given: list[Any]) -> None:
    given[2]["add"] = torch.ones(4)


@pytest.mark.parametrize(("change", "expected"), [(_doubled, 4), (_longer, 4), (_added, 4)])
def test_blocks_with_changing_arguments_equal_whole_trace(
    change: Callable[[list[Any]], None], expected: int, copies: list[str]
) -> None:
    model = PassesMore(change)
    found = captured(model, torch.randn(2, 4))
    assert len(copies) == expected
    assert lines(found.graph) == lines(traced_whole(model, torch.randn(2, 4)).graph)


class Appends(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        args[1].append(x)
        return self.linear(x) * len(args[1])


def test_block_changing_its_argument_is_traced(copies: list[str]) -> None:
    model = PassesMore(lambda _: None)
    model.blocks = nn.ModuleList(map(Appends, range(8)))
    found = captured(model, torch.randn(2, 4))
    assert not copies
    assert lines(found.graph) == lines(traced_whole(model, torch.randn(2, 4)).graph)


class Replaces(nn.Module):
    """Its blocks replace entries of their argument by equal tensors, which the next block reads."""

    def __init__(
        self, given: Callable[[torch.Tensor], Any], replace: Callable[[Any, torch.Tensor], Any]
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReadsAndReplaces(index, replace) for index in range(8))
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.given(x)
        for block in self.blocks:
            x = block(x, h)
        return x


class ReadsAndReplaces(Block):
    def __init__(self, index: int, replace: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(index)
        self.replace = replace

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        a = self.linear(x)
        return a + self.replace(args[0], a)


def _entry(key: Any) -> Callable[[Any, torch.Tensor], Any]:
    def replace(h: Any, a: torch.Tensor) -> torch.Tensor:
        before, h[key] = h[key], a
        return before

    return replace


def _inner(h: Any, a: torch.Tensor) -> torch.Tensor:
    return _entry(0)(h["b"], a)


def _inner_list(h: Any, a: torch.Tensor) -> torch.Tensor:
    (before,), h["b"] = h["b"], [a]
    return before


def _reverses(h: Any, a: torch.Tensor) -> torch.Tensor:
    h.reverse()
    return h[0]


@pytest.mark.parametrize(
    ("given", "replace"),
    [
        (lambda x: {"b": x}, _entry("b")),
        (lambda x: OrderedDict(b=x), _entry("b")),
        (lambda x: [x], _entry(0)),
        (lambda x: {"b": [x]}, _inner),
        (lambda x: {"b": [x]}, _inner_list),
        (lambda x: [x, x * 2], _reverses),
    ],
)
def test_block_replacing_argument_entries_is_traced(
    given: Callable[[torch.Tensor], Any], replace: Callable[[Any, torch.Tensor], Any], copies: list[str]
) -> None:
    model, x = Replaces(given, replace), torch.randn(2, 4)
    found = captured(model, x)
    assert not copies
    assert lines(found.graph) == lines(traced_whole(model, x).graph)


class Holds(nn.Module):
    """Writes to the results of its blocks, which are their arguments, or occur twice in a result."""

    def __init__(self, result: Callable[[Any], Any], found: Callable[[Any], Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returns(index, result) for index in range(8))
        self.found = found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = [x]
        for block in self.blocks:
            x, result = block(x, h)
            self.found(result)[0] = x
            x = x + result[0][0] + h[0]
        return x


class Returns(Block):
    def __init__(self, index: int, result: Callable[[Any], Any]) -> None:
        super().__init__(index)
        self.result = result

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x) + args[0][0], self.result(args[0])


def _twice(h: Any) -> Any:
    made = list(h)
    return made, made


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda h: [h], lambda result: result[0]),
        (lambda h: (h, h), lambda result: result[1]),
        (_twice, lambda r: r[1]),
    ],
)
def test_block_returning_its_argument_is_traced(
    result: Callable[[Any], Any], found: Callable[[Any], Any], copies: list[str]
) -> None:
    # copies returned lists of their own: what was written to these was lost
    model, x = Holds(result, found), torch.randn(2, 4)
    made = captured(model, x)
    assert not copies
    assert lines(made.graph) == lines(traced_whole(model, x).graph)


_SHARED = [0.0]


class Owns(Block):
    """Returns a list that it has, or one of its file."""

    def __init__(self, index: int, shared: bool) -> None:
        super().__init__(index)
        self.boxes = {"own": [0.0]}
        self.shared = shared

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.linear(x), _SHARED if self.shared else self.boxes["own"]


class Fills(nn.Module):
    """Writes to the results of its blocks."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Owns(index, shared) for index in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x, box = block(x)
            box[0] = index
        return x + sum(block.boxes["own"][0] for block in self.blocks) + _SHARED[0]


@pytest.mark.parametrize("shared", [False, True])
def test_block_returning_its_own_container_is_traced(shared: bool, copies: list[str]) -> None:
    # copies returned lists of their own: what was written to these was lost
    model, x = Fills(shared), torch.randn(2, 4)
    made = captured(model, x)
    assert not copies
    assert lines(made.graph) == lines(traced_whole(model, x).graph)


class InPlace(Block):
    """Writes to its argument and to a buffer, and returns parts of them in containers."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.count.add_(1)
        x.add_(self.linear(x).detach())
        low, high = x.split(2, -1)
        return {"whole": x, "parts": [low, high + torch.tensor(0.5), self.count]}


class Unpacks(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = x.clone(), 0
        for block in self.blocks:
            found = block(x)
            x, total = found["whole"], total + found["parts"][2] + found["parts"][0].sum()
        return x + total


def test_writes_constants_and_containers(copies: list[str]) -> None:
    model, x = Unpacks(InPlace), torch.randn(2, 4)
    found = captured(model, x)
    assert len(copies) == 5
    assert lines(found.graph) == lines(traced_whole(model, x).graph)


class ReturnsViews(Block):
    """Views of the argument, of computed tensors, and as results."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.linear(x.view(-1, 2, 2).flatten(1)).relu().chunk(2, dim=-1)
        both = torch.cat([second, first], dim=-1)
        return both.view(-1, 2, 2).transpose(1, 2).flatten(1) + x.view(-1, 4)


def same_memory(graph: fx.Graph) -> list[bool]:
    """Of each operation and each of its inputs, whether their values have the same memory."""
    memory = {
        node: node.meta["val"].untyped_storage()._cdata
        for node in graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    return [
        memory[node] == memory[source]
        for node in graph.nodes
        for source in node.all_input_nodes
        if node in memory and source in memory
    ]


@pytest.mark.parametrize("block", [Block, InPlace, ReturnsViews])
def test_values_of_copies_share_memory_as_traced_ones_do(copies: list[str], block: type[nn.Module]) -> None:
    model, x = (Unpacks if block is InPlace else Stack)(block), torch.randn(2, 4)
    found = same_memory(captured(model, x).graph)
    assert copies
    assert found == same_memory(traced_whole(model, x).graph)


class Requires(Stack):
    """Branches on whether the results of its blocks require a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x = x * 2 if x.requires_grad else x / 2
        return x


def test_results_of_copied_blocks_keep_requires_grad(copies: list[str]) -> None:
    model, x = Requires(Block), torch.randn(2, 4)
    found = captured(model, x, train=True)
    assert copies
    assert lines(found.graph) == lines(traced_whole(model, x, train=True).graph)
    assert not found.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)


def test_hooked_blocks_are_traced(copies: list[str]) -> None:
    model = Stack(Block)
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _args, result: result + 1)
    found = captured(model, torch.randn(2, 4))
    assert not copies
    assert sum(node.target is torch.ops.aten.add.Tensor for node in found.graph.nodes) == 8


def test_blocks_of_a_placed_model_are_copied(copies: list[str]) -> None:
    model = Stack(lambda _: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), _BLOCKS)
    for part in model.modules():
        set_call(part, lambda *_: pytest.fail("a trace runs the modules' own code"))
    captured(model, torch.randn(2, 4))
    assert len(copies) == _BLOCKS - 3


class Signed(Block):
    """Has 0.0 or -0.0, which code can tell apart."""

    def __init__(self, index: int) -> None:
        super().__init__(0)
        self.zero = -0.0 if index % 2 else 0.0

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return torch.atan2(self.linear(x) * 0, torch.full_like(x, self.zero))


def test_negative_zero_is_distinguished(copies: list[str]) -> None:
    model, x = Stack(Signed), torch.randn(2, 4)
    assert lines(captured(model, x).graph) == lines(traced_whole(model, x).graph)


@pytest.mark.slow
def test_cache_call_in_other_modes_is_traced(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy would call the cache in the modes of the block."""
    model, inputs = _small_llama(), {"input_ids": torch.ones(1, 2, dtype=torch.long)}
    inputs["past_key_values"] = DynamicCache()
    forward = type(model.layers[0]).forward

    def under_autocast(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.layers[0]), "forward", under_autocast)
    found = captured(model, **copy.deepcopy(inputs))
    assert not copies
    assert lines(found.graph) == lines(traced_whole(model, **inputs).graph)


def test_tied_and_shared_weights(copies: list[str]) -> None:
    shared = nn.Linear(4, 4)

    def block(index: int) -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4))
        made[2].weight = made[0].weight if index != 4 else made[2].weight
        return made

    model = Stack(block)
    found = captured(model, torch.randn(2, 4))
    assert len(copies) == 4
    assert lines(found.graph) == lines(traced_whole(model, torch.randn(2, 4)).graph)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_every_architecture(copies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _deeper(monkeypatch)
    with_copies = 0
    for architecture in architectures.TABLE:
        if architecture.stem in ("GPTNeo", "Segformer"):  # lists say how many layers there are
            continue
        copies.clear()
        model, inputs = architecture.build()
        found = captured(model, **inputs)
        with_copies += bool(copies)
        assert lines(found.graph) == lines(traced_whole(model, **inputs).graph), architecture.name
    assert with_copies >= _COPIED


class Merging(nn.Linear):
    """Has a table as tokenizers do."""

    MERGES: ClassVar = {index: [[index]] for index in range(20_000)}


def test_external_state_of_large_table_is_limited() -> None:
    """Regression: reading the table took most of the trace, since each call of a block is compared."""
    names, _ = traits_of(Merging(4, 4)).external_state()
    assert 20_000 < len(names) < 30_000  # the table, and some of its items
