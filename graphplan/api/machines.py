"""``machines=``: what ``plan`` and ``partition`` do for several machines, a process of torchrun on each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import fx, nn

from graphplan._compat.torch import group_of
from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.analysis.plan import Plan
from graphplan.api.arguments import read_example, read_model
from graphplan.api.placer import Placer, Recipe
from graphplan.capture.captured_graph import Capture
from graphplan.capture.dynamic_sizes import sizes_of_call
from graphplan.capture.microbatches import batch_of, microbatches_of
from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.partial_model import StageModule
from graphplan.capture.signature import BoundCall
from graphplan.compiler.cluster_planning import Cluster, plan_cluster, whole_compiler
from graphplan.compiler.formulation import Options
from graphplan.compiler.pipeline import Compiler
from graphplan.compiler.stage_compiler import StageSource, stage_source, with_buffers
from graphplan.devices.max_memory import MaxMemory, Reserve, read_max_memory, require_present
from graphplan.devices.speeds import Measurements, Speed, with_speeds
from graphplan.devices.topology import DeviceKey, Link, Topology
from graphplan.errors import CaptureError, InfeasibleError, InputError, PlanError
from graphplan.integrations.transformers.cluster_generate import generator_of
from graphplan.ir.cluster_plan_data import MachineStage, Objective, PipelineSchedule
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.tensor_meta import TensorMeta, describe
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_capture import results_of
from graphplan.passes.pipeline.estimates import Flight
from graphplan.passes.pipeline.stage_positions import stage_positions
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint, read_checkpoint
from graphplan.runtime.distributed.agreement import broadcast_text, on_all, require_group, require_same
from graphplan.runtime.distributed.cluster_module import ClusterCall, ClusterModule, Form
from graphplan.runtime.distributed.sent_weights import ranks_without_data, send_weights
from graphplan.runtime.distributed.stage_runner import StageProgram, StageRunner, Wire, make_ready
from graphplan.runtime.module.result_structure import given_layouts, rebuilder

NETWORK = Link(1.25e9, 50e-6)
"""Between machines, where the caller says nothing: 10 Gbit/s and 50 microseconds."""


logger = logging.getLogger("graphplan")

_AHEAD = (1.0, 0.25)  # as for a model on one machine: see Compiler.plan
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

    def cluster(self, *, grad: bool = False) -> Cluster:
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
        flight = Flight(count, self.schedule, grad)
        return Cluster(machines, self.network or NETWORK, flight, self.objective)


def refuse_with_machines(**given: object) -> None:
    """Raise InputError for an argument that several machines do not take."""
    for name, value in given.items():
        if value is not None and value is not False and value != ():
            raise InputError(f"machines= does not go with {name}=: leave one of them out")


def plan_machines(
    model: Any, machines: Machines, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Options
) -> ClusterPlan:
    """As :func:`graphplan.plan` with ``machines=``."""
    cluster = machines.cluster(grad=options.grad)
    asked = _asked(model, cluster, args, kwargs, options)
    return plan_cluster(asked.model_copy, asked.traced(), asked.batch, cluster, options)


@dataclass(slots=True)
class _Asked:
    """A model and an example of its calls."""

    model: nn.Module
    model_copy: ModelCopy
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
            after, before = _Wires(whole, self.call), _Wires(part, self.micro)
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
    model: Any, cluster: Cluster, args: Sequence[Any], kwargs: Mapping[str, Any] | None, options: Options
) -> _Asked:
    model = read_model(model)
    model_copy = ModelCopy(model)
    call = read_example(model, model_copy, args, kwargs)
    if call is None:
        raise InputError("machines= needs example inputs: give args= or kwargs=")
    microbatches_of(call, cluster.flight.microbatches)  # raises where it cannot be divided
    compiler = whole_compiler(model_copy, cluster, options)
    return _Asked(model, model_copy, compiler, call, cluster.flight.microbatches)


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
        checkpoint: from which each rank reads its own weights.
        strict: whether names that the checkpoint lacks, or the model does not know, are errors.
        everywhere: whether all ranks get results, or the last only.
        plan: to carry out, in place of a search; or the file of one.
    """
    require_group(len(machines.max_memory))
    cluster = on_all("reading machines=", lambda: machines.cluster(grad=options.grad))
    asked = on_all("reading the model", lambda: _asked(model, cluster, args, kwargs, options))
    require_same(_facts(asked, machines, options))
    annotator = on_all("tracing the model", asked.traced)
    require_same({_GRAPH: str(annotator.graph())})
    text = _planned_on_first(asked, annotator, cluster, options, plan)
    source = on_all("reading the checkpoint", lambda: _source(asked, checkpoint, strict=strict))
    found = ClusterPlan.from_json(text)
    builder = _Builder(asked, cluster, options, found, source, everywhere=everywhere)
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
    return plan


@dataclass(slots=True)
class _Builder:
    """Makes what one rank runs, of the first call and of calls of other sizes."""

    asked: _Asked
    cluster: Cluster
    options: Options
    plan: ClusterPlan
    source: Checkpoint | None
    everywhere: bool = field(kw_only=True)
    compiler: Compiler | None = None
    placed: nn.Module | None = None
    order: tuple[str, ...] = ()
    cuts: dict[tuple[int, bool], _Cut] = field(default_factory=dict)
    runners: dict[Any, StageRunner] = field(default_factory=dict)
    traffic: Counter[str] = field(default_factory=Counter)
    group: dist.ProcessGroup | None = None

    def build(self, annotator: Annotator) -> ClusterModule:
        """The module that the rank calls."""
        self.group = group_of(self._ranks)
        rank, stage = dist.get_rank(), self.plan.stage_of(dist.get_rank())
        boundaries = Boundaries(annotator.graph())
        self.order = tuple(boundaries.graph.operations)
        weights, cut = self.asked.model_copy.weights, None
        if stage is not None:
            cut = stage_source(annotator, boundaries, weights, stage.start, stage.end)
        self._fetch_weights(cut)
        if stage is not None and cut is not None:
            topology = with_buffers(self.cluster.machines[rank], stage.buffer_bytes)
            self.placed = on_all("placing the stages", lambda: self._place(stage, cut, topology))
        else:
            on_all("placing the stages", lambda: None)
        signature = self.asked.model_copy.signature
        made = ClusterModule(
            self.plan,
            self.placed,
            signature,
            self.prepare,
            everywhere=self.everywhere,
            traffic=self.traffic,
        )
        made.generate_with(
            generator_of(self.asked.model, made.forward_in_place, self._ranks[-1], self.traffic)
        )
        return made

    @property
    def _ranks(self) -> list[int]:
        return [stage.machine for stage in self.plan.stages]

    def _fetch_weights(self, cut: StageSource | None) -> None:
        """Take from rank 0 what this rank has no data for."""
        if self.source is not None:
            return
        weights = self.asked.model_copy.weights.tensors
        lacking = ranks_without_data(weights)
        wanted = {
            stage.machine: [n for n in stage.plan.graph.weights if n in weights]
            for stage in self.plan.stages
            if stage.machine in lacking
        }
        got = send_weights(weights, wanted)
        if cut is not None and got:
            _fill(cut.module, got)

    def _place(self, stage: MachineStage[Plan], cut: StageSource, topology: Topology) -> nn.Module:
        require_present(topology)
        model_copy = ModelCopy(cut.module)
        cut = replace(
            cut, model_copy=model_copy, annotator=cut.annotator.of(cut.cut.capture, model_copy.weights)
        )
        self.compiler = cut.compiler(topology, self.options, stage.plan)
        placer = Placer(Recipe(topology, self.options, strict=True), self.source, compiler=self.compiler)
        return placer.place(cut.module, model_copy, cut.example("cpu"))

    def prepare(self, micro: BoundCall, form: Form) -> ClusterCall:
        """How calls like this one are run, on all ranks at once: traced anew where sizes are new.

        While text is generated, there is to be room for more of it, if there is.

        Raises:
            InputError: the call takes caches, which only ``generate`` keeps where they are.
        """
        for ahead in _AHEAD if form.caches_stay else ():
            try:
                return self._prepared(micro, form, ahead)
            except InfeasibleError as error:
                logger.info("no room for such sizes: %s", error)
        return self._prepared(micro, form, 0.0)

    def _prepared(self, micro: BoundCall, form: Form, ahead: float) -> ClusterCall:
        stay = form.caches_stay
        annotator = self._annotated(micro, form, ahead)
        capture = annotator.capture
        if capture.caches and not stay:
            raise InputError(f"{', '.join(capture.caches)}: over several machines, generate() keeps caches")
        wires = _Wires(capture, micro)
        key = id(annotator), stay
        if key not in self.cuts:
            self.cuts[key] = on_all(
                "placing a call of other sizes", lambda: self._cut(annotator, wires, stay)
            )
        return ClusterCall(
            self._runner(key, wires, 1 if stay else self.plan.microbatches),
            lambda part: _traced_inputs(capture, part),
            [wires.of(name) for name in results_of(capture, caches_stay=stay)],
            lambda results, call: _rebuild(capture, wires, results, call),
            self._ranks[-1],
        )

    def _annotated(self, micro: BoundCall, form: Form, ahead: float) -> Annotator:
        """The call, traced; only where that is new, ranks tell each other."""

        def trace() -> Annotator:
            return self.asked.annotator(micro, ahead)

        try:
            found = trace()
        except Exception:  # whatever it is, all ranks are to hear of it
            return on_all("tracing the model", trace)
        if (id(found), form.caches_stay) not in self.cuts:
            on_all("tracing the model", lambda: None)
            require_same({"the inputs of this call": repr(form)})
        return found

    def _cut(self, annotator: Annotator, wires: _Wires, stay: bool) -> _Cut:
        """The stages of a call, this rank's placed."""
        rank = dist.get_rank()
        boundaries = Boundaries(annotator.graph(), stay)
        positions = self._positions(boundaries)
        crossing = tuple(name for position in positions[1:-1] for name in boundaries.crossing(position))
        if rank not in self._ranks:
            return _Cut(None, crossing)
        assert self.compiler is not None
        assert self.placed is not None
        index, weights = self._ranks.index(rank), self.asked.model_copy.weights
        cut = stage_source(annotator, boundaries, weights, positions[index], positions[index + 1])
        self.compiler.adopt(cut.annotator)
        try:
            make_ready(self.placed, [wires.example(name) for name in cut.cut.inputs])
        except InfeasibleError:
            self.compiler.drop(cut.annotator)
            raise
        return _Cut(cut, crossing)

    def _positions(self, boundaries: Boundaries) -> list[int]:
        if tuple(boundaries.graph.operations) == self.order:
            return [0, *(stage.end for stage in self.plan.stages)]
        return stage_positions(boundaries, [set(stage.plan.graph.weights) for stage in self.plan.stages])

    def _runner(self, key: tuple[int, bool], wires: _Wires, microbatches: int) -> StageRunner | None:
        """What runs this rank's stage, if it has one: all ranks make another where any tensor's size is new."""
        known = self.cuts[key]
        if known.source is None or self.placed is None:
            return None
        sizes = key, tuple(map(wires.of, known.crossing))
        if sizes not in self.runners:
            cut = known.source.cut
            received, sent = ([wires.of(name) for name in names] for names in (cut.received, cut.sent))
            program = StageProgram(self.placed, cut.inputs, cut.outputs, received, sent, self._ranks)
            self.runners[sizes] = StageRunner(program, microbatches, self.traffic, self.group)
        return self.runners[sizes]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a call is cut.

    Attributes:
        source: this rank's stage; None where it has none.
        crossing: the names of the values at all cuts, the same on all ranks.
    """

    source: StageSource | None
    crossing: tuple[str, ...]


class _Wires:
    """Tensors on the network in a call: their sizes are its own, not those that the plan is for."""

    def __init__(self, capture: Capture, micro: BoundCall) -> None:
        self.capture, self.inputs = capture, _traced_inputs(capture, micro)
        here = sizes_of_call(capture.graph, capture.inputs, list(self.inputs.values()))
        self.sizes = {**capture.sizes, **here}
        self.nodes = {node.name: node for node in capture.graph.nodes}

    def of(self, name: str) -> Wire:
        described = describe(self.nodes[name].meta.get("val"), self.sizes)
        if not isinstance(described, TensorMeta):
            raise CaptureError(
                f"a result is {described!r}, no tensor, which no machine can send: leave it out of what the "
                "model returns (for a transformers model, use_cache=False)"
            )
        return Wire(name, described.shape, described.dtype)

    def given(self, name: str, call: BoundCall) -> Any:
        """An input of a call that is a result too."""
        return _traced_inputs(self.capture, call)[name]

    def absent(self, name: str) -> Any:
        """A value that another rank has: a size as it is, or zeros of a tensor's sizes that take no memory."""
        described = describe(self.nodes[name].meta.get("val"), self.sizes)
        if isinstance(described, int):
            return described
        wire = self.of(name)
        return torch.zeros((), dtype=wire.dtype).expand(wire.shape)

    def example(self, name: str) -> Any:
        """A value that a stage takes: an input, or a tensor of the sizes of what it receives."""
        if name in self.inputs:
            return self.inputs[name]
        return torch.empty(self.of(name).shape, dtype=self.of(name).dtype)


def _traced_inputs(capture: Capture, part: BoundCall) -> dict[str, Any]:
    traced = part if capture.prepare is None else capture.prepare(part)
    return dict(zip(capture.inputs, traced.leaves, strict=True))


def _rebuild(capture: Capture, wires: _Wires, results: Mapping[str, torch.Tensor], call: BoundCall) -> Any:
    """What the model returns, of the values that are here, of constants of the trace, and of zeros."""
    flat = []
    for item in capture.outputs:
        if not isinstance(item, fx.Node):
            flat.append(item)
        elif item.name in results:
            flat.append(results[item.name])
        elif item.name in wires.inputs:
            flat.append(wires.given(item.name, call))
        else:
            flat.append(wires.absent(item.name))
    caches = {name: call.kwargs[name] for name in capture.caches}
    return rebuilder(capture.out_spec, given_layouts(capture.signature.spec, caches))(flat, caches)


def _fill(module: StageModule, got: Mapping[str, torch.Tensor]) -> None:
    """Give the module the data of these weights, under all of their names."""
    of = {
        id(module.get_parameter(name) if _is_parameter(module, name) else module.get_buffer(name)): tensor
        for name, tensor in got.items()
    }
    made: dict[int, Any] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, old in table.items():
                if old is not None and id(old) in of:
                    data = of[id(old)]
                    new = nn.Parameter(data, old.requires_grad) if isinstance(old, nn.Parameter) else data
                    table[name] = made.setdefault(id(old), new)


def _is_parameter(module: nn.Module, name: str) -> bool:
    path, _, own = name.rpartition(".")
    return own in module.get_submodule(path)._parameters
