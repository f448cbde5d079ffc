"""Cut another trace of a model such that each stage reads the weights that it holds."""

from __future__ import annotations

from collections.abc import Sequence, Set

from graphplan.errors import PlanError
from graphplan.passes.pipeline.boundaries import Boundaries


def stage_positions(boundaries: Boundaries, held: Sequence[Set[str]]) -> list[int]:
    """Return cuts for stages that hold these weights, both ends included; the fewest bytes cross each.

    Args:
        boundaries: boundaries of the graph of the other trace.
        held: names of the weights of each stage, in order.

    Raises:
        PlanError: the operations of this trace read the weights in an order that fits no such stages.
    """
    graph, count = boundaries.graph, len(boundaries.graph.operations)
    owned = graph.weights.keys() & set().union(*held)
    reads = [owned & names for names in boundaries.weights_needed]
    cuts = [0]
    for stage in range(len(held) - 1):
        later = set().union(*held[stage + 1 :])
        latest = next((p for p in range(cuts[-1], count) if reads[p] - held[stage]), count)
        earliest = 1 + max((p for p in range(latest) if reads[p] - later), default=-1)
        valid = [int(p) for p in boundaries.allowed if max(earliest, cuts[-1]) <= p <= latest]
        if not valid:
            raise PlanError(
                f"calls of these sizes read weights in another order than the plan's: no cut after machine "
                f"{stage} leaves each machine the weights that it holds"
            )
        cuts.append(min(valid, key=lambda p: boundaries.crossing_bytes[p]))
    return [*cuts, count]
