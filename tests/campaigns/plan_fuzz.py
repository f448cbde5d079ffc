"""Plans as JSON text, damaged at random: each is a PlanError, or a plan that holds."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import graphplan
from graphplan import Plan

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    7,
    1 << 70,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "cpu",
    "disk",
    "meta",
    "\0\ud800",
    "linear",
    [],
    {},
    [[]],
    [1, 2],
    {"key": 0},
)


class Branches(nn.Module):
    """A little of everything that a plan has: shared weights, a written buffer, views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.b(self.a(x).relu().t().t()) + self.a(x) + self.count


@functools.cache
def sound_plans() -> tuple[str, ...]:
    """Texts of plans: over two accelerators, streamed, and of several calls."""
    model, x = Branches().eval(), torch.ones(2, 16)
    streamed = {"a.weight": "cpu", "b.weight": "cpu"}
    plans = (
        graphplan.plan(model, {0: 4096, 1: 6144, "cpu": 1 << 20}, (x,)),
        graphplan.plan(model, {0: 1 << 20, "cpu": 1 << 20}, (x,), pin=streamed, cpu_compute=False),
        graphplan.plan(model, {0: 1 << 20}, calls=[((x,), {}), ((torch.ones(3, 16),), {})]),
    )
    return tuple(plan.to_json() for plan in plans)


def damaged(seed: int) -> str:
    """A plan with one to three faults."""
    draw = random.Random(seed)
    text = draw.choice(sound_plans())
    if draw.random() < 0.3:
        return _damaged_text(text, draw)
    data = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(data))
        if places:
            _damage(*draw.choice(places), draw)
    return json.dumps(data)


def _damaged_text(text: str, draw: random.Random) -> str:
    at, length = draw.randrange(len(text)), draw.randrange(1, 20)
    kind = draw.randrange(4)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + text[at + length :]
    if kind == 2:
        return text[:at] + chr(draw.randrange(1, 0x300)) + text[at + 1 :]
    return text[:at] + draw.choice("[{") * draw.choice([1, 100_000]) + text[at:]


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield data, key
        yield from _places(data[key])


def _damage(container: Any, key: Any, draw: random.Random) -> None:
    kind = draw.randrange(4)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, list):
        container.append(copy.deepcopy(container[key]))
    elif kind == 2:
        other = draw.choice([*container.values()] if isinstance(container, dict) else container)
        container[key] = copy.deepcopy(other)
    else:
        container[key] = draw.choice(VALUES)


def check_plan(seed: int) -> tuple[bool, str | None]:
    """Whether the plan of a seed is read, and what must not be."""
    try:
        plan = Plan.from_json(damaged(seed))
    except graphplan.PlanError:
        return False, None
    except Exception as error:  # any other is a finding
        return False, f"seed {seed}: from_json raises {type(error).__name__}: {error}"[:300]
    try:
        plan.verify()
        again = Plan.from_json(plan.to_json())
        summaries = plan.summary(), again.summary()
    except Exception as error:
        return True, f"seed {seed}: the plan does not hold, {type(error).__name__}: {error}"[:300]
    return True, None if summaries[0] == summaries[1] else f"seed {seed}: another plan when read again"
