"""Bytes of the storages that operations make, while they live."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphplan.devices.topology import round_up


class LiveStorages:
    """Counts storages that are not known before.

    Args:
        known: tensors whose storages do not count.

    Attributes:
        peak: the most bytes that were alive after any operation.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(self, results: Iterable[torch.Tensor]) -> None:
        """Take in what an operation has returned."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in self._live:
                self._live[storage._cdata] = (StorageWeakRef(storage), round_up(storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
