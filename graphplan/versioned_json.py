"""JSON text that says what it holds and in which version, and whose values have the types they should."""

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
_INTEGERS = 1 << 63  # below which, and above minus which, sums are made of them


@dataclass(frozen=True, slots=True)
class Format:
    """What a text holds.

    Attributes:
        name: in the text.
        version: the only one that is read.
        noun: of what it holds, for people.
    """

    name: str
    version: int
    noun: str

    def head(self) -> dict[str, Any]:
        """The items by which data is known again."""
        return {"format": self.name, "version": self.version}

    def parse(self, text: str) -> Mapping[str, Any]:
        """The data of a text.

        Raises:
            PlanError: it is no JSON, holds something else, or another version.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            if text.endswith(".json"):
                raise PlanError(
                    f"{text!r} is the name of a file: read it with load_json, or pass its text"
                ) from error
            raise PlanError(f"this is no JSON: {error}") from error
        return self.checked(data)

    def checked(self, data: Any) -> Mapping[str, Any]:
        """Data that holds what it should; PlanError as :meth:`parse`."""
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
    """What ``json.dumps`` takes and :func:`decode` reads: a mapping as pairs, as its keys may be numbers."""
    if isinstance(value, Mapping):
        return [[encode(key), encode(one)] for key, one in value.items()]
    if isinstance(value, tuple):
        return list(map(encode, value))
    return encode_fields(value, fields_but(type(value))) if is_dataclass(value) else value


def fields_but(kind: type, *others: str) -> tuple[str, ...]:
    """The names of a dataclass's fields, but for these."""
    return tuple(each.name for each in fields(kind) if each.name not in others)


def encode_fields(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """These attributes, each as :func:`encode` writes it; :func:`decode_fields` reads them."""
    return {name: encode(getattr(value, name)) for name in names}


def decode_fields(kind: type, names: Iterable[str], data: Mapping[str, Any]) -> dict[str, Any]:
    """These fields of a dataclass, each as :func:`decode` reads it; KeyError where one is missing."""
    hints = _hints(kind)
    return {name: decode(hints[name], data[name]) for name in names}


class JsonFile:
    """What has a form as JSON text, as a file."""

    __slots__ = ()

    def to_json(self) -> str:
        """All of it as JSON text."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read it back; PlanError where the text holds something else."""
        raise NotImplementedError

    def save_json(self, path: str | Path) -> None:
        """Write :meth:`to_json` to a file; :meth:`load_json` reads it back."""
        write_whole(path, self.to_json())

    @classmethod
    def load_json(cls, path: str | Path) -> Self:
        """Read what :meth:`save_json` wrote.

        Raises:
            PlanError: it cannot be read, or :meth:`from_json` refuses its text; the error names it.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{str(path)!r} cannot be read: it is no text") from error
        except PlanError as error:
            raise PlanError(f"{str(path)!r}: {error}") from error


def decode(kind: Any, data: Any) -> Any:
    """JSON data as what a type annotation says, all the way down.

    Args:
        kind: a dataclass, ``Mapping``, ``Sequence``, ``tuple`` or ``frozenset`` of others, a union, a
            ``Literal``, or a plain type. A mapping is an object, or a list of pairs; a sequence becomes a
            tuple.
        data: as ``json.loads`` returns it.

    Raises:
        TypeError, ValueError: it is something else.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(data, dict):
        if unknown := set(data) - set(_hints(kind)):
            raise TypeError(f"{kind.__name__} has no {min(unknown)!r}")
        return kind(**decode_fields(kind, data, data))
    if origin in (Union, UnionType) and (members := [one for one in inner if _is_one(one, data)]):
        return decode(members[0], data)
    if origin is Mapping and isinstance(data, dict | list):
        pairs = data.items() if isinstance(data, dict) else data
        return {decode(inner[0], key): decode(inner[1], value) for key, value in pairs}
    if origin is tuple and ... not in inner and isinstance(data, list | tuple):
        return tuple(decode(one, item) for one, item in zip(inner, data, strict=True))
    if origin in _SEQUENCES and isinstance(data, list | tuple):
        return (frozenset if origin is frozenset else tuple)(decode(inner[0], item) for item in data)
    if not _is_one(kind, data):
        raise TypeError(f"{data!r} is no {getattr(kind, '__name__', kind)}")
    return data


def _is_one(kind: Any, data: Any) -> bool:
    """Whether data may be of a member of a union, or is of a plain type."""
    if kind is int:
        return type(data) is int and -_INTEGERS < data < _INTEGERS
    if kind is float:
        return type(data) in (int, float) and math.isfinite(data)
    if get_origin(kind) is Literal:
        return type(data) is str and data in get_args(kind)
    if get_origin(kind) in _SEQUENCES:
        return isinstance(data, list | tuple)
    return kind in (bool, str, NoneType) and isinstance(data, kind)
