"""The copy of a model that is traced instead of it.

The caller's model is never traced itself. The *copy* is a deep copy whose parameters and buffers are CPU
tensors in untouched virtual memory, whatever the caller's device (meta, an accelerator). So every capture
runs on the CPU, costs no memory, and leaves the caller's model unchanged.
"""

from __future__ import annotations

import copy
import itertools
import mmap
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphplan._compat.bitsandbytes import prepare_quantized
from graphplan.capture.changes.attribute_data import plain_tensors
from graphplan.capture.changes.stored_values import tensors_in_containers
from graphplan.capture.model.model_weights import (
    ModelWeights,
    identity,
    inner_tensors,
    is_dense,
    is_wrapper,
    memory_of,
    named_tensors,
    plain_attributes,
)
from graphplan.capture.model.modes import Differentiation, ModeReader, Modes, autocast_of
from graphplan.capture.model.shared_attributes import copy_to_trace
from graphplan.capture.signature import BoundCall, bind_call, signature_of
from graphplan.capture.structure import Seen, flatten, flatten_with_path, map_leaves, unflatten
from graphplan.capture.transformers.caches import register_caches
from graphplan.capture.value_branches import Branches, ValueOf, is_integer_tensor
from graphplan.errors import CaptureError
from graphplan.warnings import warn

_OFFSET = 64  # bytes between the starts of two stand-ins: constants of a trace are identified by address


@dataclass(slots=True)
class TracedCode:
    """Properties of the code of one entry that traces have revealed.

    Attributes:
        sizes_fixed: whether all sizes are fixed in a trace.
        only_batch_and_length_vary: whether other sizes cannot vary.
        branches_on_inputs: whether the code branches on values of integer inputs.
        branch_sources: as in :class:`~graphplan.capture.value_branches.Branches`.
    """

    sizes_fixed: bool = False
    only_batch_and_length_vary: bool = False
    branches_on_inputs: bool = False
    branch_sources: set[Any] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class AttributeValues:
    """Attributes that may have changed without a change of the graphs, by name.

    Attributes:
        watched: tensors that others may replace by tensors of the same shape and type.
        stored: what calls have stored.
        absent: attributes in which calls store tensors, and which the modules do not have.
    """

    watched: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stored: Mapping[str, Any] = field(default_factory=dict)
    absent: Set[str] = frozenset()


class ModelCopy:
    """A copy of a model to trace, with stand-ins for its weights.

    Attributes:
        module: the copy.
        weights: the caller's own weights, by name.
        signature: the signature of ``forward``.
        entry: the method that is called: ``"model.encoder"`` for a submodule, ``"model:encode"`` for a method
            of one, empty for the model.
        attributes: memory of each tensor that is a plain attribute, or in a container of tensors that is
            one and not elsewhere -> its name and identity.
        stored: names of the attributes in which calls store tensors.
        shared: name -> attribute of the caller's model that cannot be copied.
        warned: texts of the warnings that were given.
        inputs_have_values: whether the integer inputs of the traced call have values.
        step: the differentiation of a training step; None for a forward pass.
        device_types: types of the devices that will compute.
        autocast: the dtype of autocast on these devices; None where it is off.
        current: function from a first name to the weight's current tensor, or None if its values are unknown.
        has_forward_pre_hooks: whether the caller's model has them; the copy has no hooks.

    Raises:
        CaptureError: a module moves its tensors at each access, or the model cannot be copied.
    """

    def __init__(self, model: nn.Module) -> None:
        register_caches(model)
        self.entry = ""
        self.warned: set[str] = set()
        self.inputs_have_values = True
        self.stored = set[str]()
        self._initial: dict[str, Any] = {}  # attribute in ``stored`` -> its value in the caller's model
        self._codes = defaultdict[str, TracedCode](TracedCode)  # by entry
        self.step: Differentiation | None = None
        self.device_types: tuple[str, ...] = ()
        self.autocast: torch.dtype | None = None
        self.has_forward_pre_hooks = bool(model._forward_pre_hooks)
        require_own_tensors(model)
        prepare_quantized(model)
        self.weights = ModelWeights(model)
        self.current: ValueOf = self.weights.tensors.get
        self.signature = signature_of(model.forward)
        stand_ins, identities = _stand_ins(model), self.weights.identities
        for tensor in self.weights.tensors.values():
            if id(tensor) in stand_ins:
                identities[identity(stand_ins[id(tensor)])] = identities[identity(tensor)]
        off_cpu = (tensor for *_, tensor in plain_tensors(model) if tensor.device.type not in ("cpu", "meta"))
        stand_ins = {id(tensor): tensor.detach().cpu() for tensor in off_cpu} | stand_ins
        self.module, self.shared = copy_to_trace(model, stand_ins)
        self._find_attributes()
        # the placed module's own ``__call__`` and hooks run around the graph
        if type(model).__call__ is not nn.Module.__call__:
            namespace = {"__call__": nn.Module.__call__, "__module__": type(model).__module__}
            self.module.__class__ = type(type(model).__name__, (type(model),), namespace)
        for name, table in vars(self.module).items():
            if re.match("_(forward|backward)_.*hooks", name):
                table.clear()

    def _find_attributes(self) -> None:
        inner = tensors_in_containers(self.module)
        tensors = plain_attributes(self.module) | inner
        uses = Counter(map(memory_of, tensors.values()))
        tied = {memory for memory in map(memory_of, inner.values()) if uses[memory] > 1}
        known = {name: tensor for name, tensor in tensors.items() if memory_of(tensor) not in tied}
        self.attributes = {memory_of(tensor): (name, identity(tensor)) for name, tensor in known.items()}

    def for_entry(self, entry: str) -> ModelCopy:
        """Return this copy with another entry and the weights of the whole model; itself if it is empty."""
        if not entry:
            return self
        entry_copy = copy.copy(self)
        entry_copy.entry = entry
        entry_copy.module = self.module.get_submodule(entry.partition(":")[0])
        entry_copy.signature = signature_of(getattr(entry_copy.module, entry_copy.method))
        return entry_copy

    @property
    def method(self) -> str:
        """The name of the method of ``module`` that is called."""
        return self.entry.partition(":")[2] or "forward"

    def full_name(self, name: str) -> str:
        """Return the name in the whole model of a weight of this entry."""
        prefix = self.entry.partition(":")[0]
        return f"{prefix}.{name}" if prefix else name

    def first_name(self, name: str) -> str:
        """Return the first name in the whole model of a weight of this entry."""
        return self.weights.first[self.full_name(name)]

    @property
    def code(self) -> TracedCode:
        """Properties of the code of this entry that traces have revealed."""
        return self._codes[self.entry]

    def start_branching_on_inputs(self, call: BoundCall) -> bool:
        """Let traces branch on values of integer inputs; return whether that is possible and new."""
        has_integers = any(map(is_integer_tensor, call.tensors))
        if not has_integers or not self.inputs_have_values or self.code.branches_on_inputs:
            return False
        self.code.branches_on_inputs = True
        return True

    def branches(self, *call: Any) -> Branches:
        """Return the branches of the entry's code, to trace a call with positional and named arguments."""
        on_inputs = self.inputs_have_values and self.code.branches_on_inputs
        return Branches(self.module, self.value_of, call if on_inputs else None, self.code.branch_sources)

    def branch_on(self, call: BoundCall, leaves: Iterable[int]) -> bool:
        """Let traces depend on the values of these leaves; return whether that is possible and new."""
        paths = [path for path, _ in flatten_with_path((call.args, call.kwargs))]
        new = {paths[leaf] for leaf in leaves} - self.code.branch_sources
        if not new or not self.inputs_have_values:
            return False
        self.code.branch_sources |= new
        self.code.branches_on_inputs = True
        return True

    def value_of(self, name: str) -> torch.Tensor | None:
        """Return the current tensor of a weight of this entry; None if it has no values."""
        weight = self.current(self.first_name(name))
        return None if weight is None or weight.device.type == "meta" else weight

    @property
    def modes(self) -> Modes:
        """The modes of the copy."""
        modes = ModeReader(self.module).read(self.module)
        return replace(modes, step=self.step, autocast=self.autocast)

    def compute_on(self, device_types: Iterable[str]) -> None:
        """Set the types of devices to trace for, and the autocast that is on for them now."""
        self.device_types, self.autocast = tuple(device_types), autocast_of(device_types)

    def enter(
        self,
        modes: Modes,
        values: AttributeValues | None = None,
        current: ValueOf | None = None,
    ) -> None:
        """Set the modes of later traces, and the values of attributes if they are given.

        ``current``, if given, replaces the function that returns the current weights.

        Raises:
            PlanError: an adapter is active that the copy does not have.
        """
        ModeReader(self.module).write(self.module, modes)
        if modes.step is not None:  # autograd functions and checkpoints depend on what requires a gradient
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad = name in modes.step.trained
        self.step, self.autocast = modes.step, modes.autocast
        self.current = current or self.current
        if values is not None:
            self._set_attributes(values)

    def _set_attributes(self, values: AttributeValues) -> None:
        for name in (values.stored.keys() | values.absent) - self._initial.keys():
            self._initial[name] = map_leaves(_copied_to_host, self.attribute(name), Seen())
        # another copy of the placed model may have called what stores the others
        others = {name: value for name, value in self._initial.items() if name not in values.absent}
        for name, value in {**others, **values.watched, **values.stored}.items():
            path, _, attribute = name.rpartition(".")
            attributes = vars(self.module.get_submodule(path))
            held, spec = flatten(attributes.get(attribute), Seen())
            leaves, new_spec = flatten(value, Seen())
            are_separate = len(set(map(memory_of, filter(torch.is_tensor, held)))) == len(held)
            if spec == new_spec and are_separate and all(map(_is_alike, held, leaves)):
                for mine, its in zip(held, leaves, strict=True):
                    mine.detach().copy_(its)
            else:
                attributes[attribute] = unflatten(list(map(_copied_to_host, leaves)), new_spec)
        for name in values.absent:
            path, _, attribute = name.rpartition(".")
            vars(self.module.get_submodule(path)).pop(attribute, None)
        self._find_attributes()
        self.stored |= values.stored.keys() | values.absent

    @property
    def stored_values(self) -> Iterator[tuple[str, Any]]:
        """Names and values of the attributes in which calls store tensors."""
        return ((name, self.attribute(name)) for name in self.stored)

    def attribute(self, name: str) -> Any:
        """Return the value of an attribute of a module, by its full name; None if there is none."""
        path, _, attribute = name.rpartition(".")
        return vars(self.module.get_submodule(path)).get(attribute)

    def warn_once(self, text: str) -> None:
        """Warn, unless this text was given before."""
        if text not in self.warned:
            self.warned.add(text)
            warn(text)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundCall:
        """Return the arguments in canonical form."""
        return bind_call(self.signature, args, kwargs, self.entry)


def _is_alike(one: Any, other: Any) -> bool:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return tensors and (one.dtype, one.shape) == (other.dtype, other.shape)


def _copied_to_host(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def require_own_tensors(model: nn.Module) -> None:
    """Raise CaptureError if a module keeps tensors in a mapping that moves them at each access."""
    for path, part in model.named_modules():
        for table in (part._parameters, part._buffers):
            if not isinstance(table, dict):
                raise CaptureError(
                    f"{path or 'the model'} ({type(part).__name__}) has its tensors in a "
                    f"{type(table).__name__}, by which another library offloads them: remove that before "
                    "you place the model (compressed_tensors.offload.remove_dispatch), or load it with "
                    "CompressedTensorsConfig(dequantize=True)"
                )


def _stand_ins(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return id of each weight -> a CPU tensor of its shape, in memory that is never accessed.

    All share one mapping, little larger than the largest weight, each from its own offset on: tracing neither
    reads nor writes them, and the system allocates a page only when it is written to.
    """
    tensors = list({id(tensor): tensor for tensor in named_tensors(model).values()}.values())
    wrapped = [part for tensor in tensors for part in inner_tensors(tensor)]
    largest = max((_span(t) * t.element_size() for t in wrapped if is_dense(t)), default=0)
    memory = mmap.mmap(-1, max(largest, 1) + _OFFSET * len(wrapped))
    starts = itertools.count(0, _OFFSET)
    stand_ins: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        stand_in = _stand_in(tensor, memory, starts)
        if stand_in is not None:
            is_parameter = isinstance(tensor, nn.Parameter)
            stand_ins[id(tensor)] = nn.Parameter(stand_in, tensor.requires_grad) if is_parameter else stand_in
    return stand_ins


def _stand_in(tensor: torch.Tensor, memory: mmap.mmap, starts: Iterator[int]) -> torch.Tensor | None:
    """Return a stand-in for a tensor; None for one of another class, which ``deepcopy`` copies."""
    if is_wrapper(tensor):  # rebuilt: its deep copy need not be a wrapper
        cls: Any = type(tensor)
        names, context = cls.__tensor_flatten__(tensor)
        inner = {name: getattr(tensor, name) for name in names}
        for name, part in inner.items():
            stand_in = _stand_in(part, memory, starts)
            inner[name] = copy.deepcopy(part) if stand_in is None else stand_in
        rebuilt: torch.Tensor = cls.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        return rebuilt
    if is_dense(tensor):
        return _virtual(tensor, memory, next(starts))
    if tensor.layout is not torch.strided:  # copied with its values: its sparsity pattern matters
        return tensor.detach().to("cpu", copy=True)
    return None


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements of storage from the tensor's first to its last, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _virtual(tensor: torch.Tensor, memory: mmap.mmap, start: int) -> torch.Tensor:
    count = _span(tensor)
    if not count:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=start)
    return flat.as_strided(tensor.shape, tensor.stride())
