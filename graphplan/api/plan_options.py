"""The keyword arguments that ``plan`` and ``partition`` share: their types, defaults and checks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from graphplan.ir.cluster.pipeline_order import PipelineSchedule
from graphplan.message_text import meant_unit
from graphplan.passes.training.optimizer_memory import Optimizer
from graphplan.warnings import warn

ExampleCall = (
    Mapping[str, Any] | tuple[Sequence[Any], Mapping[str, Any]] | tuple[str, Sequence[Any], Mapping[str, Any]]
)
ExampleRun = Callable[[Any], Any]
"""Function of a model that makes its example calls."""

Links = Mapping[tuple[DeviceKey, DeviceKey], Link]
_ONLY_WITH = {
    "machines=": ("microbatches", "schedule", "stages_per_machine", "objective", "network"),
    "train=True": (
        *("optimizer", "optimizer_bytes_per_element", "train_outputs"),
        *("recompute", "offload_activations", "accumulate_gradients"),
    ),
    "calls=": ("weights",),
}
_ONLY_IN_PARTITION = ("check", "checkpoint", "compile", "grad", "plan", "strict", "warm")
_ELSEWHERE = {  # arguments of accelerate and transformers
    "device_map": "give budgets as max_memory=, and a map of your own as pin=",
    "no_split_module_classes": "it is not needed; together= keeps modules on one device",
    "offload_folder": "give 'disk' a budget in max_memory=: weights stay in the files of the checkpoint",
    "torch_dtype": "graphplan.load takes dtype=",
    "config": "graphplan.load takes it",
    "attn_implementation": "give it to from_pretrained, of the model or of a config for graphplan.load",
    "quantization_config": "load the model with from_pretrained, and give it to graphplan.partition",
    "gguf_file": "load the model with from_pretrained, and give it to graphplan.partition",
    "revision": "download that revision, and give graphplan.load its folder",
}
_NOT_WITH_MACHINES = ("pin", "together", "balance", "calls", "weights", "train_outputs")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class PlanKeywords(TypedDict, total=False):
    """Types of the keyword arguments that :func:`graphplan.plan` and :func:`graphplan.partition` share.

    :func:`graphplan.plan` documents them.
    """

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
    schedule: PipelineSchedule | None
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
    """The keyword arguments of :func:`graphplan.plan`, which documents them, as the caller gives them.

    The repr is the same in all processes that have the same arguments.
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
    schedule: PipelineSchedule | None = None
    stages_per_machine: int | None = None
    objective: Objective = "throughput"
    network: Link | None = None
    train: bool = False
    optimizer: Optimizer | None = field(default=None, repr=False)
    optimizer_bytes_per_element: float | None = None
    train_outputs: str | Sequence[str] | None = None
    recompute: bool = True
    offload_activations: bool = True
    accumulate_gradients: bool = True

    def require_flags(self) -> None:
        """Raise InputError for a flag that is not a bool."""
        flags = (option.name for option in fields(self) if isinstance(option.default, bool))
        require_flags(**{name: getattr(self, name) for name in flags})

    def require_companions(self, *, machines: bool) -> None:
        """Raise InputError for an argument that is given without the one that it requires."""
        present = {"machines=": machines, "train=True": self.train, "calls=": self.calls is not None}
        defaults = PlanOptions()
        for needed, names in _ONLY_WITH.items():
            for name in names:
                value, default = getattr(self, name), getattr(defaults, name)
                is_default = value is default or (type(value) is type(default) and value == default)
                if not present[needed] and not is_default:
                    raise InputError(f"{name}= goes with {needed}: give both")

    def topology(self, max_memory: MaxMemory | None, *, grad: bool = False) -> Topology:
        """Return the devices with the caller's speeds; raise BudgetError or DeviceError if one is invalid."""
        grad = grad or self.train
        topology = read_max_memory(max_memory, self.links, self.reserve, grad=grad)
        for key, nbytes in topology.budgets.items():
            if meant := meant_unit(f"max_memory[{key!r}]", nbytes):
                warn(meant)
        return with_speeds(topology, self.devices)

    @property
    def size_limits(self) -> SizeLimits:
        """``max_batch`` and ``max_length``; InputError is raised if one is invalid."""
        return SizeLimits(self.max_batch, self.max_length)

    def searches(self) -> bool:
        """Whether an option of the search for a plan is given."""
        rules = self.pin or self.together or self.balance or not (self.offload and self.cpu_compute)
        return bool(rules or self.links or self.devices or self.time_limit)


def require_flags(**flags: object) -> None:
    """Raise InputError for a flag that is not a bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name} must be True or False, not {flag!r}")


def shows_options(function: _Function) -> _Function:
    """Put the fields of :class:`PlanOptions` in place of ``**options`` in a function's signature."""
    signature = inspect.signature(function)
    named = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
    options = inspect.signature(PlanOptions).parameters.values()
    shared = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in options]
    function.__signature__ = signature.replace(parameters=[*named, *shared])  # type: ignore[attr-defined]
    return function


def read_options(function: Callable[..., Any], options: Mapping[str, Any]) -> PlanOptions:
    """Return the options that a function was called with; raise TypeError as :func:`require_known`."""
    require_known(inspect.signature(function).parameters, options, function.__name__)
    return PlanOptions(**options)


def require_known(known: Collection[str], names: Iterable[str], function_name: str) -> None:
    """Raise TypeError for an argument that a function does not take; the message says what to write.

    Args:
        known: the names that it takes.
        names: names of arguments.
        function_name: name of the function that the caller called.
    """
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else ""
            hint = hint or f"an input of the model goes into kwargs={{{name!r}: ...}}"
            hint = "it is an argument of partition" if name in _ONLY_IN_PARTITION else hint
            hint = _ELSEWHERE.get(name, hint)
            raise TypeError(f"{function_name}() got an unexpected keyword argument {name!r}; {hint}")


def refuse_with_machines(plan_options: PlanOptions, **arguments: object) -> None:
    """Raise InputError for an argument that ``machines=`` does not allow."""
    refused = {name: getattr(plan_options, name) for name in _NOT_WITH_MACHINES}
    refused |= {"pin": plan_options.pin or None, "together": plan_options.together or None}
    # gradients of microbatches accumulate
    refused |= {"accumulate_gradients": not plan_options.accumulate_gradients}
    for name, value in {**refused, **arguments}.items():
        if value is not None and value is not False:
            raise InputError(f"machines= does not go with {name}=: leave one of them out")
