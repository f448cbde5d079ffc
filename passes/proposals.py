"""The first proposals for a placement: everything on one device, and contiguous pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphplan.device import DeviceKey, DeviceSpec
from graphplan.passes.around import splits_around
from graphplan.passes.chain import Chain
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import cpu_key, reside
from graphplan.passes.split_again import contiguous_split
from graphplan.passes.spread import fetch_excess

__all__ = ["to_be_mended", "with_offload", "without_offload"]


def without_offload(problem: Problem, chain: Chain) -> Iterator[Evaluation | None]:
    """Everything on one accelerator that has room for it, and pieces on several."""
    accelerators = _accelerators(problem)
    for spec in accelerators:
        if len(accelerators) == 1 or problem.graph.weight_bytes <= spec.room:
            yield _all_on(problem, spec.key)
    if len(accelerators) > 1:
        yield contiguous_split(problem, chain, use_cpu=False, fetch=False)
        yield from splits_around(problem)
        keys = {spec.key for spec in accelerators}
        # a pin may make a piece of its own, which no contiguous split has
        if any(not keys <= rule for rule in set(problem.allowed.values())):
            yield _split_freely(problem, chain)
        if problem.graph.together:
            yield contiguous_split(problem, chain, use_cpu=False, fetch=False, part_groups=True)


def to_be_mended(problem: Problem, chain: Chain) -> Iterator[Evaluation | None]:
    """What passes the budgets, and is worth a try to be mended where nothing is within them."""
    accelerators = _accelerators(problem)
    for spec in accelerators if len(accelerators) > 1 else ():
        if problem.graph.weight_bytes > spec.room:
            yield _all_on(problem, spec.key)
    if len(accelerators) > 1 and problem.allowed:
        yield _split_freely(problem, chain)


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


def _accelerators(problem: Problem) -> list[DeviceSpec]:
    return [spec for spec in problem.topology.devices if spec.is_accelerator]


def _split_freely(problem: Problem, chain: Chain) -> Evaluation | None:
    """Pieces as if every device could run everything, and then what may not run there elsewhere."""
    free = contiguous_split(replace(problem, allowed={}), chain, use_cpu=False, fetch=False)
    if free is None:
        return None
    return evaluate(problem, reside(problem, problem.obey(free.schedule.assignment.operations)))


def _all_on(problem: Problem, key: DeviceKey) -> Evaluation:
    operations = problem.obey(dict.fromkeys(problem.graph.operations, key))
    return evaluate(problem, reside(problem, operations))
