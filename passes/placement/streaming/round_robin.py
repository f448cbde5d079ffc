"""Accelerators that compute in turn, so that the links of all of them bring weights all the time.

One that computes a long run of operations alone leaves the other links idle, once the prefetch buffers of the
others are full. Deficit round robin (Shreedhar and Varghese, 1995) gives each as many bytes of weights as it
holds, and of those that are streamed as its link brings.
"""

from __future__ import annotations

import numpy as np

from graphplan.passes.placement.arrays import Arrays, Bools, Floats, Ints
from graphplan.passes.placement.streaming.coarsen import bytes_read


def in_turns(arrays: Arrays, rounds: int) -> Ints:
    """(macro-operations,) devices; each accelerator has its turn so many times."""
    assert arrays.cpu is not None
    able, read = np.flatnonzero(arrays.accelerates), bytes_read(arrays)
    nbytes = np.array([read[unit].sum() for unit in arrays.units])
    seconds = np.array([arrays.compute[:, unit].sum(axis=1) for unit in arrays.units]).T
    room, speed = arrays.room[able], 1 / arrays.per_byte[arrays.cpu, able]
    copies = max(0.0, nbytes.sum() - room.sum()) / speed.sum()
    on_cpu = _on_cpu(seconds[arrays.cpu], seconds[able].min(axis=0), nbytes / speed.sum(), copies)
    nbytes = np.where(on_cpu, 0.0, nbytes)
    share = room + max(0.0, nbytes.sum() - room.sum()) * speed / speed.sum()
    found = able[_deficit_round_robin(nbytes, share / share.sum() * nbytes.sum() / rounds)]
    found[on_cpu] = arrays.cpu
    for item in arrays.large_shared:
        readers = list(arrays.readers[item])
        found[readers] = found[readers[-1]]  # a head, beside the lookup in the table that it shares
    units = np.arange(len(found))
    pinned = ~np.isfinite(seconds[found, units])
    found[pinned] = seconds[:, pinned].argmin(axis=0)
    return found


def _on_cpu(there: Floats, elsewhere: Floats, copying: Floats, copies: float) -> Bools:
    """(macro-operations,) that the CPU computes: those with the least seconds for what need not be copied.

    Args:
        there: (macro-operations,) seconds on the CPU.
        elsewhere: (macro-operations,) seconds on an accelerator.
        copying: (macro-operations,) seconds to copy their weights, by all links.
        copies: seconds to copy what accelerators cannot hold.
    """
    found, busy = np.zeros(len(there), dtype=bool), elsewhere[np.isfinite(elsewhere)].sum()
    able = np.flatnonzero((there > 0) & np.isfinite(there) & (copying > 0))  # a view belongs to what reads it
    for unit in able[np.argsort(there[able] / copying[able])].tolist():
        longer = there[unit] - min(elsewhere[unit], there[unit])
        if busy * longer < copies * copying[unit]:  # less of busy**2 + copies**2, as they overlap in part
            found[unit] = True
            busy, copies = busy + longer, max(0.0, copies - copying[unit])
    return found


def _deficit_round_robin(nbytes: Floats, quantum: Floats) -> Ints:
    """(macro-operations,) whose turn it is: from the last, as heads of language models are the largest.

    Args:
        nbytes: (macro-operations,) bytes of each.
        quantum: (participants,) bytes of a turn.
    """
    turn, deficit = 0, np.zeros(len(quantum))
    deficit[turn] = quantum[turn]
    found = np.zeros(len(nbytes), dtype=np.int64)
    for unit in reversed(range(len(nbytes))):
        while deficit[turn] < nbytes[unit] / 2:
            turn = (turn + 1) % len(quantum)
            deficit[turn] += quantum[turn]
        deficit[turn] -= nbytes[unit]
        found[unit] = turn
    return found
