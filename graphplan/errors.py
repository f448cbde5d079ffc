"""The exceptions of graphplan, one class for each kind of problem that a caller can fix, and its warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphplan.message_text import meant_unit

__all__ = [
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "DeviceError",
    "GraphplanError",
    "GraphplanWarning",
    "InfeasibleError",
    "InputError",
    "LimitError",
    "NoGraphError",
    "PlanError",
    "SimulatedOutOfMemoryError",
    "VerificationError",
]


class GraphplanError(Exception):
    """Root of every error that graphplan raises on purpose."""


class GraphplanWarning(UserWarning):
    """Something differs from what the caller may expect: a fallback, say. Points at the caller's line."""


class BudgetError(GraphplanError, ValueError):
    """``max_memory`` or ``reserve`` cannot be read, is empty or negative, or leaves nothing."""


class DeviceError(GraphplanError, ValueError):
    """A device key is invalid, or names a device that this machine does not have."""


class InputError(GraphplanError, ValueError):
    """Inputs do not fit the model, or an argument of graphplan is not what it should be."""


class LimitError(InputError):
    """Inputs are larger than ``max_batch`` or ``max_length``, for which memory was planned."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged or changed, or does not fit the model."""


class CaptureError(GraphplanError):
    """The model could not be traced into a graph."""


class NoGraphError(CaptureError):
    """The forward pass cannot be traced; ``partition`` falls back to hooks unless ``strict=True``."""


class PlanError(GraphplanError, ValueError):
    """A plan or a placed model was asked for what it does not have or do.

    A name that is not in the graph, a plan of another model, a placed model that is moved or converted, a
    JSON text that is no plan.
    """


class VerificationError(GraphplanError):
    """A graph, schedule or lowered module breaks one of its invariants."""


class ClusterError(GraphplanError, RuntimeError):
    """Machines differ in what they were given, or one of them failed, or did not answer in time."""


class SimulatedOutOfMemoryError(GraphplanError, RuntimeError):
    """A simulated device was asked for more bytes than its capacity."""


class InfeasibleError(GraphplanError):
    """No placement was found within the budgets.

    Attributes:
        needed: device key -> bytes: budgets that do. Near the smallest when all grow in the proportion in
            which they were given; one device may do with less where others have more. With ``machines=``,
            keys are pairs of the machine's index and the device key.
        available: device key -> bytes that ``max_memory`` allowed.
        operation: the operation at which the tightest device reaches its need, or None.
        device: the key of that tightest device, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        needed: Mapping[Any, int] | None = None,
        available: Mapping[int | str, int] | None = None,
        operation: str | None = None,
        device: int | str | None = None,
    ) -> None:
        self.needed = dict(needed or {})
        self.available = dict(available or {})
        for key, nbytes in self.available.items():
            meant = meant_unit(f"max_memory[{key!r}]", nbytes)
            message += f". {meant}" if meant else ""
        super().__init__(message)
        self.operation = operation
        self.device = device
