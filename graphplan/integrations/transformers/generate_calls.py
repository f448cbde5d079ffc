"""The calls that ``generate`` makes after an example, found without computing any of them.

Which arguments a prefill and a decode have is known to the code of transformers alone. So that code runs, on
the copy of the model that is traced, and each of its calls is traced, and answered with zeros of the shapes
that the trace has::

    model.generate(input_ids)
        model(input_ids, attention_mask, use_cache)    traced; answered with logits and keys of zeros
        model(token, past_key_values, ...)             traced; answered likewise
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.dynamic_sizes import exact_size, sizes_of_call
from graphplan.capture.signature import BoundCall, bind_call
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.compiler.pipeline import Compiler, EntryCall
from graphplan.errors import CaptureError, GraphplanError, NoGraphError, first_line
from graphplan.runtime.module.module_state import ModuleState
from graphplan.runtime.module.placed_parts import as_written, link, unlink
from graphplan.runtime.module.result_structure import given_layouts, rebuilder
from graphplan.runtime.module.transformers_methods import answers
from graphplan.warnings import silenced, warn

logger = logging.getLogger("graphplan")

_TOKENS = 2  # a prefill and a decode
_LATER = ("decoder_", "labels")  # arguments of a call that generate makes by itself, or has no use for
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A call that ``generate`` makes.

    Attributes:
        number: of the structures so far, the example's being 0.
        asked: the call.
        made_by: leaf -> what has made it: the number of an earlier call, and the position among its results.
    """

    number: int
    asked: EntryCall
    made_by: Mapping[int, tuple[int, int]]


@one_at_a_time
def rehearse(compiler: Compiler, call: BoundCall) -> list[Rehearsed]:
    """What ``generate`` would call, one of each structure, without those that are the example's.

    Returns:
        nothing for a model that does not generate. Where generation cannot be followed, the calls until
        then, with a warning.
    """
    module = compiler.model_copy.module
    can_generate = getattr(module, "can_generate", None)
    if not (callable(can_generate) and can_generate()) or call.args:
        return []
    stage = _Stage(compiler, call)
    try:
        for prompt in _prompts(call.on_cpu(), compiler.options.size_limits.max_length):
            _generate(stage, prompt)
    except NoGraphError as error:
        logger.info("no memory is reserved for a forward pass of generate() that cannot be traced: %s", error)
    except Exception as error:  # the model's own code may raise anything
        said = str(error) if isinstance(error, GraphplanError) else first_line(error)
        warn(
            f"the prefill and decode of generate() could not be traced ahead, so no memory is reserved for "
            f"them ({said}): pass a prefill and a decode to partition as calls="
        )
    return stage.calls


def _generate(stage: _Stage, prompt: Mapping[str, torch.Tensor]) -> None:
    """Let the model generate on a stage, until it has decoded."""
    shell = _shell_of(stage)
    plainly: dict[str, Any] = {"do_sample": False, "num_beams": 1}
    try:
        with silenced("transformers"), _linked(shell):
            shell.generate(**prompt, max_new_tokens=_TOKENS, min_new_tokens=_TOKENS, **plainly)
    except _Seen:
        pass


def _prompts(call: BoundCall, longest: int | None) -> list[dict[str, torch.Tensor]]:
    """The example's tensors as arguments of ``generate``; of a text alone, the longest too.

    Where tokens can follow neither, they are cut. Past the window of a cache that slides, calls differ.
    """
    found = {
        name: value
        for name, value in call.kwargs.items()
        if isinstance(value, torch.Tensor) and not name.startswith(_LATER)
    }
    ids = found.get("input_ids")
    plain = ids is not None and all(value.dim() == 2 and value.shape == ids.shape for value in found.values())
    if ids is None or not plain or longest is None or not set(found) <= set(_TEXT):
        return [found]
    most, here = max(1, longest - _TOKENS), ids.shape[1]
    lengths = [most] if here >= most else [here, most]
    return [
        {name: value[:, torch.arange(length) % here] for name, value in found.items()} for length in lengths
    ]


class _Seen(Exception):  # noqa: N818  # no error
    """A decode has been traced: what follows repeats it."""


class _Stage:
    """Where calls are made in place of the model: traced, one of each structure, and answered with zeros."""

    def __init__(self, compiler: Compiler, example: BoundCall) -> None:
        self.compiler = compiler
        self.calls: list[Rehearsed] = []
        self._seen = [compiler.trace(example)]
        self._made: dict[int, tuple[int, int]] = {}  # identity of a result -> as in Rehearsed
        self._kept: list[Any] = []  # so that no identity comes again

    def play(self, entry: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        """One call."""
        call = bind_call(signature, args, kwargs)
        with as_written():
            capture = self.compiler.trace(call, entry)
        number = next((i for i, seen in enumerate(self._seen) if seen is capture), len(self._seen))
        made = {i: self._made[id(leaf)] for i, leaf in enumerate(call.leaves) if id(leaf) in self._made}
        if number == len(self._seen):
            self._seen.append(capture)
            self.calls.append(Rehearsed(number, EntryCall(call, entry), made))
        if any(index in made for index in capture.states.values()):
            raise _Seen
        return self._answer(number, call)

    def _answer(self, number: int, call: BoundCall) -> Any:
        capture = self._seen[number]
        traced = call if capture.prepare is None else capture.prepare(call)
        sizes = sizes_of_call(capture.graph, capture.inputs, traced.leaves)
        flat = [_zeros(result, sizes) for result in capture.outputs]
        self._kept.append(flat)
        self._made |= {id(t): (number, i) for i, t in enumerate(flat) if isinstance(t, torch.Tensor)}
        given = given_layouts(capture.signature.spec, capture.caches)
        return rebuilder(capture.out_spec, given)(flat, {name: call.kwargs[name] for name in capture.caches})


def _zeros(result: Any, sizes: Mapping[Any, int]) -> Any:
    """Zeros, in memory that is never touched, for a result of a trace; the number for an integer."""
    val = result.meta.get("val") if isinstance(result, fx.Node) else result
    if isinstance(val, torch.SymInt):
        return _known(val, sizes, result)
    if not isinstance(val, torch.Tensor):
        return val
    shape = [_known(size, sizes, result) for size in val.shape]
    return torch.zeros(shape, dtype=val.dtype)


def _known(size: Any, sizes: Mapping[Any, int], result: Any) -> int:
    found = exact_size(size, sizes)
    if found is None:
        raise CaptureError(f"the data decides the size of {result}, a result that generate() reads")
    return found


class _OnStage:
    """A model whose calls a :class:`_Stage` answers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage, signature = self.__dict__["_graphplan_stage"], self.__dict__["_graphplan_signature"]
        return stage.play("", signature, args, kwargs)

    def _graphplan_entry(self) -> tuple[Any, str]:
        return self, ""

    def _graphplan_enter(self, entry: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        return self.__dict__["_graphplan_stage"].play(entry, signature, args, kwargs)


def _shell_of(stage: _Stage) -> Any:
    """The model, with its own methods, whose calls go to the stage."""
    module = stage.compiler.model_copy.module
    original = type(module)
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(original, name) for name in names} | answers(_OnStage, original)
    shell: Any = object.__new__(type(original.__name__, (_OnStage, original), body))
    shell.__dict__.update(module.__dict__)
    shell.__dict__.update(
        _graphplan=ModuleState([]),
        _graphplan_stage=stage,
        _graphplan_signature=stage.compiler.model_copy.signature,
    )
    return shell


@contextmanager
def _linked(shell: nn.Module) -> Iterator[None]:
    """Inside, calls of submodules and of methods go to the stage too: they are traced, not computed."""
    link(shell)
    try:
        yield
    finally:
        unlink(shell)
