"""accelerate's and transformers' device maps, and what their hooks make of them.

Both see a module tree and its parameters only. transformers has its own fork of accelerate's function.
Asked as ``device_map="auto"`` asks (budgets balanced first), or as ``"sequential"`` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import get_balanced_memory, infer_auto_device_map
from accelerate.utils.modeling import find_tied_parameters
from torch import nn

from graphplan.devices.topology import CPU, DISK, DeviceKey
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import reside
from graphplan.warnings import silenced, unwarned

DeviceMap = Mapping[str, DeviceKey]
Mapper = Callable[[Mapping[DeviceKey, int]], DeviceMap]
_AWAY = (CPU, DISK)
_FORK = "transformers.integrations.accelerate"
_TIES = "all_tied_weights_keys"


def accelerate_maps(model: nn.Module, no_split: Sequence[str]) -> dict[str, Mapper]:
    """Way to ask -> what makes a map of budgets; ``no_split`` names classes that are kept whole."""

    def sequential(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet():
            found: DeviceMap = infer_auto_device_map(
                model, dict(budgets), no_split_module_classes=list(no_split)
            )
        return found

    def auto(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet():
            balanced = get_balanced_memory(model, dict(budgets), no_split_module_classes=list(no_split))
        return sequential(balanced)

    return {"auto": auto, "sequential": sequential}


def transformers_maps(model: nn.Module, no_split: Sequence[str]) -> dict[str, Mapper]:
    """The same, by transformers' fork; nothing where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    fork: Any = importlib.import_module(_FORK)  # optional package
    unplaced = getattr(model, "_no_placement_params", None)

    def sequential(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet(), _with_ties(model):
            found: DeviceMap = fork.infer_auto_device_map(
                model, dict(budgets), no_split_module_classes=set(no_split), no_placement_params=unplaced
            )
        return found

    def auto(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet(), _with_ties(model):
            balanced = fork.get_balanced_memory(model, dict(budgets), no_split_module_classes=set(no_split))
        return sequential(balanced)

    return {"auto": auto, "sequential": sequential}


@contextmanager
def _with_ties(model: nn.Module) -> Iterator[None]:
    """The fork reads ties off its own models; a plain module has them as long as it is asked."""
    if hasattr(model, _TIES):
        yield
        return
    groups = find_tied_parameters(model)
    setattr(model, _TIES, {name: first for first, *others in groups for name in others})
    try:
        yield
    finally:
        delattr(model, _TIES)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without their warnings that this machine has no such devices."""
    with (
        silenced("accelerate.utils.modeling", _FORK, below=logging.ERROR),
        unwarned(),
    ):
        yield


def assignment_of(problem: Problem, device_map: DeviceMap) -> Assignment:
    """A device map as accelerate's hooks carry it out.

    A module on ``"cpu"`` or ``"disk"`` runs on the first accelerator of the map; its parameters are
    copied there at each call, its buffers stay there. An operation of a module that the map names only
    in parts runs where its first input is.
    """
    graph = problem.graph
    main = next((key for key in device_map.values() if key not in _AWAY), CPU)
    operations: dict[str, DeviceKey] = {}
    for operation in graph.operations.values():
        key = _entry(device_map, operation.module_path)
        if key is None:
            makers = [graph.producer[name] for name in operation.inputs if name in graph.producer]
            key = operations[makers[0]] if makers else main
        operations[operation.name] = main if key in _AWAY else key
    homes = dict(reside(problem, operations).weights)
    for weight in graph.weights.values():
        key = _entry(device_map, weight.name)
        if key is not None and weight.kind != "constant":
            away = CPU if weight.kind == "parameter" else main
            homes[weight.name] = away if key in _AWAY else key
    return Assignment(operations, homes)


def _entry(device_map: DeviceMap, name: str) -> DeviceKey | None:
    """The device of the longest entry that holds ``name``."""
    while name:
        if name in device_map:
            return device_map[name]
        name = name.rpartition(".")[0]
    return device_map.get("")
