"""What a caller says of training, read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphplan.capture.model_copy import ModelCopy
from graphplan.compiler.training import Training
from graphplan.errors import InputError
from graphplan.passes.training.optimizer_memory import Optimizer, optimizer_memory


@dataclass(frozen=True, slots=True)
class TrainingArguments:
    """Arguments of :func:`graphplan.plan`, as given; without ``train`` the others have their defaults."""

    train: bool
    optimizer: Optimizer | None
    optimizer_bytes_per_element: float | None
    train_outputs: str | Sequence[str] | None
    recompute: bool
    offload_activations: bool

    def read(self, model_copy: ModelCopy, unsupported: Mapping[str, Any]) -> Training | None:
        """What is to be trained, and how; None for a forward pass alone.

        Args:
            model_copy: of the model.
            unsupported: name -> value of arguments that are not combined with training.

        Raises:
            InputError: an argument is not what it should be, or no parameter requires a gradient.
        """
        self._require_flags()
        if not self.train:
            self._require_defaults()
            return None
        if together := [name for name, value in unsupported.items() if value]:
            raise InputError(
                f"train=True plans one step of the example's sizes: it does not take {together[0]}"
            )
        outputs = _outputs(self.train_outputs)
        self._require_one_optimizer()
        weights = model_copy.weights
        parameters = {name: tensor for name, tensor in weights.tensors.items() if name in weights.parameters}
        trained = tuple(name for name, tensor in parameters.items() if tensor.requires_grad)
        if not trained:
            raise InputError("train=True: no parameter of the model requires a gradient")
        kinds = {parameters[name].dtype for name in trained}
        later = {name: tensor for name, tensor in parameters.items() if tensor.dtype in kinds}
        memory = optimizer_memory(later, self.optimizer, self.optimizer_bytes_per_element)
        return Training(memory, trained, outputs, self.recompute, self.offload_activations)

    def _require_flags(self) -> None:
        for what in ("train", "recompute", "offload_activations"):
            if not isinstance(flag := getattr(self, what), bool):
                raise InputError(f"{what} must be True or False, not {flag!r}")

    def _require_defaults(self) -> None:
        given = {
            "optimizer": self.optimizer,
            "optimizer_bytes_per_element": self.optimizer_bytes_per_element,
            "train_outputs": self.train_outputs,
            "recompute": None if self.recompute else False,
            "offload_activations": None if self.offload_activations else False,
        }
        if alone := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{alone[0]} is of training: give train=True with it")

    def _require_one_optimizer(self) -> None:
        optimizer, nbytes = self.optimizer, self.optimizer_bytes_per_element
        if nbytes is not None and optimizer is not None:
            raise InputError("give optimizer or optimizer_bytes_per_element, not both")
        if nbytes is not None and not _is_size(nbytes):
            raise InputError(f"optimizer_bytes_per_element={nbytes!r}: write 0 or more bytes")
        if optimizer is not None and not callable(optimizer):
            raise InputError(
                f"optimizer={type(optimizer).__name__}(...) is an optimizer of other parameters: give its "
                "class, or a function from parameters to one"
            )


def _outputs(given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"train_outputs must be names of results, such as 'loss', not {given!r}")
    return names


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
