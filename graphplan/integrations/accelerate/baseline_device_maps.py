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

from accelerate.utils.modeling import find_tied_parameters
from torch import nn

from graphplan.devices.topology import CPU, DISK, DeviceKey
from graphplan.ir.module_map import entry_of
from graphplan.ir.schedule import Assignment
from graphplan.passes.placement.problem import Problem
from graphplan.passes.placement.residence import reside
from graphplan.warnings import silenced, unwarned

DeviceMap = Mapping[str, DeviceKey]
Mapper = Callable[[Mapping[DeviceKey, int]], DeviceMap]
_AWAY = (CPU, DISK)
_FUNCTIONS = {
    "accelerate": "accelerate.utils.modeling",
    "transformers": "transformers.integrations.accelerate",
}
_TIES = "all_tied_weights_keys"


def mappers(package: str, model: nn.Module, no_split: Sequence[str]) -> dict[str, Mapper]:
    """Way to ask -> what makes a map of budgets; nothing where the package is not installed.

    ``no_split`` has the names of module classes that are kept whole.
    """
    if importlib.util.find_spec(package) is None:
        return {}
    asked: Any = importlib.import_module(_FUNCTIONS[package])
    options: dict[str, Any] = {}
    if package == "transformers":
        options["no_placement_params"] = getattr(model, "_no_placement_params", None)

    def sequential(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet(), _with_ties(model):
            found: DeviceMap = asked.infer_auto_device_map(
                model, dict(budgets), no_split_module_classes=list(no_split), **options
            )
        return found

    def auto(budgets: Mapping[DeviceKey, int]) -> DeviceMap:
        with _quiet(), _with_ties(model):
            balanced = asked.get_balanced_memory(model, dict(budgets), no_split_module_classes=list(no_split))
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
    with silenced(*_FUNCTIONS.values(), below=logging.ERROR), unwarned():
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
        key = entry_of(device_map, operation.module_path)
        if key is None:
            makers = [graph.producer[name] for name in operation.inputs if name in graph.producer]
            key = operations[makers[0]] if makers else main
        operations[operation.name] = main if key in _AWAY else key
    homes = dict(reside(problem, operations).weights)
    for weight in graph.weights.values():
        key = entry_of(device_map, weight.name)
        if key is not None and weight.kind != "constant":
            away = CPU if weight.kind == "parameter" else main
            homes[weight.name] = away if key in _AWAY else key
    return Assignment(operations, homes)
