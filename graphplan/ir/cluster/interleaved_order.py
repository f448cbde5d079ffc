"""Interleaved 1F1B: the order in which each machine runs the microbatches of its stages, and its seconds.

Stage ``s`` runs on machine ``s % p`` (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", SC 2021). Microbatches come in rounds: a machine takes those of a round through
one stage before it takes them through its next. Machine ``r`` begins with ``2 (p - 1 - r)`` forward passes
and those of a round through all of its stages but one; then each forward pass is followed by a backward pass.
Two machines with two stages each, of two microbatches::

    machine 0   F00 F01 F20 F21             B20 B21 B00 B01
    machine 1       F10 F11 F30 B30 F31 B31     B10 B11     (stage, microbatch)

The order is that of ``torch.distributed.pipelining.ScheduleInterleaved1F1B``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class StageAction:
    """A stage runs a microbatch, forward or backward."""

    stage: int
    microbatch: int
    backward: bool = False


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action, and its seconds since the batch began.

    Attributes:
        action: what is run.
        free: when the machine was done with its action before.
        received: when it began to take what it needs; ``free`` where that is at hand.
        start: when it computed first.
        end: when it had computed; what it sends comes after.
    """

    action: StageAction
    free: float
    received: float
    start: float
    end: float


def rounds_divide(machines: int, microbatches: int) -> bool:
    """Whether microbatches make whole rounds, of as many as there are machines, or a few more."""
    return microbatches % max(1, microbatches // machines) == 0


@cache
def interleaved_order(
    machines: int, stages_per_machine: int, microbatches: int
) -> tuple[tuple[StageAction, ...], ...]:
    """What each machine does, in order."""
    assert rounds_divide(machines, microbatches)
    each = microbatches // max(1, microbatches // machines)  # microbatches of a round
    total = microbatches * stages_per_machine

    def action(machine: int, number: int, *, backward: bool) -> StageAction:
        turn, place = divmod(number, each * stages_per_machine)
        own, within = divmod(place, each)
        own = stages_per_machine - 1 - own if backward else own
        return StageAction(own * machines + machine, turn * each + within, backward)

    def actions(machine: int) -> Iterator[StageAction]:
        ahead = min((stages_per_machine - 1) * each + 2 * (machines - 1 - machine), total)
        for number in range(total + ahead):
            if number < total:
                yield action(machine, number, backward=False)
            if number >= ahead:
                yield action(machine, number - ahead, backward=True)

    return tuple(tuple(actions(machine)) for machine in range(machines))


@cache
def most_in_flight(machines: int, stages_per_machine: int, microbatches: int) -> tuple[int, ...]:
    """Of each stage, the most microbatches that it has run forward, and not yet backward."""
    found, most = Counter[int](), Counter[int]()
    for actions in interleaved_order(machines, stages_per_machine, microbatches):
        for one in actions:
            found[one.stage] += -1 if one.backward else 1
            most[one.stage] = max(most[one.stage], found[one.stage])
    return tuple(most[stage] for stage in range(machines * stages_per_machine))


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Of one microbatch in a stage.

    Attributes:
        forward: seconds that it computes forward.
        backward: likewise backward; None of a batch that only goes forward.
        sent: of what goes to the stage after, and of its gradient.
    """

    forward: float
    backward: float | None
    sent: float


def play(machines: int, microbatches: int, stages: Sequence[StageSeconds]) -> list[TimedAction]:
    """A batch, action by action, each as soon as its machine is free and what it needs has been computed.

    A transfer takes the sender's time, and the receiver's when it gets to it: what arrives early waits in
    a buffer, of which there is one for each microbatch.
    """
    order = interleaved_order(machines, len(stages) // machines, microbatches)
    trains = any(stage.backward is not None for stage in stages)
    left = [[one for one in reversed(own) if trains or not one.backward] for own in order]
    free, ended, found = [0.0] * machines, dict[StageAction, float](), list[TimedAction]()
    while any(left):
        before = len(found)
        for machine, own in enumerate(left):
            while own and ((needed := _needed(own[-1], len(stages))) is None or needed in ended):
                one = own.pop()
                received = max(free[machine], 0.0 if needed is None else ended[needed])
                arriving, leaving = _transfers(one, stages)
                computing = stages[one.stage].backward if one.backward else stages[one.stage].forward
                start = received + arriving
                ended[one] = start + (computing or 0.0)
                found.append(TimedAction(one, free[machine], received, start, ended[one]))
                free[machine] = ended[one] + leaving
        assert len(found) > before, "the order waits for itself"
    return found


def _needed(one: StageAction, stages: int) -> StageAction | None:
    """The action that computes what another machine sends for this one."""
    stage = one.stage + 1 if one.backward else one.stage - 1
    return StageAction(stage, one.microbatch, one.backward) if 0 <= stage < stages else None


def _transfers(one: StageAction, stages: Sequence[StageSeconds]) -> tuple[float, float]:
    """Seconds in which what an action takes arrives, and in which what it makes leaves."""
    before = stages[one.stage - 1].sent if one.stage else 0.0
    after = stages[one.stage].sent
    return (after, before) if one.backward else (before, after)
