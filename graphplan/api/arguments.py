"""Read and check a caller's arguments: model, example calls, constraints, training, compiling, plans."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from graphplan._compat.torch import uncompiled
from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.api.plan_options import ExampleCall, PlanOptions
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.capture.model_methods import entry_named
from graphplan.capture.signature import BoundCall
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler, WeightedCall
from graphplan.compiler.saved_captures import SavedCaptures
from graphplan.compiler.training import Training, trainable
from graphplan.devices.device_keys import caller_key
from graphplan.devices.max_memory import MaxMemory, Reserve, read_max_memory
from graphplan.devices.topology import SIMULATED, Topology, is_figure
from graphplan.errors import DeviceError, InputError, PlanError
from graphplan.integrations.rehearsal import rehearse
from graphplan.ir.constraints import Constraints
from graphplan.passes.training.optimizer_memory import optimizer_memory
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint, read_checkpoint
from graphplan.warnings import warn


@dataclass(frozen=True, slots=True)
class Request:
    """The caller's arguments, checked: the model, the copy of it to trace, the compiler's options."""

    model: nn.Module
    model_copy: ModelCopy
    options: Options


def read_request(
    model: Any, topology: Topology | None, plan_options: PlanOptions, preset: Options, *, check: bool = False
) -> Request:
    """Return the model and the compiler's options.

    Args:
        model: the model to place.
        topology: the devices; None for several machines, whose training steps are built stage by stage.
        plan_options: the caller's options.
        preset: options that the calling function has set already.
        check: whether results are compared with eager's, which training does not allow.

    Raises:
        DeviceError: ``pin`` names an invalid device, or no device can hold a sparse weight.
        InputError: another argument is not as :func:`graphplan.plan` says.
    """
    plan_options.require_flags()
    plan_options.require_companions(machines=topology is None)
    constraints = read_constraints(plan_options, topology)
    model = read_model(model)
    model_copy = ModelCopy(model)
    if topology is None:  # stages do not re-evaluate branches on weights, so none is traced
        model_copy.current = lambda _: None
    else:
        constraints = _pin_sparse(constraints, model_copy.weights, topology)
    unsupported: dict[str, Any] = {"grad": preset.grad, "compile": preset.compile is not None, "check": check}
    if topology is not None:
        unsupported |= {"dynamic_shapes": plan_options.dynamic_shapes, "calls": plan_options.calls}
    else:
        unsupported |= {"max_batch": plan_options.max_batch, "max_length": plan_options.max_length}
    training = _read_training(plan_options, model_copy, unsupported)
    if training is not None and topology is not None:
        model_copy.step = training.differentiation
    folder = plan_options.capture_cache
    options = replace(
        preset,
        dynamic_shapes=plan_options.dynamic_shapes,
        constraints=constraints,
        size_limits=plan_options.size_limits,
        time_limit=plan_options.time_limit,
        training=training,
        saved_captures=None if folder is None else SavedCaptures(folder),
    )
    return Request(model, model_copy, options)


def read_model(model: Any) -> nn.Module:
    """Return the module without ``torch.compile``'s wrapper; raise InputError if it cannot be placed."""
    model = uncompiled(model)
    if not isinstance(model, nn.Module):
        what = "the class itself: make an instance" if isinstance(model, type) else type(model).__name__
        raise InputError(f"graphplan places a torch.nn.Module, not {what}")
    for name, submodule in model.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            raise InputError(
                f"{repr(name) if name else 'the model'} is a ScriptModule, which has no Python to trace: use "
                "the module that it was made from"
            )
        if hasattr(submodule, "_graphplan"):
            raise InputError(
                f"{repr(name) if name else 'the model'} is placed already: give the original model, or the "
                "result of graphplan.unplace"
            )
        if hasattr(submodule, "_hf_hook"):
            raise InputError(
                f"accelerate's hooks run {name or 'the model'!r}: load it without device_map, or call "
                "accelerate.hooks.remove_hook_from_submodules(model) first"
            )
    return model


def read_constraints(plan_options: PlanOptions, topology: Topology | None) -> Constraints:
    """Return the caller's constraints. Their names are checked later, against the graph.

    Raises:
        DeviceError: ``pin`` names an invalid device.
        InputError: ``pin`` is not a mapping of names, or ``together`` not a list of them.
    """
    pin, together = plan_options.pin, plan_options.together
    if pin is not None and not isinstance(pin, Mapping):
        raise InputError(f"pin must map names to device keys, as {{'lm_head': 0}}, not be {pin!r}")
    if isinstance(together, str) or not isinstance(together, Sequence):
        raise InputError(f"together must list names, or lists of them: write [{together!r}]")
    groups = tuple(_read_group(group) for group in together)
    for name in pin or {}:
        if not isinstance(name, str):
            raise InputError(f"pin must map names to device keys, as {{'lm_head': 0}}, not {name!r}")
    devices = topology.devices if topology is not None else ()
    pins = {name: caller_key(devices, device, "pin") for name, device in (pin or {}).items()}
    return Constraints(
        pins, groups, plan_options.offload, cpu_compute=plan_options.cpu_compute, balance=plan_options.balance
    )


def _pin_sparse(constraints: Constraints, weights: ModelWeights, topology: Topology) -> Constraints:
    """Return the constraints, with sparse weights pinned to the CPU if simulated devices cannot hold them."""
    sparse = [name for name, tensor in weights.tensors.items() if tensor.layout is not torch.strided]
    if not sparse or all(spec.type != SIMULATED for spec in topology.devices):
        return constraints
    if topology.cpu is None:
        raise DeviceError(
            f"{sparse[0]!r} is sparse, and simulated devices hold no sparse tensors: give 'cpu' in max_memory"
        )
    warn(f"simulated devices hold no sparse tensors: {', '.join(map(repr, sparse))} stay on the CPU")
    return replace(constraints, pin={**dict.fromkeys(sparse, topology.cpu), **constraints.pin})


def _read_group(group: object) -> str | tuple[str, ...]:
    if isinstance(group, str):
        return group
    names = tuple(group) if isinstance(group, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"together must list names, or lists of them: {group!r} is neither")
    return names


def _read_training(
    plan_options: PlanOptions, model_copy: ModelCopy, unsupported: Mapping[str, Any]
) -> Training | None:
    """Return the parameters to train and how; None for a forward pass alone.

    ``unsupported``: name -> value of arguments that cannot be given with ``train=True``.
    """
    if not plan_options.train:
        return None
    for name, value in unsupported.items():
        if value:
            raise InputError(f"train=True does not take {name}")
    outputs = _read_train_outputs(plan_options.train_outputs)
    _require_one_optimizer(plan_options)
    weights = model_copy.weights
    required = trainable(weights)
    trained = tuple(name for name in weights.tensors if name in required)
    if not trained:
        raise InputError(
            "train=True: no parameter of the model requires a gradient: call requires_grad_() on what is "
            "to be trained, or give grad=True instead if only inputs need gradients"
        )
    dtypes = {weights.tensors[name].dtype for name in trained}
    later = {n: t for n, t in weights.tensors.items() if n in weights.parameters and t.dtype in dtypes}
    memory = optimizer_memory(later, plan_options.optimizer, plan_options.optimizer_bytes_per_element)
    allowed = plan_options.recompute, plan_options.offload_activations, plan_options.accumulate_gradients
    return Training(memory, trained, outputs, *allowed)


def _require_one_optimizer(plan_options: PlanOptions) -> None:
    optimizer, nbytes = plan_options.optimizer, plan_options.optimizer_bytes_per_element
    if nbytes is not None and optimizer is not None:
        raise InputError("give optimizer or optimizer_bytes_per_element, not both")
    if nbytes is not None and not is_figure(nbytes, may_be_zero=True):
        raise InputError(f"optimizer_bytes_per_element={nbytes!r}: write 0 or more bytes")
    if optimizer is not None and not callable(optimizer):
        text = repr(optimizer) if isinstance(optimizer, str) else f"{type(optimizer).__name__}(...)"
        raise InputError(
            f"optimizer={text}: give the class of an optimizer, such as torch.optim.AdamW, or a function "
            "from parameters to one"
        )


def _read_train_outputs(train_outputs: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if train_outputs is None:
        return None
    names = (
        (train_outputs,)
        if isinstance(train_outputs, str) or not isinstance(train_outputs, Iterable)
        else tuple(train_outputs)
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"train_outputs must be names of results, such as 'loss', not {train_outputs!r}")
    return names


def read_compile(compile: bool | Mapping[str, Any], topology: Topology) -> Mapping[str, Any] | None:
    """Return the options of ``torch.compile``, or None if stages are not compiled."""
    if compile is False:
        return None
    if compile is not True and not isinstance(compile, Mapping):
        raise InputError("compile must be True, False, or options of torch.compile such as {'mode': ...}")
    simulated = [spec.key for spec in topology.devices if spec.type == SIMULATED]
    if simulated:
        raise DeviceError(
            f"compile: device {simulated[0]!r} is simulated, and torch.compile has no code for simulated "
            "devices: leave compile out inside simulate"
        )
    return {} if compile is True else dict(compile)


Saved = TypeVar("Saved", Plan, ClusterPlan)


def read_given_plan(plan: object, kind: type[Saved], plan_options: PlanOptions) -> Saved | None:
    """Return the plan to carry out, loaded if ``plan`` is the path of a file; None for a search.

    Raises:
        InputError: ``plan`` is neither a plan nor a path, or options of a search are given too.
        PlanError: the file cannot be read.
    """
    if plan is None:
        return None
    if kind is Plan and plan_options.searches():
        raise InputError(
            "plan= is carried out as it is: give pin, together, offload, cpu_compute, balance, links, "
            "devices and time_limit to graphplan.plan, which made it"
        )
    if isinstance(plan, str | Path):
        return kind.load_json(plan)
    if not isinstance(plan, kind):
        where = "with machines=, " if kind is ClusterPlan else ""
        raise InputError(f"{where}plan must be a graphplan.{kind.__name__} or its JSON file, not {plan!r}")
    return plan


def budgeted(plan: Plan, max_memory: MaxMemory | None, reserve: Reserve, *, grad: bool) -> Topology:
    """Return a plan's devices with the budgets of ``max_memory``, if given, which must name the same ones."""
    topology = plan.topology
    if max_memory is None:
        return topology
    now = read_max_memory(max_memory, None, reserve, grad=grad or plan.graph.trains)
    if set(now.keys) != set(topology.keys):
        raise PlanError(
            f"the plan is for the devices {list(topology.keys)}, but max_memory names {list(now.keys)}"
        )
    specs = (
        replace(spec, memory=now[spec.key].memory, reserve=now[spec.key].reserve, taken=now[spec.key].taken)
        for spec in topology.devices
    )
    return replace(topology, devices=tuple(specs))


def read_examples(
    plan_options: PlanOptions, args: Sequence[Any], kwargs: Mapping[str, Any] | None, compiler: Compiler
) -> list[WeightedCall]:
    """Return the example calls of ``calls=`` with their weights; a function is rehearsed to find its calls.

    Raises:
        InputError: the arguments are not as :func:`graphplan.plan` says.
    """
    calls, weights = plan_options.calls, plan_options.weights
    if not (isinstance(args, tuple | list) and isinstance(kwargs, Mapping | None)) or args or kwargs:
        raise InputError("give example inputs in calls=, or in args= and kwargs=, not in both")
    if callable(calls):
        if weights is not None:
            raise InputError("calls is a function, and graphplan counts its calls: leave weights out")
        return rehearse(calls, compiler)
    if isinstance(calls, Mapping | str) or not isinstance(calls, Sequence) or not calls:
        raise InputError(
            "calls must be a list of example inputs, each a mapping of names or a pair (args, kwargs)"
        )
    if not isinstance(weights, Iterable | None):
        raise InputError(f"weights must list a positive number for each of calls, not be {weights!r}")
    counts = [1.0] * len(calls) if weights is None else list(weights)
    if len(counts) != len(calls):
        raise InputError(
            f"calls has {len(calls)} entries and weights {len(counts)}: give one weight for each"
        )
    for weight in counts:
        number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not number or not (0 < weight < math.inf):
            raise InputError(f"weights must be positive numbers, not {weight!r}")
    pairs = zip(calls, counts, strict=True)
    return [_bind_call(compiler.model_copy, call, float(weight)) for call, weight in pairs]


def _bind_call(model_copy: ModelCopy, call: ExampleCall, weight: float) -> WeightedCall:
    if isinstance(call, Mapping):
        call = (), call
    if isinstance(call, tuple | list) and 2 <= len(call) <= 3:
        *name, args, kwargs = call
        named = all(isinstance(item, str) for item in name)
        if named and isinstance(args, tuple | list) and isinstance(kwargs, Mapping):
            entry = entry_named(model_copy.module, *name) if name else ""
            return WeightedCall(model_copy.for_entry(entry).bind(tuple(args), kwargs), weight)
    kind = type(call).__name__
    raise InputError(
        f"each of calls must be a mapping of names, a pair (args, kwargs), as ((x,), {{}}), or "
        f"('decode', args, kwargs) for another method or a submodule, not a {kind}"
    )


def require_inputs(args: object, kwargs: object) -> None:
    """Raise InputError unless ``args`` is a tuple or list, and ``kwargs`` a mapping or None."""
    if isinstance(args, Mapping):
        raise InputError("args must be a tuple of inputs; these have names: write kwargs=inputs")
    if not isinstance(args, tuple | list):
        raise InputError("args must be a tuple of inputs, as in torch.export: write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError("kwargs must map argument names to inputs: write kwargs={'x': x}")


def read_example(request: Request, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> BoundCall | None:
    """Return the example call, or else one with the model's ``dummy_inputs``, or else None.

    Raises:
        InputError: the inputs are not as :func:`graphplan.plan` says, or do not fit the model.
    """
    require_inputs(args, kwargs)
    model_copy = request.model_copy
    if args or kwargs or not model_copy.signature.parameters:
        return model_copy.bind(tuple(args), kwargs or {})
    dummies = getattr(request.model, "dummy_inputs", None)
    if isinstance(dummies, Mapping) and dummies:
        return model_copy.bind((), dummies)
    return None


def require_example(request: Request, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> BoundCall:
    """Return :func:`read_example`; raise InputError too if there are no inputs."""
    call = read_example(request, args, kwargs)
    if call is None:
        raise InputError(
            f"{type(request.model).__name__} is planned for example inputs, and there are none: give "
            "args= or kwargs="
        )
    return call


def read_source(
    request: Request, checkpoint: str | Path | Checkpoint | None, *, strict: bool
) -> Checkpoint | None:
    """Return the checkpoint to read weights from, or None if the model has them.

    If ``strict``, names that the checkpoint lacks or the model does not know are errors.

    Raises:
        CheckpointError: the checkpoint does not fit the model.
        InputError: ``checkpoint`` is not a path.
    """
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    if not isinstance(checkpoint, str | os.PathLike):
        raise InputError(
            "checkpoint must be the path of a .safetensors file, or of a folder with several, not a "
            f"{type(checkpoint).__name__}"
        )
    return read_checkpoint(request.model, request.model_copy.weights, checkpoint, strict=strict)
