"""Judge calls of one model together: they stream weights through one prefetch buffer per device.

It has the bytes that the call with the largest needs, in every call. A call that fits with a buffer of its
own may not fit with that one; the buffer then loses slots until all do. For two calls of which the first has
large activations::

    alone      call 0: 1 slot,  16 KiB        call 1: 4 slots, 64 KiB
    together   call 0: 1 slot of 32 KiB       call 1: 2 slots, 32 KiB
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graphplan.devices.topology import DeviceKey
from graphplan.ir.schedule import Assignment, PrefetchBuffer
from graphplan.passes.placement.constrain import where_buffers_suffice
from graphplan.passes.placement.evaluate import Evaluation, evaluate
from graphplan.passes.placement.problem import Problem


def evaluate_together(problems: Sequence[Problem], assignments: Sequence[Assignment]) -> list[Evaluation]:
    """Judge an assignment of each call, each with the largest prefetch buffer of all."""
    found = [evaluate(problem, one) for problem, one in zip(problems, assignments, strict=True)]
    sizes = _largest(found)
    return [
        one if _has(one, sizes) else evaluate(_with_prefetch_buffers(problem, sizes), one.assignment)
        for problem, one in zip(problems, found, strict=True)
    ]


def fit_together(problems: Sequence[Problem], assignments: Sequence[Assignment]) -> list[Evaluation]:
    """As :func:`evaluate_together`, with as many slots as are asked for and all budgets allow."""
    found = evaluate_together(problems, assignments)
    while (deepest := _deepest(found)) is not None:
        call, buffer = deepest
        fewer = [one.assignment for one in found]
        fewer[call] = replace(fewer[call], slots={**fewer[call].slots, buffer.device: len(buffer.slots) - 1})
        found = evaluate_together(problems, fewer)
    return found


def beside(problem: Problem, others: Sequence[Evaluation]) -> Problem:
    """The problem of one call where these others have made their prefetch buffers already."""
    return _with_prefetch_buffers(problem, _largest(others))


def within(problem: Problem, others: Sequence[Evaluation]) -> Problem:
    """As :func:`beside`, with prefetch buffers that grow no further than the others' budgets allow."""
    limits = dict(problem.prefetch_limits)
    for other in others:
        sizes = {buffer.device: buffer.nbytes for buffer in other.schedule.prefetch_buffers}
        for spec in problem.topology.devices:
            limit = sizes.get(spec.key, 0) + spec.room - other.peak(spec.key).nbytes
            limits[spec.key] = min(limit, limits.get(spec.key, limit))
    return where_buffers_suffice(replace(beside(problem, others), prefetch_limits=limits))


def _deepest(found: Sequence[Evaluation]) -> tuple[int, PrefetchBuffer] | None:
    """Of the devices over their budgets, the call whose slots take most, if it can do with fewer."""
    over = {key for one in found for key in one.excess}
    prefetch_buffers = [
        (call, buffer)
        for call, one in enumerate(found)
        for buffer in one.schedule.prefetch_buffers
        if buffer.device in over and len(buffer.slots) > _least(one, buffer)
    ]
    return max(prefetch_buffers, key=lambda pair: sum(pair[1].slots), default=None)


def _least(found: Evaluation, buffer: PrefetchBuffer) -> int:
    """The fewest slots that can do: where segments are read at once, asking for fewer gives no fewer."""
    actual = len(buffer.slots)
    return actual if found.assignment.slots.get(buffer.device, actual) < actual else 1


def _largest(found: Sequence[Evaluation]) -> dict[DeviceKey, int]:
    """Device -> bytes of the slots of the call that has most there."""
    sizes: dict[DeviceKey, int] = {}
    for buffer in (buffer for one in found for buffer in one.schedule.prefetch_buffers if buffer.slots):
        sizes[buffer.device] = max(sum(buffer.slots), sizes.get(buffer.device, 0))
    return sizes


def _has(found: Evaluation, sizes: Mapping[DeviceKey, int]) -> bool:
    """Whether it counts prefetch buffers that are as large already."""
    here = {buffer.device: buffer.nbytes for buffer in found.schedule.prefetch_buffers}
    return all(here.get(key, 0) >= nbytes for key, nbytes in sizes.items())


def _with_prefetch_buffers(problem: Problem, sizes: Mapping[DeviceKey, int]) -> Problem:
    prefetch_bytes = dict(problem.prefetch_bytes)
    for key, nbytes in sizes.items():
        prefetch_bytes[key] = max(nbytes, prefetch_bytes.get(key, 0))
    return replace(problem, prefetch_bytes=prefetch_bytes)
