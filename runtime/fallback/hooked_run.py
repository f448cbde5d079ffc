"""One run of a tree of modules, each where its weights are, by hooks that last as long as the run.

The weights are used as they are: nothing is copied but what a module needs elsewhere while it runs. With two
layers on devices 0 and 1::

    layer0(x)        x -> 0, run
    layer1(y)        y -> 1, run, and its result -> 0 where the caller computes with it
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import is_view, list_weights_anew
from graphplan.capture.changes.assigned_state import restored
from graphplan.capture.changes.attribute_data import attributes_of
from graphplan.capture.changes.attribute_snapshots import is_iterator, put_back
from graphplan.capture.eager_run import untouched
from graphplan.capture.model_methods import method_of
from graphplan.capture.parameter_notes import is_looked_into, noted_tensors, notes_of
from graphplan.capture.thread_patches import outside_inference_mode
from graphplan.capture.transformers.caches import is_cache
from graphplan.devices.topology import CPU
from graphplan.runtime.fallback.one_device import on_one_device
from graphplan.runtime.fallback.replaced_tensors import PLAIN, Replacement
from graphplan.runtime.fallback.short_names import patched_forward
from graphplan.runtime.memory.arena import moved


@dataclass(frozen=True, slots=True)
class Way:
    """How modules are run.

    Attributes:
        name: for people.
        gathered: whether all run on the caller's device, and weights are copied there.
        together: whether what an operation reads is copied to where its module runs: of others that do not
            run, what its code makes, or has kept in attributes.
        returns: whether a module's results go to where its caller computes.
    """

    name: str
    gathered: bool = False
    together: bool = False
    returns: bool = True


@dataclass
class HookedRun:
    """One run of a call whose inputs are on the ``host``.

    Modules that are on the CPU compute on the device ``instead``, if it is given. ``running`` has those that
    run, the innermost last; ``devices``, by the ids of modules, where these are.
    """

    way: Way
    host: torch.device
    instead: torch.device | None
    running: list[_Running] = field(default_factory=list)
    devices: Mapping[int, torch.device | None] = field(default_factory=dict)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Bring a module's inputs, its own tensors, and its layer of the caches, to where it runs."""
        device = self.host if self.way.gathered else self.devices[id(module)]
        if device is not None and device.type == CPU and self.instead is not None:
            device = self.instead
        standing = {id(own): one.here for outer in self.running for *_, own, one in outer.kept}
        running = _Running(module, device or self.device)
        self.running.append(running)
        if device is None:
            return args, kwargs
        running.bring(standing)
        if all(_is_on(device, value) for value in (*args, *kwargs.values())):
            return args, kwargs
        layer = getattr(module, "layer_idx", None)  # by which transformers' blocks know theirs of a cache
        for value in (*args, *kwargs.values()):
            if isinstance(layer, int) and is_cache(value):
                _bring_layer(value, layer, device)
        return running.given.within((args, kwargs))

    def after(self, _module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> Any:
        """Put back what was copied."""
        running = self.running.pop()
        running.put_back()
        device = self.device
        if not running.given.known and _is_on(device, result):
            return result
        back = running.given.undo(lambda tensor: tensor.to(device))
        back.holder = running.module
        if not self.way.returns:
            back.replace = lambda tensor: tensor
        return back.within(result)

    def end(self) -> None:
        """Put back what was copied for the modules that run: torch calls no hook after an interrupt."""
        try:
            self.after(self.running[-1].module, (), {}, None)
        finally:
            if self.running:
                self.end()

    @property
    def device(self) -> torch.device:
        """Where the innermost module that runs computes."""
        return self.running[-1].device if self.running else self.host


class _Running:
    """A module that runs.

    Attributes:
        module: itself.
        device: where it computes.
        kept: the places of its own tensors that others stand for while it runs, with them and their copies.
        noted: the attributes of these, and of objects that are noted on them, those of their copies, now and
            as they were.
        given: what it has in place of its inputs' tensors.
        copies: those of its inputs' tensors, and of the tensors among what is noted.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.kept: list[tuple[dict[str, Any], str, torch.Tensor, _Copy]] = []
        self.noted: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        self.copies: list[_Copy] = []
        self.given = Replacement(partial(_arrived, device, self.copies), in_place=True)

    def bring(self, standing: dict[int, torch.Tensor]) -> None:
        """Have copies on the device in place of its own tensors that are elsewhere.

        ``standing``: by their ids, what modules around it have in place of tensors, with what was written.
        """
        for table in (self.module._parameters, self.module._buffers):
            for name, tensor in table.items():
                if tensor is None or (tensor.device == self.device and id(tensor) not in standing):
                    continue
                source = standing.get(id(tensor), tensor)
                with torch.inference_mode(False):  # tensors that are made in it have no version
                    here = source if source.device == self.device else moved(source, self.device)
                    if here is not source and isinstance(tensor, nn.Parameter):
                        self._bring_notes(tensor, here, {})
                self.kept.append((table, name, tensor, _Copy(source, here)))
                table[name] = standing[id(tensor)] = here  # type: ignore[assignment]  # read while it runs
        _tell_recurrent(self.module)

    def _bring_notes(self, original: Any, here: Any, known: dict[int, Any]) -> None:
        """Note the same on a copy: tensors on the device, and copies of the objects that have them.

        ``known`` has these by the ids of what they stand for.
        """
        notes = notes_of(original) if isinstance(original, torch.Tensor) else dict(vars(original))
        for one in notes.values():
            if id(one) in known:
                continue
            if isinstance(one, torch.Tensor):
                known[id(one)] = moved(one, self.device)
                self.copies.append(_Copy(one, known[id(one)]))
            elif is_looked_into(one) and any(noted_tensors(one)):
                known[id(one)] = copy.copy(one)
                self._bring_notes(one, known[id(one)], known)
        before = {name: known.get(id(one), one) for name, one in notes.items()}
        vars(here).update(before)
        self.noted.append((vars(original), vars(here), before))

    def put_back(self) -> None:
        """Have the tensors again, with what was written to their copies."""
        for own, mine, before in self.noted:
            own.update({name: mine[name] for name in before if mine[name] is not before[name]})
        for one in self.copies:
            if one.written and one.here.shape == one.original.shape:
                one.give_back()
        for table, name, tensor, one in self.kept:
            found = table[name]
            # kernels of BatchNorm write to buffers without a change of version
            statistics = table is self.module._buffers and not one.here.requires_grad
            if found is one.here and one.here is not one.original and (statistics or one.written):
                one.give_back()
            anew = found is not None and found is not one.here  # the model has made another
            table[name] = found.to(tensor.device) if anew else tensor
        _tell_recurrent(self.module)


@outside_inference_mode  # tensors that are made in it have no version
def _arrived(device: torch.device, copies: list[_Copy], tensor: Any) -> Any:
    """A tensor on a device; if it is a copy there, noted as such."""
    here = tensor.to(device)
    if here is not tensor and isinstance(tensor, torch.Tensor):
        copies.append(_Copy(tensor, here))
    return here


class _Copy:
    """A copy of a tensor on another device; what is written to it is given back."""

    def __init__(self, original: torch.Tensor, here: torch.Tensor) -> None:
        self.original, self.here = original, here
        self._version, self._history = here._version, here.grad_fn

    @property
    def written(self) -> bool:
        """Whether it was written to since."""
        return self.here._version != self._version

    def give_back(self) -> None:
        """Write to the original, with a gradient where what was written has one."""
        with torch.set_grad_enabled(self.here.grad_fn is not self._history):
            self.original.copy_(self.here)


def _tell_recurrent(module: nn.Module) -> None:
    """LSTMs keep a list of their weights."""
    if isinstance(module, nn.RNNBase):
        list_weights_anew(module)


class _Hook:
    """A hook for the time of a run. A copy of its module, which a call may make, has one without effect."""

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
    """What an entry runs: of the model, its ``forward``, as what is around that runs around all."""
    return method_of(tree, entry) if entry else patched_forward(tree)


def run_hooked(
    tree: nn.Module, entry: str, call: HookedRun, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What an entry of a tree of modules returns; its hooks are gone afterwards."""
    hooks: list[Any] = []
    call.devices = devices_of(tree)
    together = on_one_device(lambda: call.device) if call.way.together else nullcontext()
    for part in list(tree.modules())[1:]:  # a call of the whole by another thread reads those of the whole
        hooks.append(part.register_forward_pre_hook(_Hook(call.before), with_kwargs=True, prepend=True))
        hooks.append(part.register_forward_hook(_Hook(call.after), with_kwargs=True, always_call=True))
    try:
        run = entry_of(tree, entry)
        if isinstance(run, nn.Module):
            with together:
                return run(*args, **kwargs)
        owner = tree.get_submodule(entry.partition(":")[0])  # its own tensors are used, but it is not called
        args, kwargs = call.before(owner, args, kwargs)
        with together:
            result = run(*args, **kwargs)
        return call.after(owner, args, kwargs, result)
    finally:
        if call.running:
            call.end()
        for hook in hooks:
            hook.remove()


def devices_of(tree: nn.Module) -> dict[int, torch.device | None]:
    """Where most bytes of each module of a tree are, by its id; None of one without tensors."""
    found: dict[int, torch.device | None] = {}
    _count(tree, found, {})
    return found


def _count(
    module: nn.Module, found: dict[int, torch.device | None], counted: dict[int, dict[torch.device, int]]
) -> dict[torch.device, int]:
    """Bytes by device; a tensor counts in each place where a module has it."""
    if id(module) not in counted:
        here = counted[id(module)] = dict[torch.device, int]()
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                here[tensor.device] = here.get(tensor.device, 0) + tensor.nbytes
        for child in module._modules.values():
            for device, nbytes in ({} if child is None else _count(child, found, counted)).items():
                here[device] = here.get(device, 0) + nbytes
        found[id(module)] = max(here, key=here.__getitem__, default=None)
    return counted[id(module)]


def _is_on(device: torch.device, value: Any) -> bool:
    """Whether a value is plain, or of tensors that are on a device, so that nothing is to be moved."""
    if isinstance(value, torch.Tensor):
        return value.device == device
    return type(value) in PLAIN or (type(value) is tuple and all(_is_on(device, one) for one in value))


def _bring_layer(cache: Any, index: int, device: torch.device) -> None:
    """Have a layer's tensors of a cache where the layer runs."""
    for one in (cache, *(value for value in vars(cache).values() if is_cache(value))):
        if getattr(one, "offloading", False) and device.type != "cuda":
            one.offloading = False  # transformers moves layers from and to CUDA only
        layers = getattr(one, "layers", ())  # a model's own class of cache may have none
        if index < len(layers):
            state = vars(layers[index])
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    state[name] = value.to(device)
            state.update({name: device for name, value in state.items() if isinstance(value, torch.device)})


@contextmanager
def undone(tree: nn.Module) -> Iterator[None]:
    """A trial, after which weights, attributes, and the state of what is drawn at random, are as before."""
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
            put_back(attributes)
            for table, name, copied in iterators:
                table[name] = copied
            with torch.no_grad():
                for tensor, before in values:
                    if id(tensor) in plain and tensor.requires_grad and not is_view(tensor):
                        tensor.detach_()  # written to in place, with gradients
                    tensor.copy_(before)  # kernels of BatchNorm write without a change of version


def _iterators(tree: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Iterators in attributes: where they are, and copies, since a trial moves them on."""
    known = {id(one): one for one in (*tree.modules(), *tree.parameters(), *tree.buffers())}
    for table in map(vars, tree.modules()):
        for name in [name for name, value in table.items() if is_iterator(value)]:
            with suppress(TypeError):  # it is a generator, or goes over one, which is said
                yield table, name, copy.deepcopy(table[name], known)
