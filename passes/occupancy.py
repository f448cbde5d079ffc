"""What a device holds while one operation of the order runs, in terms of who runs where.

A value is still there if it was made on the device before, or brought there for a reader, and is read there
later. So it is once its maker or an earlier reader, and a reader yet to come, are known to run there: bytes
that a set of units brings about. Where nobody has read it yet, its maker is enough, wherever it will be read:
a copy is made right before its first reader. Who has to remember these sets for a whole order may do without
that: a value that waits from one layer to the next would be in all that is between.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphplan.device import DeviceSpec
from graphplan.graph import Graph

__all__ = ["Held", "Occupancy", "count_waits"]

_LATER = 6  # readers to come that are looked at
_AROUND = 2  # readers before and after a moment that are looked at

_Readers = list[tuple[int, int]]  # position and unit of each, in order


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one value, or of what an operation makes, that are on a device at some moment.

    Attributes:
        nbytes: before the allocator rounds them up.
        units: any of these sets, whole on the device, means that they are there.
        is_input: whether it is the caller's, who has it on the host anyway.
    """

    nbytes: tuple[int, ...]
    units: tuple[frozenset[int], ...]
    is_input: bool = False

    def allocated(self, spec: DeviceSpec) -> int:
        """Bytes on a device."""
        return sum(spec.allocated(nbytes) for nbytes in self.nbytes if nbytes)


@dataclass(slots=True)
class _Reads:
    """The operations that read a value or a view of it, in order, each with its position.

    Attributes:
        name: of the value.
        made: position of its maker; -1 for an input.
        nbytes: of the smallest form of it that may be on a device.
        kept: position, and the units that keep it where it was made: maker, views and reader.
        direct: position and unit of those that read one name of it, by name.
        maker: the unit that makes it, if one does.
    """

    name: str
    made: int
    nbytes: int
    kept: list[tuple[int, frozenset[int]]]
    direct: dict[str, _Readers]
    maker: frozenset[int]

    @property
    def first(self) -> int:
        """The first position before which it can wait."""
        return self.made + 1 if self.kept else min(r[0][0] for r in self.direct.values() if r)

    @property
    def last(self) -> int:
        """The last position at which it can wait."""
        return max([r[-1][0] for r in self.direct.values() if r] + [p for p, _ in self.kept[-1:]])


class Occupancy:
    """Which values wait while which operation runs.

    Args:
        graph: in order.
        unit_of: operation -> the unit that it is placed with.
    """

    def __init__(self, graph: Graph, unit_of: Mapping[str, int]) -> None:
        self.graph, self.unit_of = graph, unit_of
        self.index = {name: i for i, name in enumerate(graph.operations)}
        # for each position the values that may wait then, each with the readers of it that come around then
        self._live: list[list[tuple[_Reads, list[_Readers]]]] = [[] for _ in self.index]
        for reads in self._reads():
            around: list[list[_Readers]] = [[] for _ in range(reads.first, reads.last + 1)]
            for readers in reads.direct.values():
                for position in range(readers[0][0], readers[-1][0] + 1) if readers else ():
                    around[position - reads.first].append(readers)
            for live, some in zip(self._live[reads.first : reads.last + 1], around, strict=True):
                live.append((reads, some))

    def during(self, operation: str, device_type: str, *, unread: bool = False) -> list[Held]:
        """What devices of a type hold at least while it runs anywhere, beside weights.

        Args:
            operation: that runs.
            device_type: of the devices.
            unread: whether to count what nobody has read yet wherever it was made.
        """
        ran, now = self.graph.operations[operation], self.index[operation]
        own = self.unit_of.get(operation)
        found = []
        if own is not None:
            made = [v.nbytes for n in ran.outputs if (v := self.graph.values[n]).alias_of is None]
            found.append(Held((*made, ran.workspace_on(device_type)), (frozenset({own}),)))
        for reads, around in self._live[now]:
            later = bisect_right(reads.kept, now, key=_position)
            if unread and later == 0 and reads.kept:
                found.append(Held((reads.nbytes,), (reads.maker,)))
                continue
            sets = [units for _, units in reads.kept[later : later + _LATER]]
            for readers in around:
                first, end = (side(readers, now, key=_position) for side in (bisect_left, bisect_right))
                sets += _across(readers[max(0, first - _AROUND) : first], readers[end : end + _AROUND])
                if own is not None and first < end:
                    sets.append(frozenset({own}))
            least = list(dict.fromkeys(sets))
            if len(least) > 1:
                least = [s for s in least if not any(other < s for other in least)]
            if least:
                found.append(Held((reads.nbytes,), tuple(least), reads.made < 0))
        return found

    def _reads(self) -> Iterator[_Reads]:
        for name, value in self.graph.values.items():
            maker = self.graph.producer.get(name)
            if value.alias_of is not None or not value.is_tensor or not value.nbytes:
                continue
            direct: dict[str, _Readers] = {}
            makers = None if maker is None else self.unit_of.get(maker)
            start = frozenset() if makers is None else frozenset({makers})
            kept = sorted(self._follow(name, start, direct), key=lambda reader: reader[0])
            sizes = [value.nbytes, *(self.graph.values[n].copy_bytes for n, r in direct.items() if r)]
            for readers in direct.values():
                readers.sort()
            if any(direct.values()):
                made = -1 if maker is None else self.index[maker]
                yield _Reads(name, made, min(sizes), kept if start else [], direct, start)

    def _follow(
        self, name: str, makers: frozenset[int], direct: dict[str, _Readers]
    ) -> Iterator[tuple[int, frozenset[int]]]:
        """Whoever reads a value or a view of it, with those that must run where it does."""
        mine = direct.setdefault(name, [])
        for reader in self.graph.consumers.get(name, ()):
            unit = self.unit_of.get(reader)
            if unit is None:
                continue
            mine.append((self.index[reader], unit))
            yield self.index[reader], makers | {unit}
            for output in self.graph.operations[reader].outputs:
                if self.graph.values[output].alias_of == name:
                    yield from self._follow(output, makers | {unit}, direct)


def count_waits(graph: Graph) -> int:
    """Operations that run while a value waits, summed over values: what looking at each of them takes."""
    index = {name: i for i, name in enumerate(graph.operations)}
    readers = {name: graph.readers.get(name, ()) for name in graph.values}
    return sum(
        index[some[-1]] - index.get(graph.producer.get(name, ""), 0) for name, some in readers.items() if some
    )


def _across(before: _Readers, after: _Readers) -> Iterator[frozenset[int]]:
    """A copy that was brought for one reader waits for the next."""
    for _, first in before:
        for _, second in after:
            yield frozenset({first, second})


def _position(read: tuple[int, object]) -> int:
    return read[0]
