"""The module that every rank calls alike: its own stages run, and the last rank has the results."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from graphplan._compat.torch import require_backward_stages
from graphplan.capture.signature import BoundCall, InputSignature, bind_call, leaf_names, same_constant
from graphplan.capture.sizes.microbatches import Divided, batch_of, microbatches_of, targets_of
from graphplan.capture.thread_patches import outside_inference_mode
from graphplan.capture.value_branches import goes_by_same, require_same_way
from graphplan.errors import ClusterError, InputError
from graphplan.message_text import first_line
from graphplan.runtime.distributed.agreement import broadcast_from_last, gather_texts
from graphplan.runtime.distributed.cluster_profile import ClusterProfile, merged
from graphplan.runtime.distributed.machine_stages import MachineStages
from graphplan.runtime.distributed.shared_gradients import SharedGradients
from graphplan.runtime.distributed.stage_runner import StageRunner, Wire

Results = Sequence[torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]
"""Of what the model returns for a microbatch, and its part of the target."""
_MOST = 256  # forms of calls that are remembered
_SIMPLE = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True, slots=True)
class ClusterCall:
    """How calls of one form are run.

    Attributes:
        runner: of this rank's stage; None where it has none.
        own: from a microbatch to the model's inputs by name.
        results: of one microbatch.
        rebuild: from the results by name, and the call, to what the model returns.
        last: rank of the last stage.
        trainer: from a loss to what runs this rank's stage forward and backward.
        signature: of the trace, whose code may have gone by values of inputs.
    """

    runner: StageRunner | None
    own: Callable[[BoundCall], dict[str, Any]]
    results: Sequence[Wire]
    rebuild: Callable[[Mapping[str, torch.Tensor], BoundCall], Any]
    last: int
    trainer: Callable[[Loss], StageRunner | None]
    signature: InputSignature


@dataclass(frozen=True, slots=True)
class Form:
    """What decides how a call is run.

    Attributes:
        call: structure, names, sizes, and what is no tensor.
        caches_stay: whether each rank keeps the caches of its own layers, as while text is generated.
        trains: whether a backward pass follows.
    """

    call: tuple[Any, ...]
    caches_stay: bool = False
    trains: bool = False

    @property
    def number(self) -> int:
        """The same for equal forms in all processes."""
        return int(hashlib.sha256(repr(self).encode()).hexdigest()[:15], 16)


class ClusterModule(nn.Module):
    """A model over several machines: what :func:`graphplan.partition` with ``machines=`` returns.

    Every rank calls it with the same inputs. Its parameters are those of this rank's stages.

    Attributes:
        plan: of all machines.
        stage: this rank's placed stage, or what holds the weights of several; None where it has none.
        traffic: name of a value, or ``"tokens"`` -> bytes that this rank has sent of it so far.
    """

    def __init__(
        self,
        plan: Any,
        stage: nn.Module | None,
        signature: inspect.Signature,
        prepare: Callable[[BoundCall, Form], ClusterCall],
        *,
        training: bool,
        everywhere: bool,
        traffic: Counter[str],
        shared: SharedGradients,
        divided: Divided,
    ) -> None:
        super().__init__()
        self.plan, self.stage = plan, stage
        self._signature, self._prepare, self._everywhere = signature, prepare, everywhere
        self.traffic, self._shared, self._divided = traffic, shared, divided
        self._generate: Callable[..., Any] | None = None
        self._calls: dict[Form, ClusterCall] = {}
        self._trainer: tuple[ClusterCall, Loss, StageRunner | None] | None = None
        self._failed = ""
        self.training = training

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse what copies or pickles it: it belongs to its processes, and is one of several parts."""
        raise ClusterError(
            "a model over several machines is neither copied nor pickled: save what placed.stage has, with "
            "torch.distributed.checkpoint, and place the original model again"
        )

    def train(self, mode: bool = True) -> Self:
        """Nothing: the graph is of the mode in which the model was traced.

        Raises:
            InputError: another mode is asked for.
        """
        if mode != self.training:
            here, asked = (f".{'train' if one else 'eval'}()" for one in (self.training, mode))
            raise InputError(
                f"this model was traced after {here}: call {asked} before partition for the other"
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on its own arguments, on all ranks at once.

        Returns:
            what the model returns, on the rank of the last stage, or on all with ``return_outputs="all"``;
            None elsewhere.

        Raises:
            InputError: the batch does not divide into the microbatches.
            ClusterError: ranks were called with inputs of different sizes, one of them does not answer, or a
                call before this one failed.
        """
        call = bind_call(self._signature, args, kwargs)
        parts = self._parts(call)
        known, chunks = self._run(parts, caches_stay=False)
        here = dist.get_rank() == known.last
        if not here and not self._everywhere:
            return None
        found = _joined(chunks) if here else [_empty(wire, len(parts)) for wire in known.results]
        if self._everywhere:
            for tensor, wire in zip(found, known.results, strict=True):
                broadcast_from_last(tensor, known.last, f"the result {wire.name!r}")
        return known.rebuild(_named(known, found), call)

    def forward_in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on its own arguments, on all ranks at once, and send no results nor caches.

        Returns:
            what the model returns; for results of the last rank, the others have zeros that take no memory,
            and all have such zeros for the caches of other ranks' layers.
        """
        call = bind_call(self._signature, args, kwargs)
        known, chunks = self._run([call], caches_stay=True)
        stay = {} if known.runner is None else known.runner.take_stay()
        return known.rebuild({**stay, **(_named(known, chunks[0]) if chunks else {})}, call)

    def profile(self, *args: Any, **kwargs: Any) -> ClusterProfile:
        """Run one batch forward on all ranks at once, and measure when each machine computes and waits.

        Call the module before, so that what only the first call does is not measured.
        """
        parts = self._parts(bind_call(self._signature, args, kwargs))
        gather_texts("", "the start of a measured batch")
        began = time.perf_counter()
        known, _ = self._run(parts, caches_stay=False)
        spans = {} if known.runner is None else known.runner.spans()
        own = {str(i): [(start - began, end - began) for start, end in of] for i, of in spans.items()}
        return merged(self.plan, own)

    def train_step(self, loss: Loss, target: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor] | None:
        """One step forward and backward on all ranks at once, by the plan's schedule.

        Gradients are added to those of the parameters of this rank's stage, and scaled by the number of
        microbatches. Those of a weight that several stages read are summed over these.

        Args:
            loss: of what the model returns for a microbatch, and its rows of the target.
            target: of the whole batch; a tensor, or a tuple, list or dict of tensors, whose first dimension
                is that of the batch.
            args: of the model. No gradients of them are computed.
            kwargs: likewise.

        Returns:
            the loss of each microbatch, on the rank of the last stage; None elsewhere.

        Raises:
            GraphplanError: this torch cannot: older than 2.12.
            InputError: the model was placed without ``train=True`` or ``grad=True``; the batch does not
                divide into the microbatches, or the target not as the batch; the loss is not one number, or
                has no gradient.
            ClusterError: a rank does not answer, or a call before this one failed.
        """
        require_backward_stages()
        call = bind_call(self._signature, args, kwargs).mapped(_without_gradient)
        parts = self._parts(call)
        rows = batch_of(call, self._divided) if len(parts) > 1 else 1
        targets = targets_of(target, len(parts), rows)
        form = Form(_described(parts[0]), trains=True)
        known = self._known(parts, form)
        if self._trainer is None or self._trainer[0] is not known or self._trainer[1] != loss:
            self._trainer = known, loss, known.trainer(loss)  # one: each has buffers of its own
        trainer = self._trainer[2]
        if self.stage is None:
            return None
        if trainer is None:
            raise InputError("a training step needs a model that was placed with train=True or grad=True")
        with self._in_step(), self._shared.summed(self.stage):
            losses = trainer.train([known.own(part) for part in parts], form.number, targets)
        return losses if dist.get_rank() == known.last else None

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, by the norm over all ranks, which all call this.

        Returns:
            the norm as it was.
        """
        norm = self._shared.norm(self.stage)
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The ``generate`` of a transformers model, greedy or sampling, on all ranks at once.

        Each rank keeps the caches of its own layers; every rank returns the same tokens.

        Raises:
            InputError: the model does not generate, or is asked for what needs all scores, such as beams.
            ClusterError: a rank does not answer.
        """
        if self._generate is None:
            raise InputError("this model has no generate()")
        return self._generate(*args, **kwargs)

    def generate_with(self, generate: Callable[..., Any] | None) -> None:
        """Have :meth:`generate` be this function, whose forward passes are :meth:`forward_in_place`."""
        self._generate = generate

    def _parts(self, call: BoundCall) -> list[BoundCall]:
        return microbatches_of(call, self.plan.microbatches, self._divided)

    @outside_inference_mode  # later calls use the buffers of this one
    def _run(self, parts: Sequence[BoundCall], *, caches_stay: bool) -> tuple[ClusterCall, list[Results]]:
        form = Form(_described(parts[0]), caches_stay)
        known = self._known(parts, form)
        if known.runner is None:
            return known, []
        with self._in_step():
            chunks: list[Results] = [*known.runner.run([known.own(part) for part in parts], form.number)]
        return known, chunks

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """A block that ranks go through together: where it failed, others may be at another microbatch."""
        if self._failed:
            raise ClusterError(
                f"a call before this one failed on this rank ({self._failed}), and the other ranks may be "
                "apart from it since: end the processes, and go on from a checkpoint"
            )
        try:
            yield
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {first_line(error)}"
            raise

    def _known(self, parts: Sequence[BoundCall], form: Form) -> ClusterCall:
        """How calls of a form are run, with the parameters that are here now."""
        if isinstance(self.stage, MachineStages):
            self.stage.hand_over()
        if form not in self._calls or not goes_by_same(self._calls[form].signature, parts[0]):
            if len(self._calls) >= _MOST:
                self._calls.clear()
            self._calls[form] = self._prepare(parts[0], form)
        require_same_way(self._calls[form].signature, parts[1:])
        return self._calls[form]


def _without_gradient(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _named(known: ClusterCall, found: Results) -> dict[str, torch.Tensor]:
    return {wire.name: tensor for wire, tensor in zip(known.results, found, strict=True)}


def _joined(chunks: Sequence[Results]) -> list[torch.Tensor]:
    if len(chunks) == 1:
        return list(chunks[0])
    return [torch.cat(tensors) for tensors in zip(*chunks, strict=True)]


def _empty(wire: Wire, count: int) -> torch.Tensor:
    shape = wire.shape if count == 1 else (wire.shape[0] * count, *wire.shape[1:])
    return torch.empty(shape, dtype=wire.dtype)


def _described(call: BoundCall) -> tuple[Any, ...]:
    """Structure, names, sizes, and what is no tensor."""

    def described(leaf: Any) -> Any:
        return (str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else _Constant(leaf)

    return (_Constant(call.spec), *leaf_names(call), *map(described, call.leaves))


class _Constant:
    """What is no tensor: equal where a graph computes the same, and shown the same in all processes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and same_constant(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        simple = isinstance(self.value, _SIMPLE)
        return repr(self.value) if simple else type(self.value).__name__  # others may show addresses
