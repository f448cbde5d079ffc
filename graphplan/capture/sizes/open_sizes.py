"""The sizes that are symbols of a trace, where its graph is traced again: with its gradients, say.

What the second trace takes for granted of them becomes a guard. Sizes of 0 and 1, which broadcast or leave
nothing to compute with, are numbers in it, as those of other calls are not::

    x: (b, n), traced with (3, 1)        x: (b, 1)        where b > 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphplan._compat.symbolic_sizes import conditions_since
from graphplan.capture.captured_graph import Capture
from graphplan.capture.signature import Guard
from graphplan.capture.sizes.dynamic_axes import all_of
from graphplan.capture.sizes.dynamic_sizes import exact_size, values_of


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """Sizes of the leaves of a call that are symbols.

    Attributes:
        env: the tracer's own knowledge of them.
        known: how many conditions the first trace has.
        small: symbol -> its value in the example, where that is 0 or 1.
        texts: symbol -> how people write it: ``"input_ids.shape[0]"``.
        codes: symbol -> how a guard does: ``"v[0].size()[0]"``.
    """

    env: ShapeEnv
    known: int
    small: dict[Any, int]
    texts: dict[Any, str]
    codes: dict[Any, str]

    def settled(self, size: Any) -> Any:
        """A size, in which small ones are numbers."""
        if not isinstance(size, torch.SymInt) or size.node.expr.free_symbols.isdisjoint(self.small):
            return size
        known = exact_size(size, self.small)
        if known is not None:
            return known
        return self.env.create_symintnode(size.node.expr.xreplace(self.small), hint=size.node.hint)

    def guards(self) -> tuple[Guard, ...]:
        """What has been taken for granted since.

        Raises:
            NoGraphError: something of a size that no leaf has.
        """
        return all_of(*(conditions_since(self.env, self.known, each) for each in (self.texts, self.codes)))


def open_sizes(capture: Capture) -> OpenSizes | None:
    """Those of a capture; None where all sizes are numbers."""
    found = [one for one in _sizes(capture) if _is_open(one[0])]
    if not found:
        return None
    env = found[0][0].node.shape_env
    texts, codes = dict[Any, str](), dict[Any, str]()
    for size, text, code in found:
        texts.setdefault(size.node.expr, text)
        codes.setdefault(size.node.expr, code)
    shapes = [value.shape for value in values_of(capture.graph).values() if isinstance(value, torch.Tensor)]
    sizes: list[Any] = [one for shape in shapes for one in shape if isinstance(one, torch.SymInt)]
    small = {n.node.expr: n.node.hint for n in sizes if n.node.expr.is_symbol and n.node.hint < 2}
    return OpenSizes(env, len(env.guards), small, texts, codes)


def _is_open(size: Any) -> bool:
    """Whether a size has symbols: not where the trace has turned them into numbers."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _sizes(capture: Capture) -> Iterator[tuple[Any, str, str]]:
    """Sizes of the tensors that are leaves, and numbers that are: with the text and the code of each."""
    values, names = values_of(capture.graph), capture.signature.names
    for name, index in zip(capture.inputs, capture.order, strict=True):
        if index is None:
            continue
        value, text, code = values[name], names[index], f"v[{index}]"
        if isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                yield size, f"{text}.shape[{axis}]", f"{code}.size()[{axis}]"
        else:
            yield value, text, code
