"""A bound from the bytes that must be read from disk: a fractional knapsack.

Memory holds no more than its room, so the other weights are on disk. At best these are the weights of which
the fewest bytes are read, up to a fraction of the last one. Accelerators load them in parallel, each over its
own link; the CPU reads them on the clock, in addition to the operations.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphplan.devices.topology import CPU, DISK, round_up
from graphplan.passes.placement.arrays import Arrays
from graphplan.passes.placement.bounds.relaxation import least_seconds
from graphplan.passes.placement.params import ROUNDING
from graphplan.passes.placement.problem import Problem


def least_disk_seconds(problem: Problem, on_disk: Sequence[str], free: Sequence[str]) -> float:
    """Return a lower bound on the seconds of all placements.

    Args:
        problem: a problem with a disk.
        on_disk: the weights that are on disk in all placements.
        free: the weights that may be on disk.
    """
    graph, topology = problem.graph, problem.topology
    weights, operations, readers = graph.weights, graph.operations, graph.readers
    cpus = {spec.key for spec in topology.computing if not spec.is_accelerator}
    on_cpu = {name for name in operations if cpus & problem.allowed.get(name, cpus)}

    def read_by(reader: str, name: str) -> int:
        nbytes = weights[name].nbytes
        return min(nbytes, operations[reader].bytes_accessed) if reader in on_cpu else nbytes

    sizes = {name: round_up(weight.nbytes) for name, weight in weights.items()}
    read_bytes = {n: max((read_by(r, n) for r in readers.get(n, ())), default=0) for n in (*on_disk, *free)}
    excess = sum(sizes.values()) - sum(spec.room for spec in topology.computing)
    excess -= sum(sizes[name] for name in on_disk)
    nbytes = float(sum(read_bytes[name] for name in on_disk))
    for name in sorted(free, key=lambda name: read_bytes[name] / sizes[name]):
        nbytes += read_bytes[name] * min(1.0, max(0, excess) / sizes[name])
        excess -= sizes[name]

    loading = sum(topology.link(DISK, spec.key).bandwidth for spec in topology.accelerators)
    arrays = Arrays(problem)
    fastest = least_seconds(arrays).seconds
    if loading and nbytes / loading <= fastest:
        return fastest
    # an operation that reads on the CPU may also compute more slowly there
    reading = 0.0
    for reader in on_cpu:
        nbytes_read = sum(read_by(reader, name) for name in operations[reader].inputs if name in read_bytes)
        if nbytes_read:
            seconds = arrays.compute[:, arrays.index[reader]]
            slower = float(seconds[~arrays.accelerates].min() - seconds.min())
            link = topology.link(DISK, topology.cpu or CPU)
            reading = max(reading, nbytes_read / (slower + nbytes_read / link.bandwidth))
    total_bandwidth = loading + reading
    return (nbytes + fastest * reading) / total_bandwidth * (1 - ROUNDING) if total_bandwidth else fastest
