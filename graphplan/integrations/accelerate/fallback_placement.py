"""Place a model that cannot be traced: its modules are placed, and hooks run them one by one.

The plan is of modules in the order in which they run. The bytes of activations are measured by running the
model once; every accelerator leaves room for all of them. Hooks copy inputs to a module's device, but not the
tensors that a forward computes with between its modules. So splits of the modules over devices are tried one
after another, on the example inputs, until one runs.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from graphplan.analysis.plan import Plan
from graphplan.capture.attention import on_any_device
from graphplan.capture.changes.attribute_data import attributes_of
from graphplan.capture.changes.attribute_snapshots import restore_attributes
from graphplan.capture.changes.kept_state import KeptStateError
from graphplan.capture.eager_run import is_same, untouched
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import ModelWeights, named_tensors, tensor_bytes
from graphplan.capture.model.shared_attributes import copy_to_run, of_class, trace_patched
from graphplan.capture.model_methods import method_of
from graphplan.capture.signature import BoundCall, leaf_on_cpu, signature_of
from graphplan.capture.structure import map_leaves
from graphplan.compiler.formulation import Options
from graphplan.devices.topology import ALIGNMENT, CPU, DISK, SIMULATED, DeviceKey, Topology, round_up
from graphplan.errors import CaptureError, GraphplanError, InfeasibleError, NoGraphError
from graphplan.integrations.accelerate.auto_device_map import ModuleSizes, map_modules
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value
from graphplan.ir.module_map import entry_of
from graphplan.ir.schedule import Assignment
from graphplan.message_text import first_line
from graphplan.passes.frontend.graph_weights import weight_of
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.params import PARAMS, ROUNDING
from graphplan.passes.placement.problem import Problem
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.fallback.derived_classes import unplaced
from graphplan.runtime.fallback.hooked_run import ExecutionMode, rolled_back
from graphplan.runtime.fallback.module_by_module import RETURNS, STAYS, TOGETHER, Untraced, copied_arguments
from graphplan.runtime.fallback.module_profile import CallProfile, profile_call
from graphplan.runtime.memory.shared_memory import join_memory
from graphplan.runtime.module.module_state import ModuleState, Start
from graphplan.runtime.module.placed_module import attach, note_untraced, placed_class
from graphplan.runtime.weights.storage import WeightLayout, place_model, replace_parameter_data
from graphplan.warnings import warn

_BUDGET_SHARES = (1.0, 0.85, 0.7)  # of the budgets: hooks hold more memory than is foreseen
_TRACE_TRIES = 4  # failed traces before giving up: a call with another string, say, need not be traceable
_SIZES = ModuleSizes(step=ALIGNMENT)


def fall_back(
    model: nn.Module,
    model_copy: ModelCopy,
    example: BoundCall,
    topology: Topology,
    options: Options,
    source: Checkpoint | None,
    error: CaptureError,
    retry: Callable[[Plan], Start] | None = None,
) -> nn.Module:
    """Return a copy of ``model`` that hooks run, and warn why.

    ``retry`` returns, for the plan of modules, a placer of the copy at a call of another structure, which may
    have a graph; None for no such attempts.

    Raises:
        CaptureError: the caller's options are more than hooks can do, or no split runs.
        InfeasibleError: no split fits the budgets.
        Exception: what the model itself raises for this call, unchanged.
    """
    _refuse_constraints(options, error)
    fallback = _Fallback(
        str(error),
        model,
        model_copy,
        example=example,
        topology=topology,
        options=options,
        source=source,
        retry=retry,
    )
    placed = fallback.place()
    warn(
        f"{error}\nthe model runs module by module instead: its operations are not planned, and "
        "weights on the CPU are copied when they are used. strict=True makes this an error"
    )
    return placed


def later_refused(error: NoGraphError) -> None:
    """Warn of a call of a placed model that cannot be traced.

    Raises:
        NoGraphError: the call violates the caller's own ``dynamic_shapes``.
    """
    if isinstance(error.__cause__, ConstraintViolationError):
        raise error
    which = "all inputs from now on" if isinstance(error, KeptStateError) else "such inputs"
    warn(
        f"{error}\nThe placed model runs {which} module by module, where the weights reside: "
        "activations are not planned, and must fit in the memory that the weights leave. strict=True makes "
        "this an error"
    )


def _refuse_constraints(options: Options, error: CaptureError) -> None:
    requests = {
        "pin": options.constraints.pin,
        "together": options.constraints.together,
        "compile": options.compile is not None,
        "balance": options.constraints.balance,
    }
    names = [name for name, value in requests.items() if value]
    if names:
        raise CaptureError(
            f"{error}\n{', '.join(names)} cannot be used for a model that runs module by module"
        ) from error


def in_place_of(model: nn.Module, copied: nn.Module) -> nn.Module:
    """Place the model itself as its copy is placed, and return it: others may refer to its parameters."""
    tensors = named_tensors(copied)
    placed = replace_parameter_data(
        model, {id(tensor): tensors[name] for name, tensor in named_tensors(model).items()}
    )
    join_memory(copied, placed)
    trace_patched(placed)
    placed = of_class(placed, type(copied))
    attach(placed, vars(copied)["_graphplan"])
    return placed


@dataclass(frozen=True, slots=True)
class _Split:
    """Modules and tensors split over devices, and how hooks run them."""

    entries: Mapping[str, DeviceKey]  # module or tensor -> device key
    compute_key: DeviceKey  # the accelerator that runs modules on the CPU
    execution_mode: ExecutionMode = STAYS


@dataclass(frozen=True, slots=True)
class _ByModules:
    """Places a model that hooks run: now, or a plain copy of it that is unpickled.

    ``devices`` maps weights to their devices. ``strict`` is always False, as such a model has no graph.
    """

    devices: Mapping[str, torch.device]
    untraced: Untraced
    known_plan: Plan
    keep_grad: bool
    return_outputs: bool
    retry: Start | None
    strict: bool = False

    def __call__(self, module: nn.Module, *_call: Any, **_named: Any) -> nn.Module:
        """Return the module itself, placed; the call does not matter."""
        model = unplaced(module)
        return in_place_of(model, self.place(model, None))

    def place(self, model: nn.Module, source: Checkpoint | None) -> nn.Module:
        """Return a placed copy, with weights from ``source`` if it is given."""
        layout = WeightLayout(self.devices)
        placed, _ = place_model(model, ModelWeights(model), layout, placed_class, source)
        join_memory(model, placed)
        signature = signature_of(model.forward)
        flags = self.keep_grad, self.return_outputs
        untraced = replace(self.untraced)
        attach(placed, ModuleState([], None, signature, self, *flags, untraced=untraced, retry=self.retry))
        return placed


@dataclass(slots=True)
class _Fallback:
    """The trials of splits, until one runs the example call.

    ``raised`` is the error of eager mode for the example, on zeros in place of weights that are elsewhere.
    """

    reason: str
    model: nn.Module
    model_copy: ModelCopy
    example: BoundCall
    topology: Topology
    options: Options
    source: Checkpoint | None
    retry: Callable[[Plan], Start] | None
    profile: CallProfile = field(default_factory=CallProfile, init=False)
    raised: Exception | None = field(default=None, init=False)
    failures: list[str] = field(default_factory=list, init=False)

    def place(self) -> nn.Module:
        """Return a copy with the first split that runs the example call."""
        self._measure()
        for split in self._splits():
            placed = self._try(split)
            if placed is not None:
                return placed
            gc.collect()  # errors leave cycles of references, which hold memory
        tried = "\n  ".join(dict.fromkeys(self.failures))
        raise CaptureError(f"{self.reason}\nRunning it module by module failed too:\n  {tried}")

    def _try(self, split: _Split) -> nn.Module | None:
        """Return the model run by hooks; None if it does not run. Raise if eager raised the same error."""
        keys = {name: _device_of(split.entries, name) for name in self.model_copy.weights.tensors}
        devices = {name: self.topology[key].torch_device for name, key in keys.items()}
        options, plan = self.options, self._plan(split)
        retry = None if self.retry is None else self.retry(plan)
        compute_device = self.topology[split.compute_key].torch_device
        tries = 0 if retry is None else _TRACE_TRIES
        untraced = Untraced(self.reason, compute_device, split.execution_mode, tries)
        start = _ByModules(
            devices,
            untraced,
            plan,
            keep_grad=options.grad,
            return_outputs=options.return_outputs,
            retry=retry,
        )
        try:
            placed = start.place(self.model, self.source)
            note_untraced(placed, self.example)
            args, kwargs = copied_arguments(self.example)
            with rolled_back(placed):
                self._run(placed)(*args, **kwargs)
        except (RuntimeError, NotImplementedError, GraphplanError) as error:
            if is_same(error, self.raised):
                raise
            where = ", ".join(dict.fromkeys(str(device) for device in devices.values()))
            self.failures.append(f"over {where}: {first_line(error)}")
            return None
        return placed

    def _run(self, module: nn.Module) -> Callable[..., Any]:
        """Return the callable of the entry, without a ``__call__`` that the module's class defines."""
        entry = self.example.entry
        return method_of(module, entry) if entry else partial(nn.Module.__call__, module)

    def _measure(self) -> None:
        """Run the call once for its profile: on the model's weights if they are on the CPU, else on zeros.

        If the run on zeros raises, which may be due to them, the profile is empty.
        """
        tensors = self.model_copy.weights.tensors.values()
        has_data = all(tensor.device.type == CPU for tensor in tensors)
        shared = {id(parameter): parameter for parameter in self.model.parameters()}
        module = copy_to_run(self.model, shared) if has_data else self.model_copy.module
        before = attributes_of(module)  # attributes of parameters are shared with the model
        try:
            args, kwargs = map_leaves(leaf_on_cpu, copied_arguments(self.example))
            simulated = any(spec.type == SIMULATED for spec in self.topology.accelerators)
            # simulated accelerators decompose attention: measure the memory of the same kernels
            with untouched(module), on_any_device() if simulated else nullcontext():
                run, keep_grad = self._run(module), self.options.grad
                self.profile = profile_call(module, run, args, kwargs, keep_grad=keep_grad)
        except Exception as error:  # a model's code may raise anything on zeros
            if has_data:
                raise
            self.raised = error
        finally:
            restore_attributes(before)

    def _splits(self) -> Iterator[_Split]:
        """Yield splits, those that use the accelerators best first; the CPU alone comes last."""
        cpu, any_fits = self.topology.cpu, False
        for share in _BUDGET_SHARES:
            for split in self._over_accelerators(share):
                any_fits = True
                yield split
            if not any("OutOfMemory" in failure for failure in self.failures):
                break
        budgets = self._budgets(1.0)
        alone = None if cpu is None else _Split({"": cpu}, cpu)
        if alone is not None and self._fits(alone, budgets):
            yield alone
        elif not any_fits:
            raise self._infeasible()

    def _budgets(self, share: float) -> dict[DeviceKey, int]:
        """Return device key -> bytes for weights; accelerators have room for all activations too."""
        peak = self.profile.peak
        return {
            spec.key: max(0, int(spec.room * share) - peak) if spec.is_accelerator else spec.room
            for spec in self.topology.devices
            if spec.key != DISK
        }

    def _over_accelerators(self, share: float) -> list[_Split]:
        accelerators = [spec.key for spec in self.topology.accelerators]
        budgets, cpu = self._budgets(share), self.topology.cpu or CPU
        mapped = partial(map_modules, self.model, sizes=_SIZES, cpu=cpu, quiet=True)
        splits = [
            _Split(mapped(budgets, whole), accelerators[0]) for whole in self._granularities() if accelerators
        ]
        # stable: of splits with equal bytes on the CPU, large blocks stay first
        splits.sort(key=lambda split: self._taken(split)[cpu])
        splits += [replace(split, execution_mode=RETURNS) for split in splits]
        for key in accelerators:
            alone = {k: budgets[k] for k in budgets if k in (key, cpu)}
            splits.append(_Split(mapped(alone, set()), key))
        if not self.options.differentiates:  # copies below autograd are unknown to a backward pass
            splits += [
                replace(split, execution_mode=TOGETHER) for split in splits if split.execution_mode is STAYS
            ]
        used = [split for split in splits if set(split.entries.values()) & set(accelerators)]
        return [split for split in used if self._fits(split, budgets)]

    def _granularities(self) -> Iterator[set[str]]:
        """Yield sets of classes that are not split: those the model states, its repeated blocks, none."""
        stated = getattr(self.model, "_no_split_modules", None)
        if stated:
            yield set(stated)
        lists = (m for m in self.model.modules() if isinstance(m, nn.ModuleList | nn.Sequential))
        yield {type(block).__name__ for blocks in lists for block in blocks}
        yield set()

    def _fits(self, split: _Split, budgets: Mapping[DeviceKey, int]) -> bool:
        if any(key not in budgets for key in split.entries.values()):
            return False
        if not self.options.constraints.offload and self.topology.cpu in split.entries.values():
            return False
        return all(nbytes <= budgets[key] for key, nbytes in self._taken(split).items())

    def _taken(self, split: _Split) -> Counter[DeviceKey]:
        """Return device key -> bytes of weights."""
        taken = Counter[DeviceKey]()
        for name, tensor in self.model_copy.weights.tensors.items():
            taken[_device_of(split.entries, name)] += tensor_bytes(tensor)
        return taken

    def _infeasible(self) -> InfeasibleError:
        """Return the error, with sufficient budgets of the accelerators: their growth is bisected."""
        peak = self.profile.peak
        total = sum(round_up(tensor_bytes(t)) for t in self.model_copy.weights.tensors.values())
        available, accelerators = self.topology.budgets, self.topology.accelerators
        rooms = {spec.key: spec.room for spec in accelerators or self.topology.computing[:1]}
        first = next(iter(rooms))
        needed = {**available, first: total + peak + self.topology[first].withheld}
        low, high = 1.0, (total + peak) / max(1, *rooms.values()) + ROUNDING
        if accelerators and self._over_accelerators(high):
            while high > low * (1 + PARAMS.negligible):
                middle = (low + high) / 2
                low, high = (low, middle) if self._over_accelerators(middle) else (middle, high)
            needed |= {k: int(room * high) + self.topology[k].withheld for k, room in rooms.items()}
        return InfeasibleError(
            f"the modules of {type(self.model).__name__} ({total} bytes, and {peak} for activations on each "
            f"accelerator) do not fit one by one; max_memory allows {available}. These budgets suffice: "
            f"max_memory={needed}",
            needed=needed,
            available=available,
        )

    def _plan(self, split: _Split) -> Plan:
        graph, devices = self._graph(), dict[str, DeviceKey]()
        for name, operation in graph.operations.items():
            key = _device_of(split.entries, operation.module_path or name)
            devices[name] = split.compute_key if self.topology[key].type == CPU else key
        homes = {name: _device_of(split.entries, name) for name in graph.weights}
        cpu, returns = self.topology.cpu, self.options.return_outputs
        problem = Problem(graph, self.topology, CPU if cpu is None else cpu, returns, streaming=False)
        judged = evaluate(problem, Assignment(devices, homes))
        return Plan(
            graph,
            self.topology,
            judged.schedule,
            judged.seconds,
            0.0,
            "the model runs module by module: its operations are not planned",
            "hooks",
            self.options.constraints,
            streaming=False,
        )

    def _graph(self) -> Graph:
        """Return a graph of the modules with own tensors, in the order in which they ran."""
        weights, profile = self.model_copy.weights, self.profile
        members: dict[str, list[str]] = {}
        parts = dict(self.model.named_modules(remove_duplicate=False))
        for name, first in weights.first.items():
            path = name.rpartition(".")[0]
            while path not in parts:  # a tensor in a parameter's attribute
                path = path.rpartition(".")[0]
            members.setdefault(path, []).append(first)
        ran = [name for name in profile.order if name in members]
        values: list[Value] = []
        operations: list[Operation] = []
        last, read = tuple[str, ...](), 0
        for module in dict.fromkeys((*ran, *members)):
            nbytes, name = round_up(profile.outputs.get(module, 0)), module or "(root)"
            inputs, last = (*last, *dict.fromkeys(members[module])), (f"{name}:out",)
            values.append(Value(*last, nbytes, nbytes))
            kind = type(parts[module]).__name__
            space = {CPU: max(0, profile.peak - nbytes - read)}  # the peak includes its result and its input
            read = nbytes
            operations.append(Operation(name, kind, inputs, last, workspace=space, module_path=module))
        # hooks move tensor subclasses too
        homed = [weight_of(weights, name, written=False) for name in weights.tensors]
        movable = [replace(weight, movable=True) for weight in homed]
        return Graph(operations, values, movable, inputs=(), outputs=last, shapes_known=bool(profile.order))


def _device_of(entries: Mapping[str, Any], name: str) -> Any:
    """Return the device of a module or tensor in a map; any device for a module without tensors."""
    device = entry_of(entries, name)
    return next(iter(entries.values())) if device is None else device
