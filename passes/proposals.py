"""The first proposals for a placement: everything on one device, and contiguous pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphplan.device import DeviceKey
from graphplan.passes.chain import Chain
from graphplan.passes.contiguous import Piece, split
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import cpu_key, reside
from graphplan.passes.spread import fetch_excess

__all__ = ["contiguous_split", "with_offload", "without_offload"]

_REPAIRS = 4  # times that a split is made again with less room, when the evaluator finds it too large


def without_offload(problem: Problem, chain: Chain) -> Iterator[Evaluation | None]:
    """Everything on one accelerator, and pieces on several."""
    accelerators = [spec for spec in problem.topology.devices if spec.is_accelerator]
    for spec in accelerators:
        if len(accelerators) == 1 or problem.graph.weight_bytes <= spec.room:
            yield _all_on(problem, spec.key)
    if len(accelerators) > 1:
        yield contiguous_split(problem, chain, use_cpu=False, fetch=False)
        keys = {spec.key for spec in accelerators}
        # a pin may make a piece of its own, which no contiguous split has
        if any(not keys <= rule for rule in set(problem.allowed.values())):
            freely = replace(problem, allowed={})
            free = contiguous_split(freely, chain, use_cpu=False, fetch=False)
            if free is not None:
                operations = problem.obey(free.schedule.assignment.operations)
                yield evaluate(problem, reside(problem, operations))
        if problem.graph.together:
            yield contiguous_split(problem, chain, use_cpu=False, fetch=False, part_groups=True)


def with_offload(problem: Problem, chain: Chain) -> Iterator[Evaluation | None]:
    """Pieces with the CPU and with streaming, and everything on one device, as far as each can be made."""
    cpu = cpu_key(problem.topology)
    if cpu is None or not problem.offload:
        return
    yield contiguous_split(problem, chain, use_cpu=True, fetch=True)
    yield contiguous_split(problem, chain, use_cpu=True, fetch=False)
    yield contiguous_split(problem, chain, use_cpu=False, fetch=True)
    if problem.graph.together:
        yield contiguous_split(problem, chain, use_cpu=True, fetch=True, part_groups=True)
    for spec in problem.topology.devices:
        if spec.is_accelerator:
            everywhere = problem.obey(dict.fromkeys(problem.graph.operations, spec.key))
            yield fetch_excess(problem, everywhere)
    yield _all_on(problem, cpu)


def _all_on(problem: Problem, key: DeviceKey) -> Evaluation:
    operations = problem.obey(dict.fromkeys(problem.graph.operations, key))
    return evaluate(problem, reside(problem, operations))


def contiguous_split(
    problem: Problem,
    chain: Chain,
    *,
    use_cpu: bool,
    fetch: bool,
    part_groups: bool = False,
    balance: bool = False,
) -> Evaluation | None:
    """Contiguous pieces, made again with less room while the evaluator finds them too large.

    Args:
        problem: what is placed.
        chain: its graph in order.
        use_cpu: whether the CPU may have a piece.
        fetch: whether accelerators may stream what they do not hold.
        part_groups: whether a cut may part a group; all of it goes where most of its weights are.
        balance: whether pieces are to take about as long as each other.

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
