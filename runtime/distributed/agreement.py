"""What processes tell each other beside activations: texts, whether they agree, whether one failed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from graphplan.errors import ClusterError, InfeasibleError
from graphplan.message_text import first_line

Made = TypeVar("Made")


def require_group(machines: int) -> None:
    """Join the process group, if torchrun started this process and nobody has yet.

    Raises:
        ClusterError: there is no group, or not as many processes as machines.
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
            f"there are {dist.get_world_size()} processes and {machines} machines: give machines one "
            "max_memory for each rank"
        )


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """A block that waits for other ranks; ClusterError with ``what``, if one does not answer in time."""
    try:
        yield
    except RuntimeError as error:
        raise ClusterError(f"rank {dist.get_rank()} waited for {what}: {first_line(error)}") from error


def gather_texts(text: str, what: str) -> list[str]:
    """The text of every rank, by rank; ``what`` they are waited for, in an error."""
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    with waiting_for(f"{what} of all ranks, and one of them did not answer"):
        dist.all_gather(lengths, torch.tensor([len(own)]))
        most = max(1, *(int(length) for length in lengths))
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.zeros(most, dtype=torch.uint8) for _ in lengths]
        dist.all_gather(found, padded)
    return [_text(data[: int(length)]) for data, length in zip(found, lengths, strict=True)]


def broadcast_text(text: str, what: str) -> str:
    """The text of rank 0, on all; ``what`` it is, in an error."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(data)])
    with waiting_for(f"{what} of all ranks, and one of them did not answer"):
        dist.broadcast(length, 0)
        data = data if dist.get_rank() == 0 else torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0)
    return _text(data)


def broadcast_from_last(tensor: torch.Tensor, last: int, what: str) -> None:
    """Give all ranks a CPU tensor of the rank of the last stage; ``what`` it is, in an error."""
    with waiting_for(f"{what} of rank {last}, which has the last stage"):
        dist.broadcast(tensor, last)


def require_same(facts: Mapping[str, str]) -> None:
    """Raise ClusterError, on all ranks, where these facts differ from rank to rank.

    Args:
        facts: what -> its text, of which a digest is compared.
    """
    digests = [f"{what}={hashlib.sha256(text.encode()).hexdigest()[:16]}" for what, text in facts.items()]
    every = [line.split("\n") for line in gather_texts("\n".join(digests), "what they were given")]
    for index, what in enumerate(facts):
        of: dict[str, list[int]] = {}
        for rank, lines in enumerate(every):
            of.setdefault(lines[index], []).append(rank)
        if len(of) > 1:
            groups = " and ".join(_ranks(ranks) for ranks in of.values())
            raise ClusterError(f"{groups} differ in {what}")


def on_all(what: str, action: Callable[[], Made]) -> Made:
    """Do something on every rank; where it fails on one, raise on all.

    Raises:
        ClusterError: it failed on another rank.
        InfeasibleError: it failed there for want of memory.
        Exception: what this rank itself raised, unchanged.
    """
    try:
        made = action()
    except Exception as error:  # whatever it is, the others must hear of it
        tell_all(what, error)
        raise
    tell_all(what, None)
    return made


def tell_all(what: str, failed: Exception | None) -> None:
    """Tell all ranks whether this one failed, and hear of them; raise where another did.

    Raises:
        ClusterError: another rank failed, and this one did not.
        InfeasibleError: it failed for want of memory.
    """
    said = gather_texts("" if failed is None else first_line(failed, 2000), what)
    wrong = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
    if wrong and failed is None:
        kind = InfeasibleError if ": InfeasibleError:" in wrong[0] else ClusterError
        raise kind(f"{what} failed on {wrong[0]}")


def _text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
