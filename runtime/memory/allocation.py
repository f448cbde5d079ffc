"""Memory that a plan has counted: where a device lacks it all the same, something else is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphplan.errors import GraphplanError

__all__ = ["allocating"]


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
            f"{device} has no room for {what}, though the budget allows it: something else is on the device. "
            f"{str(error).splitlines()[0]}"
        ) from error
