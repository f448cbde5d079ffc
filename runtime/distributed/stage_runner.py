"""Run the stages of a rank in a pipeline: ``torch.distributed.pipelining`` moves the microbatches.

Outputs of the previous stage cross the network; inputs of the model are available on every rank, and are not
sent. The schedule gives each stage the number of a microbatch, which selects its inputs. The digest of the
call's key is sent before the values, so that ranks that were called differently are detected.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphplan._compat.torch import receive_buffers
from graphplan.errors import ClusterError, InputError
from graphplan.ir.cluster.pipeline_order import PipelineSchedule, pipeline_order
from graphplan.message_text import first_line
from graphplan.runtime.module.dispatch import CallRequest, PlaceAgain, serve
from graphplan.runtime.module.placed_module import differentiated
from graphplan.warnings import silenced

MicrobatchLoss = Callable[[Sequence[torch.Tensor], int], torch.Tensor]
_HOST = torch.device("cpu")  # device of tensors that are sent and received


@dataclass(frozen=True, slots=True)
class Wire:
    """A tensor that is sent for each microbatch; ``trained`` if its gradient is sent back."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = False

    def meta_tensor(self, *, grad: bool) -> torch.Tensor:
        """Return a meta tensor of this shape and dtype."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return tensor.requires_grad_(grad and self.trained)

    def empty(self, microbatches: int) -> torch.Tensor:
        """Return an empty CPU tensor for the rows of all microbatches."""
        rows = self.shape if microbatches == 1 else (self.shape[0] * microbatches, *self.shape[1:])
        return torch.empty(rows, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The part of a call that one stage runs.

    Attributes:
        index: index of the stage.
        stage: the placed stage, which takes ``inputs`` and returns ``outputs``.
        trace: name of an empty argument of ``stage`` that selects the trace of the model.
        inputs: names of its input values.
        outputs: names of its output values; none if the stage only passes on what it receives.
        received: tensors received from the previous stage.
        sent: tensors sent to the next stage; those of the last stage are the results.
        ranks: ranks of all stages, in order.
        trains: whether gradients flow through it in a training step.
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
        """Whether this is the last stage, which has the results."""
        return self.index == len(self.ranks) - 1


def make_ready(stage: Any, values: Sequence[Any], trace: str, *, trains: bool) -> None:
    """Plan calls of a placed stage with values like these now, while an error can still reach all ranks.

    Args:
        stage: the placed stage.
        values: its inputs.
        trace: as in :class:`StageProgram`.
        trains: whether a backward pass follows, if the stage was planned for one.
    """
    state = stage._graphplan
    with torch.set_grad_enabled(trains):
        step = differentiated(stage, state, ())
    with suppress(PlaceAgain):  # by the call itself
        serve(stage, state, CallRequest("", state.signature, tuple(values), {trace: ()}), step)


class _RunningStep(nn.Module):
    """The module that a schedule calls for each microbatch."""

    def __init__(self, program: StageProgram, traffic: Counter[str], *, caches_stay: bool) -> None:
        super().__init__()
        self.stage, self.program = program.stage, program
        self.traffic, self.caches_stay = traffic, caches_stay
        self.model_inputs: Sequence[Mapping[str, Any]] = ()
        self.parts: Sequence[tuple[torch.Tensor, ...]] = ()  # of the batch's results, for each microbatch
        self.failed: Exception | None = None
        self.finished = 0
        self.spans: list[tuple[float, float]] = []
        self.header = torch.zeros(1, dtype=torch.int64)
        self.stay: dict[str, torch.Tensor] = {}

    def forward(
        self, *received: torch.Tensor, number: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        program, start = self.program, time.perf_counter()
        microbatch = int(number if program.index and number is not None else received[0])
        values = dict(self.model_inputs[microbatch])
        try:
            if program.index:
                self._require_same_call(int(received[0]))
                values |= zip((wire.name for wire in program.received), received[1:], strict=True)
            outputs: Sequence[torch.Tensor] = ()
            if program.outputs:
                with torch.set_grad_enabled(torch.is_grad_enabled() and program.trains):
                    outputs = self.stage(*(values[name] for name in program.inputs), **{program.trace: ()})
            values |= zip(program.outputs, outputs, strict=True)
            if self.caches_stay:
                self.stay.update(zip(program.outputs, outputs, strict=True))
            if self.parts:
                sent = self.parts[microbatch]
                for part, wire in zip(sent, program.sent, strict=True):
                    part.copy_(values[wire.name])
            else:
                sent = tuple(_sent(values[wire.name], wire) for wire in program.sent)
        except Exception as error:  # of any type: the schedule wraps it
            self.failed = error
            raise
        self.finished += 1
        self.spans.append((start, time.perf_counter()))
        if program.is_last:
            return sent
        for wire, tensor in zip(program.sent, sent, strict=True):
            self.traffic[wire.name] += tensor.nbytes
        return (self.header, *sent)

    def _require_same_call(self, received: int) -> None:
        if received != int(self.header):
            previous = self.program.ranks[self.program.index - 1]
            raise ClusterError(
                f"rank {dist.get_rank()} was called with inputs of other names or sizes than rank "
                f"{previous}: all ranks make the same calls"
            )


class StageRunner:
    """Runs the microbatches of a call through this rank's stages.

    Args:
        programs: programs of this rank's stages, in order: one, or several if ``schedule`` is "interleaved".
        microbatches: number of microbatches in each call.
        traffic: counter to which the bytes that this rank sends are added, by name of the value.
        group: process group of the ranks that have stages; None for all.
        schedule: order of a training step. Forward passes alone have one order, or that of "interleaved".
        trains: whether batches run by :meth:`train`, not by :meth:`run`.
        caches_stay: whether :meth:`take_stay` is called after each batch.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        microbatches: int,
        traffic: Counter[str],
        group: dist.ProcessGroup | None = None,
        schedule: PipelineSchedule = "gpipe",
        *,
        trains: bool = False,
        caches_stay: bool = False,
    ) -> None:
        from torch.distributed import pipelining  # some builds of torch lack it

        self.microbatches = microbatches
        self.steps = [_RunningStep(program, traffic, caches_stay=caches_stay) for program in programs]
        self.stages: list[Any] = []
        for step in self.steps:
            index, count = step.program.index, len(step.program.ranks)
            wires = _wires(step.program, grad=trains)
            self.stages.append(pipelining.PipelineStage(step, index, count, _HOST, *wires, group=group))
        self.losses: list[torch.Tensor] = []
        self.loss: MicrobatchLoss | None = None
        self.scale = 1.0
        # the schedule's own scaling would scale the gradients of earlier steps too
        options: Any = {"loss_fn": self._scaled_loss if trains else None, "scale_grads": False}
        if schedule == "interleaved":
            self.schedule: Any = pipelining.ScheduleInterleaved1F1B(self.stages, microbatches, **options)
            return
        (stage,), (program,) = self.stages, programs
        stage.stage_index_to_group_rank = {
            index: rank if group is None else dist.get_group_rank(group, rank)
            for index, rank in enumerate(program.ranks)
        }
        one_forward = trains and schedule == "1f1b"
        schedule_class: Any = pipelining.Schedule1F1B if one_forward else pipelining.ScheduleGPipe
        self.schedule = schedule_class(stage, microbatches, **options)

    @property
    def results(self) -> _RunningStep | None:
        """The last stage of the pipeline, which has the results; None if it is on another rank."""
        return self.steps[-1] if self.steps[-1].program.is_last else None

    def run(self, model_inputs: Sequence[Mapping[str, Any]], digest: int) -> list[torch.Tensor]:
        """Run a batch forward.

        Args:
            model_inputs: for each microbatch, the model's inputs by name.
            digest: a number that is the same on all ranks for calls of the same names and sizes.

        Returns:
            the results of the batch on the rank of the last stage; an empty list on other ranks.

        Raises:
            ClusterError: another rank did not send or receive a tensor within the group's timeout.
            Exception: the exception of this rank's own stage.
        """
        last, results = self.results, []
        if last is not None:
            results = [wire.empty(self.microbatches) for wire in last.program.sent]
            parts = [
                result.tensor_split(self.microbatches) if result.dim() else (result,) for result in results
            ]
            last.parts = list(zip(*parts, strict=True))
        with torch.no_grad():
            self._run_schedule(self.schedule.eval, model_inputs, digest, {})
        return results

    def spans(self) -> dict[int, list[tuple[float, float]]]:
        """Return stage -> its start and end (``perf_counter``) for each microbatch of the last batch."""
        return {step.program.index: step.spans for step in self.steps}

    def take_stay(self) -> dict[str, torch.Tensor]:
        """Return the stages' outputs for the last microbatch by name, caches included, and drop them here."""
        outputs: dict[str, torch.Tensor] = {}
        for step in self.steps:
            outputs |= step.stay
            step.stay = {}
        return outputs

    def train(
        self, model_inputs: Sequence[Mapping[str, Any]], digest: int, loss: MicrobatchLoss, scale: float
    ) -> list[torch.Tensor]:
        """Run a batch forward and backward; gradients are added to those of the parameters.

        Args:
            model_inputs: as for :meth:`run`.
            digest: likewise.
            loss: maps the results of a microbatch, and its number, to a scalar.
            scale: factor of the losses in the loss of the batch.

        Returns:
            the loss of each microbatch on the rank of the last stage; an empty list on other ranks.
        """
        self.losses, self.loss, self.scale = [], loss, scale
        numbers = {} if self.results is None else {"target": torch.arange(self.microbatches)}
        with torch.enable_grad():
            self._run_schedule(self.schedule.step, model_inputs, digest, numbers)
        losses, self.losses, self.loss = self.losses, [], None
        return [one.detach() for one in losses]

    def _scaled_loss(self, results: Sequence[torch.Tensor], number: torch.Tensor) -> torch.Tensor:
        assert self.loss is not None
        try:
            self.losses.append(_checked_loss(self.loss(results, int(number))))
        except Exception as error:  # of any type: the schedule wraps it
            self.steps[-1].failed = error
            raise
        return self.losses[-1] * self.scale

    def _run_schedule(
        self, action: Any, model_inputs: Sequence[Mapping[str, Any]], digest: int, targets: Mapping[str, Any]
    ) -> None:
        for step in self.steps:
            step.header.fill_(digest)
            step.model_inputs = model_inputs
            step.failed = None
            step.finished, step.spans = 0, []
        numbers = torch.arange(self.microbatches)
        first_inputs = [] if self.steps[0].program.index else [numbers]
        later_inputs = {"number": numbers} if self.steps[-1].program.index else {}
        try:
            # the schedule prints its steps if one fails
            with silenced(self.schedule.__module__), receive_buffers(self.stages):
                action(*first_inputs, return_outputs=False, **later_inputs, **targets)
        except RuntimeError as error:
            failed = next((step.failed for step in self.steps if step.failed is not None), None)
            if failed is not None:
                raise failed from None
            if error.__cause__ is not None:  # the schedule wraps what this rank's backward pass raised
                raise error.__cause__ from None
            raise self._no_answer(error) from error
        finally:
            for step, stage in zip(self.steps, self.stages, strict=True):
                step.model_inputs, step.parts = (), ()
                stage.clear_runtime_states()

    def _no_answer(self, error: Exception) -> ClusterError:
        step, number = self._next()
        program, ranks = step.program, step.program.ranks
        where = f"rank {ranks[program.index]} (stage {program.index} of {len(ranks)})"
        sending = number == self.microbatches or not program.index
        peer = program.index + 1 if sending else program.index - 1
        names = ", ".join(repr(wire.name) for wire in (program.sent if sending else program.received))
        verb = f"for rank {ranks[peer % len(ranks)]} to {'receive' if sending else 'send'}"
        number = min(number, self.microbatches - 1)
        return ClusterError(f"{where} waited {verb} {names} of microbatch {number}: {first_line(error)}")

    def _next(self) -> tuple[_RunningStep, int]:
        """Return the stage that runs forward next, and its microbatch; the first stage if all are done."""
        done = {step.program.index: step.finished for step in self.steps}
        if len(self.steps) > 1:
            machines = len(self.steps[0].program.ranks) // len(self.steps)
            order = pipeline_order("interleaved", machines, len(self.steps), self.microbatches)
            for action in order[self.steps[0].program.index]:
                if not action.backward and action.microbatch == done[action.stage]:
                    return self.steps[action.stage // machines], action.microbatch
        return self.steps[0], done[self.steps[0].program.index]


def _sent(value: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Return the value as it is sent: on the CPU, contiguous, without pending conj or neg."""
    sent = value.to(_HOST).resolve_conj().resolve_neg().contiguous()
    return sent if wire.trained else sent.detach()


def _checked_loss(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise InputError(f"the loss must return a tensor of one number for each microbatch, not {got}")
    if not value.requires_grad:
        raise InputError(
            "the loss has no gradient: it does not depend on a parameter, or was detached from them"
        )
    return value


def _wires(program: StageProgram, *, grad: bool) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return meta tensors of what a stage receives and sends, each after a microbatch number or digest."""
    number = torch.empty(1, dtype=torch.int64, device="meta")
    leaving = () if program.is_last else (number,)
    received, sent = (
        [wire.meta_tensor(grad=grad) for wire in side] for side in (program.received, program.sent)
    )
    return (number, *received), (*leaving, *sent)
