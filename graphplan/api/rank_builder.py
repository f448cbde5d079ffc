"""Build the module that one rank runs, for the first call and for calls of other sizes."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch._ops import HigherOrderOperator

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
from graphplan.runtime.distributed.agreement import group_of, on_all, require_same, share_failures
from graphplan.runtime.distributed.cluster_module import (
    MAX_CALLS,
    CallKey,
    ClusterCall,
    ClusterModule,
)
from graphplan.runtime.distributed.machine_stages import join_stages
from graphplan.runtime.distributed.sent_weights import ranks_without_data, send_weights
from graphplan.runtime.distributed.shared_gradients import SharedGradients
from graphplan.runtime.distributed.stage_runner import StageProgram, StageRunner
from graphplan.runtime.weights.storage import as_type_of

logger = logging.getLogger("graphplan")


@dataclass(slots=True)
class RankBuilder:
    """Builds the module of one rank.

    Attributes:
        request: the whole model, whose weights may be on the meta device, and the caller's options.
        captures: traces of one microbatch of the whole model, for its sizes or larger ones.
        cluster: all machines.
        plan: the plan for all machines.
        source: checkpoint to read weights from.
        divided: tensors of the example -> whether they are divided into microbatches.
        stages: this rank's placed stages, in order.
        order: names of the operations of the planned call.
        traces: (trace of the model, whether caches stay) -> its name, as stages know it.
        cuts: key of a call, as :meth:`_key` returns it -> this rank's part of it.
        runners: (that key, sizes of the values that cross the network) -> its runner.
        traffic: name of a value -> bytes that this rank has sent of it.
        group: the ranks that have stages; None for all.
        dims: name of a tensor of the example -> number of its dimensions.
    """

    request: Request
    captures: Captures
    cluster: Cluster
    plan: ClusterPlan
    source: Checkpoint | None
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
        """Return the module that the rank calls."""
        self.group = group_of(self.plan.used)
        signature = annotator.capture.signature
        leaves = zip(signature.names, signature.leaves, strict=True)
        self.dims = {name: len(item.shape) for name, item in leaves if isinstance(item, TensorLeaf)}
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
        joined = on_all("joining the stages", lambda: join_stages([item.placed for item in self.stages]))
        model, options = self.request.model, self.request.options
        module = ClusterModule(
            self.plan,
            joined,
            self.request.model_copy.signature,
            self.prepare,
            training=model.training,
            broadcast_results=self.cluster.flight.results_on_all,
            traffic=self.traffic,
            shared=SharedGradients(self._shared_parameters() if options.differentiates else {}),
            trainable=options.differentiates,
            divided=self.divided,
        )
        module.generate_with(generator_of(model, module.forward_in_place, self._ranks[-1], self.traffic))
        return module

    @property
    def _ranks(self) -> list[int]:
        return [stage.machine for stage in self.plan.stages]

    def _shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Return parameter -> ranks whose stages read it, for parameters that several ranks read."""
        parameters, readers = self.request.model_copy.weights.parameters, dict[str, tuple[int, ...]]()
        for stage in self.plan.stages:
            for name in stage.plan.graph.weights.keys() & parameters:
                readers[name] = tuple(dict.fromkeys((*readers.get(name, ()), stage.machine)))
        return {name: ranks for name, ranks in sorted(readers.items()) if len(ranks) > 1}

    def _weights(self) -> ModelWeights:
        """Return the model's weights; rank 0 sends data that this rank's stages read and the rank lacks."""
        weights = self.request.model_copy.weights
        if self.source is not None:
            return weights
        wanted = {}
        for rank in ranks_without_data(weights.tensors):
            names = (name for stage in self.plan.stages_of(rank) for name in stage.plan.graph.weights)
            wanted[rank] = [name for name in dict.fromkeys(names) if name in weights.tensors]
        with_data = copy.copy(weights)
        with_data.tensors = dict(weights.tensors)
        for name, data in send_weights(weights.tensors, wanted).items():
            with_data.tensors[name] = as_type_of(weights.tensors[name], data, {})
        return with_data

    def _place(self, cuts: Mapping[int, StageSource]) -> list[RankStage]:
        machine, options = self.cluster.machines[dist.get_rank()], self.request.options
        last = len(self.plan.stages) - 1
        return [
            RankStage.place(
                index,
                self.plan.stages[index],
                cut,
                machine,
                options,
                self.source,
                after=last - index,
                shared=self._shared_by(index),
            )
            for index, cut in cuts.items()
        ]

    def _shared_by(self, index: int) -> frozenset[str]:
        """Return the trained parameters of a stage that other stages read too."""
        read = [stage.plan.graph.weights.keys() for stage in self.plan.stages]
        others = set().union(*read[:index], *read[index + 1 :])
        return trainable(self.request.model_copy.weights) & read[index] & others

    def prepare(self, micro: BoundCall, call_key: CallKey) -> ClusterCall:
        """Return how to run calls with this key; all ranks call it at once. New sizes are traced.

        While text is generated, memory is planned for longer text, if there is room.

        Raises:
            InputError: the call changes its arguments, such as caches, which only ``generate`` may; or a
                tensor has another number of dimensions than in the example, so that its first may not be the
                batch.
        """
        if self.plan.microbatches > 1 and not call_key.caches_stay:
            self._require_batches(micro)
        for ahead in AHEAD if call_key.caches_stay else ():
            try:
                return self._cluster_call(micro, call_key, ahead)
            except InfeasibleError as error:
                logger.info("no room for such sizes: %s", error)
        return self._cluster_call(micro, call_key, 0.0)

    def _require_batches(self, micro: BoundCall) -> None:
        for name, leaf in zip(leaf_names(micro), micro.leaves, strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.dim() != self.dims.get(name, leaf.dim()):
                raise InputError(
                    f"{name} has {leaf.dim()} dimensions, but {self.dims[name]} in the example: batches are "
                    "divided into microbatches along the first dimension, which may not be the batch here. "
                    "Give an example of such a call, or microbatches=1"
                )

    def _cluster_call(self, micro: BoundCall, call_key: CallKey, ahead: float) -> ClusterCall:
        caches_stay = call_key.caches_stay
        annotator = self._annotated(micro, call_key, ahead)
        capture, key = annotator.capture, self._key(annotator, call_key)
        if capture.changed_names and not caches_stay:
            raise InputError(
                f"{', '.join(capture.changed_names)}: a model over several machines cannot change its "
                "arguments; for caches use generate()"
            )
        wires = Wires(capture, micro, self._trained(annotator))
        if key not in self.cuts:
            inputs = capture.inputs_in(micro)
            self.cuts[key] = on_all(
                "placing a call of other sizes", lambda: self._cut(annotator, wires, inputs, call_key)
            )
        return ClusterCall(
            self._runner(key, wires, call_key),
            capture.inputs_in,
            [wires.of(name) for name in results_of(capture, caches_stay=caches_stay)],
            rebuild=lambda results, call: rebuild_result(wires, results, call),
            last_rank=self._ranks[-1],
            draws=any(map(_may_draw, capture.graph.nodes)),
            signature=capture.signature,
        )

    def _annotated(self, micro: BoundCall, call_key: CallKey, ahead: float) -> Annotator:
        """Return the traced call; ranks communicate only if it is new."""
        try:
            annotator = self.captures.annotated(micro, ahead=ahead)
        except Exception as error:  # of any kind: all ranks must raise
            share_failures("tracing the model", error)
            raise
        if self._key(annotator, call_key) not in self.cuts:
            share_failures("tracing the model", None)
            require_same({"the inputs of this call": repr(call_key)})
        return annotator

    def _key(self, annotator: Annotator, call_key: CallKey) -> Hashable:
        """Return the key of a call in ``cuts``; only training steps are cut for each size."""
        planned = call_key.trains and self.cluster.flight.train
        return id(annotator), call_key.caches_stay, call_key.inputs if planned else None

    def _trace(self, annotator: Annotator, *, caches_stay: bool = False) -> str:
        """Return the name of a trace of the model."""
        return self.traces.setdefault((annotator, caches_stay), f"trace_{len(self.traces)}")

    def _trained(self, annotator: Annotator) -> frozenset[str]:
        """Return the values whose gradients are sent back in a training step."""
        if not self.request.options.differentiates:
            return frozenset()
        return trained_values(annotator.capture, trainable(self.request.model_copy.weights))

    def _cut(
        self, annotator: Annotator, wires: Wires, inputs: Mapping[str, Any], call_key: CallKey
    ) -> _RankCut:
        """Cut a call into stages, and let this rank's placed stages serve it."""
        trains = call_key.trains and self.cluster.flight.train
        boundaries = Boundaries(annotator.graph(), call_key.caches_stay)
        positions = self._positions(boundaries)
        crossing = tuple(name for position in positions[1:-1] for name in boundaries.crossing(position))
        weights, flight = self.request.model_copy.weights, self.cluster.flight
        trained = wires.trained if trains else frozenset[str]()
        sources = []
        for stage in self.stages:
            span = positions[stage.index], positions[stage.index + 1]
            cut = stage_source(
                annotator,
                boundaries,
                weights,
                *span,
                trained,
                self._trace(annotator, caches_stay=call_key.caches_stay),
            )
            sources.append(stage.serve(cut, wires, inputs, flight, trains=trains))
        return _RankCut(tuple(sources), crossing)

    def _positions(self, boundaries: Boundaries) -> list[int]:
        if tuple(boundaries.graph.operations) == self.order:
            return [0, *(stage.end for stage in self.plan.stages)]
        return stage_positions(boundaries, [set(stage.plan.graph.weights) for stage in self.plan.stages])

    def _runner(self, key: Hashable, wires: Wires, call_key: CallKey) -> StageRunner | None:
        """Return the runner of this rank's stages, or None; new sizes get a new runner on all ranks."""
        cut = self.cuts[key]
        if not self.stages:
            return None
        sizes = key, call_key.trains, tuple(map(wires.of, cut.crossing))
        if sizes not in self.runners:
            if len(self.runners) >= MAX_CALLS:
                self.runners.clear()
            self.runners[sizes] = self._new_runner(cut, wires, call_key)
        return self.runners[sizes]

    def _new_runner(self, rank_cut: _RankCut, wires: Wires, call_key: CallKey) -> StageRunner:
        forward_only = self.request.options.training is None
        programs = [
            StageProgram(
                stage.index,
                stage.placed,
                source.cut.trace,
                inputs=source.cut.inputs,
                outputs=source.cut.outputs,
                received=list(map(wires.of, source.cut.received)),
                sent=list(map(wires.of, source.cut.sent)),
                ranks=self._ranks,
                trains=forward_only or source.step is not None,
            )
            for stage, source in zip(self.stages, rank_cut.sources, strict=True)
        ]
        return StageRunner(
            programs,
            1 if call_key.caches_stay else self.plan.microbatches,
            self.traffic,
            group=self.group,
            schedule=self.plan.schedule,
            trains=call_key.trains,
            caches_stay=call_key.caches_stay,
        )


def _may_draw(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or runs another graph, which may do so."""
    is_graph = isinstance(node.target, HigherOrderOperator)
    return is_graph or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


@dataclass(frozen=True, slots=True)
class _RankCut:
    """This rank's part of a call that is cut into stages.

    Attributes:
        sources: this rank's stages, in order.
        crossing: names of the values at all cuts, the same on all ranks.
    """

    sources: tuple[StageSource, ...]
    crossing: tuple[str, ...]
