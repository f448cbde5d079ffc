"""Run a tree of modules, each on the device of its weights, by hooks that exist only during the run.

Weights stay where they reside. Only what a module needs on another device is copied, while it runs. With two
layers on devices 0 and 1::

    layer0(x)        x -> 0, run
    layer1(y)        y -> 1, run, and its result -> 0 where the caller computes with it
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import is_view, refresh_flat_weights
from graphplan.capture.changes.attribute_data import attributes_of
from graphplan.capture.changes.attribute_snapshots import is_iterator, restore_attributes, restored
from graphplan.capture.eager_run import untouched
from graphplan.capture.model_methods import method_of
from graphplan.capture.parameter_attributes import attribute_tensors, custom_attributes, may_hold_tensors
from graphplan.capture.structure import PLAIN_TYPES
from graphplan.capture.thread_patches import outside_inference_mode
from graphplan.capture.transformers.caches import is_cache
from graphplan.devices.topology import CPU
from graphplan.runtime.fallback.derived_classes import patched_forward
from graphplan.runtime.fallback.one_device import on_one_device
from graphplan.runtime.fallback.replaced_tensors import Replacement
from graphplan.runtime.memory.arena import moved


@dataclass(frozen=True, slots=True)
class ExecutionMode:
    """An execution mode of modules.

    Attributes:
        name: its description in messages.
        gathered: whether all modules run on the caller's device, to which weights are copied.
        together: whether operands of an operation are copied to the device of its module: weights of modules
            that are not running, tensors that its code creates or has kept in attributes.
        returns: whether a module's results are copied to the device where its caller computes.
    """

    name: str
    gathered: bool = False
    together: bool = False
    returns: bool = True


@dataclass
class HookedRun:
    """One run of a call whose inputs are on device ``host``.

    Modules on the CPU compute on ``compute_device``, if it is given. ``running`` is the stack of running
    modules, the innermost last. ``devices`` maps the id of a module to its device.
    """

    execution_mode: ExecutionMode
    host: torch.device
    compute_device: torch.device | None
    running: list[_Running] = field(default_factory=list)
    devices: Mapping[int, torch.device | None] = field(default_factory=dict)

    def pre_hook(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Copy a module's inputs and own tensors, and its layer of each KV cache, to where it runs."""
        device = self.host if self.execution_mode.gathered else self.devices[id(module)]
        if device is not None and device.type == CPU and self.compute_device is not None:
            device = self.compute_device
        outer_copies = {id(t.original): t.copied.copy for outer in self.running for t in outer.replaced}
        running = _Running(module, device or self.device)
        self.running.append(running)
        if device is None:
            return args, kwargs
        running.replace_by_copies(outer_copies)
        if all(_is_on(device, value) for value in (*args, *kwargs.values())):
            return args, kwargs
        layer = getattr(module, "layer_idx", None)  # the index of the cache layer of a transformers block
        for value in (*args, *kwargs.values()):
            if isinstance(layer, int) and is_cache(value):
                _move_cache_layer(value, layer, device)
        return running.input_replacement.apply((args, kwargs))

    def post_hook(self, _module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> Any:
        """Restore the original tensors; return the result, on the caller's device if the mode says so."""
        running = self.running.pop()
        running.restore()
        device = self.device
        if not running.input_replacement.replacements and _is_on(device, result):
            return result
        inverse = running.input_replacement.undo(lambda tensor: tensor.to(device))
        inverse.holder = running.module
        if not self.execution_mode.returns:
            inverse.replace = lambda tensor: tensor
        return inverse.apply(result)

    def end(self) -> None:
        """Restore the tensors of all running modules: torch calls no hook after an interrupt."""
        with ExitStack() as stack:  # the innermost first, the others also after an error
            for running in self.running:
                stack.callback(self.post_hook, running.module, (), {}, None)

    @property
    def device(self) -> torch.device:
        """The device of the innermost running module."""
        return self.running[-1].device if self.running else self.host


class _Running:
    """A running module.

    Attributes:
        module: the module.
        device: where it computes.
        replaced: the parameters and buffers that copies replace while it runs.
        attribute_tables: (attributes of the original, attributes of the copy, the latter before the run) of
            these parameters, and of objects in their attributes.
        input_replacement: the replacement of the tensors in its inputs.
        copies: the copies of input tensors, and of tensors in the attributes of parameters.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.replaced: list[_ReplacedTensor] = []
        self.attribute_tables: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self.copies: list[_Copy] = []
        self.input_replacement = Replacement(partial(_on_device, device, self.copies), in_place=True)

    def replace_by_copies(self, outer_copies: dict[int, torch.Tensor]) -> None:
        """Replace the module's tensors on other devices by copies on ``device``.

        ``outer_copies``: id of a tensor -> the copy that an enclosing module uses, and may have written to.
        """
        for table in (self.module._parameters, self.module._buffers):
            for name, tensor in table.items():
                if tensor is None or (tensor.device == self.device and id(tensor) not in outer_copies):
                    continue
                source = outer_copies.get(id(tensor), tensor)
                with torch.inference_mode(False):  # inference tensors have no version counter
                    copied = source if source.device == self.device else moved(source, self.device)
                    if copied is not source and isinstance(tensor, nn.Parameter):
                        self._copy_attributes(tensor, copied, {})
                is_buffer = table is self.module._buffers
                replaced = _ReplacedTensor(table, name, tensor, _Copy(source, copied), is_buffer=is_buffer)
                self.replaced.append(replaced)
                table[name] = outer_copies[id(tensor)] = copied  # type: ignore[assignment]
        _update_weight_list(self.module)

    def _copy_attributes(self, original: Any, copied: Any, copies: dict[int, Any]) -> None:
        """Give a copy the attributes of its original, with tensors, and objects that hold tensors, copied.

        ``copies`` maps the id of such a tensor or object to its copy.
        """
        table = custom_attributes(original) if isinstance(original, torch.Tensor) else dict(vars(original))
        for value in table.values():
            if id(value) in copies:
                continue
            if isinstance(value, torch.Tensor):
                copies[id(value)] = moved(value, self.device)
                self.copies.append(_Copy(value, copies[id(value)]))
            elif may_hold_tensors(value) and any(attribute_tensors(value)):
                copies[id(value)] = copy.copy(value)
                self._copy_attributes(value, copies[id(value)], copies)
        before = {name: copies.get(id(value), value) for name, value in table.items()}
        vars(copied).update(before)
        self.attribute_tables.append((vars(original), vars(copied), before))

    def restore(self) -> None:
        """Restore the original tensors, with the values that were written to their copies."""
        for attributes, current, before in self.attribute_tables:
            attributes.update({name: current[name] for name in before if current[name] is not before[name]})
        for copied in self.copies:
            if copied.written and copied.copy.shape == copied.original.shape:
                copied.write_to_original()
        for replaced in self.replaced:
            replaced.restore()
        _update_weight_list(self.module)


@outside_inference_mode  # inference tensors have no version counter
def _on_device(device: torch.device, copies: list[_Copy], tensor: Any) -> Any:
    """Return the tensor on the device; if that is a copy, add it to ``copies``."""
    copied = tensor.to(device)
    if copied is not tensor and isinstance(tensor, torch.Tensor):
        copies.append(_Copy(tensor, copied))
    return copied


class _Copy:
    """A copy of a tensor on another device, whose later values can be written to the original."""

    def __init__(self, original: torch.Tensor, copied: torch.Tensor) -> None:
        self.original, self.copy = original, copied
        self._version, self._history = copied._version, copied.grad_fn

    @property
    def written(self) -> bool:
        """Whether the copy was written to since it was made."""
        return self.copy._version != self._version

    def write_to_original(self) -> None:
        """Copy the values to the original, differentiably if differentiable values were written."""
        with torch.set_grad_enabled(self.copy.grad_fn is not self._history):
            self.original.copy_(self.copy)


@dataclass(frozen=True, slots=True)
class _ReplacedTensor:
    """A module's parameter or buffer, in whose place its table has a copy while it runs."""

    table: dict[str, Any]
    name: str
    original: torch.Tensor
    copied: _Copy
    is_buffer: bool

    def restore(self) -> None:
        """Restore the original, with the values of its copy; or move what the model put in its place."""
        value, copied = self.table[self.name], self.copied
        if value is not None and value is not copied.copy:
            self.table[self.name] = value.to(self.original.device)
            return
        # kernels of BatchNorm write to buffers without a change of version
        written = copied.written or (self.is_buffer and not copied.copy.requires_grad)
        if value is not None and copied.copy is not copied.original and written:
            copied.write_to_original()
        self.table[self.name] = self.original


def _update_weight_list(module: nn.Module) -> None:
    """Update the list of weights that a recurrent module, such as an LSTM, keeps besides its parameters."""
    if isinstance(module, nn.RNNBase):
        refresh_flat_weights(module)


class _Hook:
    """A hook for one run. Where a call copies or pickles its module, the copy's hook has no effect."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __deepcopy__(self, _memo: Any) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Leave arguments and results as they are."""


def entry_of(tree: nn.Module, entry: str) -> Any:
    """Return what an entry runs; for the whole the traced ``forward``: one assigned later runs around it."""
    return method_of(tree, entry) if entry else patched_forward(tree)


def run_hooked(
    tree: nn.Module, entry: str, call: HookedRun, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of an entry of a tree of modules, run with hooks that are removed afterwards."""
    hooks: list[Any] = []
    call.devices = devices_of(tree)
    together = on_one_device(lambda: call.device) if call.execution_mode.together else nullcontext()
    for part in list(tree.modules())[1:]:  # hooks of the root would run in calls by other threads
        hooks.append(part.register_forward_pre_hook(_Hook(call.pre_hook), with_kwargs=True, prepend=True))
        hooks.append(part.register_forward_hook(_Hook(call.post_hook), with_kwargs=True, always_call=True))
    try:
        run = entry_of(tree, entry)
        if isinstance(run, nn.Module):
            with together:
                return run(*args, **kwargs)
        owner = tree.get_submodule(entry.partition(":")[0])  # is not called itself: no hook runs for it
        args, kwargs = call.pre_hook(owner, args, kwargs)
        with together:
            result = run(*args, **kwargs)
        return call.post_hook(owner, args, kwargs, result)
    finally:
        if call.running:
            call.end()
        for hook in hooks:
            hook.remove()


def devices_of(tree: nn.Module) -> dict[int, torch.device | None]:
    """Return id(module) -> the device with most bytes of its tensors; None for a module without tensors.

    A shared tensor counts at each place.
    """
    bytes_of: dict[int, Counter[torch.device]] = {}

    def count(module: nn.Module) -> Counter[torch.device]:
        if id(module) not in bytes_of:
            nbytes = bytes_of[id(module)] = Counter[torch.device]()
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    nbytes[tensor.device] += tensor.nbytes
            for child in module._modules.values():
                if child is not None:
                    nbytes.update(count(child))
        return bytes_of[id(module)]

    count(tree)
    return {key: max(nbytes, key=nbytes.__getitem__, default=None) for key, nbytes in bytes_of.items()}


def _is_on(device: torch.device, value: Any) -> bool:
    """Whether a value consists of plain values and tensors on a device, so that nothing must be moved."""
    if isinstance(value, torch.Tensor):
        return value.device == device
    kind = type(value)
    return kind in PLAIN_TYPES or (kind is tuple and all(_is_on(device, part) for part in value))


def _move_cache_layer(cache: Any, index: int, device: torch.device) -> None:
    """Move the tensors of one layer of a cache to the device where the layer runs."""
    for part in (cache, *(value for value in vars(cache).values() if is_cache(value))):
        if getattr(part, "offloading", False) and device.type != "cuda":
            part.offloading = False  # transformers moves layers from and to CUDA only
        layers = getattr(part, "layers", ())  # a model's own cache class may have none
        if index < len(layers):
            state = vars(layers[index])
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    state[name] = value.to(device)
            state.update({name: device for name, value in state.items() if isinstance(value, torch.device)})


@contextmanager
def rolled_back(tree: nn.Module) -> Iterator[None]:
    """Context manager for a trial: it restores weights, attributes and the state of random generators."""
    attributes = attributes_of(tree)
    parts = list(tree.modules())
    iterators = list(_iterators(tree))
    tables: list[Any] = [table for p in parts for table in (p._parameters, p._buffers, p._modules)]
    values = [(t, t.detach().cpu().clone()) for t in tree.buffers() if not t.is_inference()]
    plain = {id(tensor) for tensor, _ in values if not tensor.requires_grad}
    with untouched(tree), restored(tables):
        try:
            yield
        finally:
            restore_attributes(attributes)
            for table, name, copied in iterators:
                table[name] = copied
            with torch.no_grad():
                for tensor, before in values:
                    if id(tensor) in plain and tensor.requires_grad and not is_view(tensor):
                        tensor.detach_()  # the trial wrote a differentiable value in place
                    tensor.copy_(before)  # kernels of BatchNorm write without a change of version


def _iterators(tree: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield (attributes, name, copy) of each iterator in attributes of modules: a trial advances them."""
    shared = {id(value): value for value in (*tree.modules(), *tree.parameters(), *tree.buffers())}
    for table in map(vars, tree.modules()):
        for name in [name for name, value in table.items() if is_iterator(value)]:
            with suppress(TypeError):  # a generator, or an iterator over one: a trace reports it
                yield table, name, copy.deepcopy(table[name], shared)
