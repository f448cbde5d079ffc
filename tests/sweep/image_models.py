"""One small model of every family of timm and torchvision, with an image: for the sweep. Needs both packages.

torchvision's detection models are left out: how many boxes they return is known from the data alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import timm
import torch
from torch import nn
from torchvision import models


def names() -> list[str]:
    """``timm/MODULE`` and ``torchvision/FAMILY``."""
    families = {f"torchvision/{_family(model)}" for model in _of_torchvision()}
    return sorted(families | {f"timm/{module}" for module in timm.list_modules()})


def make(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The smallest model of a family, and named arguments of a call."""
    package, _, family = name.partition("/")
    if package == "timm":
        model = timm.create_model(_smallest(timm.list_models(module=family), timm.create_model))
        size = model.pretrained_cfg.get("input_size", (3, 224, 224))
        return model.eval(), {"x": torch.rand(1, *size)}
    of_family = [model for model in _of_torchvision() if _family(model) == family]
    model = _of_name(_smallest(of_family, _of_name))
    inputs = zip(inspect.signature(model.forward).parameters, _images(family), strict=False)
    return model.eval(), dict(inputs)


def _family(name: str) -> str:
    return models.get_model_builder(name).__module__.rpartition("models.")[2]


def _of_name(name: str) -> nn.Module:
    return models.get_model(name, **_without_weights(_family(name)))


def _of_torchvision() -> list[str]:
    left_out = {*models.list_models(models.detection), *models.list_models(models.quantization)}
    return [name for name in models.list_models() if name not in left_out]


def _without_weights(family: str) -> dict[str, Any]:
    """Else the backbone's are downloaded."""
    return {"weights": None, **({"weights_backbone": None} if family.startswith("segmentation") else {})}


def _smallest(names: list[str], of_name: Any) -> str:
    """The model of the fewest parameters, made on meta; some cannot be."""
    found: dict[str, int] = {}
    for name in names:
        try:
            with torch.device("meta"):
                found[name] = sum(p.numel() for p in of_name(name).parameters())
        except Exception:  # models compute with values, or lack an optional package
            continue
    return min(found, key=found.__getitem__) if found else names[0]


def _images(family: str) -> list[torch.Tensor]:
    if family.startswith("optical_flow"):
        return [torch.rand(1, 3, 128, 128) for _ in range(2)]
    if family.startswith("video"):
        frames, side = (8, 64) if family == "video.resnet" else (16, 224)
        return [torch.rand(1, 3, frames, side, side)]
    side = 224 if family in ("vision_transformer", "maxvit") else 128
    return [torch.rand(1, 3, side, side)]
