"""What CUDA and PyTorch take on a card beside the tensors of a plan.

The context is there before anything is placed, so it is not among the bytes that the driver calls free. What
the driver takes later is: streams, and the code of kernels, which it loads when they first run. So are the
workspaces of cuBLAS: PyTorch allocates them at the first matrix products of a thread on a stream, and keeps
them. The backward pass of a result that is on the card runs in a thread of autograd.
"""

from __future__ import annotations

import os
import re

import torch

_DRIVER = 448 << 20
"""Bytes that the driver takes after its context is there: 416 MiB on an H200 with CUDA 13 for products in
three types, convolutions, attention, an LSTM, a decomposition, and steps of BERT and of ResNet-50."""

_HOPPER, _OTHERS = 4096 * 8 << 10, (4096 * 2 + 16 * 8) << 10  # bytes of PyTorch's own choice


def taken_beside(index: int, memory: int, threads: int = 1) -> int:
    """The bytes of a budget that no tensor of a plan can have, on a card that is here.

    What goes beyond the bytes that are free, the context and other processes have; of those that are
    free, the driver will take some. Each of the ``threads`` that run the plan has workspaces of its own.
    """
    free, _ = torch.cuda.mem_get_info(index)
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return max(0, memory - max(0, free + cached - _DRIVER)) + threads * _workspace(index)


def _workspace(index: int) -> int:
    """Bytes of the workspaces of cuBLAS and of cuBLASLt on one stream."""
    chosen = getattr(torch.backends.cuda, "cublas_workspace_size", None)  # torch 2.13 says it
    if chosen is not None:
        apart = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "0"
        with torch.cuda.device(index):
            return int(chosen() + (torch.backends.cuda.cublaslt_workspace_size() if apart else 0))
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    lt = (int(given) if given.isdigit() else 1024) << 10
    if pairs := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):
        return (sum(int(size) * int(count) for size, count in pairs) << 10) + lt
    return (_HOPPER if torch.cuda.get_device_capability(index)[0] == 9 else _OTHERS) + lt
