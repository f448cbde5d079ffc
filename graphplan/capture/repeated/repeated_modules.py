"""Trace one block of a stack, and copy its nodes for the other blocks.

A trace runs the Python code of a model, and much code of torch for each operation. Eighty layers of one class
run the same code with other weights. So the second call of a block is recorded. A later call whose code could
read nothing different is not traced; it copies the nodes with its own arguments and weights::

    layers.1    mul_18 = mul(to_8, rsqrt_2)         recorded
                linear_7 = linear(mul_18, p_layers_1_q_proj_weight)
    layers.2    mul_30 = mul(to_14, rsqrt_4)        copied
                linear_14 = linear(mul_30, p_layers_2_q_proj_weight)

"Nothing different" means: modules with equal traits (``module_traits``), arguments that differ only in tensor
values on which the code does not branch, and integers, such as a layer index, that give the recorded results
(``guarded_integer``). Methods of transformers caches run for each block. The last block of a stack is always
traced, and must equal a copy. If it does not, or anything raises, the model is traced again without copies.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from torch import nn

from graphplan._compat import Replacement
from graphplan.capture.repeated.copied_call import CallCopy, NotRepeatedError
from graphplan.capture.repeated.module_traits import AttributeRef, ModuleTraits, NotComparableError, traits_of
from graphplan.capture.repeated.recorded_call import CallRecorder, RecordedCall
from graphplan.capture.transformers.caches import transformers_caches
from graphplan.capture.value_branches import Branches

_MIN_BLOCKS = 4
"""Least number of blocks in a stack: the first, the recorded and the last are traced, not copied."""

_MAX_RECORDINGS = 3
"""Largest number of recordings of one stack, failed ones included; no known model has as many block kinds."""

_LAYER_INDEX = "layer_idx"
"""The argument of a cache's methods that is the index of the block."""


@dataclass(slots=True)
class _Stack:
    """Modules of one container with equal traits, except for the ``varying`` integers."""

    members: list[nn.Module]
    varying: list[AttributeRef]
    calls: int = 0
    failures: int = 0
    recordings: list[RecordedCall] = field(default_factory=list)


class RepeatedModules:
    """Runs the module calls of one trace, or copies recorded ones.

    Attributes:
        used: whether anything was recorded.
        blocks: the open autocast blocks of the traced code.
    """

    def __init__(self, branches: Branches) -> None:
        """``branches`` are those of the code in this trace."""
        self.used, self._branches = False, branches
        self.blocks: list[Any] = []
        self._stacks: dict[int, tuple[_Stack, nn.Module]] | None = None
        self._recorder: CallRecorder | None = None
        self._shared = transformers_caches()

    def patches(self) -> Iterator[Replacement]:
        """Yield the patches that record calls of cache methods inside a block."""
        methods = [
            (cls, *one) for cls in self._shared for one in vars(cls).items() if inspect.isfunction(one[1])
        ]
        names = {name for _, name, one in methods if _LAYER_INDEX in inspect.signature(one).parameters}
        # a subclass may take the layer index in *args
        yield from ((cls, name, self._recording) for cls, name, _ in methods if name in names)

    def call(
        self, tracer: Any, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the result of a module's call, which is traced or copied."""
        if self._stacks is None:
            self._stacks = _stacks_of(module)
        stack, block = self._stacks.get(id(vars(module)), (None, None))
        if stack is None or block is None or self._recorder is not None:
            return forward(*args, **kwargs)
        stack.calls += 1
        attempts = stack.failures + len(stack.recordings)
        if stack.calls == 1 or (attempts == _MAX_RECORDINGS and not stack.recordings):
            return forward(*args, **kwargs)
        try:
            recorder = CallRecorder(
                tracer,
                block,
                stack.varying,
                args,
                kwargs,
                self._shared,
                self.blocks,
                self._branches.nodes_read,
            )
        except NotComparableError:
            stack.failures += 1
            return forward(*args, **kwargs)
        recording = next((one for one in stack.recordings if self._serves(one, recorder.call, tracer)), None)
        if recording is not None and block is not stack.members[-1]:
            return CallCopy(recording, recorder.call, tracer, self._shared).run()
        if recording is None and attempts == _MAX_RECORDINGS:
            return forward(*args, **kwargs)
        return self._record(stack, recorder, recording, partial(forward, *args, **kwargs))

    def _serves(self, recording: RecordedCall, call: RecordedCall, tracer: Any) -> bool:
        """Whether a call would trace the same as ``recording``, and no node has changed its branch values."""
        return recording.serves(call) and not self._branches.are_written(recording.branched_on, tracer.graph)

    def _record(
        self,
        stack: _Stack,
        recorder: CallRecorder,
        recording: RecordedCall | None,
        forward: Callable[[], Any],
    ) -> Any:
        """Trace and record a call, and return its result; the trace must equal a given ``recording``."""
        self.used, self._recorder = True, recorder
        try:
            result = recorder.run(forward, guard=recording is None)
        finally:
            self._recorder = None
        try:
            call = recorder.finish(result)
        except NotComparableError as error:
            if recording is not None and recording.copies:
                raise NotRepeatedError(str(error)) from None
            stack.failures += 1
            return result
        if recording is None:
            stack.recordings.append(call)
        elif list(recording.canonical_trace(call.integers)) != list(call.canonical_trace(call.integers)):
            raise NotRepeatedError(
                f"{type(call.traits.module).__name__}: the last block differs from the others"
            )
        return result

    def _recording(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def method(cache: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recorder is None:
                return original(cache, *args, **kwargs)
            return self._recorder.record_shared_call(partial(original, cache), args, kwargs)

        return method


def _stacks_of(root: nn.Module) -> dict[int, tuple[_Stack, nn.Module]]:
    """Return id of a block's ``__dict__`` -> (its stack, the block)."""
    stacks: dict[int, tuple[_Stack, nn.Module]] = {}
    seen: set[int] = set()
    pending: list[Any] = [root]
    while pending:
        module = pending.pop()
        children = [child for child in vars(module).get("_modules", {}).values() if child is not None]
        pending += [child for child in children if id(vars(child)) not in seen]
        seen.update(id(vars(child)) for child in children)
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for stack in _stacks_among(children):
                stacks.update((id(vars(block)), (stack, block)) for block in stack.members)
    return stacks


def _stacks_among(modules: list[nn.Module]) -> Iterator[_Stack]:
    by_class: dict[type, list[nn.Module]] = defaultdict(list)
    for module in {id(vars(module)): module for module in modules}.values():
        by_class[type(module)].append(module)
    by_structure: dict[Hashable, list[ModuleTraits]] = defaultdict(list)
    for modules in by_class.values():
        if len(modules) < _MIN_BLOCKS:
            continue
        for module in modules:
            try:
                traits = traits_of(module)
            except NotComparableError:
                continue
            by_structure[traits.structure].append(traits)
    for members in by_structure.values():
        if len(members) >= _MIN_BLOCKS:
            attributes = members[0].integer_attributes
            values = zip(*(traits.integers(traits.integer_attributes) for traits in members), strict=True)
            varying = [
                attribute
                for attribute, column in zip(attributes, values, strict=True)
                if len(set(column)) > 1
            ]
            yield _Stack([traits.module for traits in members], varying)
