"""Workspaces of operations on CUDA GPUs, measured if the GPU is in this machine.

Kernels and the libraries behind them allocate memory that no fake tensor shows: the algorithm that cuDNN
chooses for a convolution may take a hundred times its input, a sum may need a buffer for partial sums. So
each distinct operation runs once, on zeros. The allocator reports the bytes that each kernel allocates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphplan.capture.attention import RUNS as ATTENTION
from graphplan.devices.topology import Topology, round_up
from graphplan.ir.liveness import LiveStorages
from graphplan.message_text import first_line
from graphplan.passes.frontend.tensor_meta import TensorMeta, stand_in
from graphplan.warnings import unwarned, warn

_MEASURED = ("aten", "bitsandbytes")
"""Namespaces of operations that allocate as much for zeros as for other values."""

_CHECKS = ("assert", "multinomial", "binomial", "poisson")
"""Parts of the names of operations that may fail on zeros; this process could not use the GPU after that."""

_UNKNOWN = "Kernel workspaces there are estimated with fake tensors, which may be too low: give a reserve"

logger = logging.getLogger("graphplan")


class KernelBench:
    """Measures operations on the GPUs of a plan that are in this machine.

    Args:
        topology: the devices of the plan.
        placed: weights that an earlier plan has put on them.
    """

    def __init__(self, topology: Topology, placed: Iterable[torch.Tensor] = ()) -> None:
        self._room: dict[torch.device, int] = {}
        self._baseline: dict[torch.device, int] = {}
        names = set()
        for spec in topology.devices:
            gpu = spec.torch_device
            if not _is_here(gpu) or not spec.room or torch.cuda.get_device_name(gpu) in names:
                continue
            try:
                _warm(gpu)
            except RuntimeError as error:  # no memory, or no kernels for these dtypes
                warn(f"nothing could be measured on device {spec.key!r} ({first_line(error)}). {_UNKNOWN}")
                continue
            names.add(torch.cuda.get_device_name(gpu))
            placed_bytes = sum(tensor.nbytes for tensor in placed if tensor.device == gpu)
            self._room[gpu], self._baseline[gpu] = spec.room, torch.cuda.memory_allocated(gpu) - placed_bytes

    def workspace(self, target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, results: int) -> int:
        """Return the most bytes that an operation allocates beyond its results, on any of the GPUs.

        Args:
            target: the operation; only those of ``_MEASURED`` and attention are run.
            leaves: its arguments, flat, tensors as
                :class:`~graphplan.passes.frontend.tensor_meta.TensorMeta`.
            spec: their structure.
            results: bytes of its results.

        Returns:
            0 without a GPU, and if the remaining memory budget cannot hold its arguments and results.
        """
        measurable = isinstance(target, torch._ops.OpOverload) and target.namespace in _MEASURED
        if not measurable and target not in ATTENTION:
            return 0
        if any(word in str(target) for word in _CHECKS):
            return 0
        need = results + sum(round_up(leaf.copy_bytes) for leaf in leaves if isinstance(leaf, TensorMeta))
        gpus = [gpu for gpu in self._room if need <= self._left(gpu)]
        return max((_measure(gpu, target, leaves, spec) for gpu in gpus), default=0)

    def _left(self, gpu: torch.device) -> int:
        """Return the bytes of the memory budget that are unallocated, as far as the GPU has them free."""
        placed = torch.cuda.memory_allocated(gpu) - self._baseline[gpu]
        cached = torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
        free, _ = torch.cuda.mem_get_info(gpu)
        return int(min(self._room[gpu] - placed, free + cached))


def _is_here(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return False
    return (device.index or 0) < torch.cuda.device_count()


def _warm(gpu: torch.device) -> None:
    """Let libraries allocate the workspaces that they keep: these count as used by the GPU itself."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.zeros(64, 64, device=gpu, dtype=dtype)
        torch.nn.functional.linear(square, square @ square, square[0])


def _measure(gpu: torch.device, target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec) -> int:
    try:
        # measuring does not change the caller's random numbers
        with torch.no_grad(), torch.random.fork_rng([gpu.index], device_type=gpu.type), unwarned():
            args, kwargs = pytree.tree_unflatten([_zeros(leaf, gpu) for leaf in leaves], spec)
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            with _Kernels(gpu, tensors) as kernels:
                out = ATTENTION.get(target, target)(*args, **kwargs)
    except torch.OutOfMemoryError:
        warn(f"{target} could not be measured on {gpu}: no memory is free there. {_UNKNOWN}")
        return 0
    except Exception as error:  # no such kernel, which a run reports, or zeros are invalid
        logger.info("%s was not measured on %s: %s", target, gpu, first_line(error))
        return 0
    results = LiveStorages(tensors)
    results.count(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
    return round_up(max(0, kernels.peak - results.peak))


def _zeros(leaf: Any, gpu: torch.device) -> Any:
    tensor = stand_in(leaf, gpu)
    return tensor.zero_() if isinstance(tensor, torch.Tensor) else tensor


class _Kernels(TorchDispatchMode):
    """Tracks the most bytes alive at once beyond the arguments, each kernel's own allocations included.

    These all count as alive at once: their peak could only be read after a reset of the caller's statistics.
    """

    def __init__(self, gpu: torch.device, arguments: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._gpu, self._live = gpu, LiveStorages(arguments)
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._live.count(())
        alive, earlier = self._live.alive, self._allocated()
        out = func(*args, **(kwargs or {}))
        allocated = self._allocated() - earlier
        self._live.count(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, self._live.alive, alive + allocated)
        return out

    def _allocated(self) -> int:
        """Return the bytes allocated so far; of large blocks the request, as they may get 1 MiB more."""
        stats = torch.cuda.memory_stats(self._gpu)
        return int(
            stats["allocated_bytes.small_pool.allocated"] + stats["requested_bytes.large_pool.allocated"]
        )
