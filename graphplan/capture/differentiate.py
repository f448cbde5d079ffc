"""A captured forward pass becomes a training step: forward and backward in one graph.

The captured graph is run on fake tensors with autograd on, and ``make_fx`` writes down what autograd runs.
So what it saves are ordinary values, made before and read after::

    linear = linear(x, w)          t = t(w)
    loss = sum(linear)             mm = mm(x, t)
                                   loss = sum(mm)
                                   expand = expand(tangent, ...)          backward
                                   t_1 = t(expand)                        backward
                                   mm_1 = mm(t_1, x)                      backward, the gradient of w

Nodes of the backward pass have ``backward`` in their ``meta``, and the name (``forward``), the module and the
line of the operation whose gradient they compute: autograd gives both the same sequence number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, has_free_unbacked_symbols
from torch.utils import _pytree as pytree

from graphplan._compat.torch import mark_backward_nodes, storage_of
from graphplan._compat.traced_tensors import taken_for, untraced
from graphplan.capture.attention import AttentionWhole, on_any_device
from graphplan.capture.captured_graph import Capture, TrainingStep, name_apart
from graphplan.capture.model.model_weights import ModelWeights, is_wrapper
from graphplan.capture.model.modes import Differentiation
from graphplan.capture.signature import BoundCall, InputSignature, TensorLeaf
from graphplan.capture.sizes.decided_sizes import DecidedSizes, refuse_chance
from graphplan.capture.sizes.dynamic_axes import Roles
from graphplan.capture.sizes.dynamic_sizes import largest_sizes, sizes_of_call
from graphplan.capture.sizes.open_sizes import OpenSizes, open_sizes
from graphplan.capture.source_lines import belong_with
from graphplan.capture.structure import Returned, written_memories
from graphplan.capture.tracers.quiet import quiet
from graphplan.errors import InputError, NoGraphError
from graphplan.message_text import first_line

aten = torch.ops.aten

_SUM = "Gradient addition node"  # how autograd's sums are marked in a trace


def differentiate(
    capture: Capture,
    weights: ModelWeights,
    call: BoundCall,
    how: Differentiation,
    *,
    fixed: bool,
) -> Capture:
    """The training step of a captured call.

    Args:
        capture: of the call, with gradients enabled; it is not needed afterwards.
        weights: of the model.
        call: the example.
        how: which parameters are trained, and from which results.
        fixed: whether it is for the sizes of this call alone, not for all that the capture is for.

    Raises:
        InputError: no result has a gradient, or ``train_outputs`` names none.
        NoGraphError: autograd cannot differentiate what was traced.
    """
    if capture.signature.prepared is not None and not fixed:
        raise NoGraphError("sizes are what the exporter computes of the arguments")
    nodes = [node for node in capture.graph.nodes if node.op == "placeholder"]
    tracing = _Tracing(capture, weights, call, how, None if fixed else open_sizes(capture))
    try:
        own_casts = torch.autocast("cpu", enabled=False)  # those of the caller's autocast are in the graph
        with quiet(), traceback.preserve_node_meta(), tracing.mode, torch.enable_grad(), own_casts:
            values = [tracing.stand_in(*place) for place in enumerate(nodes)]
            traced = make_fx(tracing.step)(*values, *tracing.tangents(values))
    except (InputError, NoGraphError):
        raise
    except Exception as error:  # autograd runs the formulas of any operation, which may raise anything
        raise NoGraphError(f"the training step could not be traced: {first_line(error)}") from error
    return tracing.capture_of(traced, nodes)


class _Tracing:
    """Runs a captured graph with autograd on, and knows afterwards what is what in the trace of that.

    ``trained`` and ``fed`` are the positions of the placeholders that get a gradient, with the parameter, or
    the leaf of the call, that each is.
    """

    def __init__(
        self,
        capture: Capture,
        weights: ModelWeights,
        call: BoundCall,
        how: Differentiation,
        sizes: OpenSizes | None,
    ) -> None:
        self.capture, self.weights, self.call, self.how, self.sizes = capture, weights, call, how, sizes
        self.env = sizes.env if sizes else ShapeEnv()
        self.mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=self.env, static_shapes=sizes is None
        )
        self.trained: list[tuple[int, str]] = []
        self.fed: list[tuple[int, int]] = []
        self.differentiated: tuple[int, ...] = ()
        self.others: dict[int, str] = {}
        self.data_sizes: dict[Any, int] = {}
        self.known_sizes: dict[Any, int] = {}
        self.given: list[torch.Tensor | None] = [None] * len(call.leaves)  # of each leaf

    def stand_in(self, position: int, node: fx.Node) -> Any:
        """A fake tensor for a placeholder, or the number that it stands for."""
        name = self.capture.weights.get(node.name)
        if name is None:
            index = self._leaf(node.name)
            leaf = self.call.leaves[index]
            traced = node.meta["val"] if self.sizes else leaf
            if not isinstance(leaf, torch.Tensor):
                return traced
            if leaf.requires_grad:
                self.fed.append((position, index))
            made = self.given[index] = self._fake(traced, requires_grad=leaf.requires_grad)
            return made
        tensor = self.weights.tensors.get(name, self.capture.constants.get(name))
        assert tensor is not None
        if is_wrapper(tensor):
            raise NoGraphError(f"{name!r} is a {type(tensor).__name__}, of which no training step is traced")
        if name in self.weights.noted and tensor.requires_grad:
            raise NoGraphError(
                f"{name!r} requires a gradient, and a step has those of parameters: register it as one"
            )
        if name in self.how.trained:
            self.trained.append((position, name))
        return self._fake(tensor, requires_grad=name in self.how.trained)

    def _fake(self, tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
        shape, stride = list(tensor.shape), list(tensor.stride())
        if self.sizes:
            shape, stride = list(map(self.sizes.settled, shape)), list(map(self.sizes.settled, stride))
        made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu")
        return made.requires_grad_() if requires_grad else made

    def _leaf(self, name: str) -> int:
        found = self.capture.order[self.capture.inputs.index(name)]
        if found is None:
            raise NoGraphError(f"the trace takes {name!r}, which is not among the arguments")
        return found

    def tangents(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Fakes of the gradients that backward starts from; finds out of which results."""
        with on_any_device(), self.env.ignore_fresh_unbacked_symbols():
            results = _Forward(self.capture.module, self.env).run(*_detached(values))
        able = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad]
        names = _names(self.capture.out_spec)
        self.differentiated = self._chosen(able, names)
        self.others = {position: names[position] for position in able if position not in self.differentiated}
        return [torch.empty_like(results[position]).detach() for position in self.differentiated]

    def _chosen(self, able: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
        """Positions of the results that backward starts from, of those that are able to have a gradient."""
        if not able:
            raise InputError(
                "train=True: no result of the model has a gradient: does it compute under torch.no_grad(), "
                "are all parameters frozen, or is the loss not among the results (labels= is missing)?"
            )
        wanted = self.how.outputs
        if wanted is None:
            loss = [position for position in able if names[position] == "loss"]
            return tuple(loss or able)
        for name in wanted:
            if name not in names:
                known = ", ".join(repr(one) for one in names if one) or "without names"
                raise InputError(f"train_outputs={name!r}: the results are {known}")
        found = tuple(position for position in able if names[position] in wanted)
        lost = [name for name in wanted if name not in {names[position] for position in found}]
        if lost:
            raise InputError(f"train_outputs={lost[0]!r}: this result has no gradient")
        return found

    def step(self, *values: Any) -> list[Any]:
        """What is traced: results, then gradients; None for a parameter that has none."""
        given = len(values) - len(self.differentiated)
        inputs, tangents = values[:given], values[given:]
        with on_any_device():
            forward = _Forward(self.capture.module, self.env)
            results = list(forward.run(*inputs))
        known, self.known_sizes = self.capture.sizes, forward.known
        self.data_sizes = {new: known[old] for new, old in forward.symbols.items() if old in known}
        starts = [results[position] for position in self.differentiated]
        mark_backward_nodes([start.grad_fn for start in starts])
        sources = [inputs[position] for position, _ in (*self.trained, *self.fed)]
        of_starts = list(map(_of_size, tangents, starts))
        gradients = torch.autograd.grad(starts, sources, of_starts, allow_unused=True)
        return [*results, *gradients]

    def capture_of(self, traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> Capture:
        """The trace as a capture, with the names that the forward pass's has for weights and inputs."""
        graph = traced.graph
        refuse_chance(graph, self.known_sizes)
        name_apart(graph, {*self.capture.weights.values(), *self.capture.constants})
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for place, node in zip(placeholders, nodes, strict=False):
            place.meta.update({key: value for key, value in node.meta.items() if key != "val"})
        for node in graph.nodes:
            if node.op == "get_attr":
                raise NoGraphError(f"the training step computes with {node.target!r}, which is no weight")
        names = [node.name for node in placeholders]
        renamed = dict(zip((node.name for node in nodes), names, strict=False))
        tangents = tuple(names[len(nodes) :])
        _mark_backward(graph, [place for place in placeholders if place.name in tangents])
        flat = list(graph.output_node().args[0])  # type: ignore[arg-type]  # a list of results
        count = len(flat) - len(self.trained) - len(self.fed)
        results, gradients = flat[:count], flat[count:]
        for node, (_, name) in zip(gradients, self.trained, strict=False):
            if node is not None and node.meta["val"].layout is not torch.strided:
                raise NoGraphError(f"the gradient of {name!r} is sparse, which no plan counts")
        of_weights = _apart(graph, gradients[: len(self.trained)])
        of_inputs = _apart(graph, gradients[len(self.trained) :])
        found = [node for node in (*of_weights, *of_inputs) if node is not None]
        graph.output_node().args = ((*results, *found),)
        step = TrainingStep(
            self.differentiated,
            tangents,
            {n.name: name for n, (_, name) in zip(of_weights, self.trained, strict=True) if n is not None},
            {n.name: leaf for n, (_, leaf) in zip(of_inputs, self.fed, strict=True) if n is not None},
            self.others,
        )
        inputs, signature = tuple(renamed[name] for name in self.capture.inputs), self._signature()
        given, asked = (
            [each[index] for index in self.capture.order if index is not None]
            for each in (self.call.leaves, signature.leaves)
        )
        return replace(
            self.capture,
            module=traced,
            weights={renamed[name]: weight for name, weight in self.capture.weights.items()},
            inputs=inputs,
            states={renamed[name]: leaf for name, leaf in self.capture.states.items()},
            signature=signature,
            sizes=self.data_sizes | sizes_of_call(graph, inputs, given) | largest_sizes(graph, inputs, asked),
            roles=self._roles() if self.sizes else (),
            step=step,
        )

    def _signature(self) -> InputSignature:
        """Which calls the step serves: of the sizes that are no symbols, and of these gradients."""
        own = self.capture.signature
        leaves = tuple(
            self._asked(*each) for each in zip(own.leaves, self.call.leaves, self.given, strict=True)
        )
        of_sizes = self.sizes.guards() if self.sizes else ()
        return replace(own, leaves=leaves, guards=(*own.guards, *of_sizes))

    def _asked(self, leaf: Any, given: Any, traced: torch.Tensor | None) -> Any:
        if not isinstance(given, torch.Tensor):
            return leaf if self.sizes else given
        if not isinstance(leaf, TensorLeaf) or traced is None:
            return leaf
        open_ = [isinstance(size, torch.SymInt) for size in traced.shape]
        return replace(
            leaf,
            shape=tuple(None if one else size for one, size in zip(open_, given.shape, strict=True)),
            ranges=tuple(leaf.ranges[axis] if one else None for axis, one in enumerate(open_)),
            gradient=leaf.gradient if given.requires_grad else False,
        )

    def _roles(self) -> tuple[Roles, ...]:
        found = zip(self.capture.roles, self.given, strict=True) if self.capture.roles else ()
        return tuple(
            {
                axis: role
                for axis, role in roles.items()
                if one is None or isinstance(one.shape[axis], torch.SymInt)
            }
            for roles, one in found
        )


class _Forward(DecidedSizes, AttentionWhole):
    """Runs the captured graph with autograd."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        if target is aten.masked_scatter.default:  # its fake does not broadcast sizes that are symbols
            args = (*torch.broadcast_tensors(*args[:2]), *args[2:])
        if target is aten.dropout.default and has_free_unbacked_symbols(args[0]):
            return _dropped(*args, **kwargs)  # its own way asks whether there is any element
        return super().call_function(target, args, kwargs)


def _of_size(tangent: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The gradient of a result, of the size that the result has in this trace, where values decide it."""
    if not has_free_unbacked_symbols(tangent):
        return tangent
    with untraced():
        made = torch.empty_like(result)
    return taken_for(made, tangent)


def _dropped(given: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """What dropout returns, for any number of elements."""
    if p == 0 or not train:
        return given
    return given * (torch.empty_like(given).bernoulli_(1 - p).div_(1 - p) if p < 1 else given.new_zeros(()))


def _detached(values: Sequence[Any]) -> list[Any]:
    """Copies, so that the trace begins with what no forward pass has written to."""
    return [
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]


def _names(spec: pytree.TreeSpec, prefix: str = "") -> list[str]:
    """A name for each result: ``"loss"``, ``"[0]"``, ``"past_key_values[3]"``."""
    if spec.is_leaf():
        return [prefix]
    children, keys = spec.children(), spec.context
    if spec.type is Returned:
        paths = ["", *keys]
    elif not isinstance(keys, list) or len(keys) != len(children):
        paths = [f"{prefix}[{index}]" for index in range(len(children))]
    else:
        paths = [f"{prefix}.{key}" if prefix else str(key) for key in keys]
    return [name for child, path in zip(children, paths, strict=True) for name in _names(child, path)]


def _mark_backward(graph: fx.Graph, tangents: Sequence[fx.Node]) -> None:
    """Mark what autograd ran: all from the first reader of a tangent on; and say which module it is of."""
    first: dict[Any, fx.Node] = {}  # of a number, the operation that autograd has given it
    started, last = False, None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        started |= any(one in tangents for one in node.all_input_nodes)
        if not started:
            first.setdefault(node.meta.get("seq_nr"), node)
            continue
        node.meta["backward"] = True
        # the sum of the gradients of a value that is read twice belongs to no operation: it follows the last
        added = node.target in (aten.add.Tensor, aten.add_.Tensor)  # torch 2.11 marks what follows a sum too
        summed = added and _SUM in (node.meta.get("stack_trace") or "")
        owner = last if summed else first.get(node.meta.get("seq_nr"), last)
        if owner is not None:
            belong_with(node, owner)
            node.meta["forward"] = owner.name
            last = owner


def _apart(graph: fx.Graph, gradients: Sequence[Any]) -> list[fx.Node | None]:
    """The gradients, each a node of its own, and complete: what is not is copied."""
    seen: set[fx.Node] = set()
    found: list[fx.Node | None] = []
    # through a view, say; the last operation counts
    written = {memory: node for node in graph.nodes for memory in written_memories(node)}
    for node in gradients:
        made = node
        if node is not None and (
            node.op == "placeholder"
            or node in seen
            or not node.meta.get("backward")
            or written.get(storage_of(node.meta["val"]), node) > node
        ):
            with graph.inserting_before(graph.output_node()):
                made = graph.call_function(aten.clone.default, (node,))
            made.meta.update(node.meta)
            made.meta["backward"] = True
        if made is not None:
            seen.add(made)
        found.append(made)
    return found
