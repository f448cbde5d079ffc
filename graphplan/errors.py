"""Exceptions of graphplan, one class for each kind of problem that a caller can fix, and its warning."""

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
    """Base class of every error that graphplan raises on purpose."""


class GraphplanWarning(UserWarning):
    """Warning of something unexpected, such as a fallback. It points at a line of the caller's code."""


class BudgetError(GraphplanError, ValueError):
    """``max_memory`` or ``reserve`` cannot be read, is empty or negative, or leaves no memory."""


class DeviceError(GraphplanError, ValueError):
    """A device key is invalid, or names a device that this machine does not have."""


class InputError(GraphplanError, ValueError):
    """Inputs do not fit the model, or an argument of graphplan is invalid."""


class LimitError(InputError):
    """Inputs are larger than ``max_batch`` or ``max_length``, for which memory was planned."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged or changed, or does not fit the model."""


class CaptureError(GraphplanError):
    """The model could not be traced into a graph."""


class NoGraphError(CaptureError):
    """The forward pass cannot be traced; ``partition`` runs it module by module unless ``strict=True``."""


class PlanError(GraphplanError, ValueError):
    """A plan or placed model does not support the request.

    Examples: a name that is not in the graph, a plan of another model, moving or converting a placed model,
    JSON text that holds no plan.
    """


class VerificationError(GraphplanError):
    """A graph, schedule or lowered module breaks one of its invariants."""


class ClusterError(GraphplanError, RuntimeError):
    """Ranks were given different arguments, or a rank failed or did not answer in time."""


class SimulatedOutOfMemoryError(GraphplanError, RuntimeError):
    """An allocation exceeds the capacity of a simulated device."""


class InfeasibleError(GraphplanError):
    """No placement was found within the budgets.

    Attributes:
        needed: device key -> bytes: budgets that suffice. They are near the smallest if all budgets grow in
            proportion; one device may need less if others have more. With ``machines=``, keys are pairs of
            the machine's index and the device key.
        available: device key -> budget in bytes, as ``max_memory`` gives it.
        operation: name of the operation at which the tightest device needs the most memory, or None.
        device: key of that tightest device, or None.
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
            hint = meant_unit(f"max_memory[{key!r}]", nbytes)
            message += f". {hint}" if hint else ""
        super().__init__(message)
        self.operation = operation
        self.device = device
