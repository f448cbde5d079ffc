"""Binding of a call's arguments to a flat list of leaves, and the signature of calls that a graph serves.

Arguments are first bound to the names of ``forward``, so that ``model(x)`` and ``model(x=x)`` are the same
call. An argument that equals its default is left out. All others are flattened by pytree: tensors are inputs
of the graph, and every other leaf is a constant in it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphplan.capture.structure import flatten, flatten_with_path, register_containers, unflatten
from graphplan.errors import InputError

COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
"""Layouts that are not supported: such tensors have neither strides nor a single storage."""

_MAX_FLOAT = torch.finfo(torch.float32).max
_WRAPPER_PACKAGES = {
    "accelerate",
    "diffusers",
    "peft",
    "torch",
    "transformers",
}  # their wrappers also accept named arguments
_MAX_SHAPES = 3  # in a message


@dataclass(frozen=True, slots=True)
class BoundCall:
    """Arguments in canonical form.

    Attributes:
        args: positional-only arguments and ``*args``.
        kwargs: everything else by name, in the order of the signature.
        leaves: the flattened ``(args, kwargs)``.
        spec: the structure that ``leaves`` came from.
        entry: the called method, as in :func:`graphplan.capture.model_methods.method_of`.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    entry: str = ""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensor leaves, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor, to which outputs return; None without tensors."""
        tensors = self.tensors
        return tensors[0].device if tensors else None

    def mapped(self, function: Callable[[Any], Any]) -> BoundCall:
        """Return the call with ``function`` applied to each leaf."""
        leaves = tuple(map(function, self.leaves))
        args, kwargs = unflatten(leaves, self.spec)
        return BoundCall(args, kwargs, leaves, self.spec, self.entry)

    def on_cpu(self) -> BoundCall:
        """Return the call with distinct tensors on the CPU; those of the meta device become zeros.

        No tensor is an inference tensor, which autograd cannot save.
        """
        tensors = dict[int, torch.Tensor]()

        def distinct(leaf: Any) -> Any:
            host = leaf_on_cpu(leaf)
            if isinstance(host, torch.Tensor):
                if id(host) in tensors or host.is_inference():  # the next call may have two tensors here
                    host = host.detach().clone().requires_grad_(host.requires_grad)
                tensors[id(host)] = host
            return host

        return self.mapped(distinct)


def leaf_on_cpu(leaf: Any) -> Any:
    """Return a tensor on the CPU with its strides, zeros for one on meta; any other leaf as it is."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.device.type == "meta":
        host = torch.zeros_like(leaf, device="cpu", requires_grad=leaf.requires_grad)
    else:
        host = leaf.cpu()
    if leaf.layout is not torch.strided or host.stride() == leaf.stride() or not leaf.numel():
        return host
    # torch makes a tensor dense when it moves an expanded one, or a slice
    extent = 1 + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf_on_cpu(leaf.as_strided((extent,), (1,))).as_strided(leaf.shape, leaf.stride())


class _ByPosition(inspect.Signature):
    """Signature of a function whose wrapper takes ``*args``: positional arguments stay positional."""

    __slots__ = ()


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a model's method; the user's wrappers may read arguments by position."""
    signature, outer = inspect.signature(function), function
    while (inside := getattr(outer, "__wrapped__", None)) is not None:
        code, module = getattr(outer, "__code__", None), getattr(outer, "__globals__", {}).get("__name__", "")
        if code and code.co_flags & inspect.CO_VARARGS and module.partition(".")[0] not in _WRAPPER_PACKAGES:
            return _ByPosition(list(signature.parameters.values()))
        outer = inside
    return signature


def bind_call(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], entry: str = ""
) -> BoundCall:
    """Bind arguments to the parameters of ``forward``, or of the method that ``entry`` names."""
    parameters = signature.parameters
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        hints = _hints(parameters, kwargs, str(error))
        raise InputError(f"the inputs do not fit forward{signature}: {error}{hints}") from error
    positional: list[Any] = []
    named: dict[str, Any] = {}
    # parameters before a used ``*args`` must stay positional
    has_varargs = any(parameters[name].kind is Parameter.VAR_POSITIONAL and bound[name] for name in bound)
    for name, value in bound.items():
        parameter = parameters[name]
        by_position = has_varargs or (isinstance(signature, _ByPosition) and name not in kwargs)
        if parameter.kind is Parameter.VAR_POSITIONAL:
            positional.extend(value)
        elif parameter.kind is Parameter.VAR_KEYWORD:
            named.update(value)  # in the caller's order, on which a model may depend
        elif parameter.kind is Parameter.POSITIONAL_ONLY or (
            parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and by_position
        ):
            positional.append(value)
        elif not _is_default(value, parameter.default):
            named[name] = value
    leaves, spec = flatten((tuple(positional), named))
    if any(dataclasses.is_dataclass(leaf) or isinstance(leaf, UserDict | enum.Enum) for leaf in leaves):
        register_containers(leaves)
        leaves, spec = flatten((tuple(positional), named))
    return BoundCall(tuple(positional), named, tuple(leaves), spec, entry)


def _hints(parameters: Mapping[str, Parameter], kwargs: Mapping[str, Any], error: str) -> str:
    """Return a text to add to a binding ``error``: names that no parameter has, and close ones."""
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    unknown = [] if takes_any else [name for name in kwargs if name not in parameters]
    close = [f"{hit[0]!r}" for n in unknown if (hit := difflib.get_close_matches(n, parameters, 1))]
    unnamed = [repr(name) for name in unknown if repr(name) not in error]
    hints = f"; it takes no {', '.join(unnamed)}" if unnamed else ""
    return hints + (f"; did you mean {', '.join(close)}?" if close else "")


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, bool | int | float | str) and same_constant(value, default))


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """The requirements of a graph on one tensor.

    Attributes:
        dtype: the required dtype.
        shape: the sizes; None for a dynamic one.
        ranges: the smallest and the largest value of each dynamic size.
        stride: the required strides; None if the tensor must be contiguous, empty if any strides are served.
        gradient: whether the tensor must, or must not, require a gradient; None if either is served.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    ranges: tuple[tuple[int, int] | None, ...] = ()
    stride: tuple[int, ...] | None = None
    gradient: bool | None = None

    def fits(self, leaf: torch.Tensor) -> bool:
        """Whether a tensor meets the requirements: as :meth:`mismatch`, with a fast path."""
        is_equal = leaf.dtype is self.dtype and leaf.shape == self.shape and leaf.layout is torch.strided
        is_equal = is_equal and (self.gradient is None or self.gradient is leaf.requires_grad)
        if is_equal and (self.stride == () or (self.stride is None and leaf.is_contiguous())):
            return True  # here no size is dynamic: a None would not be equal
        return self.mismatch("", leaf) is None

    def mismatch(self, name: str, leaf: Any) -> str | None:
        """Return the reason why ``leaf`` does not fit, or None."""
        if not isinstance(leaf, torch.Tensor):
            return f"{name} is {type(leaf).__name__}, not a tensor"
        if leaf.layout in COMPRESSED:
            return f"{name} has the unsupported layout {leaf.layout}"
        if leaf.dtype != self.dtype:
            return f"{name} has {leaf.dtype}, not {self.dtype}"
        if self.gradient not in (None, leaf.requires_grad):
            if leaf.requires_grad:
                return f"{name} requires a gradient, but the traced input did not"
            return f"{name} does not require a gradient, but the traced input did"
        if leaf.dim() != len(self.shape):
            return f"{name} has {leaf.dim()} dimensions, not {len(self.shape)}"
        for axis, (size, required) in enumerate(zip(leaf.shape, self.shape, strict=True)):
            if required is not None and size != required:
                return f"{name} has size {size} along dimension {axis}, not {required}"
            bounds = self.ranges[axis] if self.ranges else None
            if bounds is not None and not bounds[0] <= size <= bounds[1]:
                return f"{name} has size {size} along dimension {axis}, outside {bounds}"
        if self.stride == ():
            return None
        same = leaf.is_contiguous() if self.stride is None else leaf.stride() == self.stride
        if same or not leaf.numel():
            return None
        if self.stride is None:
            return f"{name} has strides {leaf.stride()}, and is not contiguous"
        return f"{name} has strides {leaf.stride()}, not {self.stride}"


@dataclass(frozen=True, slots=True)
class CounterLeaf:
    """The range, ends included, of an integer that a graph takes as an input."""

    low: int
    high: int

    def fits(self, leaf: Any) -> bool:
        """Whether ``leaf`` is such an integer."""
        return type(leaf) is int and self.low <= leaf <= self.high

    def mismatch(self, name: str, leaf: Any) -> str | None:
        """Return the reason why ``leaf`` does not fit, or None."""
        return None if self.fits(leaf) else f"{name} is {_short(leaf)}, outside {(self.low, self.high)}"


@dataclass(frozen=True, slots=True)
class FloatLeaf:
    """A float that a graph takes as an input: float32 must be able to hold it."""

    def fits(self, leaf: Any) -> bool:
        """Whether ``leaf`` is such a float."""
        return type(leaf) is float and abs(leaf) <= _MAX_FLOAT

    def mismatch(self, name: str, leaf: Any) -> str | None:
        """Return the reason why ``leaf`` does not fit, or None."""
        return None if self.fits(leaf) else f"{name} is {_short(leaf)}, outside the range of float32"


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """Any object of a class: for calls without a graph."""

    kind: type

    def fits(self, leaf: Any) -> bool:
        """Whether ``leaf`` is of this class."""
        return type(leaf) is self.kind

    def mismatch(self, name: str, leaf: Any) -> str | None:
        """Return the reason why ``leaf`` does not fit, or None."""
        return None if self.fits(leaf) else f"{name} is {_short(leaf)}, not of {self.kind.__name__}"


@dataclass(frozen=True, slots=True)
class InputSignature:
    """The calls that a captured graph serves.

    Attributes:
        spec: the structure of the bound arguments.
        leaves: for each leaf, the requirements on it, or the constant that was traced.
        names: the readable name of each leaf (``"input_ids"``, ``"past[0].keys"``).
        guards: conditions of the trace on values, and on sizes besides their ranges.
        prepared: the arguments that the exporter computes from the caller's before the trace, if it does.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    guards: tuple[Guard, ...] = ()
    prepared: Prepared | None = None

    def mismatch(self, call: BoundCall) -> str | None:
        """Return the reason why this graph cannot serve ``call``, or None if it can."""
        if call.spec != self.spec:
            return self._other_arguments(call)
        for name, required, leaf in zip(self.names, self.leaves, call.leaves, strict=True):
            if isinstance(required, TensorLeaf | CounterLeaf | FloatLeaf | ObjectLeaf):
                if (problem := required.mismatch(name, leaf)) is not None:
                    return problem
            elif isinstance(leaf, torch.Tensor) or not same_constant(leaf, required):
                return f"{name} is {_short(leaf)}, not {required!r}"
        broken = next((guard.text for guard in self.guards if not guard.holds(call.leaves)), None)
        if broken is not None or self.prepared is None:
            return broken
        return self.prepared.signature.mismatch(self.traced(call))

    @property
    def of_graph(self) -> InputSignature:
        """The signature of the calls that the graph takes: with prepared arguments, if there are any."""
        return self if self.prepared is None else self.prepared.signature

    def traced(self, call: BoundCall) -> BoundCall:
        """Return the call that the graph takes: with prepared arguments, if there are any."""
        return call if self.prepared is None else self.prepared.prepare(call)

    def _other_arguments(self, call: BoundCall) -> str:
        traced, given = dict.fromkeys(self.names), dict.fromkeys(leaf_names(call))
        more = [name for name in given if name not in traced]
        fewer = [name for name in traced if name not in given]
        texts = [
            f"{verb} {', '.join(names)}" for verb, names in (("with", more), ("without", fewer)) if names
        ]
        if not texts:
            pairs = zip(_constants(call.spec), _constants(self.spec), strict=False)
            texts = [f"with {new}, not {old}" for new, old in pairs if new != old]
        return f"other arguments: {'; '.join(texts)}" if texts else "arguments of another structure"


def _constants(spec: pytree.TreeSpec) -> list[Any]:
    """Return the contexts of the parts that have no leaves: dtypes and other constants, empty containers."""
    parts = [one for child in spec.children() for one in _constants(child)]
    return parts if spec.num_leaves or parts else [spec.context]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Arguments that ``prepare`` computes from the caller's, and their signature; values may affect sizes."""

    prepare: Callable[[BoundCall], BoundCall]
    signature: InputSignature


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition on a call that a trace has assumed, mostly on its sizes.

    Attributes:
        text: the condition, for error messages.
        holds: function from the leaves of a call to whether the condition holds.
        code: the tracer's Python expression over the leaves ``v`` that ``holds`` evaluates, if any.
    """

    text: str
    holds: Callable[[Sequence[Any]], bool]
    code: str = ""


def same_constant(a: Any, b: Any) -> bool:
    """Whether a graph traced with the constant ``a`` serves ``b``, too; ``0.0`` and ``-0.0`` differ."""
    if isinstance(a, torch.Generator):
        return isinstance(b, torch.Generator)  # no graph reads one: export refuses generators that are used
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, np.ndarray):  # ``==`` returns an array
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return repr(a) == repr(b) if isinstance(a, float | complex) else bool(a == b)


def _short(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)


def leaf_names(call: BoundCall) -> tuple[str, ...]:
    """Return a readable name per leaf."""
    names = []
    for path, _leaf in flatten_with_path((call.args, call.kwargs)):
        name = pytree.keystr(path[1:])
        names.append(name.removeprefix("['").replace("']", "", 1) if name.startswith("['") else f"args{name}")
    return tuple(names)


def shapes_text(call: BoundCall) -> str:
    """Return the names and shapes of a call's first tensors."""
    named = zip(leaf_names(call), call.leaves, strict=True)
    shapes = [f"{name} {tuple(leaf.shape)}" for name, leaf in named if isinstance(leaf, torch.Tensor)]
    return ", ".join(shapes[:_MAX_SHAPES] + (["..."] if len(shapes) > _MAX_SHAPES else []))
