"""The memory of activations, asked for before the first call needs it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from graphplan.errors import readable_bytes
from graphplan.ir.plan_data import PlanData
from graphplan.runtime.memory.allocation import allocating

__all__ = ["warm_activations"]


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
