"""A device map without a trace: accelerate's ``infer_auto_device_map``, by its own signature.

It sees modules and bytes, as accelerate's does, and no activations: for those there is
:func:`graphplan.plan`, whose ``device_map()`` has the same form.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from graphplan.capture.model.model_weights import identity, tensor_bytes
from graphplan.devices.topology import CPU, DISK, DeviceKey
from graphplan.integrations.accelerate.module_packing import Block, Places, pack, spill
from graphplan.ir.module_map import merged_map
from graphplan.warnings import warn

logger = logging.getLogger("graphplan")

_Tensors = dict[str, list[tuple[str, torch.Tensor]]]


def infer_auto_device_map(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: str | list[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: dict[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, DeviceKey]:
    """A device map for ``model``, for accelerate's ``dispatch_model`` and transformers' ``from_pretrained``.

    A drop-in for accelerate's function of this name. What fits the accelerators together is never
    offloaded; where something is, memory for the largest offloaded block is reserved on the accelerator
    that accelerate's hooks run it on, and no more. Modules that have parameters or buffers of their own stay
    whole where they fit, since hooks reach modules only.

    Args:
        model: on any device, meta too.
        max_memory: device -> bytes or text, as accelerate reads it; None for what is free here.
        no_split_module_classes: class names of modules that stay in one piece, or the name of one.
        dtype: to which weights will be converted when they are loaded.
        special_dtypes: name -> dtype, for weights that differ from ``dtype``.
        verbose: whether to print where each block goes.
        clean_result: False for an entry for each block, True for the shortest map.
        offload_buffers: whether the buffers of offloaded modules are offloaded too.
        fallback_allocation: accepted and ignored: every block is tried on every device.
    """
    from accelerate.utils import get_max_memory

    del fallback_allocation
    budgets: dict[DeviceKey, int] = get_max_memory(max_memory)
    sizes = ModuleSizes(dtype, special_dtypes or {})
    accelerators = [key for key in budgets if key not in (CPU, DISK)]
    # hooks run what is offloaded on the first accelerator of a set, whose order is its own
    main = list(set(accelerators))[0] if accelerators else None  # noqa: RUF015  # as accelerate's
    named = no_split_module_classes or ()
    whole = {named} if isinstance(named, str) else set(named)
    found = map_modules(model, budgets, whole, sizes, main, offload_buffers=offload_buffers, verbose=verbose)
    return merged_map(found) if clean_result else found


def map_modules(
    model: nn.Module,
    budgets: Mapping[DeviceKey, int],
    whole: set[str],
    sizes: ModuleSizes,
    main: DeviceKey | None = None,
    *,
    cpu: DeviceKey = CPU,
    offload_buffers: bool = False,
    verbose: bool = False,
    quiet: bool = False,
) -> dict[str, DeviceKey]:
    """A device for each module that is not split further, and each tensor of those that are.

    ``budgets`` are in the order of preference; ``whole`` has the classes that are not split; ``main`` is the
    accelerator that runs what is offloaded, the first if it is None; ``cpu`` the key of the CPU. If
    ``quiet``, no warning says that buffers do not fit. Others are as in :func:`infer_auto_device_map`.
    """
    accelerators = [key for key in budgets if key not in (cpu, DISK)]
    capacities = [budgets[key] for key in accelerators]
    tensors = dict(_atoms(model, whole, sizes, max(capacities, default=0)))
    blocks = [_block(group, tensors, sizes, offload_buffers) for group in _tied_groups(tensors)]
    at = accelerators.index(main) if main is not None else 0
    places = pack(blocks, capacities, at)
    offloaded = {i: block for i, block in enumerate(blocks) if places[i] is None}
    on_cpu = spill(offloaded, budgets.get(cpu, 0)) if offloaded else set()
    found: dict[str, DeviceKey] = {}
    for index, (block, place) in enumerate(zip(blocks, places, strict=True)):
        device = accelerators[place] if place is not None else cpu if index in on_cpu else DISK
        found.update(dict.fromkeys(block.names, device))
        if verbose:
            print(f"Putting {', '.join(map(repr, block.names))} (size={block.nbytes}) on {device}.")
    if not quiet:
        _warn_of_buffers(blocks, places, capacities, at)
    if offloaded:
        logger.info("the model does not fit the accelerators: %d blocks are offloaded", len(offloaded))
    return {name: found[name] for name in tensors}


def _warn_of_buffers(blocks: list[Block], places: Places, capacities: list[int], main: int) -> None:
    """Say so where buffers of offloaded modules, which stay on the main accelerator, do not fit there."""
    kept = sum(block.kept for block, place in zip(blocks, places, strict=True) if place is None)
    if kept and capacities and set(places) == {None} and kept > capacities[main]:
        warn(
            f"the {kept} bytes of offloaded modules that stay on the accelerator (buffers, and parameters "
            "that no hook reaches) do not fit: pass offload_buffers=True"
        )


@dataclass(frozen=True, slots=True)
class ModuleSizes:
    """Bytes of tensors as they will be loaded.

    Attributes:
        dtype: of most, None for their own.
        special: name -> dtype, for others.
        step: bytes in which memory is handed out.
    """

    dtype: str | torch.dtype | None = None
    special: Mapping[str, str | torch.dtype] = field(default_factory=dict)
    step: int = 1

    def of(self, name: str, tensor: torch.Tensor) -> int:
        """Bytes of a tensor."""
        return -(-self._exactly(name, tensor) // self.step) * self.step

    def _exactly(self, name: str, tensor: torch.Tensor) -> int:
        special = self.special.get(name)
        if special is not None:
            return int(tensor.numel() * _itemsize(special))
        nbytes = tensor_bytes(tensor)
        kept = self.dtype is None or not (tensor.is_floating_point() or tensor.is_complex())
        return nbytes if kept else min(nbytes, int(tensor.numel() * _itemsize(self.dtype)))


def _itemsize(dtype: str | torch.dtype | None) -> float:
    from accelerate.utils.modeling import dtype_byte_size

    named = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    return float(dtype_byte_size(named))


def _own_tensors(module: nn.Module, prefix: str, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name; a tied one under each of its names."""
    yield from module.named_parameters(prefix, recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(prefix, recurse=recurse, remove_duplicate=False)


def _atoms(
    model: nn.Module, whole: set[str], sizes: ModuleSizes, largest: int
) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    """Modules that are not split, in order, and the tensors of those that are; each with its tensors."""

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
        children = list(module.named_children())
        own = list(_own_tensors(module, name, recurse=False))
        named = list(_own_tensors(module, name, recurse=True))
        if not named:
            return
        fits = sum(sizes.of(*pair) for pair in named) <= largest
        if not children or type(module).__name__ in whole or (own and name and fits):
            yield name, named
            return
        yield from ((tensor, [(tensor, value)]) for tensor, value in own)
        for child, part in children:
            yield from visit(f"{name}.{child}" if name else child, part)

    if type(model).__name__ in whole or not any(True for _ in model.children()):
        yield "", list(_own_tensors(model, "", recurse=True))
    else:
        yield from visit("", model)


def _tied_groups(tensors: _Tensors) -> list[list[str]]:
    """Atoms that share a tensor, together; in the order of the first of each."""
    group_of: dict[str, list[str]] = {}
    owner: dict[object, str] = {}
    for atom, members in tensors.items():
        group_of[atom] = [atom]
        for _, tensor in members:
            first, mine = group_of[owner.setdefault(identity(tensor), atom)], group_of[atom]
            if first is not mine:
                first += mine
                group_of.update(dict.fromkeys(mine, first))
    return list({id(group): group for group in group_of.values()}.values())


def _block(atoms: Sequence[str], tensors: _Tensors, sizes: ModuleSizes, offload_buffers: bool) -> Block:
    """What must be together: its bytes, and those that are copied to the main device at once."""
    seen: dict[object, int] = {}
    own: dict[str, int] = {}  # hooks bring a module's own tensors, when it runs
    kept = 0
    for atom in atoms:
        for name, tensor in tensors[atom]:
            nbytes, first = sizes.of(name, tensor), identity(tensor) not in seen
            seen.setdefault(identity(tensor), nbytes)
            reached = name != atom  # not by itself: hooks reach modules
            if reached and (isinstance(tensor, nn.Parameter) or offload_buffers):
                module = name.rpartition(".")[0]
                own[module] = own.get(module, 0) + nbytes
            elif first:
                kept += nbytes
    loaded = (sum(own.get(around, 0) for around in _around(module)) for module in own)
    return Block(tuple(atoms), sum(seen.values()), max(loaded, default=0), kept)


def _around(module: str) -> Iterator[str]:
    """A module and those that it is in: what is on the main device while it runs."""
    yield module
    while module:
        module = module.rpartition(".")[0]
        yield module
