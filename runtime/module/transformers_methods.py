"""What the code of transformers asks of a model beside calling it: for placed models, answers that hold.

``generate()`` reads the arguments of ``forward`` from its signature, and makes tensors on ``model.device``; a
pipeline or a trainer moves the model there. A placed model's ``device`` is where the tensors of its calls
are, as planned.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from graphplan._compat.torch import parsed_move
from graphplan.errors import PlanError
from graphplan.runtime.module.placed_parts import checkpointing_of, device_of, methods_of

_MOVED = {"PreTrainedModel", "PeftModel"}  # classes of models that code of their library moves


def answers(placed: Any, original: type[nn.Module]) -> dict[str, Any]:
    """The attributes of the class of placed copies: made of a model's ``original`` and the class that runs
    them.
    """

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return placed.forward(self, *args, **kwargs)

    body: dict[str, Any] = {"forward": forward, **methods_of(original), **device_of(original)}
    body |= checkpointing_of(original)
    if _MOVED.isdisjoint(cls.__name__ for cls in original.__mro__):
        return {**body, "hf_device_map": property(_device_map)}
    body["to"] = _to
    body |= {name: _to_device(getattr(original, name), torch.device(name)) for name in ("cpu", "cuda")}
    if hasattr(original, "_valid_auto_compile_criteria"):
        # generate compiles models on accelerators by itself: a placed model's code is generated already
        body["_valid_auto_compile_criteria"] = lambda *_args, **_kwargs: False
    return body


def _device_map(self: nn.Module) -> dict[str, str]:
    """Where the weights are, by the name by which accelerate and the ``Trainer`` know not to move a model.

    Accelerate moves one whose map has fewer than two entries.
    """
    return {"": "cpu", **{name: str(weight.device) for name, weight in self.named_parameters()}}


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the weights where they are, and say from now on that calls are made from another device.

    Raises:
        PlanError: asked for another dtype.
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
    """``cpu`` or ``cuda`` of modules, which are short for ``to``."""

    @functools.wraps(method)
    def convert(self: Any, device: Any = None) -> Any:
        return _to(self, place if device is None else torch.device("cuda", torch.device(device).index))

    return convert
