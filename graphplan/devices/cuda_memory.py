"""What CUDA and PyTorch take on a card beside the tensors of a plan.

The context is there before anything is placed, so it is not among the bytes that the driver calls free. The
workspace of cuBLAS is: PyTorch allocates it at the first matrix product of a thread on a stream, and keeps
it. That of cuDNN is not: PyTorch takes an algorithm with a smaller one where there is no room.
"""

from __future__ import annotations

import os
import re

import torch

_HOPPER, _OTHERS = 4096 * 8 << 10, (4096 * 2 + 16 * 8) << 10  # bytes of PyTorch's own choice


def taken_beside(index: int, memory: int) -> int:
    """The bytes of a budget that no tensor of a plan can have, on a card that is here.

    What goes beyond the bytes that are free, the context and other processes have.
    """
    free, _ = torch.cuda.mem_get_info(index)
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return max(0, memory - free - cached) + _workspace(index)


def _workspace(index: int) -> int:
    """Bytes of the workspace of cuBLAS on one stream."""
    chosen = getattr(torch.backends.cuda, "cublas_workspace_size", None)  # torch 2.13 says it
    if chosen is not None:
        with torch.cuda.device(index):
            return int(chosen())
    if pairs := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):
        return sum(int(size) * int(count) for size, count in pairs) << 10
    return _HOPPER if torch.cuda.get_device_capability(index)[0] == 9 else _OTHERS
