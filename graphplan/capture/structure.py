"""Arguments and results as trees: torch's pytrees, and classes that graphplan alone looks inside.

Caches of transformers and users' dataclasses belong to others, who may have told torch something else of
them, or nothing. So what graphplan knows of them is in a registry of its own, which torch has only while it
traces::

    know(Cache, flatten, unflatten)
    leaves, spec = flatten(call)         through caches
    with torch_knows():                  for torch too
        torch.export.export(...)
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graphplan._compat.export import TRACED_NUMBERS
from graphplan._compat.torch import storage_of, tell_pytree

aten = torch.ops.aten

Flatten = Callable[[Any], tuple[list[Any], Any]]
Unflatten = Callable[[Iterable[Any], Any], Any]
IsLeaf = Callable[[Any], bool]

CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type, enum.Enum, types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.layout, torch.memory_format, torch.Size),
)
"""What nobody changes in place."""

_own: dict[type, pytree.NodeDef] = {}
_tracing: list[ExitStack] = []  # of the blocks in which the thread is that holds the capture lock


def know(
    cls: type, flatten: Flatten, unflatten: Unflatten, key: Callable[[Any], Iterable[Any]] | None = None
) -> None:
    """Look inside the objects of a class from now on.

    Args:
        cls: the class.
        flatten: from an object to its parts, and what else makes it.
        unflatten: the way back.
        key: from an object to the name of each part, as pytree has them; by default they are numbered.
    """

    def with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        parts, context = flatten(value)
        names = map(pytree.SequenceKey, range(len(parts))) if key is None else key(value)
        return list(zip(names, parts, strict=True)), context

    _own[cls] = pytree.NodeDef(cls, flatten, unflatten, with_keys)


def know_containers(tree: Any) -> None:
    """Look inside every plain dataclass instance and every ``UserDict`` (a ``BatchEncoding``) in ``tree``."""
    for leaf in leaves_of(tree):
        if know_class(type(leaf)):
            know_containers(node_of_class(type(leaf)).flatten_fn(leaf)[0])


def know_class(cls: type) -> bool:
    """Whether the objects of a class are looked into; plain dataclasses and ``UserDict`` are from now on."""
    if node_of_class(cls) is None:
        if issubclass(cls, UserDict):
            _know_mapping(cls)
        elif dataclasses.is_dataclass(cls):
            _know_dataclass(cls)
    return node_of_class(cls) is not None


def _know_mapping(cls: type[UserDict[Any, Any]]) -> None:
    """As a dict."""

    def flat(value: Any) -> tuple[list[Any], Any]:
        return list(value.values()), tuple(value)

    def made(parts: Iterable[Any], names: Sequence[Any]) -> Any:
        return cls(dict(zip(names, parts, strict=True)))

    know(cls, flat, made, lambda value: [pytree.MappingKey(name) for name in value])


def _know_dataclass(cls: type) -> None:
    """By its fields; those that are None are structure.

    Of plain ones tensors and constants count too that the constructor does not take, such as what
    ``__post_init__`` computes. A list, a dict or a module that is a dataclass is made by its constructor.
    """
    plain = "__new__" not in {name for one in cls.__mro__[:-1] for name in vars(one)} and not issubclass(
        cls, torch.nn.Module
    )
    names = [field.name for field in dataclasses.fields(cls) if field.init or plain]
    kinds = (torch.Tensor, *CONSTANTS, type(None), *TRACED_NUMBERS)

    def given(value: Any) -> dict[str, Any]:
        found = {name: getattr(value, name) for name in names if hasattr(value, name)}
        beside = getattr(value, "__dict__", {}).items() if plain else ()
        others = {name: part for name, part in beside if name not in found and isinstance(part, kinds)}
        return {**found, **others}

    def there(value: Any) -> dict[str, Any]:
        return {name: part for name, part in given(value).items() if part is not None}

    def flat(value: Any) -> tuple[list[Any], Any]:
        return list(there(value).values()), tuple((name, part is None) for name, part in given(value).items())

    def made(parts: Iterable[Any], names: Sequence[tuple[str, bool]]) -> Any:
        left = iter(parts)
        values = {name: None if is_none else next(left) for name, is_none in names}
        if not plain:
            return cls(**values)
        found: Any = object.__new__(cls)
        for name, part in values.items():
            object.__setattr__(found, name, part)
        return found

    know(cls, flat, made, lambda value: [pytree.GetAttrKey(name) for name in there(value)])


def _know_in_order(cls: type, node: pytree.NodeDef) -> None:
    """A dict that is a dataclass, a ``ModelOutput``, with its keys in the order in which they were set.

    Its own way back makes it by its constructor, in the order of its fields: what was flattened again, or
    read by position, was another where a model sets ``pooler_output`` last.
    """

    def made(parts: Iterable[Any], names: Sequence[str]) -> Any:
        found: Any = node.unflatten_fn(parts, names)
        for name in names:
            if name in found:  # what is None is no key
                found.move_to_end(name)
        return found

    know(cls, node.flatten_fn, made, lambda value: [pytree.MappingKey(name) for name in value])


def node_of(cls: Any) -> pytree.NodeDef | None:
    """How the objects of a class are looked into; None where they are leaves."""
    if cls not in _own and cls in pytree.SUPPORTED_NODES and _is_ordered_dataclass(cls):
        _know_in_order(cls, pytree.SUPPORTED_NODES[cls])
    return _own.get(cls) or pytree.SUPPORTED_NODES.get(cls)


def _is_ordered_dataclass(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, OrderedDict) and dataclasses.is_dataclass(cls)


def node_of_class(cls: type) -> Any:
    """As :func:`node_of`; of all named tuples as of one class."""
    return node_of(namedtuple if pytree.is_namedtuple_class(cls) else cls)


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a tree, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, is_leaf)


class Seen(set[int]):
    """For :func:`flatten`: what is met again is a leaf, since a container may be in itself."""

    def __call__(self, value: Any) -> bool:
        """Whether it was asked of this value before."""
        known = id(value) in self
        self.add(id(value))
        return known


def _flatten(tree: Any, leaves: list[Any], is_leaf: IsLeaf | None) -> pytree.TreeSpec:
    node = None if is_leaf is not None and is_leaf(tree) else node_of_class(type(tree))
    if node is None:
        leaves.append(tree)
        return pytree.treespec_leaf()
    parts, context = node.flatten_fn(tree)
    return pytree.TreeSpec(node.type, context, [_flatten(part, leaves, is_leaf) for part in parts])


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    """A tree of this structure; the inverse of :func:`flatten`."""
    assert len(leaves) == spec.num_leaves
    return _unflatten(iter(leaves), spec)


def _unflatten(leaves: Iterator[Any], spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    node = node_of(spec.type)
    assert node is not None, f"{spec.type} was known when this structure was made"
    return node.unflatten_fn([_unflatten(leaves, child) for child in spec.children()], spec.context)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree."""
    return flatten(tree)[0]


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """The tree with another value for each leaf."""
    leaves, spec = flatten(tree, is_leaf)
    return unflatten([function(leaf) for leaf in leaves], spec)


def flatten_with_path(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Each leaf with its path, in the order of :func:`flatten`."""
    return list(_with_path(tree, ()))


def _with_path(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    node = node_of_class(type(tree))
    if node is None:
        yield path, tree
        return
    for key, part in keyed_parts(node, tree):
        yield from _with_path(part, (*path, key))


def keyed_parts(node: pytree.NodeDef, value: Any) -> list[tuple[Any, Any]]:
    """The parts of a value, with pytree's keys; with numbers where its class was registered without."""
    if node.flatten_with_keys_fn is None:
        return [(pytree.SequenceKey(index), part) for index, part in enumerate(node.flatten_fn(value)[0])]
    return node.flatten_with_keys_fn(value)[0]


def reached(
    starts: Iterable[Any],
    following: Callable[[Any], Iterable[Any]],
    key: Callable[[Any], Any] = lambda one: one,
) -> Iterator[Any]:
    """Of a graph of any things, the starts and all that follows of them; those of one ``key`` once."""
    todo, seen = list(starts), set[Any]()
    while todo:
        one = todo.pop()
        if (known := key(one)) not in seen:
            seen.add(known)
            yield one
            todo += following(one)


@contextmanager
def torch_knows() -> Iterator[None]:
    """A block, under the capture lock, in which torch looks into the same classes."""
    with ExitStack() as stack:
        _tracing.append(stack)
        stack.callback(_tracing.remove, stack)
        tell_torch()
        yield


def tell_torch() -> None:
    """Inside a block of :func:`torch_knows`, what has become known since it began."""
    tell_pytree(dict(_own), _tracing[-1])


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """Stands in a result for an object that the caller has passed in.

    Attributes:
        name: of the argument.
        path: from the argument to the object, in pytree's keys.
    """

    name: str
    path: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return self.name + pytree.keystr(self.path)


@dataclasses.dataclass(frozen=True, slots=True)
class Returned:
    """What a trace returns where the call changes objects that it is given.

    Attributes:
        result: of the model.
        changed: by the name of an argument, what became of it: the cache; of any other, pairs of
            a list or dict in it and the contents, or itself where it has what it had.
    """

    result: Any
    changed: dict[str, Any]


def _returned(parts: Iterable[Any], names: Sequence[str]) -> Returned:
    result, *changed = parts
    return Returned(result, dict(zip(names, changed, strict=True)))


know(Given, lambda given: ([], given), lambda _, given: given)
know(Returned, lambda found: ([found.result, *found.changed.values()], tuple(found.changed)), _returned)


def named_arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that an operation is given, by the names that its schema has for them."""
    return {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **kwargs}


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those of an operation's arguments, or of the items of its lists, that it writes to.

    From its schema; BatchNorm and InstanceNorm, whose schemas hide it, by their arguments.
    """
    told = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
    if not told and func not in _UNTOLD_WRITERS:
        return []
    given = named_arguments(func, args, kwargs)
    if told:
        aliases = {one.name: one.alias_info for one in func._schema.arguments}
        names = [name for name, alias in aliases.items() if alias is not None and alias.is_write]
    else:
        flag = _UNTOLD_WRITERS[func]
        names = ["running_mean", "running_var"] if flag is None or given.get(flag) else []
    return [leaf for name in names for leaf in leaves_of(given.get(name)) if leaf is not None]


def memories(*nodes: fx.Node) -> list[int]:
    """The memory of each dense tensor that nodes make."""
    leaves = [leaf for node in nodes for leaf in leaves_of(node.meta.get("val"))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [storage_of(tensor) for tensor in tensors if tensor.layout is torch.strided]


def written_memories(node: fx.Node) -> list[int]:
    """The memory that the operation of a node writes to."""
    written = written_arguments(node.target, node.args, node.kwargs)
    return memories(*(one for one in written if isinstance(one, fx.Node)))


_UNTOLD_WRITERS: dict[Any, str | None] = {
    aten.batch_norm.default: "training",
    aten.instance_norm.default: "use_input_stats",
    aten.native_batch_norm.default: "training",
    aten.cudnn_batch_norm.default: "training",
    aten.miopen_batch_norm.default: "training",
    aten.batch_norm_update_stats.default: None,
    aten.batch_norm_gather_stats.default: None,
    aten.batch_norm_gather_stats_with_counts.default: None,
}
"""What writes to running statistics, of which its schema does not say so; and the flag with which it does."""
