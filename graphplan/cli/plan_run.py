"""Carry out a saved plan: place the model as it says, run its example inputs, and measure.

Weights are read from the folder's safetensors files. If there are none, weights are newly initialised: their
values affect the results, but neither bytes nor times.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphplan.analysis.plan import Plan
from graphplan.api.load import load
from graphplan.api.partition import partition
from graphplan.capture.signature import leaf_on_cpu
from graphplan.capture.structure import map_leaves
from graphplan.cli.model_argument import ModelOptions, NamedModel, load_named, model_errors
from graphplan.devices.max_memory import require_present
from graphplan.devices.topology import SIMULATED, DeviceKey
from graphplan.errors import InputError
from graphplan.runtime.profile.call_profile import Profile
from graphplan.runtime.simulate.simulation import simulate


def run_plan(
    plan: Plan, word: str, model_options: ModelOptions, *, simulated: bool, capture_cache: Path | None = None
) -> tuple[NamedModel, Profile, float]:
    """Place a model as a plan of a forward pass says, without a search, and run its example inputs.

    ``word`` and ``model_options`` are as for :func:`load_named`. If ``simulated``, the CPU simulates the
    plan's accelerators.

    Returns:
        the model, the profile of a forward pass with marks between the operations, and the seconds of another
        pass without marks, from inputs on the CPU to results there.

    Raises:
        PlanError: the plan is for another model, other inputs, or other versions.
        DeviceError: this machine lacks a device of the plan.
        InputError: the model does not exist or does not run, or the plan is for a training step.
    """
    if plan.graph.trains:
        raise InputError(
            "the plan is of a training step, and `run` makes forward passes: use partition(plan=)"
        )
    if simulated:
        plan = on_simulated_devices(plan)
    sizes: dict[DeviceKey, Any] = {spec.index: spec.memory for spec in plan.topology.accelerators}
    with simulate(sizes) if simulated else nullcontext():
        # checked before the model is built
        require_present(plan.topology, "Add --simulate to run the plan on the CPU")
        named = load_named(word, replace(model_options, data=not _has_weights(Path(word))))
        args, kwargs = map_leaves(leaf_on_cpu, (named.args, dict(named.kwargs)))
        with model_errors():
            placed = _place_model(
                word,
                model_options,
                named,
                args=args,
                kwargs=kwargs,
                plan=plan,
                strict=True,
                capture_cache=capture_cache,
            )
            placed(*args, **kwargs)
            start = time.perf_counter()
            placed(*args, **kwargs)
            seconds = time.perf_counter() - start
            profile = placed.graphplan.profile(*args, **kwargs)
    return named, profile, seconds


def on_simulated_devices(plan: Plan) -> Plan:
    """Return the plan with simulated accelerators in place of its own."""
    accelerators = plan.topology.accelerators
    if not accelerators:
        raise InputError("the plan uses no accelerator: there is nothing to simulate")
    devices = tuple(
        replace(spec, device=f"{SIMULATED}:{spec.index}") if spec.is_accelerator else spec
        for spec in plan.topology.devices
    )
    return replace(plan, topology=replace(plan.topology, devices=devices))


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors"))


def _place_model(word: str, model_options: ModelOptions, named: NamedModel, **options: Any) -> Any:
    """Return the placed model; ``options`` are arguments of :func:`graphplan.partition`."""
    tensors = list(named.model.parameters())
    if _has_weights(Path(word)):
        return load(
            word,
            dtype=next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32),
            model_class=type(named.model),
            trust_remote_code=model_options.trust_remote_code,
            **options,
        )
    if any(tensor.device.type == "meta" for tensor in tensors):
        raise InputError(f"{word!r} returns a model on the meta device, which has no data to run with")
    return partition(named.model, **options)
