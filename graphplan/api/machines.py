"""``plan`` and ``partition`` with ``machines=``: several machines, each with one torchrun process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import fx

from graphplan._compat.torch import require_backward_stages
from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.api.arguments import Request, read_given_plan, read_request, read_source, require_example
from graphplan.api.plan_options import PlanOptions
from graphplan.api.rank_builder import RankBuilder
from graphplan.capture.captured_graph import Capture
from graphplan.capture.signature import BoundCall, leaf_names
from graphplan.capture.sizes.dynamic_axes import BATCH
from graphplan.capture.sizes.microbatches import batch_of, divided_in, microbatches_of
from graphplan.capture.value_branches import require_same_branches
from graphplan.compiler.cluster.cluster_call import Wires
from graphplan.compiler.cluster.cluster_planning import Cluster, StageSearch, whole_compiler
from graphplan.compiler.cluster.interleaved_planning import InterleavedSearch
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.max_memory import MaxMemory
from graphplan.devices.topology import Link
from graphplan.errors import BudgetError, DeviceError, InputError, PlanError
from graphplan.ir.cluster.cluster_plan_data import Objective
from graphplan.ir.cluster.flight import Flight
from graphplan.ir.cluster.pipeline_order import PipelineSchedule, rounds_divide
from graphplan.passes.frontend.annotate import Annotator
from graphplan.report.cluster.cluster_text import network_text
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.distributed.agreement import (
    Made,
    broadcast_text,
    on_all,
    require_group,
    require_same,
)
from graphplan.runtime.distributed.cluster_module import ClusterModule
from graphplan.runtime.distributed.stage_runner import Wire
from graphplan.version import __version__
from graphplan.warnings import warn

NETWORK = Link(1.25e9, 50e-6)
"""Default link between machines: 10 Gbit/s and 50 microseconds."""


_GRAPH = (
    "the traced graph: their code or configuration differs, or the code iterates over a set, whose order "
    "differs between processes unless all have the same PYTHONHASHSEED"
)


def read_cluster(
    machines: Sequence[MaxMemory],
    plan_options: PlanOptions,
    *,
    grad: bool = False,
    results_on_all: bool = False,
) -> Cluster:
    """Return the machines, each given as a ``max_memory``, with the options of the pipeline.

    Raises:
        InputError: an argument is invalid.
        BudgetError, DeviceError: a ``max_memory`` cannot be read.
    """
    _require_list(machines)
    count = plan_options.microbatches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"microbatches must be a positive integer, not {count!r}")
    for what, value, choices in (
        ("schedule", plan_options.schedule, (None, *get_args(PipelineSchedule))),
        ("objective", plan_options.objective, get_args(Objective)),
    ):
        if value not in choices:
            raise InputError(f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    if plan_options.network is not None and not isinstance(plan_options.network, Link):
        raise InputError(f"network must be a graphplan.Link, not {plan_options.network!r}")
    grad = grad or plan_options.train
    one_forward_one_backward = grad and count >= len(machines)
    schedule = plan_options.schedule or ("1f1b" if one_forward_one_backward else "gpipe")
    stages, topologies = _stages_per_machine(schedule, plan_options, len(machines)), []
    for index, max_memory in enumerate(machines):
        try:
            topologies.append(plan_options.topology(max_memory, grad=grad))
        except (BudgetError, DeviceError) as error:
            raise type(error)(f"machines[{index}]: {error}") from error
    flight = Flight(
        count,
        schedule,
        grad=grad,
        train=plan_options.train,
        machines=len(machines),
        stages_per_machine=stages,
        results_on_all=results_on_all,
    )
    return Cluster(tuple(topologies), plan_options.network or NETWORK, flight, plan_options.objective)


def _require_list(machines: Any) -> None:
    is_list = isinstance(machines, Sequence) and not isinstance(machines, str)
    if not is_list or not machines or not all(isinstance(item, Mapping) for item in machines):
        raise InputError("machines must list one max_memory for each rank: [{0: '20GiB'}, {0: '80GiB'}]")


def _stages_per_machine(schedule: PipelineSchedule, plan_options: PlanOptions, machines: int) -> int:
    """Return the most stages that a machine may have; raise InputError if options contradict each other."""
    stages, count = plan_options.stages_per_machine, plan_options.microbatches
    if schedule != "interleaved":
        if stages is not None and stages != 1:
            raise InputError(
                f"stages_per_machine={stages!r} is for schedule='interleaved': with {schedule!r} each "
                "machine has one stage"
            )
        return 1
    stages = 2 if stages is None else stages
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 2:
        raise InputError(
            f"stages_per_machine must be an integer, 2 or more, for schedule='interleaved', not {stages!r}"
        )
    if machines < 2:
        raise InputError("schedule='interleaved' is for two machines or more: use schedule='1f1b'")
    if plan_options.objective != "throughput":
        raise InputError("schedule='interleaved' makes a batch faster: give objective='throughput'")
    if not rounds_divide(machines, count):
        lower, higher = (
            next(other for other in itertools.count(count, step) if rounds_divide(machines, other))
            for step in (-1, 1)
        )
        raise InputError(
            f"schedule='interleaved' needs whole rounds of microbatches, of {machines} or a few more each, "
            f"and {count} do not divide into them: give microbatches={lower} or {higher}"
        )
    return stages


def plan_machines(
    model: Any,
    machines: Sequence[MaxMemory],
    plan_options: PlanOptions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    grad: bool = False,
    results_on_all: bool = False,
) -> ClusterPlan:
    """Return the plan of :func:`graphplan.plan` with ``machines=``."""
    cluster = read_cluster(machines, plan_options, grad=grad, results_on_all=results_on_all)
    example = _bind_call(model, cluster, plan_options, args, kwargs, grad=grad)
    return example.plan(example.traced())


@dataclass(frozen=True, slots=True)
class _Example:
    """A model, and an example call over several machines."""

    request: Request
    cluster: Cluster
    compiler: Compiler
    call: BoundCall

    @property
    def micro(self) -> BoundCall:
        """The first microbatch of the call."""
        return microbatches_of(self.call, self.microbatches)[0]

    @property
    def microbatches(self) -> int:
        """Number of microbatches into which the call is divided."""
        return self.cluster.flight.microbatches

    def plan(self, annotator: Annotator) -> ClusterPlan:
        """Return the plan of the call, of which ``annotator`` has traced a microbatch."""
        rows = batch_of(self.call) if self.microbatches > 1 else 0  # 0: the call is not divided
        interleaved = self.cluster.flight.schedule == "interleaved"
        search = InterleavedSearch if interleaved else StageSearch
        request = self.request
        plan = search(request.model_copy, annotator, self.cluster, request.options, rows).run()
        unused = [str(machine) for machine in range(plan.machines) if machine not in plan.used]
        if unused and plan.objective == "throughput":
            warn(
                f"unused machines: {', '.join(unused)}. No plan that uses them was found to be faster. Leave "
                "them out of machines=, or give larger batches in several microbatches, or network= if it is "
                f"faster than {network_text(plan.network)}"
            )
        return plan

    def traced(self) -> Annotator:
        """Return the traced microbatch.

        Raises:
            InputError: the results of microbatches do not join to those of the batch, an input has as many
                rows as the batch by chance, or code branches differently for different microbatches.
        """
        whole = self.compiler.captures.traced(self.call).capture
        if self.microbatches > 1 and any(whole.roles):
            self._require_batch_axes(whole)
        annotator = self.compiler.captures.annotated(self.micro)
        if self.microbatches > 1:
            divided = annotator.capture
            require_same_branches(divided.signature, microbatches_of(self.call, self.microbatches))
            after, before = Wires(whole, self.call), Wires(divided, self.micro)
            for large, small in zip(whole.outputs, divided.outputs, strict=True):
                if isinstance(large, fx.Node) and isinstance(small, fx.Node):
                    _require_joinable(after.of(large.name), before.of(small.name), self.microbatches)
        return annotator

    def _require_batch_axes(self, whole: Capture) -> None:
        """Raise InputError if some of the inputs to divide vary with the batch, and others do not."""
        rows, leaves = batch_of(self.call), self.call.leaves
        divided = [
            (name, whole.roles[at].get(0) == BATCH and whole.signature.leaves[at].shape[0] is None)
            for at, (name, leaf) in enumerate(zip(leaf_names(self.call), leaves, strict=True))
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows
        ]
        fixed = [name for name, varies in divided if not varies]
        if fixed and len(fixed) < len(divided):
            raise InputError(
                f"{fixed[0]} has {rows} rows, as the batch has, but is not part of the batch, and would be "
                "divided with it: give an example with another number of rows, or microbatches=1"
            )


def _bind_call(
    model: Any,
    cluster: Cluster,
    plan_options: PlanOptions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    grad: bool,
) -> _Example:
    request = read_request(model, None, plan_options, Options(grad=grad))
    call = require_example(request, args, kwargs)
    microbatches_of(call, cluster.flight.microbatches)  # raises InputError if the call cannot be divided
    return _Example(request, cluster, whole_compiler(request.model_copy, cluster, request.options), call)


def _require_joinable(whole: Wire, part: Wire, count: int) -> None:
    joined_shape = (part.shape[0] * count, *part.shape[1:]) if part.shape else ()
    if not part.shape or whole.shape != joined_shape:
        raise InputError(
            f"a result has the sizes {list(whole.shape)} for the batch and {list(part.shape)} for each of "
            f"{count} microbatches, which cannot be joined along the first dimension: use microbatches=1, or "
            "leave out inputs that it needs, such as labels=, and give train_step a loss"
        )


# -- under torchrun ----------------------------------------------------------------------------------------


def read_on_all(machines: Sequence[MaxMemory], what: str, action: Callable[[], Made]) -> Made:
    """Run an action on every rank, before anything else; if it fails on one, raise on all."""
    _require_list(machines)
    require_group(len(machines))
    return on_all(what, action)


def partition_machines(
    model: Any,
    machines: Sequence[MaxMemory],
    plan_options: PlanOptions,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    *,
    grad: bool,
    checkpoint: str | Path | Checkpoint | None,
    strict: bool,
    results_on_all: bool,
    plan: object = None,
) -> ClusterModule:
    """Return the module of :func:`graphplan.partition` with ``machines=``; every rank makes the same call.

    ``results_on_all``: whether all ranks get results, or only the rank of the last stage.
    """

    def read_for_ranks() -> Cluster:
        if plan_options.train:
            require_backward_stages()
        return read_cluster(machines, plan_options, grad=grad, results_on_all=results_on_all)

    cluster = read_on_all(machines, "reading machines=", read_for_ranks)
    example = on_all(
        "reading the model", lambda: _bind_call(model, cluster, plan_options, args, kwargs, grad=grad)
    )
    request = example.request
    weights = request.model_copy.weights.tensors
    require_same(
        {
            "versions": f"torch {torch.__version__}, graphplan {__version__}",
            "machines=": repr(machines),
            **{
                f"{one.name}=": repr(getattr(plan_options, one.name))
                for one in fields(plan_options)
                if one.repr
            },
            "return_outputs=": "all" if results_on_all else "of the last stage",
            "another argument": repr(request.options),
            "the weights' names and sizes": "\n".join(
                f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in weights.items()
            ),
        }
    )
    annotator = on_all("tracing the model", example.traced)
    require_same({_GRAPH: f"{annotator.graph()}\n{annotator.capture.graph}"})  # the latter has the constants

    def plan_on_first() -> str:
        if dist.get_rank():
            return ""
        saved = read_given_plan(plan, ClusterPlan, plan_options)
        if saved is not None:
            _require_planned_for(saved, cluster)
        return (saved or example.plan(annotator)).to_json()

    text = broadcast_text(on_all("planning by rank 0", plan_on_first), "the plan")
    source = on_all("reading the checkpoint", lambda: read_source(request, checkpoint, strict=strict))
    cluster_plan = ClusterPlan.from_json(text)
    builder = RankBuilder(
        request,
        example.compiler.captures,
        cluster,
        plan=cluster_plan,
        source=source,
        divided=divided_in(example.call) if example.microbatches > 1 else {},
    )
    return builder.build(annotator)


def _require_planned_for(plan: ClusterPlan, cluster: Cluster) -> None:
    """Raise PlanError if a plan is for other numbers of machines or microbatches, or another schedule."""
    for what, planned, current in (
        ("machines", plan.machines, len(cluster.machines)),
        ("microbatches", plan.microbatches, cluster.flight.microbatches),
        ("stages on each machine", plan.flight.stages_per_machine, cluster.flight.stages_per_machine),
    ):
        if planned != current:
            raise PlanError(f"the plan is for {planned} {what}, not for {current}")
    if cluster.flight.results_on_all and not plan.results_on_all:
        raise PlanError("the plan has no room for results on all ranks: plan with return_outputs='all'")
    if cluster.flight.train and plan.schedule != cluster.flight.schedule:
        raise PlanError(f"the plan is for schedule={plan.schedule!r}, not for {cluster.flight.schedule!r}")
