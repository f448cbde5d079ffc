"""Private names of transformers, an optional package."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from types import ModuleType
from typing import Any

from graphplan._compat import Replacement, place, private

RECORDERS = ("_output_capturing_hooks_installed", "_forward_hooks")
"""Attributes that change when a model is first to return hidden states or attentions: a flag, and hooks."""


def export_patches() -> list[Replacement]:
    """What the exporter replaces, of all modules that are imported: a model can use no others.

    The exporter's own ``apply_patches`` imports some forty models to replace attributes of each, for every
    thread. Like it, this leaves out what is not there.
    """
    from transformers.exporters import exporter_dynamo, utils

    assert exporter_dynamo  # importing it fills the list
    listed = private(utils, "_PATCHES", "transformers")["dynamo"]
    # transformers 5.17 lists the owners themselves, later releases their paths
    owners = ((_imported(one) if isinstance(one, str) else one, name, made) for one, name, made in listed)
    return [(owner, name, factory) for owner, name, factory in owners if hasattr(owner, name)]


def uncast_inputs() -> Replacement:
    """What has the exporter leave the types of inputs: it asks for the model's, to cast them."""
    from transformers.exporters import utils

    return *place(utils, "module_dtype", "transformers"), lambda _own: lambda _model: None


def _imported(path: str) -> Any:
    """The module or class at a dotted path, if it is imported; None otherwise."""
    first, *rest = path.split(".")
    here, found = first, sys.modules.get(first)
    for part in rest:
        if isinstance(found, ModuleType):
            here = f"{here}.{part}"
            found = sys.modules.get(here) or vars(found).get(part)  # no getattr: it would import
        else:
            found = getattr(found, part, None)
    return found


def local_entries(table: Any) -> MutableMapping[str, Callable[..., Any]]:
    """What a table of transformers (of attention, of masks) has in place of the entries of its class."""
    return private(table, "_local_mapping", "transformers")


def functions_of_masks() -> list[tuple[Any, str]]:
    """Where functions of masks are.

    What decide whether eager attention has a mask, if it is causal and if it is not; what finds several texts
    in a row by positions; what makes the function that keeps these apart; what makes one function of several
    that all must allow a token; what makes masks by ``vmap``, and the mode that it needs.
    """
    from transformers import masking_utils

    packed = "find_packed_sequence_indices", "packed_sequence_mask_function"
    names = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", *packed, "and_masks")
    mapped = "_vmap_expansion_sdpa", "TransformGetItemToIndex"
    return [place(masking_utils, name, "transformers") for name in (*names, *mapped)]


def vision_stand_in() -> tuple[Any, str]:
    """What the exporter traces for the attention of vision encoders: its module and name."""
    from transformers.exporters import exporter_dynamo

    return place(exporter_dynamo, "_reshaped_vision_attention_forward", "transformers")


def with_last_processor(cls: type, make: Callable[[Any], Callable[..., Any]]) -> type:
    """A subclass of a model's class, of whose ``generate`` a function processes the scores last.

    Args:
        cls: that can generate.
        make: from the configuration of a generation to the function.
    """
    original = private(cls, "_get_logits_processor", "transformers")

    def get(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        processors = original(self, generation_config, *args, **kwargs)
        processors.append(make(generation_config))
        return processors

    return type(cls.__name__, (cls,), {"_get_logits_processor": get, "__module__": cls.__module__})


def kept_dtypes(model: Any, dtype: Any) -> dict[str, Any]:
    """Patterns of names of weights -> the dtype that a model keeps them in, if it is loaded in ``dtype``."""
    return private(model, "_get_dtype_plan", "transformers")(dtype)


def mark_initialized(tensor: Any) -> None:
    """Have a model's initialisation leave a weight as it is."""
    tensor._is_hf_initialized = True


def adjust_keys(model: Any, info: Any) -> None:
    """Take from the missing and unexpected keys of a loading report what the model expects to be so."""
    private(model, "_adjust_missing_and_unexpected_keys", "transformers")(info)


def remember_conversions(model: Any, conversions: Any) -> None:
    """Have ``save_pretrained`` write weights in the form in which they were read."""
    model._weight_conversions = conversions


def forget_attention(config: Any) -> None:
    """Let a configuration ask for no implementation of attention."""
    config._attn_implementation = None
