"""Streamed modules on simulated devices: values, bytes, copies, threads, interruptions."""

from __future__ import annotations

import contextvars
import copy
import gc
import itertools
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from builders import KIB, assert_kept, bytes_of, largest_difference, run_placed
from races import DelayedQueues
from torch import nn

import graphplan
from graphplan.devices.simulated_machine import SimulatedMachine
from graphplan.runtime.module import module_state
from graphplan.runtime.module.module_state import CallLock
from graphplan.runtime.simulate.simulation import SimulationMode
from graphplan.runtime.weights.weight_streams import ModuleStreams

WIDTH, DEPTH = 32, 6
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


class Blocks(nn.Module):
    """Residual blocks; ``deep`` runs them a second time, so it is another structure that reads them all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: torch.Tensor, *, deep: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if deep:
            for block in self.blocks:
                x = x - torch.tanh(block(x))
        return self.head(x)


PIN = {f"blocks.{i}.weight": "cpu" for i in range(DEPTH)}


@contextmanager
def streamed(model: nn.Module | None = None, **options: Any) -> Iterator[tuple[Any, Any, SimulatedMachine]]:
    """A placed module whose blocks' weights are streamed, its original, and the machine."""
    model = Blocks().eval() if model is None else model
    budgets = {0: 3 * bytes_of(model) + 65536, "cpu": 1 << 30}
    with graphplan.simulate(budgets) as machine:
        options = {"pin": PIN, "args": (X,), "cpu_compute": False, **options}
        placed = graphplan.partition(model, options.pop("max_memory", budgets), **options)
        yield placed, model, machine


def test_streamed_values_bytes_and_copies() -> None:
    with streamed() as (placed, model, machine):
        plan = placed.plan
        assert len(list(plan.schedule.loads())) == DEPTH
        assert len(plan.schedule.prefetch_buffers[0].slots) == 2
        for _ in range(3):
            assert largest_difference(run_placed(machine, placed, (X,)), model(X)) < 1e-5
        loads = [t for t in machine.transfers if t.nbytes == WIDTH * WIDTH * 4]
        assert len(loads) == DEPTH  # one copy for each segment
        assert machine.peak_bytes(0) == plan.peak_bytes[0]


def test_no_prefetch_buffer_without_streaming() -> None:
    with streamed(pin={}) as (placed, _, machine):
        assert placed.plan.schedule.prefetch_buffers == ()
        assert placed._graphplan.streams.storages == {}
        placed(X)
        gc.collect()
        assert machine.live_bytes(0) == placed.plan.peaks[0].weights


def test_segment_is_moved_in_one_copy() -> None:
    pin = {**PIN, **{f"blocks.{i}.bias": "cpu" for i in range(DEPTH)}}
    with streamed(pin=pin) as (placed, model, machine):
        assert all(len(load.weights) == 2 for load in placed.plan.schedule.loads())
        assert largest_difference(run_placed(machine, placed, (X,)), model(X)) < 1e-5
        parameters = dict(placed.named_parameters())
        for load in placed.plan.schedule.loads():
            first, second = (parameters[name] for name in load.weights)
            assert second.data_ptr() - first.data_ptr() == first.numel() * 4  # neighbours in host memory
            assert first.untyped_storage().nbytes() == first.numel() * 4  # and yet a storage of its own


class Apply(nn.Module):
    """A layer that reads the weights of another module."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, weight, bias))


class Tied(nn.Module):
    """Two layers with one weight, and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b, self.c = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.first, self.second = Apply(), Apply()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, self.w, self.b), self.w, self.c)


def test_weight_streamed_to_two_devices_is_copied_as_planned() -> None:
    """It is adjacent to the bias of the first layer, not to that of the second."""
    model, pin = Tied(), {"w": "cpu", "b": "cpu", "c": "cpu", "first": 0, "second": 1}
    with graphplan.simulate({0: 1 << 16, 1: 1 << 16, "cpu": 1 << 30}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (X,), pin=pin, cpu_compute=False)
        streamed = [load.weights for load in placed.plan.schedule.loads()]
        assert sorted(streamed) == [("c",), ("w",), ("w", "b")]
        assert largest_difference(run_placed(machine, placed, (X,)), model(X)) < 1e-6


def test_generated_code_shows_the_streams() -> None:
    with streamed() as (placed, _, _):
        code = placed.code
        assert code.count(".load(") == DEPTH
        assert code.count(".wait(") == DEPTH
        assert code.count(".release(") == DEPTH
        assert "self._stream_0" in code
        assert ".to('sim:0')" in code  # the input


def test_parameters_have_the_models_names_and_values() -> None:
    with streamed() as (placed, model, _):
        assert list(placed.state_dict()) == list(model.state_dict())
        for name, tensor in placed.state_dict().items():
            assert tensor.device.type == ("cpu" if name in PIN else "sim")
            assert torch.equal(tensor.cpu(), model.state_dict()[name])
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in placed.parameters())
        with torch.no_grad():
            placed.blocks[0].weight.zero_()  # the caller's own is another tensor
            assert float(model.blocks[0].weight.abs().max()) > 0


def test_changed_cpu_parameters_are_seen() -> None:
    with streamed() as (placed, model, _):
        placed(X)
        with torch.no_grad():
            placed.blocks[2].weight.mul_(-1)
            model.blocks[2].weight.mul_(-1)
        assert largest_difference(placed(X), model(X)) < 1e-5
        other = Blocks().eval()
        placed.load_state_dict(other.state_dict())
        assert largest_difference(placed(X), other(X)) < 1e-5


def test_replaced_parameter_is_read_in_place() -> None:
    with streamed() as (placed, model, _):
        new = torch.randn(WIDTH, WIDTH)
        placed.blocks[1].weight.data = new.clone()
        model.blocks[1].weight.data = new.clone()
        assert largest_difference(placed(X), model(X)) < 1e-5
        other = Blocks().eval()
        placed.load_state_dict(other.state_dict() | {}, assign=False)
        placed.blocks[3].weight = nn.Parameter(other.blocks[3].weight.detach().clone())
        assert largest_difference(placed(X), other(X)) < 1e-5


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("turned", [torch.t, torch.Tensor.conj])
def test_parameter_data_replaced_by_a_view_is_read(turned: Any) -> None:
    dtype = torch.complex64 if turned is torch.Tensor.conj else torch.float32
    model, x = Blocks().eval().to(dtype), X.to(dtype)
    with streamed(model, args=(x,)) as (placed, _, _):
        for one in (placed, model):
            one.blocks[2].weight.data = turned(one.blocks[2].weight.data)
        torch.testing.assert_close(placed(x), model(x))


def test_two_parameters_over_one_memory_stay_one_weight() -> None:
    model = Blocks().eval()
    model.blocks[3].weight = nn.Parameter(model.blocks[1].weight.data)
    with streamed(model, pin={name: "cpu" for name in PIN if name != "blocks.3.weight"}) as (placed, _, _):
        for one in (placed, model):
            with torch.no_grad():
                one.blocks[1].weight.mul_(-1)
        assert torch.equal(placed.blocks[3].weight, model.blocks[3].weight)
        assert largest_difference(placed(X), model(X)) < 1e-5
        assert len(placed.plans) == 1


@pytest.mark.parametrize("trains", [True, False])
def test_call_during_backward_raises_and_next_step_is_right(trains: bool) -> None:
    eager = Blocks()

    def call(_: Any) -> None:
        with torch.set_grad_enabled(trains):
            placed(X)

    with streamed(copy.deepcopy(eager), train=True) as (placed, _, _):
        handle = placed.blocks[3].weight.register_post_accumulate_grad_hook(call)
        with pytest.raises(graphplan.PlanError, match=r"Call the model after backward\(\)"):
            placed(X).sum().backward()
        handle.remove()
        placed.zero_grad()
        for model in (placed, eager):
            model(X).sum().backward()
        for mine, theirs in zip(placed.parameters(), eager.parameters(), strict=True):
            assert torch.allclose(mine.grad.cpu(), theirs.grad, atol=1e-5)


def test_converted_parameters_raise() -> None:
    with streamed() as (placed, _, _):
        placed.blocks[1].weight.data = placed.blocks[1].weight.data.double()
        with pytest.raises(graphplan.PlanError, match=r"'blocks.1.weight' is torch.float64"):
            placed(X)
        placed.blocks[1].weight.data = placed.blocks[1].weight.data.float()
        placed(X)


def test_copy_has_a_separate_prefetch_buffer() -> None:
    with streamed() as (placed, model, machine):
        placed(X)
        gc.collect()
        before = machine.live_bytes(0)
        model_copy = copy.deepcopy(placed)
        with torch.no_grad():
            for parameter in model_copy.parameters():
                parameter.zero_()
        assert float(model_copy(X).abs().max()) == 0
        gc.collect()
        assert machine.live_bytes(0) - before >= placed.plan.schedule.prefetch_buffers[0].nbytes
        assert largest_difference(placed(X), model(X)) < 1e-5
        assert model_copy._graphplan.run_lock is not placed._graphplan.run_lock
        del model_copy, parameter
        gc.collect()
        assert machine.live_bytes(0) == before


def test_pickling_keeps_the_plan() -> None:
    with streamed() as (placed, _model, _machine):
        expected = placed(X)
        again = pickle.loads(pickle.dumps(placed))
        assert torch.equal(again(X), expected)
        assert list(again.plan.schedule.loads()) == list(placed.plan.schedule.loads())


def test_saving_one_weight_writes_only_its_bytes(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_model

    with streamed() as (placed, _model, _):
        torch.save(placed.blocks[0].weight, tmp_path / "one.pt")
        assert (tmp_path / "one.pt").stat().st_size < WIDTH * WIDTH * 4 + 4 * KIB
        cpu = nn.ModuleDict({"blocks": nn.ModuleList(placed.blocks)})
        save_model(nn.ParameterList([b.weight for b in cpu["blocks"]]), tmp_path / "all.safetensors")
        assert len(load_file(tmp_path / "all.safetensors")) == DEPTH


class Failing(Blocks):
    """Halfway through, it indexes with an argument that may be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = x + torch.tanh(block(x))
            if i == DEPTH // 2:
                x = x + self.table(index)
        return self.head(x)


def test_after_an_exception_the_next_call_is_right() -> None:
    model = Failing().eval()
    good, bad = torch.tensor([1]), torch.tensor([99])
    with streamed(model, args=(X, good)) as (placed, _, machine):
        for _ in range(2):
            assert largest_difference(run_placed(machine, placed, (X, good)), model(X, good)) < 1e-5
            with pytest.raises(IndexError):
                placed(X, bad)
            storage = next(iter(placed._graphplan.streams.storages.values()))
            assert storage.unreleased
        assert largest_difference(run_placed(machine, placed, (X, good)), model(X, good)) < 1e-5
        assert not storage.unreleased


def test_after_an_interrupt_the_next_call_is_right() -> None:
    with streamed() as (placed, model, machine):
        placed(X)
        for at in range(2 * DEPTH):
            count = 0

            def interrupt(read: Any, written: Any, at: int = at) -> None:
                nonlocal count
                count += 1
                if count == 2 * at + 1:
                    raise KeyboardInterrupt

            machine.watch = interrupt
            with pytest.raises(KeyboardInterrupt):
                placed(X)
            machine.watch = None
            assert largest_difference(run_placed(machine, placed, (X,)), model(X)) < 1e-5


def test_structures_share_one_prefetch_buffer() -> None:
    with streamed() as (placed, model, machine):
        calls: list[dict[str, Any]] = [{"x": X}, {"x": X, "deep": True}, {"x": X[:1]}]
        for _ in range(3):
            for kwargs in calls:
                assert largest_difference(placed(**kwargs), model(**kwargs)) < 1e-5
        assert len(placed.plans) == 2  # one serves both batches
        assert len(placed._graphplan.streams.storages) == 1
        sizes = {buffer.nbytes for plan in placed.plans for buffer in plan.schedule.prefetch_buffers}
        storage = next(iter(placed._graphplan.streams.storages.values()))
        assert sizes == {storage.bytes.numel()}
        assert [len(list(plan.schedule.loads())) for plan in placed.plans] == [DEPTH, 2 * DEPTH]
        for kwargs, plan in zip(calls[:2], placed.plans, strict=True):
            gc.collect()
            machine.reset_peaks()
            placed(**kwargs)
            assert_kept(machine, plan)


class Two(nn.Module):
    """One of two parts of different size, by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, 16)
        self.large = nn.Linear(WIDTH, 512)

    def forward(self, x: torch.Tensor, *, large: bool = False) -> torch.Tensor:
        return (self.large if large else self.small)(x)


def test_later_structure_enlarges_the_prefetch_buffer() -> None:
    model = Two().eval()
    pin = {"small.weight": "cpu", "large.weight": "cpu"}
    with streamed(model, pin=pin) as (placed, _, machine):
        before = placed.plan.schedule.prefetch_buffers[0].nbytes
        for large in (False, True, False, True):
            assert largest_difference(placed(X, large=large), model(X, large=large)) < 1e-5
        assert before < placed.plan.schedule.prefetch_buffers[0].nbytes
        assert (
            placed.plan.schedule.prefetch_buffers[0].nbytes
            == placed.plans[1].schedule.prefetch_buffers[0].nbytes
        )
        for large, plan in zip((False, True), placed.plans, strict=True):
            gc.collect()
            machine.reset_peaks()
            placed(X, large=large)
            assert_kept(machine, plan)
            plan.verify()


def test_infeasible_later_structure_raises() -> None:
    model = Two().eval()
    pin = {"small.weight": "cpu", "large.weight": "cpu"}
    with streamed(model, pin=pin) as (placed, _, _):
        budget = placed.plan.peak_bytes[0] + 8 * KIB
    with streamed(model, pin=pin, max_memory={0: budget, "cpu": 1 << 30}) as (placed, _, _):
        with pytest.raises(graphplan.InfeasibleError):
            placed(X, large=True)
        assert largest_difference(placed(X), model(X)) < 1e-5


@pytest.mark.parametrize("pin", [PIN, {}])
def test_threads_run_one_at_a_time(pin: dict[str, Any]) -> None:
    calls, count = 4, 3
    with streamed(pin=pin) as (placed, model, machine):
        inputs = [X + i for i in range(count)]
        expected = [model(x) for x in inputs]
        wrong: list[int] = []
        seen: list[int] = []

        def watch(read: Any, written: Any) -> None:
            seen.append(threading.get_ident())
            time.sleep(0)  # let another thread in, if it may

        def work(index: int) -> None:
            with SimulationMode():  # a mode belongs to a thread
                results = [placed(inputs[index]) for _ in range(calls)]
            wrong.extend(index for result in results if largest_difference(result, expected[index]) > 1e-5)

        gc.collect()
        machine.reset_peaks()
        machine.watch = watch
        contexts = [contextvars.copy_context() for _ in range(count)]
        threads = [threading.Thread(target=c.run, args=(work, i)) for i, c in enumerate(contexts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        machine.watch = None
        assert wrong == []
        assert len(set(seen)) == count
        turns = sum(1 for _ in itertools.groupby(seen))
        assert turns <= calls * count  # nobody was let in within a call
        assert machine.peak_bytes(0) <= placed.plan.peak_bytes[0]


@contextmanager
def held_by_a_thread(lock: CallLock, seconds: float) -> Iterator[None]:
    """Context manager in which another thread holds the lock, for ``seconds`` or until it exits."""
    begun, end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            begun.set()
            end.wait(seconds)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(60)
    yield
    end.set()
    thread.join()


def test_forked_child_does_not_wait_for_parents_lock() -> None:
    lock = CallLock()
    with held_by_a_thread(lock, 60):
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            with lock, lock:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
    assert status == 0


def test_long_wait_for_the_lock_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_state, "_LONG_WAIT", 0.01)
    lock, said = CallLock(), "run them one after the other"
    with held_by_a_thread(lock, 0.3), pytest.warns(graphplan.GraphplanWarning, match=said), lock:
        pass


@pytest.mark.parametrize("seed", range(4))
def test_delayed_copies_are_waited_for(seed: int) -> None:
    pin = {"small.weight": "cpu", "large.weight": "cpu"}
    model, draw = Two().eval(), random.Random(seed)
    with torch.no_grad(), streamed(model, pin=pin) as (placed, _, _):
        eager = graphplan.unplace(placed)
        placed._graphplan.streams = ModuleStreams(lambda device: DelayedQueues(seed))
        placed._graphplan.codes.clear()
        for large in [False, True, *(draw.random() < 0.5 for _ in range(20))]:  # the buffer grows once
            for one in (placed, eager):
                one.load_state_dict({n: t + 0.1 for n, t in eager.state_dict().items()})
            assert largest_difference(placed(X, large=large), eager(X, large=large)) < 1e-4
            placed._graphplan.streams.storages[
                torch.device("sim:0")
            ].queues.synchronize()  # before the host writes


def test_weights_are_copied_separately_with_gradients() -> None:
    with streamed(grad=True) as (placed, model, _):
        assert placed.plan.schedule.prefetch_buffers == ()
        assert len(placed.plan.streams) == DEPTH
        placed(X).sum().backward()
        model(X).sum().backward()
        for ours, theirs in zip(placed.parameters(), model.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert largest_difference(ours.grad.cpu(), theirs.grad) < 1e-4


def test_returned_weight_is_not_streamed() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x @ self.weight.t(), self.weight.t()

    model = Returning().eval()
    with streamed(model, pin={"weight": "cpu"}) as (placed, _, machine):
        assert placed.plan.schedule.prefetch_buffers == ()
        assert largest_difference(run_placed(machine, placed, (X,)), model(X)) < 1e-5


def test_unusual_layouts_and_dtypes_are_streamed() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.brain = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
            self.register_buffer("mask", torch.rand(5) > 0.5)
            self.wide = nn.Parameter(torch.randn(1, 5).expand(3, 5), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).sum() + self.brain.float().sum() + self.mask.sum() + self.wide.sum()

    model, x = Mixed().eval(), torch.randn(1, 3, 8, 8)
    pin = dict.fromkeys(("conv.weight", "conv.bias", "brain", "mask", "wide"), "cpu")
    with streamed(model, pin=pin, args=(x,)) as (placed, _, _machine):
        assert {n for load in placed.plan.schedule.loads() for n in load.weights} == set(pin)
        assert largest_difference(placed(x), model(x)) < 1e-4
        assert placed.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_memory_is_freed_with_the_module() -> None:
    with streamed() as (placed, _, machine):
        gc.collect()
        kept = machine.live_bytes(0)
        storage = next(iter(placed._graphplan.streams.storages.values()))
        buffer = -(-storage.bytes.numel() // 512) * 512
        placed(X)
        del storage
        gc.collect()
        gc.disable()  # no cycle keeps the prefetch buffer until the next collection
        try:
            placed._graphplan.codes.clear()
            placed._graphplan.streams = None
            assert machine.live_bytes(0) == kept - buffer
        finally:
            gc.enable()
