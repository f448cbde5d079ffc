"""The two entry points: :func:`plan` decides, :func:`partition` also places and returns what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphplan.analysis.plan import Plan
from graphplan.api.arguments import (
    ExampleCall,
    ExampleRun,
    budgeted,
    pin_sparse,
    read_compile,
    read_constraints,
    read_example,
    read_examples,
    read_given_plan,
    read_model,
)
from graphplan.api.placer import Placer, Recipe
from graphplan.api.training_arguments import read_training
from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.shared_attributes import copy_to_run, of_class
from graphplan.capture.size_limits import SizeLimits
from graphplan.capture.thread_patches import outside_inference_mode
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.max_memory import MaxMemory, Reserve, read_max_memory, require_present
from graphplan.devices.speeds import Measurements, Speed, with_speeds
from graphplan.devices.topology import DeviceKey, Link
from graphplan.errors import CaptureError, GraphplanError, InputError, first_line
from graphplan.integrations.transformers.generate_plan import plan_first
from graphplan.ir.plan_data import PlanData
from graphplan.passes.training.optimizer_memory import Optimizer
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint, read_checkpoint
from graphplan.runtime.module.placed_module import attach_start, placed_class
from graphplan.runtime.weights.storage import require_data
from graphplan.warnings import warn

_SHARED = "{!r} ({}) cannot be copied: the placed model shares it with the original"

Links = Mapping[tuple[DeviceKey, DeviceKey], Link]


@outside_inference_mode
def plan(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    links: Links | None = None,
    return_outputs: bool = True,
    pin: Mapping[str, DeviceKey | torch.device] | None = None,
    together: Sequence[str | Sequence[str]] = (),
    offload: bool = True,
    cpu_compute: bool = True,
    balance: bool = False,
    reserve: Reserve = 0,
    devices: Mapping[DeviceKey, Speed] | Measurements | None = None,
    calls: Sequence[ExampleCall] | ExampleRun | None = None,
    weights: Sequence[float] | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    time_limit: float | None = None,
    train: bool = False,
    optimizer: Optimizer | None = None,
    optimizer_bytes_per_element: float | None = None,
    train_outputs: str | Sequence[str] | None = None,
    recompute: bool = True,
    offload_activations: bool = True,
) -> Plan:
    """Decide where everything in ``model`` goes, and move nothing.

    The model may be on the meta device, and the devices need not exist here.

    Args:
        model: any module; it is not changed.
        max_memory: device key -> bytes or text such as ``"20GiB"``. Keys are accelerator indices,
            ``"cpu"``, or device names; their order is the order of preference. A budget covers
            everything on the device: weights, activations, copies. None: what is free here.
        args: example inputs by position, on any device, meta too. Without examples the model's
            ``dummy_inputs`` serve, or a symbolic trace, which knows no activation sizes.
        kwargs: example inputs by name.
        dynamic_shapes: as in ``torch.export.export``.
        links: (source key, destination key) -> :class:`graphplan.Link`, where it differs from
            25 GB/s and 15 microseconds. It holds in both directions unless the other is given too.
        return_outputs: whether results go back to the device of the first tensor input.
        pin: module, operation, parameter or buffer -> device key, or the device as torch names it. A
            module runs there, and its weights live there; a parameter or buffer lives there.
        together: modules, or lists of them, that must not be split over devices.
        offload: False for accelerators only: what does not fit them is an error.
        cpu_compute: False where the CPU may keep weights, but not compute.
        balance: spread the work evenly over the accelerators instead of moving the fewest bytes.
        reserve: bytes, or text such as ``"1GiB"``, to leave free on every device; or device key -> either.
        devices: device key -> :class:`graphplan.Speed`, or what :func:`graphplan.measure_devices` found.
            Without, known cards count at their makers' figures and others at a common one.
        calls: several example calls, in place of ``args`` and ``kwargs``: each a mapping of named
            inputs, a pair ``(args, kwargs)``, or ``("vae.decode", args, kwargs)`` for another method or a
            submodule than ``forward``. One placement of the weights serves them all, keeps
            every budget in each, and minimises the weighted sum of their seconds. What is returned is
            the plan of the first; the others' are in its ``others``. Or a function of the model that makes
            the calls, ``lambda m: m.decode(m.encode(x))``: it runs on zeros, and nothing is computed.
        weights: how much each of ``calls`` counts, 1 each by default: ``[1, 200]`` for a prefill
            that 200 decodes follow.
        max_batch: for a transformers model, the most sequences in a call, beams counted. Memory is
            planned for as many; without, for those of the example. With this or ``max_length``, the
            prefill and the decode that ``generate`` makes after the example are planned too, and have room.
        max_length: likewise the most tokens of a sequence, those in its cache counted.
        time_limit: seconds for the search, after the trace; the best placement by then is taken, with the
            bound that was proven. None: some work, which is seconds where the accelerators hold the
            model and up to a minute where weights are streamed or memory is tight, and the same result
            whatever the clock says.
        train: plan a training step instead of a forward pass: forward, backward and the optimizer's step,
            with gradients, saved activations and the optimizer's state within the budgets. It is planned in
            the modes that the model is in (``model.train()``), for the sizes of the example.
        optimizer: class of the optimizer, or a function from parameters to one, such as
            ``functools.partial(torch.optim.SGD, momentum=0.9)``: a dry step shows what it keeps. None counts
            no state.
        optimizer_bytes_per_element: bytes of state for each element of a parameter, instead of a dry step.
        train_outputs: names of the results that backward starts from; by default ``"loss"``, or where no
            result has this name, all that have a gradient.
        recompute: False: nothing of the forward pass is computed again in the backward pass.
        offload_activations: False: what the backward pass reads stays on the device where it was made.

    Raises:
        BudgetError, DeviceError: ``max_memory``, ``reserve``, ``links`` or ``devices`` cannot be read.
        InputError: the inputs do not fit the model, or another argument is not what it should be.
        PlanError: ``pin`` or ``together`` names what does not run, or they contradict each other.
        LimitError: an example is larger than ``max_batch`` or ``max_length``.
        CaptureError: the model cannot be traced.
        InfeasibleError: no placement fits; the smallest budgets that would do are in the error.
        Exception: what the model itself raises for the example inputs, unchanged.
    """
    topology = with_speeds(read_max_memory(max_memory, links, reserve), devices)
    constraints = read_constraints(
        pin, together, topology, offload=offload, cpu_compute=cpu_compute, balance=balance
    )
    size_limits = SizeLimits(max_batch, max_length)
    model = read_model(model)
    model_copy = ModelCopy(model)
    training = read_training(
        model_copy,
        train,
        optimizer,
        optimizer_bytes_per_element,
        train_outputs,
        recompute=recompute,
        offload_activations=offload_activations,
        device_types=[spec.type for spec in topology.devices if spec.computes],
        unsupported={
            "dynamic_shapes": dynamic_shapes,
            "calls": calls,
            "max_batch": max_batch,
            "max_length": max_length,
        },
    )
    options = Options(
        dynamic_shapes,
        False,
        return_outputs,
        constraints,
        size_limits,
        time_limit=time_limit,
        training=training,
    )
    compiler = Compiler(model_copy, topology, options)
    if calls is not None or weights is not None:
        find = read_examples(model_copy, args, kwargs, calls, weights)
        return compiler.plan_together(find(compiler))[0].plan
    return plan_first(compiler, read_example(model, model_copy, args, kwargs))[0].plan


@outside_inference_mode
def partition(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    checkpoint: str | Path | Checkpoint | None = None,
    strict: bool | None = None,
    links: Links | None = None,
    return_outputs: bool = True,
    grad: bool = False,
    compile: bool | Mapping[str, Any] = False,
    pin: Mapping[str, DeviceKey | torch.device] | None = None,
    together: Sequence[str | Sequence[str]] = (),
    offload: bool = True,
    cpu_compute: bool = True,
    balance: bool = False,
    reserve: Reserve = 0,
    devices: Mapping[DeviceKey, Speed] | Measurements | None = None,
    calls: Sequence[ExampleCall] | ExampleRun | None = None,
    weights: Sequence[float] | None = None,
    check: bool = False,
    max_batch: int | None = None,
    max_length: int | None = None,
    time_limit: float | None = None,
    warm: bool = False,
    plan: PlanData | str | Path | None = None,
    train: bool = False,
    optimizer: Optimizer | None = None,
    optimizer_bytes_per_element: float | None = None,
    train_outputs: str | Sequence[str] | None = None,
    recompute: bool = True,
    offload_activations: bool = True,
) -> Any:
    """The model, placed over the devices of ``max_memory`` and ready to run.

    What is returned is of the model's own class, as far as ``isinstance``, names and state_dict keys
    go, with ``.plan``, ``.graph_module`` and ``.code`` beside; where the model has such names itself, they
    are ``.graphplan.plan`` and so on. ``model`` itself is left as it was; weights that stay on the CPU share
    their memory with it.

    Args:
        model: any module, on any device; on the meta device with ``checkpoint``.
        max_memory: as in :func:`plan`.
        args: as in :func:`plan`. Without examples, and where a symbolic trace is not possible
            either, the first call is captured and placed.
        kwargs: as in :func:`plan`.
        dynamic_shapes: as in :func:`plan`.
        checkpoint: a safetensors file, or a folder of them, to read the weights from.
        strict: None: names that the checkpoint lacks or the model does not know are errors, and what
            cannot be captured falls back to hooks, with a warning. True: that is an error too. False:
            neither is.
        links: as in :func:`plan`.
        return_outputs: False leaves results on the device that made them.
        grad: keep autograd alive in calls. Otherwise they run as under ``torch.no_grad()``, so that
            no activation outlives its last reader and the budgets hold.
        compile: True to compile each stage (a run of operations on one device) with ``torch.compile``, at
            its first call; or the options of ``torch.compile``. The plan counts operations one by one: a
            compiled stage holds what it reads until it ends, and buffers of the compiler's own; give a
            ``reserve``. Not on simulated devices.
        pin: as in :func:`plan`.
        together: as in :func:`plan`.
        offload: as in :func:`plan`.
        cpu_compute: as in :func:`plan`.
        balance: as in :func:`plan`.
        reserve: as in :func:`plan`.
        devices: as in :func:`plan`.
        calls: as in :func:`plan`. ``.plans`` and ``.graph_modules`` hold one for each structure.
        weights: as in :func:`plan`.
        check: compare the placed model with eager on the example inputs. Where a graph differs, hooks run the
            model instead, as where there is no graph; with ``strict=True`` that is an error.
        max_batch: as in :func:`plan`. A larger call is a :class:`graphplan.LimitError`. Without it, larger
            calls are planned when they come, as far as the budgets have room.
        max_length: likewise.
        time_limit: as in :func:`plan`, for each structure of calls.
        plan: a plan, or the JSON file of one, to carry out without a search. The graph must be the same and
            each budget at least what it takes; ``max_memory`` may be left out: then it is the plan's.
        warm: let each accelerator's allocator reserve the planned bytes of activations now, instead of
            piece by piece in the first call.
        train: as in :func:`plan`. The loop stays PyTorch's: ``loss = placed(**batch).loss``,
            ``loss.backward()``, ``optimizer.step()``; gradients and the optimizer's state reside where their
            parameters do. Calls under ``torch.no_grad()`` run the forward pass alone.
        optimizer: as in :func:`plan`.
        optimizer_bytes_per_element: as in :func:`plan`.
        train_outputs: as in :func:`plan`.
        recompute: as in :func:`plan`.
        offload_activations: as in :func:`plan`.

    Raises:
        GraphplanError: as in :func:`plan`; also DeviceError for a device that this machine lacks,
            InputError for a meta model without a checkpoint.
        Exception: what the model itself raises for the example inputs, unchanged.
    """
    given = read_given_plan(
        plan, pin or together or balance or links or devices or time_limit or not (offload and cpu_compute)
    )
    if given is None:
        topology = with_speeds(read_max_memory(max_memory, links, reserve), devices)
    else:
        topology = budgeted(given.topology, max_memory, reserve)
    require_present(topology)
    constraints = read_constraints(
        pin, together, topology, offload=offload, cpu_compute=cpu_compute, balance=balance
    )
    size_limits = SizeLimits(max_batch, max_length)
    compiled = read_compile(compile, topology)
    model = read_model(model)
    model_copy = ModelCopy(model)
    constraints = pin_sparse(constraints, model_copy.weights, topology)
    training = read_training(
        model_copy,
        train,
        optimizer,
        optimizer_bytes_per_element,
        train_outputs,
        recompute=recompute,
        offload_activations=offload_activations,
        device_types=[spec.type for spec in topology.devices if spec.computes],
        unsupported={
            "grad": grad,
            "dynamic_shapes": dynamic_shapes,
            "calls": calls,
            "compile": compile,
            "check": check,
            "plan": plan,
            "max_batch": max_batch,
            "max_length": max_length,
        },
    )
    options = Options(
        dynamic_shapes, grad, return_outputs, constraints, size_limits, compiled, time_limit, training
    )
    for name, value in model_copy.shared.items():
        warn(_SHARED.format(name, type(value).__name__))
    source = _source(model, model_copy, checkpoint, strict=strict is not False)
    placer = Placer(Recipe(topology, options, strict is True), source, check, warm, given)
    if calls is not None or weights is not None:
        return placer.place_together(
            model, model_copy, read_examples(model_copy, args, kwargs, calls, weights)
        )
    call = read_example(model, model_copy, args, kwargs)
    if args or kwargs:
        return placer.place(model, model_copy, call)
    try:
        return placer.place(model, model_copy, call)
    except Exception as error:  # a model may raise anything for its own dummy inputs
        if isinstance(error, GraphplanError) and not isinstance(error, CaptureError | InputError):
            raise
        said = error if isinstance(error, GraphplanError) else first_line(error)
        warn(f"{said} (the first call will be captured instead)")
    shell = copy_to_run(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    shell = of_class(shell, placed_class(type(model)))
    attach_start(shell, placer)
    return shell


def _source(
    model: nn.Module, model_copy: ModelCopy, checkpoint: str | Path | Checkpoint | None, *, strict: bool
) -> Checkpoint | None:
    """Where weights are read from; None where the model has them."""
    if checkpoint is None:
        require_data(model, model_copy.weights)
        return None
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    return read_checkpoint(model, model_copy.weights, checkpoint, strict=strict)
