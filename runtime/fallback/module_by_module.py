"""Calls that no capture takes, of a placed module: its modules run where their weights are.

What a forward computes between its modules may need things together, which nobody knows beforehand: ways of
running are tried one after another, on copies of the arguments, and the first that runs is kept. The last
two bring what operations want together to where their module's weights are, and all to the caller's device.

The module runs itself, as in eager: what its code keeps in attributes is kept, and hooks see its submodules.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphplan.capture.changes.attribute_data import is_plain
from graphplan.capture.eager_run import is_same
from graphplan.capture.model.modes import Modes
from graphplan.capture.signature import (
    BoundCall,
    CounterLeaf,
    FloatLeaf,
    InputSignature,
    ObjectLeaf,
    TensorLeaf,
    leaf_names,
)
from graphplan.capture.sizes.dynamic_sizes import UNBOUNDED
from graphplan.devices.topology import CPU, SIMULATED
from graphplan.errors import CaptureError, GraphplanError, InputError, PlanError, SimulatedOutOfMemoryError
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import first_line
from graphplan.runtime.fallback.added_hooks import Hook, Hooks, hooks_beside, hooks_of
from graphplan.runtime.fallback.hooked_run import HookedRun, Way, run_hooked, undone
from graphplan.runtime.fallback.replaced_tensors import tensors_in

STAYS = Way("where their weights are", returns=False)
RETURNS = Way("where their weights are, results copied back")
TOGETHER = Way("where their weights are, with what they read", together=True)
_WAYS = (STAYS, RETURNS, TOGETHER, Way("on the device of the call", gathered=True, together=True))
_OUT_OF_MEMORY = (torch.OutOfMemoryError, SimulatedOutOfMemoryError)

_HOOK_TABLES = [name for name, value in vars(nn.Module()).items() if "_hooks" in name and value is not None]

_ANOTHER_WAY = (
    "graphplan runs this call without a graph, its modules {}, as one like it was found to run. If eager "
    "runs it, partition the model with this call as the example"
)


@dataclass
class CallForm:
    """A call structure that no capture takes, of any sizes; ``way`` is known from its first call on.

    Where the leaves at ``differentiated`` require no gradient, a capture may take it. ``hooked``: it is while
    submodules have hooks that it has no graph. Modules on the CPU compute on ``main``, if it is given.
    """

    entry: str
    modes: Modes
    signature: InputSignature
    differentiated: Sequence[int] = ()
    hooked: bool = False
    main: torch.device | None = None
    way: Way | None = None


@dataclass(slots=True)
class Untraced:
    """How calls of a model run that has no graph.

    Attributes:
        reason: why it has none.
        main: the device on which modules on the CPU compute, if any.
        way: known from the first call on.
        tries: how many calls of other structures may still be tried; a trace that fails takes seconds.
    """

    reason: str
    main: torch.device | None
    way: Way | None = None
    tries: int = 0

    def __str__(self) -> str:
        return f"hooks run the model: {self.reason}"


@dataclass
class Modulewise:
    """The calls of one placed module with graphs that run module by module.

    Attributes:
        forms: of the calls.
        traced: those hooks of submodules that graphs were traced with, or that such a call has added.
        names: of each submodule, the attributes and parameters that the graphs were traced from.
        left: whether a call has left something in attributes of the module.
    """

    forms: list[CallForm] = field(default_factory=list)
    traced: frozenset[Hook] = frozenset()
    names: Sequence[Collection[str]] = ()
    left: bool = False

    def watch(self, module: nn.Module) -> None:
        """Know a module as its graphs were traced; a copy of one that is known is as that was."""
        if not self.names:
            self.traced = hooks_of(module)
            self.names = [frozenset((*vars(part), *part._parameters)) for part in module.modules()]

    def untraced_hooks(self, parts: Sequence[nn.Module]) -> list[Hooks]:
        """As :func:`hooks_beside`, of submodules that may have further hooks and parameters now.

        None where a call has exchanged modules: hooks are known by the places of these.
        """
        same = len(parts) + 1 == len(self.names)
        return hooks_beside(self.traced, self.names, parts) if same else []

    def copy(self) -> Modulewise:
        """That of a copy of the module."""
        return replace(self, forms=list(self.forms), left=False)

    def note(
        self, entry: str, call: BoundCall, modes: Modes, *, keeps_grad: bool = False, hooked: bool = False
    ) -> CallForm:
        """Run calls of this structure module by module from now on.

        If it ``keeps_grad``, those alone that require the gradients that this one does. ``hooked`` is as in
        :class:`CallForm`.
        """
        leaves = tuple(_any_size(leaf) for leaf in call.leaves)
        required = [i for i, leaf in enumerate(call.leaves) if _requires_grad(leaf)] if keeps_grad else ()
        form = CallForm(entry, modes, InputSignature(call.spec, leaves, leaf_names(call)), required, hooked)
        self.forms.append(form)
        return form

    def find(self, entry: str, call: BoundCall, modes: Modes) -> CallForm | None:
        """The form that a call has, if it is one of these."""
        for form in self.forms:
            same = form.entry == entry and form.modes == modes and form.signature.mismatch(call) is None
            if same and all(_requires_grad(call.leaves[i]) for i in form.differentiated):
                return form
        return None


def computes_instead(plan: PlanData) -> torch.device | None:
    """The accelerator on which modules on the CPU compute, where the CPU may not."""
    accelerators = [spec.torch_device for spec in plan.topology.accelerators]
    return accelerators[0] if accelerators and not plan.constraints.cpu_compute else None


def run_by_modules(
    module: nn.Module,
    entry: str,
    call: BoundCall,
    known: CallForm | Untraced,
    instead: torch.device | None,
    *,
    keeps_grad: bool,
) -> Any:
    """What an entry of the model returns, in the way that is known of calls like this.

    The first of them finds it. Modules on the CPU compute ``instead``, if it is given.

    Raises:
        CaptureError: no way of running works.
        Exception: what the model itself raises for this call; torch's own RuntimeError with a note.
    """
    _refuse_autocast(module)
    device = device_of_inputs(call)
    way = known.way = known.way or _first_way(module, entry, call, device, instead, keeps_grad)
    try:
        return run_hooked(module, entry, HookedRun(way, device, instead), call.args, call.kwargs)
    except RuntimeError as error:
        if type(error) is RuntimeError:  # torch's, as of mixed devices; others are the model's, or of memory
            error.add_note(_ANOTHER_WAY.format(way.name))
        raise


@contextmanager
def with_same_buffers(module: nn.Module) -> Iterator[None]:
    """A block after which the values of buffers that the model has made anew are in those that it had."""
    before = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for table, known in before:
            for name, own in known.items():
                made = table.get(name)
                if own is None or made is None or made is own:
                    continue
                if (own.shape, own.dtype) == (made.shape, made.dtype):
                    own.detach().copy_(made)
                    table[name] = own
                else:
                    table[name] = made.to(own.device)


def _first_way(
    tree: nn.Module,
    entry: str,
    call: BoundCall,
    device: torch.device,
    instead: torch.device | None,
    keeps_grad: bool,
) -> Way:
    failures: list[Exception] = []
    # what is copied below autograd, a backward pass does not find
    ways = [way for way in _WAYS if not (keeps_grad and way is TOGETHER)]
    for way in ways:
        try:
            args, kwargs = copied_arguments(call)
        except _OUT_OF_MEMORY as error:
            failures.append(error)
            continue
        try:
            with undone(tree), _without_hooks(tree):
                run_hooked(tree, entry, HookedRun(way, device, instead), args, kwargs)
        except (RuntimeError, NotImplementedError, GraphplanError) as error:
            failures.append(error)
        else:
            return way
        if way is not ways[-1]:  # the next needs the room of what its frames hold
            failures[-1].__traceback__ = failures[-1].__context__ = failures[-1].__cause__ = None
            gc.collect()
    if _is_the_models(failures):
        raise failures[-1]
    lacking = all(isinstance(error, _OUT_OF_MEMORY) for error in failures)
    why = "have no memory for it" if lacking else "do not run"
    raise CaptureError(
        f"no capture takes this call, and its modules {why}\n  "
        + "\n  ".join(f"{w.name}: {first_line(e)}" for w, e in zip(ways, failures, strict=True))
        + "\nPartition the model with this call as the example: hooks then run it, with room for what "
        "this call needs beside the weights"
    )


def copied_arguments(call: BoundCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of those of a call: a trial may change what it is given, caches say.

    Raises:
        InputError: they cannot be copied.
        torch.OutOfMemoryError: there is no room where they are; or SimulatedOutOfMemoryError.
    """
    try:
        # copy.deepcopy refuses what has a gradient function, as the results of other modules have
        memo: dict[int, Any] = {id(t): t.clone() for t in tensors_in(call.leaves) if not t.is_leaf}
        return copy.deepcopy((call.args, call.kwargs), memo)
    except _OUT_OF_MEMORY:
        raise
    except Exception as error:  # objects of the caller, which may raise anything
        named = {**{str(at): value for at, value in enumerate(call.args)}, **call.kwargs}
        others = ((name, v) for name, v in named.items() if not isinstance(v, torch.Tensor))
        kinds = "; ".join(f"{name}, {type(value).__name__}" for name, value in others)
        raise InputError(
            "no graph runs this call, and to be tried out module by module its arguments must be copied "
            f"({kinds}), which fails: {first_line(error)}. Pass what copy.deepcopy takes"
        ) from error


def _is_the_models(failures: Sequence[Exception]) -> bool:
    """Whether every way of running raised the same, and not for want of memory: then eager raises it too."""
    ours = isinstance(failures[-1], GraphplanError | torch.OutOfMemoryError)
    return not ours and all(is_same(error, failures[-1]) for error in failures)


def device_of_inputs(call: BoundCall) -> torch.device:
    """Where the first tensor of a call is, also one in an object."""
    inside = () if call.device is not None else tensors_in(call.leaves)
    return next((tensor.device for tensor in inside), call.device or torch.device(CPU))


def _refuse_autocast(tree: nn.Module) -> None:
    if torch.is_autocast_enabled(CPU) and any(t.device.type == SIMULATED for t in tree.parameters()):
        raise PlanError(
            "autocast is on, and simulated devices have none where hooks run the model: leave the autocast, "
            "or convert the model with .to(dtype) before you place it"
        )


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _any_size(leaf: Any) -> Any:
    """Tensors of all sizes, and all numbers, such as those that count the tokens of a cache."""
    if type(leaf) is int and leaf > 1:  # 0 and 1 are flags, too
        return CounterLeaf(2, UNBOUNDED)
    if FloatLeaf().fits(leaf):
        return FloatLeaf()
    if not isinstance(leaf, torch.Tensor):
        return leaf if is_plain(leaf) or isinstance(leaf, type) else ObjectLeaf(type(leaf))
    return TensorLeaf(leaf.dtype, (None,) * leaf.dim(), stride=())


@contextmanager
def _without_hooks(tree: nn.Module) -> Iterator[None]:
    """A trial calls no hooks of the user's."""
    hooks = [(vars(part), name, vars(part)[name]) for part in tree.modules() for name in _HOOK_TABLES]
    for table, name, found in hooks:
        table[name] = type(found)()
    try:
        yield
    finally:
        for table, name, found in hooks:
            table[name] = found
