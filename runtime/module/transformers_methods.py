"""Attributes and methods of placed models that libraries use besides their forward pass.

``generate()`` reads the arguments of ``forward`` from its signature, and makes tensors on ``model.device``; a
pipeline or a trainer moves the model there. A placed model's ``device`` is the planned device of its inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import parsed_move
from graphplan.errors import PlanError
from graphplan.runtime.fallback.replaced_tensors import to_device
from graphplan.runtime.module.placed_parts import planned_attributes

# base classes of models that transformers, PEFT and diffusers move
_MOVED_BY_LIBRARY = {"PreTrainedModel", "PeftModel", "ModelMixin"}


def class_body(placed: Any, original: type[nn.Module]) -> dict[str, Any]:
    """Return the attributes of the class that derives from a model's class and ``placed``, which runs it."""

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return placed.forward(self, *args, **kwargs)

    body: dict[str, Any] = {"forward": forward, **planned_attributes(original)}
    names = {cls.__name__ for cls in original.__mro__}
    if _MOVED_BY_LIBRARY.isdisjoint(names):
        return {**body, "hf_device_map": property(_device_map)}
    body["to"] = _to
    body |= {name: _to_device(getattr(original, name), torch.device(name)) for name in ("cpu", "cuda")}
    if hasattr(original, "_valid_auto_compile_criteria"):
        # generate() must not compile a placed model, as it does other models on accelerators
        body["_valid_auto_compile_criteria"] = lambda *_args, **_kwargs: False
    if hasattr(original, "add_adapter") and "PeftModel" not in names:
        body["add_adapter"] = _refuse_adapter
    if "PeftModel" in names:
        body["get_prompt"] = _prompt_for_calls(original)
    return body


def _device_map(self: nn.Module) -> dict[str, str]:
    """Return weight -> device; with an ``hf_device_map``, accelerate and the ``Trainer`` do not move a model.

    The additional entry is for accelerate, which moves a model whose map has fewer than two.
    """
    return {"": "cpu", **{name: str(weight.device) for name, weight in self.named_parameters()}}


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the weights where they are, and record the device of later calls.

    Raises:
        PlanError: the arguments ask for another dtype.
    """
    device, dtype = parsed_move(*args, **kwargs)
    if dtype is not None and dtype != self.dtype:
        raise PlanError(
            f"a placed model keeps its dtype {self.dtype}: convert the original, and partition it"
        )
    if device is not None:
        self._graphplan.device = device
    return self


def _to_device(method: Any, place: torch.device) -> Any:
    """Return the ``cpu`` or ``cuda`` method of a placed module."""

    @functools.wraps(method)
    def convert(self: Any, device: Any = None) -> Any:
        return _to(self, place if device is None else torch.device("cuda", torch.device(device).index))

    return convert


def _prompt_for_calls(original: Any) -> Any:
    """Return PEFT's ``get_prompt`` with its result on the device of inputs: ``generate()`` joins both."""

    @functools.wraps(original.get_prompt)
    def get_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        return to_device(original.get_prompt(self, *args, **kwargs), self.device, self)

    return get_prompt


def _refuse_adapter(self: Any, *_args: Any, **_kwargs: Any) -> None:
    raise PlanError(
        f"add adapters to {type(self).__name__} before it is placed: put them into the plain model that "
        "graphplan.unplace returns, and partition that"
    )
