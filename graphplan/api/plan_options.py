"""The keyword arguments that ``plan`` and ``partition`` share: their types, defaults and checks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch

from graphplan.capture.sizes.size_limits import SizeLimits
from graphplan.devices.max_memory import MaxMemory, Reserve, read_max_memory
from graphplan.devices.speeds import GivenSpeeds, with_speeds
from graphplan.devices.topology import DeviceKey, Link, Topology
from graphplan.errors import InputError
from graphplan.ir.cluster.cluster_plan_data import Objective
from graphplan.ir.cluster.flight import PipelineSchedule
from graphplan.message_text import meant_unit
from graphplan.passes.training.optimizer_memory import Optimizer
from graphplan.warnings import warn

ExampleCall = (
    Mapping[str, Any] | tuple[Sequence[Any], Mapping[str, Any]] | tuple[str, Sequence[Any], Mapping[str, Any]]
)
ExampleRun = Callable[[Any], Any]
"""Code that makes calls of a model."""

Links = Mapping[tuple[DeviceKey, DeviceKey], Link]
_GOES_WITH = {
    "machines=": ("microbatches", "schedule", "stages_per_machine", "objective", "network"),
    "train=True": (
        *("optimizer", "optimizer_bytes_per_element", "train_outputs"),
        *("recompute", "offload_activations", "accumulate_gradients"),
    ),
    "calls=": ("weights",),
}
_OF_PARTITION = ("check", "checkpoint", "compile", "grad", "plan", "strict", "warm")
_OF_ONE_MACHINE = ("pin", "together", "balance", "calls", "weights", "train_outputs")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class PlanKeywords(TypedDict, total=False):
    """Types of the keyword arguments that :func:`graphplan.plan` and :func:`graphplan.partition` share."""

    dynamic_shapes: Any
    links: Links | None
    pin: Mapping[str, DeviceKey | torch.device] | None
    together: Sequence[str | Sequence[str]]
    offload: bool
    cpu_compute: bool
    balance: bool
    reserve: Reserve
    devices: GivenSpeeds | None
    calls: Sequence[ExampleCall] | ExampleRun | None
    weights: Sequence[float] | None
    max_batch: int | None
    max_length: int | None
    time_limit: float | None
    capture_cache: str | Path | None
    microbatches: int
    schedule: PipelineSchedule
    stages_per_machine: int | None
    objective: Objective
    network: Link | None
    train: bool
    optimizer: Optimizer | None
    optimizer_bytes_per_element: float | None
    train_outputs: str | Sequence[str] | None
    recompute: bool
    offload_activations: bool
    accumulate_gradients: bool


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Keyword arguments of :func:`graphplan.plan`, which says what each is; as given.

    Its text is the same in all processes that are given the same.
    """

    dynamic_shapes: Any = None
    links: Links | None = None
    pin: Mapping[str, DeviceKey | torch.device] | None = None
    together: Sequence[str | Sequence[str]] = ()
    offload: bool = True
    cpu_compute: bool = True
    balance: bool = False
    reserve: Reserve = 0
    devices: GivenSpeeds | None = None
    calls: Sequence[ExampleCall] | ExampleRun | None = field(default=None, repr=False)
    weights: Sequence[float] | None = None
    max_batch: int | None = None
    max_length: int | None = None
    time_limit: float | None = None
    capture_cache: str | Path | None = field(default=None, repr=False)
    microbatches: int = 1
    schedule: PipelineSchedule = "gpipe"
    stages_per_machine: int | None = None
    objective: Objective = "latency"
    network: Link | None = None
    train: bool = False
    optimizer: Optimizer | None = field(default=None, repr=False)
    optimizer_bytes_per_element: float | None = None
    train_outputs: str | Sequence[str] | None = None
    recompute: bool = True
    offload_activations: bool = True
    accumulate_gradients: bool = True

    def require_flags(self) -> None:
        """Raise InputError for a flag that is none."""
        flags = (one.name for one in fields(self) if isinstance(one.default, bool))
        require_flags(**{name: getattr(self, name) for name in flags})

    def require_companions(self, *, machines: bool) -> None:
        """Raise InputError for an argument that is given without the one that it goes with."""
        given = {"machines=": machines, "train=True": self.train, "calls=": self.calls is not None}
        usual = PlanOptions()
        for needed, names in _GOES_WITH.items():
            for name in names:
                value, default = getattr(self, name), getattr(usual, name)
                same = value is default or (type(value) is type(default) and value == default)
                if not given[needed] and not same:
                    raise InputError(f"{name}= goes with {needed}: give both")

    def topology(self, max_memory: MaxMemory | None, *, grad: bool = False) -> Topology:
        """The devices, as fast as the caller says; BudgetError or DeviceError where they cannot be read."""
        grad = grad or self.train
        topology = read_max_memory(max_memory, self.links, self.reserve, grad=grad)
        for key, nbytes in topology.budgets.items():
            if meant := meant_unit(f"max_memory[{key!r}]", nbytes):
                warn(meant)
        return with_speeds(topology, self.devices)

    @property
    def size_limits(self) -> SizeLimits:
        """``max_batch`` and ``max_length``; InputError where they are no such sizes."""
        return SizeLimits(self.max_batch, self.max_length)

    def searches(self) -> bool:
        """Whether anything is asked of a search for a plan."""
        rules = self.pin or self.together or self.balance or not (self.offload and self.cpu_compute)
        return bool(rules or self.links or self.devices or self.time_limit)


def require_flags(**flags: object) -> None:
    """Raise InputError for a flag that is none."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name} must be True or False, not {flag!r}")


def shows_options(function: _Function) -> _Function:
    """The function; its signature has the fields of :class:`PlanOptions` in place of ``**options``."""
    own = inspect.signature(function)
    named = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    options = inspect.signature(PlanOptions).parameters.values()
    shared = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in options]
    function.__signature__ = own.replace(parameters=[*named, *shared])  # type: ignore[attr-defined]
    return function


def read_options(function: Callable[..., Any], given: Mapping[str, Any]) -> PlanOptions:
    """The options of a call of a function that :func:`shows_options`; TypeError as :func:`require_known`."""
    require_known(function, given, function.__name__)
    return PlanOptions(**given)


def require_known(function: Callable[..., Any], given: Iterable[str], called: str) -> None:
    """Raise TypeError for an argument that a function does not take; it suggests a similar one.

    Args:
        function: that :func:`shows_options`.
        given: names of arguments.
        called: the function that the caller has called.
    """
    known = inspect.signature(function).parameters
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            hint = "; it is an argument of partition" if name in _OF_PARTITION else hint
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{hint}")


def refuse_with_machines(asked: PlanOptions, **given: object) -> None:
    """Raise InputError for an argument that several machines do not take."""
    refused = {name: getattr(asked, name) for name in _OF_ONE_MACHINE}
    refused |= {"pin": asked.pin or None, "together": asked.together or None}
    refused["accumulate_gradients"] = not asked.accumulate_gradients  # those of microbatches add up
    for name, value in {**refused, **given}.items():
        if value is not None and value is not False:
            raise InputError(f"machines= does not go with {name}=: leave one of them out")
