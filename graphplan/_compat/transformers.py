"""Private names of transformers, an optional package."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from graphplan._compat import Replacement, patch_target, private

RECORDERS = ("_output_capturing_hooks_installed", "_forward_hooks")
"""Attributes that change when a model first returns hidden states or attentions: a flag, and hooks."""


def export_patches() -> list[Replacement]:
    """Return the exporter's patches for the modules that are imported; a model can use no others.

    The exporter's own ``apply_patches`` imports some forty models and patches them for all threads. Like it,
    this skips attributes that do not exist.
    """
    from transformers.exporters import exporter_dynamo, utils

    assert exporter_dynamo  # importing it fills the list
    listed = private(utils, "_PATCHES", "transformers")["dynamo"]
    # transformers 5.17 lists the owners themselves, later releases their paths
    owners = ((_imported(of) if isinstance(of, str) else of, name, factory) for of, name, factory in listed)
    return [(owner, name, factory) for owner, name, factory in owners if hasattr(owner, name)]


def _imported(path: str) -> Any:
    """Return the module or class at a dotted path if it is imported, else None."""
    first, *names = path.split(".")
    prefix, value = first, sys.modules.get(first)
    for name in names:
        if isinstance(value, ModuleType):
            prefix = f"{prefix}.{name}"
            value = sys.modules.get(prefix) or vars(value).get(name)  # no getattr: it would import
        else:
            value = getattr(value, name, None)
    return value


def local_entries(table: Any) -> MutableMapping[str, Callable[..., Any]]:
    """Return the entries that override those of the class in a transformers table of attention or masks."""
    return private(table, "_local_mapping", "transformers")


def functions_of_masks() -> list[tuple[Any, str]]:
    """Return the patch targets of functions that build attention masks.

    In order: those that decide whether a causal and a bidirectional mask can be skipped; the one that finds
    packed sequences by their positions; the one that makes the mask function that separates them; the one
    that combines mask functions by ``and``; the one that builds masks by ``vmap``, and the mode it needs.
    """
    from transformers import masking_utils

    packed = "find_packed_sequence_indices", "packed_sequence_mask_function"
    names = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", *packed, "and_masks")
    mapped = "_vmap_expansion_sdpa", "TransformGetItemToIndex"
    return [patch_target(masking_utils, name, "transformers") for name in (*names, *mapped)]


def vision_stand_in() -> tuple[Any, str]:
    """Return the patch target for the exporter's replacement of the attention of vision encoders."""
    from transformers.exporters import exporter_dynamo

    return patch_target(exporter_dynamo, "_reshaped_vision_attention_forward", "transformers")


def with_last_processor(cls: type, make: Callable[[Any], Callable[..., Any]]) -> type:
    """Return a subclass of a model class whose ``generate`` has one more logits processor, run last.

    Args:
        cls: a class that can generate.
        make: returns the processor for a generation config.
    """
    original = private(cls, "_get_logits_processor", "transformers")

    def get(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        processors = original(self, generation_config, *args, **kwargs)
        processors.append(make(generation_config))
        return processors

    return type(cls.__name__, (cls,), {"_get_logits_processor": get, "__module__": cls.__module__})


def kept_dtypes(model: Any, dtype: Any) -> dict[str, Any]:
    """Return pattern of weight names -> dtype in which a model loaded in ``dtype`` keeps these weights."""
    return private(model, "_get_dtype_plan", "transformers")(dtype)


def mark_initialized(tensor: Any) -> None:
    """Exclude a weight from the model's weight initialization."""
    tensor._is_hf_initialized = True


def adjust_keys(model: Any, info: Any) -> None:
    """Remove from a loading report the missing and unexpected keys that the model itself ignores."""
    private(model, "_adjust_missing_and_unexpected_keys", "transformers")(info)


def remember_conversions(model: Any, conversions: Any) -> None:
    """Make ``save_pretrained`` write weights in the layout of the checkpoint from which they were read."""
    model._weight_conversions = conversions


def forget_attention(config: Any) -> None:
    """Clear the attention implementation that a config asks for."""
    config._attn_implementation = None
