"""Accelerators simulated on a CPU: real values, counted bytes, logged copies.

Inside ``with simulate({0: "1GiB", 1: "1GiB"}) as machine`` the devices ``sim:0`` and ``sim:1`` exist.
Their tensors hold CPU data. Operations on tensors of different devices fail, as on accelerators; each storage
occupies its bytes, rounded up to 512, of the device's capacity until its last tensor is freed; each copy
between devices is logged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from graphplan._compat.torch import compiling
from graphplan.devices.machine import current_machine
from graphplan.devices.max_memory import MaxMemory, Size, own_links, read_max_memory, read_size
from graphplan.devices.simulated_machine import SimulatedMachine
from graphplan.devices.topology import CPU, DeviceKey, Link
from graphplan.errors import BudgetError, DeviceError
from graphplan.runtime.simulate.simulated_backend import SimulationMode, register_backend


@contextmanager
def simulate(
    capacities: MaxMemory,
    links: Mapping[tuple[DeviceKey, DeviceKey], Link] | None = None,
    *,
    workspace: Size = 0,
) -> Iterator[SimulatedMachine]:
    """Context manager that simulates accelerators.

    Args:
        capacities: device index -> bytes or text such as ``"1GiB"``; ``"cpu"`` may be among them, and is
            passed on in ``machine.max_memory``.
        links: the links between them, for the planner's cost model.
        workspace: bytes, or text such as ``"8MiB"``, that each device allocates at its first matrix product,
            as cuBLAS does on CUDA.

    Raises:
        BudgetError: a capacity or ``workspace`` is not a valid size.
        DeviceError: a key is neither an index nor ``"cpu"``, a link is invalid, or blocks are nested.
    """
    if current_machine.get() is not None:
        raise DeviceError("simulate() inside simulate(): name all devices in one")
    try:
        topology = read_max_memory(capacities, links)
    except (BudgetError, DeviceError) as error:
        raise type(error)(str(error).replace("max_memory", "capacities")) from error
    sizes: dict[int, int] = {}
    for spec in topology.devices:
        if isinstance(spec.key, int):
            sizes[spec.key] = spec.memory
        elif spec.device != CPU:
            raise DeviceError(f"cannot simulate {spec.key!r}: use indices such as 0, 1, and 'cpu'")
    cpu = None if topology.cpu is None else topology[topology.cpu].memory
    link_map, workspace_bytes = own_links(topology.devices, links or {}), read_size(workspace, "workspace")
    machine = SimulatedMachine(sizes, cpu, link_map, workspace=workspace_bytes)
    register_backend()
    # the multithreaded autograd engine would require a queue for each device from C++
    single_thread = torch.autograd.set_multithreading_enabled(False)
    mode = SimulationMode()  # type: ignore[no-untyped-call]  # torch's
    with current_machine.being(machine), single_thread, compiling("force_eager"), mode:
        yield machine
