"""Rebuild results by generated code, instead of by a walk over their structure in each call.

For a model that returns a dict and a tuple in it, the code is::

    def rebuild(r, g):
        return {'logits': r[0], 'hidden': (r[1], None)}

Instances of other classes are made by their pytree ``unflatten_fn``, KV caches by their layout. A cache that
the caller has passed in remains the caller's object, changed as the model would have changed it::

    def rebuild(r, g):
        o0 = g['past_key_values'].__dict__
        o1 = o0['layers'][0].__dict__
        o1['keys'] = r[1]
        o1['values'] = r[2]
        return {'logits': r[0], 'past_key_values': g['past_key_values']}

Tensors that the model stores in attributes are stored in those of its modules::

    def rebuild(r, g):
        n2(r[1])  # the method ``store`` of a StoredPlace
        return r[0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from graphplan.capture.structure import Given, Returned, Stored, node_of
from graphplan.capture.transformers.caches import LayoutPart, is_cache_class, layout_of, tensors_in
from graphplan.errors import InputError
from graphplan.runtime.memory.stored_tensors import StoredPlace

Rebuild = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""(flat results, name -> argument that the call changes) -> the model's result."""


def rebuilder(
    spec: pytree.TreeSpec,
    caches: Mapping[str, LayoutPart] | None = None,
    stored: Sequence[StoredPlace] | None = None,
) -> Rebuild:
    """Return a function from the flat results to the model's result, equal to that of ``tree_unflatten``.

    Args:
        spec: structure of the result, or of a :class:`~graphplan.capture.structure.Returned` if arguments are
            changed.
        caches: name -> layout of each cache that the caller passes in.
        stored: where the model stores tensors, in the order of the structure; None to store nothing.
    """
    return _StructureWriter(stored).function(spec, caches or {})


def cache_layouts(spec: pytree.TreeSpec, names: Iterable[str]) -> dict[str, LayoutPart]:
    """Return name -> layout of each cache among these arguments of a bound call."""
    named = spec.children()[1]
    specs = dict(zip(named.context, named.children(), strict=True))
    return {name: layout_of(specs[name]) for name in names if is_cache_class(specs[name].type)}


class _StructureWriter:
    def __init__(self, stored: Sequence[StoredPlace] | None) -> None:
        self.stored = stored
        self.names: dict[str, Any] = {"make": make, "distinct": _require_distinct}
        self.leaf_count = 0  # number of leaves that the code has read so far
        self.places: dict[Given, tuple[str, str]] = {}  # (variable, expression) of the caller's objects
        self.changed: dict[Given, str] = {}  # code for the caller's objects that the call changes
        self.unchanged: dict[Given, str] = {}  # code for those that it leaves as they are
        self.lines: list[str] = []

    def function(self, spec: pytree.TreeSpec, caches: Mapping[str, LayoutPart]) -> Rebuild:
        if spec.type is Returned:
            result, *changed = spec.children()
            returned = self._structure(result)
            for name, change in zip(spec.context, changed, strict=True):
                if name in caches:
                    self._change(self._changed_object(Given(name)), caches[name], layout_of(change))
                else:
                    for pair in change.children():
                        self._set_contents(*pair.children())
        else:
            returned = self._structure(spec)
        setup = [f"{variable} = {place}" for variable, place in self.places.values()]
        if len(self.changed) + len(self.unchanged) > 1:
            marks = self._name([*self.changed, *self.unchanged])
            objects = ", ".join([*self.changed.values(), *self.unchanged.values()])
            setup.append(f"distinct({marks}, {len(self.changed)}, [{objects}])")
        body = "".join(f"    {line}\n" for line in [*setup, *self.lines, f"return {returned}"])
        exec(f"def rebuild(r, g):\n{body}", self.names)  # only indices, our names, reprs of attribute names
        rebuild: Rebuild = self.names["rebuild"]
        return rebuild

    def _leaf(self) -> str:
        self.leaf_count += 1
        return f"r[{self.leaf_count - 1}]"

    def _name(self, value: Any) -> str:
        name = f"n{len(self.names)}"
        self.names[name] = value
        return name

    def _structure(self, spec: pytree.TreeSpec) -> str:
        if spec.is_leaf():
            return self._leaf()
        if spec.type is Given:
            return self._place(spec.context)
        if spec.type is Stored:
            return self._result_to_store(spec)
        if is_cache_class(spec.type):
            return self._cache_part(layout_of(spec))
        node = node_of(spec.type)
        assert node is not None, f"{spec.type} was registered when this structure was made"
        parts = [self._structure(child) for child in spec.children()]
        if spec.type is tuple:
            return _tuple(parts)
        if spec.type is dict:
            return self._dict(list(spec.context), parts)
        joined = f"[{', '.join(parts)}]"
        if spec.type is list:
            return joined
        return f"{self._name(node.unflatten_fn)}({joined}, {self._name(spec.context)})"

    def _result_to_store(self, spec: pytree.TreeSpec) -> str:
        """Write the lines that store tensors in attributes; return the code for the result."""
        result, *values = map(self._structure, spec.children())
        if self.stored is not None:
            for place, value in zip(self.stored, values, strict=True):
                self.lines.append(f"{self._name(place.store)}({value})")
        return result

    def _place(self, mark: Given) -> str:
        """Return the code for a container of the caller's: a variable, since the call may change its path."""
        if not mark.path:
            return f"g[{mark.name!r}]"
        if mark not in self.places:
            expression = f"{self._name(pytree.key_get)}(g[{mark.name!r}], {self._name(mark.path)})"
            self.places[mark] = f"p{len(self.places)}", expression
        return self.places[mark][0]

    def _changed_object(self, mark: Given) -> str:
        """Return the code for an object of the caller's that the call changes."""
        return self.changed.setdefault(mark, self._place(mark))

    def _set_contents(self, mark: pytree.TreeSpec, contents: pytree.TreeSpec) -> None:
        """Write the lines that replace the contents of a list or dict of the caller's."""
        if contents.type is Given:
            self.unchanged[mark.context] = self._place(mark.context)
            return
        place, after = self._changed_object(mark.context), self._structure(contents)
        if contents.type is list:
            self.lines.append(f"{place}[:] = {after}")
        else:
            self.lines += [f"m = {after}", f"{place}.clear()", f"{place}.update(m)"]

    def _dict(self, keys: Sequence[Any], parts: Sequence[str]) -> str:
        items = (f"{self._name(key)}: {part}" for key, part in zip(keys, parts, strict=True))
        return f"{{{', '.join(items)}}}"

    def _cache_part(self, part: LayoutPart) -> str:
        """Return the code for a part of a cache; all calls share constants."""
        if part.kind == "leaf":
            return self._leaf()
        if part.kind in ("constant", "device"):
            return self._name(part.value)
        device = _device(part, self.leaf_count)
        parts = [self._cache_part(p) for p in part.parts]
        if part.kind == "mapping":
            items = self._dict(part.keys, parts)
            return items if part.cls is dict else f"{self._name(part.cls)}({items})"
        if part.kind == "object":
            parts = [
                device if p.kind == "device" else text for p, text in zip(part.parts, parts, strict=True)
            ]
            return f"make({self._name(part.cls)}, {self._dict(part.keys, parts)})"
        joined = f"[{', '.join(parts)}]"
        if part.cls is list or part.cls is tuple:
            return joined if part.cls is list else _tuple(parts)
        return f"{self._name(part.cls)}({'*' if hasattr(part.cls, '_fields') else ''}{joined})"

    def _change(self, place: str, before: LayoutPart, after: LayoutPart) -> None:
        """Write the lines that change the object at ``place`` to its state after the call."""
        if not after.has_leaves and before == after:
            return
        if _changes_in_place(before, after) and after.kind == "object":
            state = f"o{len(self.lines)}"
            self.lines.append(f"{state} = {place}.__dict__")
            old_parts, device = (
                dict(zip(before.keys, before.parts, strict=True)),
                _device(after, self.leaf_count),
            )
            for key, part in zip(after.keys, after.parts, strict=True):
                self._change_attribute(f"{state}[{key!r}]", old_parts.get(key), part)
            if device != "None":
                names = [k for k, part in zip(after.keys, after.parts, strict=True) if part.kind == "device"]
                self.lines += [f"{state}[{name!r}] = {device}" for name in names]
        elif _changes_in_place(before, after):
            for index, (old, new) in enumerate(zip(before.parts, after.parts, strict=True)):
                self._change(f"{place}[{index}]", old, new)
        else:
            self.lines.append(f"{place} = {self._cache_part(after)}")

    def _change_attribute(self, place: str, before: LayoutPart | None, after: LayoutPart) -> None:
        if after.kind == "leaf" or (before is None and after.kind != "device"):
            self.lines.append(f"{place} = {self._cache_part(after)}")
        elif before is not None and after.kind != "device":
            self._change(place, before, after)


def _changes_in_place(before: LayoutPart, after: LayoutPart) -> bool:
    """Whether the object stays and its contents change; else it is replaced, as a tuple with new items is."""
    if not after.has_leaves and before == after:
        return True
    if before.kind != after.kind or before.cls is not after.cls:
        return False
    if after.kind != "sequence":
        return after.kind == "object"
    same_length = len(before.parts) == len(after.parts)
    if issubclass(after.cls, list) or not same_length:
        return same_length
    return issubclass(after.cls, tuple) and all(map(_changes_in_place, before.parts, after.parts))


def _device(part: LayoutPart, taken: int) -> str:
    """Return the code for the device of an object's first tensor; ``taken`` leaves precede the object."""
    first = next((index for index, is_tensor in enumerate(tensors_in(part), taken) if is_tensor), None)
    return "None" if first is None else f"r[{first}].device"


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)},)" if parts else "()"


def _require_distinct(marks: Sequence[Given], changed: int, objects: Sequence[Any]) -> None:
    """Raise InputError if one of the first ``changed`` objects, which the call changes, is passed twice."""
    first_index: dict[int, int] = {}
    for index, value in enumerate(objects):
        if first_index.setdefault(id(value), index) < min(changed, index):
            raise InputError(
                f"{marks[first_index[id(value)]]} and {marks[index]} are one object, and the model writes to "
                "it: pass a copy"
            )


def make(cls: Any, state: dict[str, Any]) -> Any:
    """Return an instance with these attributes, without a call of ``__init__``."""
    instance = cls.__new__(cls)
    instance.__dict__.update(state)
    return instance
