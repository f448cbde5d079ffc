"""Accelerators that compute in turn, so that all their links transfer weights all the time.

While one accelerator computes a long run of operations, the links of the others are idle once their prefetch
buffers are full. Deficit round robin (Shreedhar and Varghese, 1995) gives each accelerator as many bytes of
weights as it holds, and a share of the streamed bytes in proportion to the bandwidth of its link.
"""

from __future__ import annotations

import numpy as np

from graphplan.passes.placement.arrays import Arrays, Bools, Floats, Ints
from graphplan.passes.placement.streaming.coarsen import bytes_read


def round_robin(arrays: Arrays, rounds: int) -> Ints:
    """(macro-operations,) devices; each accelerator has ``rounds`` turns."""
    assert arrays.cpu is not None
    accelerators, read = np.flatnonzero(arrays.accelerates), bytes_read(arrays)
    nbytes = np.array([read[unit].sum() for unit in arrays.units])
    seconds = np.array([arrays.compute[:, unit].sum(axis=1) for unit in arrays.units]).T
    room, speed = arrays.room[accelerators], 1 / arrays.per_byte[arrays.cpu, accelerators]
    copies = max(0.0, nbytes.sum() - room.sum()) / speed.sum()
    on_cpu = _on_cpu(seconds[arrays.cpu], seconds[accelerators].min(axis=0), nbytes / speed.sum(), copies)
    nbytes = np.where(on_cpu, 0.0, nbytes)
    share = room + max(0.0, nbytes.sum() - room.sum()) * speed / speed.sum()
    devices = accelerators[_deficit_round_robin(nbytes, share / share.sum() * nbytes.sum() / rounds)]
    devices[on_cpu] = arrays.cpu
    for item in arrays.large_shared:
        readers = list(arrays.readers[item])
        devices[readers] = devices[readers[-1]]  # the lookup runs with the head that shares its table
    units = np.arange(len(devices))
    pinned = ~np.isfinite(seconds[devices, units])
    devices[pinned] = seconds[:, pinned].argmin(axis=0)
    return devices


def _on_cpu(cpu_seconds: Floats, accelerator_seconds: Floats, copying: Floats, copies: float) -> Bools:
    """(macro-operations,) whether the CPU computes each: those with the least CPU seconds for their copy.

    Args:
        cpu_seconds: (macro-operations,) seconds on the CPU.
        accelerator_seconds: (macro-operations,) seconds on an accelerator.
        copying: (macro-operations,) seconds to copy their weights over all links.
        copies: seconds to copy the weights that accelerators cannot hold.
    """
    on_cpu, busy = (
        np.zeros(len(cpu_seconds), dtype=bool),
        accelerator_seconds[np.isfinite(accelerator_seconds)].sum(),
    )
    allowed = np.flatnonzero(
        (cpu_seconds > 0) & np.isfinite(cpu_seconds) & (copying > 0)
    )  # a view runs with its reader
    for unit in allowed[np.argsort(cpu_seconds[allowed] / copying[allowed])].tolist():
        extra = cpu_seconds[unit] - min(accelerator_seconds[unit], cpu_seconds[unit])
        if busy * extra < copies * copying[unit]:  # lowers busy**2 + copies**2: the two overlap in part
            on_cpu[unit] = True
            busy, copies = busy + extra, max(0.0, copies - copying[unit])
    return on_cpu


def _deficit_round_robin(nbytes: Floats, quantum: Floats) -> Ints:
    """(macro-operations,) the participant of each, from the last on: heads of language models are largest.

    Args:
        nbytes: (macro-operations,) bytes of each.
        quantum: (participants,) bytes of a turn.
    """
    turn, deficit = 0, np.zeros(len(quantum))
    deficit[turn] = quantum[turn]
    turns = np.zeros(len(nbytes), dtype=np.int64)
    for unit in reversed(range(len(nbytes))):
        while deficit[turn] < nbytes[unit] / 2:
            turn = (turn + 1) % len(quantum)
            deficit[turn] += quantum[turn]
        deficit[turn] -= nbytes[unit]
        turns[unit] = turn
    return turns
