"""An integer that records its uses, to check whether another value gives the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_METHODS = (
    "lt le eq ne gt ge add sub mul truediv floordiv mod divmod pow lshift rshift and or xor radd rsub rmul "
    "rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand ror rxor neg pos abs invert round trunc floor "
    "ceil int float index bool hash str repr format reduce_ex"
)


class GuardedInteger:
    """Replaces an ``int`` in the code of a model, and passes ``isinstance`` checks for it.

    Attributes:
        value: the integer.
        uses: (method, arguments, result) of each use.
    """

    __slots__ = ("uses", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.uses: list[tuple[str, tuple[Any, ...], Any]] = []

    @property
    def __class__(self) -> type:
        return int

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("an integer has one class")

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.value, name)
        self.uses.append(("__getattribute__", (name,), attribute))
        return attribute

    def same_results_for(self, other: int) -> bool:
        """Whether another integer gives the same result in each recorded use."""
        return other == self.value or all(
            isinstance(answer, bool | int | str) and getattr(int, method)(other, *args) == answer
            for method, args, answer in self.uses
        )


def plain(value: Any) -> Any:
    """Return the value of a guarded integer; anything else unchanged."""
    return value.value if type(value) is GuardedInteger else value


def _recorded(method: str) -> Callable[..., Any]:
    def record(self: GuardedInteger, *args: Any) -> Any:
        args = tuple(map(plain, args))
        answer = getattr(int, method)(self.value, *args)
        self.uses.append((method, args, answer))
        return answer

    return record


for _name in _METHODS.split():
    setattr(GuardedInteger, f"__{_name}__", _recorded(f"__{_name}__"))
