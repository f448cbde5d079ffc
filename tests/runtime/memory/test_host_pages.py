"""Host memory for streamed weights: addresses, storages, and registration with CUDA."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from graphplan.devices.topology import round_up
from graphplan.runtime.memory import host_pages
from graphplan.runtime.memory.host_pages import HostPages


class Cudart:
    """Replaces CUDA's runtime."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.code:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert mapped(address)  # CUDA is to forget memory before it is gone
        del self.registered[address]
        return 0


def mapped(address: int) -> bool:
    """Whether memory is mapped at an address, if the system has a list."""
    listing = Path("/proc/self/maps")
    if not listing.is_file():
        return True
    ranges = (line.split()[0].split("-") for line in listing.read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def adopted_by(pages: HostPages, tensor: torch.Tensor) -> torch.Tensor:
    return pages.reserve(tensor).copy_(tensor)


def test_adjacent_tensors_have_separate_storages() -> None:
    tensors = [torch.randn(5, 7), torch.randint(0, 9, (3,)), torch.rand(4) > 0.5, torch.tensor(2.5)]
    tensors.append(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    total = sum(round_up(t.numel() * t.element_size()) for t in tensors)
    made = HostPages(total, pinned=False)
    adopted = [adopted_by(made, tensor) for tensor in tensors]
    place = made.start
    for tensor, copied in zip(tensors, adopted, strict=True):
        assert torch.equal(tensor, copied)
        assert tensor.stride() == copied.stride()
        assert copied.data_ptr() == place
        assert copied.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        place += round_up(tensor.numel() * tensor.element_size())
    assert place == made.end
    assert made.holds(made.start)
    assert not made.holds(made.end)
    adopted[0].zero_()
    assert not made.piece(0, 5 * 7 * 4).any()


def test_tensors_keep_pages_alive() -> None:
    tensor = adopted_by(HostPages(512, pinned=False), torch.arange(100.0))
    gc.collect()
    assert torch.equal(tensor, torch.arange(100.0))


def test_pages_are_unregistered_with_the_last_tensor(monkeypatch: Any) -> None:
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    made = HostPages(1000, pinned=True)
    assert made.pinned
    assert cudart.registered == {made.start: 1000}  # as large as it is, not a power of two
    tensor = adopted_by(made, torch.ones(100))
    del made
    gc.collect()
    assert cudart.registered
    del tensor
    gc.collect()
    assert cudart.registered == {}  # an error in __del__ would have left it there


def test_failed_pinning_warns_and_uses_pageable_memory(monkeypatch: Any) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(2))
    monkeypatch.setattr(host_pages, "_forget_error", lambda: forgotten.append(True))
    with pytest.warns(UserWarning, match=r"1000 bytes .* \(cudaHostRegister returned 2\).*slower"):
        made = HostPages(1000, pinned=True)
    assert not made.pinned
    assert forgotten
    assert torch.equal(adopted_by(made, torch.ones(3)), torch.ones(3))
