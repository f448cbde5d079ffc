"""Measure this machine: FLOP/s, memory bandwidth, overhead, efficiency of operation types, and links.

Each time is the shortest of several repetitions after a warm-up, with the accelerator's queue drained before
and after. Matrices grow until one repetition is long enough to be timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from tqdm.auto import tqdm

from graphplan.devices.machine import suspended
from graphplan.devices.max_memory import MaxMemory, read_max_memory, require_present
from graphplan.devices.speeds import Measurements, Speed
from graphplan.devices.topology import CPU, SIMULATED, DeviceKey, DeviceSpec, Efficiency, Link, Topology
from graphplan.errors import InputError
from graphplan.runtime.profile.efficiency import Sample, efficiencies
from graphplan.runtime.profile.operation_benchmark import MOST_BYTES, operation_cases
from graphplan.warnings import warn

_LONG_ENOUGH = 0.02  # seconds of one repetition, far above clock resolution and enqueueing time
_SHARE = 4  # at most 1/4 of a device's budget is used
_SMALLEST, _LARGEST = 256, 16384  # rows of the matrices
_TRAFFIC = 512 << 20  # bytes that are copied within a device: more than its caches hold
_COPY = 128 << 20  # bytes that are copied over a link
_SMALL_OPERATIONS = 200


def measure_devices(
    max_memory: MaxMemory | None = None,
    *,
    dtype: torch.dtype | None = None,
    repetitions: int = 7,
    progress: bool = True,
) -> Measurements:
    """Measure the devices of this machine and the links between them, in a few seconds.

    Pass the result to ``plan(..., devices=measured)`` or ``partition(..., devices=measured)``, and save it
    with ``measured.save_json(path)``. At most a quarter of each budget is used during the measurement.

    Args:
        max_memory: device key -> memory budget, as in :func:`graphplan.plan`. None: all free memory of this
            machine's devices.
        dtype: dtype of the matrix product. None: bfloat16 on accelerators, float32 on the CPU.
        repetitions: number of repetitions of each measurement; the fastest counts.
        progress: whether to show a progress bar if it takes over a second.

    Returns:
        A :class:`graphplan.Measurements`. Its ``notes`` say what was not measured, and why: a
        simulated accelerator computes on the CPU, so its speed has no meaning.

    Raises:
        BudgetError, DeviceError: ``max_memory`` is invalid, or names a device that does not exist.
        InputError: ``repetitions`` is below 1.
    """
    if repetitions < 1:
        raise InputError(f"repetitions={repetitions}: each figure needs at least one")
    topology = read_max_memory(max_memory)
    require_present(topology)
    with suspended(), torch.inference_mode():
        return _Bench(topology, dtype, repetitions, progress=progress).run()


class _Bench:
    def __init__(
        self, topology: Topology, dtype: torch.dtype | None, repetitions: int, *, progress: bool
    ) -> None:
        self.topology, self.dtype, self.repetitions = topology, dtype, repetitions
        self.progress = progress
        self.notes: dict[DeviceKey, str] = {}
        self.dtypes: dict[DeviceKey, str] = {}
        self.specs = [spec for spec in topology.devices if self._is_measured(spec)]

    def _is_measured(self, spec: DeviceSpec) -> bool:
        if not spec.computes:
            self.notes[spec.key] = "not measured: it cannot run operations"
        elif spec.type == SIMULATED:
            self.notes[spec.key] = "not measured: it is simulated on the CPU, so its speed says nothing"
            warn(f"device {spec.key!r} is {self.notes[spec.key]}")
        return spec.key not in self.notes

    def run(self) -> Measurements:
        speeds: dict[DeviceKey, Speed] = {}
        links: dict[tuple[DeviceKey, DeviceKey], Link] = {}
        pairs = list(permutations(self.specs, 2))
        total = len(self.specs) + len(pairs)
        # delay: no bar for measurements of less than a second
        with tqdm(total=total, desc="measuring devices", delay=1, disable=not self.progress) as bar:
            for spec in self.specs:
                speed = Speed(self._flops(spec), self._bandwidth(spec), self._overhead(spec))
                efficiency = self._efficiency(speed.applied(spec))
                speeds[spec.key] = replace(speed, efficiency=efficiency, origin="measured")
                bar.update()
            for source, destination in pairs:
                links[source.key, destination.key] = self._link(source, destination)
                bar.update()
        return Measurements(speeds, {**self.topology.links, **links}, self.notes, self.dtypes)

    # -- one device -------------------------------------------------------------------------------

    def _flops(self, spec: DeviceSpec) -> float:
        """Return the FLOP/s of the largest square matrix product that budget and time limit allow."""
        dtype = self.dtype or (torch.float32 if spec.type == CPU else torch.bfloat16)
        self.dtypes[spec.key] = str(dtype).removeprefix("torch.")
        rows, allowed = _SMALLEST, spec.room // _SHARE
        while True:
            a, b, c = (torch.ones(rows, rows, dtype=dtype, device=spec.torch_device) for _ in range(3))
            seconds = self._time(partial(torch.mm, a, b, out=c), [spec])
            larger = 3 * (2 * rows) ** 2 * dtype.itemsize
            if seconds >= _LONG_ENOUGH or 2 * rows > _LARGEST or larger > allowed:
                return 2 * rows**3 / seconds
            rows *= 2

    def _bandwidth(self, spec: DeviceSpec) -> float:
        """Return the bytes/s of a copy within the device; bytes read and bytes written both count."""
        nbytes = _part(spec, _TRAFFIC)
        source = torch.zeros(nbytes, dtype=torch.uint8, device=spec.torch_device)
        copy = torch.zeros_like(source)
        return 2 * nbytes / self._time(lambda: copy.copy_(source), [spec])

    def _overhead(self, spec: DeviceSpec) -> float:
        """Return the seconds between the starts of operations with almost no work.

        Each reads its weights from a module: this stands for the time that the code of a placed model takes
        between operations (benchmarks/estimates.py compares them).
        """
        model: Any = nn.Module()
        model.layer = nn.Linear(8, 8, device=spec.torch_device)
        row = torch.ones(1, 8, device=spec.torch_device)

        def small_operations() -> None:
            for _ in range(_SMALL_OPERATIONS):
                functional.linear(row, model.layer.weight, model.layer.bias)

        return self._time(small_operations, [spec]) / _SMALL_OPERATIONS

    def _efficiency(self, spec: DeviceSpec) -> dict[str, Efficiency]:
        """Return the efficiency of each operation type, if the budget has room for the operations."""
        if spec.room // _SHARE < MOST_BYTES:
            self.notes[spec.key] = "types of operation were not measured: the budget is too small"
            return {}
        dtype = getattr(torch, self.dtypes[spec.key])
        samples = (
            Sample(case.type, case.flops, case.bytes_accessed, self._time(case.work, [spec]))
            for case in operation_cases(spec.torch_device, dtype, spec.room // _SHARE)
        )
        return efficiencies(samples, spec)

    # -- one link ---------------------------------------------------------------------------------

    def _link(self, source: DeviceSpec, destination: DeviceSpec) -> Link:
        nbytes = min(_part(source, _COPY), _part(destination, _COPY))
        specs = [source, destination]
        data, target = (
            torch.zeros(nbytes, dtype=torch.uint8, device=spec.torch_device, pin_memory=spec.type == CPU)
            for spec in specs
        )
        latency = self._time(lambda: target[:1].copy_(data[:1], non_blocking=True), specs)
        seconds = self._time(lambda: target.copy_(data, non_blocking=True), specs)
        return Link(nbytes / max(seconds - latency, 1e-9), latency, "measured")

    # -- the clock --------------------------------------------------------------------------------

    def _time(self, work: Callable[[], object], specs: Sequence[DeviceSpec]) -> float:
        """Return the least seconds of ``work``, queues drained before and after: other load only adds time.

        Work of a single thread is timed by the thread's own clock: if other processes wait for the processor,
        an operation that is longer than its time slice would always be interrupted.
        """
        single_thread = torch.get_num_threads() == 1 and all(spec.type == CPU for spec in specs)
        clock = time.thread_time if single_thread else time.perf_counter
        work()
        times = []
        for _ in range(self.repetitions):
            _drain(specs)
            start = clock()
            work()
            _drain(specs)
            times.append(clock() - start)
        return max(min(times), 1e-9)


def _drain(specs: Sequence[DeviceSpec]) -> None:
    for spec in specs:
        if spec.is_accelerator:
            torch.accelerator.synchronize(spec.torch_device)


def _part(spec: DeviceSpec, max_bytes: int) -> int:
    return max(1, min(max_bytes, spec.room // _SHARE // 2))
