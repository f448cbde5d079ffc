"""Contiguous pieces that the evaluator finds to fit: split again, with less room, while they do not."""

from __future__ import annotations

from graphplan.device import DeviceKey
from graphplan.passes.chain import Chain
from graphplan.passes.contiguous import Piece, split
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import reside
from graphplan.passes.spread import fetch_excess

__all__ = ["contiguous_split"]

_REPAIRS = 4  # times that a split is made again with less room, when the evaluator finds it too large


def contiguous_split(
    problem: Problem,
    chain: Chain,
    *,
    use_cpu: bool,
    fetch: bool,
    part_groups: bool = False,
    balance: bool = False,
    limit: int = 400,
) -> Evaluation | None:
    """Contiguous pieces, made again with less room while the evaluator finds them too large.

    Args:
        problem: what is placed.
        chain: its graph in order.
        use_cpu: whether the CPU may have a piece.
        fetch: whether accelerators may stream what they do not hold.
        part_groups: whether a cut may part a group; all of it goes where most of its weights are.
        balance: whether pieces are to take about as long as each other.
        limit: most positions at which to consider a cut.

    Returns:
        the last of these, within the budgets or not; None where there are no pieces.
    """
    shrink: dict[DeviceKey, int] = {}
    found: Evaluation | None = None
    for _ in range(_REPAIRS):
        pieces = split(
            chain,
            problem,
            use_cpu=use_cpu,
            fetch=fetch,
            part_groups=part_groups,
            balance=balance,
            limit=limit,
            shrink=shrink,
        )
        if pieces is None:
            return found
        operations = problem.obey(_operations_of(chain, pieces))
        found = evaluate(problem, reside(problem, operations))
        if found.excess and fetch:
            fetched = fetch_excess(problem, operations)
            found = fetched if fetched is not None else found
        if found.feasible:
            return found
        for key, excess in found.excess.items():
            shrink[key] = shrink.get(key, 0) + excess
    return found


def _operations_of(chain: Chain, pieces: list[Piece]) -> dict[str, DeviceKey]:
    """Each operation's device; a group that must stay together goes where most of its weights are."""
    devices = {
        operation.name: piece.device
        for piece in pieces
        for operation in chain.operations[piece.start : piece.end]
    }
    for group in chain.graph.together:
        pull: dict[DeviceKey, int] = {}
        for name in sorted(group, key=chain.index.__getitem__):
            inputs = chain.graph.operations[name].inputs
            weights = (chain.graph.weights[n].nbytes for n in inputs if n in chain.graph.weights)
            pull[devices[name]] = pull.get(devices[name], 0) + sum(weights)
        devices.update(dict.fromkeys(group, max(pull, key=pull.__getitem__)))
    return devices
