"""A capture as JSON and tensors, and back.

The structure and the constants of the call are not written: the call that a capture is looked up for has the
same.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch

from graphplan.capture.captured_graph import Capture, TrainingStep, Without
from graphplan.capture.dynamic_axes import written_guard
from graphplan.capture.saved.plain_graph import GraphMaker, GraphWriter
from graphplan.capture.saved.plain_values import NotSavedError, from_plain, to_plain
from graphplan.capture.signature import BoundCall, CounterLeaf, FloatLeaf, Guard, InputSignature, TensorLeaf

_SIMPLE = ("weights", "inputs", "method", "order", "states", "caches", "entry")
_CONDITION = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.cmpop),
    *(ast.BinOp, ast.operator, ast.Constant, ast.Name, ast.Load, ast.Subscript, ast.Attribute, ast.Call),
)
_NAMES = ("v", "max", "min")
_METHODS = ("size", "stride", "storage_offset")


def plain_capture(capture: Capture) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A capture as JSON, and its constants.

    Raises:
        NotSavedError: something of it cannot be written.
    """
    if capture.parts or capture.signature.symbolic or capture.signature.prepared is not None:
        raise NotSavedError("inputs that transformers' exporter computes from others are not saved")
    writer = GraphWriter()
    plain = {
        "graph": writer.graph(capture.module),
        **{name: to_plain(getattr(capture, name)) for name in _SIMPLE},
        "out_spec": to_plain(capture.out_spec),
        "leaves": list(map(_plain_leaf, capture.signature.leaves)),
        "names": list(capture.signature.names),
        "guards": list(map(_plain_guard, capture.signature.guards)),
        "sizes": [[symbol.name, size] for symbol, size in capture.sizes.items()],
        "without": _dropped(capture),
        "roles": [[[axis, role] for axis, role in roles.items()] for roles in capture.roles],
        "kept": sorted(capture.kept),
        "step": _plain_step(capture.step),
        "constants": list(capture.constants),
        "tables": writer.tables,
    }
    return plain, {name: _saved(name, tensor) for name, tensor in capture.constants.items()}


def made_capture(plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], call: BoundCall) -> Capture:
    """The capture of JSON and tensors, for a call of the same structure.

    Raises:
        NotSavedError: this process lacks an operator or a class of it.
    """
    maker = GraphMaker(plain["tables"])
    leaves = tuple(_made_leaf(one, here) for one, here in zip(plain["leaves"], call.leaves, strict=True))
    guards = tuple(_made_guard(*one) for one in plain["guards"])
    simple = {name: from_plain(plain[name], {}) for name in _SIMPLE}
    step = plain["step"]
    return Capture(
        module=maker.module(plain["graph"]),
        constants={name: tensors[name] for name in plain["constants"]},
        out_spec=from_plain(plain["out_spec"], {}),
        signature=InputSignature(call.spec, leaves, tuple(plain["names"]), guards=guards),
        sizes={maker.sizes.symbols[name]: size for name, size in plain["sizes"]},
        prepare=None if plain["without"] is None else Without(tuple(plain["without"])),
        roles=tuple(dict(roles) for roles in plain["roles"]),
        kept=frozenset(plain["kept"]),
        step=None if step is None else TrainingStep(*(from_plain(field, {}) for field in step)),
        **simple,
    )


def _plain_leaf(leaf: Any) -> list[Any]:
    if isinstance(leaf, TensorLeaf):
        return ["tensor", *map(to_plain, (leaf.dtype, leaf.shape, leaf.ranges, leaf.stride))]
    if isinstance(leaf, CounterLeaf):
        return ["counter", leaf.low, leaf.high]
    return ["float"] if isinstance(leaf, FloatLeaf) else ["constant"]


def _made_leaf(plain: list[Any], here: Any) -> Any:
    kind, *fields = plain
    made = {"tensor": TensorLeaf, "counter": CounterLeaf, "float": FloatLeaf}.get(kind)
    return here if made is None else made(*(from_plain(field, {}) for field in fields))


def _plain_guard(guard: Guard) -> list[Any]:
    if not guard.code:
        raise NotSavedError(f"a condition on the values of inputs ({guard.text}) is not saved")
    return [guard.text, guard.code, None if guard.order is None else list(guard.order)]


def _made_guard(text: str, code: str, order: list[Any] | None) -> Guard:
    """The condition; only comparisons of sizes are evaluated, whatever a file says."""
    for node in ast.walk(ast.parse(code, mode="eval")):
        named = getattr(node, "id", None) or getattr(node, "attr", None)
        known = isinstance(node, _CONDITION) and (named is None or named in (*_NAMES, *_METHODS))
        if not known:
            raise NotSavedError(f"{code!r} is no condition on sizes")
    found = written_guard(text, code)
    return found if order is None else found.over(order)


def _dropped(capture: Capture) -> list[str] | None:
    if capture.prepare is None:
        return None
    if not isinstance(capture.prepare, Without):
        raise NotSavedError("inputs that transformers' exporter computes from others are not saved")
    return list(capture.prepare.names)


def _plain_step(step: TrainingStep | None) -> list[Any] | None:
    if step is None:
        return None
    fields = step.differentiated, step.tangents, dict(step.gradients), dict(step.input_gradients)
    return list(map(to_plain, fields))


def _saved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or not tensor.is_contiguous():
        raise NotSavedError(f"the constant {name!r} is no dense tensor of the CPU, and is not saved")
    return tensor.detach().clone()
