"""Parts of sliced weights that reside on accelerators: copies of rows of a parameter on the CPU.

The parameter itself stays whole. Its part is copied again when the parameter's version counter has changed
(``load_state_dict``, an optimizer, any in-place write except through ``.data``), or it is another tensor.
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
    """Return a view of the rows of ``whole`` that are ``part``."""
    return whole.detach().narrow(0, part.start, part.shape[0])


class ResidentPart:
    """Rows of the parameter ``whole`` that reside on an accelerator."""

    def __init__(self, part: Weight, whole: torch.Tensor, device: torch.device) -> None:
        self.part, self.shape, self.host = part, whole.shape, whole.device
        self._record_copied(whole)
        with allocating(device, f"{part.name!r} of {readable_bytes(part.nbytes)}"):
            self.copy = rows_of(whole, part).to(device, copy=True)

    def __deepcopy__(self, memo: dict[int, object]) -> ResidentPart:
        return self  # copies of the generated code share it; a copy of the module makes its own

    def current(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the part, with the current values of the weight."""
        if _state(weight) != self.state:
            require_planned(self.part.part_of, weight, self.host, self.copy.dtype, self.shape)
            with torch.no_grad():
                self.copy.copy_(rows_of(weight, self.part))
            self._record_copied(weight)
        return self.copy

    def _record_copied(self, weight: torch.Tensor) -> None:
        """Record the weight that was copied; the weak reference keeps its storage's identity from reuse."""
        self.state, self.storage = _state(weight), StorageWeakRef(weight.untyped_storage())


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's place and layout in memory, and its version counter; -1 for inference tensors."""
    version = -1 if tensor.is_inference() else tensor._version
    return storage_of(tensor), tensor.storage_offset(), tensor.stride(), tensor.is_conj(), version
