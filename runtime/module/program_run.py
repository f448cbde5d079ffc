"""Run one call of a program: move the inputs to their planned devices, run the code, rebuild the results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import storage_of
from graphplan.capture.model.model_weights import named_tensors
from graphplan.devices.topology import CPU, SIMULATED
from graphplan.errors import InputError, PlanError
from graphplan.ir.plan_data import PlanData
from graphplan.runtime.module.dispatch import Served
from graphplan.runtime.module.module_state import Code
from graphplan.runtime.module.program import Program


def run(module: nn.Module, program: Program, code: Code, served: Served) -> Any:
    """Return the model's result for a call that the program serves; ``code`` is over the module's weights.

    Raises:
        InputError: two inputs share memory, and the call writes to it; or two that it changes are one object.
        PlanError: weights are not where the plan has put them.
    """
    tensors, copies = take_inputs(program, served)
    code.release_stored()
    try:
        with nullcontext() if program.modes.autocast is None else without_autocast(program):
            results = code.bound(tensors)
    except RuntimeError as error:
        explain_moved_weights(module, program.plan, error)
        raise
    for original, changed in copies:
        original.copy_(changed)
    return code.rebuild(results, served.changed_arguments)


def take_inputs(
    program: Program, served: Served
) -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the inputs of the code on their devices, and pairs (caller's tensor, copy that is changed).

    Raises:
        InputError: as in :func:`run`.
    """
    leaves = served.leaves
    tensors = [leaves[index] for index in program.inputs]
    if program.changed:
        _refuse_overlap(program, tensors)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position in program.on_host:
        tensor = tensors[position]
        if isinstance(tensor, torch.Tensor) and tensor.device != program.host:
            tensors[position] = tensor.to(program.host)
            if position in program.changed:
                copies.append((tensor, tensors[position]))
    for position in program.dense:
        tensors[position] = tensors[position].contiguous()
    for cached in program.cache_tensors:
        if tensors[cached.position].device != cached.home:
            tensors[cached.position] = tensors[cached.position].to(cached.home)
    return tensors, copies


def _refuse_overlap(program: Program, tensors: Sequence[Any]) -> None:
    """Raise InputError if an input to which the call writes shares memory with another input."""
    first_position: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            first = first_position.setdefault(storage_of(tensor), position)
            if first != position and {first, position} & program.changed:
                names = program.signature.names
                earlier, later = names[program.inputs[first]], names[program.inputs[position]]
                raise InputError(
                    f"{earlier} and {later} share memory, and the model writes to it: pass a copy of one"
                )


def explain_moved_weights(module: nn.Module, plan: PlanData, error: RuntimeError) -> None:
    """Raise PlanError from torch's error if a weight is no longer where the plan has put it."""
    named = named_tensors(module)
    for name, key in plan.placement.items():
        planned = plan.devices[key]
        tensor = named.get(name)
        if tensor is None or tensor.device != planned:
            where = "gone" if tensor is None else f"on {tensor.device}"
            raise PlanError(
                f"{name!r} is {where}, but the plan has it on {planned}: a placed model cannot be moved, "
                "only partitioned again; torch.func.functional_call takes weights on their planned devices"
            ) from error


def without_autocast(program: Program) -> ExitStack:
    """Return a context manager that disables autocast, whose casts are in the graph already."""
    stack = ExitStack()
    for kind in {CPU, *(spec.type for spec in program.plan.topology.computing)}:
        if kind != SIMULATED and torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
