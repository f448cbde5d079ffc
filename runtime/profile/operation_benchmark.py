"""Operations of common models, at typical sizes, for timing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

MOST_BYTES = 32 << 20
"""The most bytes of a case, copies of its inputs included; cases of uncached weights take more."""
_UNCACHED = 128 << 20  # bytes of a weight that is larger than caches


@dataclass(frozen=True, slots=True)
class Case:
    """One operation to time.

    Attributes:
        type: operation type, as :attr:`graphplan.Operation.type`.
        work: function that runs it once.
        flops: floating-point operations.
        bytes_accessed: bytes that it reads and writes.
    """

    type: str
    work: Callable[[], torch.Tensor]
    flops: int
    bytes_accessed: int


def operation_cases(device: torch.device, dtype: torch.dtype, room: int = MOST_BYTES) -> Iterator[Case]:
    """Yield the operations; the tensors of each are allocated when its turn comes.

    Args:
        device: device on which they run.
        dtype: dtype of the tensors.
        room: bytes that may be used, at least :data:`MOST_BYTES`.
    """

    def make(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, dtype=dtype) + 0.5

    rows, image = make(256, 1024), make(1, 96, 56, 56)
    for name, function in _OF_ONE.items():
        yield _case(name, function, rows)
    for name, binary in _OF_TWO.items():
        yield _case(name, binary, rows, make(256, 1024))
    for name, function in _OF_IMAGES.items():
        yield _case(name, function, image)
    yield _case("linear", functional.linear, make(128, 768), make(3072, 768))
    # weights are read once per forward pass, and so are in no cache
    weight = torch.ones(
        min(room // 2, _UNCACHED) // (4096 * dtype.itemsize), 4096, device=device, dtype=dtype
    )
    yield _case("linear", functional.linear, make(1, 4096), weight)
    yield _case("addmm", torch.addmm, make(4096), make(1, len(weight)), weight)
    del weight
    yield _case("addmm", torch.addmm, make(768), make(128, 768), make(768, 768))
    for name in ("matmul", "bmm"):
        yield _case(name, getattr(torch, name), make(12, 128, 64), make(12, 64, 128))
    heads = (make(1, 12, 256, 64) for _ in range(3))
    yield _case("scaled_dot_product_attention", functional.scaled_dot_product_attention, *heads)
    yield _case("conv2d", partial(functional.conv2d, padding=1), make(1, 64, 56, 56), make(64, 64, 3, 3))
    yield _case("conv2d", functional.conv2d, make(1, 256, 28, 28), make(128, 256, 1, 1))
    # a late layer: much of the time goes to weights, which kernels reorder at each call
    yield _case("conv2d", partial(functional.conv2d, padding=1), make(1, 512, 7, 7), make(512, 512, 3, 3))
    for tensor in (image, make(1, 384, 14, 14)):
        channels = tensor.shape[1]
        depthwise = partial(functional.conv2d, padding=1, groups=channels)
        yield _case("conv2d", depthwise, tensor, make(channels, 1, 3, 3))
    for mode in ("bilinear", "nearest"):
        enlarged = partial(functional.interpolate, scale_factor=2, mode=mode)
        yield _case(f"upsample_{mode}2d", enlarged, make(1, 256, 32, 32))
    yield _case("conv_transpose2d", partial(functional.conv_transpose2d, stride=2), image, make(96, 48, 2, 2))
    yield _case("conv1d", partial(functional.conv1d, padding=1), make(1, 384, 512), make(384, 384, 3))
    yield _case("batch_norm", functional.batch_norm, image, make(96), make(96))
    rows_of = {"embedding": functional.embedding, "index_select": lambda i, table: table.index_select(0, i)}
    for name, indexed in rows_of.items():
        index = torch.randint(0, 4096, (256,), device=device)
        gathered = _case(name, indexed, index, make(4096, 1024))
        yield Case(name, gathered.work, 0, 2 * 256 * 1024 * dtype.itemsize)


def _case(name: str, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Case:
    with FlopCounterMode(display=False) as counter:
        result = function(*tensors)
    flops = counter.get_total_flops()
    if name == "scaled_dot_product_attention":  # the counter does not support the CPU's kernel
        flops = 4 * tensors[0].numel() * tensors[1].shape[-2]
    read = sum(tensor.nbytes for tensor in tensors)
    # copies, so that no run finds its inputs in the L1 cache, as in a model
    copies = (MOST_BYTES - 2 * result.nbytes) // max(read, 1) - 1
    inputs = cycle([tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(copies))])
    return Case(name, lambda: function(*next(inputs)), flops, read + result.nbytes)


_OF_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(functional, name) for name in ("gelu", "hardtanh", "relu", "silu")},
    **{
        name: getattr(torch, name)
        for name in ["cos", "exp", "neg", "relu", "rsqrt", "sigmoid", "sin", "tanh"]
    },
    "pow": lambda x: x.pow(2),
    "contiguous": lambda x: x.t().contiguous(),
    "clone": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "reshape": lambda x: x.t().reshape(-1),
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1),
    "layer_norm": lambda x: functional.layer_norm(x, (1024,)),
    "group_norm": lambda x: functional.group_norm(x, 8),
    "roll": lambda x: x.roll(3, 0),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "cumsum": lambda x: x.cumsum(-1),
}
_OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "div", "mul", "sub")},
    "cat": lambda a, b: torch.cat([a, b], -1),
}
_OF_IMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max_pool2d": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 2),
    "pad": lambda x: functional.pad(x, (1, 1, 1, 1)),
}
