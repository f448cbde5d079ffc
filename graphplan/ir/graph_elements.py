"""The elements of a graph: operations, the values between them, the weights that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WeightKind = Literal["parameter", "buffer", "constant", "part", "cache"]


@dataclass(frozen=True, slots=True)
class Value:
    """An output of an operation, or an input of the model.

    Attributes:
        name: unique among values and weights.
        nbytes: bytes of the storage that it allocates; 0 for a view, an alias and a scalar.
        copy_bytes: bytes that a copy to another device moves, and takes there (elements x size).
        alias_of: the value or weight whose storage it shares, or None.
        is_tensor: False for sizes and other host scalars, which every device can read.
        shape: sizes at the example inputs; empty where unknown.
        dtype: ``"float32"``, ``"int64"``, ...; empty where unknown.
        stays: whether it outlives the call: a tensor of a returned cache, one that is stored in an attribute,
            or the gradient of a parameter.
        gradient_of: the parameter whose gradient it is; it is moved to the parameter's device at once.
    """

    name: str
    nbytes: int = 0
    copy_bytes: int = 0
    alias_of: str | None = None
    is_tensor: bool = True
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stays: bool = False
    gradient_of: str = ""


def storage_root(values: Mapping[str, Value], name: str) -> str:
    """Return the value or weight whose storage ``name`` is a view of, itself included."""
    while (value := values.get(name)) is not None and value.alias_of is not None:
        name = value.alias_of
    return name


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer, constant, part of a sliced weight, or cache tensor.

    Attributes:
        name: its first name in the model; the name that operations use.
        nbytes: bytes of its storage.
        names: every name that it has: more than one when it is shared.
        kind: ``"parameter"``, ``"buffer"``, ``"constant"``, ``"part"``, or ``"cache"`` for a tensor
            of a cache that the caller passes in: it resides where it is used, before and after the call.
        persistent: whether it is in the ``state_dict``.
        mutated: whether forward writes to it (BatchNorm statistics); such a weight is never streamed.
        movable: False for cache tensors, wrappers and sparse tensors, which are never streamed either.
        shape: its sizes; empty where unknown.
        dtype: as in :class:`Value`.
        part_of: for a part, the weight whose rows it holds. That weight stays whole on the CPU and has
            ``nbytes`` of 0, since its parts have them; a part that resides elsewhere is a copy.
        start: for a part, its first row.
        beside: bytes of each further storage on its device in training: its gradient, its optimizer state.
        step_bytes: further bytes that the optimizer needs while it updates this parameter by itself.
        together_bytes: the same, if the optimizer updates all parameters of a device at once.
        step_traffic: bytes that the optimizer reads and writes to update it.
    """

    name: str
    nbytes: int
    names: tuple[str, ...] = ()
    kind: WeightKind = "parameter"
    persistent: bool = True
    mutated: bool = False
    movable: bool = True
    shape: tuple[int, ...] = ()
    dtype: str = ""
    part_of: str = ""
    start: int = 0
    beside: tuple[int, ...] = ()
    step_bytes: int = 0
    together_bytes: int = 0
    step_traffic: int = 0

    @property
    def streamable(self) -> bool:
        """Whether it may reside on another device than its readers."""
        return self.movable and not self.mutated

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes where it resides, with its gradient and optimizer state."""
        return self.nbytes + sum(self.beside)

    @property
    def is_own(self) -> bool:
        """Whether it belongs to the model: neither a constant of the trace nor the caller's cache tensor."""
        return self.kind not in ("constant", "cache")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the trace.

    Attributes:
        name: unique among operations.
        target: the function, for display (``"linear"``).
        inputs: names of the values and weights that it reads, each once.
        outputs: names of its output values.
        mutates: the inputs that it writes to.
        flops: floating-point operations at the example inputs.
        bytes_accessed: bytes that it reads and writes in device memory.
        workspace: device type -> bytes that it needs while it runs, beyond its outputs.
        module_path: the module whose forward it is part of (``"model.layers.3.mlp"``).
        host_only: whether it returns only host scalars, and so runs wherever its inputs are.
        source: the line of the model's code that called it (``"models/llama.py:263"``), relative to the
            folder of its import; empty where unknown.
        backward: whether it is of the backward pass of a training step, before which all others run.
        forward: the operation of the forward pass whose gradient it computes, or that it repeats; empty where
            unknown, and in the forward pass.
        repeats: the operation of the forward pass that it recomputes in the backward pass.
        offloads: whether it keeps a value in CPU memory, for the backward pass or as part of a result.
    """

    name: str
    target: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    flops: int = 0
    bytes_accessed: int = 0
    workspace: Mapping[str, int] = field(default_factory=dict)
    module_path: str = ""
    host_only: bool = False
    source: str = ""
    backward: bool = False
    forward: str = ""
    repeats: str = ""
    offloads: bool = False

    @property
    def type(self) -> str:
        """``target`` without overload and in-place underscore: ``"add"`` for ``"add_.Tensor"``."""
        return self.target.partition(".")[0].rstrip("_")

    def workspace_on(self, device_type: str) -> int:
        """Return the workspace on a device of this type; the largest known one if it was not measured."""
        if device_type in self.workspace:
            return self.workspace[device_type]
        return max(self.workspace.values(), default=0)
