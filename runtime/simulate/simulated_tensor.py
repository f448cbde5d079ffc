"""Tensors on ``sim:N`` with data on the CPU: operations check devices, count bytes and log copies."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils.dlpack import from_dlpack

from graphplan._compat.torch import storage_of
from graphplan.devices.machine import current_machine
from graphplan.devices.simulated_machine import SimulatedMachine, SimulatedTransfer
from graphplan.devices.topology import SIMULATED, DeviceKey, round_up
from graphplan.errors import DeviceError
from graphplan.runtime.simulate.fused_cells import WITHOUT_CPU_KERNEL

aten = torch.ops.aten


def _machine() -> SimulatedMachine:
    """Return the machine of the surrounding ``simulate`` block; raise DeviceError outside of one."""
    machine = current_machine.get()
    if machine is None:
        raise DeviceError(f"{SIMULATED} devices exist only inside graphplan.simulate()")
    return machine


class _Allocation:
    """The bytes of a device's capacity that a storage occupies, until the last tensor over it is freed."""

    def __init__(
        self, device: int, storage: torch.UntypedStorage, part_of: _Allocation | None = None
    ) -> None:
        machine = _machine()
        free = part_of is not None or storage.device.type == "meta"  # meta: a fake tensor
        nbytes = machine.allocate(device, 0 if free else round_up(storage.nbytes()))
        self.device, self.storage = device, storage  # holding the storage keeps its address unique
        self.part_of = part_of  # keeps alive the allocation of which this storage covers a part
        weakref.finalize(self, machine.free, device, nbytes)


_allocations: weakref.WeakValueDictionary[tuple[int, int], _Allocation] = weakref.WeakValueDictionary()


class SimulatedTensor(torch.Tensor):
    """A tensor whose device is ``sim:N``, with its data in ``elem`` on the CPU."""

    stands_for = torch.Tensor
    own = ("allocation", "elem")  # attributes of this class; others are the user's
    elem: torch.Tensor
    allocation: _Allocation

    @staticmethod
    def __new__(
        cls, elem: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False
    ) -> SimulatedTensor:
        if device is None:  # called as a parameter's class is, by code that copies parameters
            return nn.Parameter(elem, requires_grad)  # type: ignore[return-value]  # not initialized again
        if elem.layout is not torch.strided:
            raise DeviceError(
                "simulated devices hold no sparse tensors: give dense ones, or compute on the CPU"
            )
        if elem.is_conj() or elem.is_neg():  # the wrapper would not have these lazy bits
            elem = elem.resolve_conj().resolve_neg()
        with torch.inference_mode(False):  # no inference tensor: views of it are like those of other tensors
            wrapper: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                elem.size(),
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
                dtype=elem.dtype,
                layout=elem.layout,
                device=device,
            )
        key = (storage_of(elem), device.index)
        allocation = _allocations.get(key)
        if allocation is None:
            allocation = _allocations[key] = _Allocation(device.index, elem.untyped_storage())
        wrapper.elem, wrapper.allocation = elem, allocation
        return wrapper

    def with_separate_storage(self) -> SimulatedTensor:
        """Return a tensor over the same bytes with its own storage, in the same allocation."""
        elem = from_dlpack(self.elem) if self.numel() else torch.empty_like(self.elem)
        key = (storage_of(elem), self.device.index)
        part = _Allocation(self.device.index, elem.untyped_storage(), self.allocation)
        _allocations[key] = part
        return SimulatedTensor(elem, self.device)

    @property
    def data(self) -> torch.Tensor:
        data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]  # of torch
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # as above
        if isinstance(value, SimulatedTensor):
            self.elem, self.allocation = value.elem, value.allocation

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["elem"], (self.device,)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> SimulatedTensor:
        return SimulatedTensor(inner["elem"], context[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if isinstance(self, nn.Parameter):  # without its gradient, as a plain parameter's copy
            copied: Any = nn.Parameter(self.data.clone(), self.requires_grad)
            memo[id(self)] = copied
            return copied
        memo[id(self.allocation)] = None  # the copy gets its own, below
        copied = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]  # of torch
        copied.allocation = SimulatedTensor(copied.elem, copied.device).allocation
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as in torch
        return f"SimulatedTensor({self.elem!r}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return format(self.elem, spec)  # as a plain tensor of one value: models build names from it

    def untyped_storage(self) -> torch.UntypedStorage:
        # the wrapper's own storage is empty; shared memory is recognized by the data's storage
        return self.elem.untyped_storage()

    def tolist(self) -> Any:
        return self.elem.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.elem.numpy(force=True)
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # saved as a CPU tensor, which loads anywhere, as one from an accelerator does with map_location
        rebuilt: Any = self.elem.detach()
        if isinstance(self, torch.nn.Parameter):
            rebuilt = torch.nn.Parameter(rebuilt, self.requires_grad)
        elif self.requires_grad and self.is_leaf:
            rebuilt.requires_grad_()
        return rebuilt.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the disabled implementation
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_whole(func):  # in a thread without the mode of the simulation
            return func.decompose(*args, **(kwargs or {}))
        return run_simulated(func, args, kwargs or {})


def is_whole(func: Any) -> bool:
    """Whether an operation is one that torch usually decomposes before dispatch; inference mode does not."""
    key = DispatchKey.CompositeImplicitAutograd
    return func.namespace == "aten" and bool(func.has_kernel_for_dispatch_key(key))


def is_simulated(device: Any) -> bool:
    """Whether ``device`` is, or names, a simulated device; False for None."""
    return device is not None and torch.device(device).type == SIMULATED


def _inner(leaf: Any) -> Any:
    return leaf.elem if isinstance(leaf, SimulatedTensor) else leaf


def _key(device: torch.device) -> DeviceKey:
    return device.index if device.type == SIMULATED else device.type


def _resolve(requested: Any) -> torch.device:
    device: torch.device = torch.device(requested)
    if device.type == SIMULATED and device.index is None:
        device = torch.device(SIMULATED, min(_machine().capacities))
    if device.type == SIMULATED:
        _machine().require(device.index)
    return device


def run_simulated(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an ATen operation on the CPU data of its tensors, after a check of their devices."""
    if func is aten._copy_from.default:
        return _copy_into(args[1], args[0])
    if func is aten.copy_.default:
        return _copy_into(args[0], args[1])
    if func is aten._to_copy.default:
        return _convert(args[0], kwargs)
    func = WITHOUT_CPU_KERNEL.get(func, func)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    requested = kwargs.get("device")
    common = _common_device(func, tensors)
    device = _resolve(requested) if is_simulated(requested) else (common if requested is None else None)
    inner = pytree.tree_map(_inner, dict(kwargs))
    if is_simulated(requested):
        inner["device"] = torch.device("cpu")
        inner.pop("pin_memory", None)
    if device is not None and func in _PRODUCTS:
        _machine().multiply(device.index)
    out = func(*pytree.tree_map(_inner, args), **inner)
    if device is None:
        return out
    if torch.Tag.inplace_view in getattr(func, "tags", ()) and func.overloadpacket is not aten.set_:
        # change the wrapper's shape and strides too; it has no storage for ``set_`` to change
        with no_dispatch():
            func(*args, **kwargs)
    by_id = {id(_inner(tensor)): tensor for tensor in tensors}  # in-place operations return their argument
    if not getattr(func, "is_view", False):
        _watch(tensors, [by_id[id(leaf)] for leaf in pytree.tree_leaves(out) if id(leaf) in by_id])
    if func in _PACKING:
        return _wrap(out[0], device), out[1]
    return pytree.tree_map(lambda leaf: by_id[id(leaf)] if id(leaf) in by_id else _wrap(leaf, device), out)


def _wrap(leaf: Any, device: torch.device) -> Any:
    plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, SimulatedTensor)
    return SimulatedTensor(leaf, device) if plain else leaf


_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)

# torch accepts index tensors on the CPU for these
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


# lengths and batch sizes of these are on the CPU
_PACKING = (aten._pack_padded_sequence.default, aten._pad_packed_sequence.default)


def _common_device(func: Any, tensors: list[torch.Tensor]) -> torch.device | None:
    simulated = {t.device for t in tensors if t.device.type == SIMULATED}
    if not simulated:
        return None
    # torch accepts zero-dimensional CPU tensors everywhere
    others = [t for t in tensors if t.device.type != SIMULATED and t.dim() > 0 and func not in _PACKING]
    if func in _INDEXING and tensors[0].device.type == SIMULATED:
        others = [t for t in others if t.dtype not in (torch.long, torch.int, torch.bool, torch.uint8)]
    if len(simulated) > 1 or others:
        devices = sorted({str(t.device) for t in tensors})
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} in {func}")
    return simulated.pop()


def _log(source: torch.device, destination: torch.device, tensor: torch.Tensor) -> None:
    if source != destination:
        nbytes = tensor.numel() * tensor.element_size()
        _machine().transfers.append(SimulatedTransfer(_key(source), _key(destination), nbytes))


def _watch(read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
    watch = _machine().watch
    if watch is not None:
        watch(read, written)


def _copy_into(destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    _log(source.device, destination.device, source)
    _watch([source], [destination])
    _inner(destination).copy_(_inner(source))
    return destination


def _convert(source: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
    requested = kwargs.get("device")
    device = source.device if requested is None else _resolve(requested)
    if device.type == "meta":  # nothing is copied
        return aten._to_copy.default(_inner(source), **kwargs)  # type: ignore[no-any-return]
    _log(source.device, device, source)
    _watch([source], [])
    ignored = ("device", "non_blocking", "pin_memory")
    options = {key: value for key, value in kwargs.items() if key not in ignored}
    out: torch.Tensor = aten._to_copy.default(_inner(source), **options)
    return SimulatedTensor(out, device) if device.type == SIMULATED else out
