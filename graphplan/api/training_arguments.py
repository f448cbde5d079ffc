"""Read and check a caller's arguments for training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphplan.api.plan_options import PlanOptions
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.compiler.training import Training, trainable
from graphplan.devices.topology import is_figure
from graphplan.errors import InputError
from graphplan.passes.training.optimizer_memory import optimizer_memory


def read_training(
    plan_options: PlanOptions, model_copy: ModelCopy, unsupported: Mapping[str, Any]
) -> Training | None:
    """Return the parameters to train and how; None for a forward pass alone.

    ``unsupported``: name -> value of arguments that cannot be given with ``train=True``.
    """
    if not plan_options.train:
        return None
    for name, value in unsupported.items():
        if value:
            raise InputError(f"train=True does not take {name}")
    outputs = _read_outputs(plan_options.train_outputs)
    _require_one_optimizer(plan_options)
    weights = model_copy.weights
    required = trainable(weights)
    trained = tuple(name for name in weights.tensors if name in required)
    if not trained:
        raise InputError("train=True: no parameter of the model requires a gradient")
    dtypes = {weights.tensors[name].dtype for name in trained}
    later = {n: t for n, t in weights.tensors.items() if n in weights.parameters and t.dtype in dtypes}
    memory = optimizer_memory(later, plan_options.optimizer, plan_options.optimizer_bytes_per_element)
    allowed = plan_options.recompute, plan_options.offload_activations, plan_options.accumulate_gradients
    return Training(memory, trained, outputs, *allowed)


def _require_one_optimizer(plan_options: PlanOptions) -> None:
    optimizer, nbytes = plan_options.optimizer, plan_options.optimizer_bytes_per_element
    if nbytes is not None and optimizer is not None:
        raise InputError("give optimizer or optimizer_bytes_per_element, not both")
    if nbytes is not None and not is_figure(nbytes, may_be_zero=True):
        raise InputError(f"optimizer_bytes_per_element={nbytes!r}: write 0 or more bytes")
    if optimizer is not None and not callable(optimizer):
        text = repr(optimizer) if isinstance(optimizer, str) else f"{type(optimizer).__name__}(...)"
        raise InputError(
            f"optimizer={text}: give the class of an optimizer, such as torch.optim.AdamW, or a function "
            "from parameters to one"
        )


def _read_outputs(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"train_outputs must be names of results, such as 'loss', not {given!r}")
    return names
