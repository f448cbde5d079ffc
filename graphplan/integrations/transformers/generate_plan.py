"""Plan a call so that the calls which ``generate`` makes after it have room too, up to the caller's limits.

The example's call is planned first, and the others with the weights where it puts them. Where one of these
lacks room there, or room to be fast, it is the one that decides where the weights are; and where that is not
enough, all are placed together. Without limits nothing else is planned: what has no room later moves the
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphplan.analysis.lack_of_room import lacks_room, seconds_with_room
from graphplan.capture.signature import BoundCall
from graphplan.capture.structure import unflatten
from graphplan.compiler.code_generation import Planned
from graphplan.compiler.pipeline import Compiler, EntryCall
from graphplan.devices.topology import CPU, DISK
from graphplan.errors import CaptureError, InfeasibleError, LimitError
from graphplan.integrations.rehearsal import Rehearsed
from graphplan.integrations.transformers.generate_calls import calls_of_generate
from graphplan.warnings import warn

logger = logging.getLogger("graphplan")


def plan_first(compiler: Compiler, call: BoundCall, entry: str = "") -> list[Planned]:
    """Plan and commit the call that decides where weights are, and those of ``generate`` if limits are given.

    The compiler has committed nothing, unless it knows from another process where weights are.

    Returns:
        the plan of the example, and of each other structure of calls that there is room for.
    """
    alone = compiler.homes is not None or compiler.given is not None
    first = compiler.plan(call, entry)
    compiler.commit(first)
    options = compiler.options
    trains = options.grad or options.training is not None
    if entry or alone or trains or not options.size_limits.given:
        return [first]
    rehearsed = [_where_the_caller_is(other, call) for other in calls_of_generate(compiler, call)]
    others = list(_plannable(compiler, rehearsed))
    example = EntryCall(call)
    for fast in (False,) if lacks_room(first.plan) else (True, False):
        found, lacking = _plan_in_turn(compiler, others, first, fast=fast)
        if lacking is None:
            _tell_of_slow_calls(found)
            return found
        again = _plan_around(compiler, lacking.call, example, others, fast=lacking.why is None)
        if again is not None:
            return again
        compiler.restart()
        compiler.commit(first)
        if lacking.why is not None:  # no order of planning them one by one has room
            break
    assert lacking is not None
    again = _plan_all(compiler, example, others)
    if again is not None:
        return again
    warn(
        "the budgets have room for the example inputs, but not for generate() up to max_batch and "
        f"max_length: {lacking.why}"
    )
    compiler.restart()
    compiler.commit(first)
    return [first]


def _tell_of_slow_calls(found: Sequence[Planned]) -> None:
    """Warn where a call of ``generate`` has no room to be fast, whatever decides where the weights are."""
    for one in found[1:]:
        if lacks_room(one.plan):
            warn(
                f"a forward pass of generate() is estimated to take {one.plan.makespan:.2g} s; with more "
                f"memory beside the weights it would be {seconds_with_room(one.plan):.2g} s: lower max_batch "
                "or max_length, or give more memory"
            )
            return


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A call for which there is no room, and why; None where there is none to be fast."""

    call: EntryCall
    why: str | None


def _plannable(compiler: Compiler, others: Sequence[Rehearsed]) -> Iterator[Rehearsed]:
    """Those that a plan can be made of: an image's prompt, say, may leave no room for a token."""
    for other in others:
        try:
            compiler.pose(other.asked)
        except (LimitError, CaptureError) as error:
            logger.info("no memory is reserved for a forward pass of generate(): %s", error)
        else:
            yield other


def _plan_in_turn(
    compiler: Compiler, others: Sequence[Rehearsed], first: Planned, *, fast: bool
) -> tuple[list[Planned], _Lacking | None]:
    """Plan and commit calls one by one, caches where the calls before leave them; or say which cannot be.

    ``fast``: nor may one be slow for lack of room.
    """
    planned = {0: first}
    for other in others:
        try:
            found = compiler.plan(_brought(other, planned), other.asked.entry)
        except InfeasibleError as error:
            return [], _Lacking(other.asked, str(error).splitlines()[0])
        if fast and lacks_room(found.plan):
            return [], _Lacking(other.asked, None)
        compiler.commit(found)
        planned[other.number] = found
    return [first, *(planned[other.number] for other in others)], None


def _plan_around(
    compiler: Compiler, hardest: EntryCall, example: EntryCall, others: Sequence[Rehearsed], *, fast: bool
) -> list[Planned] | None:
    """Plan and commit all calls, with the weights where one of them has room; None where others lack it."""
    logger.info("planning the forward pass of generate() that lacked memory first")
    compiler.restart()
    try:
        compiler.commit(compiler.plan(hardest.call, hardest.entry))
        first = compiler.plan(example.call, example.entry)
    except InfeasibleError as error:
        logger.info("no memory for all forward passes of generate(): %s", error)
        return None
    if fast and lacks_room(first.plan):
        return None
    compiler.commit(first)
    found, lacking = _plan_in_turn(compiler, others, first, fast=fast)
    return found if lacking is None else None


def _plan_all(compiler: Compiler, example: EntryCall, others: Sequence[Rehearsed]) -> list[Planned] | None:
    """Plan and commit all calls over one placement of the weights; None where that finds no room.

    That knows no disk.
    """
    if DISK in compiler.topology:
        return None
    logger.info("planning all forward passes of generate() together")
    compiler.restart()
    calls = [example, *(other.asked for other in others)]
    try:
        return list(compiler.plan_and_commit(calls, advise=False))
    except InfeasibleError as error:
        logger.info("no memory for generate(): %s", error)
        return None


def _where_the_caller_is(other: Rehearsed, example: BoundCall) -> Rehearsed:
    """The call with its tensors on the device of the example's; they were on the CPU."""
    device = example.device
    if device is None or device.type in (CPU, "meta"):
        return other
    with FakeTensorMode():
        call = other.asked.call.mapped(lambda leaf: _like(leaf, device) if torch.is_tensor(leaf) else leaf)
    return replace(other, asked=replace(other.asked, call=call))


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _brought(other: Rehearsed, planned: Mapping[int, Planned]) -> BoundCall:
    """The call, with the tensors of its caches on the devices that planned calls leave them on.

    Its caches are made anew: those that it was made with have been filled since.
    """
    call = other.asked.call
    leaves = list(call.leaves)
    with FakeTensorMode():
        for leaf, (number, position) in other.made_by.items():
            device = _left_on(planned.get(number), position)
            if device is not None:
                leaves[leaf] = _like(leaves[leaf], device)
        args, kwargs = unflatten(leaves, call.spec)
    return replace(call, args=args, kwargs=kwargs, leaves=tuple(leaves))


def _left_on(planned: Planned | None, position: int) -> torch.device | None:
    """Where a call leaves a tensor of a cache; None for another result."""
    if planned is None or position not in planned.capture.kept:
        return None
    result, plan = planned.capture.outputs[position], planned.plan
    producer = plan.graph.producer.get(result.name) if isinstance(result, fx.Node) else None
    if producer is None:
        return None
    return plan.topology[plan.schedule.assignment.operations[producer]].torch_device
