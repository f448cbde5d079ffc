"""``graphplan.partition``: plan a model, place it, and return what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from graphplan.analysis.cluster_plan import ClusterPlan
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
from graphplan.api.machines import Machines, partition_machines, refuse_with_machines
from graphplan.api.placer import Placer, Recipe
from graphplan.api.planning import Links
from graphplan.api.training_arguments import TrainingArguments
from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.shared_attributes import copy_to_run, of_class
from graphplan.capture.size_limits import SizeLimits
from graphplan.capture.thread_patches import outside_inference_mode
from graphplan.compiler.formulation import Options
from graphplan.compiler.progress import with_progress
from graphplan.compiler.saved_captures import SavedCaptures
from graphplan.devices.max_memory import MaxMemory, Reserve, read_max_memory, require_present
from graphplan.devices.speeds import Measurements, Speed, with_speeds
from graphplan.devices.topology import DeviceKey, Link
from graphplan.errors import CaptureError, GraphplanError, InputError, first_line
from graphplan.ir.cluster_plan_data import Objective, PipelineSchedule
from graphplan.ir.constraints import Constraints
from graphplan.ir.plan_data import PlanData
from graphplan.passes.training.optimizer_memory import Optimizer
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint, read_checkpoint
from graphplan.runtime.module.placed_module import attach_start, placed_class
from graphplan.runtime.weights.storage import require_data
from graphplan.warnings import warn

_SHARED = "{!r} ({}) cannot be copied: the placed model shares it with the original"


@with_progress
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
    return_outputs: bool | Literal["all"] = True,
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
    capture_cache: str | Path | None = None,
    warm: bool = False,
    plan: PlanData | ClusterPlan | str | Path | None = None,
    machines: Sequence[MaxMemory] | None = None,
    microbatches: int = 1,
    schedule: PipelineSchedule = "gpipe",
    objective: Objective = "latency",
    network: Link | None = None,
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
        max_memory: as in :func:`graphplan.plan`.
        args: as in :func:`graphplan.plan`. Without examples, and where a symbolic trace is not possible
            either, the first call is captured and placed.
        kwargs: as in :func:`graphplan.plan`.
        dynamic_shapes: as in :func:`graphplan.plan`.
        checkpoint: a safetensors file, or a folder of them, to read the weights from.
        strict: None: names that the checkpoint lacks or the model does not know are errors, and what
            cannot be captured falls back to hooks, with a warning. True: that is an error too. False:
            neither is.
        links: as in :func:`graphplan.plan`.
        return_outputs: False leaves results on the device that made them. With ``machines``, the last stage's
            rank has them; ``"all"``: every rank.
        grad: keep autograd alive in calls. Otherwise they run as under ``torch.no_grad()``, so that
            no activation outlives its last reader and the budgets hold.
        compile: True to compile each stage (a run of operations on one device) with ``torch.compile``, at
            its first call; or the options of ``torch.compile``. The plan counts operations one by one: a
            compiled stage holds what it reads until it ends, and buffers of the compiler's own; give a
            ``reserve``. Not on simulated devices.
        pin: as in :func:`graphplan.plan`.
        together: as in :func:`graphplan.plan`.
        offload: as in :func:`graphplan.plan`.
        cpu_compute: as in :func:`graphplan.plan`.
        balance: as in :func:`graphplan.plan`.
        reserve: as in :func:`graphplan.plan`.
        devices: as in :func:`graphplan.plan`.
        calls: as in :func:`graphplan.plan`. ``.plans`` and ``.graph_modules`` hold one for each structure.
        weights: as in :func:`graphplan.plan`.
        check: compare the placed model with eager on the example inputs. Where a graph differs, hooks run the
            model instead, as where there is no graph; with ``strict=True`` that is an error.
        max_batch: as in :func:`graphplan.plan`. A larger call is a :class:`graphplan.LimitError`. Without
            it, larger calls are planned when they come, as far as the budgets have room.
        max_length: likewise.
        time_limit: as in :func:`graphplan.plan`, for each structure of calls.
        capture_cache: as in :func:`graphplan.plan`; later calls of other structures use it too.
        plan: a plan, or the JSON file of one, to carry out without a search. The graph must be the same and
            each budget at least what it takes; ``max_memory`` may be left out: then it is the plan's.
        warm: let each accelerator's allocator reserve the planned bytes of activations now, instead of
            piece by piece in the first call.
        machines: as in :func:`graphplan.plan`. Every process of torchrun calls this alike, with as many
            machines as there are ranks, and gets a module that runs its own stage; rank 0 plans for all.
            Weights come from ``checkpoint``, from the model on each rank, or from rank 0 where it is on the
            meta device.
        microbatches: as in :func:`graphplan.plan`.
        schedule: as in :func:`graphplan.plan`.
        objective: as in :func:`graphplan.plan`.
        network: as in :func:`graphplan.plan`.
        train: as in :func:`graphplan.plan`. The loop stays PyTorch's: ``loss = placed(**batch).loss``,
            ``loss.backward()``, ``optimizer.step()``; gradients and the optimizer's state reside where their
            parameters do. Calls under ``torch.no_grad()`` run the forward pass alone. With ``machines``, a
            step is ``placed.train_step(loss, target, **batch)``.
        optimizer: as in :func:`graphplan.plan`.
        optimizer_bytes_per_element: as in :func:`graphplan.plan`.
        train_outputs: as in :func:`graphplan.plan`.
        recompute: as in :func:`graphplan.plan`.
        offload_activations: as in :func:`graphplan.plan`.

    Raises:
        ClusterError: with ``machines``, ranks differ in what they were given, or one does not answer.
        GraphplanError: as in :func:`graphplan.plan`; also DeviceError for a device that this machine lacks,
            InputError for a meta model without a checkpoint.
        Exception: what the model itself raises for the example inputs, unchanged.
    """
    trains = TrainingArguments(
        train, optimizer, optimizer_bytes_per_element, train_outputs, recompute, offload_activations
    )
    saved = None if capture_cache is None else SavedCaptures(capture_cache)
    if machines is not None:
        refuse_with_machines(
            max_memory=max_memory,
            pin=pin,
            together=together,
            balance=balance,
            calls=calls,
            weights=weights,
            compile=compile,
            check=check,
            warm=warm,
            train_outputs=train_outputs,
        )
        asked = Machines(machines, microbatches, schedule, objective, network, devices, links, reserve)
        rules = Constraints(offload=offload, cpu_compute=cpu_compute)
        sizes = SizeLimits(max_batch, max_length)
        return partition_machines(
            model,
            asked,
            args,
            kwargs,
            Options(dynamic_shapes, grad, True, rules, sizes, time_limit=time_limit, saved_captures=saved),
            trains,
            checkpoint=checkpoint,
            strict=strict is not False,
            everywhere=return_outputs == "all",
            plan=plan,
        )
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
    training = trains.read(
        model_copy,
        {
            "grad": grad,
            "dynamic_shapes": dynamic_shapes,
            "calls": calls,
            "compile": compile,
            "check": check,
            "max_batch": max_batch,
            "max_length": max_length,
        },
    )
    if training is not None:
        model_copy.step = training.differentiation([s.type for s in topology.devices if s.computes])
    options = Options(
        dynamic_shapes,
        grad,
        bool(return_outputs),
        constraints,
        size_limits,
        compiled,
        time_limit,
        training,
        saved,
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
