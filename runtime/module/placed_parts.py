"""Submodules and methods of a placed module, called by themselves: each has graphs of its own.

Each is an *entry* of the whole, a path and perhaps a method, over the weights where they are::

    placed.text_model(ids)     "text_model"    torch asks a module for what compile() put in place of its call
    placed.text_model.forward(ids)             the class of the submodule has such a ``forward``
    placed.encode(x)           ":encode"       the class that is made from the model's has such a method
    placed.vae.decode(z)       "vae:decode"    likewise the class of the submodule

Copies and pickles of submodules have none of this: they are plain modules, which is also why what is traced,
or runs module by module, does not come back here.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from graphplan.runtime.fallback.one_device import is_on_one_device, on_one_device
from graphplan.runtime.fallback.short_names import class_made, made_class, original_class, unplaced
from graphplan.runtime.weights.weight_changes import require_in_place
from graphplan.warnings import warn

_LIBRARIES = {"accelerate", "lightning", "peft", "pytorch_lightning", "torch"}
_OF_TRANSFORMERS = re.compile(r"(encode|decode|get_(image|video|audio|text|qformer)_features)$")

_OWN_CODE = (
    "\nIts own code runs instead, and the submodules that it calls run as graphs of their own: what it "
    "computes between them is not planned. strict=True makes this an error"
)

_own_thread = threading.local()


@contextmanager
def as_written(whole: nn.Module) -> Iterator[None]:
    """A block in which a module, its submodules and methods, called in this thread, run their own code."""
    before = getattr(_own_thread, "as_written", ())
    _own_thread.as_written = (*before, whole)
    try:
        yield
    finally:
        _own_thread.as_written = before


def runs_as_written(whole: nn.Module) -> bool:
    """Whether this thread is in a block of :func:`as_written` of this module."""
    return any(one is whole for one in getattr(_own_thread, "as_written", ()))


def _is_computed_again(whole: Any) -> bool:
    """Whether a part of a call that ran without a graph is run by ``torch.utils.checkpoint``, likely."""
    return in_backward() and bool(whole._graphplan.modulewise.forms)


class _Link:
    """Sends calls of a submodule to its placed whole. It keeps neither alive; a copy of it is None."""

    def __init__(self, whole: nn.Module, path: str, part: nn.Module) -> None:
        self._whole, self._path, self._part = weakref.ref(whole), path, weakref.ref(part)
        self._signature: inspect.Signature | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        part: Any = self._part()
        whole: Any = self.whole()
        if whole is None:
            return call_without_compiled(part, *args, **kwargs)
        if self._signature is None:
            self._signature = signature_of(part.forward)
        return whole._graphplan_enter(self._path, self._signature, args, kwargs)

    def whole(self) -> nn.Module | None:
        """The placed whole; None where the part is to run its own code: inside, or after it was replaced.

        Raises:
            PlanError: there is no whole any more.
        """
        whole = self._whole()
        if whole is None:
            raise PlanError(
                f"{self._path!r} is a submodule of a placed model that is gone: keep the model that "
                "partition returned as long as its submodules are called"
            )
        if runs_as_written(whole) or _is_computed_again(whole):
            return None
        found: Any = whole
        for name in self._path.split("."):
            found = None if found is None else found._modules.get(name)
        return whole if found is self._part() else None

    def entry(self) -> tuple[nn.Module, str] | None:
        """The whole and the path; None as :meth:`whole`."""
        whole = self.whole()
        return None if whole is None else (whole, self._path)

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class PlacedPart(nn.Module):
    """A submodule of a placed module, of a class that has methods that may compute, or a device."""

    def _graphplan_entry(self) -> tuple[nn.Module, str] | None:
        found = call_of(self)
        return found.entry() if isinstance(found, _Link) else None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """As that of the whole: to the CPU, where calls may come from, it moves nothing."""
        if self._graphplan_entry() is None:
            original_class(self)._apply(self, fn, recurse)
            return self
        require_in_place(self, lambda probe: probe._apply(fn, recurse), torch.device("cpu"))
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = unplaced(self).__reduce_ex__(protocol)
        made_by_class = not isinstance(reduced, str) and reduced[0].__name__ == "__newobj__"
        return (_new, *reduced[1:]) if made_by_class else reduced


def _deepcopied(self: nn.Module, memo: dict[Any, Any]) -> Any:
    """``__deepcopy__`` of a part whose own class has one.

    No other part has: a module that hands on what it lacks, as PEFT's do, would be copied as its part.
    """
    plain = memo.get((PlacedPart, id(self)))  # one for all: it may refer to itself
    if plain is None:
        plain = memo[PlacedPart, id(self)] = unplaced(self)
    return copy.deepcopy(plain, memo)


def _new(cls: type[nn.Module], *args: Any) -> nn.Module:
    """What ``copyreg.__newobj__`` makes; pickle lets that make objects of the pickled one's class only."""
    return cls.__new__(cls, *args)


def link(whole: nn.Module) -> None:
    """Have the submodules that hold tensors, and their methods, answer through the whole."""
    parts = dict(whole.named_modules())
    for path in sorted(_with_tensors(parts) - {""}):
        part = parts[path]
        set_call(part, _Link(whole, path, part))
        if not isinstance(part, PlacedPart):
            part.__class__ = _part_class(type(part))


def unlink(whole: nn.Module) -> None:
    """Undo :func:`link`."""
    for part in whole.modules():
        if isinstance(call_of(part), _Link):
            set_call(part, None)
        if isinstance(part, PlacedPart):
            part.__class__ = original_class(part)  # type: ignore[assignment]  # what it was


def _with_tensors(parts: dict[str, nn.Module]) -> set[str]:
    """The paths of those that hold tensors, or have children that do."""
    found: set[str] = set()
    for path, part in parts.items():
        if any(t is not None for t in (*part._parameters.values(), *part._buffers.values())):
            steps = path.split(".")
            found.update(".".join(steps[:depth]) for depth in range(len(steps) + 1))
    return found & parts.keys()


_without: WeakSet[type[nn.Module]] = WeakSet()  # classes of which nothing is to be placed


def _part_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of placed submodules; the original itself where it has no methods that may compute."""
    found = class_made(original, PlacedPart)
    if found is None and original not in _without:
        body = methods_of(original) | device_of(original) | checkpointing_of(original) | _forward_of(original)
        if body and hasattr(original, "__deepcopy__"):
            body["__deepcopy__"] = _deepcopied
        if body:
            found = made_class(original, PlacedPart, lambda: body, in_place=True)
        else:
            _without.add(original)
    return found or original


def methods_of(original: type[nn.Module]) -> dict[str, Any]:
    """Name -> method that a placed class has in place of one of the model's own that may compute.

    Given no tensor, or where it turns out to call the whole model or to change it, it runs as it is: what it
    calls is placed then, and what its module and its submodules hold is copied to where it computes.
    """
    return {name: _entry(original, name) for name in dir(original) if _may_compute(original, name)}


def _forward_of(original: type[nn.Module]) -> dict[str, Any]:
    """The ``forward`` of placed submodules, which is their call; torch's own layers keep theirs."""
    if (original.forward.__module__ or "").partition(".")[0] == "torch":
        return {}

    @functools.wraps(original.forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._graphplan_entry() is None:
            return original.forward(self, *args, **kwargs)  # as the class has it now
        return call_of(self)(*args, **kwargs)

    return {"forward": call}


def device_of(original: type[nn.Module]) -> dict[str, Any]:
    """The ``device`` of placed modules of a class that has one: where the tensors of calls are, as planned.

    Code around a model makes its inputs there, as pipelines and ``generate`` do.
    """
    own: Any = inspect.getattr_static(original, "device", None)
    if not isinstance(own, property) or own.fget is None:
        return {}
    get = own.fget

    def device(self: Any) -> torch.device:
        found = self._graphplan_entry()
        answer: torch.device = (None if found is None else _host(found[0])) or get(self)
        return answer

    return {"device": property(device, doc=device_of.__doc__)}


_CHECKPOINTING = (
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_input_require_grads",
)
_PLANNED = (
    "gradient checkpointing of a placed model is left to its plan: with train=True it computes again what is "
    "worth it"
)


def checkpointing_of(original: type[nn.Module]) -> dict[str, Any]:
    """Methods of transformers by which trainers have activations computed again; a graph needs none of it.

    The last of them adds hooks, with which calls would run module by module.
    """
    return {name: _left_to_the_plan(original, name) for name in _CHECKPOINTING if hasattr(original, name)}


def _left_to_the_plan(original: type[nn.Module], name: str) -> Callable[..., None]:
    @functools.wraps(getattr(original, name))
    def enable(self: Any, *args: Any, **kwargs: Any) -> None:
        found = self._graphplan_entry()
        if found is None or found[0]._graphplan.untraced is not None:
            getattr(original, name)(self, *args, **kwargs)
        else:
            warn(_PLANNED)

    return enable


def _host(whole: nn.Module) -> torch.device | None:
    """Where the tensors of calls are, as planned; None without a plan."""
    state: Any = vars(whole).get("_graphplan")
    planned = state is not None and bool(state.programs)
    return (state.device or state.programs[0].host) if planned else None


def _may_compute(original: type, name: str) -> bool:
    if name.startswith("_") or hasattr(nn.Module, name):
        return False
    owner = next((cls for cls in original.__mro__ if name in vars(cls)), object)
    found, library = vars(owner).get(name), owner.__module__.partition(".")[0]
    if library in _LIBRARIES or (library == "transformers" and not _OF_TRANSFORMERS.match(name)):
        return False
    return inspect.isfunction(found) and not (
        inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found)
    )


def _entry(original: type[nn.Module], name: str) -> Callable[..., Any]:
    known: dict[Any, inspect.Signature] = {}

    @functools.wraps(getattr(original, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(original, name)  # as the class has it now
        found, given = self._graphplan_entry(), _devices((args, kwargs))
        if found is None:
            return method(self, *args, **kwargs)
        whole: Any = found[0]
        if given:
            if method not in known:
                known.clear()
                known[method] = signature_of(method.__get__(self))
            entry, own = f"{found[1]}:{name}", whole._graphplan.as_written
            mine = entry, torch.is_grad_enabled()  # with gradients, loops are traced
            if mine not in own:
                try:
                    return whole._graphplan_enter(entry, known[method], args, kwargs)
                except RunAsItIs:
                    own.add(mine)
                except UntracedMethodError as error:
                    if whole._graphplan.strict:
                        raise
                    warn(f"{error}{_OWN_CODE}")
                    own.add(mine)
        host = given[0] if given else _host(whole) or torch.device(CPU)
        parts = self.modules() if given else [self]  # one without may be a whole training loop
        held = (one for part in parts for one in (*part._parameters.values(), *part._buffers.values()))
        outside = not (_keeps_grad(whole) or is_on_one_device())
        apart = outside and any(one is not None and one.device != host for one in held)
        with on_one_device(lambda: host) if apart else nullcontext():
            return method(self, *args, **kwargs)

    return call


def _keeps_grad(whole: Any) -> bool:
    """Whether a backward pass may follow, for which copies below autograd are of no use."""
    state = whole._graphplan
    return torch.is_grad_enabled() and (state.keep_grad or state.step is not None)


def _devices(values: Sequence[Any]) -> list[torch.device]:
    return [leaf.device for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]
