"""Send weights that only rank 0 has to the ranks whose stages read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from graphplan.errors import InputError
from graphplan.runtime.distributed.agreement import cpu_group, gather_texts, waiting_for


def ranks_without_data(weights: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the ranks on which a weight is on the meta device.

    Raises:
        InputError: rank 0 is one of them, so that no rank has the data.
    """
    empty = [name for name, tensor in weights.items() if tensor.device.type == "meta"]
    without_data = [rank for rank, name in enumerate(gather_texts("".join(empty[:1]), "the weights")) if name]
    if without_data and without_data[0] == 0:
        raise InputError(
            "the model has no data on rank 0: its weights are on the meta device. Load it there, or give "
            "checkpoint=, from which each rank reads its own"
        )
    return without_data


def send_weights(
    weights: Mapping[str, torch.Tensor], names_by_rank: Mapping[int, Sequence[str]]
) -> dict[str, torch.Tensor]:
    """Send rank 0's weights to the other ranks; return those that this rank received.

    Args:
        weights: the model's weights on this rank, by first name; on the meta device if it receives them.
        names_by_rank: rank -> names of the weights that it receives.

    Raises:
        ClusterError: the other side does not answer within the group's timeout.
    """
    own_rank, group, received = dist.get_rank(), cpu_group(), dict[str, torch.Tensor]()
    for rank, names in names_by_rank.items():
        if own_rank not in (0, rank):
            continue
        for name in names:
            peer = rank if own_rank == 0 else 0
            with waiting_for(f"rank {peer} to pass on the weight {name!r}"):
                if own_rank == 0:
                    dist.send(weights[name].detach().cpu().contiguous(), rank, group)
                else:
                    received[name] = torch.empty(weights[name].shape, dtype=weights[name].dtype)
                    dist.recv(received[name], 0, group)
    return received
