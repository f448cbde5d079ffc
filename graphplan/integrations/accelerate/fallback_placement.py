"""What happens where no graph can be captured: modules are placed, and run one by one.

The plan is one of modules in the order in which they run. How large activations are is measured by running
the model once; every accelerator keeps room for all of them. Hooks bring inputs to a module, and nobody
brings together what a forward computes between its modules: so ways of splitting are tried one after
another, on the example inputs, until one runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from graphplan.analysis.plan import Plan
from graphplan.capture.attention import on_any_device
from graphplan.capture.changes.assigned_state import KeptStateError
from graphplan.capture.changes.attribute_data import attributes_of
from graphplan.capture.changes.attribute_snapshots import put_back
from graphplan.capture.eager_run import is_same, untouched
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import ModelWeights, named_tensors, tensor_bytes
from graphplan.capture.model.shared_attributes import copy_to_run, of_class, trace_patched
from graphplan.capture.model_methods import method_of
from graphplan.capture.signature import leaf_on_cpu, signature_of
from graphplan.capture.structure import map_leaves
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import EntryCall
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
from graphplan.passes.placement.problem import Problem
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.fallback.hooked_run import Way, undone
from graphplan.runtime.fallback.module_by_module import (
    RETURNS,
    STAYS,
    TOGETHER,
    Untraced,
    copied_arguments,
)
from graphplan.runtime.fallback.module_profile import CallProfile, profile_call
from graphplan.runtime.fallback.short_names import unplaced
from graphplan.runtime.memory.shared_memory import join_memory
from graphplan.runtime.module.module_state import ModuleState, Start
from graphplan.runtime.module.placed_module import attach, note_untraced, placed_class
from graphplan.runtime.weights.storage import Layout, place_model, taken_over
from graphplan.warnings import warn

_SHARES = (1.0, 0.85, 0.7)  # of the budgets: hooks hold on to more than can be foreseen
_TRIES = 4  # of traces that fail: what differs from call to call, such as a text, is not always another graph
_SIZES = ModuleSizes(step=ALIGNMENT)


def fall_back(
    model: nn.Module,
    model_copy: ModelCopy,
    asked: EntryCall,
    topology: Topology,
    options: Options,
    source: Checkpoint | None,
    error: CaptureError,
    retry: Callable[[Plan], Start] | None = None,
) -> nn.Module:
    """A copy of ``model`` that hooks run, and one warning that says why.

    ``retry``: of the plan of modules, what places the copy at a call of another structure, which may have a
    graph.

    Raises:
        CaptureError: the caller asks for what hooks cannot do, or no way of splitting runs.
        InfeasibleError: the weights fit in no way.
        Exception: what the model itself raises for this call, unchanged.
    """
    _refuse_constraints(options, error)
    fallback = _Fallback(model, model_copy, asked, topology, options, source, retry)
    placed = fallback.place(str(error))
    warn(
        f"{error}\nhooks run the model instead, module by module: its operations are not "
        "planned, and weights on the CPU are copied when they are used. strict=True makes this an error"
    )
    return placed


def later_refused(error: NoGraphError) -> None:
    """Warn of a call of a placed model that no capture takes.

    Raises:
        NoGraphError: the call is beyond the caller's own ``dynamic_shapes``.
    """
    if isinstance(error.__cause__, ConstraintViolationError):
        raise error
    which = "all inputs from now on" if isinstance(error, KeptStateError) else "such inputs"
    warn(
        f"{error}\nThe placed model runs {which} module by module, where the weights reside: "
        "activations are not planned, and must fit beside the weights. strict=True makes this an error"
    )


def _refuse_constraints(options: Options, error: CaptureError) -> None:
    asked = {
        "pin": options.constraints.pin,
        "together": options.constraints.together,
        "compile": options.compile is not None,
        "balance": options.constraints.balance,
    }
    named = [name for name, value in asked.items() if value]
    if named:
        raise CaptureError(f"{error}\nHooks cannot do what {', '.join(named)} asks for") from error


def in_place_of(model: nn.Module, copied: nn.Module) -> nn.Module:
    """The model itself, placed and run as the copy is: others may hold its parameters."""
    there = named_tensors(copied)
    made = taken_over(model, {id(tensor): there[name] for name, tensor in named_tensors(model).items()})
    join_memory(copied, made)
    trace_patched(made)
    made = of_class(made, type(copied))
    attach(made, vars(copied)["_graphplan"])
    return made


@dataclass(frozen=True, slots=True)
class _Split:
    """A way of splitting, and where it puts what."""

    entries: Mapping[str, DeviceKey]  # module or tensor -> device key
    main: DeviceKey  # the accelerator that runs what is on the CPU
    way: Way = STAYS


@dataclass(frozen=True, slots=True)
class _ByModules:
    """Places a model whose modules run one by one: now, or a plain copy of it that is unpickled.

    ``devices`` says where each weight lives; it is never ``strict``, as such a model runs without a graph.
    """

    devices: Mapping[str, torch.device]
    untraced: Untraced
    known_plan: Plan
    keep_grad: bool
    return_outputs: bool
    retry: Start | None
    strict: bool = False

    def __call__(self, module: nn.Module, *_call: Any, **_named: Any) -> nn.Module:
        """A placed copy, whatever call comes next."""
        model = unplaced(module)
        return in_place_of(model, self.place(model, None))

    def place(self, model: nn.Module, source: Checkpoint | None) -> nn.Module:
        """A placed copy, with weights from a checkpoint if there is one."""
        layout = Layout(self.devices)
        made, _ = place_model(model, ModelWeights(model), layout, placed_class, source)
        join_memory(model, made)
        signature = signature_of(model.forward)
        own = self.keep_grad, self.return_outputs
        untraced = replace(self.untraced)
        attach(made, ModuleState([], None, signature, self, *own, untraced=untraced, retry=self.retry))
        return made


@dataclass(frozen=True, slots=True)
class _Fallback:
    model: nn.Module
    model_copy: ModelCopy
    asked: EntryCall
    topology: Topology
    options: Options
    source: Checkpoint | None
    retry: Callable[[Plan], Start] | None

    def place(self, reason: str) -> nn.Module:
        """The first that runs."""
        profile, raised = self._profile()
        failures: list[str] = []
        for split in self._splits(profile, failures):
            made = self._try(split, profile, reason, raised)
            if isinstance(made, nn.Module):
                return made
            failures.append(made)
            gc.collect()  # what an error left is in cycles, and holds on to memory
        tried = "\n  ".join(dict.fromkeys(failures))
        raise CaptureError(f"{reason}\nHooks do not run it either:\n  {tried}")

    def _try(
        self, split: _Split, profile: CallProfile, reason: str, raised: Exception | None
    ) -> nn.Module | str:
        """The model with hooks; why that does not run, if it does not and eager did not raise the same."""
        keys = {name: _device_of(split.entries, name) for name in self.model_copy.weights.tensors}
        devices = {name: self.topology[key].torch_device for name, key in keys.items()}
        options, plan = self.options, self._plan(split, profile)
        retry = None if self.retry is None else self.retry(plan)
        main, tries = self.topology[split.main].torch_device, 0 if retry is None else _TRIES
        untraced = Untraced(reason, main, split.way, tries)
        start = _ByModules(devices, untraced, plan, options.grad, options.return_outputs, retry)
        try:
            made = start.place(self.model, self.source)
            note_untraced(made, self.asked.call, self.asked.entry)
            args, kwargs = copied_arguments(self.asked.call)
            with undone(made):
                self._run(made)(*args, **kwargs)
        except (RuntimeError, NotImplementedError, GraphplanError) as error:
            if is_same(error, raised):
                raise
            where = ", ".join(dict.fromkeys(str(device) for device in devices.values()))
            return f"over {where}: {first_line(error)}"
        return made

    def _run(self, module: nn.Module) -> Callable[..., Any]:
        """What is asked for of a module, without what its class has around its call."""
        entry = self.asked.entry
        return method_of(module, entry) if entry else partial(nn.Module.__call__, module)

    def _profile(self) -> tuple[CallProfile, Exception | None]:
        """The call, run once: on the model's own weights where they are on the CPU, else on zeros.

        Returns:
            with zeros, an empty profile and what was raised: it may be due to them.
        """
        tensors = self.model_copy.weights.tensors.values()
        has_data = all(tensor.device.type == CPU for tensor in tensors)
        shared = {id(parameter): parameter for parameter in self.model.parameters()}
        module = copy_to_run(self.model, shared) if has_data else self.model_copy.module
        before = attributes_of(module)  # what is noted on parameters is the model's own
        try:
            args, kwargs = map_leaves(leaf_on_cpu, copied_arguments(self.asked.call))
            simulated = any(spec.type == SIMULATED for spec in self.topology.accelerators)
            # simulated ones write attention out: kernels are to take what accelerators do
            with untouched(module), on_any_device() if simulated else nullcontext():
                run, keep_grad = self._run(module), self.options.grad
                return profile_call(module, run, args, kwargs, keep_grad=keep_grad), None
        except Exception as error:  # the model's own code on weights of zero may raise anything
            if has_data:
                raise
            return CallProfile(), error
        finally:
            put_back(before)

    def _splits(self, profile: CallProfile, failures: Sequence[str]) -> Iterator[_Split]:
        """Ways of splitting, those that use the accelerators best first; on the CPU alone at last."""
        host, found = self.topology.cpu, False
        for share in _SHARES:
            for split in self._over_accelerators(share, profile.peak):
                found = True
                yield split
            if not any("OutOfMemory" in failure for failure in failures):
                break
        budgets = self._budgets(1.0, profile.peak)
        alone = None if host is None else _Split({"": host}, host)
        if alone is not None and self._fits(alone, budgets):
            yield alone
        elif not found:
            raise self._infeasible(budgets, profile.peak)

    def _budgets(self, share: float, peak: int) -> dict[DeviceKey, int]:
        """Bytes for weights: accelerators keep room for activations."""
        return {
            spec.key: max(0, int(spec.room * share) - peak) if spec.is_accelerator else spec.room
            for spec in self.topology.devices
            if spec.key != DISK
        }

    def _over_accelerators(self, share: float, peak: int) -> list[_Split]:
        accelerators = [spec.key for spec in self.topology.accelerators]
        budgets, cpu = self._budgets(share, peak), self.topology.cpu or CPU
        mapped = partial(map_modules, self.model, sizes=_SIZES, cpu=cpu, quiet=True)
        found = [
            _Split(mapped(budgets, whole), accelerators[0]) for whole in self._granularities() if accelerators
        ]
        # of those that leave as much to the CPU, large blocks first; the disk has no budget here
        found.sort(key=lambda split: self._taken(split).get(cpu, 0))
        found += [replace(split, way=RETURNS) for split in found]
        for key in accelerators:
            alone = {k: budgets[k] for k in budgets if k in (key, cpu)}
            found.append(_Split(mapped(alone, set()), key))
        if not self.options.differentiates:  # what is copied below autograd, a backward pass does not find
            found += [replace(split, way=TOGETHER) for split in found if split.way is STAYS]
        used = [split for split in found if set(split.entries.values()) & set(accelerators)]
        return [split for split in used if self._fits(split, budgets)]

    def _granularities(self) -> Iterator[set[str]]:
        """Classes that are not split: what the model says, its repeated blocks, none."""
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

    def _taken(self, split: _Split) -> dict[DeviceKey, int]:
        """Bytes of weights on each device."""
        taken: dict[DeviceKey, int] = {}
        for name, tensor in self.model_copy.weights.tensors.items():
            key = _device_of(split.entries, name)
            taken[key] = taken.get(key, 0) + tensor_bytes(tensor)
        return taken

    def _infeasible(self, budgets: Mapping[DeviceKey, int], peak: int) -> InfeasibleError:
        total = sum(round_up(tensor_bytes(t)) for t in self.model_copy.weights.tensors.values())
        given = self.topology.budgets
        first = next(spec for spec in self.topology.devices if spec.key in budgets)
        needed = {**given, first.key: total + peak + first.withheld}
        return InfeasibleError(
            f"the modules of {type(self.model).__name__} ({total} bytes, and {peak} for activations on each "
            f"accelerator) do not fit one by one: max_memory allows {given}. Budgets that would do: "
            f"max_memory={needed}",
            needed=needed,
            available=given,
        )

    def _plan(self, split: _Split, profile: CallProfile) -> Plan:
        graph, runs = self._graph(profile), dict[str, DeviceKey]()
        for name, operation in graph.operations.items():
            key = _device_of(split.entries, operation.module_path or name)
            runs[name] = split.main if self.topology[key].type == CPU else key
        homes = {name: _device_of(split.entries, name) for name in graph.weights}
        cpu, returns = self.topology.cpu, self.options.return_outputs
        problem = Problem(graph, self.topology, CPU if cpu is None else cpu, returns, streaming=False)
        judged = evaluate(problem, Assignment(runs, homes))
        return Plan(
            graph,
            self.topology,
            judged.schedule,
            judged.seconds,
            0.0,
            "hooks run the model: its operations are not planned",
            "hooks",
            self.options.constraints,
            streaming=False,
        )

    def _graph(self, profile: CallProfile) -> Graph:
        """Modules with tensors of their own, in the order in which they ran."""
        weights = self.model_copy.weights
        members: dict[str, list[str]] = {}
        parts = dict(self.model.named_modules(remove_duplicate=False))
        for name, first in weights.first.items():
            path = name.rpartition(".")[0]
            while path not in parts:  # of what is noted on a parameter
                path = path.rpartition(".")[0]
            members.setdefault(path, []).append(first)
        ran = [name for name in profile.order if name in members]
        values: list[Value] = []
        operations: list[Operation] = []
        last, read = tuple[str, ...](), 0
        for module in dict.fromkeys((*ran, *members)):
            nbytes, name = profile.outputs.get(module, 0), module or "(root)"
            inputs, last = (*last, *dict.fromkeys(members[module])), (f"{name}:out",)
            values.append(Value(*last, nbytes, nbytes))
            kind = type(parts[module]).__name__
            space = {CPU: max(0, profile.peak - nbytes - read)}  # the peak counts what lies beside it
            read = nbytes
            operations.append(Operation(name, kind, inputs, last, workspace=space, module_path=module))
        # hooks move wrappers too
        homed = [weight_of(weights, name, written=False) for name in weights.tensors]
        movable = [replace(weight, movable=True) for weight in homed]
        return Graph(operations, values, movable, (), last, shapes_known=bool(profile.order))


def _device_of(entries: Mapping[str, Any], name: str) -> Any:
    """What a map says of a module or tensor; of a module without tensors anything."""
    found = entry_of(entries, name)
    return next(iter(entries.values())) if found is None else found
