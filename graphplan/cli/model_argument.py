"""The model that a word on the command line names: a transformers configuration, or a factory.

Of a folder only ``config.json`` is read. Weights are not, so that nothing is unpickled; code is not,
unless the caller trusts it. The model has no data, unless it is asked for: it is built on the meta device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphplan
from graphplan._compat.transformers import forget_attention
from graphplan.cli.console import working
from graphplan.cli.example_inputs import example_inputs
from graphplan.errors import GraphplanError, InputError
from graphplan.warnings import warn

_FACTORY = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of a model and of its example inputs.

    Attributes:
        batch: of the example inputs; None for 1, or for what a factory gives.
        length: as in :func:`graphplan.cli.example_inputs.example_inputs`.
        dtype: name of a floating dtype of torch, or None for the model's own.
        trust_remote_code: whether code from a model folder may run.
        meta: whether a factory runs with torch's default device set to meta.
        data: whether a model of a configuration has data, newly initialised.
    """

    batch: int | None = None
    length: int | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    meta: bool = False
    data: bool = False

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype."""
        if self.dtype is None:
            return None
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise InputError(
                f"--dtype {self.dtype!r} is no floating dtype: write bfloat16, float16 or float32"
            )
        return found


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model without data, named by its class, with example inputs by position and by name."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> str:
        """The example inputs for people: ``input_ids (1, 512)``."""
        named = [*((f"argument {i}", x) for i, x in enumerate(self.args)), *self.kwargs.items()]
        texts = (f"{n} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else str(n) for n, x in named)
        return ", ".join(texts) or "none"


def load_named(word: str, ask: Ask) -> NamedModel:
    """The model that ``word`` names, built while a spinner turns.

    Args:
        word: a folder with a ``config.json`` of transformers, that file, or ``package.module:factory``. A
            factory is called without arguments, and returns a module, or a module and its example inputs:
            a mapping, or a tuple.
        ask: of what dtype it is, and what its example inputs are.
    """
    path = Path(word)
    with working(f"building {word}"):
        if path.exists():
            return _of_config(path, ask)
        if _FACTORY.fullmatch(word):
            return _of_factory(word, ask)
    raise InputError(
        f"there is no folder or file {word!r}, and it is no package.module:factory; models are not downloaded"
    )


# -- transformers --------------------------------------------------------------------------------------


def _of_config(path: Path, ask: Ask) -> NamedModel:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"the folder {str(path)!r} has no config.json: it is not a transformers model")
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"{str(file)!r} needs transformers: pip install 'transformers>=5.17'")
    from transformers import AutoConfig  # optional package
    from transformers.utils import logging

    logging.set_verbosity_error()
    dtype = ask.torch_dtype
    try:
        config = AutoConfig.from_pretrained(
            str(file if path.is_file() else path),
            trust_remote_code=ask.trust_remote_code,
            local_files_only=True,
        )
        forget_attention(config)  # what the file asks for may be a kernel to download
        model = _build(config, ask)
    except GraphplanError:
        raise
    except Exception as error:  # transformers raises anything for a configuration that it cannot use
        raise InputError(f"no model comes of {str(file)!r}: {_reason(error, config_file=file)}") from error
    if getattr(config, "quantization_config", None) is not None:
        warn(
            f"{file} asks for quantised weights, which are known only when the weights are loaded. Sizes are "
            f"counted in {dtype or config.dtype or torch.float32}; give a --dtype of similar size"
        )
    model = model.to(dtype or config.dtype or torch.float32).eval()
    inputs = example_inputs(model, ask.batch or 1, ask.length)
    return NamedModel(type(model).__name__, model, (), inputs)


def _build(config: Any, ask: Ask) -> nn.Module:
    """The class that the configuration names; code of its own where that is trusted."""
    trusted = ask.trust_remote_code
    import transformers  # optional package

    own = getattr(config, "auto_map", None) or {}
    auto_class = next((n for n in own if n.startswith("AutoModelFor")), "AutoModel")
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    found = next((cls for cls in named if isinstance(cls, type) and issubclass(cls, nn.Module)), None)
    with torch.device("cpu" if ask.data else "meta"):
        if trusted and auto_class in own:
            made: nn.Module = getattr(transformers, auto_class).from_config(config, trust_remote_code=True)
        elif found is not None:
            made = found(config)
        else:
            made = transformers.AutoModel.from_config(config, trust_remote_code=False)
    return made


def _reason(error: Exception, config_file: Path) -> str:
    if "trust_remote_code" in str(error):
        return (
            f"it needs the Python code in {str(config_file.parent)!r}, which runs only with "
            "--trust-remote-code"
        )
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# -- factories -----------------------------------------------------------------------------------------


def of_model(error: Exception) -> Exception:
    """What a model raises for its example inputs, as an error of ours; an error in our own code as it is."""
    frames = traceback.extract_tb(error.__traceback__)
    ours, torchs = (f"{Path(str(package.__file__)).parent}{os.sep}" for package in (graphplan, torch))
    if frames[-1].filename.startswith(ours):
        return error
    own = [frame for frame in frames if not frame.filename.startswith((ours, torchs))]
    place = f" ({own[-1].filename}:{own[-1].lineno}, in {own[-1].name})" if own else ""
    text = " ".join(str(error).split())
    return InputError(f"the model does not take its example inputs: {type(error).__name__}: {text}{place}")


def _of_factory(word: str, ask: Ask) -> NamedModel:
    module_name, _, path = word.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: modules of the current folder
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
        with torch.device("meta" if ask.meta else "cpu"):
            made = found() if callable(found) and not isinstance(found, nn.Module) else found
    except Exception as error:  # the caller's own code may raise anything
        text = " ".join(str(error).split())
        raise InputError(f"no model comes of {word!r}: {type(error).__name__}: {text}") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{word!r} gives {model!r:.60}, not a torch.nn.Module, or one and its inputs")
    dtype = ask.torch_dtype
    model = model.eval() if dtype is None else model.to(dtype).eval()
    name = type(model).__name__
    if inputs is None and hasattr(model, "main_input_name"):
        return NamedModel(name, model, (), example_inputs(model, ask.batch or 1, ask.length))
    if ask.batch or ask.length:
        raise InputError(f"--batch and --length are for transformers models: {word!r} returns its own")
    if isinstance(inputs, Mapping):
        return NamedModel(name, model, (), dict(inputs))
    if inputs is not None and not isinstance(inputs, tuple | list):
        kind = type(inputs).__name__
        raise InputError(f"the inputs of {word!r} must be a mapping of names or a tuple, not a {kind}")
    return NamedModel(name, model, tuple(inputs or ()))
