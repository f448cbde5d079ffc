"""What one rank runs of a model over several machines, of the first call and of calls of other sizes."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from graphplan._compat.torch import group_of
from graphplan.analysis.cluster_plan import ClusterPlan
from graphplan.api.arguments import Request
from graphplan.api.rank_stage import RankStage
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.capture.signature import BoundCall, TensorLeaf, leaf_names
from graphplan.capture.sizes.microbatches import Divided
from graphplan.compiler.capture_cache import Captures
from graphplan.compiler.cluster.cluster_call import Wires, rebuild_result
from graphplan.compiler.cluster.cluster_planning import Cluster
from graphplan.compiler.cluster.stage_compiler import StageSource, stage_source
from graphplan.compiler.pipeline import AHEAD
from graphplan.compiler.training import trainable, trained_values
from graphplan.errors import InfeasibleError, InputError
from graphplan.integrations.transformers.cluster_generate import generator_of
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.pipeline.boundaries import Boundaries
from graphplan.passes.pipeline.cut_capture import results_of
from graphplan.passes.pipeline.stage_positions import stage_positions
from graphplan.runtime.checkpoint.checkpoint_files import Checkpoint
from graphplan.runtime.distributed.agreement import on_all, require_same, tell_all
from graphplan.runtime.distributed.cluster_module import ClusterCall, ClusterModule, Form, Loss
from graphplan.runtime.distributed.machine_stages import in_stages
from graphplan.runtime.distributed.sent_weights import ranks_without_data, send_weights
from graphplan.runtime.distributed.shared_gradients import SharedGradients
from graphplan.runtime.distributed.stage_runner import StageProgram, StageRunner
from graphplan.runtime.weights.storage import like

logger = logging.getLogger("graphplan")


@dataclass(slots=True)
class RankBuilder:
    """Makes what one rank runs.

    Attributes:
        request: the whole model, whose weights may be on the meta device, and the caller's options.
        captures: of the whole model: they trace one microbatch, for its sizes or larger ones.
        cluster: all machines.
        plan: of all machines.
        source: a checkpoint to read weights from.
        everywhere: whether all ranks get results.
        stages: of this rank, placed, in order.
        order: the operations of the plan's call.
        traces: of the model, and whether caches stay -> name of what stages are cut out of.
        cuts: by the trace of a call, and what :meth:`_key` adds.
        runners: by that and by the sizes of what crosses the network.
        traffic: bytes that this rank has sent, by name of the value.
        group: of the ranks that have stages; None for all.
        dims: name of a tensor of the example -> how many dimensions it has.
        divided: what was divided in the example.
    """

    request: Request
    captures: Captures
    cluster: Cluster
    plan: ClusterPlan
    source: Checkpoint | None
    everywhere: bool = field(kw_only=True)
    divided: Divided = field(kw_only=True)
    stages: Sequence[RankStage] = ()
    order: tuple[str, ...] = ()
    traces: dict[tuple[Annotator, bool], str] = field(default_factory=dict)
    cuts: dict[Hashable, _RankCut] = field(default_factory=dict)
    runners: dict[Any, StageRunner] = field(default_factory=dict)
    traffic: Counter[str] = field(default_factory=Counter)
    group: dist.ProcessGroup | None = None
    dims: dict[str, int] = field(default_factory=dict)

    def build(self, annotator: Annotator) -> ClusterModule:
        """The module that the rank calls."""
        self.group = group_of(self.plan.used)
        asked = annotator.capture.signature
        leaves = zip(asked.names, asked.leaves, strict=True)
        self.dims = {name: len(one.shape) for name, one in leaves if isinstance(one, TensorLeaf)}
        boundaries = Boundaries(annotator.graph())
        self.order = tuple(boundaries.graph.operations)
        weights, rank = self._weights(), dist.get_rank()
        trained = self._trained(annotator) if self.cluster.flight.train else frozenset[str]()
        cuts = {
            index: stage_source(
                annotator, boundaries, weights, stage.start, stage.end, trained, self._trace(annotator)
            )
            for index, stage in enumerate(self.plan.stages)
            if stage.machine == rank
        }
        self.stages = on_all("placing the stages", lambda: self._place(cuts))
        joined = on_all("joining the stages", lambda: in_stages([one.placed for one in self.stages]))
        model, options = self.request.model, self.request.options
        made = ClusterModule(
            self.plan,
            joined,
            self.request.model_copy.signature,
            self.prepare,
            training=model.training,
            everywhere=self.everywhere,
            traffic=self.traffic,
            shared=SharedGradients(self._shared_parameters() if options.differentiates else {}),
            divided=self.divided,
        )
        made.generate_with(generator_of(model, made.forward_in_place, self._ranks[-1], self.traffic))
        return made

    @property
    def _ranks(self) -> list[int]:
        return [stage.machine for stage in self.plan.stages]

    def _shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Parameter that stages of several ranks read -> these ranks."""
        parameters, readers = self.request.model_copy.weights.parameters, dict[str, tuple[int, ...]]()
        for stage in self.plan.stages:
            for name in stage.plan.graph.weights.keys() & parameters:
                readers[name] = tuple(dict.fromkeys((*readers.get(name, ()), stage.machine)))
        return {name: ranks for name, ranks in sorted(readers.items()) if len(ranks) > 1}

    def _weights(self) -> ModelWeights:
        """The model's, with the data from rank 0 of what this rank's stage reads and has no data for."""
        weights = self.request.model_copy.weights
        if self.source is not None:
            return weights
        lacking = ranks_without_data(weights.tensors)
        wanted = {}
        for rank in lacking:
            read = (name for stage in self.plan.stages_of(rank) for name in stage.plan.graph.weights)
            wanted[rank] = [name for name in dict.fromkeys(read) if name in weights.tensors]
        found = copy.copy(weights)
        found.tensors = dict(weights.tensors)
        for name, data in send_weights(weights.tensors, wanted).items():
            found.tensors[name] = like(weights.tensors[name], data, {})
        return found

    def _place(self, cuts: Mapping[int, StageSource]) -> list[RankStage]:
        machine, options = self.cluster.machines[dist.get_rank()], self.request.options
        last = len(self.plan.stages) - 1
        return [
            RankStage.place(
                index, self.plan.stages[index], cut, machine, options, self.source, after=last - index
            )
            for index, cut in cuts.items()
        ]

    def prepare(self, micro: BoundCall, form: Form) -> ClusterCall:
        """How calls like this one are run, on all ranks at once: traced anew where sizes are new.

        While text is generated, there is to be room for more of it, if there is.

        Raises:
            InputError: the call takes caches, which only ``generate`` keeps where they are; or a tensor that
                is divided has other dimensions than the example's, so that its first may be no batch.
        """
        if self.plan.microbatches > 1 and not form.caches_stay:
            self._require_batches(micro)
        for ahead in AHEAD if form.caches_stay else ():
            try:
                return self._prepared(micro, form, ahead)
            except InfeasibleError as error:
                logger.info("no room for such sizes: %s", error)
        return self._prepared(micro, form, 0.0)

    def _require_batches(self, micro: BoundCall) -> None:
        for name, leaf in zip(leaf_names(micro), micro.leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.dim() != self.dims.get(name, leaf.dim()):
                raise InputError(
                    f"{name} has {leaf.dim()} dimensions, the example's has {self.dims[name]}: batches are "
                    "divided into microbatches along the first, which may be another here. Give an example "
                    "of such a call, or microbatches=1"
                )

    def _prepared(self, micro: BoundCall, form: Form, ahead: float) -> ClusterCall:
        stay = form.caches_stay
        annotator = self._annotated(micro, form, ahead)
        capture, key = annotator.capture, self._key(annotator, form)
        if capture.given and not stay:
            raise InputError(
                f"{', '.join(capture.given)}: over several machines no argument is changed; generate() keeps "
                "caches"
            )
        wires = Wires(capture, micro, self._trained(annotator))
        if key not in self.cuts:
            self.cuts[key] = on_all(
                "placing a call of other sizes", lambda: self._cut(annotator, wires, form)
            )
        return ClusterCall(
            self._runner(key, wires, 1 if stay else self.plan.microbatches),
            capture.inputs_in,
            [wires.of(name) for name in results_of(capture, caches_stay=stay)],
            lambda results, call: rebuild_result(capture, wires, results, call),
            self._ranks[-1],
            lambda loss: self._trainer(
                key, wires, lambda made: rebuild_result(capture, wires, made, micro), loss
            ),
            capture.signature,
        )

    def _annotated(self, micro: BoundCall, form: Form, ahead: float) -> Annotator:
        """The call, traced; only where that is new, ranks tell each other."""
        try:
            found = self.captures.annotated(micro, ahead=ahead)
        except Exception as error:  # whatever it is, all ranks are to hear of it
            tell_all("tracing the model", error)
            raise
        if self._key(found, form) not in self.cuts:
            tell_all("tracing the model", None)
            require_same({"the inputs of this call": repr(form)})
        return found

    def _key(self, annotator: Annotator, form: Form) -> Hashable:
        """What a call is cut by: a training step has sizes of its own, a forward pass serves several."""
        planned = form.trains and self.cluster.flight.train
        return id(annotator), form.caches_stay, form.call if planned else None

    def _trace(self, annotator: Annotator, caches_stay: bool = False) -> str:
        """Which trace of the model this is."""
        return self.traces.setdefault((annotator, caches_stay), f"trace_{len(self.traces)}")

    def _trained(self, annotator: Annotator) -> frozenset[str]:
        """Values of which gradients are sent back in a training step."""
        if not self.request.options.differentiates:
            return frozenset()
        return trained_values(annotator.capture, trainable(self.request.model_copy.weights))

    def _cut(self, annotator: Annotator, wires: Wires, form: Form) -> _RankCut:
        """Where a call is cut, this rank's stages placed."""
        rank, trains = dist.get_rank(), form.trains and self.cluster.flight.train
        boundaries = Boundaries(annotator.graph(), form.caches_stay)
        positions = self._positions(boundaries)
        crossing = tuple(name for position in positions[1:-1] for name in boundaries.crossing(position))
        weights, flight = self.request.model_copy.weights, self.cluster.flight
        trained = wires.trained if trains else frozenset[str]()
        shared = {name for name, ranks in self._shared_parameters().items() if rank in ranks}
        sources = []
        for own in self.stages:
            span = positions[own.index], positions[own.index + 1]
            cut = stage_source(
                annotator, boundaries, weights, *span, trained, self._trace(annotator, form.caches_stay)
            )
            sources.append(own.serve(cut, wires, flight, shared, trains=trains))
        return _RankCut(tuple(sources), crossing)

    def _positions(self, boundaries: Boundaries) -> list[int]:
        if tuple(boundaries.graph.operations) == self.order:
            return [0, *(stage.end for stage in self.plan.stages)]
        return stage_positions(boundaries, [set(stage.plan.graph.weights) for stage in self.plan.stages])

    def _runner(self, key: Hashable, wires: Wires, microbatches: int) -> StageRunner | None:
        """What runs this rank's stages, if it has any: another on all ranks where any size is new."""
        known = self.cuts[key]
        if not self.stages:
            return None
        sizes = key, tuple(map(wires.of, known.crossing))
        if sizes not in self.runners:
            self.runners[sizes] = self._new_runner(known, wires, microbatches)
        return self.runners[sizes]

    def _new_runner(
        self, known: _RankCut, wires: Wires, microbatches: int, loss: Loss | None = None
    ) -> StageRunner:
        programs, schedule = [], self.plan.schedule
        for own, source in zip(self.stages, known.sources, strict=True):
            cut, trains = source.cut, source.step is not None or self.request.options.training is None
            received, sent = ([wires.of(name) for name in names] for names in (cut.received, cut.sent))
            programs.append(
                StageProgram(
                    own.index,
                    own.placed,
                    cut.trace,
                    cut.inputs,
                    cut.outputs,
                    received,
                    sent,
                    self._ranks,
                    trains,
                )
            )
        return StageRunner(programs, microbatches, self.traffic, self.group, schedule, loss)

    def _trainer(
        self, key: Hashable, wires: Wires, rebuild: Callable[[Mapping[str, Any]], Any], loss: Loss
    ) -> StageRunner | None:
        """What runs this rank's stages forward and backward, if it has any."""
        if not self.stages or not self.request.options.differentiates:
            return None
        known = self.cuts[key]
        names = known.sources[-1].cut.sent

        def loss_of(made: Sequence[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
            return loss(rebuild(dict(zip(names, made, strict=True))), target)

        return self._new_runner(known, wires, self.plan.microbatches, loss_of)


@dataclass(frozen=True, slots=True)
class _RankCut:
    """Where a call is cut.

    Attributes:
        sources: of this rank's stages, in order.
        crossing: the names of the values at all cuts, the same on all ranks.
    """

    sources: tuple[StageSource, ...]
    crossing: tuple[str, ...]
