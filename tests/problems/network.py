"""A torch-free dataflow graph, written operation by operation.

Sizes are bytes of bfloat16. An operation reads its weights and writes its output once, and reads as
much as it writes, unless said otherwise. Names are those of a module tree, so that what places
modules can be compared; a module whose name is a number (``layers.3``) is a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphplan.ir.graph import Graph
from graphplan.ir.graph_elements import Operation, Value, Weight

ELEMENT = 2  # bytes of a bfloat16
ID = 8  # bytes of a token's id


@dataclass(slots=True)
class Network:
    """A graph while it is written."""

    operations: dict[str, Operation] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)

    def input(self, name: str, nbytes: int) -> str:
        """The caller's inputs."""
        self.values[name] = Value(name, nbytes, nbytes)
        self.inputs.append(name)
        return name

    def add(
        self,
        path: str,
        target: str,
        inputs: Sequence[str],
        out: int,
        *,
        weights: Mapping[str, int] | None = None,
        tied: str = "",
        flops: float = 0,
        accessed: int | None = None,
    ) -> str:
        """Write an operation of the module at ``path``, and return the name of what it makes.

        Args:
            path: the module.
            target: what it calls.
            inputs: values.
            out: bytes of what it makes.
            weights: name within the module -> bytes.
            tied: a weight of another module that it reads too.
            flops: floating-point operations.
            accessed: bytes read and written; by default its weights and twice what it makes.
        """
        read = self._weights(path, weights or {})
        if tied:
            self.tie(tied, f"{path}.weight")
            read.append(tied)
        name = path if read else f"{path}.{target}"
        if name in self.operations:
            name = f"{name}.{len(self.operations)}"
        if accessed is None:
            accessed = sum(self.weights[w].nbytes for w in read) + 2 * out
        self.values[name] = Value(name, out, out)
        reads = tuple(dict.fromkeys([*inputs, *read]))
        self.operations[name] = Operation(
            name, target, reads, (name,), (), int(flops), int(accessed), {}, path
        )
        return name

    def _weights(self, path: str, sizes: Mapping[str, int]) -> list[str]:
        names = [f"{path}.{leaf}" for leaf in sizes]
        for name, nbytes in zip(names, sizes.values(), strict=True):
            self.weights[name] = Weight(name, nbytes, (name,))
        return names

    def tie(self, weight: str, name: str) -> None:
        """Add another name of a weight."""
        known = self.weights[weight]
        self.weights[weight] = Weight(weight, known.nbytes, (*known.names, name))

    def linear(self, path: str, x: str, rows: int, wide: int, high: int) -> str:
        """``rows`` rows of ``wide`` to ``rows`` rows of ``high``."""
        return self.add(
            path,
            "linear",
            [x],
            rows * high * ELEMENT,
            weights={"weight": wide * high * ELEMENT},
            flops=2 * rows * wide * high,
        )

    def norm(self, path: str, x: str, rows: int, wide: int) -> str:
        """A norm over rows."""
        return self.add(path, "norm", [x], rows * wide * ELEMENT, weights={"weight": wide * ELEMENT})

    def embedding(self, path: str, ids: str, rows: int, vocabulary: int, wide: int, tied: str = "") -> str:
        """Rows looked up in a table, of which only they are read."""
        out = rows * wide * ELEMENT
        own = {} if tied else {"weight": vocabulary * wide * ELEMENT}
        return self.add(path, "embedding", [ids], out, weights=own, tied=tied, accessed=2 * out)

    def head(self, x: str, rows: int, wide: int, vocabulary: int, tied: str = "") -> str:
        """Scores of the vocabulary for ``rows`` positions."""
        own = {} if tied else {"weight": vocabulary * wide * ELEMENT}
        flops = 2 * rows * wide * vocabulary
        out = rows * vocabulary * ELEMENT
        return self.add("lm_head", "linear", [x], out, weights=own, tied=tied, flops=flops)

    def graph(self, outputs: Sequence[str]) -> Graph:
        """The graph that was written."""
        parts = (self.operations.values(), self.values.values(), self.weights.values())
        return Graph(*parts, self.inputs, list(outputs))
