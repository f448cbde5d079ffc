"""One stage in a pipeline: ``torch.distributed.pipelining`` moves microbatches, the placed stage computes.

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

from graphplan.errors import ClusterError, first_line
from graphplan.ir.flight import PipelineSchedule
from graphplan.runtime.module.dispatch import serve
from graphplan.runtime.module.placed_module import differentiated

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
    """What one rank runs of a call.

    Attributes:
        stage: the placed stage, which takes ``inputs`` and returns ``outputs``.
        inputs: names of values.
        outputs: likewise; none where the stage only passes on what it receives.
        received: from the stage before.
        sent: to the stage after; of the last stage, the results.
        ranks: of the stages, in order.
    """

    stage: nn.Module
    inputs: Sequence[str]
    outputs: Sequence[str]
    received: Sequence[Wire]
    sent: Sequence[Wire]
    ranks: Sequence[int]


def make_ready(stage: Any, values: Sequence[Any], *, trains: bool) -> None:
    """Have a placed stage plan calls of values like these now, while all ranks can still hear of an error.

    Args:
        stage: that is placed.
        values: that it takes.
        trains: whether a backward pass follows, if the stage was planned for one.
    """
    state = stage._graphplan
    with torch.set_grad_enabled(trains):
        step = differentiated(stage, state, ())
    serve(stage, state, "", state.signature, tuple(values), {}, step)


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
        values = dict(self.own[int(received[0] if number is None else number)])
        try:
            if number is not None:
                self._require_form(int(received[0]))
                values |= zip((wire.name for wire in program.received), received[1:], strict=True)
            made = self.stage(*(values[name] for name in program.inputs)) if program.outputs else ()
            values |= zip(program.outputs, made, strict=True)
            self.stay.update(zip(program.outputs, made, strict=True))
            found = tuple(values[wire.name].to(_HOST).contiguous() for wire in program.sent)
        except Exception as error:  # the schedule wraps it, whatever it is
            self.failed = error
            raise
        self.made.append(found)
        self.spans.append((start, time.perf_counter()))
        if dist.get_rank() == program.ranks[-1]:
            return found
        for wire, tensor in zip(program.sent, found, strict=True):
            self.traffic[wire.name] += tensor.nbytes
        return (self.header, *found)

    def _require_form(self, received: int) -> None:
        if received != int(self.header):
            ranks = self.program.ranks
            before = ranks[list(ranks).index(dist.get_rank()) - 1]
            raise ClusterError(
                f"rank {dist.get_rank()} was called with inputs of other names or sizes than rank {before}: "
                "all ranks make the same calls"
            )


class StageRunner:
    """Runs the microbatches of a call through this rank's stage.

    Args:
        program: of this rank.
        microbatches: in each call.
        traffic: to which the bytes that this rank sends are added, by name of the value.
        group: of the ranks that have stages; None for all.
        loss: of a result and a target, for training: gradients are of its mean; None for inference.
        schedule: of a training step; microbatches that only go forward have one order.
    """

    def __init__(
        self,
        program: StageProgram,
        microbatches: int,
        traffic: Counter[str],
        group: dist.ProcessGroup | None = None,
        schedule: PipelineSchedule = "gpipe",
        loss: Any = None,
    ) -> None:
        from torch.distributed import pipelining  # some builds of torch lack it

        self.program, self.microbatches = program, microbatches
        self.index = list(program.ranks).index(dist.get_rank())
        self.step = _RunningStep(program, traffic)
        number = torch.empty(1, dtype=torch.int64, device="meta")
        last = self.index == len(program.ranks) - 1
        grad = loss is not None
        arriving = (number, *(wire.like(grad=grad) for wire in program.received))
        leaving = (*(() if last else (number,)), *(wire.like(grad=grad) for wire in program.sent))
        self.stage = pipelining.PipelineStage(
            self.step, self.index, len(program.ranks), _HOST, arriving, leaving, group=group
        )
        self.stage.stage_index_to_group_rank = {
            index: rank if group is None else dist.get_group_rank(group, rank)
            for index, rank in enumerate(program.ranks)
        }
        kind: Any = pipelining.ScheduleGPipe if schedule == "gpipe" else pipelining.Schedule1F1B
        self.losses: list[torch.Tensor] = []

        def share(result: Any, target: torch.Tensor) -> torch.Tensor:
            self.losses.append(loss(result, target))
            return self.losses[-1] / microbatches

        # the schedule's own scaling would scale the gradients of earlier steps too
        self.schedule = kind(self.stage, microbatches, share if grad else None, scale_grads=False)

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
        self.step.header.fill_(form)
        with torch.no_grad():
            return self._call(self.schedule.eval, own, {})

    def spans(self) -> list[tuple[float, float]]:
        """When the stage began and ended with each microbatch of the last batch, by ``time.perf_counter``."""
        return self.step.spans

    def take_stay(self) -> dict[str, torch.Tensor]:
        """What the stage has computed of the last microbatch, by name: tensors of caches among it."""
        found, self.step.stay = self.step.stay, {}
        return found

    def train(self, own: Sequence[Mapping[str, Any]], form: int, target: torch.Tensor) -> list[torch.Tensor]:
        """Run a batch forward and backward; gradients are added to those of the parameters.

        Args:
            own: as for :meth:`run`.
            form: likewise.
            target: of the whole batch.

        Returns:
            the loss of each microbatch, on the rank of the last stage; nothing elsewhere.
        """
        self.step.header.fill_(form)
        self.losses = []
        last = self.index == len(self.program.ranks) - 1
        with torch.enable_grad():
            self._call(self.schedule.step, own, {"target": target} if last else {})
        self.step.stay = {}
        return [loss.detach() for loss in self.losses]

    def _call(self, action: Any, own: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> list[Any]:
        step = self.step
        step.own, step.failed, step.made, step.spans = own, None, [], []
        numbers = torch.arange(self.microbatches)
        try:
            if self.index:
                action(number=numbers, return_outputs=False, **more)
            else:
                action(numbers, return_outputs=False, **more)
            return step.made if self.index == len(self.program.ranks) - 1 else []
        except RuntimeError as error:
            if step.failed is not None:
                raise step.failed from None
            if error.__cause__ is not None:  # the schedule wraps what this rank's backward pass raised
                raise error.__cause__ from None
            raise self._no_answer(error) from error
        finally:
            step.own, step.made = (), []
            if self.microbatches > 1:
                step.stay = {}
            self.stage.clear_runtime_states()

    def _no_answer(self, error: Exception) -> ClusterError:
        program, ranks = self.program, self.program.ranks
        where = f"rank {ranks[self.index]} (stage {self.index} of {len(ranks)})"
        done = len(self.step.made)
        sending = done == self.microbatches or not self.index
        wires, peer = (program.sent, self.index + 1) if sending else (program.received, self.index - 1)
        names = ", ".join(repr(wire.name) for wire in wires)
        number = min(done, self.microbatches - 1)
        verb = f"for rank {ranks[peer]} to take" if sending else f"for rank {ranks[peer]} to send"
        return ClusterError(f"{where} waited {verb} {names} of microbatch {number}: {first_line(error)}")
