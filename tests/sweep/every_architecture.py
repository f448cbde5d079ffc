"""Every transformers architecture, shrunken without a word about any of them, with inputs: for the sweep.

A configuration's default is made small by the names and values of its attributes, its sub-configurations'
too, in several ways from small to careful. A model is built of the first head that its configuration has,
and inputs are made from the arguments of its ``forward``. The first of all these that runs eagerly is taken.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from architectures import SMALL
from every_input import inputs_of
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_MORE: dict[str, Any] = {
    "out_hidden_size": 32,
    "output_hidden_size": 32,
    "projection_dim": 32,
    "text_hidden_size": 32,
    "encoder_hidden_size": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
LARGEST = 48_000_000  # parameters; what is not smaller than this takes too long

_HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "AUDIO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "",
    "BACKBONE",
    "PRETRAINING",
)


@dataclass(frozen=True, slots=True)
class Built:
    """What runs eagerly.

    Attributes:
        head: name of the model's class.
        way: how the configuration was made small.
        model: in eval mode, with random weights.
        inputs: named arguments of a call.
        result: of the call.
    """

    head: str
    way: str
    model: nn.Module
    inputs: dict[str, Any]
    result: Any


class NotBuiltError(Exception):
    """No model was built, or none that was runs eagerly."""

    def __init__(self, message: str, *, built: bool) -> None:
        super().__init__(message)
        self.built = built


def names() -> list[str]:
    """Every model type that has a model."""
    mappings = [getattr(modeling_auto, name) for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES")]
    return sorted({name for mapping in mappings for name in mapping} & set(CONFIG_MAPPING.keys()))


def build(name: str) -> Built:
    """The first small model of a type that runs eagerly.

    Raises:
        NotBuiltError: there is none; the message has the reason of the last that came furthest.
    """
    if "/" in name:
        return _image_model(name)
    config_class = CONFIG_MAPPING[name]
    reasons: list[tuple[bool, str]] = []
    for way in _WAYS:
        try:
            config = config_class(**way.shrink(config_class))
        except Exception as error:  # configurations run code of their own
            reasons.append((False, f"config: {_first_line(error)}"))
            continue
        for head in _classes(name):
            made = _try(head, config, way.name)
            if isinstance(made, Built):
                return made
            reasons.append(made)
    ran = [reason for built, reason in reasons if built]
    raise NotBuiltError(ran[0] if ran else reasons[0][1] if reasons else "no model", built=bool(ran))


def _image_model(name: str) -> Built:
    """A model of ``image_models``."""
    from image_models import make  # packages that nothing else needs

    try:
        torch.manual_seed(0)
        model, inputs = make(name)
    except Exception as error:  # models run code of their own
        raise NotBuiltError(_first_line(error), built=False) from error
    try:
        with torch.no_grad():
            result = copy.deepcopy(model)(**copy.deepcopy(inputs))
    except Exception as error:  # likewise
        raise NotBuiltError(f"{type(model).__name__}: {_first_line(error)}", built=True) from error
    return Built(type(model).__name__, "smallest", model, inputs, result)


def _classes(name: str) -> list[type]:
    """Model classes of a type, the most telling first."""
    found: list[str] = []
    tables = [f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES" for head in _HEADS]
    tables += [table for table in dir(modeling_auto) if table.endswith("MAPPING_NAMES")]
    for table in tables:
        stated = getattr(modeling_auto, table).get(name, ())
        found += [stated] if isinstance(stated, str) else stated
    return [getattr(transformers, one) for one in dict.fromkeys(found)]


def _try(head: type, config: Any, way: str) -> Built | tuple[bool, str]:
    """The model and its result; or whether it was built, and why it does not run."""
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in head(config).parameters())
        if count > LARGEST:
            return False, f"{head.__name__}: {count:,} parameters are too many"
    except Exception:  # not every model can be made on meta: the real one says what is wrong
        pass
    try:
        torch.manual_seed(0)
        model = head(config).eval()
    except Exception as error:  # models run code of their own
        return False, f"{head.__name__}: {_first_line(error)}"
    if sum(p.numel() for p in model.parameters()) > LARGEST:
        return False, f"{head.__name__}: too large"
    _spread(model)
    reason = "no inputs are known"
    first = ""
    for inputs in inputs_of(model, config):
        try:
            with torch.no_grad():
                result = model(**_fresh(inputs))
        except Exception as error:  # likewise
            reason = _first_line(error)
            first = first or reason
            continue
        return Built(head.__name__, way, model, inputs, result)
    return True, f"{head.__name__}: {first or reason}"


def _spread(model: PreTrainedModel) -> None:
    """Weights that are all zero or all one hide differences."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1 and float(parameter.std()) == 0:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def _fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines)[:160] if lines else ''}"


# --- small configurations -----------------------------------------------------------------------------------

_SIZES = SMALL | _MORE
_WIDE = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
_WIDE |= dict.fromkeys(("hidden_size", "out_hidden_size", "projection_dim", "d_model"), 256)
_LAYERS = re.compile(r"(layers?|blocks|depth|n_layer|num_layers|encoder_depth|decoder_depth)(_per_\w+)?$")
_NOT_LAYERS = re.compile(
    r"(^first_k|feat|norm|drop|skip|index|freq|bottleneck|dense|selected|feature|pool|shared)"
)
_WIDTH = re.compile(
    r"(hidden_size|hidden_dim|_dim|^dim|d_model|d_inner|d_ff|ffn|intermediate_size|embed|channels|width|inner|"
    r"projection|proj|_rank|kv_dim|d_kv|head_dim|n_embd|filters|_size$)"
)
_NOT_WIDTH = re.compile(
    r"(vocab|image|patch|kernel|window|num_channels|in_channels|in_chans|input_channels|position|out_channels_in|"
    r"max_|batch|chunk|buffer|tile|crop|grid|stride|num_.*(token|head|group|layer|expert|embed)|queue|type_|"
    r"_token|pool_size|resolution|sampling|temporal|block_size|context|stage|input_size)"
)
_VOCAB = re.compile(r"(^vocab_size|_vocab_size|vocabulary_size)$")
_IMAGE = re.compile(r"^(image_size|img_size|input_size|resolution)$")
_BASE = frozenset(vars(PreTrainedConfig())) - {"vocab_size"}


@dataclass(frozen=True, slots=True)
class _Way:
    """How small, and by what rule.

    Attributes:
        name: for people.
        fixed: whether attributes that ``SMALL`` names get its values.
        divisor: of widths that ``SMALL`` does not name, or of all; 1 leaves them.
        images: the side of images.
        layers: how many; patterns of layers of several kinds need more.
        grouped: whether several heads share one of keys and values.
        wide: whether heads have the usual width, 128, which rotary sections may count on.
    """

    name: str
    fixed: bool
    divisor: int
    images: int = 32
    layers: int = 2
    grouped: bool = True
    wide: bool = False

    def shrink(self, config_class: type) -> dict[str, Any]:
        """Arguments of a configuration."""
        default = config_class()
        mapped = {own: name for name, own in getattr(default, "attribute_map", {}).items()}
        found: dict[str, Any] = {}
        for name, value in vars(default).items():
            if isinstance(value, PreTrainedConfig):
                found[name] = {**self.shrink(type(value)), "model_type": value.model_type}
            elif name not in _BASE and not name.startswith("_"):
                small = self._value(name, mapped.get(name, name), value)
                if small is not None and small != value:
                    found[name] = small
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            if isinstance(getattr(default, name, None), int) and getattr(default, name) > 2:
                found[name] = SMALL[name]
        return found

    def _value(self, name: str, common: str, value: Any) -> Any:
        if value is None and name == "head_dim" and self.fixed and not self.grouped:
            return SMALL[name]
        if isinstance(value, bool) or value is None:
            return None
        if isinstance(value, dict) and "mrope_section" in value and self.fixed:
            half = int(SMALL["head_dim"] * value.get("partial_rotary_factor", 1.0)) // 2
            return {**value, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
        if isinstance(value, list | tuple):
            return self._list(name, value)
        if not isinstance(value, int):
            return None
        if _VOCAB.search(name) or _VOCAB.search(common):
            return min(value, 120)
        if _IMAGE.search(name):
            return min(value, self.images)
        for known in (common, name):
            if _LAYERS.search(known) and not _NOT_LAYERS.search(known):
                return min(value, self.layers)
            if self.fixed and known == "num_key_value_heads" and not self.grouped:
                return min(value, SMALL["num_attention_heads"])
            if self.fixed and known in _SIZES:
                return min(value, _WIDE.get(known, _SIZES[known]) if self.wide else _SIZES[known])
        if re.search(r"_token_(id|index)$", name):
            return min(value, 100 + sum(map(ord, name)) % 20)
        if re.search(r"max_position|n_positions|max_sequence", name):
            return min(value, 64)
        if re.search(r"(num|n)_(\w*_)?(experts|local_experts)$", name):
            return min(value, 4)
        if (
            self.divisor > 1
            and _WIDTH.search(name)
            and not _NOT_WIDTH.search(name)
            and value >= 4 * self.divisor
        ):
            return value // self.divisor
        if self.divisor > 1 and "heads" in name and value > 4 and not self.fixed:
            return max(1, value // self.divisor) if value % self.divisor == 0 else value
        return None

    def _list(self, name: str, value: Any) -> Any:
        if not value or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            return None
        if re.search(r"^(depths?|layers?|num_layers|layer_depths|n_blocks|num_blocks\w*)$", name):
            return type(value)(min(one, 1 if self.fixed else 2) for one in value)
        if _IMAGE.search(name):
            return type(value)(min(one, self.images) for one in value)
        wide = _WIDTH.search(name) and not _NOT_WIDTH.search(name)
        if self.divisor > 1 and wide and min(value) >= 2 * self.divisor:
            return type(value)(one // self.divisor for one in value)
        return None


_WAYS = (
    _Way("by name", fixed=True, divisor=8),
    _Way("by name, more layers", fixed=True, divisor=8, layers=8),
    _Way("by name, no groups", fixed=True, divisor=8, grouped=False),
    _Way("by name, more layers, no groups", fixed=True, divisor=8, layers=8, grouped=False),
    _Way("by name, wide heads", fixed=True, divisor=8, wide=True),
    _Way("by name, larger images", fixed=True, divisor=8, images=64),
    _Way("by name, all layers", fixed=True, divisor=8, images=64, layers=1 << 20),
    _Way("by 8", fixed=False, divisor=8, images=64),
    _Way("by 4", fixed=False, divisor=4, images=64),
    _Way("by 2", fixed=False, divisor=2, images=224),
    _Way("by name, widths kept", fixed=True, divisor=1, images=64),
    _Way("layers", fixed=False, divisor=1, images=64),
    _Way("layers, images kept", fixed=False, divisor=1, images=1 << 20),
)
