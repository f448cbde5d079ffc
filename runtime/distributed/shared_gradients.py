"""Sum gradients of weights that several stages read over their ranks, so that the copies stay equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from graphplan._compat.torch import gradient_hooks
from graphplan.errors import InputError
from graphplan.runtime.distributed.agreement import cpu_group, group_of, waiting_for

_HOOKED = (
    "{!r} is read by several stages, and its hook of register_post_accumulate_grad_hook would see only a "
    "part of its gradient: use the gradient after train_step(), which sums the parts"
)


class SharedGradients:
    """The gradients of shared parameters; all ranks construct this together.

    Args:
        readers: name of a parameter that several stages read -> their ranks.
    """

    def __init__(self, readers: Mapping[str, tuple[int, ...]]) -> None:
        groups = {ranks: group_of(ranks) for ranks in dict.fromkeys(readers.values())}
        own_rank = dist.get_rank()
        self.groups = {name: groups[ranks] for name, ranks in readers.items() if own_rank in ranks}
        self.counted_elsewhere = {name for name, ranks in readers.items() if own_rank in ranks[1:]}

    @contextmanager
    def summed(self, stage: nn.Module) -> Iterator[None]:
        """Context manager that sums the gradients computed inside over the ranks, then adds the earlier ones.

        Raises:
            InputError: a hook would see a gradient before it is summed.
            ClusterError: another rank does not answer within the group's timeout.
        """
        shared = {name: stage.get_parameter(name) for name in self.groups}
        shared = {name: parameter for name, parameter in shared.items() if parameter.requires_grad}
        for name, parameter in shared.items():
            if gradient_hooks(parameter)[1]:
                raise InputError(_HOOKED.format(name))
        earlier = {name: parameter.grad for name, parameter in shared.items()}
        for parameter in shared.values():
            parameter.grad = None
        sums: dict[str, torch.Tensor] = {}
        try:
            yield
            for name, parameter in shared.items():
                count = torch.tensor(parameter.grad is not None, dtype=torch.int64)
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                with waiting_for(f"the gradient of {name!r} from the other ranks that read it"):
                    dist.all_reduce(count, group=self.groups[name])
                    if count:
                        sums[name] = gradient.detach().cpu()
                        dist.all_reduce(sums[name], group=self.groups[name])
        finally:
            for name, parameter in shared.items():
                parameter.grad = earlier[name]
        for name, tensor in sums.items():
            total, old = tensor.to(shared[name].device), shared[name].grad
            shared[name].grad = total if old is None else old.add_(total)

    def norm(self, stage: nn.Module) -> torch.Tensor:
        """Return the norm of the gradients of all ranks, each weight once; every rank calls this.

        Raises:
            ClusterError: another rank does not answer within the group's timeout.
        """
        total = torch.zeros((), dtype=torch.float64)
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None and name not in self.counted_elsewhere:
                total += torch.linalg.vector_norm(parameter.grad).cpu().double() ** 2
        with waiting_for("the norm of the gradients of the other ranks"):
            dist.all_reduce(total, group=cpu_group())
        return total.sqrt().float()
