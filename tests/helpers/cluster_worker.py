"""The script of each torchrun process in the tests of several machines: it runs the named cases in turn.

python tests/helpers/cluster_worker.py CASE [ARGUMENT ...] [-- CASE [ARGUMENT ...]] ...
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import datetime
import gc
import inspect
import itertools
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [os.path.join(os.path.dirname(__file__), "..", ".."), os.path.dirname(__file__)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from cluster_models import PLAIN, SharedWeight, Stopped
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils import _pytree as pytree

import graphplan
from graphplan._compat.torch import stages_go_backward, with_timeout
from graphplan.runtime.distributed.agreement import broadcast_from_last, cpu_group, on_all

SECONDS = 180  # the timeout of the process group
SO_ATTACH_FILTER = 26  # of Linux; the socket module has no name for it
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
QUICK = graphplan.Link(1e12, 0.0)  # so that small models are worth dividing


def difference(found: Any, expected: Any) -> float:
    from builders import largest_difference

    return largest_difference(found, expected)


def say(text: str) -> None:
    # one write: torchrun runs "python -u", which writes a newline by itself, and lines of ranks merged
    print(f"[{dist.get_rank()}] {text}\n", end="", flush=True)


def divided(model: Any, inputs: dict[str, Any], microbatches: int, **options: Any) -> Any:
    """The model over all ranks, each with a CPU that would hold the whole."""
    return graphplan.partition(
        model,
        kwargs=inputs,
        microbatches=microbatches,
        objective="throughput",
        network=QUICK,
        time_limit=0.3,
        **{"machines": [{"cpu": "1GiB"}] * dist.get_world_size(), "return_outputs": "all", **options},
    )


def check(name: str, model: Any, inputs: dict[str, Any]) -> None:
    """The model, in two microbatches if its results allow, compared with eager mode."""
    with torch.no_grad():
        expected = model(**inputs)
    ranks = dist.get_world_size()
    try:
        try:
            placed = divided(model, inputs, 2)
        except graphplan.InputError:
            placed = split_by_memory(model, inputs)
        found = placed(**inputs)
        used = len(placed.plan.stages)
        same = type(found) is type(expected)
        say(f"{name}: {used}/{ranks} stages, same type {same}, difference {difference(found, expected):.1e}")
    except Exception as error:
        say(f"{name}: FAILED {type(error).__name__}: {error}")


def split_by_memory(model: Any, inputs: dict[str, Any]) -> Any:
    """In one microbatch: only memory budgets divide a model then."""
    nbytes = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    ranks = dist.get_world_size()
    for share in (0.7, 0.9, 1.2, 2.0, 4.0):
        try:
            return graphplan.partition(
                model, machines=[{"cpu": int(nbytes * share)}] * ranks, kwargs=inputs,
                network=QUICK, return_outputs="all", time_limit=0.3,
            )  # fmt: skip
        except (graphplan.InfeasibleError, graphplan.ClusterError):
            continue
    raise AssertionError("nothing fits")


def architectures(*stems: str) -> None:
    from architectures import TABLE

    for stem in stems:
        torch.manual_seed(0)
        (architecture,) = [a for a in TABLE if a.stem == stem]
        model, inputs = architecture.build()
        inputs = {k: v for k, v in inputs.items() if k != "use_cache"}
        if "use_cache" in inspect.signature(model.forward).parameters:
            inputs["use_cache"] = False
        check(stem, model, inputs)


def generation(*stems: str) -> None:
    """Greedy and sampled tokens, compared with eager mode."""
    from architectures import TABLE

    for stem in stems:
        torch.manual_seed(0)
        (architecture,) = [a for a in TABLE if a.stem == stem]
        model, inputs = architecture.build()
        prompt = {model.main_input_name: inputs[model.main_input_name]}
        if "input_ids" in prompt:
            prompt["attention_mask"] = torch.ones_like(inputs["input_ids"])
            prompt["attention_mask"][0, :2] = 0
        start = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
        try:
            placed = divided(model, {**inputs, "use_cache": False}, 2)
            same = []
            sampled = {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 2}
            for options in ({"do_sample": False}, sampled):
                options |= {"max_new_tokens": 12, "pad_token_id": 0, **start, **prompt}
                torch.manual_seed(1)
                expected = model.generate(**options)
                torch.manual_seed(1)
                same.append(torch.equal(placed.generate(**options), expected))
            sent = ", ".join(f"{name} {nbytes}" for name, nbytes in sorted(placed.traffic.items()))
            say(f"{stem}: {len(placed.plan.stages)} stages, greedy {same[0]}, sampled {same[1]}; sent {sent}")
        except Exception as error:
            say(f"{stem}: FAILED {type(error).__name__}: {error}")


def plain() -> None:
    for name, make in PLAIN.items():
        torch.manual_seed(0)
        model, inputs = make()
        check(name, model.eval(), inputs)


def chain(width: int = 8, wrong: bool = False) -> Any:
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    return torch.nn.Sequential(*layers, *([torch.nn.Tanh()] if wrong else [])).eval()


def profile(folder: str) -> None:
    """Measured batches of one stage and of two on each rank, the same on all ranks; each keeps its traces."""
    x, own = torch.ones(6, 8), {"return_outputs": True, "capture_cache": f"{folder}/{dist.get_rank()}"}
    for schedule in ("gpipe", "interleaved"):
        placed = divided(chain(), {"input": x}, 3, **own, schedule=schedule)
        placed(x)
        found = placed.profile(x)
        found.save_trace(f"{folder}/{schedule}-{dist.get_rank()}.json")
        stages = found.plan.stages
        for machine in found.plan.used:
            mine = [slot for slot in found.slots if stages[slot.stage].machine == machine]
            turns = 3 * len(found.plan.stages_of(machine))
            assert [slot.kind for slot in mine] == ["wait", "stage"] * turns
            assert all(before.end == after.start for before, after in itertools.pairwise(mine))
        assert all(0 < found.busy(stage) < found.seconds for stage in range(len(stages)))
        assert len(found.summary().splitlines()) == 4 + len(found.plan.used)
        say(f"{schedule}: {len(stages)} stages")


def fault(kind: str, rank: str) -> None:
    """One rank dies, stops or is called with other inputs; the others print what they waited for."""
    here, x = dist.get_rank() == int(rank), torch.randn(4, 8)
    try:
        schedule = "interleaved" if dist.get_world_size() == 2 else "gpipe"
        options = {"grad": kind in LOSSES, "schedule": schedule}
        placed = divided(chain(), {"input": x}, 2, return_outputs=True, **options)
        if kind in LOSSES:
            for loss in (LOSSES[kind], torch.nn.functional.mse_loss):
                try:
                    placed.train_step(loss, torch.zeros(4, 8), x)
                except Exception as error:  # what the rank says; then a training loop goes on all the same
                    say(f"{type(error).__name__}: {error}")
            sys.exit()
        placed(x)
        if here and kind == "dies":
            os._exit(9)
        if here and kind == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "unreachable":
            lose_network(int(rank))
        if kind == "forms":  # both sizes are known to both ranks
            placed(x[:2])
            x = x[:2] if here else x
        placed(x)
        placed(x)
        say("no error")
    except (graphplan.GraphplanError, ZeroDivisionError, RuntimeError) as error:
        say(f"{type(error).__name__}: {error}")
    sys.exit()


def loss_that_fails(result: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """An operation whose backward pass divides by zero."""
    result.register_hook(lambda gradient: gradient * (1 // 0))
    return torch.nn.functional.mse_loss(result, wanted)


LOSSES: dict[str, Callable[..., Any]] = {
    "backward": loss_that_fails,
    "raises": lambda result, _: result @ torch.ones(3),
    "without gradient": lambda result, wanted: torch.nn.functional.mse_loss(result, wanted).detach(),
    "rows": lambda result, wanted: (result - wanted).mean(1),
}


def lose_network(rank: int) -> None:
    """All ranks call this: of what a rank and the others send each other from now on, the kernel drops all.

    The connections stay open, as behind a cut cable.
    """
    ports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ports, [one.getsockname()[1] for one in sockets_of(connected=True)])
    dist.barrier()
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    for one in sockets_of(connected=True):
        if dist.get_rank() == rank or one.getpeername()[1] in ports[rank]:
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def sockets_of(*, connected: bool) -> list[socket.socket]:
    """Duplicates of this process's TCP sockets: those with a peer, or those that listen."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
            listens = bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError:  # no socket, or the folder's own
            continue
        if one.family in (socket.AF_INET, socket.AF_INET6) and listens != connected:
            found.append(one)
    return found


def listening() -> set[tuple[object, ...]]:
    """The addresses at which this process can be reached."""
    return {one.getsockname() for one in sockets_of(connected=False)}


def closed() -> None:
    """Placing, forward passes, a training step and a profile open no port, and unpickle nothing."""
    before, x = listening(), torch.randn(4, 8)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something is unpickled")

    with ExitStack() as stack:
        objects = dist.distributed_c10d  # its collectives of objects
        for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load"), (objects, "_unpickler")):
            stack.enter_context(patch.object(module, name, refuse))
        placed = divided(chain(), {"input": x}, 2, train=True, schedule="1f1b")
        placed(x)
        placed.profile(x)
        placed.train_step(torch.nn.functional.mse_loss, torch.zeros(4, 8), x)
    say(f"{len(placed.plan.stages)} stages, {len(before)} ports, {len(listening() - before)} opened")


def differs() -> None:
    """Rank 1 has another budget, other weights, other code, another number, more results: all find out, and
    go on.
    """
    here = dist.get_rank() == 1
    for kind in ("budgets", "weights", "code", "numbers", "results"):
        width = 9 if here and kind == "weights" else 8
        machines = [{"cpu": "2GiB" if here and kind == "budgets" else "1GiB"}] * dist.get_world_size()
        try:
            norm = torch.nn.LayerNorm(width, 0.1 if here and kind == "numbers" else 0.2, False)
            model = chain(width, wrong=here and kind == "code").append(norm)
            results: Any = "all" if here and kind == "results" else True
            graphplan.partition(
                model, machines=machines, args=(torch.ones(4, width),), return_outputs=results
            )
            say("no error")
        except graphplan.ClusterError as error:
            say(f"ClusterError: {error}")


class Rows(torch.nn.Module):
    """Takes a table whose rows are places, a mask that all rows of a batch may share, and one row each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Any, places: Any, mask: Any, last: Any) -> torch.Tensor:
        x = x + places
        for layer in self.layers:
            x = torch.tanh(layer(x)) * mask
        return x + last[:, None]


def no_batches() -> None:
    """Calls whose first dimension cannot be divided; the ranks continue, also in inference mode."""
    machines = [{"cpu": "1GiB"}] * dist.get_world_size()
    model = chain()
    placed: Any = graphplan.partition(
        model, machines=machines, args=(torch.ones(4, 8),), microbatches=2, return_outputs="all"
    )
    for x in (torch.ones(8), torch.ones(0, 8)):
        try:
            placed(x)
            say("no error")
        except graphplan.InputError as error:
            say(f"InputError: {error}")
    x = torch.ones(6, 8)
    with torch.inference_mode():
        first = difference(placed(x), model(x))
    say(f"then {max(first, difference(placed(x), model(x))) < 1e-6}")
    try:
        copy.deepcopy(placed)
    except graphplan.ClusterError as error:
        say(str(error))
    rows = Rows().eval()
    example = torch.randn(4, 3, 8), torch.randn(3, 8), torch.randn(1, 3, 8), torch.randn(4, 8)
    placed = graphplan.partition(
        rows, machines=machines, args=example, microbatches=2, return_outputs="all", network=QUICK
    )
    for batch, length, masks, ends in ((2, 2, 1, 2), (4, 4, 4, 4), (6, 2, 6, 1), (2, 2, 1, 4)):
        given = (
            torch.randn(batch, length, 8), torch.randn(length, 8),
            torch.randn(masks, length, 8), torch.randn(ends, 8),
        )  # fmt: skip
        try:
            say(f"rows {difference(placed(*given), rows(*given)) < 1e-6}")
        except graphplan.InputError as error:
            say(f"InputError: {error}")


@dataclass(frozen=True)
class Turn:
    """A constant argument that is neither a tensor nor plain data."""

    squares: bool


pytree.register_constant(Turn)


class Options(torch.nn.Module):
    """A model that depends on arguments that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def forward(
        self, x: torch.Tensor, turn: Turn | None = None, added: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        x = self.layers(x)
        x = x if turn is None else x * x if turn.squares else -x
        return x if added is None else x + 1


def constants() -> None:
    """Calls that differ in arguments other than tensors, the last two only in the structure."""
    torch.manual_seed(0)
    model, x = Options().eval(), torch.randn(4, 8)
    machines = [{"cpu": 4608}] * dist.get_world_size()  # a third of the layers needs most of it
    placed: Any = graphplan.partition(
        model, machines=machines, args=(x,), network=QUICK, return_outputs="all"
    )
    assert len(placed.plan.stages) == len(machines)
    for options in ({}, {"turn": Turn(False)}, {"turn": Turn(True)}, {"added": []}):
        say(f"{difference(placed(x, **options), model(x, **options)) < 1e-6}")


class Masked(torch.nn.Module):
    """Branches on the values of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return -x if mask.all() else x * mask


def values() -> None:
    """Calls, and microbatches, of which only the values of integers differ; then training steps."""
    model, x = Masked().eval(), torch.randn(4, 8)
    full, half = torch.ones(4, 1, dtype=torch.bool), torch.tensor([[True], [False], [True], [False]])
    placed: Any = graphplan.partition(
        model, machines=[{"cpu": 6144}] * dist.get_world_size(), args=(x, full), network=QUICK,
        return_outputs="all",
    )  # fmt: skip
    for mask in (full, half, full):
        say(f"{difference(placed(x, mask), model(x, mask)) < 1e-6}")
    placed = divided(model, {"x": x, "mask": full}, 2)
    for mask in (full, half, full.logical_xor(torch.arange(4)[:, None] == 3)):
        try:
            say(f"{difference(placed(x, mask), model(x, mask)) < 1e-6}")
        except graphplan.InputError as error:
            say(f"InputError: {error}")
    if not stages_go_backward():
        return
    placed = divided(model, {"x": x, "mask": full}, 2, train=True)
    for mask in (full, half, full):
        losses = placed.train_step(torch.nn.functional.mse_loss, torch.zeros(4, 8), x, mask)
        own = [(model(*part) ** 2).mean() for part in zip(x.chunk(2), mask.chunk(2), strict=True)]
        say(f"{losses is None or difference(torch.stack(losses), torch.stack(own)) < 1e-6}")


def weights() -> None:
    """Weights that rank 0 sends, or that each rank reads from a checkpoint, or from a folder."""
    import tempfile

    import transformers
    from safetensors.torch import save_file

    model, inputs = PLAIN["SharedWeight"]()
    model.eval()
    expected = model(**inputs)
    with torch.device("meta"):
        meta = SharedWeight().eval()
    placed = divided(meta if dist.get_rank() else model, inputs, 2)
    say(f"sent: equal {torch.allclose(placed(**inputs), expected, atol=1e-6)}")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    if dist.get_rank() == 0:
        state = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
        save_file(state, folder / "model.safetensors")
    dist.barrier()
    placed = divided(meta, inputs, 2, checkpoint=folder / "model.safetensors", strict=False)
    say(f"read: equal {torch.allclose(placed(**inputs), expected, atol=1e-6)}")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.randint(0, 64, (2, 5)), "use_cache": False}
    if dist.get_rank() == 0:
        llama.save_pretrained(folder / "llama")
    dist.barrier()
    placed = graphplan.load(
        folder / "llama", machines=[{"cpu": "1GiB"}] * 2, kwargs=inputs, microbatches=2,
        objective="throughput", network=QUICK, return_outputs="all", time_limit=0.3,
    )  # fmt: skip
    own = sum(p.numel() for p in placed.parameters())
    assert own < sum(p.numel() for p in llama.parameters())
    try:
        graphplan.load(folder / ("llama" if dist.get_rank() else "absent"), machines=[{"cpu": "1GiB"}] * 2)
    except graphplan.GraphplanError as error:
        say(f"{type(error).__name__}: {error}")
    say(f"loaded: equal {difference(placed(**inputs), llama(**inputs)) < 1e-5}")


def memory(folder: str) -> None:
    """Bytes by which a process grows as it loads its stage of a model of 1 GB, and bytes of its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=14,
        num_attention_heads=16,
        vocab_size=8000,
    )
    if dist.get_rank() == 0 and not os.path.isdir(folder):
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    small = config.to_dict() | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
    inputs = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "use_cache": False}
    divided(LlamaForCausalLM(LlamaConfig(**small)).eval(), inputs, 2)(**inputs)  # imports all that is needed
    before = rss()
    placed = graphplan.load(
        folder, machines=[{"cpu": "2GiB"}] * dist.get_world_size(), kwargs=inputs, microbatches=2,
        objective="throughput", network=QUICK,
    )  # fmt: skip
    placed(**inputs)
    own = sum(p.nbytes for p in placed.parameters())
    say(f"weights {own} grown {rss(peak=True) - before}")


def rss(peak: bool = False) -> int:
    """Bytes of this process in memory, now or at most so far."""
    with open("/proc/self/status") as file:
        text = file.read()
    return 1024 * int(text.partition("VmHWM:" if peak else "VmRSS:")[2].split()[0])


def training() -> None:
    """A 1F1B step of a module whose values skip stages, compared with eager mode."""
    torch.manual_seed(0)
    model, batch = PLAIN["DenseNet"]()[0], {"x": torch.randn(6, 16)}
    target, loss = torch.randn(6, 112), torch.nn.functional.mse_loss
    for rows in range(0, 6, 2):
        (loss(model(batch["x"][rows : rows + 2]), target[rows : rows + 2]) / 3).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    placed = divided(model, batch, 3, grad=True, schedule="1f1b").train()
    losses = placed.train_step(loss, target, **batch)
    for p in placed.stage.parameters():
        p.grad = None
    losses = placed.train_step(loss, target, **batch)  # by the same buffers
    assert (losses is not None) == (dist.get_rank() == dist.get_world_size() - 1)
    own = dict(placed.stage.named_parameters())
    worst = max((p.grad - expected[name]).abs().max().item() for name, p in own.items())
    say(f"{len(own)} parameters, {len(placed.plan.stages)} stages, gradients differ by {worst:.1e}")


def stopped() -> None:
    """Layers that no gradient reaches, a value that crosses conjugated, and a target of other rows."""
    for name in ("detach", "no_grad", "conjugated", "compared"):
        torch.manual_seed(0)
        model, batch, target = Stopped(name), {"x": torch.randn(6, 16)}, torch.randn(6, 16)
        placed = divided(copy.deepcopy(model), batch, 3, train=True, schedule="1f1b").train()
        for rows in range(0, 6, 2):
            part = model(batch["x"][rows : rows + 2]), target[rows : rows + 2]
            (torch.nn.functional.mse_loss(*part) / 3).backward()
        placed.train_step(torch.nn.functional.mse_loss, target, **batch)
        theirs, ours = dict(model.named_parameters()), dict(placed.stage.named_parameters())
        worst = difference([p.grad for p in ours.values()], [theirs[name].grad for name in ours])
        say(f"{name}: {len(placed.plan.stages)} stages, gradients differ by {worst:.1e}")
    try:
        placed.train_step(torch.nn.functional.mse_loss, target[:3], **batch)
    except graphplan.InputError as error:
        say(str(error))


def small_llama() -> Any:
    """Of four layers, untied."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config).eval()


TURNS: dict[str, Any] = {"schedule": "interleaved"}


def interleaved() -> None:
    """Two stages on each rank: a module with skips, and a weight that stages of a rank share."""
    check_turns("UNet")
    batch = {"ids": torch.randint(0, 50, (8, 6))}
    say(f"turns: {trained_beside_eager(SharedLayers().eval(), batch, 4, **TURNS, train=True)}")


def interleaved_more() -> None:
    """Two stages on each rank: a Llama, concatenated skips, a weight of the first and last stage."""
    llama = small_llama()
    ids = torch.randint(0, 64, (16, 5))
    batch = {"input_ids": ids, "use_cache": False}
    placed = divided(llama, batch, 4, **TURNS)
    with torch.no_grad():
        say(f"forward: {len(placed.plan.stages)} stages, {difference(placed(**batch), llama(**batch)):.1e}")
        single = {**batch, "input_ids": ids[:4]}  # another trace, whose stages take tensors of such sizes too
        say(f"single: {difference(placed(**single), llama(**single)):.1e}")
    prompt = {"input_ids": ids[:2], "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    say(f"generate: {torch.equal(placed.generate(**prompt), llama.generate(**prompt))}")
    say(f"train: {trained_beside_eager(llama, batch, 4, **TURNS, train=True, optimizer=torch.optim.AdamW)}")
    say(f"grad: {trained_beside_eager(llama, batch, 4, **TURNS, grad=True)}")
    check_turns("DenseNet")
    batch = {"ids": torch.randint(0, 50, (8, 6))}
    say(f"ends: {trained_beside_eager(SharedWeight().eval(), batch, 4, **TURNS, train=True)}")


def check_turns(name: str) -> None:
    """The results of a plain module in two microbatches, compared with eager mode."""
    model, inputs = PLAIN[name]()
    placed = divided(model.eval(), inputs, 2, **TURNS)
    say(f"{name}: {len(placed.plan.stages)} stages, {difference(placed(**inputs), model(**inputs)):.1e}")


class SharedLayers(torch.nn.Module):
    """All layers have one weight, so that stages of one rank share it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 50)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(50, 50) for _ in range(8))
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.table(ids)
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return h


def trained_beside_eager(model: Any, batch: dict[str, Any], count: int, **options: Any) -> str:
    """Gradients and losses of two steps, clipped, and weights after SGD, compared with eager mode."""
    model, eager = copy.deepcopy(model), copy.deepcopy(model)  # on the CPU, the placed one shares its memory
    ids = next(iter(batch.values()))
    target, loss = torch.randint(0, 50, ids.shape), result_loss
    placed = divided(model, batch, count, **options)
    own = dict(placed.stage.named_parameters())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (eager, placed.stage)]
    worst = 0.0
    for _ in range(2):
        rows = len(ids) // count
        expected = []
        for at in range(0, len(ids), rows):
            part = {k: v[at : at + rows] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            expected.append(loss(eager(**part), target[at : at + rows]))
        (sum(expected) / count).backward()
        losses = placed.train_step(loss, target, **batch)
        if losses is not None:
            worst = max(worst, difference(losses, [one.detach() for one in expected]))
        worst = max(worst, difference([p.grad for p in own.values()], grads_of(eager, own)))
        norms = [torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5), placed.clip_grad_norm_(0.5)]
        worst = max(worst, difference(*norms))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    worst = max(worst, difference(list(own.values()), [eager.get_parameter(name) for name in own]))
    here = placed.plan.stages_of(dist.get_rank())
    stages = [stage.plan.graph.weights.keys() & own.keys() for stage in here]
    twice = sum(map(len, stages)) - len(set().union(*stages))
    return f"{len(placed.plan.stages)} stages, {twice} parameters twice, differ by {worst:.1e}"


def result_loss(result: Any, wanted: torch.Tensor) -> torch.Tensor:
    return row_loss(result if isinstance(result, torch.Tensor) else result.logits, wanted)


def nested_loss(result: Any, target: dict[str, Any]) -> torch.Tensor:
    assert target["wanted"][1] == "rows"
    return row_loss(result, target["wanted"][0])


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def planned_training(schedule: str, budget: str) -> None:
    """Two steps of AdamW within budgets of simulated devices, on rows of two sizes; and eager's weights."""
    model = torch.nn.Sequential(*(Block(64) for _ in range(6))).train()
    eager, x, target = copy.deepcopy(model), torch.randn(512, 64), torch.randn(512, 64)
    with graphplan.simulate({0: budget}) as machine:
        placed = graphplan.partition(
            model, machines=[machine.max_memory] * dist.get_world_size(), args=(x,), microbatches=4,
            schedule=schedule, objective="throughput", network=QUICK,
            train=True, optimizer=torch.optim.AdamW, time_limit=0.3,
        )  # fmt: skip
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (eager, placed.stage)]
        for rows in (512, 256):
            torch.nn.functional.mse_loss(eager(x[:rows]), target[:rows]).backward()
            placed.train_step(torch.nn.functional.mse_loss, target[:rows], x[:rows])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        peak, stages = machine.peak_bytes(0), placed.plan.stages_of(dist.get_rank())
        own = dict(placed.stage.named_parameters())
        worst = difference([p.cpu() for p in own.values()], [eager.get_parameter(name) for name in own])
        with torch.no_grad():
            found, expected = placed(x), eager(x)
    if found is not None:
        worst = max(worst, difference(found, expected))
    again = sum(len(stage.plan.recomputed) for stage in stages)
    kept = sum(stage.kept_bytes.get(0, 0) for stage in stages)
    say(f"{len(placed.plan.stages)} stages, recomputed {again}, kept {kept}")
    say(f"peak {peak} of {placed.plan.peak_bytes[dist.get_rank()][0]}, budget {machine.max_memory[0]}")
    say(f"differ by {worst:.1e}")


def tied() -> None:
    """An embedding that is the head, and eager: gradients of two steps, clipped; then AdamW; twice."""
    model = SharedWeight().eval()
    eager, batch, target = (
        copy.deepcopy(model),
        {"ids": torch.randint(0, 50, (4, 6))},
        torch.randint(0, 50, (4, 6)),
    )
    placed = divided(model, batch, 2, train=True, optimizer=torch.optim.AdamW, schedule="1f1b")
    own = dict(placed.stage.named_parameters())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (eager, placed.stage)]
    gradients = []
    for _ in range(2):
        for _ in range(2):
            row_loss(eager(**batch), target).backward()
            placed.train_step(nested_loss, {"wanted": (target, "rows")}, **batch)
        norms = [torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5), placed.clip_grad_norm_(0.5)]
        gradients.append(difference(*norms))
        gradients.append(difference([p.grad for p in own.values()], grads_of(eager, own)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    table = own["table.weight"].detach()
    copies = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, table)
    say(f"{len(placed.plan.stages)} stages, copies equal {torch.equal(*copies)}")
    say(f"gradients differ by {max(gradients):.1e}")
    say(f"weights differ by {difference(list(own.values()), [eager.get_parameter(n) for n in own]):.1e}")
    shared = own["table.weight"]
    shared.grad = torch.ones_like(shared)
    with contextlib.suppress(ZeroDivisionError), placed._shared.summed(placed.stage):
        raise ZeroDivisionError
    say(f"kept: {shared.grad is not None}")


def no_stage(folder: str) -> None:
    """A usual training loop over a model that one rank trains faster alone: the other rank has no stage."""
    model, x, target = torch.nn.Linear(8, 8).train(), torch.randn(8, 8), torch.randn(8, 8)
    placed = graphplan.partition(
        model, machines=[{"cpu": "1GiB"}] * dist.get_world_size(), args=(x,), microbatches=4,
        train=True, optimizer=torch.optim.AdamW,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(placed.stage.parameters())
    for number in range(2):
        losses = placed.train_step(torch.nn.functional.mse_loss, target, x)
        norm = placed.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        model_state, state = get_state_dict(placed.stage, optimizer, options=FLAT)
        both = {"model": model_state, "optimizer": state}
        checkpoint.save(both, checkpoint_id=f"{folder}/{number}")
    checkpoint.load(both, checkpoint_id=f"{folder}/0")
    set_state_dict(
        placed.stage, optimizer, model_state_dict=model_state, optim_state_dict=state, options=FLAT
    )
    sizes = [parameter.numel() for parameter in placed.stage.parameters()]
    say(f"parameters {sizes}, losses {len(losses or ())}, norm {float(norm) > 0}")


def steps(folder: str, count: str, *faults: str) -> None:
    """Training steps up to ``count``, resumed from the last checkpoint, compared with one process."""
    trainer = Trainer()
    saved = [int(path.parent.name) for path in Path(folder).glob("*/.metadata")]
    if saved:
        trainer.load(f"{folder}/{max(saved)}")
    for step in range(max(saved, default=-1) + 1, int(count)):
        trainer.step(step)
        trainer.save(f"{folder}/{step}")
        if faults and not saved and dist.get_rank() == 1:
            os._exit(9)
    expected, own = trained_by_one_process(int(count)), dict(trainer.placed.stage.named_parameters())
    worst = difference(list(own.values()), [expected.get_parameter(name) for name in own])
    found = f"after {len(saved)} steps, {len(trainer.placed.plan.stages)} stages"
    say(f"{found}, weights differ by {worst:.1e}")


class Trainer:
    """A model with a shared weight over all ranks, and AdamW of each rank's parameters."""

    def __init__(self) -> None:
        model, self.batch = table_model()
        schedule = "interleaved" if dist.get_world_size() == 2 else "1f1b"
        self.placed = divided(model, self.batch, 4, grad=True, schedule=schedule)
        self.optimizer = torch.optim.AdamW(self.placed.stage.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        self.placed.train_step(row_loss, target_of(number), **self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        """The contents of a checkpoint, by the names of the whole model."""
        model, optimizer = get_state_dict(self.placed.stage, self.optimizer, options=FLAT)
        return {"model_state_dict": model, "optim_state_dict": optimizer}

    def save(self, folder: str) -> None:
        checkpoint.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.state()
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(self.placed.stage, self.optimizer, **state, options=FLAT)


def trained_by_one_process(steps: int) -> torch.nn.Module:
    model, batch = table_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        row_loss(model(**batch), target_of(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def table_model() -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, batch = PLAIN["SharedWeight"]()
    return model.eval(), batch


def target_of(step: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(step))


def row_loss(result: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(result.flatten(0, 1), wanted.flatten())


def grads_of(model: torch.nn.Module, names: Iterable[str]) -> list[torch.Tensor | None]:
    return [model.get_parameter(name).grad for name in names]


class AllLayers(torch.nn.Module):
    """Returns what each of its layers computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        computed = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            computed.append(x)
        return tuple(computed)


def kept_results() -> None:
    """The results of a first call, after a second one."""
    model, x = AllLayers(64).eval(), torch.randn(4, 64)
    nbytes = sum(p.nbytes for p in model.parameters())
    placed: Any = graphplan.partition(
        model, machines=[{"cpu": nbytes * 3 // 4 + 8192}] * 2, args=(x,), network=QUICK, time_limit=0.3
    )
    with torch.no_grad():
        first, expected = placed(x), model(x)
        placed(torch.randn(4, 64))
    stages = len(placed.plan.stages)
    say(f"{stages} stages, differ by {0 if first is None else difference(first, expected):.1e}")


def forward_by_1f1b() -> None:
    """One microbatch, fewer than stages, without a backward pass."""
    model, x = chain(64), torch.randn(4, 64)
    nbytes = sum(p.nbytes for p in model.parameters())
    placed: Any = graphplan.partition(
        model, machines=[{"cpu": nbytes * 3 // 4 + 8192}] * 2, args=(x,), network=QUICK, time_limit=0.3,
        schedule="1f1b", return_outputs="all",
    )  # fmt: skip
    with torch.no_grad():
        say(f"{len(placed.plan.stages)} stages, differ by {difference(placed(x), model(x)):.1e}")


def results_memory() -> None:
    """The most bytes of a rank in a forward pass whose results are large, and its plan's peak."""
    from graphplan.ir.liveness import LiveBytes

    layers = [torch.nn.Linear(128, 128) for _ in range(5)]
    model, x = torch.nn.Sequential(*layers, torch.nn.Linear(128, 4096)).eval(), torch.randn(256, 128)
    for results in (True, "all"):
        placed = divided(model, {"input": x}, 8, machines=[{"cpu": "16MiB"}] * 2, return_outputs=results)
        with torch.no_grad():
            placed(x)
            with LiveBytes([x, *placed.parameters()], in_cpu_memory) as watch:
                placed(x)
        held = watch.live.peak + sum(parameter.nbytes for parameter in placed.parameters())
        planned = placed.plan.peak_bytes[dist.get_rank()]["cpu"]
        say(f"{len(placed.plan.stages)} stages, peak {held} of {planned}")


def sizes_memory() -> None:
    """Bytes of tensors in the process after calls of one size, and after calls of many."""
    placed, held = divided(chain(64), {"input": torch.randn(8, 100, 64)}, 4), []
    with torch.no_grad():
        for length in range(101, 108):
            placed(input=torch.randn(8, length, 64))
            held.append(tensor_bytes())
    say(f"{len(placed.plan.stages)} stages, grown by {held[-1] - held[1]}")


def scaled_loss() -> None:
    """A step with an overflow on rank 0, and one without: whether each rank took them, and its scale."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    x = torch.randn(4, 8)
    placed = divided(chain().train(), {"input": x}, 2, train=True, schedule="1f1b")
    optimizer = torch.optim.SGD(placed.stage.parameters(), lr=1.0)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for overflows in (True, False):
        placed.train_step(lambda found, wanted: scaler.scale((found - wanted).square().mean()), x, x)
        if overflows and dist.get_rank() == 0:
            next(placed.parameters()).grad[0] = torch.inf
        before = next(placed.parameters()).clone()
        scaler.unscale_(optimizer)
        finite = bool(placed.clip_grad_norm_(1.0).isfinite())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = not torch.equal(before, next(placed.parameters()))
        say(f"finite {finite}, changed {changed}, scale {scaler.get_scale()}")


class Dropouts(torch.nn.Module):
    """Returns its result and the dropout mask of each layer, drawn ``apart``, without gradients, or not."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        masks = []
        for layer in self.layers:
            x = layer(x)
            with torch.set_grad_enabled(not self.apart and torch.is_grad_enabled()):
                masks.append(torch.nn.functional.dropout(torch.ones_like(x), 0.5, self.training))
            x = x * masks[-1]
        return x, *masks


def dropout() -> None:
    """Dropout masks of all layers in two calls, which are the same on both ranks, and again by seed."""
    x = torch.ones(8, 64)
    for apart in (False, True):
        placed, found = divided(Dropouts(apart).train(), {"x": x}, 2, grad=True), []
        for _ in range(2):
            torch.manual_seed(5)
            found.append([*placed(x)[1:], *placed(x)[1:]])
        masks = found[0]
        pairs = itertools.combinations(range(len(masks)), 2)
        equal = [pair for pair in pairs if torch.equal(*(masks[i] for i in pair))]
        states = [torch.empty_like(torch.get_rng_state()) for _ in range(2)]
        dist.all_gather(states, torch.get_rng_state())
        repeated, same = all(map(torch.equal, *found)), torch.equal(*states)
        say(f"{len(placed.plan.stages)} stages, equal {equal}, repeated {repeated}, states {same}")


def slow_setup() -> None:
    """Rank 0 plans longer than the timeout of the group; then it does not answer in time."""
    with with_timeout(cpu_group(), datetime.timedelta(seconds=1)):
        on_all("planning by rank 0", lambda: time.sleep(0 if dist.get_rank() else 3))
        say("planned")
        if dist.get_rank() == 0:
            time.sleep(5)
        try:
            broadcast_from_last(torch.zeros(1), 0, "the next token")
        except graphplan.ClusterError as error:
            say(f"ClusterError: {error}")
    sys.exit()


def no_cpu_backend() -> None:
    """A forward pass and a training step with a default group for tensors on GPUs alone."""
    model, x = chain(), torch.ones(4, 8)
    placed = divided(model, {"input": x}, 2, grad=True)
    say(f"{len(placed.plan.stages)} stages, differ by {difference(placed(x), model(x)):.1e}")
    if stages_go_backward():
        placed.train_step(torch.nn.functional.mse_loss, torch.zeros(4, 8), x)
        say(f"norm {bool(placed.clip_grad_norm_(1.0) > 0)}")
    sys.exit()


class Tokens(torch.nn.Module):
    """Returns its input, and scores."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 50)]
        self.layers = torch.nn.Sequential(torch.nn.Embedding(50, 16), *layers)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ids, self.layers(ids)


def token_loss() -> None:
    """The gradient of the mean over all tokens, whose number differs between microbatches, in two batches."""
    model = Tokens().train()
    eager, batches = copy.deepcopy(model), [torch.randint(0, 50, (8, 12)) for _ in range(2)]
    masked = [torch.where(torch.arange(12) <= 2 * torch.arange(8)[:, None], ids, -100) for ids in batches]
    placed = divided(model, {"ids": batches[0]}, 4, train=True, schedule="1f1b")
    for ids, labels in zip(batches, masked, strict=True):
        count = int((labels >= 0).sum())

        def loss(result: Any, target: Any, count: int = count) -> torch.Tensor:
            assert torch.equal(result[0][target >= 0], target[target >= 0])
            scores, labels = result[1].flatten(0, 1), target.flatten()
            return torch.nn.functional.cross_entropy(scores, labels, reduction="sum") / count

        loss(eager(ids), labels).backward()
        placed.train_step(loss, labels, ids=ids, loss_reduction="sum")
    own = dict(placed.stage.named_parameters())
    worst = difference([p.grad for p in own.values()], grads_of(eager, own))
    say(f"{len(placed.plan.stages)} stages, differ by {worst:.1e}")
    try:
        placed.train_step(loss, labels, ids=ids, loss_reduction="max")
    except graphplan.InputError as error:
        say(str(error))


def in_cpu_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def tensor_bytes() -> int:
    """Bytes of all tensors in CPU memory that Python can reach."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu"]
    storages = [one.untyped_storage() for one in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


CASES: dict[str, Callable[..., None]] = {
    "architectures": architectures,
    "closed": closed,
    "differs": differs,
    "dropout": dropout,
    "fault": fault,
    "forward_by_1f1b": forward_by_1f1b,
    "generation": generation,
    "interleaved": interleaved,
    "kept_results": kept_results,
    "no_batches": no_batches,
    "no_cpu_backend": no_cpu_backend,
    "no_stage": no_stage,
    "constants": constants,
    "interleaved_more": interleaved_more,
    "memory": memory,
    "plain": plain,
    "planned": planned_training,
    "profile": profile,
    "results_memory": results_memory,
    "sizes_memory": sizes_memory,
    "scaled_loss": scaled_loss,
    "slow_setup": slow_setup,
    "steps": steps,
    "stopped": stopped,
    "tied": tied,
    "token_loss": token_loss,
    "training": training,
    "values": values,
    "weights": weights,
}


def main() -> None:
    torch.set_num_threads(1)
    cases = [list(part) for named, part in itertools.groupby(sys.argv[1:], "--".__ne__) if named]
    seconds = 15 if cases[0][0] == "fault" else SECONDS
    backend = "cuda:gloo" if cases[0][0] == "no_cpu_backend" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))
    for name, *arguments in cases:
        say(f"-- {name}")
        torch.manual_seed(0)
        CASES[name](*arguments)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
