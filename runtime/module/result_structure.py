"""Results rebuilt by generated code, instead of by a walk over their structure at each call.

For a model that returns a dict and a tuple in it, the code is::

    def rebuild(r, g):
        return {'logits': r[0], 'hidden': (r[1], None)}

Classes that the structure knows nothing about are made by the function that pytree has for them. Caches are
made by their layout. A cache that the caller has passed in is the caller's own, changed as the model would
have changed it::

    def rebuild(r, g):
        o0 = g['past_key_values'].__dict__
        o1 = o0['layers'][0].__dict__
        o1['keys'] = r[1]
        o1['values'] = r[2]
        return {'logits': r[0], 'past_key_values': g['past_key_values']}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from graphplan.capture.structure import Given, Returned, node_of
from graphplan.capture.transformers.caches import LayoutPart, is_cache_class, layout_of, tensors_in
from graphplan.errors import InputError

Rebuild = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""From the flat results, and the arguments that are changed, by name, to what the model returns."""


def rebuilder(spec: pytree.TreeSpec, given: Mapping[str, LayoutPart] | None = None) -> Rebuild:
    """A function from the flat results to what the model returns: what ``tree_unflatten`` makes of them.

    Args:
        spec: of the result; of a :class:`~graphplan.capture.structure.Returned`, where some are changed.
        given: the layout of each cache that the caller passes in.
    """
    return _StructureWriter().function(spec, given or {})


def given_layouts(spec: pytree.TreeSpec, names: Iterable[str]) -> dict[str, LayoutPart]:
    """The layout of each cache that the caller passes in: of those of these arguments of a bound call."""
    named = spec.children()[1]
    specs = dict(zip(named.context, named.children(), strict=True))
    return {name: layout_of(specs[name]) for name in names if is_cache_class(specs[name].type)}


class _StructureWriter:
    def __init__(self) -> None:
        self.names: dict[str, Any] = {"make": make, "distinct": _require_distinct}
        self.taken = 0  # leaves
        self.places: dict[Given, tuple[str, str]] = {}  # variables, and the code that leads to them
        self.changed: dict[Given, str] = {}  # the code for objects of the caller's that the call changes
        self.kept: dict[Given, str] = {}  # and for those beside them
        self.lines: list[str] = []

    def function(self, spec: pytree.TreeSpec, given: Mapping[str, LayoutPart]) -> Rebuild:
        if spec.type is Returned:
            result, *changed = spec.children()
            returned = self._structure(result)
            for name, change in zip(spec.context, changed, strict=True):
                if name in given:
                    self._change(self._changed_at(Given(name)), given[name], layout_of(change))
                else:
                    for pair in change.children():
                        self._put(*pair.children())
        else:
            returned = self._structure(spec)
        first = [f"{variable} = {place}" for variable, place in self.places.values()]
        if len(self.changed) + len(self.kept) > 1:
            marks = self._name([*self.changed, *self.kept])
            objects = ", ".join([*self.changed.values(), *self.kept.values()])
            first.append(f"distinct({marks}, {len(self.changed)}, [{objects}])")
        body = "".join(f"    {line}\n" for line in [*first, *self.lines, f"return {returned}"])
        exec(f"def rebuild(r, g):\n{body}", self.names)  # the text is ours: indices, and names of objects
        made: Rebuild = self.names["rebuild"]
        return made

    def _leaf(self) -> str:
        self.taken += 1
        return f"r[{self.taken - 1}]"

    def _name(self, value: Any) -> str:
        name = f"n{len(self.names)}"
        self.names[name] = value
        return name

    def _structure(self, spec: pytree.TreeSpec) -> str:
        if spec.is_leaf():
            return self._leaf()
        if spec.type is Given:
            return self._place(spec.context)
        if is_cache_class(spec.type):
            return self._made(layout_of(spec))
        node = node_of(spec.type)
        assert node is not None, f"{spec.type} was known when this structure was made"
        parts = [self._structure(child) for child in spec.children()]
        if spec.type is tuple:
            return _tuple(parts)
        if spec.type is dict:
            return self._dict(list(spec.context), parts)
        joined = f"[{', '.join(parts)}]"
        if spec.type is list:
            return joined
        return f"{self._name(node.unflatten_fn)}({joined}, {self._name(spec.context)})"

    def _place(self, mark: Given) -> str:
        """The code for a container of the caller's: a variable, since what leads to it may change."""
        if not mark.path:
            return f"g[{mark.name!r}]"
        if mark not in self.places:
            found = f"{self._name(pytree.key_get)}(g[{mark.name!r}], {self._name(mark.path)})"
            self.places[mark] = f"p{len(self.places)}", found
        return self.places[mark][0]

    def _changed_at(self, mark: Given) -> str:
        """The code for an object of the caller's that the call changes."""
        return self.changed.setdefault(mark, self._place(mark))

    def _put(self, mark: pytree.TreeSpec, contents: pytree.TreeSpec) -> None:
        """Write the lines that give a list or dict of the caller's other contents."""
        if contents.type is Given:
            self.kept[mark.context] = self._place(mark.context)
            return
        place, made = self._changed_at(mark.context), self._structure(contents)
        if contents.type is list:
            self.lines.append(f"{place}[:] = {made}")
        else:
            self.lines += [f"m = {made}", f"{place}.clear()", f"{place}.update(m)"]

    def _dict(self, keys: Sequence[Any], parts: Sequence[str]) -> str:
        items = (f"{self._name(key)}: {part}" for key, part in zip(keys, parts, strict=True))
        return f"{{{', '.join(items)}}}"

    def _made(self, part: LayoutPart) -> str:
        """The code for a part of a cache; what cannot change is shared by all calls."""
        if part.kind == "leaf":
            return self._leaf()
        if part.kind in ("constant", "device"):
            return self._name(part.value)
        device = _device(part, self.taken)
        parts = [self._made(p) for p in part.parts]
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
        """Write the lines that make of the object at ``place`` what it is after the call."""
        if not after.has_leaves and before == after:
            return
        if _changes_in_place(before, after) and after.kind == "object":
            state = f"o{len(self.lines)}"
            self.lines.append(f"{state} = {place}.__dict__")
            own, device = dict(zip(before.keys, before.parts, strict=True)), _device(after, self.taken)
            for key, part in zip(after.keys, after.parts, strict=True):
                self._changed_in(f"{state}[{key!r}]", own.get(key), part)
            if device != "None":
                names = [k for k, part in zip(after.keys, after.parts, strict=True) if part.kind == "device"]
                self.lines += [f"{state}[{name!r}] = {device}" for name in names]
        elif _changes_in_place(before, after):
            for index, (old, new) in enumerate(zip(before.parts, after.parts, strict=True)):
                self._change(f"{place}[{index}]", old, new)
        else:
            self.lines.append(f"{place} = {self._made(after)}")

    def _changed_in(self, place: str, before: LayoutPart | None, after: LayoutPart) -> None:
        """Write the lines for an attribute."""
        if after.kind == "leaf" or (before is None and after.kind != "device"):
            self.lines.append(f"{place} = {self._made(after)}")
        elif before is not None and after.kind != "device":
            self._change(place, before, after)


def _changes_in_place(before: LayoutPart, after: LayoutPart) -> bool:
    """Whether what is there becomes what it is after the call, and need not be replaced: as a tuple must."""
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
    """The code for the device of an object: that of its first tensor, before which leaves are ``taken``."""
    first = next((index for index, is_tensor in enumerate(tensors_in(part), taken) if is_tensor), None)
    return "None" if first is None else f"r[{first}].device"


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)},)" if parts else "()"


def _require_distinct(marks: Sequence[Given], changed: int, objects: Sequence[Any]) -> None:
    """Raise InputError where one of the first objects, which the call changes, is another of them too."""
    first: dict[int, int] = {}
    for index, value in enumerate(objects):
        if first.setdefault(id(value), index) < min(changed, index):
            raise InputError(
                f"{marks[first[id(value)]]} and {marks[index]} are one object, and the model writes to it: "
                "pass a copy"
            )


def make(cls: Any, state: dict[str, Any]) -> Any:
    """An object with these attributes, which nothing has initialised."""
    made = cls.__new__(cls)
    made.__dict__.update(state)
    return made
