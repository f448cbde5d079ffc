"""Plan a call so that the calls of ``generate`` after it fit in memory too, up to the caller's limits.

The example's call is planned first, and the others with the weights where it puts them. If one of these does
not fit, the example is planned again with as many bytes less. If that does not help, or if a call is slow for
lack of memory, this call is planned first instead and decides where the weights reside. If nothing helps, all
calls are planned together. Without limits only the example is planned: calls that do not fit later move the
weights.

Only transformers' code knows the arguments of a prefill and a decode step. So that code runs on the copy of
the model that is traced. Each of its calls is traced, and returns zeros of the shapes in the trace::

    model.generate(input_ids)
        model(input_ids, attention_mask, use_cache)    traced; returns logits and keys of zeros
        model(token, past_key_values, ...)             traced; returns logits and keys of zeros
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphplan.analysis.lack_of_room import is_very_slow, lacks_room, seconds_with_room
from graphplan.capture.signature import BoundCall
from graphplan.capture.structure import unflatten
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.compiler.code_generation import Planned
from graphplan.compiler.pipeline import Compiler, WeightedCall
from graphplan.devices.topology import CPU, DISK, DeviceKey
from graphplan.errors import CaptureError, GraphplanError, InfeasibleError, LimitError, NoGraphError
from graphplan.integrations.rehearsal import Rehearsal, Rehearsed, RepeatedCallError
from graphplan.message_text import first_line
from graphplan.warnings import silenced, warn

logger = logging.getLogger("graphplan")

_TOKENS = 2  # a prefill and a decode step
_LATER = ("decoder_", "labels")  # arguments that generate makes itself or does not need
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def plan_first(compiler: Compiler, call: BoundCall) -> list[Planned]:
    """Plan and commit the first call, and the calls of ``generate`` if size limits are given.

    The compiler has committed nothing yet, but may know where weights reside already.

    Returns:
        the plan of the example, and a plan for each other structure of calls that fits.
    """
    settled = compiler.homes is not None or compiler.given_plan is not None
    first = compiler.plan(call)
    compiler.commit(first)
    options = compiler.options
    trains = options.grad or options.training is not None
    if call.entry or settled or trains or not options.size_limits.has_limit:
        return [first]
    rehearsed = [_on_device_of(other, call) for other in calls_of_generate(compiler, call)]
    others = list(_plannable(compiler, rehearsed))
    for fast in (False,) if lacks_room(first.plan) else (True, False):
        planned, lacking = _plan_in_turn(compiler, others, first, fast=fast)
        if lacking is None:
            _warn_of_slow_calls(planned)
            return planned
        replanned = None
        if lacking.nbytes:
            smaller = _with_less_memory(compiler, lacking.nbytes)
            replanned = _plan_around(compiler, call, call, others, fast=True, planner=smaller)
        replanned = replanned or _plan_around(
            compiler, lacking.call, call, others, fast=lacking.why is None, planner=compiler
        )
        if replanned is not None:
            return replanned
        compiler.restart()
        compiler.commit(first)
        if lacking.why is not None:  # another order of planning one by one does not help
            break
    assert lacking is not None
    replanned = _plan_all(compiler, call, others)
    if replanned is not None:
        return replanned
    warn(
        "the budgets have room for the example inputs, but not for generate() up to max_batch and "
        f"max_length: {lacking.why}"
    )
    compiler.restart()
    compiler.commit(first)
    return [first]


def _warn_of_slow_calls(planned: Sequence[Planned]) -> None:
    """Warn if a call of ``generate`` is slow for lack of memory, wherever the weights reside."""
    for later in planned[1:]:
        if is_very_slow(later.plan):
            warn(
                f"a forward pass of generate() is estimated to take {later.plan.makespan:.2g} s, or "
                f"{seconds_with_room(later.plan):.2g} s if the weights left more memory free: lower "
                "max_batch or max_length, or give more memory"
            )
            return


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A call that does not fit, why, and the bytes that it lacks; None if it is slow for lack of memory."""

    call: BoundCall
    why: str | None = None
    nbytes: Mapping[DeviceKey, int] = field(default_factory=dict)


def _plannable(compiler: Compiler, others: Sequence[Rehearsed]) -> Iterator[Rehearsed]:
    """Yield the calls that can be planned; an image prompt, say, may leave no length for a token."""
    for rehearsed in others:
        try:
            compiler.problem_of(rehearsed.first_call)
        except (LimitError, CaptureError) as error:
            logger.info("no memory is reserved for a forward pass of generate(): %s", error)
            continue
        except InfeasibleError as error:  # of constants: other weights on the accelerators may leave room
            logger.info("no room for a forward pass of generate(): %s", error)
        yield rehearsed


def _plan_in_turn(
    compiler: Compiler, others: Sequence[Rehearsed], first: Planned, *, fast: bool
) -> tuple[list[Planned], _Shortage | None]:
    """Plan and commit calls one by one, with caches where earlier calls leave them, until one lacks room.

    ``fast``: a call that is slow for lack of memory lacks room too.
    """
    planned = {0: first}
    for rehearsed in others:
        try:
            plan = compiler.plan(_with_placed_caches(rehearsed, planned))
        except InfeasibleError as error:
            lacking = {key: need - error.available.get(key, need) for key, need in error.needed.items()}
            lacking = {key: nbytes for key, nbytes in lacking.items() if nbytes > 0}
            return [], _Shortage(rehearsed.first_call, str(error).splitlines()[0], lacking)
        if fast and lacks_room(plan.plan):
            return [], _Shortage(rehearsed.first_call)
        compiler.commit(plan)
        planned[rehearsed.number] = plan
    return [first, *(planned[rehearsed.number] for rehearsed in others)], None


def _with_less_memory(compiler: Compiler, nbytes: Mapping[DeviceKey, int]) -> Compiler:
    """Return a compiler without commitments whose devices have so many bytes less."""
    other, topology = compiler.without_commitments(), compiler.topology
    left = {key: max(0, topology[key].memory - lacking) for key, lacking in nbytes.items()}
    other.topology = topology.with_memory(left)
    return other


def _plan_around(
    compiler: Compiler,
    hardest: BoundCall,
    example: BoundCall,
    others: Sequence[Rehearsed],
    *,
    fast: bool,
    planner: Compiler,
) -> list[Planned] | None:
    """Plan the ``hardest`` call with the planner and commit it, then all; return None if one lacks room."""
    again = "that lacked memory first" if planner is compiler else "again, with less memory"
    logger.info("planning the forward pass of generate() %s", again)
    compiler.restart()
    try:
        compiler.commit(planner.plan(hardest))
        first = compiler.plan(example)
    except InfeasibleError as error:
        logger.info("no memory for all forward passes of generate(): %s", error)
        return None
    if fast and lacks_room(first.plan):
        return None
    compiler.commit(first)
    planned, shortage = _plan_in_turn(compiler, others, first, fast=fast)
    return planned if shortage is None else None


def _plan_all(compiler: Compiler, example: BoundCall, others: Sequence[Rehearsed]) -> list[Planned] | None:
    """Plan and commit all calls together over one placement of the weights; None if they do not fit.

    Joint plans do not support the disk.
    """
    if DISK in compiler.topology:
        return None
    logger.info("planning all forward passes of generate() together")
    compiler.restart()
    calls = [WeightedCall(one) for one in (example, *(other.first_call for other in others))]
    try:
        return list(compiler.plan_and_commit(calls, advise=False))
    except InfeasibleError as error:
        logger.info("no memory for generate(): %s", error)
        return None


def _on_device_of(rehearsed: Rehearsed, example: BoundCall) -> Rehearsed:
    """Return the call with its tensors, which are on the CPU, on the example's device."""
    device = example.device
    if device is None or device.type in (CPU, "meta"):
        return rehearsed
    with FakeTensorMode():
        call = rehearsed.first_call.mapped(
            lambda leaf: _like(leaf, device) if torch.is_tensor(leaf) else leaf
        )
    return replace(rehearsed, first_call=call)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _with_placed_caches(rehearsed: Rehearsed, planned: Mapping[int, Planned]) -> BoundCall:
    """Return the call, with its cache tensors on the devices where planned calls leave them.

    The caches are new objects: those of the rehearsal have been filled since.
    """
    call = rehearsed.first_call
    leaves = list(call.leaves)
    with FakeTensorMode():
        for leaf, (number, position) in rehearsed.made_by.items():
            device = _device_left_on(planned.get(number), position)
            if device is not None:
                leaves[leaf] = _like(leaves[leaf], device)
        args, kwargs = unflatten(leaves, call.spec)
    return replace(call, args=args, kwargs=kwargs, leaves=tuple(leaves))


def _device_left_on(planned: Planned | None, position: int) -> torch.device | None:
    """Return the device on which a call leaves a cache tensor; None for other results."""
    if planned is None or position not in planned.capture.kept:
        return None
    result, plan = planned.capture.outputs[position], planned.plan
    producer = plan.graph.producer.get(result.name) if isinstance(result, fx.Node) else None
    if producer is None:
        return None
    return plan.topology[plan.schedule.assignment.operations[producer]].torch_device


@one_at_a_time
def calls_of_generate(compiler: Compiler, call: BoundCall) -> list[Rehearsed]:
    """Return one call of each structure that ``generate`` would make, except for the example's structure.

    Return nothing for a model that cannot generate. If generation fails, return the calls until then, and
    warn unless a call could not be traced.
    """
    can_generate = getattr(compiler.model_copy.module, "can_generate", None)  # a plain module has none
    if call.args or not callable(can_generate) or not can_generate():
        return []
    rehearsal = Rehearsal(compiler, call)
    try:
        for prompt in _prompts(call.on_cpu(), compiler.options.size_limits.max_length):
            _generate(rehearsal, prompt)
    except NoGraphError as error:
        logger.info("no memory is reserved for a forward pass of generate() that cannot be traced: %s", error)
    except Exception as error:  # the model's own code may raise anything
        reason = str(error) if isinstance(error, GraphplanError) else first_line(error)
        warn(
            f"the prefill and decode of generate() could not be traced ahead, so no memory is reserved for "
            f"them ({reason}): pass a prefill and a decode to partition as calls="
        )
    return rehearsal.calls[1:]


def _generate(rehearsal: Rehearsal, prompt: Mapping[str, torch.Tensor]) -> None:
    """Rehearse ``generate`` up to the first decode step."""
    greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1}
    with silenced("transformers"), suppress(RepeatedCallError), rehearsal.model() as model:
        model.generate(**prompt, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, **greedy)


def _prompts(call: BoundCall, longest: int | None) -> list[dict[str, torch.Tensor]]:
    """Return arguments for ``generate``: the example's tensors, and for plain text also the longest prompt.

    The longest prompt matters because calls differ beyond a sliding window. Prompts leave room for tokens.
    """
    named = {
        name: value
        for name, value in call.kwargs.items()
        if isinstance(value, torch.Tensor) and not name.startswith(_LATER)
    }
    ids = named.get("input_ids")
    plain = ids is not None and all(value.dim() == 2 and value.shape == ids.shape for value in named.values())
    if ids is None or not plain or longest is None or not set(named) <= set(_TEXT):
        return [named]
    most, size = max(1, longest - _TOKENS), ids.shape[1]
    lengths = [most] if size >= most else [size, most]
    return [
        {name: value[:, torch.arange(length) % size] for name, value in named.items()} for length in lengths
    ]
