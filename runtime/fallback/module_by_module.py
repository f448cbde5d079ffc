"""Forward passes of a placed module that cannot be traced: each submodule runs where its weights reside.

The code between submodules may compute with tensors of several devices, which is not known beforehand.
Execution modes are tried one after another on copies of the arguments, and the first that works is kept. The
third mode moves an operation's operands to one device, the last runs everything on the caller's device.

The model's own code runs, as in eager mode: it assigns attributes, and the user's hooks see its submodules.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import unobserved
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
from graphplan.runtime.fallback.added_hooks import HOOK_TABLES, Hook, Hooks, hooks_of
from graphplan.runtime.fallback.hooked_run import ExecutionMode, HookedRun, rolled_back, run_hooked
from graphplan.runtime.fallback.replaced_tensors import tensors_in

STAYS = ExecutionMode("where their weights reside", returns=False)
RETURNS = ExecutionMode("where their weights reside, results copied back")
TOGETHER = ExecutionMode("where their weights reside, with their inputs", together=True)
_MODES = (STAYS, RETURNS, TOGETHER, ExecutionMode("on the device of the call", gathered=True, together=True))
_OUT_OF_MEMORY = (torch.OutOfMemoryError, SimulatedOutOfMemoryError)

_ALL_HOOK_TABLES = [
    name for name, value in vars(nn.Module()).items() if "_hooks" in name and value is not None
]

_ANOTHER_MODE = (
    "graphplan runs this call module by module, {}, because an earlier call with the same input structure "
    "ran in this way. If the call runs in eager mode, partition the model with this call as the example"
)


@dataclass
class ModularCall:
    """A call structure, for all sizes, that runs module by module.

    Its first call sets ``execution_mode``. It includes only calls in which the leaves at ``differentiated``
    require gradients: others may be captured. If ``while_hooked``, it runs so only while submodules have
    hooks that were not traced. Modules on the CPU compute on ``compute_device``, if it is given.
    """

    entry: str
    modes: Modes
    signature: InputSignature
    differentiated: Sequence[int] = ()
    while_hooked: bool = False
    compute_device: torch.device | None = None
    execution_mode: ExecutionMode | None = None


@dataclass(slots=True)
class Untraced:
    """How a model without any graph runs.

    Attributes:
        reason: why it has no graph.
        compute_device: the device on which modules on the CPU compute, if any.
        execution_mode: how its modules run; None before the first call.
        tries: how many further call structures may be traced; a trace that fails takes seconds.
    """

    reason: str
    compute_device: torch.device | None
    execution_mode: ExecutionMode | None = None
    tries: int = 0

    def __str__(self) -> str:
        return f"the model runs module by module: {self.reason}"


@dataclass
class ModularCalls:
    """The call structures of one placed module that run module by module, besides its graphs.

    Attributes:
        structures: these structures.
        traced: hooks of submodules that were traced, or that the model itself added in such a call.
        names: the names of attributes and parameters when it was traced, of each module, the root first.
        changed_module: whether such a call has changed attributes of the module.
    """

    structures: list[ModularCall] = field(default_factory=list)
    traced: frozenset[Hook] = frozenset()
    names: Sequence[Collection[str]] = ()
    changed_module: bool = False

    def watch(self, module: nn.Module) -> None:
        """Record the hooks and names of a module as its graphs were traced; a copy keeps the original's."""
        if not self.names:
            self.traced = hooks_of(module)
            self.names = [frozenset((*vars(part), *part._parameters)) for part in module.modules()]

    def untraced_hooks(self, parts: Sequence[nn.Module]) -> list[Hooks]:
        """Return the tables of submodules ``parts`` with hooks that were not traced, and the keys of these.

        A table that lacks a traced hook is left out: the new hooks replace it, and are traced like it. So is
        each table of a submodule with parameters that are not in its ``names``: its hooks compute weights
        from them, as ``torch.nn.utils.weight_norm`` does. If the number of submodules has changed, which
        shifts indices, there are none.
        """
        added_hooks: list[Hooks] = []
        if len(parts) + 1 != len(self.names):
            return []
        for index, part in enumerate(parts, 1):
            if not set(part._parameters) <= set(self.names[index]):
                continue
            for name in HOOK_TABLES:
                table: dict[int, Any] = vars(part)[name]
                known = {
                    key for place, table_name, key in self.traced if (place, table_name) == (index, name)
                }
                if known <= table.keys() and (added := [key for key in table if key not in known]):
                    added_hooks.append((table, added))
        return added_hooks

    def copy(self) -> ModularCalls:
        """Return the record for a copy of the module."""
        return replace(self, structures=list(self.structures), changed_module=False)

    def add(
        self, call: BoundCall, modes: Modes, *, keeps_grad: bool = False, while_hooked: bool = False
    ) -> ModularCall:
        """Have calls of this structure run module by module from now on.

        If ``keeps_grad``, only calls that require all gradients that this one does. ``while_hooked`` is as in
        :class:`ModularCall`.
        """
        leaves = tuple(_any_size(leaf) for leaf in call.leaves)
        required = [i for i, leaf in enumerate(call.leaves) if _requires_grad(leaf)] if keeps_grad else ()
        signature = InputSignature(call.spec, leaves, leaf_names(call))
        structure = ModularCall(call.entry, modes, signature, required, while_hooked=while_hooked)
        self.structures.append(structure)
        return structure

    def find(self, call: BoundCall, modes: Modes) -> ModularCall | None:
        """Return the structure that a call matches; None if it matches none."""
        for known in self.structures:
            if (known.entry, known.modes) != (call.entry, modes):
                continue
            matches = known.signature.mismatch(call) is None
            if matches and all(_requires_grad(call.leaves[i]) for i in known.differentiated):
                return known
        return None


def compute_device_of(plan: PlanData) -> torch.device | None:
    """Return the accelerator on which modules on the CPU compute; None if the CPU computes them."""
    accelerators = [spec.torch_device for spec in plan.topology.accelerators]
    return accelerators[0] if accelerators and not plan.constraints.cpu_compute else None


def run_by_modules(
    module: nn.Module,
    call: BoundCall,
    call_record: ModularCall | Untraced,
    compute_device: torch.device | None,
    *,
    keeps_grad: bool,
) -> Any:
    """Return the result of a call of the model, run in the execution mode of ``call_record``.

    The first call like it sets that mode. Modules on the CPU compute on ``compute_device``, if it is given.

    Raises:
        CaptureError: no execution mode works.
        Exception: what the model itself raises for this call; torch's own RuntimeError with a note.
    """
    _refuse_autocast(module)
    device = device_of_inputs(call)

    def run_in(mode: ExecutionMode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return run_hooked(module, call.entry, HookedRun(mode, device, compute_device), args, kwargs)

    if call_record.execution_mode is None:
        # TOGETHER copies operands below autograd, so that no gradient reaches the originals
        modes = [mode for mode in _MODES if not (keeps_grad and mode is TOGETHER)]
        call_record.execution_mode = _first_mode(module, call, modes, run_in)
    mode = call_record.execution_mode
    try:
        return run_in(mode, call.args, call.kwargs)
    except RuntimeError as error:
        if type(error) is RuntimeError:  # by torch, as for mixed devices; not the model's, nor out of memory
            error.add_note(_ANOTHER_MODE.format(mode.name))
        raise


@contextmanager
def with_same_buffers(module: nn.Module) -> Iterator[None]:
    """Context manager that puts the original buffers back at its end, with the values of their replacements.

    A replacement of another shape or dtype stays, and is moved to the device of the original.
    """
    originals = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for table, buffers in originals:
            for name, original in buffers.items():
                assigned = table.get(name)
                if original is None or assigned is None or assigned is original:
                    continue
                if (original.shape, original.dtype) == (assigned.shape, assigned.dtype):
                    original.detach().copy_(assigned)
                    table[name] = original
                else:
                    table[name] = assigned.to(original.device)


def _first_mode(
    tree: nn.Module, call: BoundCall, modes: Sequence[ExecutionMode], run_in: Callable[..., Any]
) -> ExecutionMode:
    """Return the first of the modes in which ``run_in`` runs copies of the arguments."""
    failures: list[Exception] = []
    for mode in modes:
        try:
            args, kwargs = copied_arguments(call)
        except _OUT_OF_MEMORY as error:
            failures.append(error)
            continue
        try:
            with unobserved(), rolled_back(tree), _with_empty_hook_tables(tree):
                run_in(mode, args, kwargs)
        except (RuntimeError, NotImplementedError, GraphplanError) as error:
            failures.append(error)
        else:
            return mode
        if mode is not modes[-1]:  # frames hold tensors whose memory the next trial needs
            failures[-1].__traceback__ = failures[-1].__context__ = failures[-1].__cause__ = None
            gc.collect()
    if _is_models_error(failures):
        raise failures[-1]
    out_of_memory = all(isinstance(error, _OUT_OF_MEMORY) for error in failures)
    why = "have no memory for it" if out_of_memory else "do not run"
    raise CaptureError(
        f"this call cannot be traced, and its modules {why}\n  "
        + "\n  ".join(f"{mode.name}: {first_line(e)}" for mode, e in zip(modes, failures, strict=True))
        + "\nPartition the model with this call as the example: hooks then run it, with room for what "
        "this call needs in addition to the weights"
    )


def copied_arguments(call: BoundCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments of a call: a trial may change them, for example a KV cache.

    Raises:
        InputError: they cannot be copied.
        torch.OutOfMemoryError: their device has no memory for a copy; or SimulatedOutOfMemoryError.
    """
    try:
        # copy.deepcopy refuses a tensor with a grad_fn, such as the result of another module
        memo: dict[int, Any] = {id(t): t.clone() for t in tensors_in(call.leaves) if not t.is_leaf}
        return copy.deepcopy((call.args, call.kwargs), memo)
    except _OUT_OF_MEMORY:
        raise
    except Exception as error:  # the caller's objects may raise anything
        named = {**{str(index): value for index, value in enumerate(call.args)}, **call.kwargs}
        others = ((name, v) for name, v in named.items() if not isinstance(v, torch.Tensor))
        kinds = "; ".join(f"{name}, {type(value).__name__}" for name, value in others)
        raise InputError(
            "this call cannot be traced. To run it module by module, its arguments must be "
            f"copied ({kinds}), which fails: {first_line(error)}. Pass arguments that copy.deepcopy can copy"
        ) from error


def _is_models_error(failures: Sequence[Exception]) -> bool:
    """Whether eager mode raises this error too: all execution modes did, and it is not for lack of memory."""
    ours = isinstance(failures[-1], GraphplanError | torch.OutOfMemoryError)
    return not ours and all(is_same(error, failures[-1]) for error in failures)


def device_of_inputs(call: BoundCall) -> torch.device:
    """Return the device of a call's first tensor, also of one inside an object; the CPU if it has none."""
    nested = () if call.device is not None else tensors_in(call.leaves)
    return next((tensor.device for tensor in nested), call.device or torch.device(CPU))


def _refuse_autocast(tree: nn.Module) -> None:
    if torch.is_autocast_enabled(CPU) and any(t.device.type == SIMULATED for t in tree.parameters()):
        raise PlanError(
            "autocast is on, which simulated devices do not support if the model runs module by module: "
            "leave the autocast context, or convert the model with .to(dtype) before you place it"
        )


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _any_size(leaf: Any) -> Any:
    """Return the input leaf for tensors of any size, or any number, such as the token count of a cache."""
    if type(leaf) is int and leaf > 1:  # 0 and 1 may be flags
        return CounterLeaf(2, UNBOUNDED)
    if FloatLeaf().fits(leaf):
        return FloatLeaf()
    if not isinstance(leaf, torch.Tensor):
        return leaf if is_plain(leaf) or isinstance(leaf, type) else ObjectLeaf(type(leaf))
    return TensorLeaf(leaf.dtype, (None,) * leaf.dim(), stride=())


@contextmanager
def _with_empty_hook_tables(tree: nn.Module) -> Iterator[None]:
    """Context manager that empties all hook tables, so that a trial calls no hooks of the user."""
    tables = [(vars(part), name, vars(part)[name]) for part in tree.modules() for name in _ALL_HOOK_TABLES]
    for attributes, name, hooks in tables:
        attributes[name] = type(hooks)()
    try:
        yield
    finally:
        for attributes, name, hooks in tables:
            attributes[name] = hooks
