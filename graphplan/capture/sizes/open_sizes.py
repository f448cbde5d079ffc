"""The symbolic sizes of a trace whose graph is retraced, as for its gradients.

The conditions that the second trace adds become a guard. Sizes that are 0 or 1 in the example, which
broadcast or make tensors empty, are constants in the second trace::

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
    """The symbolic sizes of the leaves of a call.

    Attributes:
        env: the tracer's shape environment.
        condition_count: the number of conditions of the first trace.
        small: symbol -> value in the example, if that is 0 or 1.
        texts: symbol -> text for messages, such as ``"input_ids.shape[0]"``.
        codes: symbol -> code in a guard, such as ``"v[0].size()[0]"``.
    """

    env: ShapeEnv
    condition_count: int
    small: dict[Any, int]
    texts: dict[Any, str]
    codes: dict[Any, str]

    def with_small_values(self, size: Any) -> Any:
        """Return a size with the values of the small symbols put in."""
        if not isinstance(size, torch.SymInt) or size.node.expr.free_symbols.isdisjoint(self.small):
            return size
        value = exact_size(size, self.small)
        if value is not None:
            return value
        return self.env.create_symintnode(size.node.expr.xreplace(self.small), hint=size.node.hint)

    def guards(self) -> tuple[Guard, ...]:
        """Return the conditions added since the first trace as a guard.

        Raises:
            NoGraphError: a condition is on a size that no leaf has.
        """
        return all_of(
            *(conditions_since(self.env, self.condition_count, names) for names in (self.texts, self.codes))
        )


def open_sizes(capture: Capture) -> OpenSizes | None:
    """Return the symbolic sizes of a capture; None if all sizes are constants."""
    symbolic = [one for one in _sizes(capture) if _is_symbolic(one[0])]
    if not symbolic:
        return None
    env = symbolic[0][0].node.shape_env
    texts, codes = dict[Any, str](), dict[Any, str]()
    for size, text, code in symbolic:
        texts.setdefault(size.node.expr, text)
        codes.setdefault(size.node.expr, code)
    shapes = [value.shape for value in values_of(capture.graph).values() if isinstance(value, torch.Tensor)]
    sizes: list[Any] = [one for shape in shapes for one in shape if isinstance(one, torch.SymInt)]
    small = {n.node.expr: n.node.hint for n in sizes if n.node.expr.is_symbol and n.node.hint < 2}
    return OpenSizes(env, len(env.guards), small, texts, codes)


def _is_symbolic(size: Any) -> bool:
    """Whether a size has symbols that the trace has not fixed since."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def _sizes(capture: Capture) -> Iterator[tuple[Any, str, str]]:
    """Yield each size of a tensor leaf, and each number leaf, with its text and its code."""
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
