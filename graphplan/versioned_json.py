"""JSON text that says what it holds and in which version, so that nothing else is read as it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphplan.errors import PlanError

__all__ = ["Format"]


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
        except json.JSONDecodeError as error:
            raise PlanError(f"this is no JSON: {error}") from error
        return self.checked(data)

    def checked(self, data: Any) -> Mapping[str, Any]:
        """Data that holds what it should; PlanError as :meth:`parse`."""
        if not isinstance(data, dict) or data.get("format") != self.name:
            raise PlanError(f'this JSON holds no {self.noun}: it lacks "format": "{self.name}"')
        if data.get("version") != self.version:
            raise PlanError(
                f"{self.name!r} has version {data.get('version')} here: this graphplan reads {self.version}"
            )
        return data
