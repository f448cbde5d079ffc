"""The weights of a graph: the model's, row ranges of them, constants of the trace, tensors of caches."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphplan.capture.captured_graph import Part
from graphplan.capture.model.model_weights import ModelWeights, inner_tensors, is_wrapper, tensor_bytes
from graphplan.devices.topology import round_up
from graphplan.ir.graph_elements import Weight
from graphplan.passes.frontend.tensor_meta import TensorMeta, dtype_name


def weight_of(model: ModelWeights, name: str, *, written: bool) -> Weight:
    """Return a parameter or buffer as a weight of the graph.

    Args:
        model: the model's weights.
        name: its first name.
        written: whether a forward pass writes to it.
    """
    tensor, names = model.tensors[name], tuple(model.names[name])
    nbytes = tensor_bytes(tensor)
    if is_wrapper(tensor):  # each inner tensor is an allocation
        nbytes = sum(round_up(tensor_bytes(part)) for part in inner_tensors(tensor))
    return Weight(
        name,
        nbytes,
        names,
        kind="parameter" if name in model.parameters else "buffer",
        persistent=any(n in model.persistent for n in names),
        mutated=written,
        movable=not is_wrapper(tensor) and tensor.layout is torch.strided,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
    )


def part_weight(whole: Weight, part: Part) -> Weight:
    """Return some rows of a weight as a weight."""
    rows = part.stop - part.start
    return replace(
        whole,
        name=part.name,
        nbytes=whole.nbytes // whole.shape[0] * rows,
        names=(part.name,),
        kind="part",
        persistent=False,
        shape=(rows, *whole.shape[1:]),
        part_of=whole.name,
        start=part.start,
    )


def constant_weight(name: str, tensor: torch.Tensor, *, written: bool) -> Weight:
    """Return a tensor that the trace lifted out of the code as a weight."""
    return Weight(
        name,
        tensor_bytes(tensor),
        (name,),
        kind="constant",
        persistent=False,
        mutated=written,
        movable=True,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
    )


def cache_weight(name: str, described: TensorMeta, nbytes: int, *, written: bool) -> Weight:
    """Return a tensor of a cache as a weight that is not movable: its readers run where it resides."""
    return Weight(
        name,
        nbytes,
        (name,),
        kind="cache",
        persistent=False,
        mutated=written,
        movable=False,
        shape=described.shape,
        dtype=dtype_name(described.dtype),
    )
