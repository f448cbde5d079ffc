"""Faults that are injected: damaged checkpoints, refused allocations, interrupts; and long runs without any.

Each function does one case and returns what must not be, or None.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import json
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from builders import bytes_of, largest_difference
from safetensors.torch import save_file
from torch import nn

import graphplan
from graphplan.runtime.simulate.simulation import SimulationMode

WIDTH, DEPTH = 32, 4
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
FILE, INDEX = "one.safetensors", "model.safetensors.index.json"


class Blocks(nn.Module):
    """Residual blocks, a buffer that is written to, and a second structure with larger weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor, wide: bool = False) -> torch.Tensor:
        self.count.add_(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = x * 0.5 if self.training else x
        return self.wide(x) if wide else x + 1


PIN = {f"{name}.weight": "cpu" for name in (*(f"blocks.{i}" for i in range(1, DEPTH)), "wide")}
BUDGETS = {0: 1 << 20, "cpu": 1 << 30}


def streamed(model: nn.Module, **options: Any) -> Any:
    """A placed module that streams most of its weights."""
    return graphplan.partition(model, BUDGETS, (X,), pin=PIN, cpu_compute=False, **options)


def taken(machine: Any) -> dict[int, int]:
    gc.collect()
    return {index: machine.live_bytes(index) for index in machine.capacities}


def wrong(placed: Any, model: nn.Module, *args: Any) -> str | None:
    """How a call differs from eager, the count of calls aside."""
    apart = largest_difference(placed(*args), model(*args))
    return None if apart <= 1e-5 else f"the next call differs by {apart}"


# -- memory -------------------------------------------------------------------------------------------------


class Refusal:
    """A simulated machine's device is full when it is asked for memory for the ``at``-th time."""

    def __init__(self, machine: Any, at: int) -> None:
        self.machine, self.at, self.asked = machine, at, 0

    def __enter__(self) -> Refusal:
        self.machine.allocate = self.allocate
        return self

    def __exit__(self, *_: object) -> None:
        del self.machine.allocate

    def allocate(self, index: int, nbytes: int) -> int:
        full, self.asked = self.machine.capacities, self.asked + (nbytes > 0)
        if nbytes and self.asked == self.at:
            self.machine.capacities = {**full, index: self.machine.live_bytes(index)}
        try:
            counted: int = type(self.machine).allocate(self.machine, index, nbytes)
        finally:
            self.machine.capacities = full
        return counted


def refuse(machine: Any, at: int, work: Callable[[], Any]) -> tuple[bool, str | None]:
    """Whether there was an ``at``-th allocation in some work, and what is wrong with the error."""
    with Refusal(machine, at) as refusal:
        try:
            work()
        except graphplan.GraphplanError as error:
            said = re.search(r"sim:\d", str(error)) and re.search(r"\d+ bytes", str(error))
            return True, None if said else f"the error names no device or bytes: {error}"
        except Exception as error:
            return True, f"{type(error).__name__}: {error}"
    return refusal.asked >= at, "the refusal was swallowed" if refusal.asked >= at else None


def check_refused_call(at: int, *, wide: bool, warm: bool) -> tuple[bool, str | None]:
    """The ``at``-th allocation of a call is refused; ``wide`` calls need a larger prefetch buffer."""
    model = Blocks().eval()
    with torch.no_grad(), graphplan.simulate(BUDGETS) as machine:
        hit, problem = _refused(machine, model, at, wide=wide, warm=warm)
        return hit, problem or (f"{taken(machine)} is left" if any(taken(machine).values()) else None)


def _refused(machine: Any, model: nn.Module, at: int, *, wide: bool, warm: bool) -> tuple[bool, str | None]:
    placed = streamed(model)
    placed(X, wide) if warm else placed(X)
    before = taken(machine)
    hit, problem = refuse(machine, at, lambda: placed(X, wide))
    if hit and problem is None:
        after = taken(machine)
        problem = f"{before} became {after}" if after != before and (warm or not wide) else None
        problem = problem or wrong(placed, model, X, wide) or wrong(placed, model, X)
    return hit, problem


def check_refused_loading(at: int, checkpoint: Path | None) -> tuple[bool, str | None]:
    """The ``at``-th allocation while a model is placed is refused."""
    model = Blocks().eval()
    with torch.no_grad(), graphplan.simulate(BUDGETS) as machine:
        source: Any = model
        if checkpoint is not None:
            save_file(model.state_dict(), checkpoint / "model.safetensors")
            with torch.device("meta"):
                source = Blocks().eval()
        options = {} if checkpoint is None else {"checkpoint": str(checkpoint)}
        hit, problem = refuse(machine, at, lambda: streamed(source, **options))
        if hit and problem is None and any(taken(machine).values()):
            problem = f"{taken(machine)} is left"
        return hit, problem or wrong(streamed(source, **options), model, X)


# -- interrupts ---------------------------------------------------------------------------------------------


@contextmanager
def raising(error: BaseException, at: int) -> Iterator[list[int]]:
    """Raise at the ``at``-th line that runs in generated code or in the runtime; yields their count."""
    seen = [0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not (file.startswith("<eval_with_key>") or ("runtime/" in file and "simulate" not in file)):
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] == at:
                raise error
        return trace

    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(None)


def check_interrupted(placed: Any, model: nn.Module, at: int, *, wide: bool) -> tuple[bool, str | None]:
    """A call is broken off at its ``at``-th line; whether it has so many, and what is wrong afterwards."""
    error = (KeyboardInterrupt, ValueError)[at % 2]("injected")
    hit = True
    try:
        with raising(error, at) as seen:
            placed(X, wide)
        hit = seen[0] >= at
    except (KeyboardInterrupt, ValueError) as caught:
        if caught is not error:
            return True, f"line {at}: {caught!r}"
    found = wrong(placed, model, X, not wide) or wrong(placed, model, X, wide)
    return hit, None if found is None else f"line {at}: {found}"


# -- checkpoints --------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def _header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = (folder / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _truncate(folder: Path, step: int) -> None:
    os.truncate(folder / FILE, (folder / FILE).stat().st_size * step // 50)


def _forge_length(folder: Path, step: int) -> None:
    raw = (folder / FILE).read_bytes()
    lengths = [0, 1, 7, len(raw) - 9, len(raw) - 8, len(raw), 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1]
    (folder / FILE).write_bytes(lengths[step].to_bytes(8, "little") + raw[8:])


def _offsets(begin: int, end: int) -> Callable[[Path, int], None]:
    return lambda folder, step: _header(
        folder, lambda header: header["a.weight"].update(data_offsets=[begin, end + step * 4])
    )


def _flip(folder: Path, step: int) -> None:
    """Change one character of the header: an error, or the same weights under no other name."""
    raw = bytearray((folder / FILE).read_bytes())
    draw = random.Random(step)
    raw[draw.randrange(8 + int.from_bytes(raw[:8], "little"))] = draw.randrange(256)
    (folder / FILE).write_bytes(bytes(raw))


def _retype(folder: Path, step: int) -> None:
    dtype = (torch.int32, torch.bool, torch.complex64, torch.int64)[step]
    state = {"a.weight": torch.ones(WIDTH, WIDTH).to(dtype), "a.bias": torch.ones(WIDTH)}
    save_file(state, folder / FILE)


def _reshape(folder: Path, step: int) -> None:
    shape = ((1, WIDTH), (WIDTH * WIDTH,), (WIDTH, WIDTH, 1), (WIDTH + 1, WIDTH), (0, WIDTH))[step]
    save_file({"a.weight": torch.ones(shape), "a.bias": torch.ones(WIDTH)}, folder / FILE)


DAMAGES: dict[str, tuple[Callable[[Path, int], object], int]] = {
    "truncated": (_truncate, 50),
    "forged header length": (_forge_length, 10),
    "overlapping ranges": (_offsets(0, 4 * WIDTH * WIDTH), 1),
    "ranges beyond the file": (_offsets(4 * WIDTH, 1 << 40), 3),
    "ranges of another size": (_offsets(4 * WIDTH, 4 * WIDTH * (WIDTH + 1) + 4), 5),
    "dtype": (_retype, 4),
    "shape": (_reshape, 5),
    "shard missing": (lambda folder, _: (folder / FILE).unlink(), 1),
    "index damaged": (lambda folder, step: os.truncate(folder / INDEX, 10 + step), 20),
    "header flipped": (_flip, 200),
}
CHECKPOINT_CASES = [(kind, step) for kind, (_, count) in DAMAGES.items() for step in range(count)]


def check_checkpoint(kind: str, step: int) -> str | None:
    """A sharded checkpoint with one fault is a CheckpointError; repaired, the same model takes it."""
    model = TwoLayers().eval()
    with torch.device("meta"):
        empty = TwoLayers().eval()
    with TemporaryDirectory() as name, graphplan.simulate(BUDGETS) as machine:
        folder = Path(name)

        def save() -> None:
            state = model.state_dict()
            shards = {FILE: ["a.weight", "a.bias"], "two.safetensors": ["b.weight", "b.bias"]}
            for file, names in shards.items():
                save_file({name: state[name] for name in names}, folder / file)
            index = {name: file for file, names in shards.items() for name in names}
            (folder / INDEX).write_text(json.dumps({"weight_map": index}))

        def place() -> Any:
            return graphplan.partition(empty, BUDGETS, (X,), checkpoint=name)

        save()
        DAMAGES[kind][0](folder, step)
        try:
            place()
        except graphplan.CheckpointError:
            pass
        except Exception as error:
            return f"{kind} {step}: {type(error).__name__}: {error}"
        else:
            if kind != "header flipped" or wrong(place(), model, X):
                return f"{kind} {step}: it was loaded"
        if any(taken(machine).values()) or any(not p.is_meta for p in empty.parameters()):
            return f"{kind} {step}: the model or the device is not as before"
        save()
        problem = wrong(place(), model, X)
        return None if problem is None else f"{kind} {step}: {problem}"


def check_read_error(at: int) -> tuple[bool, str | None]:
    """The ``at``-th read of a checkpoint fails, as a disk does."""
    model, calls, read = TwoLayers().eval(), [0], os.preadv

    def failing(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(5, "Input/output error")
        return read(*args)

    with TemporaryDirectory() as name, graphplan.simulate(BUDGETS) as machine:
        save_file(model.state_dict(), Path(name) / "model.safetensors")
        with torch.device("meta"):
            empty = TwoLayers().eval()
        try:
            with patch.object(os, "preadv", failing):
                graphplan.partition(empty, BUDGETS, (X,), checkpoint=name, pin={"a": 0, "b": "cpu"})
        except graphplan.CheckpointError:
            problem = None
        else:
            problem = "the error was swallowed" if calls[0] >= at else None
        if any(taken(machine).values()):
            problem = problem or "something is left"
        placed = graphplan.partition(empty, BUDGETS, (X,), checkpoint=name)
        return calls[0] >= at, problem or wrong(placed, model, X)


def check_mapped(kind: str) -> str | None:
    """A file is changed while weights are in it: an error, or the old values where it was replaced."""
    model, other = TwoLayers().eval(), TwoLayers().eval()
    with TemporaryDirectory() as name, graphplan.simulate(BUDGETS):
        file, beside = Path(name) / "model.safetensors", Path(name) / "other"
        save_file(model.state_dict(), file)
        save_file(other.state_dict(), beside)
        with torch.device("meta"):
            empty = TwoLayers().eval()
        budgets = {0: 6000, "disk": 1 << 30}
        placed = graphplan.partition(empty, budgets, (X,), checkpoint=name)
        assert "disk" in placed.plan.placement.values()
        if kind == "replaced":
            os.replace(beside, file)
            return wrong(placed, model, X)
        if kind == "truncated":
            os.truncate(file, 100)
        else:
            file.write_bytes(beside.read_bytes())
            os.utime(file, ns=(1, 1))
        try:
            placed(X)
        except graphplan.CheckpointError:
            return None
        return f"{kind}: no error"


# -- long runs ----------------------------------------------------------------------------------------------


def check_threads(placed: Any, model: nn.Module, threads: int, calls: int) -> list[str]:
    """Threads call a placed module and its copies at once."""
    modules = [placed if index % 2 == 0 else copy.deepcopy(placed) for index in range(threads)]
    inputs = [X * (index + 1) for index in range(threads)]
    expected = [[model(x, wide) for wide in (False, True)] for x in inputs]
    found: list[str] = []

    def work(index: int) -> None:
        try:
            with torch.no_grad(), SimulationMode():  # both belong to a thread
                for call in range(calls):
                    wide = bool((call + index) % 2)
                    apart = largest_difference(modules[index](inputs[index], wide), expected[index][wide])
                    if not apart <= 1e-5:
                        found.append(f"thread {index}, call {call}: differs by {apart}")
        except Exception as error:
            found.append(f"thread {index}: {type(error).__name__}: {error}")

    contexts = [contextvars.copy_context() for _ in range(threads)]
    running = [threading.Thread(target=c.run, args=(work, i)) for i, c in enumerate(contexts)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return found


def check_many_calls(calls: int, seed: int = 0) -> list[str]:
    """Calls of changing batch, length, adapters and modes: results as eager's, bytes as after the first."""
    from language_models import VOCABULARY, build
    from peft import LoraConfig, get_peft_model

    draw, found = random.Random(seed), list[str]()
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(build("llama"), lora)
    model.add_adapter("second", lora)
    eager, ids = copy.deepcopy(model), torch.randint(1, VOCABULARY, (2, 4))
    budgets = {0: bytes_of(model) // 2 + (1 << 17), 1: bytes_of(model), "cpu": 1 << 30}
    forms = [(adapter, training) for adapter in ("default", "second", "") for training in (False, True)]
    with torch.no_grad(), graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(model, budgets, kwargs={"input_ids": ids}, max_batch=4, max_length=16)
        before: tuple[int, dict[int, int]] | None = None  # with how many structures
        for call in range(len(forms) + calls):
            adapter, training = forms[call] if call < len(forms) else draw.choice(forms)
            ids = torch.randint(1, VOCABULARY, (draw.randint(1, 4), draw.randint(1, 16)))
            results = []
            for one in (placed, eager):
                one.train(training)
                layers = one.base_model
                layers.enable_adapter_layers() if adapter else layers.disable_adapter_layers()
                if adapter:
                    one.set_adapter(adapter)
                results.append(one(input_ids=ids, use_cache=False).logits)
            if not (apart := largest_difference(*results)) <= 1e-5:
                found.append(f"call {call}: differs by {apart}")
            del results
            if call % 10 == 0:
                now = len(placed.plans), taken(machine)  # a new structure may bring constants and a buffer
                if before is not None and now[0] == before[0] and now != before:
                    found.append(f"call {call}: {before} became {now}")
                before = now
    return found
