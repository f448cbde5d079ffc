"""A stage of a training step: forward and backward in one graph, with room for the microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from graphplan.capture.model.modes import Differentiation
from graphplan.compiler.capture_cache import with_backward
from graphplan.compiler.cluster.stage_compiler import StageSource
from graphplan.compiler.formulation import Options
from graphplan.errors import CaptureError


def with_step(source: StageSource, values: Sequence[Any] = ()) -> StageSource:
    """Return the stage with its training step; unchanged if none of its outputs has a gradient.

    The step is for the sizes of ``values``, which are its inputs, or else for those that the plan is for.
    """
    if source.trained.isdisjoint(source.cut.outputs):
        return source
    how = Differentiation(()).of(source.module, ())
    if how is None:
        raise CaptureError(
            "gradients would pass through a stage without trained parameters: only stages before the first "
            "trained parameter may have none"
        )
    call = source.example(values=values)
    step = with_backward(source.cut.capture, source.model_copy.weights, call, how, fixed=True)
    return replace(source, how=how, step=source.annotator.of(step, source.model_copy.weights))


def in_pipeline(options: Options, in_flight: int, shared: Set[str]) -> Options:
    """Return the options of a stage that has so many microbatches in flight.

    ``shared``: parameters that other stages read too.
    """
    if options.training is None:
        return options
    training = replace(options.training, in_flight=in_flight, shared=frozenset(shared))
    return replace(options, training=training)
