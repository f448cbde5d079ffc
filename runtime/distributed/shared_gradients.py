"""Gradients of weights that several stages read: summed over their ranks, so that the copies stay equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from graphplan._compat.torch import group_of
from graphplan.errors import ClusterError, first_line


class SharedGradients:
    """The gradients of shared parameters; every rank makes this at once.

    Args:
        readers: name of a parameter that several stages read -> their ranks.
    """

    def __init__(self, readers: Mapping[str, tuple[int, ...]]) -> None:
        groups = {ranks: group_of(ranks) for ranks in dict.fromkeys(readers.values())}
        here = dist.get_rank()
        self.groups = {name: groups[ranks] for name, ranks in readers.items() if here in ranks}
        self.counted_elsewhere = {name for name, ranks in readers.items() if here in ranks[1:]}

    @contextmanager
    def summed(self, stage: nn.Module) -> Iterator[None]:
        """Sum over the ranks what is added to the gradients inside; what was there before stays.

        Raises:
            ClusterError: another rank does not answer within the group's timeout.
        """
        own = {name: stage.get_parameter(name) for name in self.groups}
        own = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
        before = {name: parameter.grad for name, parameter in own.items()}
        for parameter in own.values():
            parameter.grad = None
        yield
        for name, parameter in own.items():
            added = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total, old = added.detach().cpu(), before[name]
            _all_reduce(total, self.groups[name], f"the gradient of {name!r} of others that read it")
            total = total.to(parameter.device)
            parameter.grad = total if old is None else old.add_(total)

    def norm(self, stage: nn.Module | None) -> torch.Tensor:
        """The norm of the gradients of all ranks, each weight once; every rank calls this.

        Raises:
            ClusterError: another rank does not answer within the group's timeout.
        """
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in () if stage is None else stage.named_parameters():
            if parameter.grad is not None and name not in self.counted_elsewhere:
                total += torch.linalg.vector_norm(parameter.grad).cpu().double() ** 2
        _all_reduce(total, None, "the norm of the gradients of the others")
        return total.sqrt().float()


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None, what: str) -> None:
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise ClusterError(f"rank {dist.get_rank()} waited for {what}: {first_line(error)}") from error
