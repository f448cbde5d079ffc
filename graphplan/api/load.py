""":func:`load` reads the folder of a transformers checkpoint straight to the planned devices."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphplan._compat.transformers import kept_dtypes
from graphplan.api.machines import read_on_all
from graphplan.api.partition import partition
from graphplan.api.plan_options import require_known
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.capture.thread_patches import one_at_a_time, outside_inference_mode
from graphplan.devices.max_memory import MaxMemory
from graphplan.errors import CheckpointError, InputError
from graphplan.integrations.transformers.checkpoint_rules import Matched, finish_weights, match_names
from graphplan.runtime.checkpoint.checkpoint_files import file_entries
from graphplan.runtime.checkpoint.converted_checkpoint import ConvertedCheckpoint
from graphplan.runtime.checkpoint.safetensors_header import FileTensor
from graphplan.warnings import warn

if TYPE_CHECKING:
    from transformers import PretrainedConfig  # optional package

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@outside_inference_mode
def load(
    path: str | Path,
    max_memory: MaxMemory | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    model_class: type[nn.Module] | None = None,
    config: PretrainedConfig | None = None,
    trust_remote_code: bool = False,
    strict: bool | None = None,
    **options: Any,
) -> Any:
    """Return a placed model from a folder that ``save_pretrained`` wrote, or from the Hub's local cache.

    The model is built on the meta device and planned. Its weights are then read from the folder's
    safetensors files straight to their devices: host memory holds the weights that the plan places there,
    and a few buffers. transformers' rules match tensors with weights. Nothing is unpickled or downloaded.

    Args:
        path: the folder, with ``config.json`` and ``.safetensors`` files, or the name of a model on the Hub
            (``"meta-llama/Llama-3.1-8B"``) that was downloaded to the local cache.
        max_memory: as in :func:`graphplan.partition`.
        args: as in :func:`graphplan.partition`.
        kwargs: as in :func:`graphplan.partition`.
        dtype: dtype of the weights; ``"auto"`` for the config's, or else the checkpoint's first
            floating-point dtype.
        model_class: class to build; by default the first of the config's ``architectures``.
        config: configuration to use in place of the folder's, for other attention or rotary embeddings:
            ``AutoConfig.from_pretrained(path, attn_implementation="eager")``. It is not changed.
        trust_remote_code: whether Python code from the folder may be run.
        strict: as in :func:`graphplan.partition`. If it is False, weights that the checkpoint lacks are newly
            initialised. Tensors that the model does not know only cause a warning.
        options: further arguments of :func:`graphplan.partition`.

    Returns:
        the placed model, in eval mode, as :func:`graphplan.partition` returns it.

    Raises:
        CheckpointError: the folder does not exist, has no safetensors files, is quantised, or has weights
            that are missing or have other shapes.
        InputError: ``model_class`` is not a model class of transformers (``AutoModel`` is not one), or
            ``config`` not a configuration.
        GraphplanError: as in :func:`graphplan.partition`.
    """
    own, forwarded = (inspect.signature(one).parameters.keys() for one in (load, partition))
    require_known((own | forwarded) - {"model", "checkpoint", "options"}, options, "load")
    opener = partial(
        open_pretrained,
        path,
        dtype=dtype,
        model_class=model_class,
        config=config,
        trust_remote_code=trust_remote_code,
        strict=strict is not False,
    )
    machines = options.get("machines")
    model, source = opener() if machines is None else read_on_all(machines, "opening the checkpoint", opener)
    return partition(model, max_memory, args, kwargs, checkpoint=source, strict=strict, **options)


@one_at_a_time  # while a model is built, transformers patches weight tying for all threads
def open_pretrained(
    path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    model_class: type[nn.Module] | None = None,
    config: Any = None,
    trust_remote_code: bool = False,
    strict: bool = True,
) -> tuple[nn.Module, ConvertedCheckpoint]:
    """Return a model and the source of its weights; only tensors that no checkpoint has are not on meta."""
    from transformers import PretrainedConfig, PreTrainedModel  # optional package

    folder = _find_folder(path)
    _refuse_gguf(folder)
    if not isinstance(config, PretrainedConfig | None):
        raise InputError(f"config must be a configuration of transformers, not a {type(config).__name__}")
    if config is None:
        config = _read_config(folder, trust_remote_code)
        config.name_or_path = str(path)
    else:
        config = copy.deepcopy(config)
    _refuse_quantised(folder, config)
    tensors = _tensors_of(folder, config)
    cls: Any = model_class or _class_of(folder, config, trust_remote_code)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        named = getattr(cls, "__name__", repr(cls))
        raise InputError(
            f"model_class: {named} is not a model class of transformers, such as LlamaModel: for other "
            "models use graphplan.partition(model, ..., checkpoint=path)"
        )
    weight_dtype = _settle_dtype(config, dtype, tensors)
    with ExitStack() as stack:
        contexts = cls.get_init_context(weight_dtype, False, False, None)  # type: ignore[attr-defined]
        for context in contexts:
            stack.enter_context(context)
        model = cls(config)
    _keep_float32(model, weight_dtype)
    matched = match_names(model, tensors)
    finish_weights(model, matched)
    _check_names(folder, cls, matched, strict=strict)
    _finish_model(folder, model)
    return model, ConvertedCheckpoint(ModelWeights(model), matched.tensors, matched.conversions)


def _find_folder(path: str | Path) -> Path:
    """Return the folder, for the name of a model on the Hub that of the local cache if it is there."""
    from huggingface_hub import snapshot_download  # comes with transformers

    folder = Path(path)
    if not folder.exists():
        with suppress(OSError, ValueError):  # not in the cache, or no name of a model
            return Path(snapshot_download(str(path), local_files_only=True))
    return folder


def _refuse_gguf(folder: Path) -> None:
    """Raise CheckpointError if this is a GGUF file, or a folder whose only weights are in one."""
    files = [] if any(folder.glob("*.safetensors")) else sorted(folder.glob("*.gguf"))
    if folder.suffix == ".gguf" and folder.is_file():
        files = [folder]
    if files:
        raise CheckpointError(
            f"{files[0]} is a GGUF file, which graphplan.load cannot read: load it with "
            f"from_pretrained({str(files[0].parent)!r}, gguf_file={files[0].name!r}), and give the model to "
            "graphplan.partition"
        )


def _read_config(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig  # optional package

    if not (folder / _CONFIG).is_file():
        lacks = f"{folder} has no {_CONFIG}" if folder.is_dir() else f"there is no folder {str(folder)!r}"
        raise CheckpointError(
            f"{lacks}: give the folder of a transformers model. Download one that is on the Hub first, with "
            "huggingface_hub.snapshot_download(name, allow_patterns=['*.safetensors', '*.json'])"
        )
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def _refuse_quantised(folder: Path, config: Any) -> None:
    quantised, file = getattr(config, "quantization_config", None), folder / _CONFIG
    if quantised is None and file.is_file():  # the caller's configuration may not know of it
        quantised = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    if quantised is not None:
        named = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise CheckpointError(
            f"{folder} is quantised ({getattr(named, 'value', named)}), which graphplan.load cannot read: "
            "load it with from_pretrained, and give the model to graphplan.partition"
        )


def _tensors_of(folder: Path, config: Any) -> dict[str, FileTensor]:
    weights_file = getattr(config, "transformers_weights", None)
    try:
        tensors = file_entries(folder / weights_file if weights_file else folder)
    except CheckpointError as error:
        pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
        if not pickled or list(folder.glob("*.safetensors")):
            raise
        raise CheckpointError(
            f"{folder} has weights only in {', '.join(pickled)}: such files run code when they are read. "
            "Convert them with from_pretrained and save_pretrained, if you trust them"
        ) from error
    for extra in getattr(type(config), "extra_files", ()):
        if (folder / extra).is_file():
            tensors = {**tensors, **file_entries(folder / extra)}
    return tensors


def _class_of(folder: Path, config: Any, trust_remote_code: bool) -> type[nn.Module]:
    import transformers  # optional package

    names = list(getattr(config, "architectures", None) or ())
    remote: Mapping[str, str] = getattr(config, "auto_map", None) or {}
    named = [ref for ref in remote.values() if isinstance(ref, str) and ref.rpartition(".")[2] in names]
    if trust_remote_code and named:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        cls: type[nn.Module] = get_class_from_dynamic_module(named[0], str(folder))
        return cls
    if not names:
        raise CheckpointError(f"the configuration of {folder} names no architecture: give model_class=")
    architecture: type[nn.Module] | None = getattr(transformers, names[0], None)
    if architecture is None:
        hint = ", or trust_remote_code=True, which runs the folder's code" if named else ""
        raise CheckpointError(f"transformers has no class {names[0]!r}: give model_class={hint}")
    return architecture


def _settle_dtype(config: Any, dtype: torch.dtype | str, tensors: Mapping[str, FileTensor]) -> torch.dtype:
    """Return the dtype of the weights, and write it into the config as ``from_pretrained`` does."""
    if dtype == "auto":
        file_dtypes = (tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point)
        dtype = getattr(config, "dtype", None) or next(file_dtypes, torch.get_default_dtype())
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CheckpointError(f"dtype must be 'auto' or a floating-point torch.dtype, not {dtype!r}")
    config.dtype = dtype
    for name in config.sub_configs:
        if (sub := getattr(config, name)) is not None:
            sub.dtype = dtype
    return dtype


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Convert weights that the model keeps in float32, whatever the dtype."""
    from transformers.core_model_loading import build_glob_alternation

    plan = kept_dtypes(model, dtype)
    if not plan:
        return
    pattern, dtypes, _ = build_glob_alternation(list(plan))
    for name, parameter in list(model.named_parameters()):
        match = pattern.search(name)
        if match is not None and parameter.is_floating_point():
            path, _, attribute = name.rpartition(".")
            wide = parameter.detach().to(plan[dtypes[match.lastgroup]])
            model.get_submodule(path)._parameters[attribute] = nn.Parameter(wide, parameter.requires_grad)


def _check_names(folder: Path, cls: type[nn.Module], matched: Matched, *, strict: bool) -> None:
    """Raise CheckpointError for missing weights, or warn if not ``strict``; warn of unexpected tensors."""
    if matched.missing:
        listed = ", ".join(map(repr, sorted(matched.missing)))
        if strict:
            raise CheckpointError(
                f"{folder} does not fit {cls.__name__}: missing {listed}. With strict=False they are "
                "newly initialised"
            )
        warn(f"{folder} lacks these weights, which are newly initialised: {listed}")
    if matched.unexpected:
        listed = ", ".join(map(repr, sorted(matched.unexpected)))
        warn(f"{cls.__name__} does not use these tensors of {folder}: {listed}")


def _finish_model(folder: Path, model: Any) -> None:
    from transformers import GenerationConfig  # optional package

    model.eval()
    if not model.can_generate():
        return
    has_own_file = (folder / _GENERATION).is_file()
    named = _GENERATION if has_own_file else _CONFIG  # older folders have these settings there
    try:
        model.generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name=named, local_files_only=True, _from_model_config=not has_own_file
        )
    except (OSError, ValueError, TypeError, json.JSONDecodeError) as error:
        warn(f"{folder / named} cannot be read: {error}")
