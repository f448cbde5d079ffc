"""A plan as a tree: stages, the modules in them, the operations in those.

For a stage that runs ``layers.6.norm``, ``layers.6.attn.q`` and ``layers.6.attn.k``::

    stage 1
      layers.6
        norm      -> one operation
        attn
          q       -> one operation
          k       -> one operation

A module that contains only another module is merged with it. If a group has more children than a person can
look at, consecutive ones are put into runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from graphplan.ir.plan_data import PlanData

MOST_CHILDREN = 96
_MOST_PATHS = 0.8  # share of a model's operations: a prefix of so many paths is not shown


@dataclass(frozen=True, slots=True)
class Group:
    """Operations that belong together.

    Attributes:
        kind: a stage, a module, or a run of siblings.
        label: its name among its siblings (``"self_attn"``).
        path: path of the module; for a run, of the enclosing module.
        operations: names of all operations inside, in order.
        children: the groups and operations directly inside, in order of their first operation.
    """

    kind: Literal["stage", "module", "run"]
    label: str
    path: str
    operations: tuple[str, ...]
    children: tuple[Group | str, ...]


def stage_groups(plan: PlanData) -> tuple[Group, ...]:
    """Return one group for each stage of a plan."""
    paths = {name: operation.module_path for name, operation in plan.graph.operations.items()}
    prefix = _shared_prefix([path for path in paths.values() if path])
    return tuple(
        Group(
            "stage",
            _span([paths[name] for name in stage.operations], prefix) or f"stage {stage.index}",
            "",
            operations=stage.operations,
            children=_opened(_children(stage.operations, "", paths)),
        )
        for stage in plan.stages
    )


def _opened(children: tuple[Group | str, ...]) -> tuple[Group | str, ...]:
    """Replace a single module by its children, repeatedly."""
    while len(children) == 1 and isinstance(children[0], Group):
        children = children[0].children
    return children


def _shared_prefix(paths: Sequence[str]) -> str:
    """Return the prefix of most modules of a model, which says nothing about a stage: ``"model."``."""
    prefix = ""
    while True:
        below = [path[len(prefix) :].split(".") for path in paths if path.startswith(prefix)]
        # a number says nothing without the name before it
        longer = Counter(
            parts[0] for parts in below if len(parts) > 1 and not parts[1].isdigit()
        ).most_common(1)
        if not longer:
            return prefix
        inside = longer[0][1] + paths.count(prefix + longer[0][0])
        if inside < _MOST_PATHS * len(paths):
            return prefix
        prefix += longer[0][0] + "."


def _span(paths: Sequence[str], prefix: str) -> str:
    """Return the first and the last module as text, without the prefix of most modules of the model."""
    named = [path for path in paths if path]
    if not named:
        return ""
    first, last = (_outer(path.removeprefix(prefix)) for path in (named[0], named[-1]))
    return first if first == last else f"{first} … {last}"


def _outer(path: str) -> str:
    """Return the outer part of a path: up to its first number (``"encoder.block.0"``), else two names."""
    parts = path.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), 1)
    return ".".join(parts[: number + 1])


def _children(names: Sequence[str], path: str, paths: dict[str, str]) -> tuple[Group | str, ...]:
    start = len(path) + 1 if path else 0
    inside: dict[tuple[str, str], list[str]] = {}
    for name in names:
        child = paths[name][start:].partition(".")[0]
        own = "" if child else name  # an operation of the module itself is a child of its own
        inside.setdefault((child, own), []).append(name)
    children = [own or _module(child, path, members, paths) for (child, own), members in inside.items()]
    return _in_runs(children, path)


def _module(child: str, path: str, members: Sequence[str], paths: dict[str, str]) -> Group:
    inner_path = f"{path}.{child}" if path else child
    children = _children(members, inner_path, paths)
    if len(children) == 1 and isinstance(children[0], Group) and children[0].kind == "module":
        inner_path, children = children[0].path, children[0].children
    return Group("module", _label(inner_path, path), inner_path, operations=tuple(members), children=children)


def _label(path: str, outer: str) -> str:
    """Return the name of a module inside another one."""
    inside = path[len(outer) + 1 if outer else 0 :]
    # a number says nothing without the name before it
    return f"{outer.rpartition('.')[2]}.{inside}" if outer and inside.partition(".")[0].isdigit() else inside


def _in_runs(children: list[Group | str], path: str) -> tuple[Group | str, ...]:
    while len(children) > MOST_CHILDREN:
        runs = min(MOST_CHILDREN, ceil(len(children) / (MOST_CHILDREN // 2)))
        each = ceil(len(children) / runs)
        children = [_run(children[i : i + each], path) for i in range(0, len(children), each)]
    return tuple(children)


def _run(children: list[Group | str], path: str) -> Group:
    ends = [child if isinstance(child, str) else child.label for child in (children[0], children[-1])]
    names = [n for child in children for n in ((child,) if isinstance(child, str) else child.operations)]
    return Group("run", f"{ends[0]} … {ends[1]}", path, operations=tuple(names), children=tuple(children))
