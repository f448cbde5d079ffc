"""Speeds of known accelerators, for plans on machines that have not been measured.

FLOP/s are those of a large bf16 matrix product (fp16 if the GPU has no bf16), about four fifths of the
datasheet's dense value with 32-bit accumulation; bytes/s are the datasheet's. Host bandwidth is what large
copies reach over PCIe 3, 4 or 5, or NVLink-C2C: 55 GB/s were measured on an H200. Measurements of the machine
itself are better: :func:`graphplan.measure_devices`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Gpu:
    """A model of GPU."""

    name: str  # words that occur in the driver's name, in this order
    flops: float  # FLOP/s that a large matrix product reaches
    bandwidth: float  # bytes/s of its memory
    host: float = 25e9  # bytes/s from and to pinned host memory


_PCIE_3, _PCIE_5, _C2C = 12e9, 55e9, 400e9

# The first match counts, so longer names stand before their parts.
_GPUS = (
    Gpu("GB300", 2000e12, 8.0e12, _C2C),
    Gpu("B300", 1800e12, 8.0e12, _PCIE_5),
    Gpu("GB200", 2000e12, 8.0e12, _C2C),
    Gpu("B200", 1800e12, 8.0e12, _PCIE_5),
    Gpu("B100", 1400e12, 8.0e12, _PCIE_5),
    Gpu("GH200", 800e12, 4.0e12, _C2C),
    Gpu("H200 NVL", 670e12, 4.8e12, _PCIE_5),
    Gpu("H200", 800e12, 4.8e12, _PCIE_5),
    Gpu("H100 PCIe", 600e12, 2.0e12, _PCIE_5),
    Gpu("H100 NVL", 670e12, 3.9e12, _PCIE_5),
    Gpu("H100", 800e12, 3.35e12, _PCIE_5),
    Gpu("H800", 800e12, 3.35e12, _PCIE_5),
    Gpu("H20", 130e12, 4.0e12, _PCIE_5),
    Gpu("A100 40GB", 280e12, 1.555e12),
    Gpu("A100", 280e12, 1.9e12),
    Gpu("A800", 280e12, 1.9e12),
    Gpu("A30", 150e12, 0.933e12),
    Gpu("A40", 135e12, 0.696e12),
    Gpu("A10G", 65e12, 0.6e12),
    Gpu("A10", 120e12, 0.6e12),
    Gpu("A2", 16e12, 0.2e12),
    Gpu("L40S", 300e12, 0.864e12),
    Gpu("L40", 180e12, 0.86e12),
    Gpu("L4", 120e12, 0.3e12),
    Gpu("V100", 110e12, 0.9e12, _PCIE_3),
    Gpu("T4", 60e12, 0.3e12, _PCIE_3),
    Gpu("RTX PRO 6000 Blackwell", 400e12, 1.792e12, _PCIE_5),
    Gpu("RTX 6000 Ada", 300e12, 0.96e12),
    Gpu("RTX 5000 Ada", 220e12, 0.576e12),
    Gpu("A6000", 140e12, 0.768e12),
    Gpu("A5000", 100e12, 0.768e12),
    Gpu("A4000", 70e12, 0.448e12),
    Gpu("RTX 5090", 200e12, 1.792e12, _PCIE_5),
    Gpu("RTX 5080", 110e12, 0.96e12, _PCIE_5),
    Gpu("RTX 4090", 160e12, 1.0e12),
    Gpu("RTX 4080", 95e12, 0.717e12),
    Gpu("RTX 3090 Ti", 78e12, 1.008e12),
    Gpu("RTX 3090", 70e12, 0.93e12),
    Gpu("RTX 3080", 58e12, 0.76e12),
    Gpu("MI355X", 2000e12, 8.0e12, _PCIE_5),
    Gpu("MI350X", 1850e12, 8.0e12, _PCIE_5),
    Gpu("MI325X", 1050e12, 6.0e12, _PCIE_5),
    Gpu("MI300X", 1050e12, 5.3e12, _PCIE_5),
    Gpu("MI300A", 780e12, 5.3e12, _PCIE_5),
    Gpu("MI250X", 150e12, 1.6e12),  # one of its two dies, which are a device each
    Gpu("MI210", 145e12, 1.6e12),
)


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU that a driver's name means (``"NVIDIA A100-SXM4-80GB"``), or None if it is unknown.

    Whole words are compared: ``A40`` does not match ``A4000``. Spaces may be left out, as in ``"RTX4090"``.
    """
    words = _words(name)
    matches = (gpu for gpu in _GPUS if _in_order(_words(gpu.name), words))
    joined = (gpu for gpu in _GPUS if _words(gpu.name.replace(" ", "")) == words)
    return next(chain(matches, joined), None)


def gpu_names() -> list[str]:
    """Return the names of all known GPUs."""
    return [gpu.name for gpu in _GPUS]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _in_order(expected: list[str], words: list[str]) -> bool:
    remaining = iter(words)
    return all(word in remaining for word in expected)
