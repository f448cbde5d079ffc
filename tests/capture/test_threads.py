"""Captures in several threads run one after another, and do not affect other threads."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from builders import largest_difference
from language_models import VOCABULARY, build
from torch import fx, nn
from torch.fx.experimental import sym_node
from torch.utils import _pytree as pytree

import graphplan
from graphplan.capture.eager_run import tensors_restored

LIMIT = 60  # seconds until a thread that should have ended counts as stuck
ROOMY = {0: "8MiB", "cpu": "64MiB"}
STARTED, GO_ON = threading.Event(), threading.Event()


class Held(nn.Module):
    """Its forward, once traced, waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, held: bool = False) -> torch.Tensor:
        if held and not GO_ON.is_set():
            print("from the trace", file=sys.stderr)
            warnings.warn("from the trace", UserWarning, stacklevel=1)
            STARTED.set()
            assert GO_ON.wait(LIMIT)
        return torch.relu(self.linear(x))


@dataclass
class Outcome:
    """The result or error of a thread."""

    thread: threading.Thread
    results: list[Any]
    errors: list[BaseException]

    def get(self) -> Any:
        self.thread.join(LIMIT)
        assert not self.thread.is_alive(), "stuck"
        if self.errors:
            raise self.errors[0]
        return self.results[0]


def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as error:
            errors.append(error)

    outcome = Outcome(threading.Thread(target=run, daemon=True), results, errors)
    outcome.thread.start()
    return outcome


@contextmanager
def held_capture(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Outcome]:
    """A block during which another thread is in the middle of a trace of :class:`Held`."""
    STARTED.clear()
    GO_ON.clear()
    outcome = in_thread(start, *args, **kwargs)
    try:
        assert STARTED.wait(LIMIT)
        yield outcome
    finally:
        GO_ON.set()
    outcome.get()


def partition_held() -> Any:
    return graphplan.partition(Held(), ROOMY, (torch.ones(2, 4),), {"held": True})


def patched_globals() -> dict[str, Any]:
    """The globals that a capture replaces temporarily."""
    import torch.nn.functional as functional
    from transformers import masking_utils
    from transformers.cache_utils import DynamicSlidingWindowLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found = {name: value for name, value in vars(masking_utils).items() if callable(value)}
    found |= {f"sliding {name}": value for name, value in vars(DynamicSlidingWindowLayer).items()}
    found["masks"] = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    found["attention"] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    found["functional"] = functional.scaled_dot_product_attention
    found["call"], found["getattr"] = nn.Module.__call__, nn.Module.__getattr__
    found["code"], found["sizes"] = fx.GraphModule.recompile, sym_node.SymNode.mul
    found["stderr"] = sys.stderr
    return found


def registered() -> dict[Any, Any]:
    """The flatten functions of the classes that torch's pytree has registered."""
    return {cls: node.flatten_fn for cls, node in pytree.SUPPORTED_NODES.items()}


def model_and_inputs(number: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(number)
    if number % 2:
        family = ("llama", "gemma3")[number // 2]
        return build(family), {"input_ids": torch.randint(1, VOCABULARY, (1, 5 + number))}
    width = 4 + number
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width)), {"input": torch.ones(3, width)}


@pytest.mark.slow
def test_four_threads_partition_at_once_without_leftovers() -> None:
    for number in range(4):
        model_and_inputs(number)
    before, nodes = patched_globals(), registered()
    with graphplan.simulate(ROOMY):

        def one(number: int) -> float:
            model, kwargs = model_and_inputs(number)
            placed = graphplan.partition(model, ROOMY, kwargs=kwargs)
            with torch.no_grad():
                return largest_difference(placed(**kwargs), model(**kwargs))

        outcomes = [in_thread(one, number) for number in range(4)]
        assert all(outcome.get() <= 1e-5 for outcome in outcomes)
    after = patched_globals()
    assert [name for name in before if after[name] is not before[name]] == []
    assert {cls: fn for cls, fn in registered().items() if cls in nodes} == nodes
    assert not torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()
    function = torch.sin
    assert torch.compile(function, backend="eager") is not function


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted_capture_restores_globals(error: type[BaseException]) -> None:
    def interrupt(*_: Any) -> None:
        raise error

    model, kwargs = model_and_inputs(1)
    before, nodes = patched_globals(), registered()
    model.model.layers[1].register_forward_pre_hook(interrupt)
    with graphplan.simulate(ROOMY), pytest.raises(error):
        graphplan.partition(model, ROOMY, kwargs=kwargs)
    after = patched_globals()
    assert [name for name in before if after[name] is not before[name]] == []
    assert registered() == nodes
    assert not torch.compiler.is_exporting()


def test_a_copy_and_its_original_capture_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with graphplan.simulate(ROOMY):
        placed = graphplan.partition(model, ROOMY, (torch.ones(2, 4),))
        other = copy.deepcopy(placed)
        for sizes in ((3, 4), (2, 3, 4), (1, 2, 3, 4)):
            x = torch.randn(sizes)
            outcomes = [in_thread(module, x) for module in (placed, other)]
            for outcome in outcomes:
                assert largest_difference(outcome.get(), model(x)) <= 1e-6


@pytest.mark.parametrize("budgets", [ROOMY, {0: "40KiB", "cpu": "64MiB"}], ids=["resident", "streamed"])
def test_known_call_runs_during_capture(budgets: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 64)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with graphplan.simulate(budgets):
        placed = graphplan.partition(model, budgets, (x,))
        assert bool(placed.plan.schedule.prefetch_buffers) == (budgets is not ROOMY)
        placed(x)
        with held_capture(partition_held):
            assert largest_difference(in_thread(placed, x).get(), model(x)) <= 1e-5


def test_known_call_runs_during_capture_of_same_module() -> None:
    model, x = Held(), torch.randn(2, 4)
    with graphplan.simulate(ROOMY):
        placed = graphplan.partition(model, ROOMY, (x,))
        placed(x)
        with held_capture(placed, x, held=True) as capturing:
            assert largest_difference(in_thread(placed, x).get(), model(x)) <= 1e-6
            assert not capturing.results
    assert largest_difference(capturing.get(), model(x)) <= 1e-6


def test_stderr_of_other_threads_is_printed_during_capture(capsys: Any) -> None:
    with graphplan.simulate(ROOMY), held_capture(partition_held):
        for number in range(20):
            print(f"line {number}", file=sys.stderr)
    printed = capsys.readouterr().err.splitlines()
    assert printed == [f"line {number}" for number in range(20)]


def test_warnings_of_other_threads_appear_during_capture() -> None:
    with graphplan.simulate(ROOMY), held_capture(partition_held), pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine", UserWarning, stacklevel=1)


def test_logs_of_other_threads_are_kept_during_capture(caplog: Any) -> None:
    with graphplan.simulate(ROOMY), held_capture(partition_held):
        logging.getLogger("torch.export").warning("mine")
    assert [record.message for record in caplog.records if record.name == "torch.export"] == ["mine"]


def masks_of(llama: Any) -> bool:
    """Whether the model makes a mask for a text without padding: in a trace it does."""
    from transformers.masking_utils import create_causal_mask

    embeds = torch.zeros(1, 5, llama.config.hidden_size)
    mask = create_causal_mask(llama.config, embeds, torch.ones(1, 5, dtype=torch.long), None)
    return mask is not None


def test_eager_models_in_other_threads_run_during_capture() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    expected, llama = model(x), build("llama")
    expected_masks = masks_of(llama)
    with graphplan.simulate(ROOMY), held_capture(partition_held):
        assert torch.equal(model(x), expected)
        assert getattr(model, "1") is model._modules["1"]
        assert not torch.compiler.is_exporting()
        assert not torch.compiler.is_compiling()
        assert masks_of(llama) == expected_masks


def test_another_thread_compiles_during_a_capture() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if torch.compiler.is_compiling() else 3)

    with held_capture(graphplan.plan, Held(), ROOMY, (torch.ones(2, 4),), {"held": True}):
        compiled = torch.compile(double, backend="eager", fullgraph=True)
        assert compiled is not double
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


@dataclass
class Pair:
    left: torch.Tensor
    right: Any


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.linear(pair.left), {"again": Pair(pair.right, None)})


@pytest.mark.slow
def test_foreign_classes_are_registered_only_during_capture() -> None:
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    model = build("llama")
    register_cache_pytrees_for_model(model)
    before, names = registered(), dict(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE)
    ids, pairs = torch.randint(1, VOCABULARY, (1, 5)), Pairs()
    pair = Pair(torch.ones(2, 4), torch.zeros(3))
    with graphplan.simulate(ROOMY):
        placed = graphplan.partition(model, ROOMY, kwargs={"input_ids": ids, "use_cache": True})
        first = placed(input_ids=ids, use_cache=True)
        placed(input_ids=ids[:, :1], past_key_values=first.past_key_values, use_cache=True)
        result = graphplan.partition(pairs, ROOMY, (pair,))(pair)
    assert torch.allclose(result.left, pairs(pair).left, atol=1e-6)
    assert torch.equal(result.right["again"].left, pair.right)
    assert registered() == before
    assert dict(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE) == names


def test_torch_compiles_after_trials_of_two_threads_that_overlap() -> None:
    entered, second_entered, first_left = threading.Event(), threading.Event(), threading.Event()
    compiled: list[fx.GraphModule] = []

    def counting(graph: fx.GraphModule, _inputs: object) -> fx.GraphModule:
        compiled.append(graph)
        return graph

    def first() -> None:
        with tensors_restored(Held()):
            entered.set()
            assert second_entered.wait(LIMIT)
        first_left.set()

    def second() -> int:
        assert entered.wait(LIMIT)
        with tensors_restored(Held()):
            second_entered.set()
            assert first_left.wait(LIMIT)
            torch.compile(torch.sin, backend=counting)(torch.ones(2))
        return len(compiled)

    outcomes = [in_thread(first), in_thread(second)]
    assert [outcome.get() for outcome in outcomes] == [None, 0]
    torch.compile(torch.cos, backend=counting)(torch.ones(2))
    assert len(compiled) == 1
