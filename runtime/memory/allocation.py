"""Memory that a plan has counted: asked for before the first call, and what is said where it is lacking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from graphplan.errors import GraphplanError
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import readable_bytes


@contextmanager
def allocating(device: torch.device, what: str) -> Iterator[None]:
    """A block that allocates ``what`` on a device.

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
    """Let the allocator of each accelerator reserve what the largest of these plans needs for activations.

    A caching allocator asks the driver for memory piece by piece during the first calls, which takes long
    and leaves gaps. One block of all that is needed is asked for here and given back to the cache.

    Raises:
        GraphplanError: the device has less than what the plan may use.
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
