"""What a caller says of training, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphplan.capture.model_copy import ModelCopy
from graphplan.compiler.training import Training
from graphplan.errors import InputError
from graphplan.passes.training.optimizer_memory import Optimizer, optimizer_memory


def read_training(
    model_copy: ModelCopy,
    train: bool,
    optimizer: Optimizer | None,
    optimizer_bytes_per_element: float | None,
    train_outputs: str | Sequence[str] | None,
    *,
    recompute: bool,
    offload_activations: bool,
    device_types: Sequence[str],
    unsupported: Mapping[str, Any],
) -> Training | None:
    """What is to be trained, and how; None for a forward pass alone. Sets what ``model_copy`` differentiates.

    Args:
        model_copy: of the model.
        train: the other arguments are as in :func:`graphplan.plan`, and have their defaults without it.
        optimizer: likewise.
        optimizer_bytes_per_element: likewise.
        train_outputs: likewise.
        recompute: likewise.
        offload_activations: likewise.
        device_types: of the devices that compute.
        unsupported: name -> value of arguments that are not combined with training.

    Raises:
        InputError: an argument is not what it should be, or no parameter requires a gradient.
    """
    for what, flag in (
        ("train", train),
        ("recompute", recompute),
        ("offload_activations", offload_activations),
    ):
        if not isinstance(flag, bool):
            raise InputError(f"{what} must be True or False, not {flag!r}")
    if not train:
        given = {
            "optimizer": optimizer,
            "optimizer_bytes_per_element": optimizer_bytes_per_element,
            "train_outputs": train_outputs,
            "recompute": None if recompute else False,
            "offload_activations": None if offload_activations else False,
        }
        if alone := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{alone[0]} is of training: give train=True with it")
        return None
    if together := [name for name, value in unsupported.items() if value]:
        raise InputError(f"train=True plans one step of the example's sizes: it does not take {together[0]}")
    outputs = _outputs(train_outputs)
    bytes_given = optimizer_bytes_per_element is not None
    if bytes_given and optimizer is not None:
        raise InputError("give optimizer or optimizer_bytes_per_element, not both")
    if bytes_given and not _is_size(optimizer_bytes_per_element):
        raise InputError(
            f"optimizer_bytes_per_element={optimizer_bytes_per_element!r}: write 0 or more bytes"
        )
    if optimizer is not None and not callable(optimizer):
        raise InputError(
            f"optimizer={type(optimizer).__name__}(...) is an optimizer of other parameters: give its class, "
            "or a function from parameters to one"
        )
    weights = model_copy.weights
    parameters = {name: tensor for name, tensor in weights.tensors.items() if name in weights.parameters}
    trained = tuple(name for name, tensor in parameters.items() if tensor.requires_grad)
    if not trained:
        raise InputError("train=True: no parameter of the model requires a gradient")
    kinds = {parameters[name].dtype for name in trained}
    later = {name: tensor for name, tensor in parameters.items() if tensor.dtype in kinds}
    memory = optimizer_memory(later, optimizer, optimizer_bytes_per_element)
    training = Training(memory, trained, outputs, recompute, offload_activations)
    model_copy.step = training.differentiation(device_types)
    return training


def _outputs(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"train_outputs must be names of results, such as 'loss', not {given!r}")
    return names


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
