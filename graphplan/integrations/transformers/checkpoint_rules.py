"""Match the tensors of a checkpoint with the weights of a transformers model, by transformers' own rules.

While it loads tensors, transformers renames them (prefixes of base models, names of earlier versions) and
converts them (stacks experts, joins or splits projections). Here its rules run on names and shapes only.
Tensors are read later, when the plan says where to.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from graphplan._compat.transformers import adjust_keys, mark_initialized, remember_conversions
from graphplan.errors import CheckpointError
from graphplan.runtime.checkpoint.converted_checkpoint import Conversion
from graphplan.runtime.checkpoint.mapped_files import equal_in_files
from graphplan.runtime.checkpoint.safetensors_header import FileTensor

logger = logging.getLogger("graphplan")


@dataclass(slots=True)
class Matched:
    """Where the weights of a model are in a checkpoint.

    Attributes:
        tensors: weight -> the tensor that has its data.
        conversions: weight -> the conversion of tensors that makes it.
        missing: weights that the checkpoint lacks.
        unexpected: tensors that are not weights of the model.
        used: the rules of transformers that applied; transformers reverts them when the model is saved.
    """

    tensors: dict[str, FileTensor] = field(default_factory=dict)
    conversions: dict[str, Conversion] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    unexpected: set[str] = field(default_factory=set)
    used: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The tensors that a converter needs for one weight."""

    converter: Any
    patterns: list[str]
    sources: list[FileTensor]


def match_names(model: nn.Module, tensors: Mapping[str, FileTensor]) -> Matched:
    """Match the tensors of a checkpoint with the weights of a ``PreTrainedModel`` on the meta device.

    The model's shared weights are not tied yet.

    Raises:
        CheckpointError: shapes differ, or a conversion fails.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    state, prefix = model.state_dict(), getattr(model, "base_model_prefix", "")
    matched = Matched(missing={name for name, value in state.items() if isinstance(value, torch.Tensor)})
    gathered: dict[str, _Gathered] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if name not in state:
            targets = [name] if pattern is None else converter_of[pattern].target_patterns
            matched.unexpected.update(name.replace(targets[0], target) for target in targets)
        elif pattern is None:
            matched.tensors.setdefault(name, tensors[key])
        else:
            group = gathered.setdefault(name, _Gathered(copy.deepcopy(converter_of[pattern]), [], []))
            group.patterns.append(pattern)
            group.sources.append(tensors[key])
    for name, group in gathered.items():
        _add_conversion(model, matched, name, group, state[name].dtype)
    matched.missing -= {*matched.tensors, *matched.conversions}
    matched.used = [rule for rule in rules if rule.was_used()]
    _check_shapes(matched, state)
    return matched


def _convert(model: nn.Module, name: str, group: _Gathered, tensors: Sequence[Any]) -> Mapping[str, Any]:
    """Return the weights that a converter of transformers makes of ``tensors``."""
    converter = copy.deepcopy(group.converter)
    for pattern, tensor in zip(group.patterns, tensors, strict=True):
        converter.add_tensor(name, name, pattern, lambda tensor=tensor: tensor)  # it takes a function
    weights: Mapping[str, Any] = converter.convert(name, model=model, config=model.config)
    return weights


def _add_conversion(
    model: nn.Module, matched: Matched, name: str, group: _Gathered, dtype: torch.dtype
) -> None:
    conversion = Conversion(tuple(group.sources), dtype, partial(_convert, model, name, group))
    try:
        outline = conversion.outline()
    except Exception as error:  # a converter may raise anything if a tensor is missing
        kind = ", ".join(type(op).__name__ for op in group.converter.operations)
        raise CheckpointError(
            f"{name!r} cannot be made of {len(group.sources)} tensors of the checkpoint by {kind}: {error}"
        ) from error
    for target in outline:
        matched.conversions[target] = conversion


def _check_shapes(matched: Matched, state: Mapping[str, torch.Tensor]) -> None:
    shapes = {name: tensor.shape for name, tensor in matched.tensors.items()}
    for conversion in dict.fromkeys(matched.conversions.values()):
        for name, value in conversion.outline().items():
            shapes[name] = tuple((value[0] if isinstance(value, list) else value).shape)
    matched.unexpected.update(name for name in shapes if name not in state)
    matched.conversions = {name: rule for name, rule in matched.conversions.items() if name in state}
    wrong = [
        f"{name!r} has shape {list(shape)}, but {list(state[name].shape)} in the model"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if wrong:
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(wrong))


def finish_weights(model: Any, matched: Matched) -> None:
    """Complete a model as ``from_pretrained`` does; weights in the checkpoint stay on the meta device.

    Shared weights are tied. Missing weights and buffers that are not saved are initialised in host memory by
    the model's own code. Names that transformers expects to be missing or unexpected are removed from
    ``matched.missing`` and ``matched.unexpected``.
    """
    from transformers.utils.loading_report import LoadStateDictInfo

    _tie_if_equal(model, matched)
    for name in (*matched.tensors, *matched.conversions):
        mark_initialized(model.get_parameter_or_buffer(name))
    info = LoadStateDictInfo(set(matched.missing), set(matched.unexpected), set(), [], {}, set())
    model.mark_tied_weights_as_initialized(info)
    for name in info.missing_keys - model.all_tied_weights_keys.keys():
        _allocate(model, name, model.get_parameter_or_buffer(name))
    for name, buffer in list(model.named_non_persistent_buffers()):
        _allocate(model, name, buffer)
    model.initialize_weights()
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    adjust_keys(model, info)
    remember_conversions(model, matched.used)
    matched.missing, matched.unexpected = info.missing_keys, info.unexpected_keys


def _allocate(model: nn.Module, name: str, meta: torch.Tensor) -> None:
    """Put an uninitialised CPU tensor in place of one on the meta device."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    data = torch.empty_like(meta, device="cpu")
    if isinstance(meta, nn.Parameter):
        module._parameters[attribute] = nn.Parameter(data, meta.requires_grad)
    else:
        module._buffers[attribute] = data


def _tie_if_equal(model: Any, matched: Matched) -> None:
    """Keep the tie of two weights that are both in the checkpoint only if their data are equal.

    transformers compares them in memory; here they are compared in their files.
    """
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in matched.tensors or source not in matched.tensors:
            continue
        if equal_in_files(matched.tensors[target], matched.tensors[source]):
            del matched.tensors[target]
            matched.missing.add(target)
        else:
            logger.warning(
                "%r and %r are to be tied, and differ in the checkpoint: they are not tied", target, source
            )
            del model.all_tied_weights_keys[target]
