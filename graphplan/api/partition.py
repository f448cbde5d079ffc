"""``graphplan.partition``: plan a model, place it, and return what runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.api.arguments import (
    budgeted,
    pin_sparse,
    read_compile,
    read_example,
    read_examples,
    read_given_plan,
    read_request,
    read_source,
)
from graphplan.api.machines import partition_machines
from graphplan.api.placer import Placer
from graphplan.api.plan_options import (
    PlanKeywords,
    read_options,
    refuse_with_machines,
    require_flags,
    shows_options,
)
from graphplan.capture.model.shared_attributes import copy_to_run, of_class, trace_patched
from graphplan.capture.thread_patches import outside_inference_mode
from graphplan.compiler.formulation import Options
from graphplan.compiler.progress import with_progress
from graphplan.devices.max_memory import MaxMemory, require_present
from graphplan.errors import CaptureError, GraphplanError, InputError
from graphplan.ir.plan_data import PlanData
from graphplan.message_text import first_line
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.module.module_state import ModuleState
from graphplan.runtime.module.placed_module import attach, placed_class
from graphplan.runtime.weights.storage import like, require_data
from graphplan.warnings import warn

_WAITS = "{} has no example inputs: the first call will be captured; give args= or kwargs= to place it now"


@shows_options
@with_progress
@outside_inference_mode
def partition(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machines: Sequence[MaxMemory] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    strict: bool | None = None,
    return_outputs: bool | Literal["all"] = True,
    grad: bool = False,
    compile: bool | Mapping[str, Any] = False,
    check: bool = False,
    plan: PlanData | ClusterPlan | str | Path | None = None,
    warm: bool = False,
    **options: Unpack[PlanKeywords],
) -> Any:
    """The model, placed over the devices of ``max_memory`` and ready to run.

    What is returned is of the model's own class, as far as ``isinstance``, names and state_dict keys
    go, with ``.plan``, ``.graph_module`` and ``.code`` beside; where the model has such names itself, they
    are ``.graphplan.plan`` and so on. ``model`` itself is left as it was; weights that stay on the CPU share
    their memory with it.

    Args:
        model: any module, on any device; on the meta device with ``checkpoint``.
        max_memory: as in :func:`graphplan.plan`.
        args: as in :func:`graphplan.plan`. Without examples, and where the model does not take its own
            ``dummy_inputs``, it is placed at its first call, which then raises what is raised below.
        kwargs: as in :func:`graphplan.plan`.
        machines: as in :func:`graphplan.plan`. Every process of torchrun calls this alike, with as many
            machines as there are ranks, and gets a module that runs its own stage; rank 0 plans for all.
            Weights come from ``checkpoint``, from the model on each rank, or from rank 0 where it is on the
            meta device.
        checkpoint: a safetensors file, or a folder of them, to read the weights from.
        strict: None: names that the checkpoint lacks or the model does not know are errors, and what
            cannot be captured falls back to hooks, with a warning. True: that is an error too. False:
            neither is.
        return_outputs: False leaves results on the device that made them. With ``machines``, True: the last
            stage's rank has them; ``"all"``: every rank.
        grad: keep autograd alive in calls. Otherwise they run as under ``torch.no_grad()``, so that
            no activation outlives its last reader and the budgets hold.
        compile: True to compile each stage (a run of operations on one device) with ``torch.compile``, at
            its first call; or the options of ``torch.compile``. The plan counts operations one by one: a
            compiled stage holds what it reads until it ends, and buffers of the compiler's own; give a
            ``reserve``. Not on simulated devices.
        check: compare the placed model with eager on the example inputs. Where a graph differs, hooks run the
            model instead, as where there is no graph; with ``strict=True`` that is an error.
        plan: a plan, or the JSON file of one, to carry out without a search. The graph must be the same and
            each budget at least what it takes; ``max_memory`` may be left out: then it is the plan's.
        warm: let each accelerator's allocator reserve the planned bytes of activations now, instead of
            piece by piece in the first call.
        options: all keyword arguments of :func:`graphplan.plan`; of these, here:

    Keyword Args:
        calls: as in :func:`graphplan.plan`. ``.plans`` and ``.graph_modules`` hold one for each structure.
        max_batch: as in :func:`graphplan.plan`. A larger call is a :class:`graphplan.LimitError`. Without
            it, larger calls are planned when they come, as far as the budgets have room.
        time_limit: as in :func:`graphplan.plan`, for each structure of calls.
        capture_cache: as in :func:`graphplan.plan`; later calls of other structures use it too.
        train: as in :func:`graphplan.plan`. The loop stays PyTorch's: ``loss = placed(**batch).loss``,
            ``loss.backward()``, ``optimizer.step()``; gradients and the optimizer's state reside where their
            parameters do. Calls under ``torch.no_grad()`` run the forward pass alone. With ``machines``, a
            step is ``placed.train_step(loss, target, **batch)``.

    Raises:
        ClusterError: with ``machines``, ranks differ in what they were given, or one does not answer.
        GraphplanError: as in :func:`graphplan.plan`; also DeviceError for a device that this machine lacks,
            InputError for a meta model without a checkpoint.
        Exception: what the model itself raises for the example inputs, unchanged.
    """
    asked = read_options(partition, options)
    require_flags(grad=grad, check=check, warm=warm, strict=strict is not None and strict)
    require_flags(return_outputs=return_outputs == "all" or return_outputs)
    if machines is not None:
        others = {"compile": compile, "check": check, "warm": warm, "return_outputs": not return_outputs}
        refuse_with_machines(asked, max_memory=max_memory, **others)
        return partition_machines(
            model,
            machines,
            asked,
            args,
            kwargs,
            grad=grad,
            checkpoint=checkpoint,
            strict=strict is not False,
            everywhere=return_outputs == "all",
            plan=plan,
        )
    given = read_given_plan(plan, Plan, asked)
    if given is None:
        topology = asked.topology(max_memory, grad=grad)
    else:
        topology = budgeted(given, max_memory, asked.reserve, grad=grad)
    require_present(topology)
    own = Options(grad=grad, return_outputs=bool(return_outputs), compile=read_compile(compile, topology))
    request = read_request(model, topology, asked, own, check=check)
    model, model_copy = request.model, request.model_copy
    rules = pin_sparse(request.options.constraints, model_copy.weights, topology)
    _warn_of_shared(model_copy.shared)
    if checkpoint is None:
        require_data(model, model_copy.weights)
    source = read_source(request, checkpoint, strict=strict is not False)
    with_rules = replace(request.options, constraints=rules)
    placer = Placer(topology, with_rules, strict is True, source, check, warm, given)
    if asked.calls is not None:
        return placer.place_together(model, model_copy, partial(read_examples, asked, args, kwargs))
    call = read_example(request, args, kwargs)
    if call is None:
        warn(_WAITS.format(type(model).__name__))
        return _at_first_call(model, placer)
    try:
        return placer.place(model, model_copy, call)
    except Exception as error:  # a model may raise anything for its own dummy inputs
        ours = isinstance(error, GraphplanError)
        if args or kwargs or (ours and not isinstance(error, CaptureError | InputError)):
            raise
        said = error if ours else first_line(error)
        warn(f"{said} (the first call will be captured instead)")
    return _at_first_call(model, placer)


def _warn_of_shared(shared: Mapping[str, Any]) -> None:
    """Say what a placed model shares with the original, one warning for all of a class."""
    kinds: dict[str, list[str]] = {}
    for name, value in shared.items():
        kinds.setdefault(type(value).__name__, []).append(name)
    for kind, (first, *others) in kinds.items():
        more = f" and {len(others)} more" if others else ""
        warn(f"{first!r}{more} ({kind}) cannot be copied: the placed model shares this with the original")


def _at_first_call(model: nn.Module, placer: Placer) -> nn.Module:
    """What is placed when it is called, in place: with parameters of its own, over the same memory."""
    memo: dict[int, Any] = {id(t): t for t in model.buffers()}
    memo |= {id(t): like(t, t.detach(), {}) for t in model.parameters()}
    shell = copy_to_run(model, memo)
    trace_patched(shell)
    shell = of_class(shell, placed_class(type(shell)))
    attach(shell, ModuleState([], start=placer))
    return shell
