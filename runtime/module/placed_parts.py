"""Calls of submodules and methods of a placed module: each has graphs of its own.

Each is an *entry* of the placed module: a path, and possibly a method. All entries share the placed weights::

    placed.text_model(ids)     "text_model"    by the attribute that ``nn.Module.compile()`` sets
    placed.text_model.forward(ids)             the derived class of the submodule overrides ``forward``
    placed.encode(x)           ":encode"       the derived class of the model overrides the method
    placed.vae.decode(z)       "vae:decode"    the derived class of the submodule overrides the method

Copies and pickles of submodules are plain modules. A trace reads such a copy, and a run module by module is
inside :func:`running_own_code`: neither runs entries.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import nn

from graphplan._compat.torch import call_of, call_without_compiled, in_backward, set_call
from graphplan.capture.model_methods import RunAsItIs, UntracedMethodError
from graphplan.capture.signature import signature_of
from graphplan.capture.structure import leaves_of
from graphplan.devices.topology import CPU
from graphplan.errors import PlanError
from graphplan.runtime.fallback.derived_classes import derive_class, derived_class, original_class, unplaced
from graphplan.runtime.fallback.one_device import is_on_one_device, on_one_device
from graphplan.runtime.weights.weight_changes import require_in_place
from graphplan.warnings import warn

_LIBRARIES = {"accelerate", "lightning", "peft", "pytorch_lightning", "torch"}
_TRANSFORMERS_METHODS = re.compile(r"(encode|decode|get_(image|video|audio|text|qformer)_features)$")

_OWN_CODE = (
    "\nIts own code runs instead, and the submodules that it calls run as separate graphs: what it "
    "computes between them is not planned. strict=True makes this an error"
)

_local = threading.local()


@contextmanager
def running_own_code(root: nn.Module) -> Iterator[None]:
    """Context manager in which a placed module and its submodules run their own code in this thread."""
    outer = getattr(_local, "roots", ())
    _local.roots = (*outer, root)
    try:
        yield
    finally:
        _local.roots = outer


def runs_own_code(root: nn.Module) -> bool:
    """Whether this thread is in a block of :func:`running_own_code` of this module."""
    return any(module is root for module in getattr(_local, "roots", ()))


def _is_recomputed(root: Any) -> bool:
    """Whether ``torch.utils.checkpoint`` probably recomputes a part of a forward pass without a graph."""
    return in_backward() and bool(root._graphplan.modular_calls.structures)


class _CallForwarder:
    """Forwards calls of a submodule to its placed module; holds both weakly, and a copy or pickle is None."""

    def __init__(self, root: nn.Module, path: str, part: nn.Module) -> None:
        self._root, self._part = weakref.ref(root), weakref.ref(part)
        self.path = path
        self._signature: inspect.Signature | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part: Any = self._part()
        root: Any = self.root()
        if root is None:
            return call_without_compiled(part, *args, **kwargs)
        if self._signature is None:
            self._signature = signature_of(part.forward)
        return root._graphplan_enter(self.path, self._signature, args, kwargs)

    def root(self) -> nn.Module | None:
        """Return the placed module; None if the submodule must run its own code: in a run, or once replaced.

        Raises:
            PlanError: the placed module no longer exists.
        """
        root = self._root()
        if root is None:
            raise PlanError(
                f"{self.path!r} is a submodule of a placed model that is gone: keep the model that "
                "partition returned as long as its submodules are called"
            )
        if runs_own_code(root) or _is_recomputed(root):
            return None
        part: Any = root
        for name in self.path.split("."):
            part = None if part is None else part._modules.get(name)
        return root if part is self._part() else None

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class PlacedPart(nn.Module):
    """A submodule of a placed module whose class has methods to plan, or a ``device``."""

    def _graphplan_entry(self) -> tuple[nn.Module, str] | None:
        call = call_of(self)
        root = call.root() if isinstance(call, _CallForwarder) else None
        return None if root is None else (root, call.path)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move nothing; raise PlanError except for a move to the CPU, where inputs may come from."""
        if self._graphplan_entry() is None:
            original_class(self)._apply(self, fn, recurse)
            return self
        require_in_place(self, lambda probe: probe._apply(fn, recurse), torch.device("cpu"))
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = unplaced(self)
        for name, value in vars(plain).items():
            if isinstance(value, MethodType) and value.__self__ is plain:  # copies map this module, not that
                plain.__dict__[name] = MethodType(value.__func__, self)
        reduced: Any = plain.__reduce_ex__(protocol)
        made_by_new = not isinstance(reduced, str) and reduced[0].__name__ == "__newobj__"
        return (_new, *reduced[1:]) if made_by_new else reduced


def _deepcopy(self: nn.Module, memo: dict[Any, Any]) -> Any:
    """``__deepcopy__`` of a submodule whose original class defines one.

    Other submodules have none: a module that forwards missing attributes, as PEFT's do, would be copied as
    the submodule to which it forwards.
    """
    plain = memo.get((PlacedPart, id(self)))  # one for all references: it may refer to itself
    if plain is None:
        plain = memo[PlacedPart, id(self)] = unplaced(self)
    return copy.deepcopy(plain, memo)


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    """Do as ``copyreg.__newobj__``, which pickle accepts only for the pickled object's class."""
    return cls.__new__(cls, *args)


def link(root: nn.Module) -> None:
    """Have calls of submodules that hold tensors, and of their methods, go through the placed ``root``."""
    parts = dict(root.named_modules())
    for path in sorted(_with_tensors(parts) - {""}):
        part = parts[path]
        set_call(part, _CallForwarder(root, path, part))
        if not isinstance(part, PlacedPart):
            part.__class__ = _part_class(type(part))


def unlink(root: nn.Module) -> None:
    """Undo :func:`link`."""
    for part in root.modules():
        if isinstance(call_of(part), _CallForwarder):
            set_call(part, None)
        if isinstance(part, PlacedPart):
            part.__class__ = original_class(part)  # type: ignore[assignment]  # as before link()


def _with_tensors(parts: dict[str, nn.Module]) -> set[str]:
    """Return the paths of modules that hold tensors themselves or in submodules."""
    paths: set[str] = set()
    for path, part in parts.items():
        if any(t is not None for t in (*part._parameters.values(), *part._buffers.values())):
            steps = path.split(".")
            paths.update(".".join(steps[:depth]) for depth in range(len(steps) + 1))
    return paths & parts.keys()


_without_methods: WeakSet[type[nn.Module]] = WeakSet()  # classes with nothing to override


def _part_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the derived class of placed submodules; ``original`` itself if there is nothing to override."""
    derived = derived_class(original, PlacedPart)
    if derived is None and original not in _without_methods:
        body = planned_attributes(original) | _forward_of(original)
        if body and hasattr(original, "__deepcopy__"):
            body["__deepcopy__"] = _deepcopy
        if body:
            derived = derive_class(original, PlacedPart, lambda: body, in_place=True)
        else:
            _without_methods.add(original)
    return derived or original


def planned_attributes(original: type[nn.Module]) -> dict[str, Any]:
    """Return the attributes that a placed class has in place of the model's own, besides ``forward``.

    They are methods that may compute; the ``device`` property, if there is one; and the methods of
    transformers that enable gradient checkpointing, which the plan decides: the last of them adds hooks, with
    which calls would run module by module.
    """
    methods = {n: _planned_method(original, n) for n in dir(original) if _may_compute(original, n)}
    ignored = {n: _ignored_by_plan(original, n) for n in _CHECKPOINTING if hasattr(original, n)}
    return methods | _device_of(original) | ignored


def _forward_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return the ``forward`` of placed submodules, which calls them; torch's own layers keep theirs."""
    if (original.forward.__module__ or "").partition(".")[0] == "torch":
        return {}

    @functools.wraps(original.forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._graphplan_entry() is None:
            return original.forward(self, *args, **kwargs)  # looked up now, as the class may change
        return call_of(self)(*args, **kwargs)

    return {"forward": call}


def _device_of(original: type[nn.Module]) -> dict[str, Any]:
    """The planned device of inputs: code around a model, such as ``generate``, makes its inputs there.

    It overrides the ``device`` property of the model's class, if that has one.
    """
    inherited: Any = inspect.getattr_static(original, "device", None)
    if not isinstance(inherited, property) or inherited.fget is None:
        return {}
    get = inherited.fget

    def device(self: Any) -> torch.device:
        entry = self._graphplan_entry()
        host: torch.device = (None if entry is None else _host(entry[0])) or get(self)
        return host

    return {"device": property(device, doc=_device_of.__doc__)}


_CHECKPOINTING = (
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_input_require_grads",
)
_PLANNED = (
    "gradient checkpointing of a placed model is left to its plan: with train=True, the plan recomputes "
    "activations where that pays"
)


def _ignored_by_plan(original: type[nn.Module], name: str) -> Callable[..., None]:
    @functools.wraps(getattr(original, name))
    def enable(self: Any, *args: Any, **kwargs: Any) -> None:
        entry = self._graphplan_entry()
        if entry is None or entry[0]._graphplan.untraced is not None:
            getattr(original, name)(self, *args, **kwargs)
        else:
            warn(_PLANNED)

    return enable


def _host(root: nn.Module) -> torch.device | None:
    """Return the device of inputs, as planned; None without a plan."""
    state: Any = vars(root).get("_graphplan")
    planned = state is not None and bool(state.programs)
    return (state.device or state.programs[0].host) if planned else None


def _may_compute(original: type, name: str) -> bool:
    if name.startswith("_") or hasattr(nn.Module, name):
        return False
    owner = next((cls for cls in original.__mro__ if name in vars(cls)), object)
    method, library = vars(owner).get(name), owner.__module__.partition(".")[0]
    if library in _LIBRARIES or (library == "transformers" and not _TRANSFORMERS_METHODS.match(name)):
        return False
    return inspect.isfunction(method) and not (
        inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method)
    )


def _planned_method(original: type[nn.Module], name: str) -> Callable[..., Any]:
    """Return the method that runs a planned graph of one of the model's.

    Called without a tensor, or if it calls the whole model or changes it, the method runs its own code: the
    submodules that it calls are placed, and other tensors of its module are copied to where it computes.
    """
    signatures: dict[Any, inspect.Signature] = {}

    @functools.wraps(getattr(original, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        method, placed = getattr(original, name), self._graphplan_entry()  # now, as the class may change
        if placed is None:
            return method(self, *args, **kwargs)
        root: Any = placed[0]
        entry, own_code = f"{placed[1]}:{name}", root._graphplan.own_code_methods
        key = entry, torch.is_grad_enabled()  # with gradients, loops are traced
        devices = [leaf.device for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if devices and key not in own_code:
            if method not in signatures:
                signatures.clear()
                signatures[method] = signature_of(method.__get__(self))
            try:
                return root._graphplan_enter(entry, signatures[method], args, kwargs)
            except RunAsItIs:
                own_code.add(key)
            except UntracedMethodError as error:
                if root._graphplan.strict:
                    raise
                warn(f"{error}{_OWN_CODE}")
                own_code.add(key)
        with _own_tensors_on_one_device(self, root, devices):
            return method(self, *args, **kwargs)

    return call


def _own_tensors_on_one_device(
    part: nn.Module, root: Any, devices: Sequence[torch.device]
) -> AbstractContextManager[None]:
    """Return a context manager for a method's own code: it copies tensors of its module to where it computes.

    ``devices`` are those of the tensors among its arguments.
    """
    state = root._graphplan
    differentiates = torch.is_grad_enabled() and (state.keep_grad or state.step is not None)
    if differentiates or is_on_one_device():  # copies made below autograd pass no gradients
        return nullcontext()
    host = devices[0] if devices else _host(root) or torch.device(CPU)
    parts = part.modules() if devices else [part]  # a call without tensors may be a whole training loop
    held = (t for inner in parts for t in (*inner._parameters.values(), *inner._buffers.values()))
    several = any(tensor is not None and tensor.device != host for tensor in held)
    return on_one_device(lambda: host) if several else nullcontext()
