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


def device_named(written: object) -> str:
    """Return torch's name of a device, with the index if it is an accelerator: ``0 -> "cuda:0"``.

    ``"disk"`` stays as it is.

    Raises:
        DeviceError: ``written`` is no device, or one that no plan can use.
    """
    if isinstance(written, numbers.Integral) and not isinstance(written, bool):
        if written < 0:
            raise DeviceError(f"device key {written} is negative: accelerators count from 0")
        return f"{accelerator_type() or 'cuda'}:{written}"
    if not isinstance(written, str | torch.device):
        raise DeviceError(
            f"{written!r} is no device key: use an accelerator's index, 'cpu', 'disk' or 'cuda:0'"
        )
    name = str(written)
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
        raise DeviceError(f"{name!r} is no device: {hint}") from error
    if device.type == "meta":
        raise DeviceError("'meta' is no device that computes: name one that does")
    return CPU if device.type == CPU else f"{device.type}:{device.index or 0}"


def own_key(devices: Iterable[DeviceSpec], written: object, argument: str) -> DeviceKey:
    """Return the key of a device in ``max_memory``, which may spell it otherwise (``0``, ``"cuda:0"``).

    If ``max_memory`` lacks the device, return torch's name of it.

    Raises:
        DeviceError: ``written`` is no device; the message begins with ``argument``.
    """
    try:
        name = device_named(written)
    except DeviceError as error:
        raise DeviceError(f"{argument}: {error}") from error
    return next((spec.key for spec in devices if spec.device == name), name)


def by_own_keys(
    devices: Sequence[DeviceSpec], given: Mapping[Any, _Value], argument: str
) -> dict[DeviceKey, _Value]:
    """Return a mapping of devices with the keys of ``max_memory`` in place of the caller's.

    Raises:
        DeviceError: a key is no device, or not in ``max_memory``, or two keys are one device; the message
            names ``argument``.
    """
    own_keys = {written: own_key(devices, written, argument) for written in given}
    keys = [spec.key for spec in devices]
    if unknown := [written for written, key in own_keys.items() if key not in keys]:
        known = ", ".join(map(repr, keys))
        raise DeviceError(f"{argument} names {unknown[0]!r}, which is not in max_memory: it has {known}")
    if len(set(own_keys.values())) < len(own_keys):
        raise DeviceError(f"{argument} names a device twice, in {list(given)}: keep one of these")
    return {own_keys[written]: value for written, value in given.items()}
