"""Private names of ``torch.export`` and its tracer, which take as long to import as the rest of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._export.passes import _node_metadata_hook as node_metadata_hook
from torch.export import _trace as export_trace
from torch.export import dynamic_shapes
from torch.fx.experimental import proxy_tensor

from graphplan._compat import place, private

NO_MODULE = private(node_metadata_hook, "_EMPTY_NN_MODULE_STACK_KEY", "torch")
"""What ``torch.export`` writes for the module of a node that no module has called."""

TRACED_NUMBERS = (
    private(dynamic_shapes, "_IntWrapper", "torch"),
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)
"""What a trace has in place of numbers."""


def conditions_of(program: torch.export.ExportedProgram) -> list[str]:
    """What a trace has taken for granted of sizes, as Python over ``L['argument']``."""
    return private(program, "_guards_code", "torch")


def assignment_hook() -> tuple[Any, str]:
    """What an export calls to be told of the buffers that the traced module itself assigns."""
    return place(export_trace, "register_buffer_assignment_hook", "torch")


def graph_maker() -> tuple[Any, str]:
    """By what an export traces."""
    return place(export_trace, "make_fx", "torch")


def paths_of(tracer: Any, module: Any) -> Sequence[str]:
    """The paths at which the model of a trace has a module, or what stands for one that is shared."""
    own = private(tracer, "proxy_modules", "torch").get(module, module)
    found: Sequence[str] = private(tracer, "module_id_cache", "torch").get(id(own), ())
    return found


def export_tracer() -> type:
    """The tracer of ``torch.export``; while it is at work, it sees each module that is called."""
    return private(proxy_tensor, "_ModuleStackTracer", "torch")
