"""Place a call with whole weights or, if no accelerator holds one of them, with weights in parts, if faster.

A part must fit a slot of the prefetch buffer. With more parts than that takes, less memory goes to slots and
more to resident parts; with too many, latencies and overheads add up. So several numbers of parts are tried.
An embedding table stays whole if the CPU may read it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from graphplan.capture.captured_graph import Part
from graphplan.compiler.compile_state import Choice, CompileState, Trial, in_parts
from graphplan.compiler.fixed_point import place_calls
from graphplan.compiler.formulation import Formulation, Member
from graphplan.devices.max_memory import read_max_memory
from graphplan.devices.topology import ALIGNMENT, CPU, DISK, DeviceSpec
from graphplan.errors import InfeasibleError
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Weight
from graphplan.passes.frontend.slicing import is_sliceable
from graphplan.passes.placement.driver import probe
from graphplan.passes.placement.problem import Problem

_FACTORS = (1, 2, 4, 8)  # times the fewest parts that fit
_MOST = 64  # parts of a weight, at most
_CROWDED = 0.4  # share of an accelerator's room: larger weights are sliced if a placement of whole ones fails
_FEW = 2  # an embedding and a head; of more large weights, some can be resident and some streamed, whole
_HOPE = 1.1  # factor: a probe that is slower than another plan by more is not refined


def reuse_slices(state: CompileState) -> CompileState:
    """Pass: slice weights into the parts that earlier plans have placed, as far as calls can read them."""
    placed, members = state.formulation.committed.parts, []
    for member in state.members:
        parts = [part for part in placed if is_sliceable(member.annotator.capture, part.weight)]
        members.append(in_parts(member, parts))
    return replace(state, members=members)


def place_whole_or_sliced(state: CompileState) -> list[Choice]:
    """Pass: place the calls; a single call with its oversized weights in parts, if that is faster.

    Raises:
        InfeasibleError: no placement fits.
    """
    if len(state.members) > 1 or state.formulation.committed.homes is not None:
        return place_calls(state)  # a later plan finds weights in the parts of earlier ones
    sliced = _best_slicing(state)
    if sliced is None:
        return _whole_or_crowded(state)
    whole = None
    problem = state.formulation.constrained(state.members[0])
    if probe(problem, deadline=state.limits.deadline) is not None:
        whole = place_calls(replace(state, limits=state.limits.until(0.5)))
        if whole[0].seconds * _HOPE < sliced.seconds:
            return whole
    with suppress(InfeasibleError):  # with the transfers of slicing, operations may need more
        placed = place_calls(replace(state, members=[sliced.member]))
        return placed if whole is None else _faster(whole, placed)
    return whole or place_calls(state)


def _whole_or_crowded(state: CompileState) -> list[Choice]:
    """Place whole weights; if that fails or may be slow, place large ones in parts."""
    try:
        whole = place_calls(state)
    except InfeasibleError as error:
        sliced = _best_slicing(state, share=_CROWDED)
        if sliced is not None:
            return place_calls(replace(state, members=[sliced.member]))
        searched = None if state.limits.caller_retries else _search_coarse_slicings(state)
        if searched is None:
            raise _with_hint(state, error) from None
        return searched
    solution = whole[0].solution
    if solution.evaluation.seconds <= _HOPE * solution.bound.seconds or state.limits.over:
        return whole
    sliced = _best_slicing(state, share=_CROWDED, max_weights=_FEW)
    if sliced is None or sliced.seconds > _HOPE * solution.evaluation.seconds:
        return whole
    with suppress(InfeasibleError):
        return _faster(whole, place_calls(replace(state, members=[sliced.member])))
    return whole


def _search_coarse_slicings(state: CompileState) -> list[Choice] | None:
    """Return a placement of oversized weights in the fewest parts, though no probe found one; None for none.

    A search with a quarter of the work shows first whether there is one.
    """
    limits = replace(state.limits, advises=False, caller_retries=True)
    for share in (1.0, _CROWDED):
        for member in islice(_slicings(state, share), 1):
            with suppress(InfeasibleError):
                found = place_calls(replace(state, members=[member], limits=limits.until(0.25)))
                with suppress(InfeasibleError):
                    searched = place_calls(replace(state, members=[member], limits=limits))
                    return min(searched, found, key=lambda choices: choices[0].seconds)
                return found
    return None


def _best_slicing(state: CompileState, *, share: float = 1.0, max_weights: int | None = None) -> Trial | None:
    """Return the fastest probe with oversized weights in parts; None if no number of parts fits.

    Return None also if there are more than ``max_weights`` such weights.
    """
    best: Trial | None = None
    for sliced in _slicings(state, share, max_weights):
        probed = probe(state.formulation.constrained(sliced), deadline=state.limits.deadline)
        if probed is not None and best is not None and probed.seconds >= best.seconds:
            break
        if probed is not None:
            best = Trial(sliced, probed)
    return best


def _slicings(state: CompileState, share: float, max_weights: int | None = None) -> Iterator[Member]:
    """Yield the call with oversized weights in more and more parts, if these are at most ``max_weights``."""
    formulation, (member,) = state.formulation, state.members
    capture, weights = member.annotator.capture, member.annotator.weights
    if capture.step is not None:  # a training step has gradients of whole weights
        return
    problem = formulation.constrained(member)
    if problem.graph.held_bytes > sum(spec.room for spec in problem.topology.devices):
        return  # slicing frees nothing: the whole stays in memory, parts on accelerators are copies
    oversized = [
        candidate
        for candidate in _find_oversized(problem, names_in_constraints(formulation), share)
        if is_sliceable(capture, candidate.weight.name) and weights.has_rows(candidate.weight.name)
    ]
    if max_weights is None or len(oversized) <= max_weights:
        yield from (in_parts(member, parts) for parts in _offered_parts(oversized))


def _with_hint(state: CompileState, error: InfeasibleError) -> InfeasibleError:
    """Return the error; add the given budgets with CPU memory if a short search finds a placement in them."""
    formulation = state.formulation
    topology, options = formulation.topology, formulation.options
    offloads = options.constraints.offload
    helps = bool(topology.accelerators) and not (offloads and topology.cpu is not None)
    gives_hint = state.limits.advises and not state.limits.caller_retries
    if not helps or not gives_hint or not error.needed:
        return error
    if topology.cpu is None:
        nbytes = sum(needed for key, needed in error.needed.items() if key != DISK)
        if DISK in error.needed:  # in place of the weights there
            nbytes += formulation.constrained(state.members[0]).graph.held_bytes
        (cpu,) = read_max_memory({CPU: nbytes}).devices
        cpu = replace(cpu, reserve=max(spec.reserve for spec in topology.devices))
        topology = replace(topology, devices=(*topology.devices, cpu))
    options = replace(options, constraints=replace(options.constraints, offload=True))
    larger = replace(state, formulation=replace(formulation, topology=topology, options=options))
    problem = larger.formulation.constrained(state.members[0])
    if probe(problem, deadline=state.limits.deadline) is not None or _best_slicing(larger) is not None:
        without = "" if offloads else ", without offload=False"
        error.args = (
            f"{error}. So do these, with weights in CPU memory: max_memory={topology.budgets}{without}",
        )
    return error


def names_in_constraints(formulation: Formulation) -> set[str]:
    """Return the names of operations, modules and weights that the caller pins or groups."""
    constraints = formulation.options.constraints
    return {*constraints.pin, *(name for group in constraints.groups for name in group)}


def _faster(whole: list[Choice], sliced: list[Choice]) -> list[Choice]:
    """Return the faster of two placements, with the lower of their bounds, which holds for both graphs."""
    best = min(*whole, *sliced, key=lambda choice: choice.seconds)
    bound, other = whole[0].solution.bound, sliced[0].solution.bound
    if other.seconds < bound.seconds:
        bound = replace(other, proof=f"{other.proof}, with weights sliced")
    return [best.with_bound(bound)]


# -- weights to slice, and numbers of parts ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Oversized:
    """A weight to slice, and the fewest parts that fit."""

    weight: Weight
    fewest: int


def _find_oversized(problem: Problem, named: Collection[str], share: float) -> list[_Oversized]:
    """Return the weights to slice: those that take more than this share of the room of an accelerator.

    Weights that the caller's constraints fix stay whole, and so do inputs of operations in ``named``.
    """
    oversized = []
    accelerators = problem.topology.accelerators
    if not accelerators or problem.topology.cpu is None or not problem.offload or not problem.streaming:
        return []
    for weight in problem.graph.weights.values():
        if not weight.nbytes or weight.kind not in ("parameter", "buffer") or len(weight.shape) < 2:
            continue
        readers = [problem.graph.operations[r] for r in problem.graph.consumers.get(weight.name, ())]
        if weight.name not in problem.graph.streamable or weight.name in problem.fixed_weights:
            continue
        if any(reader.name in named or not _may_accelerate(problem, reader) for reader in readers):
            continue
        if all(_is_gathered_on_cpu(problem, reader, weight) for reader in readers):
            continue
        available = [_room_for_weight(problem.graph, reader, weight, accelerators) for reader in readers]
        fits = any(_fits_in_parts(problem.graph, reader, weight, accelerators) for reader in readers)
        if fits and weight.nbytes > share * min(available):
            room = max(int(share * min(available)), ALIGNMENT)
            oversized.append(_Oversized(weight, max(2, math.ceil(weight.nbytes / room))))
    return oversized


def _may_accelerate(problem: Problem, operation: Operation) -> bool:
    keys = problem.topology.accelerator_keys
    return not keys.isdisjoint(problem.allowed.get(operation.name, keys))


def _is_gathered_on_cpu(problem: Problem, operation: Operation, weight: Weight) -> bool:
    """Whether the operation reads a few rows of a table, and may run on the CPU, where the table resides."""
    cpu = problem.topology.cpu
    return 2 * operation.bytes_accessed < weight.nbytes and cpu in problem.allowed.get(operation.name, {cpu})


def _room_for_weight(
    graph: Graph, operation: Operation, weight: Weight, accelerators: list[DeviceSpec]
) -> int:
    """Return the most bytes that an accelerator has for a weight, with the other data of its operation."""
    values = [graph.values[name].copy_bytes for name in operation.inputs if name in graph.values]
    values += [graph.values[name].nbytes for name in operation.outputs]
    others = [graph.weights[n].nbytes for n in operation.inputs if n in graph.weights and n != weight.name]
    return max(
        spec.room
        - sum(spec.allocated(nbytes) for nbytes in values if nbytes)
        - spec.allocated(operation.workspace_on(spec.type))
        # the allocator's rounding of the weight takes room too
        - (spec.resident([*others, weight.nbytes]) - weight.nbytes)
        for spec in accelerators
    )


def _fits_in_parts(graph: Graph, operation: Operation, weight: Weight, devices: list[DeviceSpec]) -> bool:
    """Whether a device may hold the inputs, the smallest part of a weight and that part of the outputs."""
    values = graph.values
    taken = [values[name].copy_bytes for name in operation.inputs if name in values]
    parts = [nbytes // _MOST for nbytes in (weight.nbytes, *(values[o].nbytes for o in operation.outputs))]
    return any(sum(map(spec.allocated, [*taken, *parts])) <= spec.room for spec in devices)


def _offered_parts(oversized: Collection[_Oversized]) -> Iterator[list[Part]]:
    """Yield slicings of all these weights, into more and more parts."""
    offered: list[list[Part]] = []
    for factor in _FACTORS:
        parts = [part for one in oversized for part in _parts(one.weight, one.fewest * factor)]
        if parts and parts not in offered:
            offered.append(parts)
            yield parts


def _parts(weight: Weight, count: int) -> list[Part]:
    """Return about ``count`` parts that begin at aligned bytes, of equally many rows but for the last."""
    rows = weight.shape[0]
    step = ALIGNMENT // math.gcd(ALIGNMENT, weight.nbytes // rows)
    rows_per_part = math.ceil(rows / min(count, _MOST, rows) / step) * step
    return (
        [Part(weight.name, at, min(at + rows_per_part, rows)) for at in range(0, rows, rows_per_part)]
        if rows_per_part < rows
        else []
    )
