"""Arguments and results as trees: torch's pytrees, with more classes that only graphplan flattens.

Other libraries own the caches of transformers and users' dataclasses, and may have registered them with torch
differently, or not at all. So graphplan has a registry of its own, which torch uses only while it traces::

    register_node(Cache, flatten, unflatten)
    leaves, spec = flatten(call)         flattens caches
    with registered_with_torch():        torch does, too
        torch.export.export(...)
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePath
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphplan._compat.export import TRACED_NUMBERS
from graphplan._compat.torch import register_pytree_nodes

IsLeaf = Callable[[Any], bool]

PLAIN: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, range, PurePath, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Classes of plain values: code can read nothing of them but the value, which never changes."""

PLAIN_TYPES = frozenset(PLAIN)  # faster to look up the exact type of many values in

_CODE = (type, types.FunctionType, types.BuiltinFunctionType)
CONSTANTS = (*(cls for cls in PLAIN if cls is not torch.device), *_CODE, torch.Size)
"""Classes of constants of a structure. Devices are not constants: those of a trace differ from the call's."""

CONTAINERS = (OrderedDict, dict, list, deque, tuple, set, frozenset)
"""Classes of containers, each before those that it derives from."""

_registry: dict[type, pytree.NodeDef] = {}
_tracing: list[
    ExitStack
] = []  # of the nested ``registered_with_torch`` of the thread that holds the capture lock


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
    key: Callable[[Any], Iterable[Any]] | None = None,
) -> None:
    """Register a class, whose objects are flattened from now on.

    Args:
        cls: the class.
        flatten: function from an object to its parts and its context.
        unflatten: the inverse function.
        key: function from an object to the pytree key of each part; by default the parts are numbered.
    """

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        parts, context = flatten(value)
        names = map(pytree.SequenceKey, range(len(parts))) if key is None else key(value)
        return list(zip(names, parts, strict=True)), context

    _registry[cls] = pytree.NodeDef(cls, flatten, unflatten, with_keys)


def register_containers(tree: Any) -> None:
    """Register the class of every dataclass instance, enum member and ``UserDict`` in ``tree``."""
    for leaf in leaves_of(tree):
        if register_class(type(leaf)):
            register_containers(node_of_class(type(leaf)).flatten_fn(leaf)[0])


def register_class(cls: type) -> bool:
    """Register a class if it is a dataclass, an enum or a ``UserDict`` (a ``BatchEncoding``).

    Return whether its objects are flattened.
    """
    if node_of_class(cls) is None:
        if issubclass(cls, UserDict):
            _register_mapping(cls)
        elif issubclass(cls, enum.Enum):
            _register_constant(cls)
        elif dataclasses.is_dataclass(cls):
            _register_dataclass(cls)
    return node_of_class(cls) is not None


def _register_constant(cls: type) -> None:
    """Register a class whose objects are part of the structure, since a trace refuses them as leaves."""
    register_node(cls, lambda value: ([], value), lambda _, value: value)


def _register_mapping(cls: type[UserDict[Any, Any]]) -> None:
    def flatten_mapping(value: Any) -> tuple[list[Any], Any]:
        return list(value.values()), tuple(value)

    def rebuild(parts: Iterable[Any], names: Sequence[Any]) -> Any:
        return cls(dict(zip(names, parts, strict=True)))

    register_node(cls, flatten_mapping, rebuild, lambda value: [pytree.MappingKey(name) for name in value])


def _register_dataclass(cls: type) -> None:
    """Register a dataclass by its fields; fields that are None are part of the structure.

    Of plain dataclasses, tensors and constants that the constructor does not take, such as those computed by
    ``__post_init__``, are parts, too. A list, a dict or a module that is a dataclass is rebuilt by its
    constructor.
    """
    plain = "__new__" not in {name for one in cls.__mro__[:-1] for name in vars(one)} and not issubclass(
        cls, torch.nn.Module
    )
    names = [field.name for field in dataclasses.fields(cls) if field.init or plain]
    refused = (types.EllipsisType, PurePath)  # by a trace, as inputs
    types_of_parts = (torch.Tensor, *(cls for cls in CONSTANTS if cls not in refused), *TRACED_NUMBERS)

    def fields(value: Any) -> dict[str, Any]:
        declared = {name: getattr(value, name) for name in names if hasattr(value, name)}
        attributes = getattr(value, "__dict__", {}).items() if plain else ()
        others = {
            name: part
            for name, part in attributes
            if name not in declared and isinstance(part, types_of_parts)
        }
        return {**declared, **others}

    def present_fields(value: Any) -> dict[str, Any]:
        return {name: part for name, part in fields(value).items() if part is not None}

    def flatten_fields(value: Any) -> tuple[list[Any], Any]:
        return list(present_fields(value).values()), tuple(
            (name, part is None) for name, part in fields(value).items()
        )

    def rebuild(parts: Iterable[Any], names: Sequence[tuple[str, bool]]) -> Any:
        remaining = iter(parts)
        values = {name: None if is_none else next(remaining) for name, is_none in names}
        if not plain:
            return cls(**values)
        instance: Any = object.__new__(cls)
        for name, part in values.items():
            object.__setattr__(instance, name, part)
        return instance

    register_node(
        cls,
        flatten_fields,
        rebuild,
        lambda value: [pytree.GetAttrKey(name) for name in present_fields(value)],
    )


def _register_in_order(cls: type, node: pytree.NodeDef) -> None:
    """Register a dict that is a dataclass, a ``ModelOutput``, with keys in the order in which they were set.

    The ``unflatten`` that is registered with torch orders keys as fields. So values would change their
    positions if a model sets ``pooler_output`` last.
    """

    def rebuild(parts: Iterable[Any], names: Sequence[str]) -> Any:
        instance: Any = node.unflatten_fn(parts, names)
        for name in names:
            if name in instance:  # a field that is None is not a key
                instance.move_to_end(name)
        return instance

    register_node(cls, node.flatten_fn, rebuild, lambda value: [pytree.MappingKey(name) for name in value])


def node_of(cls: Any) -> pytree.NodeDef | None:
    """Return the node definition of a class; None if its objects are leaves."""
    if cls not in _registry and cls in pytree.SUPPORTED_NODES and _is_ordered_dataclass(cls):
        _register_in_order(cls, pytree.SUPPORTED_NODES[cls])
    return _registry.get(cls) or pytree.SUPPORTED_NODES.get(cls)


def _is_ordered_dataclass(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, OrderedDict) and dataclasses.is_dataclass(cls)


def node_of_class(cls: type) -> Any:
    """Return the node definition of a class; that of ``namedtuple`` for all named tuples."""
    return node_of(namedtuple if pytree.is_namedtuple_class(cls) else cls)


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a tree, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, is_leaf)


class Seen(set[int]):
    """An ``is_leaf`` for :func:`flatten` that stops at values seen before: a container may hold itself."""

    def __call__(self, value: Any) -> bool:
        """Whether this object was called with the value before."""
        seen = id(value) in self
        self.add(id(value))
        return seen


def _flatten(tree: Any, leaves: list[Any], is_leaf: IsLeaf | None) -> pytree.TreeSpec:
    node = None if is_leaf is not None and is_leaf(tree) else node_of_class(type(tree))
    if node is None:
        leaves.append(tree)
        return pytree.treespec_leaf()
    parts, context = node.flatten_fn(tree)
    return pytree.TreeSpec(node.type, context, [_flatten(part, leaves, is_leaf) for part in parts])


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """Return the tree of leaves and a structure; the inverse of :func:`flatten`."""
    assert len(leaves) == spec.num_leaves
    return _unflatten(iter(leaves), spec)


def _unflatten(leaves: Iterator[Any], spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    node = node_of(spec.type)
    assert node is not None, f"{spec.type} was registered when this structure was made"
    return node.unflatten_fn([_unflatten(leaves, child) for child in spec.children()], spec.context)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree."""
    return flatten(tree)[0]


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Return the tree with ``function`` applied to each leaf."""
    leaves, spec = flatten(tree, is_leaf)
    return unflatten([function(leaf) for leaf in leaves], spec)


def flatten_with_path(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return each leaf with its path, in the order of :func:`flatten`."""
    return list(_with_path(tree, ()))


def _with_path(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    node = node_of_class(type(tree))
    if node is None:
        yield path, tree
        return
    for key, part in keyed_parts(node, tree):
        yield from _with_path(part, (*path, key))


def keyed_parts(node: pytree.NodeDef, value: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a value with pytree's keys, or numbers if its class was registered without keys."""
    if node.flatten_with_keys_fn is None:
        return [(pytree.SequenceKey(index), part) for index, part in enumerate(node.flatten_fn(value)[0])]
    return node.flatten_with_keys_fn(value)[0]


def reachable(
    starts: Iterable[Any],
    successors: Callable[[Any], Iterable[Any]],
    key: Callable[[Any], Any] = lambda item: item,
) -> Iterator[Any]:
    """Yield the starts, and everything reachable from them by ``successors``; once for each ``key``."""
    pending, seen = list(starts), set[Any]()
    while pending:
        item = pending.pop()
        if (identifier := key(item)) not in seen:
            seen.add(identifier)
            yield item
            pending += successors(item)


@contextmanager
def registered_with_torch() -> Iterator[None]:
    """Context manager, under the capture lock, in which torch flattens the same classes."""
    with ExitStack() as stack:
        _tracing.append(stack)
        stack.callback(_tracing.remove, stack)
        register_with_torch()
        yield


def register_with_torch() -> None:
    """Inside :func:`registered_with_torch`, also register later classes with torch."""
    register_pytree_nodes(dict(_registry), _tracing[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """Placeholder in a result for an object that the caller has passed in.

    Attributes:
        name: the name of the argument.
        path: pytree keys from the argument to the object.
    """

    name: str
    path: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name + pytree.keystr(self.path)


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """The result of a trace whose call changes its arguments.

    Attributes:
        result: the result of the model.
        changed: argument name -> the changed cache; for any other argument, pairs of each list or dict in it
            and its new contents, or the object itself if it is unchanged.
    """

    result: Any
    changed: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredAttribute:
    """An attribute in which a call stores tensors.

    Attributes:
        path: the path of the module that has it.
        name: the name of the attribute.
        in_place: whether the call changes the list or dict that the attribute holds, instead of replacing it.
    """

    path: str
    name: str
    in_place: bool

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """The result of a trace whose call stores tensors in attributes of modules, with these attributes."""

    result: Any
    attributes: dict[StoredAttribute, Any]


def leaf_name(attribute: str, index: int) -> str:
    """Return the name of a tensor in a container that is an attribute; ``index`` is that of its leaf."""
    return f"{attribute}[{index}]"


def attribute_and_leaf(name: str) -> tuple[str, int]:
    """Return the attribute of a name of :func:`leaf_name`, and the index; 0 for an attribute itself."""
    found = re.fullmatch(r"(.*)\[(\d+)\]", name, re.DOTALL)
    return (found[1], int(found[2])) if found else (name, 0)


def layout_of(value: Any) -> tuple[Any, ...]:
    """Return the shape and type of a tensor; of any other value its structure, with those of its tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    leaves, spec = flatten(value, Seen())
    return spec, *(layout_of(x) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves)


def has_tensors(value: Any) -> bool:
    """Whether the value of an attribute is a tensor, or has tensors in its containers."""
    if value is None or isinstance(value, torch.Tensor):
        return value is not None
    return any(isinstance(leaf, torch.Tensor) for leaf in flatten(value, Seen())[0])


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPresence:
    """Which attributes of modules have tensors before and after a traced call.

    Code may ask whether an attribute has a tensor yet, as in ``if self.memory is None``. So a graph serves
    calls only while attributes have tensors as before its trace, or as after it if a second trace has shown
    that the next call is the same.

    Attributes:
        before: names of the attributes that had tensors before the call.
        after: names of those that have tensors after it.
        layouts: attribute -> its layout before the call, as of :func:`layout_of`, for those that the graph
            reads, or on whose layout the call may depend.
    """

    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    layouts: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    def allows(self, values: Iterable[tuple[str, Any]]) -> bool:
        """Whether the graph serves calls while attributes, given by name, have these values."""
        found = dict(values)
        present = {name for name, value in found.items() if has_tensors(value)}
        return present in (self.after.intersection(found), self.before.intersection(found)) and all(
            layout_of(found[name]) == self.layouts[name] for name in present.intersection(self.layouts)
        )


def stored_in(spec: pytree.TreeSpec) -> tuple[StoredAttribute, ...]:
    """Return the attributes in which a call with a result of this structure stores tensors."""
    inner = spec.children()[0] if spec.type is Returned else spec
    return inner.context if inner.type is Stored else ()


def _stored(parts: Iterable[Any], attributes: Sequence[StoredAttribute]) -> Stored:
    result, *values = parts
    return Stored(result, dict(zip(attributes, values, strict=True)))


def _returned(parts: Iterable[Any], names: Sequence[str]) -> Returned:
    result, *changed = parts
    return Returned(result, dict(zip(names, changed, strict=True)))


for _constant in (Given, torch.dtype, torch.layout, torch.memory_format, bytes, range):
    _register_constant(_constant)
# as text, since NaN does not equal itself, and 0.0 equals -0.0
register_node(complex, lambda value: ([], repr(value)), lambda _, text: complex(text.strip("()")))
register_node(
    Returned, lambda found: ([found.result, *found.changed.values()], tuple(found.changed)), _returned
)
register_node(
    Stored, lambda found: ([found.result, *found.attributes.values()], tuple(found.attributes)), _stored
)
