"""GPU memory that CUDA and PyTorch take in addition to the tensors of a plan.

The CUDA context exists before anything is placed, so the driver's free bytes exclude it. They include what
is taken later: streams, the code of kernels, which the driver loads when they first run, and the workspaces
of cuBLAS, which PyTorch allocates at the first matrix product of a thread on a stream, and keeps. The
backward pass of a result on the GPU runs in autograd's own thread.
"""

from __future__ import annotations

import os
import re

import torch

_DRIVER = 448 << 20
"""Bytes that the driver takes once its context exists: 416 MiB on an H200 with CUDA 13 for products in
three dtypes, convolutions, attention, an LSTM, a decomposition, and steps of BERT and of ResNet-50."""

_HOPPER, _OTHERS = 4096 * 8 << 10, (4096 * 2 + 16 * 8) << 10  # bytes of PyTorch's default workspace


def unavailable_bytes(index: int, memory: int, threads: int = 1) -> int:
    """Return the bytes of a budget that a plan cannot use on GPU ``index`` of this machine.

    They are the bytes beyond what is free (the context, other processes), what the driver will still take,
    and the workspaces of each of the ``threads`` that run the plan.
    """
    free, _ = torch.cuda.mem_get_info(index)
    cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    return max(0, memory - max(0, free + cached - _DRIVER)) + threads * _workspace(index)


def _workspace(index: int) -> int:
    """Return the bytes of the workspaces of cuBLAS and cuBLASLt on one stream."""
    cublas_bytes = getattr(torch.backends.cuda, "cublas_workspace_size", None)  # since torch 2.13
    if cublas_bytes is not None:
        separate = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "0"
        with torch.cuda.device(index):
            return int(cublas_bytes() + (torch.backends.cuda.cublaslt_workspace_size() if separate else 0))
    lt_setting = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    lt_bytes = (int(lt_setting) if lt_setting.isdigit() else 1024) << 10
    if pairs := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):
        return (sum(int(size) * int(count) for size, count in pairs) << 10) + lt_bytes
    return (_HOPPER if torch.cuda.get_device_capability(index)[0] == 9 else _OTHERS) + lt_bytes
