"""Calls that no capture takes, of a placed module: its modules run where their weights are.

The placed weights are used as they are: nothing is copied but what a module needs elsewhere while it runs.
Hooks give each module its inputs on its own device. With two layers on devices 0 and 1::

    layer0(x)        x -> 0, run
    layer1(y)        y -> 1, run, and its result -> 0 where the caller computes with it

What a forward computes between its modules may need things together, which nobody knows beforehand: ways of
running are tried one after another, on copies of the arguments, and the first that runs is kept. The last
brings each module's weights to the caller's device while it runs.

A module that has graphs runs as a tree of modules of its own over the same weights, which other threads read
meanwhile. One that has none runs itself, so that what its code keeps in attributes is kept.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphplan.capture.eager_run import is_same
from graphplan.capture.model_methods import method_of
from graphplan.capture.modes import Modes, read_modes, write_modes
from graphplan.capture.shared_attributes import copy_to_run
from graphplan.capture.signature import BoundCall, InputSignature, TensorLeaf, leaf_names
from graphplan.capture.structure import map_leaves
from graphplan.capture.transformers.caches import is_cache
from graphplan.devices.topology import CPU, SIMULATED
from graphplan.errors import CaptureError, GraphplanError, PlanError, first_line
from graphplan.runtime.memory.arena import moved


@dataclass(frozen=True, slots=True)
class _Way:
    """How modules are run.

    Attributes:
        name: for people.
        gathered: whether all run on the caller's device, and weights are copied there.
        returns: whether a module's results go to where its caller computes.
    """

    name: str
    gathered: bool = False
    returns: bool = True


_WAYS = (
    _Way("where their weights are", returns=False),
    _Way("where their weights are, results copied back"),
    _Way("on the device of the call", gathered=True),
)


@dataclass
class CallForm:
    """A call structure that no capture takes, of any sizes; ``way`` is known from its first call on."""

    entry: str
    modes: Modes
    signature: InputSignature
    way: _Way | None = None


@dataclass(frozen=True, slots=True)
class Untraced:
    """How calls of a model run that has no graph at all.

    Attributes:
        reason: why it has none.
        main: where modules compute whose weights are on the CPU.
        returns: whether a module's results go to where its caller computes.
    """

    reason: str
    main: torch.device
    returns: bool

    def __str__(self) -> str:
        return f"hooks run the model: {self.reason}"

    def run(self, plain: nn.Module, entry: str, call: BoundCall) -> Any:
        """Run a call, of any structure, of the model as its own class."""
        _refuse_autocast(plain)
        running = _HookedRun(_WAYS[self.returns], call.device or torch.device(CPU), self.main)
        return _run(plain, entry, running, call.args, call.kwargs)


@dataclass
class Modulewise:
    """The calls of one placed module with graphs that run module by module."""

    forms: list[CallForm] = field(default_factory=list)
    tree: nn.Module | None = None

    def renewed(self) -> Modulewise:
        """For a copy of the module."""
        return Modulewise(list(self.forms))

    def note(self, entry: str, call: BoundCall, modes: Modes) -> CallForm:
        """Run calls of this structure module by module from now on."""
        leaves = tuple(_any_size(leaf) for leaf in call.leaves)
        form = CallForm(entry, modes, InputSignature(call.spec, leaves, leaf_names(call)))
        self.forms.append(form)
        return form

    def find(self, entry: str, call: BoundCall, modes: Modes) -> CallForm | None:
        """The form that a call has, if it is one of these."""
        for form in self.forms:
            if form.entry == entry and form.modes == modes and form.signature.mismatch(call) is None:
                return form
        return None

    def run(
        self,
        whole: nn.Module,
        plain: nn.Module,
        form: CallForm,
        call: BoundCall,
        instead: torch.device | None = None,
    ) -> Any:
        """Run a call.

        Args:
            whole: the placed module, whose weights are used.
            plain: the same as its own class.
            form: that the call has.
            call: its arguments.
            instead: where modules on the CPU compute; None: on the CPU.

        Raises:
            CaptureError: no way of running works.
            Exception: what the model itself raises for this call, unchanged.
        """
        if self.tree is None:
            self.tree = _shared(plain)
        _follow(self.tree, whole)
        _refuse_autocast(self.tree)
        device = call.device or torch.device(CPU)
        form.way = form.way or self._first_way(form, call, device, instead)
        running = _HookedRun(form.way, device, instead)
        result = _run(self.tree, form.entry, running, call.args, call.kwargs)
        _take_back(self.tree, whole)
        return result

    def _first_way(
        self, form: CallForm, call: BoundCall, device: torch.device, instead: torch.device | None
    ) -> _Way:
        assert self.tree is not None
        failures: list[Exception] = []
        for way in _WAYS:
            args, kwargs = copy.deepcopy((call.args, call.kwargs))
            try:
                with undone(self.tree), _without_hooks(self.tree):
                    _run(self.tree, form.entry, _HookedRun(way, device, instead), args, kwargs)
            except (RuntimeError, NotImplementedError, GraphplanError) as error:
                failures.append(error)
                gc.collect()
            else:
                return way
        if _is_the_models(failures):
            raise failures[-1]
        raise CaptureError(
            "no capture takes this call, and its modules do not run\n  "
            + "\n  ".join(f"{w.name}: {first_line(e)}" for w, e in zip(_WAYS, failures, strict=True))
            + "\nPartition the model with this call as the example: hooks then run it, with room for what "
            "this call needs beside the weights"
        )


def _is_the_models(failures: Sequence[Exception]) -> bool:
    """Whether every way of running raised the same, and not for want of memory: then eager raises it too."""
    ours = isinstance(failures[-1], GraphplanError | torch.OutOfMemoryError)
    return not ours and all(is_same(error, failures[-1]) for error in failures)


def _refuse_autocast(tree: nn.Module) -> None:
    if torch.is_autocast_enabled(CPU) and any(t.device.type == SIMULATED for t in tree.parameters()):
        raise PlanError(
            "autocast is on, and simulated devices have none where hooks run the model: leave the autocast, "
            "or convert the model with .to(dtype) before you place it"
        )


def _any_size(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return TensorLeaf(leaf.dtype, (None,) * leaf.dim(), stride=())


def _shared(plain: nn.Module) -> nn.Module:
    """A tree of modules of its own over the same parameters and buffers."""
    memo: dict[int, Any] = {id(t): t for t in (*plain.parameters(), *plain.buffers())}
    tree = copy_to_run(plain, memo)
    for name in _hook_tables(tree):  # the placed module's own, which run around the call
        vars(tree)[name].clear()
    return tree


def _hook_tables(module: nn.Module) -> list[str]:
    return [n for n in vars(module) if n.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))]


def _follow(tree: nn.Module, whole: nn.Module) -> None:
    """Have the modes, the tensors, and the hooks of submodules, that the placed module has now."""
    write_modes(tree, read_modes(whole))
    for mine, part in zip(tree.modules(), whole.modules(), strict=True):
        mine._parameters.update(part._parameters)
        mine._buffers.update(part._buffers)
        for name in _hook_tables(part) if part is not whole else ():
            vars(mine)[name] = copy.copy(vars(part)[name])


def _take_back(tree: nn.Module, whole: nn.Module) -> None:
    """Give the placed module the values of buffers that the model has made anew."""
    for mine, part in zip(tree.modules(), whole.modules(), strict=True):
        for name, own in part._buffers.items():
            made = mine._buffers.get(name)
            if own is not None and made is not None and made is not own:
                own.detach().copy_(made)
                mine._buffers[name] = own


@contextmanager
def _without_hooks(tree: nn.Module) -> Iterator[None]:
    """A trial calls no hooks of the user's."""
    hooks = [(vars(part), name, vars(part)[name]) for part in tree.modules() for name in _hook_tables(part)]
    for table, name, found in hooks:
        table[name] = type(found)()
    try:
        yield
    finally:
        for table, name, found in hooks:
            table[name] = found


@contextmanager
def undone(tree: nn.Module) -> Iterator[None]:
    """A trial, after which buffers, and the state of what is drawn at random, are as before."""
    kept = [(part, dict(part._buffers)) for part in tree.modules() if part._buffers]
    values = [(t, t._version, t.detach().cpu().clone()) for t in tree.buffers() if not t.is_inference()]
    accelerators = {t.device.index for t in tree.parameters() if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(accelerators)):
        try:
            yield
        finally:
            for part, buffers in kept:
                part._buffers.update(buffers)
            with torch.no_grad():
                for tensor, version, before in values:
                    if tensor._version != version:
                        tensor.copy_(before)


@dataclass
class _HookedRun:
    """One run.

    Attributes:
        way: of running.
        host: where the inputs of the call are.
        instead: where modules that are on the CPU compute; None: on the CPU.
        callers: where the modules that are running compute, the innermost last.
        swapped: for each of them, the tensors that are elsewhere in truth.
    """

    way: _Way
    host: torch.device
    instead: torch.device | None
    callers: list[torch.device] = field(default_factory=list)
    swapped: list[_Swapped] = field(default_factory=list)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Bring a module's inputs, its own tensors, and its layer of the caches, to where it runs."""
        device = self.host if self.way.gathered else _device_of(module)
        if device is not None and device.type == CPU and self.instead is not None:
            device = self.instead
        self.callers.append(device or self._device_of_caller())
        self.swapped.append(_Swapped())
        if device is None:
            return args, kwargs
        self.swapped[-1].bring(module, device)
        layer = getattr(module, "layer_idx", None)
        for value in (*args, *kwargs.values()):
            if isinstance(layer, int) and is_cache(value):
                _bring_layer(value, layer, device)
        return sent(args, device), sent(kwargs, device)

    def after(self, module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> Any:
        """Put back what was copied."""
        self.callers.pop()
        self.swapped.pop().put_back(module)
        return sent(result, self._device_of_caller()) if self.way.returns else result

    def _device_of_caller(self) -> torch.device:
        return self.callers[-1] if self.callers else self.host


@dataclass
class _Swapped:
    """Tensors of one module that are on another device while it runs."""

    kept: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def bring(self, module: nn.Module, device: torch.device) -> None:
        """Have copies on the device in place of what is elsewhere."""
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.device != device:
                    here = moved(tensor, device)
                    self.kept.append((table, name, tensor, here))
                    table[name] = here  # type: ignore[assignment]  # read while it runs
        _tell_recurrent(module)

    def put_back(self, module: nn.Module) -> None:
        """Have the tensors again, buffers with what was written to their copies."""
        for table, name, tensor, here in self.kept:
            found = table[name]
            if found is here and table is module._buffers:
                with torch.no_grad():
                    tensor.copy_(here)
            anew = found is not None and found is not here  # the model has made another
            table[name] = found.to(tensor.device) if anew else tensor
        _tell_recurrent(module)


def _tell_recurrent(module: nn.Module) -> None:
    """LSTMs keep a list of their weights."""
    names = getattr(module, "_flat_weights_names", None)
    if names is not None:
        vars(module)["_flat_weights"] = [getattr(module, name, None) for name in names]


def _run(
    tree: nn.Module, entry: str, call: _HookedRun, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    hooks: list[Any] = []
    for part in list(tree.modules())[1:]:  # a call of the whole by another thread reads those of the whole
        hooks.append(part.register_forward_pre_hook(call.before, with_kwargs=True, prepend=True))
        hooks.append(part.register_forward_hook(call.after, with_kwargs=True, always_call=True))
    try:
        run = method_of(tree, entry) if entry else tree.forward  # what is around it runs around the whole
        if isinstance(run, nn.Module):
            return run(*args, **kwargs)
        owner = tree.get_submodule(entry.partition(":")[0])  # its own tensors are used, but it is not called
        args, kwargs = call.before(owner, args, kwargs)
        try:
            result = run(*args, **kwargs)
        except BaseException:
            call.after(owner, args, kwargs, None)
            raise
        return call.after(owner, args, kwargs, result)
    finally:
        for hook in hooks:
            hook.remove()


def _device_of(module: nn.Module) -> torch.device | None:
    """Where most bytes of a module are."""
    found: dict[torch.device, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        found[tensor.device] = found.get(tensor.device, 0) + tensor.nbytes
    return max(found, key=lambda device: found[device], default=None)


def _bring_layer(cache: Any, index: int, device: torch.device) -> None:
    """Have a layer's tensors of a cache where the layer runs."""
    for one in (cache, *(value for value in vars(cache).values() if is_cache(value))):
        layers = getattr(one, "layers", ())
        if index < len(layers):
            state = vars(layers[index])
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    state[name] = value.to(device)
            state.update({name: device for name, value in state.items() if isinstance(value, torch.device)})


def sent(value: Any, device: torch.device) -> Any:
    """The value with its tensors on a device; caches as they are."""

    def send(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.device != device else leaf

    return map_leaves(send, value, is_leaf=is_cache)
