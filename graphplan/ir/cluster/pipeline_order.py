"""The order in which each machine runs the microbatches of its stages, and when.

Machine ``r`` of ``p`` begins with some forward passes; then each forward pass is followed by a backward pass.
GPipe begins with all of them (Huang et al., NeurIPS 2019), 1F1B with ``p - 1 - r``.

Interleaved 1F1B has several stages on each machine: stage ``s`` runs on machine ``s % p`` (Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021). Microbatches come
in rounds: a machine runs those of a round through one stage before it runs them through its next. It begins
with ``2 (p - 1 - r)`` forward passes, plus those of a round through all of its stages but one. Two machines
with two stages each and two microbatches::

    machine 0   F00 F01 F20 F21             B20 B21 B00 B01
    machine 1       F10 F11 F30 B30 F31 B31     B10 B11     (stage, microbatch)

The orders are those of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]
Order = tuple[tuple["StageAction", ...], ...]
"""The actions of each machine, in order."""


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


def rounds_divide(machines: int, microbatches: int) -> bool:
    """Whether microbatches form whole rounds, each of as many as there are machines, or a few more."""
    return microbatches % max(1, microbatches // machines) == 0


@cache
def pipeline_order(
    schedule: PipelineSchedule, machines: int, stages_per_machine: int, microbatches: int
) -> Order:
    """Return the actions of each machine, in order."""
    assert stages_per_machine == 1 or rounds_divide(machines, microbatches)
    each = microbatches // max(1, microbatches // machines)  # microbatches of a round
    total = microbatches * stages_per_machine

    def forward_passes_first(machine: int) -> int:
        later = machines - 1 - machine
        before = {"gpipe": total, "1f1b": later, "interleaved": (stages_per_machine - 1) * each + 2 * later}
        return min(before[schedule], total)

    def action(machine: int, number: int, *, backward: bool) -> StageAction:
        turn, place = divmod(number, each * stages_per_machine)
        own, within = divmod(place, each)
        own = stages_per_machine - 1 - own if backward else own
        return StageAction(own * machines + machine, turn * each + within, backward)

    def actions(machine: int) -> Iterator[StageAction]:
        ahead = forward_passes_first(machine)
        for number in range(total + ahead):
            if number < total:
                yield action(machine, number, backward=False)
            if number >= ahead:
                yield action(machine, number - ahead, backward=True)

    return tuple(tuple(actions(machine)) for machine in range(machines))


@cache
def most_in_flight(
    schedule: PipelineSchedule, machines: int, stages_per_machine: int, microbatches: int
) -> tuple[int, ...]:
    """Return for each stage the most microbatches that it has run forward, but not yet backward."""
    in_flight, most = Counter[int](), Counter[int]()
    for actions in pipeline_order(schedule, machines, stages_per_machine, microbatches):
        for one in actions:
            in_flight[one.stage] += -1 if one.backward else 1
            most[one.stage] = max(most[one.stage], in_flight[one.stage])
    return tuple(most[stage] for stage in range(machines * stages_per_machine))


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
