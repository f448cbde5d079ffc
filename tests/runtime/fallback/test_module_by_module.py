"""Later calls that cannot be traced, of a module that is placed with a graph."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import pytest
import torch
from builders import bytes_of, largest_difference
from language_models import CACHE_NAMES, build, inputs_of
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import graphplan
from graphplan.runtime.fallback.hooked_run import ExecutionMode, HookedRun, run_hooked

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
STOP = torch.tensor(1e6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Early(nn.Module):
    """With ``stop``, data decides when it returns, so that it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 8)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, stop: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.seen = self.seen + 1  # a new tensor
        for block in self.blocks:
            x = block(x)
            if stop is not None and float(x.detach().sum()) > float(stop):
                break
        return {"logits": self.head(x) * self.gain, "last": x}


WARNED = (
    r"Early could not be traced:[\s\S]*at .*test_module_by_module\.py:\d+, in forward: if stop"
    r"[\s\S]*module by module"
)


@contextmanager
def placed(budgets: dict[Any, Any] | None = None, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(model, machine, the model over two devices of which none holds it)."""
    model = Early().eval()
    size = bytes_of(model)
    room = {0: int(0.6 * size) + 4096, 1: int(0.6 * size) + 4096}
    with graphplan.simulate(room if budgets is None else budgets) as machine:
        made = graphplan.partition(model, machine.max_memory, (X,), **options)
        yield model, machine, made
        del made
        gc.collect()


def expected_of(model: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(model)(*args)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_call_without_memory_raises() -> None:
    with placed() as (_, _, made), pytest.raises(graphplan.CaptureError, match="have no memory for it"):
        made(torch.randn(100, 16).to("sim:0"), STOP)


class Noted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, note: object = None) -> torch.Tensor:
        return self.part(x)  # type: ignore[no-any-return]  # of torch


@pytest.mark.filterwarnings("ignore:hooks were added")
def test_uncopyable_arguments_raise_with_names() -> None:
    with graphplan.simulate({0: "64KiB"}) as machine:
        placed = graphplan.partition(Noted().eval(), machine.max_memory, (X,))
        placed.part.register_forward_hook(lambda *_: None)
        with pytest.raises(graphplan.InputError, match=r"must be copied \(note, lock\).*pickle"):
            placed(X, note=threading.Lock())


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_inputs_with_grad_fn_are_copied() -> None:
    inputs = nn.Linear(16, 16)(X)
    with placed(grad=True) as (model, _, made):
        assert largest_difference(made(inputs, STOP)["logits"], model(inputs, STOP)["logits"]) < 1e-5


def test_runs_on_placed_weights() -> None:
    with placed() as (model, machine, made):
        assert set(made.plan.placement.values()) == {0, 1}
        assert largest_difference(made(X), expected_of(model, X)) < 1e-6
        gc.collect()
        live = {i: machine.live_bytes(i) for i in (0, 1)}
        with pytest.warns(UserWarning, match=WARNED) as caught:
            result = made(X, STOP)
        assert len(caught) == 1
        assert largest_difference(result, expected_of(model, X, STOP)) < 1e-6
        assert all(tensor.device == X.device for tensor in result.values())
        gc.collect()
        assert {i: machine.live_bytes(i) for i in (0, 1)} == live  # no second copy
        for key, bytes_there in live.items():
            assert machine.peak_bytes(key) <= made.plan.topology[key].memory
            assert bytes_there > 0.2 * bytes_of(model)


def test_warns_once_for_all_sizes_of_a_structure() -> None:
    with placed() as (model, _, made):
        with pytest.warns(UserWarning, match=WARNED):
            made(X, STOP)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for x in (X, X[:3], X[:1]):
                assert largest_difference(made(x, STOP), expected_of(model, x, STOP)) < 1e-6
            assert largest_difference(made(X), expected_of(model, X)) < 1e-6
        assert len(made.plans) == 1
        with pytest.raises(graphplan.PlanError, match="no graph to profile"):
            made.profile(X, STOP)


@pytest.mark.parametrize("numbers", [(2, 3, 7), (0.5, 1.0, 2.5)])
def test_warns_once_for_all_numbers(numbers: tuple[float, ...]) -> None:
    class Counted(Early):
        def forward(self, x: torch.Tensor, stop: Any = None, count: float = 0) -> Any:  # type: ignore[override]  # other arguments
            return super().forward(x * count if count else x, stop)

    model = Counted().eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for count in numbers:
                assert largest_difference(placed(X, STOP, count), model(X, STOP, count)) < 1e-4
        assert len([one for one in caught if "module by module" in str(one.message)]) == 1


class Reading(Early):
    """Its own code reads a child's weight, and a value kept from the previous call."""

    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, stop: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if stop is None:
            return super().forward(x)
        before = super().forward(x, stop)["last"]
        read = [before @ block.up.weight.T[:, :16] + block.down.bias for block in self.blocks]
        last = torch.stack(read).sum(0)
        last = last if self.kept is None else torch.cat([self.kept, last])[-4:] * 2
        self.kept = read[0].detach()
        return {"last": last}


def test_last_mode_gathers_on_the_calls_device() -> None:
    model = Reading().eval()
    eager, pin = copy.deepcopy(model), {f"blocks.{i}": i // 2 for i in range(4)}
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, torch.no_grad():
        made = graphplan.partition(model, machine.max_memory, (X,), pin=pin)
        with pytest.warns(UserWarning, match="module by module"):
            assert largest_difference(made(X, STOP), eager(X, STOP)) < 1e-6
        for number in (1, 2):
            assert largest_difference(made(X + number, STOP), eager(X + number, STOP)) < 1e-6


class HiddenStates(nn.Module):
    """Transformers adds hooks that record hidden states at the first call that is to return them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("short llama")

    def forward(self, input_ids: torch.Tensor, stop: torch.Tensor | None = None) -> dict[str, Any]:
        found = self.model(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        result = {"logits": found.logits}
        return result if stop is not None and float(stop) > 5 else {**result, "hidden": found.hidden_states}


@pytest.mark.slow
def test_hooks_added_by_the_model_keep_graphs_valid() -> None:
    eager, ids = HiddenStates().eval(), torch.arange(6)[None]
    with (
        graphplan.simulate({0: "4MiB"}) as machine,
        torch.no_grad(),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always", graphplan.GraphplanWarning)
        placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (ids,))
        for call in (
            (ids, torch.ones(1)),
            (ids,),
            (ids, torch.ones(1)),
            (ids, torch.full((1,), 9.0)),
            (ids,),
        ):
            found, expected = placed(*call), eager(*call)
            assert found.keys() == expected.keys()
            pairs = zip(found.get("hidden", ()), expected.get("hidden", ()), strict=True)
            assert all(largest_difference(one, other) < 1e-5 for one, other in pairs)
        assert not [one for one in said if re.search("hooks were added|traced again", str(one.message))]


class Keeping(nn.Module):
    """A call with an image has no graph; it sets attributes that calls without an image read."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(8, 8), nn.Linear(8, 8)
        self.offset: torch.Tensor | None = None
        self.kind, self.seen, self.count = "text", list[torch.Tensor](), torch.zeros(8)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        if image is not None:
            number = int(image.sum())
            self.offset, self.kind = torch.full((8,), float(number)), "image" if number > 3 else "text"
            self.seen.append(image)
            self.count.add_(1)
            x = x + number * self.image(image)
        y: torch.Tensor = self.text(x) + self.count + sum(self.seen)  # type: ignore[assignment]  # of tensors
        y = y if self.offset is None else y + self.offset
        return 2 * y if self.kind == "image" else y


def test_graphs_see_state_from_module_by_module_calls() -> None:
    eager, x = Keeping().eval(), torch.randn(2, 8)
    images = [torch.full((1, 8), value) for value in (0.2, 0.3, 0.9, 0.1)]
    with graphplan.simulate({0: "20KiB", 1: "20KiB"}) as machine, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", graphplan.GraphplanWarning)
        placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (x,))
        for image in images:
            assert largest_difference(placed(x), eager(x)) < 1e-5
            assert largest_difference(placed(x, image), eager(x, image)) < 1e-5
            assert largest_difference(placed(x), eager(x)) < 1e-5


@pytest.mark.filterwarnings("ignore:hooks were added:graphplan.GraphplanWarning")
def test_graphs_see_state_from_hooked_calls() -> None:
    """Graphs are retraced once the hooks are gone, and not at each call before."""
    eager, x = Keeping().eval(), torch.randn(2, 8)
    with graphplan.simulate({0: "20KiB", 1: "20KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(copy.deepcopy(eager), machine.max_memory, (x,))
        hooks = [one.text.register_forward_hook(lambda _m, _a, result: 2 * result) for one in (placed, eager)]
        state = placed._graphplan
        for value in (0.3, 0.9):
            image = torch.full((1, 8), value)
            assert largest_difference(placed(x, image), eager(x, image)) < 1e-5
            assert largest_difference(placed(x), eager(x)) < 1e-5
        assert placed._graphplan is state
        for hook in hooks:
            hook.remove()
        with pytest.warns(graphplan.GraphplanWarning, match="traced again"):
            assert largest_difference(placed(x), eager(x)) < 1e-5


def test_strict_raises() -> None:
    with placed(strict=True) as (_, _, made), pytest.raises(graphplan.NoGraphError):
        made(X, STOP)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_modules_replaced_by_a_call_stay_replaced() -> None:
    class Exchanges(Early):
        def forward(self, x: torch.Tensor, stop: Any = None) -> Any:  # type: ignore[override]  # other arguments
            if len(x) == 2:
                self.blocks[0] = nn.Sequential(self.blocks[0], nn.ReLU())
            return super().forward(x, stop)

    model = Exchanges().eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        for call in ((X,), (X[:2], STOP), (X, STOP), (X,), (X[:2], STOP), (X,)):
            assert largest_difference(placed(*call), model(*call)) < 1e-4


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.parametrize("stops", [False, True])
def test_modes_set_by_a_call_apply_to_the_next(stops: bool) -> None:
    """The modes do not apply to the same call, which a trial precedes."""

    class Freezing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.layer = nn.BatchNorm1d(16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(self.norm(x))
            if not stops or float(x.detach().sum()) < 1e6:
                self.norm.eval()
            return x

    model = Freezing()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        for _ in range(3):
            assert largest_difference(placed(X), model(X)) < 1e-5
            assert placed.norm.training == model.norm.training


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_call_may_copy_submodules(duplicate: Any) -> None:
    """The copies have no state of the call."""

    class Teaching(Early):
        def forward(self, x: torch.Tensor, stop: Any = None) -> Any:  # type: ignore[override]  # other arguments
            result = super().forward(x, stop)
            if stop is not None:
                self.teacher = [duplicate(self.blocks[0])]  # no submodule
                result["last"] = result["last"] + self.teacher[0](x)
            return result

    model = Teaching().eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        for call in ((X, STOP), (X, STOP), (X,)):
            assert largest_difference(placed(*call), model(*call)) < 1e-4
        made = len(pickle.dumps(placed.teacher[0]))
        assert made < 2 * len(pickle.dumps(model.teacher[0]))


def test_buffers_are_written_once_per_call() -> None:
    with placed() as (_, _, made), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made(X)
        made(X, STOP)
        made(X, STOP)
        found = made.state_dict()
        assert float(found["seen"]) == 3
        assert all(float(found[f"blocks.{i}.calls"]) == 3 for i in range(4))


class Mixes(nn.Module):
    """It cannot be traced; optionally it adds the results of two submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, mixed: bool = False) -> torch.Tensor:
        y = self.one(x)
        z = self.two(y)
        z = z + y if mixed else z
        return z if float(z.detach().sum()) < 1e9 else y


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_failing_later_call_raises_with_advice() -> None:
    with graphplan.simulate({0: "4KiB", 1: "4KiB"}) as machine:
        placed = graphplan.partition(Mixes().eval(), machine.max_memory, (X,))
        with pytest.raises(RuntimeError, match="same device") as caught:
            placed(X, mixed=True)
    assert "partition the model with this call as the example" in caught.value.__notes__[0]


class Counted(nn.Module):
    """Counts in a buffer that its model shares."""

    def __init__(self, calls: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("calls", calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


class Shares(nn.Module):
    """It cannot be traced; most of its bytes are on another device than the shared buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("calls", torch.zeros(()))
        self.block, self.counted = Block(), Counted(self.calls)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.counted(self.block(x))
        return x * self.calls if float(x.detach().sum()) > 0 else x * -self.calls


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_writes_to_shared_buffers_are_seen() -> None:
    model = Shares().eval()
    with graphplan.simulate({0: "44KiB", 1: "16KiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        assert placed.counted.calls.device != placed.block.up.weight.device
        for calls in (1, 2, 3):
            assert largest_difference(placed(X), model(X)) < 1e-5
            assert float(placed.calls) == float(placed.counted.calls) == calls


def test_weights_loaded_after_placing_are_used() -> None:
    other = Early()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    with placed() as (_, _, made), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made(X, STOP)
        made.load_state_dict(other.state_dict())
        assert largest_difference(made(X, STOP), expected_of(other, X, STOP)) < 1e-6


def test_cpu_weights_are_read_on_the_cpu() -> None:
    model = Early().eval()
    budgets = {0: int(0.4 * bytes_of(model)), "cpu": "1GiB"}
    with placed(budgets) as (model, machine, made), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(made.plan.placement.values()) == {0, "cpu"}
        assert largest_difference(made(X, STOP), expected_of(model, X, STOP)) < 1e-6
        assert machine.peak_bytes(0) <= budgets[0]


ROOMY = {0: "1MiB", 1: "1MiB"}
BY_HALVES = {"pin": {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}}


def test_deepcopy_runs_module_by_module_without_new_warning() -> None:
    with placed(ROOMY, **BY_HALVES) as (_, _, made), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made(X, STOP)
        warnings.simplefilter("error")
        model_copy = copy.deepcopy(made)
        with torch.no_grad():
            model_copy.gain.zero_()
        assert float(model_copy(X, STOP)["logits"].abs().max()) == 0
        assert float(made(X, STOP)["logits"].abs().max()) > 0


def test_gradients_equal_eager_mode() -> None:
    with placed(ROOMY, grad=True, **BY_HALVES) as (model, _, made), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made(X, STOP)["logits"].sum().backward()
        model(X, STOP)["logits"].sum().backward()
        found = dict(made.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.allclose(found[name].grad.cpu(), parameter.grad, atol=1e-5), name


class Crossed(nn.Module):
    """Reads a weight of a module without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, stop: torch.Tensor | None = None) -> torch.Tensor:
        y = self.second(self.first(x))
        if stop is not None and float(y.sum()) > float(stop):
            return y
        return y @ self.first.weight + y @ self.second.weight


def test_weights_on_several_devices_are_gathered_on_the_calls() -> None:
    model = Crossed().eval()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = graphplan.partition(model, machine.max_memory, (X,), pin={"first": 0, "second": 1})
        for stop in (STOP, None):
            assert largest_difference(made(X, stop), expected_of(model, X, stop)) < 1e-6


class Picky(Crossed):
    """An operation for which some device has no kernel."""

    def forward(self, x: torch.Tensor, stop: torch.Tensor | None = None) -> torch.Tensor:
        y = self.first(x)
        if stop is not None and float(y.sum()) < float(stop):
            raise RuntimeError(f"no kernel for {y.device}")
        return y + self.second(x)


def test_call_failing_in_all_modes_raises_with_advice() -> None:
    model = Picky().eval()
    pin = {"first": 0, "second": 1}
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = graphplan.partition(model, machine.max_memory, (X,), pin=pin)
        with pytest.raises(graphplan.CaptureError, match=r"do not run[\s\S]*with this call as the example"):
            made(X, STOP)
        assert largest_difference(made(X), expected_of(model, X)) < 1e-6


class Meets(Crossed):
    """Adds the results of two modules in its own code."""

    def forward(self, x: torch.Tensor, stop: torch.Tensor | None = None) -> torch.Tensor:
        y = self.first(x)
        if stop is not None and float(y.sum()) > float(stop):
            return y
        return y + self.second(x)


def test_failed_mode_frees_its_memory() -> None:
    model = Meets().eval()
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = graphplan.partition(model, machine.max_memory, (X,), pin={"first": 0, "second": 1})
        made(X)
        gc.collect()
        before = machine.live_bytes(0), machine.live_bytes(1)
        gc.disable()
        try:
            found = made(X, STOP)
            assert (machine.live_bytes(0), machine.live_bytes(1)) == before
        finally:
            gc.enable()
        assert largest_difference(found, expected_of(model, X)) < 1e-6


def test_weights_are_restored_after_out_of_memory() -> None:
    layer = nn.Linear(16, 16)
    before = list(layer.parameters())
    with graphplan.simulate({0: 1024}):  # for the weight, not the bias
        run = HookedRun(
            ExecutionMode("on the device of the call", gathered=True), torch.device("sim:0"), None
        )
        with pytest.raises(graphplan.SimulatedOutOfMemoryError):
            run_hooked(layer, "", run, (X,), {})
    assert all(one is other for one, other in zip(layer.parameters(), before, strict=True))


def test_recurrent_layers_run_on_one_device() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, stop: torch.Tensor | None = None) -> torch.Tensor:
            y, _ = self.lstm(x)
            if stop is not None and float(y.sum()) > float(stop):
                return y
            return self.head(y)

    model = Recurrent().eval()
    x = torch.randn(2, 3, 16)
    pin = {"lstm": 1, "head": 0}
    with graphplan.simulate({0: "1MiB", 1: "1MiB"}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = graphplan.partition(model, machine.max_memory, (x,), pin=pin)
        assert largest_difference(made(x, STOP), expected_of(model, x, STOP)) < 1e-6


def test_recurrent_layers_flat_weights_are_restored() -> None:
    layer = nn.LSTM(8, 8)
    with graphplan.simulate({0: "1MiB"}) as machine:
        run = HookedRun(ExecutionMode("where its weights are"), torch.device("cpu"), torch.device("sim:0"))
        run_hooked(layer, "", run, (X[None, :, :8],), {})
        gc.collect()
        assert machine.live_bytes(0) == 0  # the list would hold the copies
        assert machine.peak_bytes(0) > 0


def test_sizes_of_packed_sequences_stay_on_the_cpu() -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])

    model, call = Packing().eval(), (torch.randn(3, 5, 8), torch.tensor([5, 2, 3]))
    with graphplan.simulate({0: "1MiB"}) as machine:
        with pytest.warns(UserWarning, match="the model runs module by module"):
            made = graphplan.partition(model, machine.max_memory, call)
        assert largest_difference(made(*call), expected_of(model, *call)) < 1e-6


def test_pickling_keeps_strict() -> None:
    with placed(ROOMY, strict=True, **BY_HALVES) as (_, _, made):
        again = pickle.loads(pickle.dumps(made))
        again(X)
        with pytest.raises(graphplan.NoGraphError):
            again(X, STOP)


def test_unpickled_module_runs_an_untraceable_first_call() -> None:
    with placed(ROOMY, **BY_HALVES) as (model, _, made):
        again, homes = pickle.loads(pickle.dumps(made)), made.plan.schedule.assignment.weights
        places = {name: str(p.device) for name, p in made.named_parameters()}
        del made
        gc.collect()
        with pytest.warns(UserWarning, match=WARNED):
            result = again(X, STOP)
        assert largest_difference(result, expected_of(model, X, STOP)) < 1e-6
        assert again.plan.schedule.assignment.weights == homes
        assert {name: str(p.device) for name, p in again.named_parameters()} == places
        assert largest_difference(again(X), expected_of(model, X)) < 1e-6  # there is a graph for this one
        assert len(again.plans) == 1


def test_cpu_compute_false_is_respected() -> None:
    budgets = {0: 84_000, "cpu": "1MiB"}
    with placed(budgets, cpu_compute=False, reserve={0: 24_000}) as (model, machine, made):
        away = [name for name, key in made.plan.schedule.assignment.weights.items() if key == "cpu"]
        assert away
        ran: list[str] = []
        with pytest.warns(UserWarning, match=WARNED):
            made(X, STOP)
        with watched(ran):
            result = made(X, STOP)
        assert largest_difference(result, expected_of(model, X, STOP)) < 1e-6
        assert set(ran) == {"sim:0"}
        assert machine.peak_bytes(0) <= 84_000
        assert all(str(dict(made.named_parameters())[name].device) == "cpu" for name in away)


@contextmanager
def watched(ran: list[str]) -> Iterator[None]:
    """Record the devices on which linear layers compute."""
    linear = torch.nn.functional.linear

    def noting(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        ran.append(str(x.device))
        return linear(x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", noting)
        yield


def stopping(model: Any) -> Any:
    """A model whose decoding branches on data."""
    original = type(model)

    class Stopping(original):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            caches = [kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None]
            decodes = bool(caches) and caches[0].get_seq_length() > 0
            output = super().forward(input_ids=input_ids, **kwargs)
            if decodes and float(output.logits.sum()) > 1e9:
                raise ValueError
            return output

    model.__class__ = Stopping
    return model


@pytest.mark.slow
def test_caches_move_with_layers_and_prefill_uses_a_graph() -> None:
    pytest.importorskip("transformers")
    model = stopping(build("llama"))
    inputs = inputs_of("llama")
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    pin = {"model.layers.0": 0, "model.layers.1": 1}
    with graphplan.simulate({0: "8MiB", 1: "8MiB"}) as machine:
        made = graphplan.partition(model, machine.max_memory, kwargs=inputs, pin=pin)
        with pytest.warns(UserWarning, match=r"could not be traced[\s\S]*module by module") as caught:
            found = made.generate(**inputs, max_new_tokens=5, do_sample=False)
        assert len(caught) == 1
        assert torch.equal(found, expected)
        graphs = len(made.plans)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(made.generate(**inputs, max_new_tokens=5, do_sample=False), expected)
        assert len(made.plans) == graphs
        del made
        gc.collect()


class Around(Early):
    """Overrides ``__call__`` without keywords; one of its blocks is an ``fx.GraphModule``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = torch.fx.symbolic_trace(nn.Linear(16, 16))

    def __call__(self, *inputs: Any) -> Any:
        return super().__call__(*inputs)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_class_that_overrides_call_has_no_graph() -> None:
    model = Around().eval()
    with graphplan.simulate({0: "1MiB"}) as machine, torch.no_grad():
        placed = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X, STOP))
        assert placed.plan.method == "hooks"
        assert largest_difference(placed(X, STOP), model(X, STOP)) < 1e-5


class Recording(nn.Module):
    """Registers hooks of its own once, as transformers does for the hidden states of all layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.is_recorded = False
        self.found: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, stop: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        if stop is None:
            return (self.layers[0](x),)
        self.found = []
        if not self.is_recorded:
            for layer in self.layers:
                layer.register_forward_hook(lambda _layer, _given, made: self.found.append(made))
            self.is_recorded = True
        for layer in self.layers:
            x = layer(x)
            if float(x.sum()) > float(stop):
                break
        return tuple(self.found)


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_hooks_registered_during_a_call_stay() -> None:
    """Regression: the hooks were gone at the second call, though the flag of their presence was set."""
    model = Recording().eval()
    with graphplan.simulate({0: "4KiB", "cpu": "1MiB"}) as machine, torch.no_grad():
        made = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        for _ in range(3):
            assert largest_difference(made(X, STOP), model(X, STOP)) < 1e-6
        seen: list[int] = []
        handle = made.layers[1].register_forward_hook(lambda *_: seen.append(1))
        assert largest_difference(made(X, STOP), model(X, STOP)) < 1e-6
        handle.remove()
        assert largest_difference(made(X, STOP), model(X, STOP)) < 1e-6
        assert seen == [1]


@pytest.mark.filterwarnings("error:hooks were added", "error:.*traced again")
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_threads_run_graphs_during_module_by_module_calls() -> None:
    """Temporary changes by a call without a graph are not taken for changes by other calls."""
    results = list[Any]()
    with placed() as (model, _, made), torch.no_grad():
        made(X)
        made(X, STOP)
        model.eval()

        def calls(*given: torch.Tensor) -> None:
            results.extend((given, made(*given)) for _ in range(30))

        others = [
            threading.Thread(target=copy_context().run, args=(calls, *one)) for one in ((X,), (X, STOP))
        ]
        for other in others:
            other.start()
        for other in others:
            other.join(60)
        assert len(results) == 60
        assert len(made.plans) == 1
        assert all(largest_difference(found, model(*given)) < 1e-5 for given, found in results)


class Recursive(nn.Module):
    """Without a graph it calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: torch.Tensor, depth: torch.Tensor | None = None) -> torch.Tensor:
        x = self.down(torch.relu(self.up(x)))
        again = depth is not None and int(depth) > 0 and not hasattr(self, "plan")
        return self(x, depth - 1) if again else x  # type: ignore[operator]  # depth is there


@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_module_may_call_itself() -> None:
    model, depth = Recursive().eval(), torch.tensor(2)
    with graphplan.simulate({0: "28KiB", 1: "28KiB"}) as machine, torch.no_grad():
        made = graphplan.partition(copy.deepcopy(model), machine.max_memory, (X,))
        for call in ((X, depth), (X,), (X, depth)):
            assert largest_difference(made(*call), model(*call)) < 1e-5


class Checkpointed(nn.Module):
    """A layer is recomputed in the backward pass of a call without a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)),
            nn.Linear(16, 16),
        )

    def forward(self, x: torch.Tensor, stop: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.first, x, use_reentrant=False)
        return y if stop is not None and float(y.detach().sum()) > float(stop) else self.last(y)


@pytest.mark.parametrize("example", [(X,), (X, STOP)], ids=["with graphs", "without"])
@pytest.mark.filterwarnings("ignore::graphplan.GraphplanWarning")
def test_checkpoint_recomputation_equals_the_first_run(example: tuple[torch.Tensor, ...]) -> None:
    """Regression: without any graph, the backward pass ended in a SystemError."""
    model = Checkpointed()
    with graphplan.simulate({0: "30KiB", 1: "30KiB"}) as machine:
        made = graphplan.partition(copy.deepcopy(model), machine.max_memory, example, grad=True)
        for one in (made, model):
            one(X, STOP).sum().backward()
        pairs = zip(made.parameters(), model.parameters(), strict=True)
        assert all(largest_difference(one.grad.cpu(), other.grad) < 1e-5 for one, other in pairs)


@pytest.mark.filterwarnings("ignore:hooks were added", "ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_trial_is_hidden_from_modes_and_jit_trace() -> None:
    """Regression: the first call with hooks had twice its FLOPs, and ``torch.jit.trace`` of it crashed."""
    x = torch.randn(4, 64)
    with torch.no_grad(), graphplan.simulate({0: "1MiB"}):
        for first in ("count", "trace"):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval()
            placed: Any = graphplan.partition(model, {0: "48KiB", "cpu": "1MiB"}, (x,), cpu_compute=False)
            if first == "count":
                with FlopCounterMode(display=False) as counted:  # it registers hooks of all modules
                    placed(x)
                assert counted.get_total_flops() == 4 * 2 * 4 * 64 * 64
            else:
                placed[1].register_forward_hook(lambda *_: None)
                traced = torch.jit.trace(placed, (x,), check_trace=False)
                assert torch.allclose(traced(x + 1), model(x + 1), atol=1e-5)
