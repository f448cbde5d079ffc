"""Allocate memory that a plan counts on before the first forward pass, and explain failures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from graphplan.errors import GraphplanError
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import readable_bytes


@contextmanager
def allocating(device: torch.device, what: str) -> Iterator[None]:
    """Context manager for the allocation of ``what`` on a device.

    Raises:
        GraphplanError: the device has no room for it.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GraphplanError(
            f"{device} has no room for {what}, though the budget allows it: other programs, or tensors "
            f"such as results of earlier calls, use the device. {str(error).splitlines()[0]}"
        ) from error


def warm_activations(plans: Iterable[PlanData]) -> None:
    """Let the caching allocator of each accelerator reserve the largest activation memory of these plans.

    Otherwise it requests memory from the driver piece by piece during the first forward passes, which is slow
    and causes fragmentation. One block of the whole size is allocated here and returned to the cache.

    Raises:
        GraphplanError: the device has less memory than the plan may use.
    """
    needed: dict[torch.device, int] = {}
    for plan in plans:
        for spec in plan.topology.devices:
            if spec.is_accelerator:
                peak = plan.peaks[spec.key]
                nbytes = peak.nbytes - peak.weights
                needed[spec.torch_device] = max(needed.get(spec.torch_device, 0), nbytes)
    for device, nbytes in needed.items():
        if nbytes > 0:
            with allocating(device, f"the {readable_bytes(nbytes)} of activations"):
                torch.empty(nbytes, dtype=torch.uint8, device=device)
