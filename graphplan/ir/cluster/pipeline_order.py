"""The order in which each stage runs the microbatches, and when.

Stage ``s`` of ``p`` begins with some forward passes; then each forward pass is followed by a backward pass.
GPipe begins with all of them (Huang et al., NeurIPS 2019), 1F1B with ``p - 1 - s``. For two stages and three
microbatches, 1F1B is::

    stage 0   F0 F1    B0 F2 B1    B2
    stage 1      F0 B0 F1 B1 F2 B2

The orders are those of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

PipelineSchedule = Literal["gpipe", "1f1b"]
Order = tuple[tuple["StageAction", ...], ...]
"""The actions of each stage, in order."""


@dataclass(frozen=True, slots=True)
class StageAction:
    """A forward or backward pass of a microbatch through a stage."""

    stage: int
    microbatch: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action and its times, in seconds since the batch began.

    Attributes:
        action: the action.
        free: when the machine finished its action before, transfers included.
        received: when it begins to receive the input; ``free`` if that is there already.
        start: when it begins to compute.
        end: when it has computed; then it sends the output.
    """

    action: StageAction
    free: float
    received: float
    start: float
    end: float


@cache
def pipeline_order(schedule: PipelineSchedule, stages: int, microbatches: int) -> Order:
    """Return the actions of each stage, in order."""

    def actions(stage: int) -> Iterator[StageAction]:
        ahead = microbatches if schedule == "gpipe" else min(stages - 1 - stage, microbatches)
        for number in range(microbatches + ahead):
            if number < microbatches:
                yield StageAction(stage, number)
            if number >= ahead:
                yield StageAction(stage, number - ahead, backward=True)

    return tuple(tuple(actions(stage)) for stage in range(stages))


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The seconds of one microbatch in a stage.

    Attributes:
        forward: computation of the forward pass.
        backward: computation of the backward pass; None if the batch only runs forward.
        transfer: transfer of the output to the next stage; its gradient takes as long.
    """

    forward: float
    backward: float | None
    transfer: float


def play(order: Order, stages: Sequence[StageSeconds]) -> list[TimedAction]:
    """Simulate a batch: each action runs as soon as its machine is free and its input has been computed.

    A transfer takes time of the sender, and of the receiver when it starts the action: an early input waits
    in a buffer, of which there is one for each microbatch. Without backward passes, they are left out of the
    order.
    """
    trains = any(stage.backward is not None for stage in stages)
    remaining = [[action for action in reversed(queue) if trains or not action.backward] for queue in order]
    free, ended, timed = [0.0] * len(order), dict[StageAction, float](), list[TimedAction]()
    while any(remaining):
        before = len(timed)
        for machine, queue in enumerate(remaining):
            while queue and ((source := _needed(queue[-1], len(stages))) is None or source in ended):
                action = queue.pop()
                received = max(free[machine], 0.0 if source is None else ended[source])
                arriving, leaving = _transfers(action, stages)
                computing = stages[action.stage].backward if action.backward else stages[action.stage].forward
                start = received + arriving
                ended[action] = start + (computing or 0.0)
                timed.append(TimedAction(action, free[machine], received, start=start, end=ended[action]))
                free[machine] = ended[action] + leaving
        assert len(timed) > before, "the order waits for itself"
    return timed


def batch_seconds(order: Order, stages: Sequence[StageSeconds]) -> float:
    """Return the seconds of a batch."""
    return max(action.end for action in play(order, stages))


def _needed(action: StageAction, stages: int) -> StageAction | None:
    """Return the action on another machine whose output this one needs, if any."""
    stage = action.stage + 1 if action.backward else action.stage - 1
    return StageAction(stage, action.microbatch, action.backward) if 0 <= stage < stages else None


def _transfers(action: StageAction, stages: Sequence[StageSeconds]) -> tuple[float, float]:
    """Return the seconds of the transfers of an action's input and of its output."""
    before = stages[action.stage - 1].transfer if action.stage else 0.0
    after = stages[action.stage].transfer
    return (after, before) if action.backward else (before, after)
