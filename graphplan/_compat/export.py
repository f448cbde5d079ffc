"""Private names of ``torch.export`` and its tracer; importing them takes as long as the rest of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._export.passes import _node_metadata_hook as node_metadata_hook
from torch.export import _trace as export_trace
from torch.export import dynamic_shapes
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from graphplan._compat import patch_target, private

NO_MODULE = private(node_metadata_hook, "_EMPTY_NN_MODULE_STACK_KEY", "torch")
"""The key that ``torch.export`` puts in the ``nn_module_stack`` of nodes outside any module call."""

TRACED_NUMBERS = (
    private(dynamic_shapes, "_IntWrapper", "torch"),
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)
"""Types that replace Python numbers in a trace."""


def conditions_of(program: torch.export.ExportedProgram) -> list[str]:
    """Return the size guards of a trace, as Python expressions over ``L['argument']``."""
    return private(program, "_guards_code", "torch")


def assignment_hook() -> tuple[Any, str]:
    """Return the patch target for the function that registers an export's hook on buffer assignments."""
    return patch_target(export_trace, "register_buffer_assignment_hook", "torch")


def graph_maker() -> tuple[Any, str]:
    """Return the patch target for ``make_fx`` as ``torch.export`` calls it."""
    return patch_target(export_trace, "make_fx", "torch")


def argument_leaves() -> tuple[Any, str]:
    """Return the patch target for the function that lists the arguments which decide a dtype."""
    return patch_target(pytree, "arg_tree_leaves", "torch")


def paths_of(tracer: Any, module: Any) -> Sequence[str]:
    """Return the paths of a module in the traced model; ``module`` may be the proxy of a shared one."""
    original = private(tracer, "proxy_modules", "torch").get(module, module)
    paths: Sequence[str] = private(tracer, "module_id_cache", "torch").get(id(original), ())
    return paths


def export_tracer() -> type:
    """Return the tracer class of ``torch.export``, which intercepts every module call while it is active."""
    return private(proxy_tensor, "_ModuleStackTracer", "torch")
