"""Which weights no accelerator holds beside what their operations make, and how to cut them.

A part must fit a slot of the prefetch buffer. With more parts than that takes, less memory goes to
slots and more to parts that stay; with too many, latencies and overheads add up. So several counts are
offered. An embedding table is left whole where the CPU may read it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from graphplan.capture.captured_graph import Part
from graphplan.devices.topology import ALIGNMENT, DeviceSpec
from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Weight
from graphplan.passes.placement.problem import Problem, cpu_key

_FACTORS = (1, 2, 4, 8)
_MOST = 64  # parts of a weight


@dataclass(frozen=True, slots=True)
class Oversized:
    """A weight that no accelerator holds, and the least number of parts that some accelerator may."""

    weight: Weight
    fewest: int


def find_oversized(problem: Problem, named: Collection[str] = (), *, share: float = 1.0) -> list[Oversized]:
    """The weights that are worth slicing.

    Args:
        problem: with the caller's rules; what these fix is left whole.
        named: operations that the caller has named, which stay as they are too.
        share: of what an accelerator has for a weight, above which it is oversized.
    """
    found = []
    accelerators = [spec for spec in problem.topology.devices if spec.is_accelerator]
    if not accelerators or cpu_key(problem.topology) is None or not problem.offload or not problem.streaming:
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
        rooms = [_room_beside(problem.graph, reader, weight, accelerators) for reader in readers]
        if rooms and weight.nbytes > share * min(rooms):
            room = max(int(share * min(rooms)), ALIGNMENT)
            found.append(Oversized(weight, max(2, math.ceil(weight.nbytes / room))))
    return found


def _may_accelerate(problem: Problem, operation: Operation) -> bool:
    keys = {spec.key for spec in problem.topology.devices if spec.is_accelerator}
    return not keys.isdisjoint(problem.allowed.get(operation.name, keys))


def _is_gathered_on_cpu(problem: Problem, operation: Operation, weight: Weight) -> bool:
    """Whether this reads a few rows of a table, and may do so where the table is."""
    cpu = cpu_key(problem.topology)
    return 2 * operation.bytes_accessed < weight.nbytes and cpu in problem.allowed.get(operation.name, {cpu})


def _room_beside(graph: Graph, operation: Operation, weight: Weight, accelerators: list[DeviceSpec]) -> int:
    """Bytes that the roomiest accelerator has for a weight beside what else an operation takes."""
    values = [graph.values[name].copy_bytes for name in operation.inputs if name in graph.values]
    values += [graph.values[name].nbytes for name in operation.outputs]
    others = [graph.weights[n].nbytes for n in operation.inputs if n in graph.weights and n != weight.name]
    return max(
        spec.room
        - sum(spec.allocated(nbytes) for nbytes in values if nbytes)
        - spec.allocated(operation.workspace_on(spec.type))
        # what an allocator takes beyond the weight's own bytes is not there for it either
        - (spec.resident([*others, weight.nbytes]) - weight.nbytes)
        for spec in accelerators
    )


def offered_parts(oversized: Collection[Oversized]) -> Iterator[list[Part]]:
    """Ways to cut these weights, all of them each time, into more and more parts."""
    known: list[list[Part]] = []
    for factor in _FACTORS:
        parts = [part for one in oversized for part in _parts(one.weight, one.fewest * factor)]
        if parts and parts not in known:
            known.append(parts)
            yield parts


def _parts(weight: Weight, count: int) -> list[Part]:
    """So many parts, of equal numbers of rows but for the last, that begin at aligned bytes."""
    rows = weight.shape[0]
    step = ALIGNMENT // math.gcd(ALIGNMENT, weight.nbytes // rows)
    each = math.ceil(rows / min(count, _MOST, rows) / step) * step
    return [Part(weight.name, at, min(at + each, rows)) for at in range(0, rows, each)] if each < rows else []
