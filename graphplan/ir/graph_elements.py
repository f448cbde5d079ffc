"""What a graph is made of: operations, the values between them, the weights that they read."""

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
        copy_bytes: bytes that a copy to another device moves and occupies there (elements x size).
        alias_of: the value or weight whose storage it shares, or None.
        is_tensor: False for sizes and other host scalars, which every device can read.
        shape: sizes at the example inputs; empty where unknown.
        dtype: ``"float32"``, ``"int64"``, ...; empty where unknown.
        stays: whether it outlives the call: a tensor of a returned cache on its device, a gradient beside its
            parameter.
        gradient_of: the parameter whose gradient it is: as soon as it is made, it goes to where that resides.
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
    """The value or weight whose storage a name is a view of, itself included."""
    while (value := values.get(name)) is not None and value.alias_of is not None:
        name = value.alias_of
    return name


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, buffer or constant that the model owns.

    Attributes:
        name: its first name in the model; the name that operations use.
        nbytes: bytes of its storage.
        names: every name that it has: more than one when it is shared.
        kind: ``"parameter"``, ``"buffer"``, ``"constant"``, ``"part"``, or ``"cache"`` for a tensor
            of a cache that the caller passes in: it resides where it is used, before and after.
        persistent: whether it is in the ``state_dict``.
        mutated: whether forward writes to it (BatchNorm statistics): it is then never streamed.
        movable: False for tensors of caches, wrappers, and sparse tensors: never streamed either.
        shape: of its elements; empty where unknown.
        dtype: as of a :class:`Value`.
        part_of: for a part, the weight whose rows it holds. That weight stays whole on the CPU and has
            ``nbytes`` of 0, since its parts have them; a part that resides elsewhere is a copy.
        start: for a part, its first row.
        beside: bytes of each storage that resides with it while it is trained: its gradient, the optimizer's
            state.
        step_bytes: bytes that the optimizer takes beyond these while it changes parameters one by one.
        together_bytes: likewise for this parameter, where it changes all at once.
        step_traffic: bytes that the optimizer reads and writes to change it.
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
        """Whether it may reside elsewhere than where it is used."""
        return self.movable and not self.mutated

    @property
    def held_bytes(self) -> int:
        """Bytes where it resides: its own, and those beside it."""
        return self.nbytes + sum(self.beside)

    @property
    def is_own(self) -> bool:
        """Whether it is of the model: neither a constant of the trace nor of the caller's caches."""
        return self.kind not in ("constant", "cache")


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of the trace.

    Attributes:
        name: unique among operations.
        target: the function, for display (``"linear"``).
        inputs: names of the values and weights that it reads, each once.
        outputs: names of its output values.
        mutates: those of its inputs that it writes to.
        flops: floating-point operations at the example inputs.
        bytes_accessed: bytes that it reads and writes in device memory.
        workspace: device type -> bytes that it needs while it runs, beyond its outputs.
        module_path: the module whose forward it is part of (``"model.layers.3.mlp"``).
        host_only: returns only host scalars and runs wherever its inputs are.
        source: the line of the model's code that called it (``"models/llama.py:263"``), from below the
            folder that it was imported from; empty where unknown.
        backward: whether it is of the backward pass of a training step: all others run first.
        forward: the operation of the forward pass whose gradient it computes, or that it repeats; empty where
            that is unknown, and in the forward pass.
        repeats: the operation of the forward pass that it computes again in the backward pass.
        offloads: whether it keeps a value in CPU memory from the forward to the backward pass.
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
        """``target`` without its overload and whether it writes in place: ``"add"`` of ``"add_.Tensor"``."""
        return self.target.partition(".")[0].rstrip("_")

    def workspace_on(self, device_type: str) -> int:
        """Workspace on a device of this type; the largest known where unmeasured."""
        if device_type in self.workspace:
            return self.workspace[device_type]
        return max(self.workspace.values(), default=0)
