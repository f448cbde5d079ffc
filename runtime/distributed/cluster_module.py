"""The module that every rank calls alike: each runs its own stages, and the last rank has the results."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from graphplan._compat.torch import require_backward_stages
from graphplan.capture.signature import BoundCall, InputSignature, bind_call, leaf_names, same_constant
from graphplan.capture.sizes.microbatches import Divided, batch_of, microbatches_of, targets_of
from graphplan.capture.thread_patches import outside_inference_mode
from graphplan.capture.value_branches import require_same_branches, takes_same_path
from graphplan.errors import ClusterError, InputError
from graphplan.message_text import first_line
from graphplan.runtime.distributed.agreement import broadcast_from_last, gather_texts
from graphplan.runtime.distributed.cluster_profile import ClusterProfile, merge_spans
from graphplan.runtime.distributed.machine_stages import MachineStages
from graphplan.runtime.distributed.shared_gradients import SharedGradients
from graphplan.runtime.distributed.stage_runner import StageRunner, Wire

Results = Sequence[torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]
"""Maps what the model returns for a microbatch, and its rows of the target, to a loss."""
MAX_CALLS = 256  # cached
_SIMPLE = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True, slots=True)
class ClusterCall:
    """How calls with one key are run.

    Attributes:
        runner: runs this rank's stages, backward too if the key says so; None if it has no stage.
        inputs_of: maps a microbatch to the model's inputs by name.
        results: the result tensors of one microbatch.
        rebuild: maps the results by name, and the call, to what the model returns.
        last_rank: rank of the last stage.
        draws: whether the graph may draw random numbers.
        signature: that of the trace, which may have branched on values of inputs.
    """

    runner: StageRunner | None
    inputs_of: Callable[[BoundCall], dict[str, Any]]
    results: Sequence[Wire]
    rebuild: Callable[[Mapping[str, torch.Tensor], BoundCall], Any]
    last_rank: int
    draws: bool
    signature: InputSignature


@dataclass(frozen=True, slots=True)
class CallKey:
    """The properties of a call that decide how it is run.

    Attributes:
        inputs: their structure, names, dtypes and sizes, and the values of those that are not tensors.
        caches_stay: whether each rank keeps the caches of its own layers, as during text generation.
        trains: whether a backward pass follows.
    """

    inputs: tuple[Any, ...]
    caches_stay: bool = False
    trains: bool = False

    @property
    def digest(self) -> int:
        """A hash that is the same for equal keys in all processes."""
        return int(hashlib.sha256(repr(self).encode()).hexdigest()[:15], 16)


class ClusterModule(nn.Module):
    """A model over several machines: what :func:`graphplan.partition` with ``machines=`` returns.

    Every rank calls it with the same inputs. Its parameters are those of this rank's stages.

    Attributes:
        plan: plan for all machines.
        stage: this rank's placed stage, or a module with the weights of several; one with an empty parameter
            if the rank has no stage.
        traffic: name of a tensor, or ``"tokens"`` -> bytes that this rank has sent of it so far.
    """

    def __init__(
        self,
        plan: Any,
        stage: nn.Module,
        signature: inspect.Signature,
        prepare: Callable[[BoundCall, CallKey], ClusterCall],
        *,
        training: bool,
        broadcast_results: bool,
        traffic: Counter[str],
        shared: SharedGradients,
        trainable: bool,
        divided: Divided,
    ) -> None:
        super().__init__()
        self.plan, self.stage = plan, stage
        self._signature, self._prepare, self._broadcast_results = signature, prepare, broadcast_results
        self.traffic, self._shared, self._divided = traffic, shared, divided
        self._generate: Callable[..., Any] | None = None
        self._calls: dict[CallKey, ClusterCall] = {}
        self._trainable = trainable
        self._failed = ""
        self.training = training

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled: it is bound to its process group, and has only some weights."""
        raise ClusterError(
            "a model over several machines cannot be copied or pickled: save placed.stage with "
            "torch.distributed.checkpoint, and place the original model again"
        )

    def train(self, mode: bool = True) -> Self:
        """Do nothing: the graph has the mode in which the model was traced.

        Raises:
            InputError: ``mode`` is the other one.
        """
        if mode != self.training:
            traced, needed = (f".{'train' if training else 'eval'}()" for training in (self.training, mode))
            raise InputError(
                f"this model was traced after {traced}: to run it in the other mode, call {needed} before "
                "partition"
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on its own arguments, on all ranks at once.

        Returns:
            what the model returns on the rank of the last stage, or on all with ``return_outputs="all"``;
            None on other ranks.

        Raises:
            InputError: the batch cannot be divided into the microbatches.
            ClusterError: ranks were called with inputs of different sizes, one of them does not answer, or
                an earlier call failed.
        """
        call = bind_call(self._signature, args, kwargs)
        micros = self._microbatches(call)
        cluster_call, results = self._run(micros, caches_stay=False)
        is_last = dist.get_rank() == cluster_call.last_rank
        if not is_last and not self._broadcast_results:
            return None
        if not is_last:
            results = [wire.empty(len(micros)) for wire in cluster_call.results]
        if self._broadcast_results:
            for tensor, wire in zip(results, cluster_call.results, strict=True):
                broadcast_from_last(tensor, cluster_call.last_rank, f"the result {wire.name!r}")
        return cluster_call.rebuild(_named(cluster_call, results), call)

    def forward_in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on its own arguments, on all ranks at once, and send neither results nor caches.

        Returns:
            what the model returns. Ranks other than the last have zeros that take no memory in place of the
            results, and all have such zeros in place of the caches of other ranks' layers.
        """
        call = bind_call(self._signature, args, kwargs)
        cluster_call, results = self._run([call], caches_stay=True)
        stay = {} if cluster_call.runner is None else cluster_call.runner.take_stay()
        return cluster_call.rebuild({**stay, **(_named(cluster_call, results) if results else {})}, call)

    def profile(self, *args: Any, **kwargs: Any) -> ClusterProfile:
        """Run one batch forward on all ranks at once, and measure when each machine computes and waits.

        Call the module once before, so that the work of the first call is not measured.
        """
        micros = self._microbatches(bind_call(self._signature, args, kwargs))
        gather_texts("", "the start of a measured batch")
        began = time.perf_counter()
        cluster_call, _ = self._run(micros, caches_stay=False)
        spans = {} if cluster_call.runner is None else cluster_call.runner.spans()
        relative = {str(i): [(a - began, b - began) for a, b in times] for i, times in spans.items()}
        return merge_spans(self.plan, relative)

    def train_step(
        self,
        loss: Loss,
        target: Any,
        *args: Any,
        loss_reduction: Literal["mean", "sum"] = "mean",
        **kwargs: Any,
    ) -> list[torch.Tensor] | None:
        """Run one step forward and backward on all ranks at once, by the plan's schedule.

        Gradients are added to those of this rank's parameters. Gradients of a weight that several stages
        read are summed over these stages.

        Args:
            loss: maps what the model returns for a microbatch, and its rows of the target, to a scalar.
            target: target of the whole batch: a tensor, or a tuple, list or dict of tensors, whose first
                dimension is that of the batch.
            args: positional arguments of the model. No gradients of them are computed.
            loss_reduction: whether the loss of the batch is the mean of the microbatches' losses or their
                sum.
            kwargs: keyword arguments of the model, likewise.

        Returns:
            the loss of each microbatch on the rank of the last stage; None on other ranks.

        Raises:
            GraphplanError: torch is older than 2.12.
            InputError: the model was placed without ``train=True`` or ``grad=True``; the batch does not
                divide into the microbatches, or the target does not divide as the batch does; the loss is
                not one number, or has no gradient; ``loss_reduction`` is invalid.
            ClusterError: a rank does not answer, or an earlier call failed.
        """
        require_backward_stages()
        if loss_reduction not in ("mean", "sum"):
            raise InputError(f"loss_reduction must be 'mean' or 'sum', not {loss_reduction!r}")
        if not self._trainable:
            raise InputError("a training step needs a model that was placed with train=True or grad=True")
        call = bind_call(self._signature, args, kwargs).mapped(_without_gradient)
        micros = self._microbatches(call)
        rows = batch_of(call, self._divided) if len(micros) > 1 else 1
        targets = targets_of(target, len(micros), rows)
        key = CallKey(_input_key(micros[0]), trains=True)
        cluster_call = self._cluster_call(micros, key)

        def loss_of(results: Results, microbatch: int) -> torch.Tensor:
            result = cluster_call.rebuild(_named(cluster_call, results), micros[microbatch])
            return loss(result, targets[microbatch])

        inputs = [cluster_call.inputs_of(micro) for micro in micros]
        scale = 1 / len(micros) if loss_reduction == "mean" else 1.0
        with self._in_step(), self._random_numbers(cluster_call):
            if cluster_call.runner is None:
                return None
            with self._shared.summed(self.stage):
                losses = cluster_call.runner.train(inputs, key.digest, loss_of, scale)
        return losses if dist.get_rank() == cluster_call.last_rank else None

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Do as ``torch.nn.utils.clip_grad_norm_``, with the norm over all ranks; every rank calls this.

        Returns:
            the norm before clipping.
        """
        norm = self._shared.norm(self.stage)
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``generate`` of a transformers model, greedy or sampling, on all ranks at once.

        Each rank keeps the caches of its own layers; every rank returns the same tokens.

        Raises:
            InputError: the model has no ``generate``, or an option such as beam search needs all scores.
            ClusterError: a rank does not answer.
        """
        if self._generate is None:
            raise InputError("this model has no generate()")
        return self._generate(*args, **kwargs)

    def generate_with(self, generate: Callable[..., Any] | None) -> None:
        """Set the function that :meth:`generate` calls; its forward passes are :meth:`forward_in_place`."""
        self._generate = generate

    def _microbatches(self, call: BoundCall) -> list[BoundCall]:
        return microbatches_of(call, self.plan.microbatches, self._divided)

    @outside_inference_mode  # later calls reuse tensors of this one
    def _run(self, micros: Sequence[BoundCall], *, caches_stay: bool) -> tuple[ClusterCall, Results]:
        key = CallKey(_input_key(micros[0]), caches_stay)
        cluster_call = self._cluster_call(micros, key)
        with self._in_step(), self._random_numbers(cluster_call):
            if cluster_call.runner is None:
                return cluster_call, []
            inputs = [cluster_call.inputs_of(micro) for micro in micros]
            return cluster_call, cluster_call.runner.run(inputs, key.digest)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Context manager for work of all ranks; after a failure, later steps raise ClusterError."""
        if self._failed:
            raise ClusterError(
                f"a call before this one failed on this rank ({self._failed}), and other ranks may be at "
                "another microbatch: end the processes, and resume from a checkpoint"
            )
        try:
            yield
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {first_line(error)}"
            raise

    @contextmanager
    def _random_numbers(self, cluster_call: ClusterCall) -> Iterator[None]:
        """Context manager in which ranks that have equal generators draw different dropout masks."""
        if not (self.training and cluster_call.draws):
            yield
            return
        seed = int(torch.randint(2**62, (), device="cpu"))  # so that equal generators remain equal
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(gpus):
            torch.manual_seed(seed + dist.get_rank())
            yield

    def _cluster_call(self, micros: Sequence[BoundCall], key: CallKey) -> ClusterCall:
        """Return how calls with this key are run, with the current parameters; prepare new ones."""
        if isinstance(self.stage, MachineStages):
            self.stage.bind_stages()
        if key not in self._calls or not takes_same_path(self._calls[key].signature, micros[0]):
            if len(self._calls) >= MAX_CALLS:
                self._calls.clear()
            self._calls[key] = self._prepare(micros[0], key)
        require_same_branches(self._calls[key].signature, micros[1:])
        return self._calls[key]


def _without_gradient(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _named(cluster_call: ClusterCall, results: Results) -> dict[str, torch.Tensor]:
    return {wire.name: tensor for wire, tensor in zip(cluster_call.results, results, strict=True)}


def _input_key(call: BoundCall) -> tuple[Any, ...]:
    """Return :attr:`CallKey.inputs`: structure, names, dtypes and sizes, and values that are not tensors."""

    def leaf_key(leaf: Any) -> Any:
        return (str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else _Constant(leaf)

    return (_Constant(call.spec), *leaf_names(call), *map(leaf_key, call.leaves))


class _Constant:
    """A value that is not a tensor: equal if a graph computes the same with it; its repr has no addresses."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and same_constant(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        simple = isinstance(self.value, _SIMPLE)
        return repr(self.value) if simple else type(self.value).__name__  # other reprs may show addresses
