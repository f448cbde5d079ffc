"""What has been traced of one model: a capture of each structure of calls, annotated for bounds of sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphplan.capture.captured_graph import Capture
from graphplan.capture.differentiate import differentiate
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.capture.model.modes import Differentiation, Modes
from graphplan.capture.signature import BoundCall, InputSignature, TensorLeaf, leaf_names
from graphplan.capture.sizes.size_limits import bounded
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.capture.tracing import capture
from graphplan.capture.value_branches import same_answers
from graphplan.compiler.formulation import Options
from graphplan.compiler.progress import enter_stage
from graphplan.compiler.saved_captures import is_known, origin_of
from graphplan.errors import NoGraphError
from graphplan.message_text import first_line
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.kernel_workspace import KernelBench
from graphplan.passes.frontend.simplify import simplify
from graphplan.passes.training.weight_views import read_weights_anew
from graphplan.warnings import overheard

logger = logging.getLogger("graphplan")


@dataclass(frozen=True, slots=True)
class Captured:
    """What was traced, in some modes of the modules; and annotated, for some sizes.

    ``varies`` says whether sizes were to be symbols: not in a first training step, which takes less so.
    """

    modes: Modes
    capture: Capture
    annotators: list[Annotator]
    varies: bool = True


class Captures:
    """Traces calls of one model, each structure once: ``known`` has what was traced so far."""

    def __init__(self, model_copy: ModelCopy, options: Options, bench: KernelBench) -> None:
        self.model_copy, self.options, self.bench = model_copy, options, bench
        self.known: list[Captured] = []
        self._of_one_size = set[str]()  # entries of which the sizes of a step cannot vary

    @one_at_a_time
    def annotated(self, call: BoundCall, entry: str = "", ahead: float = 0.0) -> Annotator:
        """A call, traced unless one of its structure was traced before, for sizes up to a bound.

        ``ahead`` is as in :meth:`graphplan.capture.sizes.size_limits.SizeLimits.largest`.
        """
        known = self.traced(call, entry)
        capture = known.capture
        limits, grows = self.options.size_limits, bool(known.annotators)
        bound = bounded(capture, call, limits, ahead, grows=grows)
        for annotator in known.annotators:
            if annotator.capture.signature == bound.signature:
                return annotator
        if known.annotators:
            outgrown = known.annotators[-1].capture.signature.mismatch(call)
            logger.info("planning again: %s", outgrown or "there was no room for the largest sizes")
        enter_stage("annotate")
        kinds = self.model_copy.device_types
        known.annotators.append(Annotator(bound, self.model_copy.weights, kinds, self.bench))
        return known.annotators[-1]

    def adopt(self, annotator: Annotator) -> None:
        """Let a capture that was made elsewhere, as of a stage, serve the calls of its signature."""
        self.known.append(Captured(self.model_copy.modes, annotator.capture, [annotator]))

    def drop(self, annotator: Annotator) -> None:
        """Undo :meth:`adopt`, where there was no room."""
        self.known[:] = [known for known in self.known if annotator not in known.annotators]

    @one_at_a_time
    def traced(self, call: BoundCall, entry: str = "") -> Captured:
        """A call, traced unless one of its structure was traced before."""
        modes, reason = self.model_copy.modes, None
        step, sizes = self.model_copy.step is not None, False
        vary = not step or self.options.size_limits.given
        for known in self.known:
            if known.modes == modes and known.capture.entry == entry:
                mismatch = known.capture.signature.mismatch(call)
                branches = known.capture.branches
                if mismatch is None and same_answers(branches, self.model_copy.current):
                    return known
                mismatch = mismatch or "weights by which its code branches have changed"
                alike = known.capture.signature.spec == call.spec
                reason = mismatch if alike or reason is None else reason
                differing = _differing(known.capture.signature, call) if alike else set[int]()
                vary |= bool(differing) or (alike and _other_number(known.capture.signature, call))
                sizes |= known.varies and bool(differing - {0, 1} if step else differing)
        if self.known:
            what = entry or type(self.model_copy.module).__name__
            logger.info(
                "capturing another graph of %s for (%s): %s",
                what,
                ", ".join(leaf_names(call)),
                reason or modes.difference(self.known[-1].modes) or "it was not captured before",
            )
        enter_stage("trace")
        traced = self._trace(call, entry, vary=vary, sizes=sizes)
        self.known.append(Captured(modes, traced, [], vary))
        self.model_copy.enter(modes)  # forward may set what it finds missing in the configuration
        return self.known[-1]

    def _trace(self, call: BoundCall, entry: str, *, vary: bool, sizes: bool) -> Capture:
        """A call, traced; a training step in which sizes cannot vary, for those of the call alone."""
        part, step = self.model_copy.part(entry), self.model_copy.step is not None
        if step and (not vary or entry in self._of_one_size):
            return self._made(part, call, entry, vary=False, sizes=False)
        try:
            return self._made(part, call, entry, vary=vary, sizes=sizes)
        except NoGraphError as error:
            if not step:
                raise
            why = first_line(error)
        self._of_one_size.add(entry)
        found = self._made(part, call, entry, vary=False, sizes=False)
        part.warn_once(
            "sizes cannot vary in the trace of this training step, so that each new one is traced and planned"
            f" anew: {why}"
        )
        return found

    def _made(self, part: ModelCopy, call: BoundCall, entry: str, *, vary: bool, sizes: bool) -> Capture:
        """A call, from the folder of captures; or traced, simplified and differentiated, and saved there."""
        how, saved = self.model_copy.step, self.options.saved_captures
        shapes = None if entry else self.options.dynamic_shapes  # they are of forward's arguments
        keep_grad, fixed = self.options.grad or how is not None, part.entry in part.fixed
        options = {"keep_grad": keep_grad, "step": how is not None, "vary": vary, "sizes": sizes}
        origin = None
        if saved is not None:
            origin = origin_of(part, call, shapes, options, how, fixed)
        found = saved.read(origin, call, part) if saved and origin else None
        if found is None:
            with overheard() as warnings:
                found = capture(part, call, shapes, **options)
                known = origin is not None and is_known(found, origin)
                simplify(found, keep_grad=keep_grad)
                if how is not None:
                    found = with_backward(found, part.weights, call, how, fixed=not vary)
            if saved and origin and known:
                saved.write(origin, found, call, warnings, fixed=part.entry in part.fixed)
        _unify_names(found, [other.capture for other in self.known])
        return found


def _differing(signature: InputSignature, call: BoundCall) -> set[int]:
    """Sizes that were no symbols of the trace, as those of an image, and that the call has others for.

    In a training step, those of 0 and 1 never are.
    """
    return {
        fixed
        for leaf, tensor in zip(signature.leaves, call.leaves, strict=True)
        if isinstance(leaf, TensorLeaf) and isinstance(tensor, torch.Tensor)
        for fixed, size in zip(leaf.shape, tensor.shape, strict=False)
        if fixed is not None and fixed != size
    }


def _other_number(signature: InputSignature, call: BoundCall) -> bool:
    """Whether an int or a float that was no symbol of the trace is another."""
    pairs = zip(signature.leaves, call.leaves, strict=True)
    return any(
        type(asked) in (int, float) and type(here) is type(asked) and asked != here for asked, here in pairs
    )


def with_backward(
    capture: Capture, weights: ModelWeights, call: BoundCall, how: Differentiation, *, fixed: bool
) -> Capture:
    """A training step of which this is the forward pass, simplified; ``fixed`` as in ``differentiate``."""
    found = differentiate(capture, weights, call, how, fixed=fixed)
    simplify(found)
    read_weights_anew(found)
    return found


def _unify_names(capture: Capture, others: Sequence[Capture]) -> None:
    """Let a constant have one name in all captures of a model, and a name one value, and one attribute."""
    known = {name: tensor for other in others for name, tensor in other.constants.items()}
    held = {name: at for other in others for name, at in (other.attributes or {}).items()}
    names: dict[str, str] = {}
    for name, tensor in capture.constants.items():
        alike = held.get(name) == (capture.attributes or {}).get(name)
        same = (
            n for n, one in known.items() if one is tensor or (n == name and alike and _equal(one, tensor))
        )
        names[name] = next(same, f"{name}_of_capture_{len(others)}" if name in known else name)
    tensors = {names[name]: tensor for name, tensor in capture.constants.items()}
    capture.constants.clear()
    capture.constants.update(tensors)
    capture.weights.update({node: names[one] for node, one in capture.weights.items() if one in names})
    if capture.attributes is not None:
        attributes = {names[one]: attribute for one, attribute in capture.attributes.items()}
        capture.attributes.clear()
        capture.attributes.update(attributes)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
