"""Workspaces of operations on CUDA GPUs, measured if the GPU is in this machine.

Kernels and the libraries behind them allocate memory that no fake tensor shows: the algorithm that cuDNN
chooses for a convolution may take a hundred times its input, a sum may need a buffer for partial sums. So
each distinct operation runs once, on zeros. The allocator tells what each kernel allocates.
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
        topology: devices of the plan.
        placed: weights that an earlier plan has put on them.
    """

    def __init__(self, topology: Topology, placed: Iterable[torch.Tensor] = ()) -> None:
        self._room: dict[torch.device, int] = {}
        self._before: dict[torch.device, int] = {}
        kinds = set()
        for spec in topology.devices:
            card = spec.torch_device
            if not _is_here(card) or not spec.room or torch.cuda.get_device_name(card) in kinds:
                continue
            try:
                _warm(card)
            except RuntimeError as error:  # no memory, or no kernels for these dtypes
                warn(f"nothing could be measured on device {spec.key!r} ({first_line(error)}). {_UNKNOWN}")
                continue
            kinds.add(torch.cuda.get_device_name(card))
            ours = sum(tensor.nbytes for tensor in placed if tensor.device == card)
            self._room[card], self._before[card] = spec.room, torch.cuda.memory_allocated(card) - ours

    def workspace(self, target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec, results: int) -> int:
        """Return the most bytes that an operation allocates beyond its results, on any of the GPUs.

        Args:
            target: the operation; only those of ``_MEASURED`` and attention are run.
            leaves: its arguments, flat, tensors as
                :class:`~graphplan.passes.frontend.tensor_meta.TensorMeta`.
            spec: their structure.
            results: bytes of its results.

        Returns:
            0 without a GPU, and if the rest of the memory budget cannot hold its arguments and results.
        """
        measurable = isinstance(target, torch._ops.OpOverload) and target.namespace in _MEASURED
        if not measurable and target not in ATTENTION:
            return 0
        if any(word in str(target) for word in _CHECKS):
            return 0
        need = results + sum(round_up(leaf.copy_bytes) for leaf in leaves if isinstance(leaf, TensorMeta))
        cards = [card for card in self._room if need <= self._left(card)]
        return max((_measure(card, target, leaves, spec) for card in cards), default=0)

    def _left(self, card: torch.device) -> int:
        """Return the bytes of the memory budget that are unallocated, as far as the GPU has them free."""
        placed = torch.cuda.memory_allocated(card) - self._before[card]
        cached = torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card)
        free, _ = torch.cuda.mem_get_info(card)
        return int(min(self._room[card] - placed, free + cached))


def _is_here(device: torch.device) -> bool:
    here = (
        device.type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()
    )
    return here and (device.index or 0) < torch.cuda.device_count()


def _warm(card: torch.device) -> None:
    """Let libraries allocate the workspaces that they keep: these count as used by the GPU itself."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.zeros(64, 64, device=card, dtype=dtype)
        torch.nn.functional.linear(square, square @ square, square[0])


def _measure(card: torch.device, target: Any, leaves: Sequence[Any], spec: pytree.TreeSpec) -> int:
    try:
        # measuring does not change the caller's random numbers
        with torch.no_grad(), torch.random.fork_rng([card.index], device_type=card.type), unwarned():
            args, kwargs = pytree.tree_unflatten([_zeros(leaf, card) for leaf in leaves], spec)
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            with _Kernels(card, tensors) as kernels:
                out = ATTENTION.get(target, target)(*args, **kwargs)
    except torch.OutOfMemoryError:
        warn(f"{target} could not be measured on {card}: no memory is free there. {_UNKNOWN}")
        return 0
    except Exception as error:  # no such kernel, which a run reports by itself, or zeros are invalid
        logger.info("%s was not measured on %s: %s", target, card, first_line(error))
        return 0
    results = LiveStorages(tensors)
    results.count(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
    return round_up(max(0, kernels.peak - results.peak))


def _zeros(leaf: Any, card: torch.device) -> Any:
    tensor = stand_in(leaf, card)
    return tensor.zero_() if isinstance(tensor, torch.Tensor) else tensor


class _Kernels(TorchDispatchMode):
    """Tracks the most bytes alive at once beyond the arguments, each kernel's own allocations included.

    These all count as alive at once: their peak could only be read after a reset of the caller's statistics.
    """

    def __init__(self, card: torch.device, arguments: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._card, self._live = card, LiveStorages(arguments)
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._live.count(())
        alive, before = self._live.alive, self._allocated()
        out = func(*args, **(kwargs or {}))
        allocated = self._allocated() - before
        self._live.count(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, self._live.alive, alive + allocated)
        return out

    def _allocated(self) -> int:
        """Return the bytes allocated so far; of large blocks the request, as they may get 1 MiB more."""
        stats = torch.cuda.memory_stats(self._card)
        return int(
            stats["allocated_bytes.small_pool.allocated"] + stats["requested_bytes.large_pool.allocated"]
        )
