"""The weights of a graph: the model's, parts of them, constants of the trace, tensors of caches."""

from __future__ import annotations

from dataclasses import replace

import torch

from graphplan.capture.captured_graph import Part
from graphplan.capture.model.model_weights import ModelWeights, is_wrapper, tensor_bytes
from graphplan.devices.topology import round_up
from graphplan.ir.graph_elements import Weight
from graphplan.passes.frontend.tensor_meta import TensorMeta, dtype_name


def weight_of(model: ModelWeights, name: str, *, written: bool) -> Weight:
    """A parameter or buffer.

    Args:
        model: whose it is.
        name: its first name.
        written: whether a call writes to it.
    """
    tensor, names = model.tensors[name], tuple(model.names[name])
    return Weight(
        name,
        _weight_bytes(tensor),
        names,
        "parameter" if name in model.parameters else "buffer",
        any(n in model.persistent for n in names),
        written,
        not is_wrapper(tensor) and tensor.layout is torch.strided,
        tuple(tensor.shape),
        dtype_name(tensor.dtype),
    )


def part_weight(whole: Weight, part: Part) -> Weight:
    """Some rows of a weight, as a weight."""
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


def constant_weight(name: str, tensor: torch.Tensor, written: bool) -> Weight:
    """A tensor that the trace lifted out of the code."""
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    return Weight(name, tensor_bytes(tensor), (name,), "constant", False, written, True, shape, dtype)


def cache_weight(name: str, described: TensorMeta, nbytes: int, written: bool) -> Weight:
    """A tensor of a cache: what reads it runs where it is."""
    dtype = dtype_name(described.dtype)
    return Weight(name, nbytes, (name,), "cache", False, written, False, described.shape, dtype)


def _weight_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a weight; what a wrapper wraps is allocated tensor by tensor."""
    if not is_wrapper(tensor):
        return tensor_bytes(tensor)
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # a protocol of torch's
    return sum(round_up(_weight_bytes(getattr(tensor, name))) for name in names)
