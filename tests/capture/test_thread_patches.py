from __future__ import annotations

import inspect
import threading
import types
from typing import Any

import pytest

from graphplan._compat import private
from graphplan.capture.thread_patches import Patch, patched, unpatched
from graphplan.errors import GraphplanError

HOME = types.ModuleType("home")


def plus(number: int) -> int:
    return number + 1


class Base:
    def method(self, number: int) -> int:
        return number + 1

    @staticmethod
    def static(number: int) -> int:
        return number + 1

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @property
    def value(self) -> int:
        return 1


class Derived(Base):
    pass


def elsewhere(function: Any, *args: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join(10)
    return found[0]


def twice(own: Any) -> Any:
    return lambda *args: 2 * own(*args)


def test_module_function_is_patched_for_one_thread() -> None:
    HOME.plus = plus  # type: ignore[attr-defined]
    with patched((HOME, "plus", twice)):
        assert HOME.plus(1) == 4
        assert elsewhere(lambda: HOME.plus(1)) == 2
        assert inspect.signature(HOME.plus) == inspect.signature(plus)
        assert unpatched(HOME.plus) is plus
        kept = HOME.plus
    assert HOME.plus is plus
    assert kept(1) == 2  # whoever has kept it has the original


@pytest.mark.parametrize("cls", [Base, Derived])
def test_methods_and_properties_are_patched_for_one_thread(cls: Any) -> None:
    before = dict(vars(cls))
    patches = [
        (cls, "method", lambda _: lambda self, number: (type(self).__name__, number)),
        (cls, "static", lambda _: staticmethod(lambda number: -number)),
        (cls, "of_class", lambda _: classmethod(lambda cls: cls.__name__ * 2)),
        (cls, "value", lambda _: property(lambda self: 2)),
    ]

    def seen() -> Any:
        one = cls()
        return one.method(1), cls.static(1), one.static(1), cls.of_class(), one.value

    name = cls.__name__
    with patched(*patches):
        assert seen() == ((name, 1), -1, -1, name * 2, 2)
        assert elsewhere(seen) == (2, 2, 2, name, 1)
    assert dict(vars(cls)) == before


def test_table_entries_are_patched_and_removed() -> None:
    table: dict[str, Any] = {"here": plus}
    with patched(Patch(table, "here", plus, twice(plus)), Patch(table, "new", plus, twice(plus))):
        assert table["here"](1) == table["new"](1) == 4
        assert elsewhere(lambda: table["here"](1) + table["new"](1)) == 4
    assert table == {"here": plus}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_patches_are_restored_after_errors(error: type[BaseException]) -> None:
    HOME.plus = plus  # type: ignore[attr-defined]

    def interrupted() -> None:
        with patched((HOME, "plus", twice)), patched((HOME, "plus", twice)):
            assert HOME.plus(1) == 8
            assert elsewhere(lambda: HOME.plus(1)) == 2
            raise error

    with pytest.raises(error):
        interrupted()
    assert HOME.plus is plus


def test_failed_patch_restores_earlier_patches() -> None:
    HOME.plus = plus  # type: ignore[attr-defined]
    with pytest.raises(TypeError), patched((HOME, "plus", twice), Patch(int, "real", None, None)):
        pass
    assert HOME.plus is plus


def test_missing_private_name_raises_with_tested_versions() -> None:
    with pytest.raises(GraphplanError, match=r"home._gone is not in torch 2\.\S+; .* with torch 2\.11\.0, 2"):
        private(HOME, "_gone", "torch")


def test_two_patches_of_one_attribute_raise() -> None:
    patch = (HOME, "plus", lambda own: own)
    with pytest.raises(AssertionError, match=r"patched twice.*plus"), patched(patch, patch):
        pass
