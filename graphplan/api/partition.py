"""``graphplan.partition``: plan a model and place it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.api.arguments import (
    budgeted,
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
from graphplan.runtime.weights.storage import as_type_of, require_data
from graphplan.warnings import warn

_WAITS = "{} has no example inputs: the first call will be traced; give args= or kwargs= to place it now"


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
    """Return the model, placed over the devices of ``max_memory`` and ready to run.

    The placed model is an instance of the model's class with the same names and state_dict keys. It has the
    attributes ``.plan``, ``.graph_module`` and ``.code``; if the model itself has these names, they are
    ``.graphplan.plan`` and so on. ``model`` is not changed; weights that stay on the CPU share memory with
    it.

    Args:
        model: any module, on any device; on the meta device with ``checkpoint``.
        max_memory: as in :func:`graphplan.plan`.
        args: as in :func:`graphplan.plan`. Without examples, or if the model does not accept its own
            ``dummy_inputs``, it is placed at its first call, which then raises the errors below.
        kwargs: as in :func:`graphplan.plan`.
        machines: as in :func:`graphplan.plan`. Every torchrun process makes the same call, with as many
            machines as there are ranks, and gets a module that runs its own stages; rank 0 plans for all.
            Weights come from ``checkpoint``, from the model on each rank, or from rank 0 for a rank whose
            model is on the meta device.
        checkpoint: a safetensors file, or a folder of them, to read the weights from.
        strict: None: names that the checkpoint lacks or the model does not know are errors; a model that
            cannot be traced runs module by module, with a warning. True: both are errors. False: neither is.
        return_outputs: False: results stay on the device that computed them. With ``machines``, True: the
            rank of the last stage has the results; ``"all"``: every rank has them.
        grad: whether calls record for autograd. By default they run as under ``torch.no_grad()``, so that no
            activation outlives its last reader and the budgets hold.
        compile: True: compile each stage (a run of operations on one device) with ``torch.compile`` at its
            first call; or a mapping of options of ``torch.compile``. The plan counts memory operation by
            operation, but a compiled stage holds its inputs until it ends, and has buffers of the compiler:
            give a ``reserve``. Simulated devices do not support it.
        check: compare the placed model with eager mode on the example inputs. If a graph's results differ,
            the model runs module by module, as if it could not be traced; with ``strict=True`` that is an
            error.
        plan: a plan, or its JSON file, to carry out without a search. The graph must be the same, and each
            budget at least the planned peak; without ``max_memory``, the plan's budgets hold.
        warm: let each accelerator's allocator reserve the planned bytes of activations now, instead of
            piece by piece in the first call.
        options: all keyword arguments of :func:`graphplan.plan`. Some have a further effect here:

    Keyword Args:
        calls: as in :func:`graphplan.plan`. ``.plans`` and ``.graph_modules`` have one item for each
            structure of calls.
        max_batch: as in :func:`graphplan.plan`. A larger call raises :class:`graphplan.LimitError`. Without
            it, larger calls are planned when they come, as far as the budgets have room.
        time_limit: as in :func:`graphplan.plan`, for each structure of calls.
        capture_cache: as in :func:`graphplan.plan`; later calls of other structures use it too.
        train: as in :func:`graphplan.plan`. The training loop is PyTorch's: ``loss = placed(**batch).loss``,
            ``loss.backward()``, ``optimizer.step()``. Gradients and optimizer state reside where their
            parameters do. Calls under ``torch.no_grad()`` run only the forward pass. With ``machines``, a
            step is ``placed.train_step(loss, target, **batch)``.

    Returns:
        the placed model; with ``machines``, a :class:`graphplan.ClusterModule`.

    Raises:
        ClusterError: with ``machines``, ranks have different arguments, or one does not answer.
        GraphplanError: as in :func:`graphplan.plan`; also DeviceError for a device that this machine lacks,
            and InputError for a model on the meta device without a checkpoint.
        Exception: what the model itself raises for the example inputs, unchanged.
    """
    plan_options = read_options(partition, options)
    require_flags(grad=grad, check=check, warm=warm, strict=strict is not None and strict)
    require_flags(return_outputs=return_outputs == "all" or return_outputs)
    if machines is not None:
        unsupported = {"compile": compile, "check": check, "warm": warm, "return_outputs": not return_outputs}
        refuse_with_machines(plan_options, max_memory=max_memory, **unsupported)
        return partition_machines(
            model,
            machines,
            plan_options,
            args,
            kwargs,
            grad=grad,
            checkpoint=checkpoint,
            strict=strict is not False,
            results_on_all=return_outputs == "all",
            plan=plan,
        )
    saved = read_given_plan(plan, Plan, plan_options)
    if saved is None:
        topology = plan_options.topology(max_memory, grad=grad)
    else:
        topology = budgeted(saved, max_memory, plan_options.reserve, grad=grad)
    require_present(topology)
    preset = Options(grad=grad, return_outputs=bool(return_outputs), compile=read_compile(compile, topology))
    request = read_request(model, topology, plan_options, preset, check=check)
    model, model_copy = request.model, request.model_copy
    _warn_of_shared(model_copy.shared)
    if checkpoint is None:
        require_data(model, model_copy.weights)
    placer = Placer(
        topology,
        request.options,
        strict=strict is True,
        source=read_source(request, checkpoint, strict=strict is not False),
        check=check,
        warm=warm,
        plan=saved,
    )
    if plan_options.calls is not None:
        return placer.place_together(model, model_copy, partial(read_examples, plan_options, args, kwargs))
    call = read_example(request, args, kwargs)
    if call is None:
        warn(_WAITS.format(type(model).__name__))
        return _place_at_first_call(model, placer)
    try:
        return placer.place(model, model_copy, call)
    except Exception as error:  # a model may raise anything for its own dummy inputs
        ours = isinstance(error, GraphplanError)
        if args or kwargs or (ours and not isinstance(error, CaptureError | InputError)):
            raise
        reason = error if ours else first_line(error)
        warn(f"{reason} (the first call will be traced instead)")
    return _place_at_first_call(model, placer)


def _warn_of_shared(shared: Mapping[str, Any]) -> None:
    """Warn of attributes that a placed model shares with the original, once for each class."""
    names_of: dict[str, list[str]] = {}
    for name, value in shared.items():
        names_of.setdefault(type(value).__name__, []).append(name)
    for kind, (first, *others) in names_of.items():
        more = f" and {len(others)} more" if others else ""
        warn(f"{first!r}{more} ({kind}) cannot be copied: the placed model shares this with the original")


def _place_at_first_call(model: nn.Module, placer: Placer) -> nn.Module:
    """Return a copy that places itself at its first call; its parameters are new, over the same memory."""
    own = {id(t): as_type_of(t, t.detach(), {}) for t in model.parameters()}
    shell = copy_to_run(model, {id(t): t for t in model.buffers()} | own)
    trace_patched(shell)
    shell = of_class(shell, placed_class(type(shell)))
    attach(shell, ModuleState([], start=placer))
    return shell
