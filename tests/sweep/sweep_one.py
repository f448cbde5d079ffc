"""One architecture of the sweep: built, run eagerly, placed in every configuration, run, compared."""

from __future__ import annotations

import copy
import gc
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from every_architecture import Built, NotBuiltError, build
from shortcuts import one_trace, short_search

import graphplan
from graphplan.capture.structure import leaves_of
from graphplan.errors import GraphplanError, InfeasibleError

__all__ = ["CONFIGURATIONS", "Configuration", "Devices", "run"]

_CLOSE = 1e-5  # of the largest value
_ROOM = 1 << 40
_FEWER = "moves are the plan's, of fewer bytes"


@dataclass(frozen=True, slots=True)
class Configuration:
    """Devices: accelerators that hold ``share`` of the weights each, beside the activations, and the CPU."""

    share: float
    accelerators: int


CONFIGURATIONS = tuple(Configuration(share, count) for count in (1, 2) for share in (0.5, 0.7, 0.9))

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Devices:
    """What models are placed on.

    Attributes:
        make: takes budgets and is entered; has ``max_memory``, ``reset_peaks``, ``peak_bytes`` and
            ``transfers``, ``None`` where nobody counts them.
        close: results may differ by this share of the largest value.
        beside: bytes of a budget that no tensor of a plan can have.
    """

    make: Callable[[dict[Any, int]], AbstractContextManager[Any]]
    close: float = _CLOSE
    beside: int = 0


def run(
    name: str,
    configurations: Sequence[Configuration],
    *,
    thorough: bool,
    tell: Callable[[Record], None],
    devices: Devices | None = None,
) -> None:
    """Tell what is known of an architecture, again after each configuration.

    Args:
        name: model type.
        configurations: to place it in.
        thorough: plan as users do; else the planner stops after its first good placement, and the model is
            traced once for all configurations.
        tell: takes the record so far.
        devices: what it is placed on; simulated ones by default.
    """
    devices = devices or Devices(graphplan.simulate)
    warnings.simplefilter("ignore")
    record: Record = {"name": name, "built": False, "ran": False, "rows": []}
    tell(record)
    try:
        made = build(name)
    except NotBuiltError as error:
        tell(record | {"built": error.built, "why": _short(str(error))})
        return
    record |= {
        "built": True,
        "ran": True,
        "head": made.head,
        "way": made.way,
        "inputs": {key: _form(value) for key, value in made.inputs.items()},
        "parameters": sum(p.numel() for p in made.model.parameters()),
    }
    tell(record)
    again = _eager(made)
    apart = difference(again, made.result)
    if apart > _CLOSE:
        tell(record | {"random": f"two eager calls differ by {apart:.1g}"})
        return
    with ExitStack() as stack:
        if not thorough:
            stack.enter_context(one_trace())
            stack.enter_context(short_search())
        try:
            activations = _activations(made, devices)
        except Exception as error:  # a row of the table, whatever it was
            tell(record | {"why": _reason(error)})
            return
        record["activations"] = activations
        for configuration in configurations:
            row = _row(made, configuration, activations, devices)
            if "method" in row:
                record["method"] = row.pop("method")
            for said in ("why", "note"):
                if said in row:
                    record.setdefault("why", row.pop(said))
            record["rows"].append(row)
            tell(record)


def _form(value: Any) -> Any:
    return list(value.shape) if isinstance(value, torch.Tensor) else value


def _eager(made: Built) -> Any:
    with torch.no_grad():
        return copy.deepcopy(made.model)(**copy.deepcopy(made.inputs))


def _bytes(model: torch.nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def _activations(made: Built, devices: Devices) -> int:
    """Bytes beside the weights, at the peak of a call on one accelerator that has room for all."""
    with devices.make({0: _ROOM, "cpu": _ROOM}) as machine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed = graphplan.partition(made.model, machine.max_memory, kwargs=copy.deepcopy(made.inputs))
        machine.reset_peaks()
        placed(**copy.deepcopy(made.inputs))
        return max(0, machine.peak_bytes(0) - _bytes(made.model))


def _row(made: Built, configuration: Configuration, activations: int, devices: Devices) -> Record:
    """One configuration: its outcome, and what it was."""
    row: Record = {"share": configuration.share, "accelerators": configuration.accelerators}
    size = _bytes(made.model)
    each = int(size * configuration.share) + activations + devices.beside
    budgets = {
        **dict.fromkeys(range(configuration.accelerators), each),
        "cpu": 20 * (size + activations) + (1 << 26),
    }
    start = time.perf_counter()
    try:
        with devices.make(budgets) as machine, warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            placed = graphplan.partition(made.model, machine.max_memory, kwargs=copy.deepcopy(made.inputs))
            row["method"] = placed.plan.method
            if placed.plan.method == "hooks":
                row["why"] = next(
                    _short(str(one.message)) for one in heard if "runs module by module" in str(one.message)
                )
            gc.collect()
            machine.reset_peaks()
            result = placed(**copy.deepcopy(made.inputs))
            guessed = any("data-dependent size" in str(one.message) for one in heard)
            if guessed:
                row["note"] = (
                    "has sizes that only the data decides: peaks and moves are not planned to the byte"
                )
            kept = _kept(machine, placed.plan, budgets, exact=not guessed and placed.plan.method != "hooks")
            if kept == _FEWER:
                kept, row["note"] = "equal", "has sizes that only the data decides: moves are of fewer bytes"
            apart = difference(result, made.result)
            row["outcome"] = kept if apart <= devices.close else f"differs by {apart:.1g}"
            row["on"] = _on_accelerators(placed.plan)
            del placed, result
            gc.collect()
    except InfeasibleError as error:
        row |= {"outcome": "infeasible", "why": _reason(error)}
    except Exception as error:  # a row of the table, whatever it was
        row |= {"outcome": "error", "why": _reason(error)}
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def _kept(machine: Any, plan: graphplan.Plan, budgets: dict[Any, int], *, exact: bool) -> str:
    """``"equal"``, or what is wrong with the bytes that were measured.

    Args:
        machine: that ran the call.
        plan: of the call.
        budgets: of its devices.
        exact: whether the plan says all bytes, beside keeping the budgets.
    """
    for key in (key for key in budgets if isinstance(key, int)):
        if machine.peak_bytes(key) > budgets[key]:
            return f"{machine.peak_bytes(key) - budgets[key]} bytes over the budget"
        if exact and machine.peak_bytes(key) > plan.peak_bytes[key]:
            return f"{machine.peak_bytes(key) - plan.peak_bytes[key]} bytes over the plan"
    if exact:
        if machine.transfers is None:
            return "equal"
        moved = [(t.source, t.destination, t.nbytes) for t in machine.transfers]
        planned = [(m.source, m.destination, m.nbytes) for m in plan.schedule.copies()]
        if moved != planned:
            alike = [move[:2] for move in moved] == [move[:2] for move in planned]
            fewer = alike and all(a[2] <= b[2] for a, b in zip(moved, planned, strict=True))
            return _FEWER if fewer else "moves are not the plan's"
    return "equal"


def _on_accelerators(plan: graphplan.Plan) -> float:
    """The share of operations that accelerators run."""
    on = sum(len(stage.operations) for stage in plan.stages if stage.device != "cpu")
    return round(on / max(1, sum(len(stage.operations) for stage in plan.stages)), 2)


def difference(a: Any, b: Any) -> float:
    """The largest difference of two results, of the largest value; infinite where their forms differ."""
    left, right = leaves_of(a), leaves_of(b)
    if type(a) is not type(b) or len(left) != len(right):
        return math.inf
    worst = 0.0
    for x, y in zip(left, right, strict=True):
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return math.inf
        if isinstance(x, torch.Tensor) and (x.shape != y.shape or x.dtype != y.dtype):
            return math.inf
        if isinstance(x, torch.Tensor) and x.numel():
            worst = max(worst, _apart(x.detach().cpu(), y.detach().cpu()))
    return worst


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    wide = torch.complex128 if y.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    finite = y.isfinite()
    if not torch.equal(finite, x.isfinite()):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    return float((x[finite] - y[finite]).abs().max()) / max(1.0, float(y[finite].abs().max()))


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    return _short(str(error) if isinstance(error, GraphplanError) else f"{kind}: {error}", kind)


def _short(text: str, kind: str = "") -> str:
    """On one line, without paths of this machine."""
    words = re.sub(r"(/[\w.\-]+)+/([\w.\-]+\.py)", r"\2", " ".join(text.split()))
    for mark in ("site-packages/", "/lib/python3"):
        while mark in words:
            at = words.index(mark)
            start = words.rfind(" ", 0, at) + 1
            words = words[:start] + words[at + len(mark) :]
    words = words if not kind or words.startswith(kind) else f"{kind}: {words}"
    return words[:240]
