"""The captures of one model: each structure of calls is traced once, then annotated for bounds on sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from graphplan.capture.captured_graph import Capture, without_stored
from graphplan.capture.changes.kept_state import READ_AND_ASSIGNED, KeptStateError
from graphplan.capture.changes.stored_values import attributes_with_tensors
from graphplan.capture.differentiate import differentiate
from graphplan.capture.model.model_copy import ModelCopy
from graphplan.capture.model.model_weights import ModelWeights
from graphplan.capture.model.modes import Differentiation, Modes
from graphplan.capture.signature import BoundCall, InputSignature, TensorLeaf, leaf_names
from graphplan.capture.sizes.decided_sizes import EquatedSizeError
from graphplan.capture.sizes.size_limits import bounded, exceeds_slightly
from graphplan.capture.structure import TensorPresence, attribute_and_leaf, layout_of, reachable, stored_in
from graphplan.capture.thread_patches import one_at_a_time
from graphplan.capture.tracing import capture
from graphplan.capture.value_branches import is_integer_tensor, same_answers
from graphplan.compiler.formulation import Options
from graphplan.compiler.progress import enter_stage
from graphplan.compiler.saved_captures import can_save, origin_of
from graphplan.errors import NoGraphError
from graphplan.message_text import first_line
from graphplan.passes.frontend.annotate import Annotator
from graphplan.passes.frontend.kernel_workspace import KernelBench
from graphplan.passes.frontend.simplify import simplify
from graphplan.passes.training.weight_views import duplicate_weight_views
from graphplan.warnings import overheard

logger = logging.getLogger("graphplan")

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Captured:
    """A traced structure of calls, the modes of the modules, and an annotator for each bound on sizes.

    ``varies`` says whether sizes could become symbols: not in a first training step, since it costs less.
    """

    modes: Modes
    capture: Capture
    annotators: list[Annotator]
    varies: bool = True


class Captures:
    """Traces calls of one model, each structure once; ``captured`` has those so far."""

    def __init__(self, model_copy: ModelCopy, options: Options, bench: KernelBench) -> None:
        self.model_copy, self.options, self.bench = model_copy, options, bench
        self.captured: list[Captured] = []
        self._fixed_entries = set[str]()  # entries whose training steps are traced with fixed sizes

    @one_at_a_time
    def annotated(self, call: BoundCall, ahead: float = 0.0) -> Annotator:
        """Return the annotator of a call for sizes up to a bound; trace the call if its structure is new.

        ``ahead`` is as in :meth:`graphplan.capture.sizes.size_limits.SizeLimits.largest`.
        """
        known = self.traced(call)
        # a bound that was only tried for this call is none that it has outgrown
        grows = any(one.capture.signature.mismatch(call) is not None for one in known.annotators)
        bound = bounded(known.capture, call, self.options.size_limits, ahead, grows=grows)
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

    def grows_by_steps(self, call: BoundCall) -> bool:
        """Whether a call is a few tokens larger than one before: the next one is likely larger still."""
        return any(exceeds_slightly(call, one.capture) for one in self.traced(call).annotators)

    def adopt(self, annotator: Annotator) -> None:
        """Serve calls of its signature with a capture that was made elsewhere, such as a stage's."""
        self.captured.append(Captured(self.model_copy.modes, annotator.capture, [annotator]))

    def drop(self, annotator: Annotator) -> None:
        """Undo :meth:`adopt`, after a placement found no room."""
        self.captured[:] = [known for known in self.captured if annotator not in known.annotators]

    @one_at_a_time
    def traced(self, call: BoundCall) -> Captured:
        """Return the capture of a call; trace it if its structure is new."""
        modes, step = self.model_copy.modes, self.model_copy.step is not None
        mismatches = list[tuple[Captured, str]]()
        for known in self.captured:
            if known.modes == modes and known.capture.entry == call.entry:
                mismatch = known.capture.signature.mismatch(call)
                if mismatch is None:
                    mismatch = self._why_traced_again(known.capture)
                if mismatch is None:
                    return known
                mismatches.append((known, mismatch))
        alike = [one for one in mismatches if one[0].capture.signature.spec == call.spec]
        if self.captured:
            reasons = (why for _, why in (*reversed(alike), *mismatches))
            logger.info(
                "capturing another graph of %s for (%s): %s",
                call.entry or type(self.model_copy.module).__name__,
                ", ".join(leaf_names(call)),
                next(reasons, None)
                or modes.difference(self.captured[-1].modes)
                or "it was not traced before",
            )
        vary, sizes = not step or self.options.size_limits.has_limit, False
        for known, _ in alike:
            differing = _differing(known.capture.signature, call)
            vary |= bool(differing) or _other_number(known.capture.signature, call)
            sizes |= known.varies and bool(differing - {0, 1} if step else differing)
        enter_stage("trace")
        traced = self._trace(call, vary=vary, sizes=sizes)
        before = attributes_with_tensors(self.model_copy.module)
        stored = frozenset(map(str, traced.stored.values()))
        after = before.union(stored).difference(traced.plain_sets)
        matter = {attribute_and_leaf(name)[0] for name in (traced.attributes or {}).values()}
        if not traced.serves_next:
            after, matter = before, matter | (before & stored)
        layouts = {name: layout_of(self.model_copy.attribute(name)) for name in matter}
        traced = replace(traced, presence=TensorPresence(before, after, layouts))
        self.captured.append(Captured(modes, traced, [], vary))
        self.model_copy.enter(modes)  # tracing runs forward, which may fill in missing configuration
        return self.captured[-1]

    def _why_traced_again(self, known: Capture) -> str | None:
        """Return what has changed that code may branch on; None if a capture still serves its calls."""
        if not same_answers(known.branches, self.model_copy.current):
            return "weights on which its code branches have changed"
        if not known.presence.allows(self.model_copy.stored_values):
            return "attributes have tensors that had none, or none any more, or tensors of another shape"
        return None

    def _trace(self, call: BoundCall, *, vary: bool, sizes: bool) -> Capture:
        """Trace a call; trace a training step for the sizes of this call alone if its sizes cannot vary."""
        part, step = self.model_copy.for_entry(call.entry), self.model_copy.step is not None
        if step and (not vary or call.entry in self._fixed_entries):
            return self._capture(part, call, vary=False, sizes=False)
        try:
            return self._capture(part, call, vary=vary, sizes=sizes)
        except NoGraphError as error:
            if not step:
                raise
            why = first_line(error)
        self._fixed_entries.add(call.entry)
        fixed_capture = self._capture(part, call, vary=False, sizes=False)
        part.warn_once(
            "sizes cannot vary in the trace of this training step, so each new size is traced and planned "
            f"again: {why}"
        )
        return fixed_capture

    def _capture(self, part: ModelCopy, call: BoundCall, *, vary: bool, sizes: bool) -> Capture:
        """Read a capture from the folder; or trace, simplify and differentiate the call, and save it.

        A backward pass that needs values of integer inputs is retraced, with branches on them.
        """
        found = None
        while found is None:  # outside of the handler, so that errors of the next trace have no context
            found = self._read_or_make(part, call, vary=vary, sizes=sizes)
        _unify_names(found, [other.capture for other in self.captured])
        return found

    def _read_or_make(self, part: ModelCopy, call: BoundCall, *, vary: bool, sizes: bool) -> Capture | None:
        """Return the capture; None if the call must be retraced, with branches on more inputs."""
        differentiation, saved = self.model_copy.step, self.options.saved_captures
        shapes = None if call.entry else self.options.dynamic_shapes  # given for forward's arguments alone
        keep_grad, fixed = self.options.grad or differentiation is not None, part.code.sizes_fixed
        options = {"keep_grad": keep_grad, "step": differentiation is not None, "vary": vary, "sizes": sizes}
        origin = None
        if saved is not None:
            described = {**options, "stores": self.options.stores}
            origin = origin_of(part, call, shapes, described, differentiation, fixed)
            if origin is not None and (found := saved.read(origin, call, part)) is not None:
                return found
        with overheard() as warnings:
            found = capture(part, call, shapes, **options)
            if not self.options.stores:
                found = _without_stored(found, part)
            is_savable = origin is not None and can_save(found, origin)
            simplify(found, keep_grad=keep_grad)
            try:
                if differentiation is not None:
                    found = with_backward(found, part.weights, call, differentiation, fixed=not vary)
            except EquatedSizeError as error:
                if not part.branch_on(call, _deciding_leaves(found, call, error.node)):
                    raise
                return None
        if saved and origin and is_savable:
            saved.write(origin, found, call, warnings, fixed=part.code.sizes_fixed)
        return found


def _without_stored(capture: Capture, model_copy: ModelCopy) -> Capture:
    """Return the capture without the results that are stored in attributes; warn of each.

    Raises:
        KeptStateError: the next call reads one of them.
    """
    read = {attribute_and_leaf(name)[0] for name in (capture.attributes or {}).values()}
    for attribute in map(str, stored_in(capture.out_spec)):
        if attribute in read:
            raise KeptStateError.of(attribute, READ_AND_ASSIGNED)
        model_copy.warn_once(
            f"forward stores a tensor in {attribute}; a model over several machines does not. Return it if "
            "other code needs it"
        )
    return without_stored(capture)


def _differing(signature: InputSignature, call: BoundCall) -> set[int]:
    """Return the sizes that are constants of the trace, such as an image's, and differ in the call.

    In a training step, sizes of 0 and 1 never become symbols.
    """
    return {
        fixed
        for leaf, tensor in zip(signature.leaves, call.leaves, strict=True)
        if isinstance(leaf, TensorLeaf) and isinstance(tensor, torch.Tensor)
        for fixed, size in zip(leaf.shape, tensor.shape, strict=False)
        if fixed is not None and fixed != size
    }


def _other_number(signature: InputSignature, call: BoundCall) -> bool:
    """Whether an int or a float that is a constant of the trace differs in the call."""
    pairs = zip(signature.leaves, call.leaves, strict=True)
    return any(type(old) in (int, float) and type(new) is type(old) and old != new for old, new in pairs)


def with_backward(
    capture: Capture, weights: ModelWeights, call: BoundCall, differentiation: Differentiation, *, fixed: bool
) -> Capture:
    """Return the simplified training step of a captured forward pass; ``fixed`` as in ``differentiate``."""
    found = differentiate(capture, weights, call, differentiation, fixed=fixed)
    simplify(found)
    duplicate_weight_views(found)
    return found


def _deciding_leaves(capture: Capture, call: BoundCall, number: fx.Node) -> list[int]:
    """Return the integer leaves that alone decide a number, such as a maximum of lengths; else none."""
    ancestors = reachable([number], lambda node: node.all_input_nodes)
    sources = [node.name for node in ancestors if node.op == "placeholder"]
    if number.target is not aten.item.default or not set(sources) <= set(capture.inputs):
        return []
    leaves = [capture.order[capture.inputs.index(name)] for name in sources]
    return [leaf for leaf in leaves if leaf is not None and is_integer_tensor(call.leaves[leaf])]


def _unify_names(capture: Capture, others: Sequence[Capture]) -> None:
    """Rename constants: in all captures a constant has one name, and a name one value and attribute."""
    known = {name: tensor for other in others for name, tensor in other.constants.items()}
    held = {name: attr for other in others for name, attr in (other.attributes or {}).items()}
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
