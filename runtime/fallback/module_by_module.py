"""Calls that no capture takes, of a placed module: its modules run where their weights are.

What a forward computes between its modules may need things together, which nobody knows beforehand: ways of
running are tried one after another, on copies of the arguments, and the first that runs is kept. The last
two bring what operations want together to where their module's weights are, and all to the caller's device.

A module that has graphs runs as a tree of modules of its own over the same weights, which other threads read
meanwhile. One that has none runs itself, so that what its code keeps in attributes is kept.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphplan.capture.changes.attribute_data import is_plain
from graphplan.capture.changes.attribute_snapshots import contents_of
from graphplan.capture.eager_run import is_same
from graphplan.capture.model.modes import ModeReader, Modes
from graphplan.capture.model.shared_attributes import copy_to_run
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
from graphplan.runtime.fallback.added_hooks import Hook, Hooks, added_hooks, hooks_beside
from graphplan.runtime.fallback.hooked_run import HookedRun, Way, run_hooked, undone
from graphplan.runtime.fallback.replaced_tensors import tensors_in
from graphplan.runtime.fallback.short_names import unplaced, written_class

STAYS = Way("where their weights are", returns=False)
RETURNS = Way("where their weights are, results copied back")
TOGETHER = Way("where their weights are, with what they read", together=True)
_WAYS = (STAYS, RETURNS, TOGETHER, Way("on the device of the call", gathered=True, together=True))
_OUT_OF_MEMORY = (torch.OutOfMemoryError, SimulatedOutOfMemoryError)

_HOOK_TABLES = [name for name, value in vars(nn.Module()).items() if "_hooks" in name and value is not None]
_TORCHS = {*vars(nn.Module()), "forward"}
_KIND = "_is_full_backward_hook"  # of a module's backward hooks, without which torch calls none

_ANOTHER_WAY = (
    "graphplan runs this call without a graph, its modules {}, as one like it was found to run. If eager "
    "runs it, partition the model with this call as the example"
)
_GONE = object()  # in place of an attribute that is not there


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

    def run(self, plain: nn.Module, entry: str, call: BoundCall, *, keeps_grad: bool) -> Any:
        """Run a call, of any structure, of the model as its own class."""
        return _run(plain, entry, call, self, self.main, keeps_grad=keeps_grad)


@dataclass
class Modulewise:
    """The calls of one placed module with graphs that run module by module.

    Attributes:
        forms: of the calls.
        tree: of the modules that run them, while none does.
        running: the tree of the call that runs, the innermost.
        traced: of the hooks of submodules, those that the graphs were traced with, which are of what runs.
        names: of each submodule, the attributes and parameters that the graphs were traced from.
        left: whether a call has left something in attributes of the module.
        apart: the place of a submodule, and an attribute that says which hooks the tree has: it stays there.
    """

    forms: list[CallForm] = field(default_factory=list)
    tree: nn.Module | None = None
    running: nn.Module | None = None
    traced: Collection[Hook] = frozenset()
    names: Sequence[Collection[str]] = ()
    left: bool = False
    apart: set[tuple[int, str]] = field(default_factory=set)

    def watch(self, module: nn.Module) -> None:
        """Know a module as its graphs were traced; a copy of one that is known is as that was."""
        if not self.names:
            self.traced = frozenset(hook for hook, _ in added_hooks(module))
            self.names = [frozenset((*vars(part), *part._parameters)) for part in module.modules()]

    def untraced_hooks(self, parts: Sequence[nn.Module]) -> list[Hooks]:
        """As :func:`hooks_beside`, of submodules that may have further hooks and parameters now."""
        return hooks_beside(self.traced, self.names, parts)

    def copy(self) -> Modulewise:
        """That of a copy of the module."""
        return Modulewise(list(self.forms), traced=self.traced, names=self.names)

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

    def run(
        self,
        whole: nn.Module,
        form: CallForm,
        call: BoundCall,
        instead: torch.device | None = None,
        *,
        keeps_grad: bool,
    ) -> Any:
        """Run a call over the weights of the placed module; modules on the CPU compute ``instead``, if given.

        Raises:
            CaptureError: no way of running works.
            Exception: what the model itself raises for this call; torch's own RuntimeError with a note.
        """
        if self.tree is None:
            self.apart.clear()
        tree, outer = _shared(unplaced(whole)) if self.tree is None else self.tree, self.running
        self.tree, self.running = None, tree  # a call from a hook of this one has a tree of its own
        hooks, around = _hook_count(tree), whole if outer is None else outer
        before: list[dict[str, Any]] = []
        try:
            with _following(tree, whole, self.traced, self.names):
                _share_data(around, tree, self.apart)
                before += [dict(vars(part)) for part in tree.modules()]
                if outer is not None:
                    _share_tensors(outer, tree)
                result = _run(tree, form.entry, call, form, form.main or instead, keeps_grad=keeps_grad)
        finally:  # buffers that were made anew before an error stay, as in eager
            self.running, exchanged = outer, _exchanged(tree, whole)
            if exchanged is None:
                self.tree = tree
                if _hook_count(tree) > hooks:  # its own, and attributes that say so
                    self.apart |= {(at, name) for at, _, name, _ in _differing(tree, around, before)}
                self.left |= _share_data(tree, around, self.apart, before)
                if outer is None:
                    _take_back(tree, whole)
                else:
                    _share_tensors(tree, outer)
        if exchanged is not None:
            raise CaptureError(
                f"the call has put a module of another class at {exchanged!r}, which a placed model does "
                "not: make such a call of the model before you place it"
            )
        return result


def computes_instead(plan: PlanData) -> torch.device | None:
    """The accelerator on which modules on the CPU compute, where the CPU may not."""
    accelerators = [spec.torch_device for spec in plan.topology.accelerators]
    return accelerators[0] if accelerators and not plan.constraints.cpu_compute else None


def _run(
    tree: nn.Module,
    entry: str,
    call: BoundCall,
    known: CallForm | Untraced,
    instead: torch.device | None,
    *,
    keeps_grad: bool,
) -> Any:
    """What an entry returns in the way that is known of calls like this; the first of them finds it."""
    _refuse_autocast(tree)
    device = device_of_inputs(call)
    way = known.way = known.way or _first_way(tree, entry, call, device, instead, keeps_grad)
    try:
        return run_hooked(tree, entry, HookedRun(way, device, instead), call.args, call.kwargs)
    except RuntimeError as error:
        if type(error) is RuntimeError:  # torch's, as of mixed devices; others are the model's, or of memory
            error.add_note(_ANOTHER_WAY.format(way.name))
        raise


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


def _shared(plain: nn.Module) -> nn.Module:
    """A tree of modules of its own over the same parameters and buffers."""
    memo: dict[int, Any] = {id(t): t for t in (*plain.parameters(), *plain.buffers())}
    tree = copy_to_run(plain, memo)
    for part in tree.modules():  # the placed module's own, which run around the call, or are followed
        for name in _HOOK_TABLES:
            vars(part)[name].clear()
    return tree


@contextmanager
def _following(
    tree: nn.Module, whole: nn.Module, traced: Collection[Hook], names: Sequence[Collection[str]]
) -> Iterator[None]:
    """A block with the modes, the tensors, and the hooks of submodules, that the placed module has now.

    Hooks that the model registers while it runs are the tree's own, and stay: transformers does so once, at
    the first call that is to return all hidden states.
    """
    ModeReader(tree).write(tree, ModeReader(whole).read(whole))
    _share_tensors(whole, tree)
    parts, mine = list(whole.modules()), list(tree.modules())
    given: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for part, runs in zip(parts[1:], mine[1:], strict=True):
        theirs, own = vars(part), vars(runs)
        own[_KIND] = theirs[_KIND]
        given += [(own[name], dict(theirs[name])) for name in _HOOK_TABLES if theirs[name]]
    for table, hooks in given:
        kept = dict(table)
        table.clear()  # they run in this order
        table.update({**hooks, **kept})
    for (at, name, number), added in added_hooks(whole, traced):
        vars(mine[at])[name][number] = _told_of(parts[at], names[at], added, number)
    try:
        yield
    finally:
        for table, hooks in given:
            for number in hooks:
                table.pop(number, None)


def _told_of(
    part: nn.Module, names: Collection[str], hooks: Mapping[int, Callable[..., Any]], number: int
) -> Callable[..., Any]:
    """A hook that is told of the placed module's own part, which it may look up, as the one that runs is.

    It reads there what forward has assigned. What it assigns is for the one that runs; the part keeps it too
    where it is not among ``names``, which the graphs were traced from.
    """

    def told(mine: nn.Module, *given: Any) -> Any:
        if number not in hooks:  # removed since the call began
            return None
        own, runs = vars(part), vars(mine)
        kept, fixed = dict(own), {"_modules", *_HOOK_TABLES}
        shown = {name for name in runs if name in names or _is_other_data(own.get(name, _GONE), runs[name])}
        shown -= fixed
        own.update({name: runs[name] for name in shown})
        before = dict(own)
        try:
            return hooks[number](part, *given)
        finally:
            for name in (before.keys() | own.keys()) - fixed:
                untouched = own.get(name, _GONE) is before.get(name, _GONE)
                if not untouched:
                    _put(runs, name, own.get(name, _GONE))
                if name in names or (untouched and name in shown):
                    _put(own, name, kept.get(name, _GONE))

    return told


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _GONE:
        table.pop(name, None)
    else:
        table[name] = value


def _share_tensors(of: nn.Module, to: nn.Module) -> None:
    for part, mine in zip(of.modules(), to.modules(), strict=True):
        mine._parameters.update(part._parameters)
        mine._buffers.update(part._buffers)


def _share_data(
    of: nn.Module,
    to: nn.Module,
    apart: Collection[tuple[int, str]],
    before: Sequence[dict[str, Any]] = (),
) -> bool:
    """Have what another tree has in attributes, where that is data: the very objects. Whether any is new.

    What it had ``before``, too, is left alone: hooks, and other threads, may have changed that meanwhile.
    """
    differing = _differing(of, to, before)
    found = [(own, name, value) for at, own, name, value in differing if (at, name) not in apart]
    for own, name, value in found:
        _put(own, name, value)
    return bool(found)


def _differing(
    of: nn.Module, to: nn.Module, before: Sequence[dict[str, Any]] = ()
) -> Iterator[tuple[int, dict[str, Any], str, Any]]:
    """What another tree has in attributes: the place of the submodule, its attributes here, name, value."""
    for at, (part, mine) in enumerate(zip(of.modules(), to.modules(), strict=True)):
        theirs, own = vars(part), vars(mine)
        for name in (theirs.keys() | own.keys()) - _TORCHS:
            value, other = theirs.get(name, _GONE), own.get(name, _GONE)
            untouched = value is other or (before and value is before[at].get(name, _GONE))
            if not untouched and _is_data(value) and _is_data(other):
                yield at, own, name, value


def _hook_count(tree: nn.Module) -> int:
    return sum(len(vars(part)[name]) for part in tree.modules() for name in _HOOK_TABLES)


def _is_other_data(here: Any, there: Any) -> bool:
    return here is not there and _is_data(here) and (here is _GONE or _is_data(there))


def _is_data(value: Any) -> bool:
    """Whether nothing in it can refer to a module."""
    if isinstance(value, dict | list | tuple | set):
        inside = contents_of(value)  # nothing of a class derived from these
        return len(inside) == len(value) * (2 if isinstance(value, dict) else 1) and all(
            map(_is_data, inside)
        )
    return value is _GONE or is_plain(value) or isinstance(value, torch.Tensor)


def _exchanged(tree: nn.Module, whole: nn.Module) -> str | None:
    """The path of a module that a tree has no more, or has anew, or that is another now."""
    kinds = [{path: written_class(part) for path, part in of.named_modules()} for of in (tree, whole)]
    return min((path for path, _ in kinds[0].items() ^ kinds[1].items()), default=None)


def _take_back(tree: nn.Module, whole: nn.Module) -> None:
    """Give the placed module the values of buffers that the model has made anew."""
    for mine, part in zip(tree.modules(), whole.modules(), strict=True):
        for name, own in part._buffers.items():
            made = mine._buffers.get(name)
            if own is not None and made is not None and made is not own:
                if (own.shape, own.dtype) == (made.shape, made.dtype):
                    own.detach().copy_(made)
                else:
                    part._buffers[name] = own = made.to(own.device)
                mine._buffers[name] = own


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
