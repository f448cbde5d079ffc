"""The stages of a rank in a pipeline: ``torch.distributed.pipelining`` moves microbatches, they compute.

What a stage gets from the one before crosses the network; inputs of the model are at hand on every rank, and
do not. The schedule hands stages the number of a microbatch, by which each finds its own inputs. Before the
values goes the number of the form of the call, so that ranks that were called differently find out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphplan.errors import ClusterError, InputError
from graphplan.ir.cluster.flight import PipelineSchedule
from graphplan.ir.cluster.interleaved_order import interleaved_order
from graphplan.message_text import first_line
from graphplan.runtime.module.dispatch import serve
from graphplan.runtime.module.placed_module import differentiated
from graphplan.warnings import silenced

_HOST = torch.device("cpu")  # where tensors of the network are


@dataclass(frozen=True, slots=True)
class Wire:
    """A tensor on the network, of one microbatch; ``trained`` where gradients of it are sent back."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = False

    def like(self, *, grad: bool) -> torch.Tensor:
        """One without data."""
        made = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return made.requires_grad_(grad and self.trained)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """What one stage runs of a call.

    Attributes:
        index: of the stage.
        stage: the placed stage, which takes ``inputs`` and returns ``outputs``.
        trace: an argument without a value that it takes too: of which trace of the model it runs the stage.
        inputs: names of values.
        outputs: likewise; none where the stage only passes on what it receives.
        received: from the stage before.
        sent: to the stage after; of the last stage, the results.
        ranks: of all stages, in order.
        trains: whether gradients pass it in a training step.
    """

    index: int
    stage: nn.Module
    trace: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    received: Sequence[Wire]
    sent: Sequence[Wire]
    ranks: Sequence[int]
    trains: bool

    @property
    def is_last(self) -> bool:
        """Whether what it sends are the results."""
        return self.index == len(self.ranks) - 1


def make_ready(stage: Any, values: Sequence[Any], trace: str, *, trains: bool) -> None:
    """Have a placed stage plan calls of values like these now, while all ranks can still hear of an error.

    Args:
        stage: that is placed.
        values: that it takes.
        trace: as in :class:`StageProgram`.
        trains: whether a backward pass follows, if the stage was planned for one.
    """
    state = stage._graphplan
    with torch.set_grad_enabled(trains):
        step = differentiated(stage, state, ())
    serve(stage, state, "", state.signature, tuple(values), {trace: ()}, step)


class _RunningStep(nn.Module):
    """What a schedule calls for each microbatch."""

    def __init__(self, program: StageProgram, traffic: Counter[str]) -> None:
        super().__init__()
        self.stage, self.program, self.traffic = program.stage, program, traffic
        self.own: Sequence[Mapping[str, Any]] = ()
        self.failed: Exception | None = None
        self.made: list[tuple[torch.Tensor, ...]] = []
        self.spans: list[tuple[float, float]] = []
        self.header = torch.zeros(1, dtype=torch.int64)
        self.stay: dict[str, torch.Tensor] = {}

    def forward(
        self, *received: torch.Tensor, number: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        program, start = self.program, time.perf_counter()
        values = dict(self.own[int(number if program.index and number is not None else received[0])])
        try:
            if program.index:
                self._require_form(int(received[0]))
                values |= zip((wire.name for wire in program.received), received[1:], strict=True)
            made: Sequence[torch.Tensor] = ()
            if program.outputs:
                with torch.set_grad_enabled(torch.is_grad_enabled() and program.trains):
                    made = self.stage(*(values[name] for name in program.inputs), **{program.trace: ()})
            values |= zip(program.outputs, made, strict=True)
            self.stay.update(zip(program.outputs, made, strict=True))
            found = tuple(_sent(values[wire.name], wire) for wire in program.sent)
        except Exception as error:  # the schedule wraps it, whatever it is
            self.failed = error
            raise
        self.made.append(found)
        self.spans.append((start, time.perf_counter()))
        if program.is_last:
            return found
        for wire, tensor in zip(program.sent, found, strict=True):
            self.traffic[wire.name] += tensor.nbytes
        return (self.header, *found)

    def _require_form(self, received: int) -> None:
        if received != int(self.header):
            before = self.program.ranks[self.program.index - 1]
            raise ClusterError(
                f"rank {dist.get_rank()} was called with inputs of other names or sizes than rank {before}: "
                "all ranks make the same calls"
            )


class StageRunner:
    """Runs the microbatches of a call through this rank's stages.

    Args:
        programs: of this rank's stages, in order: one, or with ``"interleaved"`` several.
        microbatches: in each call.
        traffic: to which the bytes that this rank sends are added, by name of the value.
        group: of the ranks that have stages; None for all.
        loss: of a result and a target, for training: gradients are of its mean; None for inference.
        schedule: of a training step; microbatches that only go forward have one order, and another
            interleaved.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        microbatches: int,
        traffic: Counter[str],
        group: dist.ProcessGroup | None = None,
        schedule: PipelineSchedule = "gpipe",
        loss: Any = None,
    ) -> None:
        from torch.distributed import pipelining  # some builds of torch lack it

        self.microbatches = microbatches
        self.steps = [_RunningStep(program, traffic) for program in programs]
        grad = loss is not None
        self.stages: list[Any] = []
        for step in self.steps:
            index, count = step.program.index, len(step.program.ranks)
            wires = _wires(step.program, grad)
            self.stages.append(pipelining.PipelineStage(step, index, count, _HOST, *wires, group=group))
        self.losses: list[torch.Tensor] = []
        self.targets: Sequence[Any] = ()

        def share(result: Any, number: torch.Tensor) -> torch.Tensor:
            try:
                self.losses.append(_checked_loss(loss(result, self.targets[int(number)])))
            except Exception as error:  # the schedule wraps it, whatever it is
                self.steps[-1].failed = error
                raise
            return self.losses[-1] / microbatches

        # the schedule's own scaling would scale the gradients of earlier steps too
        options: Any = {"loss_fn": share if grad else None, "scale_grads": False}
        if schedule == "interleaved":
            self.schedule: Any = pipelining.ScheduleInterleaved1F1B(self.stages, microbatches, **options)
            return
        (stage,), (program,) = self.stages, programs
        stage.stage_index_to_group_rank = {
            index: rank if group is None else dist.get_group_rank(group, rank)
            for index, rank in enumerate(program.ranks)
        }
        kind: Any = pipelining.ScheduleGPipe if schedule == "gpipe" else pipelining.Schedule1F1B
        self.schedule = kind(stage, microbatches, **options)

    @property
    def results(self) -> _RunningStep | None:
        """The stage that has the results, if it is here."""
        return self.steps[-1] if self.steps[-1].program.is_last else None

    def run(self, own: Sequence[Mapping[str, Any]], form: int) -> list[tuple[torch.Tensor, ...]]:
        """Run a batch forward.

        Args:
            own: for each microbatch, the model's inputs by name.
            form: a number that is the same on all ranks for calls of the same names and sizes.

        Returns:
            the results of each microbatch on the rank of the last stage; nothing elsewhere.

        Raises:
            ClusterError: another rank did not send or take something within the group's timeout.
            Exception: what this rank's own stage raised.
        """
        with torch.no_grad():
            return self._call(self.schedule.eval, own, form, {})

    def spans(self) -> dict[int, list[tuple[float, float]]]:
        """Stage -> when it began and ended with each microbatch of the last batch: ``time.perf_counter``."""
        return {step.program.index: step.spans for step in self.steps}

    def take_stay(self) -> dict[str, torch.Tensor]:
        """What the stages have computed of the last microbatch, by name: tensors of caches among it."""
        found: dict[str, torch.Tensor] = {}
        for step in self.steps:
            found |= step.stay
            step.stay = {}
        return found

    def train(
        self, own: Sequence[Mapping[str, Any]], form: int, targets: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Run a batch forward and backward; gradients are added to those of the parameters.

        Args:
            own: as for :meth:`run`.
            form: likewise.
            targets: of each microbatch.

        Returns:
            the loss of each microbatch, on the rank of the last stage; nothing elsewhere.
        """
        self.losses, self.targets = [], targets
        numbers = {} if self.results is None else {"target": torch.arange(self.microbatches)}
        with torch.enable_grad():
            self._call(self.schedule.step, own, form, numbers)
        self.targets = ()
        self.take_stay()
        return [loss.detach() for loss in self.losses]

    def _call(
        self, action: Any, own: Sequence[Mapping[str, Any]], form: int, more: Mapping[str, Any]
    ) -> list[Any]:
        for step in self.steps:
            step.header.fill_(form)
            step.own, step.failed, step.made, step.spans = own, None, [], []
        numbers = torch.arange(self.microbatches)
        first = [] if self.steps[0].program.index else [numbers]
        later = {"number": numbers} if self.steps[-1].program.index else {}
        try:
            with silenced(self.schedule.__module__):  # it prints its steps where one fails
                action(*first, return_outputs=False, **later, **more)
            return [] if self.results is None else self.results.made
        except RuntimeError as error:
            failed = next((step.failed for step in self.steps if step.failed is not None), None)
            if failed is not None:
                raise failed from None
            if error.__cause__ is not None:  # the schedule wraps what this rank's backward pass raised
                raise error.__cause__ from None
            raise self._no_answer(error) from error
        finally:
            for step, stage in zip(self.steps, self.stages, strict=True):
                step.own, step.made = (), []
                stage.clear_runtime_states()
            if self.microbatches > 1:
                self.take_stay()

    def _no_answer(self, error: Exception) -> ClusterError:
        step, number = self._next()
        program, ranks = step.program, step.program.ranks
        where = f"rank {ranks[program.index]} (stage {program.index} of {len(ranks)})"
        sending = number == self.microbatches or not program.index
        peer = program.index + 1 if sending else program.index - 1
        names = ", ".join(repr(wire.name) for wire in (program.sent if sending else program.received))
        verb = f"for rank {ranks[peer % len(ranks)]} to {'take' if sending else 'send'}"
        number = min(number, self.microbatches - 1)
        return ClusterError(f"{where} waited {verb} {names} of microbatch {number}: {first_line(error)}")

    def _next(self) -> tuple[_RunningStep, int]:
        """The stage that is next to go forward, and with which microbatch; the first after the last."""
        done = {step.program.index: len(step.made) for step in self.steps}
        if len(self.steps) > 1:
            machines = len(self.steps[0].program.ranks) // len(self.steps)
            order = interleaved_order(machines, len(self.steps), self.microbatches)
            for one in order[self.steps[0].program.index]:
                if not one.backward and one.microbatch == done[one.stage]:
                    return self.steps[one.stage // machines], one.microbatch
        return self.steps[0], done[self.steps[0].program.index]


def _sent(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """In CPU memory, in one piece, with the numbers that it stands for; of some no gradient comes back."""
    sent = value.to(_HOST).resolve_conj().resolve_neg().contiguous()
    return sent if wire.trained else sent.detach()


def _checked_loss(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        said = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise InputError(f"the loss must return a tensor of one number for each microbatch, not {said}")
    if not value.requires_grad:
        raise InputError("the loss has no gradient: it depends on no parameter, or was detached from them")
    return value


def _wires(program: StageProgram, grad: bool) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What arrives and what leaves, without data: the number of a microbatch or of the form goes before."""
    number = torch.empty(1, dtype=torch.int64, device="meta")
    leaving = () if program.is_last else (number,)
    received, sent = ([wire.like(grad=grad) for wire in side] for side in (program.received, program.sent))
    return (number, *received), (*leaving, *sent)
