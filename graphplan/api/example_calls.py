"""The calls that a caller gives as examples."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from graphplan.capture.model_copy import ModelCopy
from graphplan.capture.model_methods import entry_named
from graphplan.capture.signature import BoundCall
from graphplan.compiler.pipeline import EntryCall
from graphplan.errors import InputError

ExampleCall = (
    Mapping[str, Any] | tuple[Sequence[Any], Mapping[str, Any]] | tuple[str, Sequence[Any], Mapping[str, Any]]
)


def read_examples(
    model_copy: ModelCopy,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    calls: Sequence[ExampleCall] | None,
    weights: Sequence[float] | None,
) -> list[EntryCall]:
    """The caller's calls and weights.

    Raises:
        InputError: they are not what :func:`graphplan.plan` takes.
    """
    if args or kwargs:
        raise InputError("give example inputs in calls=, or in args= and kwargs=, not in both")
    if isinstance(calls, Mapping | str) or not isinstance(calls, Sequence) or not calls:
        raise InputError(
            "calls must be a list of example inputs, each a mapping of names or a pair (args, kwargs)"
        )
    counts = [1.0] * len(calls) if weights is None else list(weights)
    if len(counts) != len(calls):
        raise InputError(
            f"calls has {len(calls)} entries and weights {len(counts)}: give one weight for each"
        )
    for weight in counts:
        number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not number or not (0 < weight < math.inf):
            raise InputError(f"weights must be positive numbers, not {weight!r}")
    return [_bound(model_copy, call, float(weight)) for call, weight in zip(calls, counts, strict=True)]


def _bound(model_copy: ModelCopy, call: ExampleCall, weight: float) -> EntryCall:
    if isinstance(call, Mapping):
        call = (), call
    if isinstance(call, tuple | list) and 2 <= len(call) <= 3:
        *name, args, kwargs = call
        named = all(isinstance(one, str) for one in name)
        if named and isinstance(args, tuple | list) and isinstance(kwargs, Mapping):
            entry = entry_named(model_copy.module, *name) if name else ""
            return EntryCall(model_copy.part(entry).bind(tuple(args), kwargs), entry, weight)
    kind = type(call).__name__
    raise InputError(
        f"each of calls must be a mapping of names, a pair (args, kwargs), as ((x,), {{}}), or "
        f"('decode', args, kwargs) for another method or a submodule, not a {kind}"
    )


def read_example(
    model: nn.Module, model_copy: ModelCopy, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> BoundCall | None:
    """The example inputs, or the model's own, or None.

    Raises:
        InputError: they are not what :func:`graphplan.plan` takes, or do not fit the model.
    """
    if not isinstance(args, tuple | list):
        raise InputError("args must be a tuple of inputs, as in torch.export: write args=(x,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError("kwargs must map argument names to inputs: write kwargs={'x': x}")
    if args or kwargs or not model_copy.signature.parameters:
        return model_copy.bind(tuple(args), kwargs or {})
    dummies = getattr(model, "dummy_inputs", None)
    if isinstance(dummies, Mapping) and dummies:
        return model_copy.bind((), dummies)
    return None
