"""Weights that only rank 0 has, sent to the ranks whose stages read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from graphplan.errors import InputError
from graphplan.runtime.distributed.agreement import gather_texts, waiting_for


def ranks_without_data(weights: Mapping[str, torch.Tensor]) -> list[int]:
    """The ranks on which a weight is on the meta device.

    Raises:
        InputError: rank 0 is one of them, so that nobody has the data.
    """
    empty = [name for name, tensor in weights.items() if tensor.device.type == "meta"]
    found = [rank for rank, name in enumerate(gather_texts("".join(empty[:1]), "what they have")) if name]
    if found and found[0] == 0:
        raise InputError(
            "the model has no data on rank 0: its weights are on the meta device. Load it there, or give "
            "checkpoint=, from which each rank reads its own"
        )
    return found


def send_weights(
    weights: Mapping[str, torch.Tensor], wanted: Mapping[int, Sequence[str]]
) -> dict[str, torch.Tensor]:
    """What this rank gets of rank 0's weights.

    Args:
        weights: of the model here, by first name; on the meta device where this rank gets them.
        wanted: rank -> names of those that it is sent.

    Raises:
        ClusterError: the other side does not answer within the group's timeout.
    """
    me, found = dist.get_rank(), dict[str, torch.Tensor]()
    for rank, names in wanted.items():
        for name in names if me in (0, rank) else ():
            peer = rank if me == 0 else 0
            with waiting_for(f"rank {peer} to pass on the weight {name!r}"):
                if me == 0:
                    dist.send(weights[name].detach().cpu().contiguous(), rank)
                else:
                    found[name] = torch.empty(weights[name].shape, dtype=weights[name].dtype)
                    dist.recv(found[name], 0)
    return found
