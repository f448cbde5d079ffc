"""``graphplan.plan``: decide where everything in a model goes, and move nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack, overload

from torch import nn

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.api.arguments import read_examples, read_request, require_example
from graphplan.api.machines import plan_machines
from graphplan.api.plan_options import (
    PlanKeywords,
    read_options,
    refuse_with_machines,
    require_flags,
    shows_options,
)
from graphplan.capture.thread_patches import outside_inference_mode
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.compiler.progress import with_progress
from graphplan.devices.max_memory import MaxMemory
from graphplan.integrations.transformers.generate_plan import plan_first


@overload
def plan(
    model: nn.Module,
    max_memory: None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machines: Sequence[MaxMemory],
    **options: Unpack[PlanKeywords],
) -> ClusterPlan: ...
@overload
def plan(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machines: None = None,
    return_outputs: bool = True,
    **options: Unpack[PlanKeywords],
) -> Plan: ...
@shows_options
@with_progress
@outside_inference_mode
def plan(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machines: Sequence[MaxMemory] | None = None,
    return_outputs: bool = True,
    **options: Unpack[PlanKeywords],
) -> Any:
    """Decide where everything in ``model`` goes, and move nothing.

    The model may be on the meta device, and the devices need not exist here.

    Args:
        model: any module; it is not changed.
        max_memory: device key -> bytes or text such as ``"20GiB"``. Keys are accelerator indices,
            ``"cpu"``, or device names; their order is the order of preference. Other arguments may name the
            devices in other ways (``0``, ``"cuda:0"``, ``torch.device("cuda")``). A budget covers
            everything on the device: weights, activations, copies. None: what is free here.
        args: example inputs by position, on any device, meta too. Without examples the model's
            ``dummy_inputs`` serve, if it has any.
        kwargs: example inputs by name.
        machines: in place of ``max_memory``, one for each of several machines, of which each runs a
            contiguous stage of the model.
        return_outputs: whether results go back to the device of the first tensor input.
        options: the keyword arguments below; :class:`graphplan.PlanKeywords` has their types.

    Keyword Args:
        dynamic_shapes: as in ``torch.export.export``.
        links: (source key, destination key) -> :class:`graphplan.Link`, in place of the default. It holds
            in both directions unless the other is given too. By default a card that is named in ``devices``,
            or is here and known, has what its PCIe or NVLink-C2C reaches to CPU memory: 12, 25, 55 or 400
            GB/s. Other pairs have 25 GB/s, those with the disk 2 GB/s. Latencies are 15 microseconds, of
            the disk 100.
        pin: module, operation, parameter or buffer -> device key, or the device as torch names it. A
            module runs there, and its weights live there; a parameter or buffer lives there. Of names
            within each other the innermost counts: ``{"": 0, "lm_head": 1}``.
        together: modules, or lists of them, that must not be split over devices.
        offload: False for accelerators only: what does not fit them is an error.
        cpu_compute: False where the CPU may keep weights, but not compute.
        balance: spread the work evenly over the accelerators instead of moving the fewest bytes.
        reserve: bytes, or text such as ``"1GiB"``, to leave free on every device; or device key -> either.
        devices: device key -> :class:`graphplan.Speed` or the name of a card (``"H100"``), or what
            :func:`graphplan.measure_devices` found.
            Without, known GPUs count at their datasheet values and others at a common one.
        calls: several example calls, in place of ``args`` and ``kwargs``: each a mapping of named
            inputs, a pair ``(args, kwargs)``, or ``("vae.decode", args, kwargs)`` for another method or a
            submodule than ``forward``. One placement of the weights serves them all, keeps
            every budget in each, and minimises the weighted sum of their seconds. What is returned is
            the plan of the first; the others' are in its ``others``. Or a function of the model that makes
            the calls, ``lambda m: m.decode(m.encode(x))``: it runs on zeros, and nothing is computed.
        weights: how much each of ``calls`` counts, 1 each by default: ``[1, 200]`` for a prefill
            that 200 decodes follow.
        max_batch: the most samples in a call, beams counted: the size of axis 0. Memory is planned for as
            many; without, for those of the example. With this or ``max_length``, the prefill and the decode
            that ``generate`` of a transformers model makes after the example are planned too, and have room.
        max_length: likewise the most tokens of a sequence, those in its cache counted: the size of axis 1 of
            ``(batch, length)`` tokens and ``(batch, length, features)``.
        time_limit: seconds for the search, after the trace; the best placement by then is taken, with the
            bound that was proven. Where none is found by then, the search goes on with the work of None, and
            ends with the first that fits, or an error. None: some work, which is seconds where equal
            accelerators hold the model and up to a minute where weights are streamed or memory is tight, and
            the same result whatever the clock says.
        capture_cache: a folder in which traces are kept for later processes, which read what they would trace
            alike: where the same code is given a model of the same attributes and weights' shapes, and inputs
            of the same structure and sizes. None: every process traces. A trace that no file can hold is
            made anew, with a warning. Nothing in the folder is unpickled or run; but who can write to it
            can change what a model computes.
        microbatches: with ``machines``, into how many a batch is divided along its first dimension.
        schedule: with ``machines``, ``"gpipe"`` or ``"1f1b"``: what is in memory in a training step; or
            ``"interleaved"``: machines take several stages each in turn, so that they wait less.
        stages_per_machine: of ``"interleaved"``, 2 by default.
        objective: with ``machines``: ``"latency"`` for the least seconds of one microbatch,
            ``"throughput"`` for those of a whole batch.
        network: with ``machines``, the link between any two; 10 Gbit/s and 50 microseconds by default.
        train: plan a training step instead of a forward pass: forward, backward and the optimizer's step,
            with gradients, saved activations and the optimizer's state within the budgets. It is planned in
            the modes that the model is in (``model.train()``), for the sizes of the example, or those up to
            ``max_batch`` and ``max_length``.
        optimizer: class of the optimizer, or a function from parameters to one, such as
            ``functools.partial(torch.optim.SGD, momentum=0.9)``: a dry step shows what it keeps. None counts
            no state.
        optimizer_bytes_per_element: bytes of state for each element of a parameter, instead of a dry step.
        train_outputs: names of the results that backward starts from; by default ``"loss"``, or where no
            result has this name, all that have a gradient.
        recompute: False: nothing of the forward pass is computed again in the backward pass.
        offload_activations: False: what the backward pass reads stays on the device where it was made.
        accumulate_gradients: False: no parameter has a gradient when a forward pass begins, as after
            ``optimizer.zero_grad()``, so that gradients take memory from where they are made on only. A
            forward pass that begins with one, for evaluation too, is then an error.

    Returns:
        a :class:`graphplan.Plan`; with ``machines``, a :class:`graphplan.ClusterPlan`.

    Raises:
        BudgetError, DeviceError: ``max_memory``, ``reserve``, ``links`` or ``devices`` cannot be read.
        InputError: the inputs do not fit the model, or there are none, or another argument is not what it
            should be.
        PlanError: ``pin`` or ``together`` names what does not run, or they contradict each other.
        LimitError: an example is larger than ``max_batch`` or ``max_length``.
        CaptureError: the model cannot be traced.
        InfeasibleError: no placement fits; the smallest budgets that would do are in the error.
        Exception: what the model itself raises for the example inputs, unchanged.
    """
    asked = read_options(plan, options)
    require_flags(return_outputs=return_outputs)
    if machines is not None:
        refuse_with_machines(asked, max_memory=max_memory, return_outputs=not return_outputs)
        return plan_machines(model, machines, asked, args, kwargs)
    topology = asked.topology(max_memory)
    request = read_request(model, topology, asked, Options(return_outputs=return_outputs))
    compiler = Compiler(request.model_copy, topology, request.options)
    if asked.calls is not None:
        return compiler.plan_together(read_examples(asked, args, kwargs, compiler))[0].plan
    return plan_first(compiler, require_example(request, args, kwargs))[0].plan
