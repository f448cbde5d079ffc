"""The output values of an operation: their bytes, and the storages that they are views of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from graphplan.devices.topology import round_up
from graphplan.ir.graph_elements import Value
from graphplan.passes.frontend.fake_operation import Effect, OperationResult
from graphplan.passes.frontend.fx_nodes import argument_nodes, is_tensor_node
from graphplan.passes.frontend.tensor_meta import TensorMeta, dtype_name

Names = Mapping[fx.Node, str]


def values_of(node: fx.Node, parts: Sequence[fx.Node], effect: Effect, names: Names) -> list[Value]:
    """Return the output values of a measured operation.

    Args:
        node: the operation.
        parts: the nodes that take one of its several results.
        effect: of the operation, as measured.
        names: node -> name of the value or weight, for all nodes before it.
    """
    arguments = [names[n] for n in argument_nodes(node) if is_tensor_node(n) and n in names]
    if parts:
        return _taken_values(parts, effect, arguments)
    if isinstance(effect.value, TensorMeta):
        return [_result_value(node.name, effect.results[0], arguments, {})]
    if not effect.results:
        return [Value(node.name, is_tensor=False)]
    total = sum(round_up(result.nbytes) for result in effect.results)  # each is an allocation
    return [Value(node.name, total, sum(result.tensor.copy_bytes for result in effect.results))]


def unnamed_bytes(parts: Sequence[fx.Node], effect: Effect) -> int:
    """Return the bytes of results that no node takes out: they are freed with the operation."""
    if not parts:
        return 0
    index_of = _result_index(effect.value)
    taken = {index_of.get(part.args[1]) for part in parts}
    return sum(round_up(result.nbytes) for i, result in enumerate(effect.results) if i not in taken)


def value_of(name: str, described: Any, nbytes: int, base: str | None = None) -> Value:
    """Return the value of a tensor, or of another result."""
    if isinstance(described, TensorMeta):
        dtype = dtype_name(described.dtype)
        return Value(name, nbytes, described.copy_bytes, base, True, described.shape, dtype)
    return Value(name, nbytes, 0, base)


def _taken_values(parts: Sequence[fx.Node], effect: Effect, arguments: Sequence[str]) -> list[Value]:
    index_of = _result_index(effect.value)
    owners = {index_of[p.args[1]]: p.name for p in reversed(parts) if p.args[1] in index_of}
    values: list[Value] = []
    for part in parts:
        index = index_of.get(part.args[1])
        if index is None:
            values.append(Value(part.name, is_tensor=False))
        elif owners[index] != part.name:  # the same result taken out twice
            values.append(value_of(part.name, effect.results[index].tensor, 0, owners[index]))
        else:
            values.append(_result_value(part.name, effect.results[index], arguments, owners))
    return values


def _result_value(
    name: str, result: OperationResult, arguments: Sequence[str], owners: Mapping[int, str]
) -> Value:
    base, nbytes = None, result.nbytes
    if 0 <= result.argument < len(arguments):
        base = arguments[result.argument]
    elif result.sibling >= 0:
        base = owners.get(result.sibling)
        nbytes = 0 if base is not None else result.tensor.copy_bytes
    return value_of(name, result.tensor, nbytes, base)


def _result_index(value: Any) -> dict[Any, int]:
    """Return position in a list of results -> index among its tensors."""
    index_of: dict[Any, int] = {}
    if isinstance(value, list | tuple):
        for position, item in enumerate(value):
            if isinstance(item, TensorMeta):
                index_of[position] = len(index_of)
    return index_of
