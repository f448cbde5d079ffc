"""Several models that work together, as in a diffusers pipeline, over one budget."""

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
        """Nothing: the components are called one by one."""
        raise InputError("these are the components of a pipeline: call one of them")


class PlacedComponents(dict[str, Any]):
    """The components of a pipeline by name, the models placed.

    Attributes:
        graphplan: the placed models as one module: ``.plan``, ``.plans``, ``.profile()``.
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
    """A pipeline whose models are placed together, within one budget.

    The pipeline runs once on zeros, without computing anything, to find which methods of which models it
    calls, with which shapes, and how often. One placement is then planned for all these calls, each counted
    as often as it was made: what runs in a loop gets the accelerators' memory, what runs once is streamed or
    computed on the CPU, as costs least::

        pipe = StableDiffusionPipeline.from_pretrained(path)
        pipe = graphplan.partition_pipeline(pipe, {0: "8GiB", "cpu": "30GiB"}, prompt="a cat")
        image = pipe(prompt="a dog").images[0]

    Args:
        pipe: a diffusers pipeline, another object with models as attributes, or a dict of them by name. It
            is left as it was.
        max_memory: as in :func:`graphplan.partition`.
        run: runs the pipeline that it is given; by default ``pipe(**example)``. A dict needs one.
        options: further arguments of :func:`graphplan.partition`, such as ``{"offload": False}``.
        example: the arguments of one typical call of the pipeline.

    Returns:
        a shallow copy of ``pipe`` with placed models, and ``.graphplan`` beside: all of them as one placed
        module, with ``.plan`` and ``.plans``. For a dict, a :class:`PlacedComponents`.

    Raises:
        InputError: there is no model in ``pipe``, its run calls none, or it cannot be copied.
        NoGraphError: a model that is called cannot be traced: place that one by itself.
        GraphplanError: as in :func:`graphplan.partition`.
        Exception: what the pipeline itself raises, unchanged.
    """
    models = _models_of(pipe)
    if run is None and isinstance(pipe, Mapping):
        raise InputError("a dict of models cannot be called: give run=, a function that uses the models")
    if run is not None and example:
        raise InputError(f"give run= or the example's arguments, not both: {', '.join(example)}")
    own = copy.deepcopy(example)  # a generator among them would be used up

    def calls(components: nn.Module) -> None:
        rehearsed = _with(_copied(pipe, models), models, components)
        rehearsed(**own) if run is None else run(rehearsed)

    placed = partition(Components(models), max_memory, calls=calls, **(options or {}))
    found = _with(PlacedComponents(pipe) if isinstance(pipe, Mapping) else copy.copy(pipe), models, placed)
    found.graphplan = placed
    return found


def _models_of(pipe: Any) -> dict[str, nn.Module]:
    """Name -> model."""
    if isinstance(pipe, nn.Module):
        raise InputError(
            f"{type(pipe).__name__} is one model: give it to graphplan.partition, with calls= for its methods"
        )
    parts = pipe if isinstance(pipe, Mapping) else getattr(pipe, "components", None)
    parts = parts if isinstance(parts, Mapping) else getattr(pipe, "__dict__", {})
    found = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    if not found:
        raise InputError(f"there is no torch.nn.Module among the components of this {type(pipe).__name__}")
    return {name: read_model(model) for name, model in found.items()}


def _copied(pipe: Any, models: Mapping[str, nn.Module]) -> Any:
    """A deep copy, as a run may change schedulers and the like, with the models themselves."""
    own: dict[int, Any] = {id(model): model for model in models.values()}
    try:
        if isinstance(pipe, Mapping):
            return PlacedComponents(copy.deepcopy(dict(pipe), own))
        return copy.deepcopy(pipe, own)
    except Exception as error:
        raise InputError(
            f"the run that finds the calls needs a copy of this {type(pipe).__name__}, and copy.deepcopy "
            f"fails: {type(error).__name__}: {error}. Take out what cannot be copied, or give a dict of the "
            "models with run="
        ) from error


def _with(pipe: Any, models: Mapping[str, nn.Module], components: nn.Module) -> Any:
    """The pipeline, with these components in place of its models."""
    for name in models:
        model = components.get_submodule(name)
        if isinstance(pipe, dict):
            pipe[name] = model
        elif hasattr(pipe, "register_modules"):  # of diffusers, which keeps a list of them
            pipe.register_modules(**{name: model})
        else:
            setattr(pipe, name, model)
    return pipe
