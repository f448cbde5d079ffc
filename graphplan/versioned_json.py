"""JSON text with a format name and a version, whose values are checked against type annotations."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from graphplan.errors import PlanError
from graphplan.whole_files import write_whole

_READERS = {
    "graphplan.plan": "Plan",
    "graphplan.cluster_plan": "ClusterPlan",
    "graphplan.measurements": "Measurements",
}
_SEQUENCES = (tuple, Sequence, frozenset)
_hints = cache(get_type_hints)
_INTEGER_BOUND = 1 << 63  # of absolute values, exclusive: sums are made of them


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of JSON text.

    Attributes:
        name: value of the item ``"format"`` in the text.
        version: the only version that is read.
        noun: noun for the text's content, for error messages.
    """

    name: str
    version: int
    noun: str

    def head(self) -> dict[str, Any]:
        """Return the items that identify the format in a text."""
        return {"format": self.name, "version": self.version}

    def parse(self, text: str) -> Mapping[str, Any]:
        """Return the data of a text.

        Raises:
            PlanError: the text is not JSON, or has another format or version.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            if text.endswith(".json"):
                raise PlanError(
                    f"{text!r} is the name of a file: read it with load_json, or pass its text"
                ) from error
            raise PlanError(f"this is not JSON: {error}") from error
        return self.checked(data)

    def checked(self, data: Any) -> Mapping[str, Any]:
        """Return the data if its format and version match; else raise PlanError."""
        if not isinstance(data, dict) or data.get("format") != self.name:
            kind = _READERS.get(str(data.get("format"))) if isinstance(data, dict) else None
            hint = f"; graphplan.{kind} reads it" if kind else ""
            raise PlanError(f'this JSON holds no {self.noun}: it lacks "format": "{self.name}"{hint}')
        if data.get("version") != self.version:
            raise PlanError(
                f"{self.name!r} has version {data.get('version')} here: this graphplan reads {self.version}"
            )
        return data


def encode(value: Any) -> Any:
    """Return data for ``json.dumps``; mappings become lists of pairs, since their keys may be numbers."""
    if isinstance(value, Mapping):
        return [[encode(key), encode(item)] for key, item in value.items()]
    if isinstance(value, tuple):
        return list(map(encode, value))
    return encode_fields(value, fields_but(type(value))) if is_dataclass(value) else value


def fields_but(kind: type, *others: str) -> tuple[str, ...]:
    """Return the names of a dataclass's fields without ``others``."""
    return tuple(field.name for field in fields(kind) if field.name not in others)


def encode_fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return name -> attribute as :func:`encode` writes it; :func:`decode_fields` reads them."""
    return {name: encode(getattr(value, name)) for name in names}


def decode_fields(kind: type, names: Iterable[str], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> field of a dataclass as :func:`decode` reads it; raise KeyError if one is missing."""
    hints = _hints(kind)
    return {name: decode(hints[name], data[name]) for name in names}


class JsonFile:
    """Base class of objects that are written to and read from JSON files."""

    __slots__ = ()

    def to_json(self) -> str:
        """Return the object as JSON text; :meth:`from_json` reads it back."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the object of a JSON text; raise PlanError if the text holds something else."""
        raise NotImplementedError

    def save_json(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file; :meth:`load_json` reads it back."""
        write_whole(path, self.to_json())

    @classmethod
    def load_json(cls, path: str | Path) -> Self:
        """Read a file that :meth:`save_json` wrote.

        Raises:
            PlanError: the file cannot be read, or :meth:`from_json` refuses its text.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{str(path)!r} cannot be read: it is not text") from error
        except PlanError as error:
            raise PlanError(f"{str(path)!r}: {error}") from error


def decode(kind: Any, data: Any) -> Any:
    """Return JSON data as an object of the annotated type, recursively.

    Args:
        kind: a dataclass, ``Mapping``, ``Sequence``, ``tuple`` or ``frozenset`` of such types, a union, a
            ``Literal``, or a plain type. A mapping is read from an object or a list of pairs; a sequence
            becomes a tuple.
        data: as ``json.loads`` returns it.

    Raises:
        TypeError, ValueError: the data is not of this type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(data, dict):
        if unknown := set(data) - set(_hints(kind)):
            raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
        return kind(**decode_fields(kind, data, data))
    if origin in (Union, UnionType) and (members := [member for member in inner if _fits(member, data)]):
        return decode(members[0], data)
    if origin is Mapping and isinstance(data, dict | list):
        pairs = data.items() if isinstance(data, dict) else data
        return {decode(inner[0], key): decode(inner[1], value) for key, value in pairs}
    if origin is tuple and ... not in inner and isinstance(data, list | tuple):
        return tuple(decode(member, item) for member, item in zip(inner, data, strict=True))
    if origin in _SEQUENCES and isinstance(data, list | tuple):
        return (frozenset if origin is frozenset else tuple)(decode(inner[0], item) for item in data)
    if not _fits(kind, data):
        raise TypeError(f"{data!r} is not of type {getattr(kind, '__name__', kind)}")
    return data


def _fits(kind: Any, data: Any) -> bool:
    """Whether data is of a plain type, or a list where a sequence is wanted, whose items are not checked."""
    if kind is int:
        return type(data) is int and -_INTEGER_BOUND < data < _INTEGER_BOUND
    if kind is float:
        return type(data) in (int, float) and math.isfinite(data)
    if get_origin(kind) is Literal:
        return type(data) is str and data in get_args(kind)
    if get_origin(kind) in _SEQUENCES:
        return isinstance(data, list | tuple)
    return kind in (bool, str, NoneType) and isinstance(data, kind)
