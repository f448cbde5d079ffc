"""What a device holds while one operation of the order runs, in terms of who runs where.

A value is still there if it was made on the device before and is read there later. That is linear in the
decisions, once it is said which pairs of units bring it about; a mixed-integer program takes it as a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphplan.device import DeviceSpec
from graphplan.passes.shares import Kind, Shares

__all__ = ["Held", "held_during"]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that are on a device if all units of one of the sets run there."""

    nbytes: int
    units: tuple[frozenset[int], ...]


def held_during(shares: Shares, operation: str, kind: Kind) -> list[Held]:
    """What devices of a kind hold at least while ``operation`` runs anywhere, beside weights."""
    return list(_Moment(shares, operation, kind).held())


class _Moment:
    def __init__(self, shares: Shares, operation: str, kind: Kind) -> None:
        self.shares, self.graph, self.kind = shares, shares.graph, kind
        self.operation = self.graph.operations[operation]
        self.index = {name: i for i, name in enumerate(self.graph.operations)}
        self.now = self.index[operation]

    def held(self) -> Iterator[Held]:
        spec = self.kind.spec
        own = self.shares.unit_of.get(self.operation.name)
        if own is not None:
            made = [v for n in self.operation.outputs if (v := self.graph.values[n]).alias_of is None]
            nbytes = [value.nbytes for value in made] + [self.operation.workspace_on(spec.type)]
            yield Held(sum(spec.allocated(n) for n in nbytes if n), (frozenset({own}),))
        for name, value in self.graph.values.items():
            if value.is_tensor and value.alias_of is None and value.nbytes:
                found = self._value(name, own, spec)
                if found is not None:
                    yield found

    def _value(self, root: str, own: int | None, spec: DeviceSpec) -> Held | None:
        maker = self.graph.producer.get(root)
        unit = self.shares.unit_of.get(maker) if maker is not None else None
        if maker is None or unit is None or self.index[maker] >= self.now:
            return None
        nbytes = self.graph.values[root].nbytes
        sets = list(self._later_readers(root, frozenset({unit})))
        reads = [n for n in self.operation.inputs if n in self.graph.values and self.graph.root(n) == root]
        if reads and own is not None:
            nbytes = min(nbytes, *(self.graph.values[name].copy_bytes for name in reads))
            sets.append(frozenset({own}))
        smallest = [s for s in dict.fromkeys(sets) if not any(other < s for other in sets)]
        return Held(spec.allocated(nbytes), tuple(smallest)) if smallest else None

    def _later_readers(self, name: str, makers: frozenset[int]) -> Iterator[frozenset[int]]:
        """Units that keep a value there: who makes it and its views, and a reader yet to come."""
        for reader in self.graph.consumers.get(name, ()):
            unit = self.shares.unit_of.get(reader)
            if unit is None:
                continue
            if self.index[reader] > self.now:
                yield makers | {unit}
            for output in self.graph.operations[reader].outputs:
                if self.graph.values[output].alias_of == name:
                    yield from self._later_readers(output, makers | {unit})
