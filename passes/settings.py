"""What is settled before a search: where the largest weights live, how accelerators divide their memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from graphplan.device import DeviceKey
from graphplan.passes.beam import Beam, StreamRing
from graphplan.passes.evaluate import Problem
from graphplan.passes.frontier import Frontier
from graphplan.passes.leads import Case, Leads
from graphplan.passes.limits import Limits
from graphplan.passes.residence import cpu_key
from graphplan.passes.shares import Shares
from graphplan.passes.spread import may_stream

__all__ = ["Setting", "largest_homes", "make_settings", "movable_weights", "settled_problems"]

Floats = npt.NDArray[np.float64]

_ANCHOR = 0.08  # of the largest room: a weight from which on its home is chosen first
_WORTH = 0.01  # of the most that an operation of a unit reads, from which another is worth a copy of its own
_ANCHORS = 3  # whose homes are chosen, at most
_HOMES = 9  # choices of these, at most
_ALIKE = 2  # settings with the same homes, and the same rings everywhere
_SIZES = 4  # of slots that are tried
_SLOTS = (2, 1)
_SINGLE = 3  # accelerators up to which each has settings of its own
_FEWEST = 6  # ways to divide memory that are bounded in any case
_EFFORT = 200_000  # of these, times operations and devices
_LEVELS = 6  # of activations that are tried
_APART = 1.5  # times a size is the next smaller one
_WIDE_SLOT = 0.25  # of the smallest room: slots are not larger


@dataclass(frozen=True, slots=True)
class Setting:
    """What is settled before a search.

    Attributes:
        problem: with the homes of the largest weights.
        leads: of its shares, with their frontier.
        movable: (items,) bytes of weights that may be brought.
        settled: (items,) bytes of those that are brought in any case: the CPU keeps them.
        needs: (devices, steps) bytes beside the weights while a step runs, as far as is known.
        rings: for each device of the frontier.
        levels: (devices,) bytes beside the weights that each may need.
        bound: seconds that no placement of this setting goes below.
    """

    problem: Problem
    leads: Leads
    movable: Floats
    settled: Floats
    needs: Floats
    rings: tuple[StreamRing | None, ...]
    levels: tuple[float, ...]
    bound: float

    @property
    def frontier(self) -> Frontier:
        """Whose devices and steps these are."""
        return self.leads.frontier

    @property
    def shape(self) -> Hashable:
        """Equal for settings with the same homes, rings and levels, of those that are made together."""
        return id(self.leads), self.rings, self.levels

    @property
    def case(self) -> Case:
        """The sizes of this setting."""
        rows = self.leads.rows
        rings = (0 if ring is None else ring.slots * ring.nbytes for ring in (self.rings[d] for d in rows))
        highest = (max(self.leads.needs(row), default=0.0) for row in range(len(rows)))
        needs = (min(self.levels[d], most) for d, most in zip(rows, highest, strict=True))
        return Case(tuple((float(n), n + 1.0) for n in rings), tuple((n, n + 1.0) for n in needs))

    def others(self) -> Iterator[Setting]:
        """The same, one accelerator's memory divided otherwise; their bounds are not known."""
        sizes = _slot_sizes(self.movable, _WIDE_SLOT * float(self.leads.room.min()))
        for d in self.leads.rows:
            for level in _levels(self.frontier, d):
                if level != min(self.levels[d], _levels(self.frontier, d)[0]):
                    yield replace(self, levels=(*self.levels[:d], level, *self.levels[d + 1 :]), bound=0.0)
            own = self.rings[d]
            for nbytes, slots in product(sizes, (*_SLOTS, _SLOTS[0] + 1)):
                if own is None or (slots, nbytes) == (own.slots, own.nbytes):
                    continue
                if slots * nbytes > self.problem.growth.get(self.frontier.devices[d], np.inf):
                    continue
                ring = replace(own, slots=slots, nbytes=nbytes)
                yield replace(self, rings=(*self.rings[:d], ring, *self.rings[d + 1 :]), bound=0.0)

    def need(self, device: int, operation: str) -> float:
        """Bytes beside the weights while an operation runs, as far as is known."""
        items = self.frontier.shares.items
        steps = (i for i, s in enumerate(self.frontier.steps) if operation in items[s.variable].members)
        return max((float(self.needs[device, i]) for i in steps), default=0.0)


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a device divides its memory: slots of a ring, and what activations may need."""

    slots: int
    nbytes: int
    level: float


_Shapes = tuple[_Shape, ...]


def make_settings(problem: Problem, limits: Limits) -> list[Setting]:
    """The most promising first; for each choice of homes, a few."""
    accelerators = [spec for spec in problem.topology.devices if spec.is_accelerator]
    shares = Shares(replace(problem, offload=False))
    brought = np.maximum(_movable(problem, shares), _settled_bytes(problem, shares))
    sizes = _slot_sizes(brought, _WIDE_SLOT * min(spec.room for spec in accelerators))
    if not sizes:
        return []
    found: list[Setting] = []
    for homes in _unlike(shares, _homes(problem, _anchors(problem, shares, max(sizes)))):
        settled = _settle(problem, homes)
        if settled is not None and not limits.over:
            found += _divisions(settled, Leads(Shares(settled)), sizes, limits)
    return sorted(found, key=lambda setting: setting.bound)


def largest_homes(problem: Problem) -> Iterator[dict[str, DeviceKey]]:
    """Every choice of homes for the largest weights; of devices that nothing tells apart, the first."""
    shares = Shares(replace(problem, offload=False))
    yield from _unlike(shares, _homes(problem, _anchors(problem, shares, 0)[:1]))


def settled_problems(problem: Problem) -> Iterator[Problem]:
    """The problem with each choice of homes for its largest weights."""
    shares = Shares(replace(problem, offload=False))
    for homes in _homes(problem, _anchors(problem, shares, 0)):
        settled = _settle(problem, homes)
        if settled is not None:
            yield replace(settled, offload=problem.offload)


# -- homes ----------------------------------------------------------------------------------------


def _anchors(problem: Problem, shares: Shares, slot: int) -> list[str]:
    """Weights too large for a slot that fill much of an accelerator, the largest first."""
    graph = problem.graph
    rooms = [spec.room for spec in problem.topology.devices if spec.is_accelerator]
    least = max(slot, _ANCHOR * max(rooms))
    members = (member for item in shares.items for member in item.members)
    read = dict.fromkeys(name for member in members for name in graph.operations[member].inputs)
    weights = (graph.weights[name] for name in read if name in graph.weights)
    large = [w for w in weights if w.nbytes > least and w.name not in problem.fixed_weights]
    return [w.name for w in sorted(large, key=lambda w: -w.nbytes)[:_ANCHORS]]


def _homes(problem: Problem, anchors: list[str]) -> Iterator[dict[str, DeviceKey]]:
    """Ways to give each of these a home that has room for it."""
    devices = [spec for spec in problem.topology.devices if spec.computes]
    while anchors and len(devices) ** len(anchors) > _HOMES:
        anchors = anchors[:-1]
    for chosen in product([spec.key for spec in devices], repeat=len(anchors)):
        taken: dict[DeviceKey, int] = defaultdict(int)
        for name, key in zip(anchors, chosen, strict=True):
            taken[key] += problem.graph.weights[name].nbytes
        if all(taken[spec.key] <= spec.room for spec in devices):
            yield dict(zip(anchors, chosen, strict=True))


def _unlike(shares: Shares, choices: Iterator[dict[str, DeviceKey]]) -> Iterator[dict[str, DeviceKey]]:
    """Those in which devices that nothing tells apart come in order."""
    kinds = [kind.keys for kind in shares.kinds]
    for homes in choices:
        used = {kind: [key for key in dict.fromkeys(homes.values()) if key in kind] for kind in kinds}
        if all(kind[: len(keys)] == tuple(keys) for kind, keys in used.items()):
            yield homes


def _settle(problem: Problem, homes: dict[str, DeviceKey]) -> Problem | None:
    """The problem with these homes, which are where these weights are read; None where that may not be."""
    graph, allowed = problem.graph, dict(problem.allowed)
    for name, home in homes.items():
        for reader in graph.readers.get(name, ()):
            allowed[reader] = allowed.get(reader, frozenset({home})) & {home}
            if not allowed[reader]:
                return None
    fixed = {**problem.fixed_weights, **homes}
    return replace(problem, offload=False, fixed_weights=fixed, allowed=allowed)


# -- weights that may be brought ------------------------------------------------------------------


def movable_weights(problem: Problem, shares: Shares, item: int) -> list[str]:
    """The weights of a unit that only it reads and that may be streamed.

    Those of one operation share a copy; an operation with few of them is not worth another.
    """
    graph = problem.graph
    movable = {
        member: [w for w in dict.fromkeys(graph.operations[member].inputs) if _is_movable(problem, w)]
        for member in shares.items[item].members
    }
    nbytes = {member: sum(graph.weights[w].nbytes for w in names) for member, names in movable.items()}
    least = _WORTH * max(nbytes.values(), default=0)
    return [w for member, names in movable.items() if nbytes[member] >= least for w in names]


def _is_movable(problem: Problem, name: str) -> bool:
    weight = problem.graph.weights.get(name)
    return weight is not None and may_stream(problem, weight) and _read_once(problem, name)


def _read_once(problem: Problem, name: str) -> bool:
    return len(problem.graph.readers.get(name, ())) == 1


def _movable(problem: Problem, shares: Shares) -> Floats:
    """(items,) bytes of the weights of each unit that may be brought."""
    found = np.zeros(len(shares.items))
    weights = problem.graph.weights
    for unit in range(shares.units):
        sizes = [weights[name].nbytes for name in movable_weights(problem, shares, unit)]
        found[unit] = min(float(sum(-(-size // 512) * 512 for size in sizes)), float(shares.nbytes[unit]))
    return found


def _settled_bytes(problem: Problem, shares: Shares) -> Floats:
    """(items,) bytes of the streamed weights of each unit that the CPU keeps in any case."""
    graph, cpu = problem.graph, cpu_key(problem.topology)
    found = np.zeros(len(shares.items))
    for unit in range(shares.units):
        members = shares.items[unit].members
        names = dict.fromkeys(name for member in members for name in graph.operations[member].inputs)
        kept = (n for n in names if n in graph.streamable and problem.fixed_weights.get(n) == cpu)
        found[unit] = sum(graph.weights[name].nbytes for name in kept)
    return found


# -- how memory is divided ------------------------------------------------------------------------


def _divisions(problem: Problem, leads: Leads, sizes: list[int], limits: Limits) -> list[Setting]:
    """Settings with the same ring everywhere, and the best of them changed device by device."""
    frontier = leads.frontier
    movable, settled = _movable(problem, frontier.shares), _settled_bytes(problem, frontier.shares)
    needs = np.array([step.needs for step in frontier.steps], dtype=float).T
    known: dict[_Shapes, Setting] = {}
    most = max(_FEWEST, _EFFORT // (frontier.count * len(frontier.steps)))

    def bound(chosen: _Shapes) -> float:
        if chosen not in known:
            if known and (limits.over or len(known) >= most):
                return np.inf  # there is no time to know better
            pairs = zip(frontier.devices, chosen, strict=True)
            rings = tuple(_ring(problem, key, shape) for key, shape in pairs)
            levels = tuple(shape.level for shape in chosen)
            least = Beam(frontier, rings, movable, settled, needs, np.array(levels)).bound
            known[chosen] = Setting(problem, leads, movable, settled, needs, rings, levels, least)
        return known[chosen].bound

    def change(shapes: _Shapes, devices: Sequence[int], new: Callable[[_Shape], _Shape]) -> _Shapes:
        return tuple(new(shape) if d in devices else shape for d, shape in enumerate(shapes))

    best: _Shapes = tuple(_Shape(_SLOTS[0], sizes[0], np.inf) for _ in frontier.devices)
    accelerators = [d for d, key in enumerate(frontier.devices) if problem.topology[key].is_accelerator]
    groups = [[d] for d in accelerators] if len(accelerators) <= _SINGLE else _alike(frontier, accelerators)
    for group in groups:
        levels = [partial(_with_level, level=level) for level in _levels(frontier, group[0])]
        best = min((change(best, group, level) for level in levels), key=bound)
    rings = [partial(_with_ring, slots=slots, nbytes=nbytes) for nbytes in sizes for slots in _SLOTS]
    alike = sorted((change(best, accelerators, ring) for ring in rings), key=bound)
    best = alike[0]
    for group in groups:
        best = min((change(best, group, ring) for ring in rings), key=bound)
    found = [known[shapes] for shapes in dict.fromkeys([*alike[:_ALIKE], best]) if shapes in known]
    return [setting for setting in found if np.isfinite(setting.bound)]


def _alike(frontier: Frontier, devices: list[int]) -> list[list[int]]:
    """The devices, those together that nothing tells apart."""
    kinds: dict[int, list[int]] = defaultdict(list)
    for d in devices:
        kinds[int(frontier.alike[d])].append(d)
    return list(kinds.values())


def _with_level(shape: _Shape, level: float) -> _Shape:
    return replace(shape, level=level)


def _with_ring(shape: _Shape, slots: int, nbytes: int) -> _Shape:
    return replace(shape, slots=slots, nbytes=nbytes)


def _levels(frontier: Frontier, device: int) -> list[float]:
    """Bytes beside the weights that an accelerator may need, the most first."""
    return _apart(np.array([float(step.needs[device]) for step in frontier.steps]), _LEVELS)


def _slot_sizes(movable: Floats, most: float) -> list[int]:
    """A few sizes of slots: that of the largest weight, and some that are clearly smaller."""
    return [int(size) for size in _apart(movable[(movable > 0) & (movable <= most)], _SIZES)]


def _apart(values: Floats, count: int) -> list[float]:
    """The largest value, the next that is clearly smaller, and so on."""
    left, chosen = np.unique(values), list[float]()
    while len(left) and len(chosen) < count:
        chosen.append(float(left[-1]))
        left = left[left * _APART <= left[-1]]
    return chosen


def _ring(problem: Problem, key: DeviceKey, shape: _Shape) -> StreamRing | None:
    spec, cpu = problem.topology[key], cpu_key(problem.topology)
    if not spec.is_accelerator or shape.slots * shape.nbytes > problem.growth.get(key, np.inf):
        return None
    assert cpu is not None
    link = problem.topology.link(cpu, key)
    return StreamRing(shape.slots, shape.nbytes, link.bandwidth, link.latency)
