"""The calls that some code makes of a model, found without computing any of them.

The code runs on the copy of the model that is traced. Each call of the model, of its submodules or of its
methods is traced, and answered with zeros of the shapes that the trace has::

    with rehearsal.model() as model:
        model.encode(x)        traced; answered with zeros
        model.decode(z)        likewise
    rehearsal.calls            one of each structure, and how often it was made
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from graphplan.capture.captured_graph import Capture
from graphplan.capture.signature import BoundCall, bind_call
from graphplan.capture.sizes.dynamic_sizes import exact_size, sizes_of_call
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.compiler.pipeline import Compiler, EntryCall
from graphplan.errors import CaptureError, InputError
from graphplan.runtime.fallback.short_names import made_class
from graphplan.runtime.module.module_state import ModuleState
from graphplan.runtime.module.placed_parts import as_written, link, unlink
from graphplan.runtime.module.result_structure import given_layouts, rebuilder
from graphplan.runtime.module.transformers_methods import answers

_ON_ZEROS = (
    "graphplan ran this on zeros, to find the calls to plan for; nothing was placed. Where values of tensors "
    "decide what is called, give partition one call as its example instead: others are planned when they come"
)


@one_at_a_time
def rehearse(run: Callable[[Any], Any], compiler: Compiler) -> list[EntryCall]:
    """The calls that a caller's function makes of the model, each as often as it is made.

    Raises:
        InputError: it makes none.
        Exception: its own, unchanged.
    """
    rehearsal = Rehearsal(compiler)
    with rehearsal.model() as model, torch.random.fork_rng(devices=()):
        try:
            run(model)
        except Exception as error:
            error.add_note(_ON_ZEROS)
            raise
    if not rehearsal.calls:
        raise InputError("the function that is given as calls= makes no call of the model")
    return [replace(one.asked, weight=float(one.count)) for one in rehearsal.calls]


@dataclass(slots=True)
class Rehearsed:
    """A call that is made.

    Attributes:
        number: of its structure, in the order in which they come.
        asked: the first call of that structure.
        capture: of it.
        made_by: leaf -> what has made it: the number of an earlier call, and the position among its results.
        count: of calls of that structure.
    """

    number: int
    asked: EntryCall
    capture: Capture
    made_by: Mapping[int, tuple[int, int]]
    count: int = 1


class Rehearsal:
    """Where calls are made in place of a model: traced, and answered with zeros.

    ``calls`` has one of each structure, in order. They begin with the ``example``, if one is given, and end
    with a :class:`RepeatedCallError` then.
    """

    def __init__(self, compiler: Compiler, example: BoundCall | None = None) -> None:
        self.compiler = compiler
        self.calls: list[Rehearsed] = []
        self._made: dict[int, tuple[int, int]] = {}  # identity of a result -> as in Rehearsed
        self._kept: list[Any] = []  # so that no identity comes again
        self._generates = example is not None
        if example is not None:
            capture = compiler.captures.traced(example).capture
            self.calls.append(Rehearsed(0, EntryCall(example), capture, {}))

    @contextmanager
    def model(self) -> Iterator[Any]:
        """The model, with its own methods, to make calls of."""
        shell = self._shell = _shell_of(self)
        link(shell)
        try:
            yield shell
        finally:
            unlink(shell)

    def play(self, entry: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        """One call."""
        call = bind_call(signature, args, kwargs)
        with as_written(self._shell):
            capture = self.compiler.captures.traced(call, entry).capture
        made = {i: self._made[id(leaf)] for i, leaf in enumerate(call.leaves) if id(leaf) in self._made}
        known = next((one for one in self.calls if one.capture is capture), None)
        if known is None:
            known = Rehearsed(len(self.calls), EntryCall(call, entry), capture, made)
            self.calls.append(known)
        else:
            known.count += 1
        if self._generates and any(index in made for index in capture.states.values()):
            raise RepeatedCallError
        return self._answer(capture, known.number, call)

    def _answer(self, capture: Capture, number: int, call: BoundCall) -> Any:
        sizes = sizes_of_call(capture.graph, capture.inputs, list(capture.inputs_in(call).values()))
        flat = [_zeros(result, sizes) for result in capture.outputs]
        self._kept.append(flat)
        self._made |= {id(t): (number, i) for i, t in enumerate(flat) if isinstance(t, torch.Tensor)}
        given = given_layouts(capture.signature.spec, capture.given)
        return rebuilder(capture.out_spec, given)(flat, {name: call.kwargs[name] for name in capture.given})


class RepeatedCallError(Exception):
    """A call reads a state that an earlier one has made: what follows repeats what has been traced."""


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
        raise CaptureError(f"the data decides the size of {result}, a result that is read later")
    return found


class _OnStage:
    """A model whose calls a :class:`Rehearsal` answers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rehearsal, signature = self.__dict__["_graphplan_rehearsal"], self.__dict__["_graphplan_signature"]
        return rehearsal.play("", signature, args, kwargs)

    def _graphplan_entry(self) -> tuple[Any, str]:
        return self, ""

    def _graphplan_enter(self, entry: str, signature: inspect.Signature, args: Any, kwargs: Any) -> Any:
        return self.__dict__["_graphplan_rehearsal"].play(entry, signature, args, kwargs)


def _shell_of(rehearsal: Rehearsal) -> Any:
    """The model, whose calls go to the rehearsal."""
    model_copy = rehearsal.compiler.model_copy
    module: nn.Module = model_copy.module
    original = type(module)
    shell: Any = object.__new__(made_class(original, _OnStage, lambda: answers(_OnStage, original)))
    shell.__dict__.update(module.__dict__)
    shell.__dict__.update(
        _graphplan=ModuleState([], refused=lambda _error: None),  # its parts are traced instead
        _graphplan_rehearsal=rehearsal,
        _graphplan_signature=model_copy.signature,
    )
    return shell
