"""What the code of transformers asks of a model beside calling it: for placed models, answers that hold.

``generate()`` reads the arguments of ``forward`` from its signature, calls the encoder by itself, and makes
tensors on ``model.device``; a pipeline moves the model there. A placed model's ``device`` is where the
tensors of its calls are, as planned; its encoder is a *part*: the submodule, whose call goes through a graph
of its own over the weights of the whole; so are its embeddings.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import torch
from torch import nn

from graphplan.errors import PlanError

__all__ = ["PlacedPart", "answers"]


class PlacedPart:
    """A submodule of a placed module, to be called by itself. It holds on to the whole, not the reverse."""

    def _graphplan_enter(self, method: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        """Run a method of the submodule, placed."""
        whole, path = self.__dict__["_graphplan_whole"], self.__dict__["_graphplan_path"]
        return whole._graphplan_enter(path + method, signature, args, kwargs)


_parts: dict[type, type] = {}


def _part(whole: nn.Module, found: Any) -> Any:
    """A submodule as a part of its placed whole; everything else as it is."""
    path = next((name for name, module in whole.named_modules() if module is found), "")
    if not path:
        return found
    cls = type(found)
    if cls not in _parts:
        names = ("__module__", "__qualname__", "__doc__")
        body = (
            {name: getattr(cls, name) for name in names} | _methods(cls) | {"forward": _entry(cls, "forward")}
        )
        _parts[cls] = type(cls.__name__, (PlacedPart, cls), body)
    part: Any = object.__new__(_parts[cls])
    part.__dict__.update(found.__dict__)
    part.__dict__.update(_graphplan_whole=whole, _graphplan_path=path)
    return part


_CONVERSIONS = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
_CALLED = re.compile(
    r"get_(image|video|audio|text|qformer)_features$"
)  # methods that compute, and are called


def _methods(original: type) -> dict[str, Any]:
    """The methods beside ``forward`` that are graphs of their own."""
    return {name: _entry(original, name) for name in dir(original) if _CALLED.match(name)}


def _entry(original: type, name: str) -> Any:
    method = getattr(original, name)
    entry = "" if name == "forward" else f":{name}"

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._graphplan_enter(entry, inspect.signature(method.__get__(self)), args, kwargs)

    return call


def _forward_of(cls: type) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)  # type: ignore[attr-defined]  # both classes have it

    return forward


def answers(placed: type, original: type[nn.Module]) -> dict[str, Any]:
    """The attributes of the class of placed copies.

    Args:
        placed: the class that runs placed modules.
        original: the model's own.
    """
    body: dict[str, Any] = {"forward": functools.wraps(original.forward)(_forward_of(placed))}
    if not any(cls.__name__ == "PreTrainedModel" for cls in original.__mro__):
        return body
    body |= _methods(original)
    body["device"] = property(_device_of(original))
    body["to"] = _to
    body |= {name: _to_like(getattr(original, name), dtype) for name, dtype in _CONVERSIONS.items()}
    body |= {name: _to_like(getattr(original, name), torch.device(name)) for name in ("cpu", "cuda")}
    for name in ("get_encoder", "get_decoder", "get_input_embeddings", "get_output_embeddings"):
        if callable(getattr(original, name, None)):
            body[name] = _finder(getattr(original, name))
    body["base_model"] = property(_finder(original.base_model.fget))  # type: ignore[attr-defined]
    if hasattr(original, "_valid_auto_compile_criteria"):
        body["_valid_auto_compile_criteria"] = _never
    return body


def _device_of(original: type[nn.Module]) -> Any:
    def device(self: Any) -> torch.device:
        """Where the tensors of calls are, as planned."""
        state = self.__dict__.get("_graphplan")
        planned = state is not None and bool(state.programs)
        own: Any = getattr(original, "device")  # noqa: B009  # a property of PreTrainedModel
        found: torch.device = (state.device or state.programs[0].host) if planned else own.fget(self)
        return found

    return device


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave the weights where they are, and say from now on that calls are made from another device.

    Raises:
        PlanError: asked for another dtype.
    """
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if dtype is not None and dtype != self.dtype:
        raise PlanError(
            f"a placed model keeps its dtype {self.dtype}: convert the original, and partition it"
        )
    if device is not None:
        self._graphplan.device = device
    return self


def _to_like(method: Any, place: torch.dtype | torch.device) -> Any:
    """A method of modules that is short for ``to``."""

    @functools.wraps(method)
    def convert(self: Any, device: Any = None) -> Any:
        return _to(self, place if device is None else torch.device("cuda", torch.device(device).index))

    return convert


def _finder(method: Any) -> Any:
    @functools.wraps(method)
    def find(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _part(self, method(self, *args, **kwargs))

    return find


def _never(_self: Any, *_args: Any, **_kwargs: Any) -> bool:
    """``generate`` compiles models on accelerators by itself: a placed model's code is generated already."""
    return False
