"""What the contiguous pieces of a sequence read, need and take, in tables.

A row is the cut at which a piece starts, and column ``k`` is for the piece that ends ``k + 1`` cuts later.
There are as many columns as the longest piece has that can fit; where no cut is so far away, seconds are
infinite, and the other tables hold nothing of meaning. The figures are close to the evaluator, which has the
last word.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from graphplan.device import DeviceSpec
from graphplan.passes.chain import Chain, Floats, Ints
from graphplan.passes.evaluate import Problem

__all__ = ["PieceTables", "piece_seconds", "piece_tables"]


@dataclass(frozen=True, slots=True)
class PieceTables:
    """For each piece what it reads from outside and needs.

    Attributes:
        cuts: positions of the chain.
        arriving: bytes of values, and of weights that were used before, which are copied in.
        arrivals: the number of these.
        weights: bytes of those that no earlier piece reads.
        activations: most bytes of values at a time, with workspace.
        widest: bytes of the largest weights of one operation.
    """

    cuts: Ints
    arriving: Floats
    arrivals: Floats
    weights: Floats
    activations: Floats
    widest: Floats

    @property
    def ends(self) -> Ints:
        """The cut at which each piece ends; past the last one where there is none."""
        rows, reach = self.weights.shape
        ends: Ints = np.arange(1, rows + 1)[:, None] + np.arange(reach)[None, :]
        return ends


# pieces of one chain are asked for again and again: with less room, with a CPU and without
_MADE: WeakKeyDictionary[Chain, dict[tuple[int, float, bool], PieceTables]] = WeakKeyDictionary()


def piece_tables(chain: Chain, limit: int, most: float, *, part_groups: bool) -> PieceTables:
    """The tables of pieces between cuts.

    Args:
        chain: what is cut.
        limit: most positions at which to consider a cut.
        most: bytes of weights that a piece may have.
        part_groups: whether cuts may fall inside groups that must stay together.
    """
    made, key = _MADE.setdefault(chain, {}), (limit, most, part_groups)
    if key not in made:
        made[key] = _make(chain, chain.positions(limit, part_groups=part_groups), most)
    return made[key]


def _make(chain: Chain, cuts: Ints, most: float) -> PieceTables:
    reach, n = _reach(chain, cuts, most), chain.count
    shape = (len(cuts), reach)
    tables = PieceTables(cuts, *(np.zeros(shape) for _ in range(5)))
    values, weights = chain.value_reads, chain.weight_reads
    birth, death, size = chain.storages
    per_operation = _sums(weights.reader, weights.nbytes, n)
    last = cuts[np.minimum(np.arange(len(cuts)) + reach, len(cuts) - 1)]
    # reads and births come in the order of operations
    places = (values.reader, weights.reader, birth)
    spans = [zip(np.searchsorted(p, cuts[:-1]), np.searchsorted(p, last[:-1]), strict=True) for p in places]
    for row, (start, end, v, w, b) in enumerate(zip(cuts[:-1], last[:-1], *spans, strict=True)):
        v, w, b = slice(*v), slice(*w), slice(*b)
        count, ends = end - start, cuts[row + 1 : row + 1 + reach] - 1 - start
        columns = slice(0, len(ends))
        outside = values.previous[v] < start
        reader, nbytes = values.reader[v][outside] - start, values.nbytes[v][outside]
        arriving = _sums(reader, nbytes, count + 1)
        before, mine = weights.previous[w], weights.reader[w] - start
        fresh, again = before < start, (before >= 0) & (before < start)
        change = arriving + _sums(birth[b] - start, size[b], count + 1)
        change -= _sums(np.minimum(death[b] + 1 - start, count), size[b], count + 1)
        until = np.minimum(values.until[v][outside] + 1 - start, count)
        change -= _sums(until, nbytes, count + 1)
        arrivals = np.bincount(reader, minlength=count)
        if again.any():
            arriving[:-1] += _sums(mine[again], weights.nbytes[w][again], count)
            arrivals += np.bincount(mine[again], minlength=count)
        live = change.cumsum()[:-1] + chain.workspace[start:end]
        tables.arriving[row, columns] = arriving.cumsum()[ends]
        tables.arrivals[row, columns] = arrivals.cumsum()[ends]
        tables.weights[row, columns] = np.cumsum(_sums(mine[fresh], weights.nbytes[w][fresh], count))[ends]
        tables.activations[row, columns] = np.maximum.accumulate(live)[ends]
        tables.widest[row, columns] = np.maximum.accumulate(per_operation[start:end])[ends]
    return tables


def _reach(chain: Chain, cuts: Ints, most: float) -> int:
    """How many cuts further a piece may end, at most, if its weights take no more than so many bytes."""
    reads = chain.weight_reads
    first = reads.previous < 0  # what an earlier piece has read too is left out, which only makes it longer
    total = np.concatenate([[0.0], np.cumsum(_sums(reads.reader[first], reads.nbytes[first], chain.count))])
    at = total[cuts]
    found = np.searchsorted(at, at + most, side="right") - 1 - np.arange(len(cuts))
    return max(1, min(int(found.max()), len(cuts) - 1))


def _sums(places: Ints, amounts: Ints, count: int) -> Floats:
    """The sum of the amounts at each place; of none too, which `bincount` would count in integers."""
    return np.bincount(places, amounts, count).astype(np.float64, copy=False)


def piece_seconds(
    chain: Chain, tables: PieceTables, spec: DeviceSpec, space: int, problem: Problem, home: DeviceSpec | None
) -> Floats:
    """Seconds of each piece on a device, infinite where it does not fit.

    Args:
        chain: what is cut.
        tables: of its pieces.
        spec: the device.
        space: bytes that it has for them.
        problem: whose links are used.
        home: where weights may stay that are fetched at each call; None where they may not.
    """
    cuts, last = tables.cuts, len(tables.cuts) - 1
    exists = tables.ends <= last
    ends = np.minimum(tables.ends, last)
    each = np.array(list(problem.clock(spec).values()))
    may_run = np.isfinite(each)
    barred = np.concatenate([[0], np.cumsum(~may_run)])[cuts]
    total = np.concatenate([[0.0], np.cumsum(np.where(may_run, each, 0.0))])[cuts]
    topology = problem.topology
    links = [topology.link(other.key, spec.key) for other in topology.devices if other is not spec]
    latency = max((link.latency for link in links), default=0.0)
    bandwidth = min((link.bandwidth for link in links), default=np.inf)
    seconds = total[ends] - total[:, None]
    seconds += tables.arrivals * latency
    seconds += tables.arriving / bandwidth
    excess = tables.weights + tables.activations - space
    fits = excess <= 0
    if home is not None:
        link = topology.link(home.key, spec.key)
        fetched = excess + 2 * tables.widest  # the ring takes room of its own
        mean = max(1.0, float(np.mean(chain.weight_reads.nbytes)) if len(chain.weight_reads.nbytes) else 1.0)
        price = fetched / link.bandwidth + np.ceil(fetched / mean) * link.latency
        seconds = np.where(fits, seconds, np.maximum(seconds, price))
        # all weights may be away, but the activations and one operation's weights must fit
        fits |= tables.activations + 2 * tables.widest <= space
    possible: Floats = np.where(fits & exists & (barred[ends] == barred[:, None]), seconds, np.inf)
    return possible
