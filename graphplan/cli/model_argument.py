"""Load the model that the command line names: a transformers configuration, or a factory.

Only ``config.json`` is read from a folder: no weights, so that nothing is unpickled, and no code unless the
caller trusts it. By default the model is built on the meta device, without data.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphplan
from graphplan._compat.transformers import forget_attention
from graphplan.cli.console import working
from graphplan.errors import GraphplanError, InputError
from graphplan.message_text import one_line
from graphplan.warnings import warn

_TOKENS = 512  # default length, or less if the model accepts less
_SAMPLES = 16000  # audio samples: a second at the usual rate
_SIDE = 224  # pixels of an image side, if the configuration has no size
_FACTORY = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The command line's options for a model and its example inputs.

    Attributes:
        batch: batch size of the example inputs; None for 1, or for the factory's own inputs.
        length: as in :func:`example_inputs`.
        dtype: name of a floating-point dtype of torch; None for the model's own.
        trust_remote_code: whether code from a model folder may run.
        meta: whether a factory runs with the meta device as torch's default.
        data: whether a model built from a configuration has newly initialised data.
    """

    batch: int | None = None
    length: int | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    meta: bool = False
    data: bool = False

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype, or None; InputError is raised for an unknown name."""
        if self.dtype is None:
            return None
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise InputError(
                f"--dtype {self.dtype!r} is not a floating-point dtype: write bfloat16, float16 or float32"
            )
        return dtype


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model, the name of its class, and example inputs by position and by name."""

    name: str
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> str:
        """The example inputs as text: ``input_ids (1, 512)``."""
        named = [*((f"argument {i}", x) for i, x in enumerate(self.args)), *self.kwargs.items()]
        texts = (f"{n} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else str(n) for n, x in named)
        return ", ".join(texts) or "none"


def load_named(word: str, model_options: ModelOptions) -> NamedModel:
    """Return the model that ``word`` names, built while a spinner is shown.

    Args:
        word: a folder with a ``config.json`` of transformers, that file, or ``package.module:factory``. A
            factory takes no arguments, and returns a module, or a module and its example inputs, which are
            a mapping or a tuple.
        model_options: options for the model and its example inputs.

    Raises:
        InputError: there is no such model, or it cannot be built.
    """
    path = Path(word)
    with working(f"building {word}"):
        if path.exists():
            return _of_config(path, model_options)
        if _FACTORY.fullmatch(word):
            return _of_factory(word, model_options)
    raise InputError(
        f"{word!r} is neither an existing file or folder nor a package.module:factory (models are not "
        "downloaded)"
    )


# -- transformers --------------------------------------------------------------------------------------


def _of_config(path: Path, model_options: ModelOptions) -> NamedModel:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"the folder {str(path)!r} has no config.json: it is not a transformers model")
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"{str(file)!r} needs transformers: pip install 'transformers>=5.17'")
    from transformers import AutoConfig  # optional package
    from transformers.utils import logging

    logging.set_verbosity_error()
    dtype = model_options.torch_dtype
    try:
        config = AutoConfig.from_pretrained(
            str(file if path.is_file() else path),
            trust_remote_code=model_options.trust_remote_code,
            local_files_only=True,
        )
        forget_attention(config)  # the attention of the file may be a kernel to download
        model = _build(config, model_options)
    except GraphplanError:
        raise
    except Exception as error:  # transformers may raise anything for a bad configuration
        reason = one_line(error)
        if "trust_remote_code" in reason:
            code = f"the Python code in {str(file.parent)!r}"
            reason = f"it needs {code}, which runs only with --trust-remote-code"
        raise InputError(f"no model can be built from {str(file)!r}: {reason}") from error
    if getattr(config, "quantization_config", None) is not None:
        warn(
            f"{file} asks for quantised weights, whose sizes are known only after loading. The plan counts "
            f"sizes in {dtype or config.dtype or torch.float32}; give a --dtype of similar size"
        )
    model = model.to(dtype or config.dtype or torch.float32).eval()
    inputs = example_inputs(model, model_options.batch or 1, model_options.length)
    return NamedModel(type(model).__name__, model, (), inputs)


def _build(config: Any, model_options: ModelOptions) -> nn.Module:
    """Build the class that the configuration names; its own code runs only if it is trusted."""
    import transformers  # optional package

    auto_map = getattr(config, "auto_map", None) or {}
    auto_class = next((n for n in auto_map if n.startswith("AutoModelFor")), "AutoModel")
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    model_class = next((cls for cls in named if isinstance(cls, type) and issubclass(cls, nn.Module)), None)
    with torch.device("cpu" if model_options.data else "meta"):
        if model_options.trust_remote_code and auto_class in auto_map:
            model: nn.Module = getattr(transformers, auto_class).from_config(config, trust_remote_code=True)
        elif model_class is not None:
            model = model_class(config)
        else:
            model = transformers.AutoModel.from_config(config, trust_remote_code=False)
    return model


# -- example inputs, from the configuration -------------------------------------------------------------


def example_inputs(model: Any, batch: int, length: int | None) -> dict[str, torch.Tensor]:
    """Return name -> input on the meta device, in the model's dtype except for token ids.

    Args:
        model: a ``PreTrainedModel``.
        batch: number of sequences, images or recordings.
        length: number of tokens or audio samples; None for 512 tokens, or fewer if the model accepts fewer,
            and for 16,000 samples.

    Raises:
        InputError: graphplan has no example for the model's main input.
    """
    config, main_name = model.config, model.main_input_name
    parameters = inspect.signature(model.forward).parameters
    has_towers = hasattr(model, "get_text_features") and hasattr(model, "get_image_features")
    makers = {
        "input_ids": lambda: _tokens(config, batch, length),
        "pixel_values": lambda: _image(config, batch, model.dtype),
        "input_values": lambda: _audio(config, batch, length, model.dtype),
        "input_features": lambda: _spectrogram(config, batch, model.dtype),
    }
    if main_name not in makers:
        raise InputError(
            f"{type(model).__name__} takes {main_name!r}, for which graphplan has no example input: write a "
            "factory that returns (model, inputs) and give it as package.module:factory"
        )
    names = ["input_ids", "pixel_values"] if has_towers else [main_name]
    inputs = {name: makers[name]() for name in names if name in parameters}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _tokens(config, batch, length, "max_target_positions")
    return inputs


def _tokens(config: Any, batch: int, length: int | None, limit: str = "") -> torch.Tensor:
    text = config.get_text_config()
    limits = (getattr(text, name, None) for name in (limit, "max_position_embeddings", "n_positions") if name)
    most = next((value for value in limits if isinstance(value, int) and value > 0), _TOKENS)
    return torch.zeros(batch, length or min(most, _TOKENS), dtype=torch.long, device="meta")


def _image(config: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or _SIDE
    if isinstance(size, dict):
        size = (size.get("height", _SIDE), size.get("width", _SIDE))
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(vision, "num_channels", 3)
    return torch.zeros(batch, channels, height, width, dtype=dtype, device="meta")


def _audio(config: Any, batch: int, length: int | None, dtype: torch.dtype) -> torch.Tensor:
    shape: tuple[int, ...] = (batch, length or _SAMPLES)
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # in fact a spectrogram
        shape = (batch, config.max_length, config.num_mel_bins)
    return torch.zeros(shape, dtype=dtype, device="meta")


def _spectrogram(config: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    if not (hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")):
        raise InputError(
            f"{type(config).__name__} does not say how long its input_features are: write a factory that "
            "returns (model, inputs) and give it as package.module:factory"
        )
    frames = 2 * config.max_source_positions  # a first convolution halves their number
    return torch.zeros(batch, config.num_mel_bins, frames, dtype=dtype, device="meta")


# -- factories -----------------------------------------------------------------------------------------


@contextmanager
def model_errors() -> Iterator[None]:
    """Context manager that raises InputError for errors in a model's code, not for those of graphplan."""
    try:
        yield
    except (GraphplanError, OSError):
        raise
    except Exception as error:  # the model's own code may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        own_dir, torch_dir = (f"{Path(str(one.__file__)).parent}{os.sep}" for one in (graphplan, torch))
        if frames[-1].filename.startswith(own_dir):
            raise
        others = [frame for frame in frames if not frame.filename.startswith((own_dir, torch_dir))]
        place = f" ({others[-1].filename}:{others[-1].lineno}, in {others[-1].name})" if others else ""
        raise InputError(f"the model does not accept its example inputs: {one_line(error)}{place}") from error


def _of_factory(word: str, model_options: ModelOptions) -> NamedModel:
    module_name, _, path = word.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as with `python -m`: modules of the current folder
    try:
        target: Any = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
        with torch.device("meta" if model_options.meta else "cpu"):
            result = target() if callable(target) and not isinstance(target, nn.Module) else target
    except Exception as error:  # the caller's own code may raise anything
        raise InputError(f"no model can be built by {word!r}: {one_line(error)}") from error
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{word!r} gives {model!r:.60}, not a torch.nn.Module, or one and its inputs")
    dtype = model_options.torch_dtype
    model = model.eval() if dtype is None else model.to(dtype).eval()
    name = type(model).__name__
    if inputs is None and hasattr(model, "main_input_name"):
        inputs = example_inputs(model, model_options.batch or 1, model_options.length)
        return NamedModel(name, model, (), inputs)
    if model_options.batch or model_options.length:
        raise InputError(f"--batch and --length are for transformers models: {word!r} returns its own")
    if isinstance(inputs, Mapping):
        return NamedModel(name, model, (), dict(inputs))
    if inputs is not None and not isinstance(inputs, tuple | list):
        kind = type(inputs).__name__
        raise InputError(f"the inputs of {word!r} must be a mapping of names or a tuple, not a {kind}")
    return NamedModel(name, model, tuple(inputs or ()))
