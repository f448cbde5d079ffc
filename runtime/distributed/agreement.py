"""Messages between processes other than activations: texts, checks of equality, failures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from graphplan._compat.torch import has_cpu_backend, new_cpu_group, with_timeout
from graphplan.errors import ClusterError, InfeasibleError
from graphplan.message_text import first_line

Made = TypeVar("Made")
_SETUP_TIMEOUT = timedelta(hours=1)
"""How long ranks wait while another one traces, plans or places; those that end are noticed earlier."""
_cpu_groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []  # the default group, and its CPU group


def require_group(machines: int) -> None:
    """Join the process group, if torchrun started this process and it has not joined yet.

    Raises:
        ClusterError: there is no group, the number of processes is not that of machines, or a rank does not
            answer.
    """
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            raise ClusterError(
                "machines= runs under torchrun, one process for each machine: torchrun --nproc-per-node "
                f"{machines} script.py, or call torch.distributed.init_process_group first"
            )
        dist.init_process_group("gloo")
    if dist.get_world_size() != machines:
        raise ClusterError(
            f"there are {dist.get_world_size()} processes, but {machines} machines: give machines one "
            "max_memory for each rank"
        )
    with waiting_for("a process group of all ranks for tensors in CPU memory"):
        cpu_group()


def cpu_group() -> dist.ProcessGroup:
    """Return the group of all ranks for tensors in CPU memory: the default group, if it has such a backend.

    All ranks call this together the first time.
    """
    world = dist.group.WORLD
    assert world is not None
    if has_cpu_backend(world):
        return world
    if not _cpu_groups or _cpu_groups[0][0] is not world:
        _cpu_groups[:] = [(world, new_cpu_group(range(dist.get_world_size())))]
    return _cpu_groups[0][1]


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Return a process group of some ranks; None if it is the default one. Every rank must call this."""
    if list(ranks) != list(range(dist.get_world_size())):
        return new_cpu_group(ranks)
    return None if cpu_group() is dist.group.WORLD else cpu_group()


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Context manager that raises ClusterError, with ``what``, if another rank does not answer in time."""
    try:
        yield
    except RuntimeError as error:
        raise ClusterError(f"rank {dist.get_rank()} waited for {what}: {first_line(error)}") from error


def gather_texts(text: str, what: str) -> list[str]:
    """Return the text of every rank, by rank; ``what`` names it in an error."""
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    with waiting_for(f"{what}, and a rank did not answer"):
        dist.all_gather(lengths, torch.tensor([len(encoded)]), cpu_group())
        max_length = max(1, *(int(length) for length in lengths))
        padded = torch.zeros(max_length, dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        gathered = [torch.zeros(max_length, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(gathered, padded, cpu_group())
    return [_text(data[: int(length)]) for data, length in zip(gathered, lengths, strict=True)]


def broadcast_text(text: str, what: str) -> str:
    """Return the text of rank 0, on all ranks; ``what`` names it in an error."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(data)])
    with waiting_for(f"{what}, and a rank did not answer"):
        dist.broadcast(length, 0, cpu_group())
        data = data if dist.get_rank() == 0 else torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, cpu_group())
    return _text(data)


def broadcast_from_last(tensor: torch.Tensor, last_rank: int, what: str) -> None:
    """Copy a CPU tensor from the rank of the last stage to all; ``what`` names it in an error."""
    with waiting_for(f"{what} of rank {last_rank}, which has the last stage"):
        dist.broadcast(tensor, last_rank, cpu_group())


def require_same(facts: Mapping[str, str]) -> None:
    """Raise ClusterError, on all ranks, if these facts differ between ranks.

    Args:
        facts: name of a fact -> its text; digests of the texts are compared.
    """
    digests = [f"{what}={hashlib.sha256(text.encode()).hexdigest()[:16]}" for what, text in facts.items()]
    gathered = [line.split("\n") for line in gather_texts("\n".join(digests), "the arguments")]
    for index, what in enumerate(facts):
        ranks_by_digest: dict[str, list[int]] = {}
        for rank, lines in enumerate(gathered):
            ranks_by_digest.setdefault(lines[index], []).append(rank)
        if len(ranks_by_digest) > 1:
            groups = " and ".join(_ranks(ranks) for ranks in ranks_by_digest.values())
            raise ClusterError(f"{groups} differ in {what}")


def on_all(what: str, action: Callable[[], Made]) -> Made:
    """Run ``action`` on every rank; if it fails on one, raise on all.

    Raises:
        ClusterError: it failed on another rank.
        InfeasibleError: it failed on another rank with InfeasibleError.
        Exception: the exception of this rank itself, unchanged.
    """
    try:
        result = action()
    except Exception as error:  # of any type: the other ranks wait for this one's answer
        share_failures(what, error)
        raise
    share_failures(what, None)
    return result


def share_failures(what: str, failed: Exception | None) -> None:
    """Exchange with all ranks whether each has failed; raise if another did.

    Raises:
        ClusterError: another rank failed, and this one did not.
        InfeasibleError: the other rank failed with InfeasibleError.
    """
    with with_timeout(cpu_group(), _SETUP_TIMEOUT):
        texts = gather_texts("" if failed is None else first_line(failed, 2000), what)
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failures and failed is None:
        error_class = InfeasibleError if ": InfeasibleError:" in failures[0] else ClusterError
        raise error_class(f"{what} failed on {failures[0]}")


def _text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
