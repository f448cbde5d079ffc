"""An integer that notes what is asked of it, so that another in its place can be known to answer the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_METHODS = (
    "lt le eq ne gt ge add sub mul truediv floordiv mod divmod pow lshift rshift and or xor radd rsub rmul "
    "rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand ror rxor neg pos abs invert round trunc floor "
    "ceil int float index bool hash str repr format reduce_ex"
)


class GuardedInteger:
    """Stands for an ``int`` in the code of a model; ``isinstance`` takes it for one.

    Attributes:
        value: the integer.
        answers: the method that was asked, with what, and what it said.
    """

    __slots__ = ("answers", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.answers: list[tuple[str, tuple[Any, ...], Any]] = []

    @property
    def __class__(self) -> type:
        return int

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError("an integer has one class")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.value, name)
        self.answers.append(("__getattribute__", (name,), found))
        return found

    def same_from(self, other: int) -> bool:
        """Whether another integer answers all of it alike."""
        return other == self.value or all(
            isinstance(answer, bool | int | str) and getattr(int, method)(other, *args) == answer
            for method, args, answer in self.answers
        )


def plain(value: Any) -> Any:
    """The integer that is guarded; anything else as it is."""
    return value.value if type(value) is GuardedInteger else value


def _recorded(method: str) -> Callable[..., Any]:
    def asked(self: GuardedInteger, *args: Any) -> Any:
        args = tuple(map(plain, args))
        answer = getattr(int, method)(self.value, *args)
        self.answers.append((method, args, answer))
        return answer

    return asked


for _name in _METHODS.split():
    setattr(GuardedInteger, f"__{_name}__", _recorded(f"__{_name}__"))
