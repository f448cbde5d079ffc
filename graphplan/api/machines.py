"""``machines=``: what ``plan`` and ``partition`` do for several machines, a process of torchrun on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import fx, nn

from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.api.arguments import read_example, read_model
from graphplan.api.rank_builder import RankBuilder
from graphplan.api.training_arguments import TrainingArguments
from graphplan.capture.microbatches import batch_of, microbatches_of
from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.signature import BoundCall
from graphplan.compiler.cluster_call import Wires
from graphplan.compiler.cluster_planning import Cluster, plan_cluster, whole_compiler
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.devices.max_memory import MaxMemory, Reserve, read_max_memory
from graphplan.devices.speeds import Measurements, Speed, with_speeds
from graphplan.devices.topology import DeviceKey, Link
from graphplan.errors import InputError, PlanError
from graphplan.ir.cluster_plan_data import Objective, PipelineSchedule
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.pipeline.estimates import Flight
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint, read_checkpoint
from graphplan.runtime.distributed.agreement import broadcast_text, on_all, require_group, require_same
from graphplan.runtime.distributed.cluster_module import ClusterModule
from graphplan.runtime.distributed.stage_runner import Wire

NETWORK = Link(1.25e9, 50e-6)
"""Between machines, where the caller says nothing: 10 Gbit/s and 50 microseconds."""


_GRAPH = (
    "the traced graph: their code is not the same, or goes through a set, whose order is another in each "
    "process unless all have the same PYTHONHASHSEED"
)


@dataclass(frozen=True, slots=True)
class Machines:
    """What a caller says of several machines.

    Attributes:
        max_memory: of each.
        microbatches: into which a batch is divided.
        schedule: of the microbatches.
        objective: what to minimise.
        network: the link between any two.
        devices: speeds, as in :func:`graphplan.plan`.
        links: likewise, inside each machine.
        reserve: likewise.
    """

    max_memory: Sequence[MaxMemory]
    microbatches: int = 1
    schedule: PipelineSchedule = "gpipe"
    objective: Objective = "latency"
    network: Link | None = None
    devices: Mapping[DeviceKey, Speed] | Measurements | None = None
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] | None = None
    reserve: Reserve = 0

    def cluster(self, *, grad: bool = False, train: bool = False) -> Cluster:
        """The machines as the planner knows them.

        Raises:
            InputError: an argument is not what it should be.
            BudgetError, DeviceError: a ``max_memory`` cannot be read.
        """
        many = isinstance(self.max_memory, Sequence) and not isinstance(self.max_memory, str)
        if not many or not self.max_memory or not all(isinstance(one, Mapping) for one in self.max_memory):
            raise InputError("machines must list one max_memory for each rank: [{0: '20GiB'}, {0: '80GiB'}]")
        count = self.microbatches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"microbatches must be a positive integer, not {count!r}")
        for what, value, known in (
            ("schedule", self.schedule, get_args(PipelineSchedule)),
            ("objective", self.objective, get_args(Objective)),
        ):
            if value not in known:
                raise InputError(f"{what} must be one of {', '.join(map(repr, known))}, not {value!r}")
        if self.network is not None and not isinstance(self.network, Link):
            raise InputError(f"network must be a graphplan.Link, not {self.network!r}")
        machines = tuple(
            with_speeds(read_max_memory(one, self.links, self.reserve), self.devices)
            for one in self.max_memory
        )
        flight = Flight(count, self.schedule, grad or train, train)
        return Cluster(machines, self.network or NETWORK, flight, self.objective)


def refuse_with_machines(**given: object) -> None:
    """Raise InputError for an argument that several machines do not take."""
    for name, value in given.items():
        if value is not None and value is not False and value != ():
            raise InputError(f"machines= does not go with {name}=: leave one of them out")


def plan_machines(
    model: Any,
    machines: Machines,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    trains: TrainingArguments,
) -> ClusterPlan:
    """As :func:`graphplan.plan` with ``machines=``."""
    cluster = machines.cluster(grad=options.grad, train=trains.train)
    asked = _asked(model, cluster, args, kwargs, options, trains)
    return plan_cluster(asked.model_copy, asked.traced(), asked.batch, cluster, asked.options)


@dataclass(slots=True)
class _Asked:
    """A model and an example of its calls; ``options`` are the caller's."""

    model: nn.Module
    model_copy: ModelCopy
    options: Options
    compiler: Compiler
    call: BoundCall
    microbatches: int

    @property
    def micro(self) -> BoundCall:
        """The first of its microbatches."""
        return microbatches_of(self.call, self.microbatches)[0]

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 where it is not divided."""
        return batch_of(self.call) if self.microbatches > 1 else 0

    def traced(self) -> Annotator:
        """The example's microbatch, traced.

        Raises:
            InputError: results of microbatches are not those of the batch in parts.
        """
        found = self.annotator(self.micro)
        if self.microbatches > 1:
            whole, part = self.compiler.trace(self.call), found.capture
            after, before = Wires(whole, self.call), Wires(part, self.micro)
            for large, small in zip(whole.outputs, part.outputs, strict=True):
                if isinstance(large, fx.Node) and isinstance(small, fx.Node):
                    _require_part(after.of(large.name), before.of(small.name), self.microbatches)
        return found

    def annotator(self, micro: BoundCall, ahead: float = 0.0) -> Annotator:
        """The whole model's call of one microbatch, traced; ``ahead`` as for captures."""
        found = self.compiler.annotated(micro, ahead)
        if found.capture.method == "symbolic_trace":
            raise InputError("machines= needs example inputs: without them nobody knows what crosses a cut")
        return found


def _asked(
    model: Any,
    cluster: Cluster,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    trains: TrainingArguments,
) -> _Asked:
    model = read_model(model)
    model_copy = ModelCopy(model)
    sizes = options.size_limits
    unsupported = {"grad": options.grad, "max_batch": sizes.max_batch, "max_length": sizes.max_length}
    options = replace(options, training=trains.read(model_copy, unsupported))
    call = read_example(model, model_copy, args, kwargs)
    if call is None:
        raise InputError("machines= needs example inputs: give args= or kwargs=")
    microbatches_of(call, cluster.flight.microbatches)  # raises where it cannot be divided
    compiler = whole_compiler(model_copy, cluster, options)
    return _Asked(model, model_copy, options, compiler, call, cluster.flight.microbatches)


def _require_part(whole: Wire, part: Wire, count: int) -> None:
    joined = (part.shape[0] * count, *part.shape[1:]) if part.shape else ()
    if not part.shape or whole.shape != joined:
        raise InputError(
            f"a result has the sizes {list(whole.shape)} for the batch and {list(part.shape)} for each of "
            f"{count} microbatches, which cannot be joined along the first dimension to be the same: use "
            "microbatches=1"
        )


# -- under torchrun ----------------------------------------------------------------------------------------


def partition_machines(
    model: Any,
    machines: Machines,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Options,
    trains: TrainingArguments,
    *,
    checkpoint: str | Path | Checkpoint | None,
    strict: bool,
    everywhere: bool,
    plan: object = None,
) -> ClusterModule:
    """As :func:`graphplan.partition` with ``machines=``: every rank calls it, alike.

    Args:
        model: with data on every rank, or on rank 0; or on the meta device with ``checkpoint``.
        machines: of all ranks.
        args: example inputs by position.
        kwargs: example inputs by name.
        options: of the caller.
        trains: what is to be trained, and how.
        checkpoint: from which each rank reads its own weights.
        strict: whether names that the checkpoint lacks, or the model does not know, are errors.
        everywhere: whether all ranks get results, or the last only.
        plan: to carry out, in place of a search; or the file of one.
    """
    require_group(len(machines.max_memory))
    cluster = on_all("reading machines=", lambda: machines.cluster(grad=options.grad, train=trains.train))
    asked = on_all("reading the model", lambda: _asked(model, cluster, args, kwargs, options, trains))
    options = asked.options
    require_same(_facts(asked, machines, options))
    annotator = on_all("tracing the model", asked.traced)
    require_same({_GRAPH: str(annotator.graph())})
    text = _planned_on_first(asked, annotator, cluster, options, plan)
    source = on_all("reading the checkpoint", lambda: _source(asked, checkpoint, strict=strict))
    found = ClusterPlan.from_json(text)
    builder = RankBuilder(
        asked.model,
        asked.model_copy,
        asked.annotator,
        cluster,
        options,
        found,
        source,
        everywhere=everywhere,
    )
    return builder.build(annotator)


def _facts(asked: _Asked, machines: Machines, options: Options) -> dict[str, str]:
    weights = asked.model_copy.weights
    return {
        "versions": f"torch {torch.__version__}, graphplan {version('graphplan')}",
        "machines=, or another argument": f"{machines!r} {options!r}",
        "the weights' names and sizes": "\n".join(
            f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in weights.tensors.items()
        ),
    }


def _source(asked: _Asked, checkpoint: str | Path | Checkpoint | None, *, strict: bool) -> Checkpoint | None:
    if checkpoint is None or isinstance(checkpoint, Checkpoint):
        return checkpoint
    return read_checkpoint(asked.model, asked.model_copy.weights, checkpoint, strict=strict)


def _planned_on_first(
    asked: _Asked, annotator: Annotator, cluster: Cluster, options: Options, plan: object
) -> str:
    """The plan's text, made on rank 0 and known to all."""

    def make() -> str:
        if dist.get_rank():
            return ""
        given = _read_given(plan, cluster)
        found = given or plan_cluster(asked.model_copy, annotator, asked.batch, cluster, options)
        return found.to_json()

    return broadcast_text(on_all("planning", make), "the plan")


def _read_given(plan: object, cluster: Cluster) -> ClusterPlan | None:
    """The caller's plan, if any, as far as it is for as many machines and microbatches."""
    if plan is None:
        return None
    if isinstance(plan, str | Path):
        try:
            plan = ClusterPlan.from_json(Path(plan).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"the plan {str(plan)!r} cannot be read: {error}") from error
    if not isinstance(plan, ClusterPlan):
        raise InputError(f"with machines=, plan must be a graphplan.ClusterPlan or its file, not {plan!r}")
    for what, planned, now in (
        ("machines", plan.machines, len(cluster.machines)),
        ("microbatches", plan.microbatches, cluster.flight.microbatches),
    ):
        if planned != now:
            raise PlanError(f"the plan is for {planned} {what}, not for {now}")
    if cluster.flight.train and plan.schedule != cluster.flight.schedule:
        raise PlanError(f"the plan is for schedule={plan.schedule!r}, not for {cluster.flight.schedule!r}")
    return plan
