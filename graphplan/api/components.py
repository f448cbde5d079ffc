"""Place the models of a pipeline, such as one of diffusers, together within one set of budgets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from graphplan.api.arguments import read_model
from graphplan.api.partition import partition
from graphplan.devices.max_memory import MaxMemory
from graphplan.errors import InputError


class Components(nn.Module):
    """The models of a pipeline as one module, so that one plan serves them all."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)

    def forward(self) -> None:
        """Raise InputError: the components are called one by one."""
        raise InputError("these are the components of a pipeline: call one of them")


class PlacedComponents(dict[str, Any]):
    """Name -> component of a pipeline; models are placed.

    Attributes:
        graphplan: all placed models as one module, with ``.plan``, ``.plans`` and ``.profile()``.
    """

    graphplan: Any


def partition_pipeline(
    pipe: Any,
    max_memory: MaxMemory | None = None,
    *,
    run: Callable[[Any], Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **example: Any,
) -> Any:
    """Return a copy of a pipeline whose models are placed together, within one set of budgets.

    The pipeline runs once on zeros, without computing anything, to find which methods of which models it
    calls, with which shapes, and how often. One placement of the weights is then planned for all these
    calls, each weighted by how often it was made. So models that run in a loop tend to reside on
    accelerators, and models that run once to be streamed or computed on the CPU::

        pipe = StableDiffusionPipeline.from_pretrained(path)
        pipe = graphplan.partition_pipeline(pipe, {0: "8GiB", "cpu": "30GiB"}, prompt="a cat")
        image = pipe(prompt="a dog").images[0]

    Args:
        pipe: a diffusers pipeline, another object with models as attributes, or a dict of name -> model. It
            is not changed.
        max_memory: as in :func:`graphplan.partition`.
        run: function that takes a pipeline and runs it; by default ``pipe(**example)``. A dict needs one.
        options: further arguments of :func:`graphplan.partition`, such as ``{"offload": False}``.
        example: the arguments of one typical call of the pipeline.

    Returns:
        a shallow copy of ``pipe`` with placed models. Its attribute ``graphplan`` is one placed module of
        them all, with ``.plan`` and ``.plans``. For a dict, a :class:`PlacedComponents`.

    Raises:
        InputError: ``pipe`` has no model, its run calls none, or it cannot be copied.
        NoGraphError: a model that is called cannot be traced: place it by itself.
        GraphplanError: as in :func:`graphplan.partition`.
        Exception: what the pipeline itself raises, unchanged.
    """
    models = _models_of(pipe)
    if run is None and isinstance(pipe, Mapping):
        raise InputError("a dict of models cannot be called: give run=, a function that uses the models")
    if run is not None and example:
        raise InputError(f"give run= or the example's arguments, not both: {', '.join(example)}")
    run_example = copy.deepcopy(example)  # the run would use up a generator

    def calls(components: nn.Module) -> None:
        rehearsed = _insert(_copy_pipe(pipe, models), models, components)
        rehearsed(**run_example) if run is None else run(rehearsed)

    placed = partition(Components(models), max_memory, calls=calls, **(options or {}))
    result = _insert(PlacedComponents(pipe) if isinstance(pipe, Mapping) else copy.copy(pipe), models, placed)
    result.graphplan = placed
    return result


def _models_of(pipe: Any) -> dict[str, nn.Module]:
    """Return name -> model of a pipeline; raise InputError if there is none."""
    if isinstance(pipe, nn.Module):
        raise InputError(
            f"{type(pipe).__name__} is one model: give it to graphplan.partition, with calls= for its methods"
        )
    parts = pipe if isinstance(pipe, Mapping) else getattr(pipe, "components", None)
    parts = parts if isinstance(parts, Mapping) else getattr(pipe, "__dict__", {})
    models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    if not models:
        raise InputError(f"there is no torch.nn.Module among the components of this {type(pipe).__name__}")
    return {name: read_model(model) for name, model in models.items()}


def _copy_pipe(pipe: Any, models: Mapping[str, nn.Module]) -> Any:
    """Return a deep copy that shares the models: a run may change schedulers and other parts."""
    memo: dict[int, Any] = {id(model): model for model in models.values()}
    try:
        if isinstance(pipe, Mapping):
            return PlacedComponents(copy.deepcopy(dict(pipe), memo))
        return copy.deepcopy(pipe, memo)
    except Exception as error:
        raise InputError(
            f"the run that finds the calls needs a copy of this {type(pipe).__name__}, and copy.deepcopy "
            f"fails: {type(error).__name__}: {error}. Take out what cannot be copied, or give a dict of the "
            "models with run="
        ) from error


def _insert(pipe: Any, models: Mapping[str, nn.Module], components: nn.Module) -> Any:
    """Put the submodules of ``components`` in place of the pipeline's models, and return the pipeline."""
    for name in models:
        model = components.get_submodule(name)
        if isinstance(pipe, dict):
            pipe[name] = model
        elif hasattr(pipe, "register_modules"):  # diffusers keeps a list of its models
            pipe.register_modules(**{name: model})
        else:
            setattr(pipe, name, model)
    return pipe
