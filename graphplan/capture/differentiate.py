"""Construction of a training step, forward and backward in one graph, from a captured forward pass.

The captured graph is run on fake tensors with autograd on, and ``make_fx`` traces the operations that
autograd runs. So the tensors that autograd saves are ordinary values of the graph::

    linear = linear(x, w)          t = t(w)
    loss = sum(linear)             mm = mm(x, t)
                                   loss = sum(mm)
                                   expand = expand(tangent, ...)          backward
                                   t_1 = t(expand)                        backward
                                   mm_1 = mm(t_1, x)                      backward, the gradient of w

Nodes of the backward pass have ``backward`` in their ``meta``, and the name (``forward``), module and line of
the operation whose gradient they compute: autograd gives both the same sequence number.
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
from graphplan._compat.traced_tensors import substitute_fake, untraced
from graphplan.capture.attention import FusedAttention, kept, on_any_device
from graphplan.capture.captured_graph import Capture, TrainingStep, rename_clashes
from graphplan.capture.model.model_weights import ModelWeights, is_wrapper
from graphplan.capture.model.modes import Differentiation
from graphplan.capture.signature import BoundCall, InputSignature, TensorLeaf
from graphplan.capture.sizes.decided_sizes import DecidedSizes, require_no_broadcast
from graphplan.capture.sizes.dynamic_axes import Roles
from graphplan.capture.sizes.dynamic_sizes import largest_sizes, sizes_of_call
from graphplan.capture.sizes.open_sizes import OpenSizes, open_sizes
from graphplan.capture.source_lines import belong_with
from graphplan.capture.structure import Returned, Stored
from graphplan.capture.tracers.quiet import quiet
from graphplan.capture.written_memory import written_memories
from graphplan.errors import InputError, NoGraphError
from graphplan.message_text import first_line

aten = torch.ops.aten

_SUM = "Gradient addition node"  # torch marks autograd's sums of gradients by this text in the stack trace


def differentiate(
    capture: Capture,
    weights: ModelWeights,
    call: BoundCall,
    differentiation: Differentiation,
    *,
    fixed: bool,
) -> Capture:
    """Return the training step of a captured call.

    Args:
        capture: the captured call, with gradients enabled; it must not be used afterwards.
        weights: the weights of the model.
        call: the example inputs.
        differentiation: which parameters are trained, and from which results.
        fixed: whether the step is for the sizes of this call alone, rather than all sizes of the capture.

    Raises:
        InputError: no result has a gradient, or ``train_outputs`` names none with a gradient.
        NoGraphError: autograd cannot differentiate the captured graph.
    """
    if capture.signature.prepared is not None and not fixed:
        raise NoGraphError("the exporter computes sizes from the arguments")
    nodes = capture.graph.find_nodes(op="placeholder")
    tracing = _Tracing(capture, weights, call, differentiation, None if fixed else open_sizes(capture))
    try:
        no_autocast = torch.autocast("cpu", enabled=False)  # the graph has the casts of the caller's autocast
        with quiet(), traceback.preserve_node_meta(), tracing.mode, torch.enable_grad(), no_autocast:
            values = [tracing.stand_in(position, node) for position, node in enumerate(nodes)]
            traced = make_fx(tracing.step)(*values, *tracing.tangents(values))
    except (InputError, NoGraphError):
        raise
    except Exception as error:  # autograd runs the formulas of any operation, which may raise anything
        raise NoGraphError(f"the training step could not be traced: {first_line(error)}") from error
    return tracing.capture_of(traced, nodes)


class _Tracing:
    """Runs a captured graph with autograd on, and identifies inputs and results in the trace of this run.

    ``trained`` and ``differentiated_inputs`` have the positions of the placeholders that get a gradient, each
    with the name of its parameter or the index of its input leaf.
    """

    def __init__(
        self,
        capture: Capture,
        weights: ModelWeights,
        call: BoundCall,
        differentiation: Differentiation,
        sizes: OpenSizes | None,
    ) -> None:
        self.capture, self.weights, self.call = capture, weights, call
        self.differentiation, self.sizes = differentiation, sizes
        self.env = sizes.env if sizes else ShapeEnv()
        self.mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=self.env, static_shapes=sizes is None
        )
        self.trained: list[tuple[int, str]] = []
        self.differentiated_inputs: list[tuple[int, int]] = []
        self.differentiated: tuple[int, ...] = ()
        self.others: dict[int, str] = {}
        self.data_sizes: dict[Any, int] = {}
        self.known_sizes: dict[Any, int] = {}
        self.fakes: list[torch.Tensor | None] = [None] * len(call.leaves)  # fake tensor of each leaf

    def stand_in(self, position: int, node: fx.Node) -> Any:
        """Return a fake tensor for a placeholder, or the number that it stands for."""
        name = self.capture.weights.get(node.name)
        if name is None:
            index = self._leaf(node.name)
            leaf = self.call.leaves[index]
            traced = node.meta["val"] if self.sizes else leaf
            if not isinstance(leaf, torch.Tensor):
                return traced
            if leaf.requires_grad:
                self.differentiated_inputs.append((position, index))
            fake = self.fakes[index] = self._fake(traced, requires_grad=leaf.requires_grad)
            return fake
        tensor = self.weights.tensors.get(name, self.capture.constants.get(name))
        assert tensor is not None
        if is_wrapper(tensor):
            raise NoGraphError(
                f"{name!r} is a {type(tensor).__name__}, and a training step cannot contain one"
            )
        if name in self.weights.parameter_attributes and tensor.requires_grad:
            raise NoGraphError(
                f"{name!r} requires a gradient but is not a parameter, and a planned step computes gradients "
                "of parameters only: register it as one"
            )
        if name in self.differentiation.trained:
            self.trained.append((position, name))
        return self._fake(tensor, requires_grad=name in self.differentiation.trained)

    def _fake(self, tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
        shape, stride = list(tensor.shape), list(tensor.stride())
        if self.sizes:
            shape, stride = (
                list(map(self.sizes.with_small_values, shape)),
                list(map(self.sizes.with_small_values, stride)),
            )
        fake = torch.empty_strided(shape, stride, dtype=tensor.dtype, device="cpu")
        return fake.requires_grad_() if requires_grad else fake

    def _leaf(self, name: str) -> int:
        index = self.capture.order[self.capture.inputs.index(name)]
        if index is None:
            raise NoGraphError(f"the trace reads {name!r}, which is not among the arguments")
        return index

    def tangents(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Choose the results that backward starts from, and return fakes of their gradients."""
        with on_any_device(), self.env.ignore_fresh_unbacked_symbols():
            results = _Forward(self.capture.module, self.env).run(*_detached(values))
        able = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad]
        names = _names(self.capture.out_spec)
        losses = [i for i in able if i not in self.capture.stored or not results[i].dim()]
        self.differentiated = self._chosen(able, losses, names)
        self.others = {position: names[position] for position in able if position not in self.differentiated}
        return [torch.empty_like(results[position]).detach() for position in self.differentiated]

    def _chosen(self, able: Sequence[int], losses: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
        """Return the positions that backward starts from, among ``able``: results that require a gradient.

        ``losses`` are those of them that may be part of a loss by default: not, say, stored attention scores.
        """
        outputs = self.differentiation.outputs
        if not (losses if outputs is None else able):
            raise InputError(
                "train=True: no result of the model has a gradient: does it compute under torch.no_grad(), "
                "are all parameters frozen, or is the loss not among the results (labels= is missing)?"
            )
        if outputs is None:
            returned = (position for position in able if position not in self.capture.stored)
            loss = [position for position in returned if names[position] == "loss"]
            return tuple(loss or losses)
        for name in outputs:
            if name not in names:
                known = ", ".join(repr(one) for one in names if one) or "without names"
                raise InputError(f"train_outputs={name!r}: the results are {known}")
        chosen = tuple(position for position in able if names[position] in outputs)
        missing = [name for name in outputs if name not in {names[position] for position in chosen}]
        if missing:
            raise InputError(f"train_outputs={missing[0]!r}: this result has no gradient")
        return chosen

    def step(self, *values: Any) -> list[Any]:
        """Run the step that is traced; return results, then gradients, None for a parameter without one."""
        count = len(values) - len(self.differentiated)
        inputs, tangents = values[:count], values[count:]
        with on_any_device():
            forward = _Forward(self.capture.module, self.env)
            results = list(forward.run(*inputs))
        sizes, self.known_sizes = self.capture.sizes, forward.constants
        self.data_sizes = {new: sizes[old] for new, old in forward.symbols.items() if old in sizes}
        starts = [results[position] for position in self.differentiated]
        mark_backward_nodes([start.grad_fn for start in starts])
        sources = [inputs[position] for position, _ in (*self.trained, *self.differentiated_inputs)]
        grad_outputs = list(map(_resized_tangent, tangents, starts))
        gradients = torch.autograd.grad(starts, sources, grad_outputs, allow_unused=True)
        return [*results, *gradients]

    def capture_of(self, traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> Capture:
        """Return the trace as a capture, with the forward pass's weights and inputs."""
        graph = traced.graph
        require_no_broadcast(graph, self.known_sizes)
        rename_clashes(graph, {*self.capture.weights.values(), *self.capture.constants})
        placeholders = graph.find_nodes(op="placeholder")
        for placeholder, node in zip(placeholders, nodes, strict=False):
            placeholder.meta.update({key: value for key, value in node.meta.items() if key != "val"})
        for node in graph.find_nodes(op="get_attr"):
            raise NoGraphError(f"the training step computes with {node.target!r}, which is not a weight")
        names = [node.name for node in placeholders]
        renamed = dict(zip((node.name for node in nodes), names, strict=False))
        tangents = tuple(names[len(nodes) :])
        _mark_backward(graph, placeholders[len(nodes) :])
        flat = list(graph.output_node().args[0])  # type: ignore[arg-type]  # a list of results
        count = len(flat) - len(self.trained) - len(self.differentiated_inputs)
        results, gradients = flat[:count], flat[count:]
        for node, (_, name) in zip(gradients, self.trained, strict=False):
            if node is not None and node.meta["val"].layout is not torch.strided:
                raise NoGraphError(f"the gradient of {name!r} is sparse, and plans count dense ones only")
        of_weights = _distinct(graph, gradients[: len(self.trained)])
        of_inputs = _distinct(graph, gradients[len(self.trained) :])
        outputs = [node for node in (*of_weights, *of_inputs) if node is not None]
        graph.output_node().args = ((*results, *outputs),)
        step = TrainingStep(
            self.differentiated,
            tangents,
            {n.name: name for n, (_, name) in zip(of_weights, self.trained, strict=True) if n is not None},
            {
                n.name: leaf
                for n, (_, leaf) in zip(of_inputs, self.differentiated_inputs, strict=True)
                if n is not None
            },
            self.others,
        )
        inputs, signature = tuple(renamed[name] for name in self.capture.inputs), self._signature()
        indices = [index for index in self.capture.order if index is not None]
        examples = [self.call.leaves[index] for index in indices]
        specs = [signature.leaves[index] for index in indices]
        return replace(
            self.capture,
            module=traced,
            weights={renamed[name]: weight for name, weight in self.capture.weights.items()},
            inputs=inputs,
            states={renamed[name]: leaf for name, leaf in self.capture.states.items()},
            signature=signature,
            sizes=self.data_sizes
            | sizes_of_call(graph, inputs, examples)
            | largest_sizes(graph, inputs, specs),
            roles=self._roles() if self.sizes else (),
            step=step,
            kept=self.capture.kept.difference(self.differentiated),
        )

    def _signature(self) -> InputSignature:
        """Return the capture's signature, restricted to sizes and gradients that the step was traced for."""
        signature = self.capture.signature
        leaves = tuple(
            self._leaf_signature(*each)
            for each in zip(signature.leaves, self.call.leaves, self.fakes, strict=True)
        )
        size_guards = self.sizes.guards() if self.sizes else ()
        return replace(signature, leaves=leaves, guards=(*signature.guards, *size_guards))

    def _leaf_signature(self, leaf: Any, example: Any, traced: torch.Tensor | None) -> Any:
        if not isinstance(example, torch.Tensor):
            return leaf if self.sizes else example
        if not isinstance(leaf, TensorLeaf) or traced is None:
            return leaf
        is_open = [isinstance(size, torch.SymInt) for size in traced.shape]
        return replace(
            leaf,
            shape=tuple(None if one else size for one, size in zip(is_open, example.shape, strict=True)),
            ranges=tuple(leaf.ranges[axis] if one else None for axis, one in enumerate(is_open)),
            gradient=leaf.gradient if example.requires_grad else False,
        )

    def _roles(self) -> tuple[Roles, ...]:
        pairs = zip(self.capture.roles, self.fakes, strict=True) if self.capture.roles else ()
        return tuple(
            {
                axis: role
                for axis, role in roles.items()
                if fake is None or isinstance(fake.shape[axis], torch.SymInt)
            }
            for roles, fake in pairs
        )


class _Forward(DecidedSizes, FusedAttention):
    """Runs the captured graph with autograd."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.masked_scatter.default:  # its fake does not broadcast symbolic sizes
            args = (*torch.broadcast_tensors(*args[:2]), *args[2:])
        if target is aten.dropout.default:
            return _dropped(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _resized_tangent(tangent: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the tangent of a result, with the result's size in this trace if that size depends on data."""
    if not has_free_unbacked_symbols(tangent):
        return tangent
    with untraced():
        resized = torch.empty_like(result)
    return substitute_fake(resized, tangent)


def _dropped(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Return the result of dropout on a tensor with any number of elements."""
    if p == 0 or not train:
        return x
    if p == 1:
        return x * x.new_zeros(())
    with untraced():
        factor = float(torch.ones((), dtype=x.dtype).div_(1 - p))  # rounded as by torch's own formula
    return x * kept(x, p) * factor


def _detached(values: Sequence[Any]) -> list[Any]:
    """Return copies of the tensors: the trace must begin with tensors that no forward pass has written to."""
    return [
        value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]


def _names(spec: pytree.TreeSpec, prefix: str = "") -> list[str]:
    """Return a name for each result: ``"loss"``, ``"[0]"``, ``"past_key_values[3]"``."""
    if spec.is_leaf():
        return [prefix]
    children, keys = spec.children(), spec.context
    if spec.type in (Returned, Stored):
        paths = ["", *map(str, keys)]
    elif not isinstance(keys, list) or len(keys) != len(children):
        paths = [f"{prefix}[{index}]" for index in range(len(children))]
    else:
        paths = [f"{prefix}.{key}" if prefix else str(key) for key in keys]
    return [name for child, path in zip(children, paths, strict=True) for name in _names(child, path)]


def _mark_backward(graph: fx.Graph, tangents: Sequence[fx.Node]) -> None:
    """Mark the backward pass, from the first reader of a tangent on, and set the modules of its nodes."""
    first: dict[Any, fx.Node] = {}  # autograd's sequence number -> the forward operation
    started, last = False, None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        started |= any(one in tangents for one in node.all_input_nodes)
        if not started:
            first.setdefault(node.meta.get("seq_nr"), node)
            continue
        node.meta["backward"] = True
        # the sum of the gradients of a value read twice has no forward operation: assign it to the last node
        is_add = node.target in (aten.add.Tensor, aten.add_.Tensor)  # torch 2.11 marks the next nodes, too
        is_sum = is_add and _SUM in (node.meta.get("stack_trace") or "")
        owner = last if is_sum else first.get(node.meta.get("seq_nr"), last)
        if owner is not None:
            belong_with(node, owner)
            node.meta["forward"] = owner.name
            last = owner


def _distinct(graph: fx.Graph, gradients: Sequence[Any]) -> list[fx.Node | None]:
    """Return a distinct node for each gradient: clone inputs, duplicates, and gradients written to later."""
    seen: set[fx.Node] = set()
    distinct: list[fx.Node | None] = []
    # memory -> the last node that writes to it, for example through a view
    written = {memory: node for node in graph.nodes for memory in written_memories(node)}
    for node in gradients:
        gradient = node
        if node is not None and (
            node.op == "placeholder"
            or node in seen
            or not node.meta.get("backward")
            or written.get(storage_of(node.meta["val"]), node) > node
        ):
            with graph.inserting_before(graph.output_node()):
                gradient = graph.call_function(aten.clone.default, (node,))
            gradient.meta.update(node.meta)
            gradient.meta["backward"] = True
        if gradient is not None:
            seen.add(gradient)
        distinct.append(gradient)
    return distinct
