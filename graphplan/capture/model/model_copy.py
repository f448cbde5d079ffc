"""The copy of a model that is traced instead of it.

The caller's model is never traced itself. A *copy* is: a deep copy whose parameters and buffers are
CPU tensors in untouched virtual memory, wherever the caller's are (a meta model, a model on an
accelerator), so that every capture happens on the CPU, costs no memory, and leaves the caller's model
as it was.
"""

from __future__ import annotations

import copy
import itertools
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from graphplan._compat.bitsandbytes import settle
from graphplan.capture.changes.attribute_data import plain_tensors
from graphplan.capture.model.model_weights import (
    ModelWeights,
    identity,
    is_dense,
    is_wrapper,
    memory_of,
    named_tensors,
    plain_attributes,
)
from graphplan.capture.model.modes import Differentiation, ModeReader, Modes, autocast_of
from graphplan.capture.model.shared_attributes import copy_to_trace
from graphplan.capture.signature import BoundCall, bind_call, signature_of
from graphplan.capture.transformers.caches import know_caches
from graphplan.capture.value_branches import Branches, ValueOf
from graphplan.errors import CaptureError
from graphplan.warnings import warn

_APART = 64  # bytes between the starts of two stand-ins, by which a trace's constants are told to be one


class ModelCopy:
    """A copy of a model to trace, with stand-ins for its weights.

    Attributes:
        module: the copy.
        weights: the caller's own weights, by name.
        signature: of the model's ``forward``.
        entry: the method that is called: ``"model.encoder"`` for a submodule, ``"model:encode"`` for a method
            of one, empty for the model.
        attributes: memory -> the name, and identity, of the tensor in an attribute that has it.
        shared: name -> attribute of the caller's model that the copy is without, since it cannot be copied.
        told: what its user has been warned of, once.
        fixed: entries of which no size can vary in a trace.
        unsized: entries of which only batches and lengths can.
        by_inputs: entries whose code branches by integers among the arguments.
        knows_inputs: whether the call that is traced has values of these.
        step: what is differentiated, where a training step is to be traced.
        device_types: of the devices that will compute.
        autocast: the type that autocast is on for on these devices; None where it is off.
        current: gives the weight of a first name as it is now; None where nothing may be known of it.
        prepared: whether the model has hooks that run before its calls, which the copy is without.

    Raises:
        CaptureError: the model's modules hand out other tensors than they hold.
    """

    def __init__(self, model: nn.Module) -> None:
        know_caches(model)
        self.entry = ""
        self.told: set[str] = set()
        self.fixed: set[str] = set()
        self.unsized: set[str] = set()
        self.by_inputs: set[str] = set()
        self.knows_inputs = True
        self._answered: dict[str, set[Any]] = {}
        self.step: Differentiation | None = None
        self.device_types: tuple[str, ...] = ()
        self.autocast: torch.dtype | None = None
        self.prepared = bool(model._forward_pre_hooks)
        _require_own_tensors(model)
        settle(model)
        self.weights = ModelWeights(model)
        self.current: ValueOf = self.weights.tensors.get
        self.signature = signature_of(model.forward)
        stand_ins, named = _stand_ins(model), self.weights.identities
        for tensor in self.weights.tensors.values():
            if id(tensor) in stand_ins:
                named[identity(stand_ins[id(tensor)])] = named[identity(tensor)]
        others = (tensor for *_, tensor in plain_tensors(model) if tensor.device.type not in ("cpu", "meta"))
        stand_ins = {id(tensor): tensor.detach().cpu() for tensor in others} | stand_ins
        self.module, self.shared = copy_to_trace(model, stand_ins)
        tensors = plain_attributes(self.module)
        self.attributes = {memory_of(tensor): (name, identity(tensor)) for name, tensor in tensors.items()}
        if type(model).__call__ is not nn.Module.__call__:  # the placed module's own runs around the graph
            plain = {"__call__": nn.Module.__call__, "__module__": type(model).__module__}
            self.module.__class__ = type(type(model).__name__, (type(model),), plain)
        for name, table in vars(self.module).items():
            if re.match("_(forward|backward)_.*hooks", name):  # the placed module's own, which run likewise
                table.clear()

    def part(self, entry: str) -> ModelCopy:
        """The copy of a submodule, with the weights of the whole model; itself for the empty entry."""
        if not entry:
            return self
        found = copy.copy(self)
        found.entry = entry
        found.module = self.module.get_submodule(entry.partition(":")[0])
        found.signature = signature_of(getattr(found.module, found.method))
        return found

    @property
    def method(self) -> str:
        """The name of the method of ``module`` that is called."""
        return self.entry.partition(":")[2] or "forward"

    def full_name(self, name: str) -> str:
        """The name in the whole model of a weight of this part."""
        prefix = self.entry.partition(":")[0]
        return f"{prefix}.{name}" if prefix else name

    def first_name(self, name: str) -> str:
        """In the whole model, of a weight of this part."""
        return self.weights.first[self.full_name(name)]

    @property
    def asks_inputs(self) -> bool:
        """Whether a trace is to go by the values of integers among the arguments."""
        return self.knows_inputs and self.entry in self.by_inputs

    def branches(self, *call: Any) -> Branches:
        """Those of the entry's code, for a trace of its call with positional and named arguments."""
        answered = self._answered.setdefault(self.entry, set())
        return Branches(self.module, self.value_of, call if self.asks_inputs else None, answered)

    def value_of(self, name: str) -> torch.Tensor | None:
        """A weight of this part as it is now; None where it has no values."""
        found = self.current(self.first_name(name))
        return None if found is None or found.device.type == "meta" else found

    @property
    def modes(self) -> Modes:
        """Of the copy."""
        found = ModeReader(self.module).read(self.module)
        return replace(found, step=self.step, autocast=self.autocast)

    def compute_on(self, device_types: Iterable[str]) -> None:
        """Trace for these types of devices, under the autocast that is on for them now."""
        self.device_types, self.autocast = tuple(device_types), autocast_of(device_types)

    def enter(
        self,
        modes: Modes,
        values: Mapping[str, torch.Tensor] = MappingProxyType({}),
        current: ValueOf | None = None,
    ) -> None:
        """Trace in these modes from now on, with these values of tensors in attributes, by their names.

        ``current`` gives the weights as they are now, where these are others.

        Raises:
            PlanError: an adapter is active that the copy does not have.
        """
        ModeReader(self.module).write(self.module, modes)
        if modes.step is not None:  # the code of functions and checkpoints goes by what requires a gradient
            for name, parameter in self.module.named_parameters():
                parameter.requires_grad = name in modes.step.trained
        self.step, self.autocast = modes.step, modes.autocast
        self.current = current or self.current
        for name, tensor in values.items():
            path, _, attribute = name.rpartition(".")
            getattr(self.module.get_submodule(path), attribute).detach().copy_(tensor)

    def warn_once(self, text: str) -> None:
        """Warn, unless the model's user has been warned of that."""
        if text not in self.told:
            self.told.add(text)
            warn(text)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundCall:
        """Arguments in canonical form."""
        return bind_call(self.signature, args, kwargs)


def _require_own_tensors(model: nn.Module) -> None:
    """Raise CaptureError where modules hold tensors in what copies them to a device at each access."""
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
    """Id of each weight -> a CPU tensor of its shape, in memory that is never touched.

    One mapping, as large as the largest weight, serves them all, each from a byte of its own on: tracing
    neither reads nor writes them, and the system provides a page only when it is written to.
    """
    tensors = list({id(tensor): tensor for tensor in named_tensors(model).values()}.values())
    wrapped = [part for tensor in tensors for part in _parts(tensor)]
    largest = max((_span(t) * t.element_size() for t in wrapped if is_dense(t)), default=0)
    memory = mmap.mmap(-1, max(largest, 1) + _APART * len(wrapped))
    starts = itertools.count(0, _APART)
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        stand_in = _stand_in(tensor, memory, starts)
        if stand_in is not None:
            is_parameter = isinstance(tensor, nn.Parameter)
            found[id(tensor)] = nn.Parameter(stand_in, tensor.requires_grad) if is_parameter else stand_in
    return found


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper wraps, those that they wrap in their place; else the tensor itself."""
    if not is_wrapper(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a protocol of torch's
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _stand_in(tensor: torch.Tensor, memory: mmap.mmap, starts: Iterator[int]) -> torch.Tensor | None:
    """What stands for a tensor; None for one of a class of its own, which is copied as that says."""
    if is_wrapper(tensor):  # made anew: its own copy need not be a wrapper
        kind: Any = type(tensor)
        names, context = kind.__tensor_flatten__(tensor)
        inner = {name: getattr(tensor, name) for name in names}
        for name, part in inner.items():
            stand_in = _stand_in(part, memory, starts)
            inner[name] = copy.deepcopy(part) if stand_in is None else stand_in
        made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        return made
    if is_dense(tensor):
        return _virtual(tensor, memory, next(starts))
    if tensor.layout is not torch.strided:  # copied with its values: which elements it has counts
        return tensor.detach().to("cpu", copy=True)
    return None


def _span(tensor: torch.Tensor) -> int:
    """Elements between the first and the last, both included."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _virtual(tensor: torch.Tensor, memory: mmap.mmap, start: int) -> torch.Tensor:
    count = _span(tensor)
    if not count:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=start)
    return flat.as_strided(tensor.shape, tensor.stride())
