"""Each macro-operation on its accelerator or on the CPU, in the least time in all: a minimum cut.

A cut edge from the source is an operation on the CPU, one to the sink one on its accelerator, and an edge
between operations is a copy; a value that several of them read is copied once. Memory is not considered, and
weights without a fixed home cost nothing to read.

Source: Stone, "Multiprocessor scheduling with the aid of network flow algorithms" (1977).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from graphplan.passes.placement.arrays import Arrays, Bools, Ints

CUT_VISITS = 150.0  # for each operation, as measured on graphs of 9,000 to 14,500
_ACCELERATOR, _CPU = 0, 1  # nodes: source and sink; macro-operations and values follow
_LARGEST = 1 << 29  # of a capacity, which has 32 bits


def accelerated(arrays: Arrays, accelerators: Ints, able: Bools) -> Bools:
    """(macro-operations,) whether each runs on its accelerator.

    Args:
        arrays: arrays of the problem, with a CPU that computes.
        accelerators: (macro-operations,) the accelerator of each.
        able: (macro-operations,) whether it may run there.
    """
    assert arrays.cpu is not None
    clock, units = arrays.unit_seconds(), np.arange(len(arrays.units))
    there = np.where(able, clock[accelerators, units], np.inf)
    edges = [(_ACCELERATOR, unit + 2, seconds) for unit, seconds in enumerate(clock[arrays.cpu].tolist())]
    edges += [(unit + 2, _CPU, seconds) for unit, seconds in enumerate(there.tolist())]
    edges += _copies(arrays, int(accelerators[0]))
    tail, head, seconds = np.array(edges).T
    total = seconds[np.isfinite(seconds)].sum() or 1.0
    capacity = np.minimum(np.ceil(seconds * (_LARGEST / 2 / total)), _LARGEST).astype(np.int32)
    ends = int(max(tail.max(), head.max())) + 1
    graph = csr_array((capacity, (tail.astype(np.int32), head.astype(np.int32))), shape=(ends, ends))
    left = graph - maximum_flow(graph, _ACCELERATOR, _CPU).flow
    left.eliminate_zeros()
    reached = np.zeros(ends, dtype=bool)
    reached[breadth_first_order(left, _ACCELERATOR, return_predecessors=False)] = True
    return reached[2 : len(units) + 2]


def _copies(arrays: Arrays, accelerator: int) -> Iterator[tuple[int, int, float]]:
    """Yield the edges of copies: tail, head, seconds if tail is on an accelerator and head on the CPU."""

    def at_device(device: int) -> int:
        accelerates = 0 <= device < arrays.computing and arrays.accelerates[device]
        return _ACCELERATOR if accelerates else _CPU

    node = len(arrays.units) + 2
    readers: dict[int, set[int]] = {}
    for item, reader in zip(arrays.item.tolist(), arrays.reader.tolist(), strict=True):
        unit = int(arrays.unit_of[reader]) if reader < arrays.count else -1
        readers.setdefault(item, set()).add(unit + 2 if unit >= 0 else at_device(arrays.host))
    for item, read_by in readers.items():
        if item >= arrays.values and arrays.fixed[item] < 0:
            continue
        unit = int(arrays.unit_of[arrays.source[item]]) if arrays.source[item] >= 0 else -1
        made_by = unit + 2 if unit >= 0 else at_device(int(arrays.fixed[item]))
        seconds = arrays.copy_seconds(item)
        away, back = float(seconds[accelerator, arrays.cpu]), float(seconds[arrays.cpu, accelerator])
        yield made_by, node, away
        yield node + 1, made_by, back
        for reader in read_by:
            yield node, reader, np.inf
            yield reader, node + 1, np.inf
        node += 2
