"""Read device keys as callers write them: the index of an accelerator, a name, or a ``torch.device``."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import torch

from graphplan.devices.machine import accelerator_type
from graphplan.devices.topology import CPU, DISK, DeviceKey, DeviceSpec
from graphplan.errors import DeviceError

_Value = TypeVar("_Value")


def device_name_of(key: object) -> str:
    """Return torch's name of a device, with the index if it is an accelerator: ``0 -> "cuda:0"``.

    ``"disk"`` stays as it is.

    Raises:
        DeviceError: ``key`` is not a device, or is one that no plan can use.
    """
    if isinstance(key, numbers.Integral) and not isinstance(key, bool):
        if key < 0:
            raise DeviceError(f"device key {key} is negative: accelerators count from 0")
        return f"{accelerator_type() or 'cuda'}:{key}"
    if not isinstance(key, str | torch.device):
        raise DeviceError(
            f"{key!r} is not a device key: use an accelerator's index, 'cpu', 'disk' or 'cuda:0'"
        )
    name = str(key)
    if name == DISK:
        return DISK
    if name.isdecimal():
        raise DeviceError(f"{name!r} is text: write the accelerator's index as a number, {int(name)}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        close = get_close_matches(name.lower(), (CPU, DISK), 1, 0.7)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else "write an index (0, 1, ...), 'cpu', 'disk' or 'cuda:0'"
        )
        raise DeviceError(f"{name!r} is not a device: {hint}") from error
    if device.type == "meta":
        raise DeviceError("'meta' is not a device that computes: name one that does")
    return CPU if device.type == CPU else f"{device.type}:{device.index or 0}"


def caller_key(devices: Iterable[DeviceSpec], key: object, argument: str) -> DeviceKey:
    """Return the key of a device in ``max_memory``, which may spell it otherwise (``0``, ``"cuda:0"``).

    If ``max_memory`` lacks the device, return torch's name of it.

    Raises:
        DeviceError: ``key`` is not a device; the message begins with ``argument``.
    """
    try:
        name = device_name_of(key)
    except DeviceError as error:
        raise DeviceError(f"{argument}: {error}") from error
    return next((spec.key for spec in devices if spec.device == name), name)


def by_caller_keys(
    devices: Sequence[DeviceSpec], mapping: Mapping[Any, _Value], argument: str
) -> dict[DeviceKey, _Value]:
    """Return a mapping of devices with the keys of ``max_memory`` in place of its own.

    Raises:
        DeviceError: a key is not a device, or not in ``max_memory``, or two keys are one device; the message
            names ``argument``.
    """
    caller_keys = {key: caller_key(devices, key, argument) for key in mapping}
    known_keys = [spec.key for spec in devices]
    if unknown := [key for key, known in caller_keys.items() if known not in known_keys]:
        names = ", ".join(map(repr, known_keys))
        raise DeviceError(f"{argument} names {unknown[0]!r}, which is not in max_memory: it has {names}")
    if len(set(caller_keys.values())) < len(caller_keys):
        raise DeviceError(f"{argument} names a device twice, in {list(mapping)}: keep one of these")
    return {caller_keys[key]: value for key, value in mapping.items()}
