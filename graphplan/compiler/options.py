"""What a caller settles once for all calls of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphplan.capture.size_limits import SizeLimits
from graphplan.errors import InputError
from graphplan.ir.constraints import Constraints


@dataclass(frozen=True, slots=True)
class Options:
    """What does not change from call to call; as in :func:`graphplan.partition`."""

    dynamic_shapes: Any = None
    grad: bool = False
    return_outputs: bool = True
    constraints: Constraints = field(default_factory=Constraints)
    size_limits: SizeLimits = field(default_factory=SizeLimits)
    compile: Mapping[str, Any] | None = None
    time_limit: float | None = None

    def __post_init__(self) -> None:
        limit = self.time_limit
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (number and limit > 0):
            raise InputError(f"time_limit must be a positive number of seconds or None, not {limit!r}")
