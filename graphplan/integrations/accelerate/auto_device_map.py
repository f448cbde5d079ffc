"""A device map without a trace: a function with the signature of accelerate's ``infer_auto_device_map``.

Like accelerate's, it counts modules and bytes of weights, but no activations. :func:`graphplan.plan` counts
them; its ``device_map()`` has the same form.
"""

from __future__ import annotations

import logging
from collections import Counter
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
    """Return a device map for accelerate's ``dispatch_model`` and transformers' ``from_pretrained``.

    A drop-in replacement for accelerate's function of this name. A model that fits the accelerators together
    is never offloaded. If blocks are offloaded, memory for the largest of them, and no more, is reserved on
    the accelerator on which accelerate's hooks run them. Modules with parameters or buffers of their own stay
    whole if they fit, since hooks reach only modules.

    Args:
        model: the model, on any device, the meta device too.
        max_memory: device -> bytes or text, as accelerate reads it; None for the free memory of this machine.
        no_split_module_classes: class name, or names, of modules that are not split.
        dtype: dtype to which weights will be converted when they are loaded; None for their own.
        special_dtypes: weight -> dtype, for weights that get another dtype than ``dtype``.
        verbose: whether to print where each block goes.
        clean_result: True for the shortest map, False for an entry for each block.
        offload_buffers: whether the buffers of offloaded modules are offloaded too.
        fallback_allocation: ignored; every block is tried on every device anyway.

    Returns:
        module or tensor name -> device key; ``"disk"`` for blocks that fit nowhere else.
    """
    from accelerate.utils import get_max_memory

    del fallback_allocation
    budgets: dict[DeviceKey, int] = get_max_memory(max_memory)
    sizes = ModuleSizes(dtype, special_dtypes or {})
    accelerators = [key for key in budgets if key not in (CPU, DISK)]
    # accelerate's hooks run offloaded modules on the first accelerator of a set, in the set's order
    main = list(set(accelerators))[0] if accelerators else None  # noqa: RUF015  # as accelerate's
    class_names = no_split_module_classes or ()
    whole = {class_names} if isinstance(class_names, str) else set(class_names)
    full = map_modules(model, budgets, whole, sizes, main, offload_buffers=offload_buffers, verbose=verbose)
    return merged_map(full) if clean_result else full


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
    """Return name -> device, for modules that are not split, and for the own tensors of those that are.

    ``budgets`` are bytes, in the order of preference; ``whole`` names classes that are not split; ``main`` is
    the accelerator that runs offloaded modules, by default the first; ``cpu`` is the key of the CPU. If
    ``quiet``, no warning says that buffers do not fit. Others are as in :func:`infer_auto_device_map`.
    """
    accelerators = [key for key in budgets if key not in (cpu, DISK)]
    capacities = [budgets[key] for key in accelerators]
    tensors = dict(_split_into_atoms(model, whole, sizes, max(capacities, default=0)))
    blocks = [
        _make_block(group, tensors, sizes, offload_buffers=offload_buffers) for group in _tied_groups(tensors)
    ]
    main_index = accelerators.index(main) if main is not None else 0
    places = pack(blocks, capacities, main_index)
    offloaded = {i: block for i, block in enumerate(blocks) if places[i] is None}
    on_cpu = spill(offloaded, budgets.get(cpu, 0)) if offloaded else set()
    found: dict[str, DeviceKey] = {}
    for index, (block, place) in enumerate(zip(blocks, places, strict=True)):
        device = accelerators[place] if place is not None else cpu if index in on_cpu else DISK
        found.update(dict.fromkeys(block.names, device))
        if verbose:
            print(f"Putting {', '.join(map(repr, block.names))} (size={block.nbytes}) on {device}.")
    if not quiet:
        _warn_of_buffers(blocks, places, capacities, main_index)
    if offloaded:
        logger.info("the model does not fit the accelerators: %d blocks are offloaded", len(offloaded))
    return {name: found[name] for name in tensors}


def _warn_of_buffers(blocks: list[Block], places: Places, capacities: list[int], main: int) -> None:
    """Warn if buffers of offloaded modules, which stay on the main accelerator, do not fit there."""
    kept = sum(block.main_bytes for block, place in zip(blocks, places, strict=True) if place is None)
    if kept and capacities and set(places) == {None} and kept > capacities[main]:
        warn(
            f"the {kept} bytes of offloaded modules that stay on the accelerator (buffers, and parameters "
            "that no hook reaches) do not fit: pass offload_buffers=True"
        )


@dataclass(frozen=True, slots=True)
class ModuleSizes:
    """Counts the bytes of tensors as they will be loaded.

    Attributes:
        dtype: dtype of most tensors; None for their own.
        special: name -> dtype of other tensors.
        step: bytes, of which sizes are rounded up to a multiple.
    """

    dtype: str | torch.dtype | None = None
    special: Mapping[str, str | torch.dtype] = field(default_factory=dict)
    step: int = 1

    def of(self, name: str, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor."""
        return -(-self._exactly(name, tensor) // self.step) * self.step

    def _exactly(self, name: str, tensor: torch.Tensor) -> int:
        special = self.special.get(name)
        if special is not None:
            return int(tensor.numel() * _itemsize(special))
        nbytes = tensor_bytes(tensor)
        keeps_dtype = self.dtype is None or not (tensor.is_floating_point() or tensor.is_complex())
        return nbytes if keeps_dtype else min(nbytes, int(tensor.numel() * _itemsize(self.dtype)))


def _itemsize(dtype: str | torch.dtype | None) -> float:
    from accelerate.utils.modeling import dtype_byte_size

    torch_dtype = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    return float(dtype_byte_size(torch_dtype))


def _own_tensors(module: nn.Module, prefix: str, *, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of parameters and buffers; a shared one under each of its names."""
    yield from module.named_parameters(prefix, recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(prefix, recurse=recurse, remove_duplicate=False)


def _split_into_atoms(
    model: nn.Module, whole: set[str], sizes: ModuleSizes, largest: int
) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    """Yield (name, its tensors) of modules that are not split, and of own tensors of modules that are."""

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
        children = list(module.named_children())
        own = list(_own_tensors(module, name, recurse=False))
        all_tensors = list(_own_tensors(module, name, recurse=True))
        if not all_tensors:
            return
        fits = sum(sizes.of(*pair) for pair in all_tensors) <= largest
        if not children or type(module).__name__ in whole or (own and name and fits):
            yield name, all_tensors
            return
        yield from ((tensor, [(tensor, value)]) for tensor, value in own)
        for child, submodule in children:
            yield from visit(f"{name}.{child}" if name else child, submodule)

    if type(model).__name__ in whole or not any(True for _ in model.children()):
        yield "", list(_own_tensors(model, "", recurse=True))
    else:
        yield from visit("", model)


def _tied_groups(tensors: _Tensors) -> list[list[str]]:
    """Return groups of atoms that share tensors, in the order of their first atoms."""
    group_of: dict[str, list[str]] = {}
    owner: dict[object, str] = {}
    for atom, members in tensors.items():
        group_of[atom] = [atom]
        for _, tensor in members:
            other_group, own_group = group_of[owner.setdefault(identity(tensor), atom)], group_of[atom]
            if other_group is not own_group:
                other_group += own_group
                group_of.update(dict.fromkeys(own_group, other_group))
    return list({id(group): group for group in group_of.values()}.values())


def _make_block(
    atoms: Sequence[str], tensors: _Tensors, sizes: ModuleSizes, *, offload_buffers: bool
) -> Block:
    """Return the block of atoms that must be on one device, with its byte counts."""
    seen: dict[object, int] = {}
    own = Counter[str]()  # module -> bytes that hooks copy when it runs
    kept = 0
    for atom in atoms:
        for name, tensor in tensors[atom]:
            nbytes, first = sizes.of(name, tensor), identity(tensor) not in seen
            seen.setdefault(identity(tensor), nbytes)
            hooked = name != atom  # hooks reach modules, not single tensors
            if hooked and (isinstance(tensor, nn.Parameter) or offload_buffers):
                own[name.rpartition(".")[0]] += nbytes
            elif first:
                kept += nbytes
    copied = (sum(own[around] for around in _with_ancestors(module)) for module in own)
    return Block(tuple(atoms), sum(seen.values()), max(copied, default=0), kept)


def _with_ancestors(module: str) -> Iterator[str]:
    """Yield a module and its ancestors, whose tensors are on the main device while it runs."""
    yield module
    while module:
        module = module.rpartition(".")[0]
        yield module
