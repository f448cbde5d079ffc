"""Evaluate several forward passes that stream weights through one shared prefetch buffer per device.

The shared buffer is as large as the largest that a pass needs. A pass that fits with its own buffer may not
fit with the shared one; the shared buffer then loses slots until all passes fit. For two passes, of which the
first has large activations::

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
    """Return the evaluation of each pass's assignment, each with the largest prefetch buffer of all."""
    pairs = zip(problems, assignments, strict=True)
    evaluations = [evaluate(problem, assignment) for problem, assignment in pairs]
    sizes = _largest_buffers(evaluations)
    return [
        evaluation
        if _has_buffers(evaluation, sizes)
        else evaluate(_with_prefetch_buffers(problem, sizes), evaluation.assignment)
        for problem, evaluation in zip(problems, evaluations, strict=True)
    ]


def fit_together(problems: Sequence[Problem], assignments: Sequence[Assignment]) -> list[Evaluation]:
    """Return the evaluations as :func:`evaluate_together`, with fewer slots while a budget is exceeded."""
    evaluations = evaluate_together(problems, assignments)
    while (largest := _largest_slots(evaluations)) is not None:
        call, buffer = largest
        fewer = [evaluation.assignment for evaluation in evaluations]
        fewer[call] = replace(fewer[call], slots={**fewer[call].slots, buffer.device: len(buffer.slots) - 1})
        evaluations = evaluate_together(problems, fewer)
    return evaluations


def with_allocated_buffers(problem: Problem, others: Sequence[Evaluation]) -> Problem:
    """Return the problem of one pass, with the prefetch buffers that the others have allocated."""
    return _with_prefetch_buffers(problem, _largest_buffers(others))


def with_limited_buffers(problem: Problem, others: Sequence[Evaluation]) -> Problem:
    """Return that problem with buffers limited to the bytes that the other passes leave free."""
    limits = dict(problem.prefetch_limits)
    for other in others:
        sizes = {buffer.device: buffer.nbytes for buffer in other.schedule.prefetch_buffers}
        for spec in problem.topology.devices:
            limit = sizes.get(spec.key, 0) + spec.room - other.peak(spec.key).nbytes
            limits[spec.key] = min(limit, limits.get(spec.key, limit))
    return where_buffers_suffice(replace(with_allocated_buffers(problem, others), prefetch_limits=limits))


def _largest_slots(evaluations: Sequence[Evaluation]) -> tuple[int, PrefetchBuffer] | None:
    """Return the pass and buffer with the largest slots on a device over budget, if fewer slots may do."""
    over = {key for evaluation in evaluations for key in evaluation.excess}
    prefetch_buffers = [
        (call, buffer)
        for call, evaluation in enumerate(evaluations)
        for buffer in evaluation.schedule.prefetch_buffers
        if buffer.device in over and len(buffer.slots) > _fewest_slots(evaluation, buffer)
    ]
    return max(prefetch_buffers, key=lambda pair: sum(pair[1].slots), default=None)


def _fewest_slots(evaluation: Evaluation, buffer: PrefetchBuffer) -> int:
    """Return the fewest possible slots: at least as many as there are segments in use at once."""
    actual = len(buffer.slots)
    return actual if evaluation.assignment.slots.get(buffer.device, actual) < actual else 1


def _largest_buffers(evaluations: Sequence[Evaluation]) -> dict[DeviceKey, int]:
    """Return device -> bytes of the largest buffer's slots among the passes."""
    sizes: dict[DeviceKey, int] = {}
    for buffer in (
        buffer
        for evaluation in evaluations
        for buffer in evaluation.schedule.prefetch_buffers
        if buffer.slots
    ):
        sizes[buffer.device] = max(sum(buffer.slots), sizes.get(buffer.device, 0))
    return sizes


def _has_buffers(evaluation: Evaluation, sizes: Mapping[DeviceKey, int]) -> bool:
    """Whether an evaluation counts prefetch buffers of at least these sizes."""
    counted = {buffer.device: buffer.nbytes for buffer in evaluation.schedule.prefetch_buffers}
    return all(counted.get(key, 0) >= nbytes for key, nbytes in sizes.items())


def _with_prefetch_buffers(problem: Problem, sizes: Mapping[DeviceKey, int]) -> Problem:
    prefetch_bytes = dict(problem.prefetch_bytes)
    for key, nbytes in sizes.items():
        prefetch_bytes[key] = max(nbytes, prefetch_bytes.get(key, 0))
    return replace(problem, prefetch_bytes=prefetch_bytes)
