"""Conversion of a capture to JSON and tensors, and back.

The structure and constant leaves of the call are not saved: the call for which a capture is loaded has the
same.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch

from graphplan.capture.captured_graph import Capture
from graphplan.capture.saved.plain_graph import GraphMaker, GraphWriter
from graphplan.capture.saved.plain_values import NotSavedError, from_plain, to_plain
from graphplan.capture.signature import BoundCall, CounterLeaf, FloatLeaf, Guard, InputSignature, TensorLeaf
from graphplan.capture.sizes.dynamic_axes import written_guard

_FIELDS = (
    *("weights", "inputs", "out_spec", "method", "roles", "order", "states", "kept"),
    *("entry", "attributes", "parts_read", "plain_sets", "other_sets", "growing", "serves_next", "step"),
)
_PREPARED = "inputs that transformers' exporter computes from others are not saved"
_CONDITION = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.cmpop),
    *(ast.BinOp, ast.operator, ast.Constant, ast.Name, ast.Load, ast.Subscript, ast.Attribute, ast.Call),
)
_NAMES = ("v", "max", "min", "abs", "math", "torch")
_SAVED_LEAVES = (TensorLeaf, CounterLeaf, FloatLeaf)  # other leaves are constants of the call
_ATTRIBUTES = ("size", "stride", "storage_offset", "ceil", "floor", "trunc", "sym_float")


def plain_capture(capture: Capture) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a capture as JSON, and its constants."""
    signature = capture.signature
    if capture.parts or capture.signature.prepared is not None:
        raise NotSavedError(_PREPARED)
    writer = GraphWriter(capture.module)
    plain = {
        "graph": writer.graph(capture.module),
        **{name: to_plain(getattr(capture, name)) for name in _FIELDS},
        "leaves": [to_plain(leaf) if isinstance(leaf, _SAVED_LEAVES) else None for leaf in signature.leaves],
        "names": list(signature.names),
        "guards": list(map(_plain_guard, signature.guards)),
        "sizes": [[symbol.name, size] for symbol, size in capture.sizes.items()],
        "constants": list(capture.constants),
        "tables": writer.tables,
    }
    return plain, {name: _saved(name, tensor) for name, tensor in capture.constants.items()}


def made_capture(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], call: BoundCall) -> Capture:
    """Return the capture from JSON and tensors, for a call of the same structure.

    Raises:
        NotSavedError: this process lacks an operator or a class of the capture.
    """
    maker = GraphMaker(plain["tables"])
    leaves = tuple(
        leaf if saved is None else from_plain(saved)
        for saved, leaf in zip(plain["leaves"], call.leaves, strict=True)
    )
    guards = tuple(_made_guard(*one) for one in plain["guards"])
    return Capture(
        module=maker.module(plain["graph"]),
        constants={name: tensors[name] for name in plain["constants"]},
        signature=InputSignature(call.spec, leaves, tuple(plain["names"]), guards=guards),
        sizes={maker.sizes.symbols[name]: size for name, size in plain["sizes"]},
        **{name: from_plain(plain[name]) for name in _FIELDS},
    )


def _plain_guard(guard: Guard) -> list[Any]:
    if not guard.code:
        raise NotSavedError(f"a condition on the values of inputs ({guard.text}) is not saved")
    return [guard.text, guard.code]


def _made_guard(text: str, code: str) -> Guard:
    """Return the guard; only comparisons of sizes are evaluated, whatever a file contains."""
    for node in ast.walk(ast.parse(code, mode="eval")):
        named = getattr(node, "id", None) or getattr(node, "attr", None)
        is_allowed = isinstance(node, _CONDITION) and (named is None or named in (*_NAMES, *_ATTRIBUTES))
        if not is_allowed:
            raise NotSavedError(f"{code!r} is not a condition on sizes")
    return written_guard(text, code)


def _saved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or not tensor.is_contiguous():
        raise NotSavedError(f"the constant {name!r} is not a dense tensor of the CPU, and is not saved")
    return tensor.detach().clone()
