"""Training steps of placed models compared with eager mode: results, gradients, weights, bytes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping
from typing import Any

import torch
from architectures import Architecture
from builders import moves_of, planned_moves
from torch import nn

import graphplan
from graphplan.capture.structure import leaves_of
from graphplan.devices.simulated_machine import SimulatedMachine

ROOMY = 1 << 32


def loss_of(result: Any) -> torch.Tensor:
    """The model's own loss, or a sum over its results."""
    loss = result.get("loss") if hasattr(result, "get") else None
    if loss is not None:
        return loss
    leaves = [leaf for leaf in leaves_of(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sum(leaf.float().pow(2).mean() for leaf in leaves)  # type: ignore[return-value]  # at least one


def step_of(model: nn.Module, inputs: Mapping[str, Any], seed: int = 0) -> torch.Tensor:
    """One forward and backward pass; the loss."""
    torch.manual_seed(seed)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.detach()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Name -> gradient on the CPU."""
    return {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> parameter on the CPU."""
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def gap(a: Mapping[str, torch.Tensor | None], b: Mapping[str, torch.Tensor | None]) -> float:
    """The largest difference, relative to the size of values above 1; infinite where one is missing."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name, x in a.items():
        y = b[name]
        if x is None or y is None:
            worst = worst if x is y else float("inf")
        elif x.numel():
            scale = max(1.0, float(y.double().abs().max()))
            worst = max(worst, float((x.double() - y.double()).abs().max()) / scale)
    return worst


def needed(model: nn.Module, inputs: Mapping[str, Any], **options: Any) -> int:
    """Bytes of a step on one simulated accelerator with room for everything."""
    with graphplan.simulate({0: ROOMY}) as machine:
        return graphplan.plan(model, machine.max_memory, kwargs=inputs, train=True, **options).peak_bytes[0]


def measured(machine: SimulatedMachine, plan: graphplan.Plan) -> bool:
    """Whether the accelerators' peaks are the plan's; an error where one is above it, or above its budget."""
    exact = True
    for spec in plan.topology.devices:
        if isinstance(spec.key, int):
            peak, planned = machine.peak_bytes(spec.key), plan.peak_bytes[spec.key]
            assert peak <= planned <= spec.memory, (spec.key, peak, planned, spec.memory)
            exact &= peak == planned
    return exact


def check_training(
    model: nn.Module,
    inputs: Mapping[str, Any],
    budgets: Mapping[Any, int],
    *,
    optimizer: Any = torch.optim.AdamW,
    tolerance: float = 1e-5,
    exact: bool = True,
    further: int = 0,
    **options: Any,
) -> graphplan.Plan:
    """Three forward and backward passes and two steps: equal to eager, within the plan, and freed.

    After ``further`` steps, weights are within 1e-4.
    """
    eager, own = copy.deepcopy(model), copy.deepcopy(model)
    with graphplan.simulate(budgets) as machine:
        placed = graphplan.partition(
            own, machine.max_memory, kwargs=inputs, strict=True, train=True, optimizer=optimizer, **options
        )
        plan = placed.plan
        steps = optimizer(placed.parameters()), optimizer(eager.parameters())
        same = False
        for turn in range(3):
            gc.collect()
            machine.reset_peaks()
            loss = step_of(placed, inputs, turn)
            assert moves_of(machine) == planned_moves(plan)
            expected = step_of(eager, inputs, turn)
            assert abs(float(loss) - float(expected)) <= tolerance * max(1.0, abs(float(expected)))
            assert gap(gradients_of(placed), gradients_of(eager)) <= tolerance
            for parameter in placed.parameters():
                assert parameter.grad is None or parameter.grad.device == parameter.device
            if turn:
                for one in steps:
                    one.step()
                    one.zero_grad(set_to_none=False)
            same = measured(machine, plan)
        assert same or not exact, {k: (machine.peak_bytes(k), plan.peak_bytes[k]) for k in machine.capacities}
        for turn in range(further):
            for one, trained in zip(steps, (placed, eager), strict=True):
                step_of(trained, inputs, turn)
                one.step()
                one.zero_grad(set_to_none=False)
        if further:
            assert measured(machine, plan) or not exact
            assert (found := gap(weights_of(placed), weights_of(eager))) <= 1e-4, found
        buffers = {n: b.cpu() for n, b in placed.named_buffers()}
        assert gap(buffers, dict(eager.named_buffers())) <= tolerance
        del placed, own, steps, loss, parameter
        gc.collect()
        assert all(machine.live_bytes(index) == 0 for index in machine.capacities)
    return plan


CONFIGURATIONS: tuple[dict[int, float], ...] = ({0: 0.5}, {0: 0.7}, {0: 0.65, 1: 0.65})
"""Fractions of a step's bytes; the single accelerator is combined with the CPU."""


def budgets_of(size: int, configuration: int) -> dict[Any, int]:
    """Budgets of a configuration for a step that takes ``size``."""
    shares = CONFIGURATIONS[configuration]
    budgets: dict[Any, int] = {key: int(share * size) for key, share in shares.items()}
    return budgets if len(shares) > 1 else {**budgets, "cpu": ROOMY}


def example(architecture: Architecture) -> tuple[nn.Module, dict[str, Any]]:
    """A model in training mode, and inputs, with labels if it computes a loss."""
    model, inputs = architecture.build()
    if "ForCausalLM" in architecture.name or "LMHead" in architecture.name:
        inputs = {**inputs, "labels": inputs["input_ids"], "use_cache": False}
    elif architecture.kind in ("seq2seq", "speech"):
        inputs = {**inputs, "labels": inputs["decoder_input_ids"], "use_cache": False}
    return model.train(), inputs
