"""Parts of sliced weights that are kept on accelerators: copies of rows of a parameter on the CPU.

The parameter is the model's own, whole. Its part is copied anew when torch has counted a change of it
(``load_state_dict``, an optimiser, anything in place but through ``.data``) or it is another tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphplan._compat.torch import storage_of
from graphplan.ir.graph_elements import Weight
from graphplan.message_text import readable_bytes
from graphplan.runtime.memory.allocation import allocating
from graphplan.runtime.weights.weight_changes import require_planned


def rows_of(whole: torch.Tensor, part: Weight) -> torch.Tensor:
    """The rows that are ``part``: a view."""
    return whole.detach().narrow(0, part.start, part.shape[0])


class ResidentPart:
    """Rows of a parameter, the ``whole``, kept on an accelerator."""

    def __init__(self, part: Weight, whole: torch.Tensor, device: torch.device) -> None:
        self.part, self.shape, self.host = part, whole.shape, whole.device
        self._note(whole)
        with allocating(device, f"{part.name!r} of {readable_bytes(part.nbytes)}"):
            self.copy = rows_of(whole, part).to(device, copy=True)

    def __deepcopy__(self, memo: dict[int, object]) -> ResidentPart:
        return self  # a copy of generated code reads the same; a copy of the module makes its own

    def current(self, weight: torch.Tensor) -> torch.Tensor:
        """The part, with the values that the weight has now."""
        if _state(weight) != self.state:
            require_planned(self.part.part_of, weight, self.host, self.copy.dtype, self.shape)
            with torch.no_grad():
                self.copy.copy_(rows_of(weight, self.part))
            self._note(weight)
        return self.copy

    def _note(self, weight: torch.Tensor) -> None:
        """This is the weight that was copied. As long as it is known, no other storage has its identity."""
        self.state, self.storage = _state(weight), StorageWeakRef(weight.untyped_storage())


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor is, what its bytes stand for, and how often it was written to.

    Inference tensors do not count that.
    """
    version = -1 if tensor.is_inference() else tensor._version
    return storage_of(tensor), tensor.storage_offset(), tensor.stride(), tensor.is_conj(), version
