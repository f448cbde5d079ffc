"""``graphplan.plan``: plan where weights reside and operations run, without moving anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

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
    return_outputs: bool | Literal["all"] = True,
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
    return_outputs: bool | Literal["all"] = True,
    **options: Unpack[PlanKeywords],
) -> Any:
    """Return a plan of where the weights of ``model`` reside and its operations run. Nothing is moved.

    The model may be on the meta device, and the devices need not exist on this machine.

    Args:
        model: any module; it is not changed.
        max_memory: device key -> budget, in bytes or as text such as ``"20GiB"``. Keys are accelerator
            indices, ``"cpu"``, ``"disk"`` or names of torch devices; their order is the order of preference.
            Other arguments may spell a device differently (``0``, ``"cuda:0"``, ``torch.device("cuda")``). A
            budget covers everything on the device: weights, activations, copies. None: the memory that is
            free on this machine.
        args: example inputs by position, on any device, the meta device too. Without examples, the model's
            ``dummy_inputs`` are used, if it has any.
        kwargs: example inputs by name.
        machines: instead of ``max_memory``, a list with one such mapping for each machine. Each machine runs
            a contiguous stage of the model, or several.
        return_outputs: whether results are copied to the device of the first tensor input. With ``machines``,
            ``"all"``: the results are on all ranks, and have room there.
        options: the keyword arguments below; :class:`graphplan.PlanKeywords` has their types.

    Keyword Args:
        dynamic_shapes: as in ``torch.export.export``.
        links: (source key, destination key) -> :class:`graphplan.Link`, instead of the default. A link holds
            in both directions unless the other one is given too. By default, a GPU that is named in
            ``devices``, or is a known one of this machine, has its PCIe or NVLink-C2C bandwidth to CPU
            memory: 12, 25, 55 or 400 GB/s. Other pairs have 25 GB/s, and pairs with the disk 2 GB/s.
            Latencies are 15 microseconds, with the disk 100.
        pin: name of a module, operation, parameter or buffer -> device key or ``torch.device``. A pinned
            module runs on the device, and its weights reside there; a pinned parameter or buffer resides
            there. Of nested names the innermost counts: ``{"": 0, "lm_head": 1}``.
        together: modules, or lists of modules, by name; each item must be on one device as a whole.
        offload: False: only accelerators are used, and it is an error if the model does not fit them.
        cpu_compute: False: the CPU may hold weights, but runs no operations.
        balance: spread the work evenly over the accelerators: minimise the time of the slowest device's
            share instead of the total time.
        reserve: bytes, or text such as ``"1GiB"``, to leave free on every device; or device key -> either.
        devices: device key -> :class:`graphplan.Speed` or the name of a GPU (``"H100"``); or the
            :class:`graphplan.Measurements` of :func:`graphplan.measure_devices`. By default, known GPUs of
            this machine have their datasheet speeds, and other accelerators a common default.
        calls: several example calls, instead of ``args`` and ``kwargs``. Each is a mapping of named inputs, a
            pair ``(args, kwargs)``, or ``("vae.decode", args, kwargs)`` for another method or a submodule.
            One placement of the weights serves all calls, keeps the budgets in each, and minimises the
            weighted sum of their times. The plan of the first is returned; its ``others`` has the other
            plans. Or a function that calls the model, ``lambda m: m.decode(m.encode(x))``: it runs on zeros
            to find the calls, and nothing is computed.
        weights: weight of each of ``calls`` in that sum, 1 by default: ``[1, 200]`` for a prefill that 200
            decode steps follow.
        max_batch: largest batch size (axis 0, beams included) to plan memory for; by default the example's.
            With ``max_batch`` or ``max_length``, the prefill and the decode step of a transformers model's
            ``generate`` are planned after the example too, so that they have room.
        max_length: largest sequence length, cached tokens included, to plan memory for: the size of axis 1 of
            ``(batch, length)`` tokens and of ``(batch, length, features)``.
        time_limit: seconds for the search, after the trace. The best placement found by then is returned,
            with the lower bound proven by then. If none is found by then, the search goes on as for None, and
            ends with the first that fits, or an error. None: a fixed amount of work, whose result does not
            depend on the clock. It takes seconds if identical accelerators hold the model, and up to a
            minute if weights are streamed or memory is tight.
        capture_cache: a folder that stores traces for later processes. A stored trace is used if the code,
            the model's attributes, the shapes of its weights, and the structure and sizes of the inputs are
            the same. A model whose trace cannot be stored is retraced in each process, with a warning.
            Nothing in the folder is unpickled or run, but whoever can write to it can change the results of
            a model. None: every process traces.
        microbatches: with ``machines``, number of microbatches into which a batch is divided along axis 0.
        schedule: with ``machines``, the order of a training step: ``"gpipe"`` runs all microbatches forward
            before one runs backward, ``"1f1b"`` takes less memory and no more time, and with
            ``"interleaved"`` each machine has several stages, so that it waits less. By default ``"1f1b"`` in
            training with at least one microbatch for each machine, otherwise ``"gpipe"``.
        stages_per_machine: number of stages on each machine with ``schedule="interleaved"``, 2 by default.
        objective: with ``machines``, ``"throughput"`` minimises the time of a whole batch, and ``"latency"``
            the time of one microbatch. A warning names machines that make a batch no faster, and are unused.
        network: with ``machines``, the link between any two; 10 Gbit/s and 50 microseconds by default.
        train: plan a training step: forward pass, backward pass and optimizer step, with gradients, saved
            activations and optimizer state within the budgets. It is planned for the modes that the model
            is in (``model.train()``), and for the example's sizes or those up to ``max_batch`` and
            ``max_length``.
        optimizer: class of the optimizer, or a function from parameters to an optimizer, such as
            ``functools.partial(torch.optim.SGD, momentum=0.9)``. A dry step shows the state that it keeps.
            None counts no state.
        optimizer_bytes_per_element: bytes of optimizer state per element of a parameter, instead of a dry
            step.
        train_outputs: names of the results that the backward pass starts from; by default ``"loss"``, or if
            no result has this name, all that have a gradient. An attribute in which ``forward`` stores a
            tensor is a result, too, such as ``"layers.0.moe.loss"``; of these only scalars by default.
        recompute: False: no activation is recomputed in the backward pass.
        offload_activations: False: saved activations stay on the device that computed them.
        accumulate_gradients: False: no parameter has a gradient when a forward pass begins, as after
            ``optimizer.zero_grad()``, so gradients take memory only from the time they are computed. A
            forward pass that begins with a gradient, for evaluation too, is then an error.

    Returns:
        a :class:`graphplan.Plan`; with ``machines``, a :class:`graphplan.ClusterPlan`.

    Raises:
        BudgetError, DeviceError: ``max_memory``, ``reserve``, ``links`` or ``devices`` is invalid.
        InputError: the inputs do not fit the model, there are none, or another argument is invalid.
        PlanError: ``pin`` or ``together`` names something that does not run, or they contradict each other.
        LimitError: an example is larger than ``max_batch`` or ``max_length``.
        CaptureError: the model cannot be traced.
        InfeasibleError: no placement fits; the error names budgets that suffice.
        Exception: what the model itself raises for the example inputs, unchanged.
    """
    plan_options = read_options(plan, options)
    require_flags(return_outputs=return_outputs == "all" or return_outputs)
    if machines is not None:
        refuse_with_machines(plan_options, max_memory=max_memory, return_outputs=not return_outputs)
        results_on_all = return_outputs == "all"
        return plan_machines(model, machines, plan_options, args, kwargs, results_on_all=results_on_all)
    topology = plan_options.topology(max_memory)
    request = read_request(model, topology, plan_options, Options(return_outputs=bool(return_outputs)))
    compiler = Compiler(request.model_copy, topology, request.options)
    if plan_options.calls is not None:
        return compiler.plan_together(read_examples(plan_options, args, kwargs, compiler))[0].plan
    return plan_first(compiler, require_example(request, args, kwargs))[0].plan
