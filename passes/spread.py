"""Which weights are streamed where an accelerator does not hold all that it reads.

A copy hides behind the operations that run meanwhile, so the streamed weights are spread evenly over the
seconds of the device's operations: of sixty equal blocks of which thirty are streamed, every other one.
Large weights come first, since each copy has its latency; a table of which a few rows are read comes
last, since all of it would be copied. Where copies take little longer than their latency, neighbours are
copied together: what is streamed is then one run of the order, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from graphplan.device import DeviceKey
from graphplan.graph import Graph, Weight
from graphplan.passes.evaluate import Evaluation, Problem, evaluate
from graphplan.passes.residence import cpu_key, reside
from graphplan.passes.segments import SMALL

__all__ = ["fetch_excess", "may_stream"]

_LARGE_BUFFER = 1 << 20  # a smaller one is not worth fetching, and another call may write to it
_PARTS = (2, 8)  # of a typical weight's bytes: what has less than one of them is of the next level
_HUGE = 4  # typical weights' bytes: a slot of a ring for a larger one would take too much
_TABLES = len(_PARTS) + 1  # the level of tables of which few rows are read
_TRIALS = 3  # times to stream more, for a second slot


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The weights that an operation is the first to read, as far as they may be streamed.

    Attributes:
        names: of the weights.
        nbytes: of them together.
        seconds: of the device's operations up to and with this one.
        level: 0 for weights of about the typical size that one operation reads, 1 for smaller ones, 2
            for tiny and for huge ones, 3 for tables of which few rows are read.
    """

    names: tuple[str, ...]
    nbytes: int
    seconds: float
    level: int


def fetch_excess(
    problem: Problem, operations: Mapping[str, DeviceKey], rounds: int = 24
) -> Evaluation | None:
    """Keep weights on the CPU until every accelerator fits; None where that cannot be.

    Args:
        problem: what is placed.
        operations: operation -> device.
        rounds: most placements to try for each kind of candidates.
    """
    found = evaluate(problem, reside(problem, operations))
    cpu = cpu_key(problem.topology)
    excess = {key: over for key, over in found.excess.items() if key != cpu}
    if not excess:
        return found if found.feasible else None
    if cpu is None:
        return None
    candidates = _candidates(problem, found)
    best: Evaluation | None = None
    for level in range(_TABLES + 1):
        allowed = {key: [c for c in listed if c.level <= level] for key, listed in candidates.items()}
        ways = [_spread_evenly]
        if level >= _TABLES - 1 and _is_small(problem, cpu, allowed):
            ways += [_first, _last, _largest]
        for choose in ways:
            spread = _Spread(problem, operations, allowed, rounds, choose).run(excess)
            if spread is not None and (best is None or spread.seconds < best.seconds):
                best = spread
        if best is not None and level == _TABLES - 1:  # a table of which few rows are read is the last resort
            return best
    return best


def _is_small(problem: Problem, cpu: DeviceKey, candidates: Mapping[DeviceKey, Sequence[_Candidate]]) -> bool:
    """Whether most copies would take little longer than their latency."""
    few = total = 0
    for key, listed in candidates.items():
        link = problem.topology.link(cpu, key)
        few += sum(1 for c in listed if c.nbytes < SMALL * link.latency * link.bandwidth)
        total += len(listed)
    return 2 * few > total


class _Spread:
    """Streams more and more of the candidates, until what is left fits."""

    def __init__(
        self,
        problem: Problem,
        operations: Mapping[str, DeviceKey],
        candidates: Mapping[DeviceKey, list[_Candidate]],
        rounds: int,
        choose: Callable[[list[_Candidate], int], list[_Candidate]],
    ) -> None:
        self.problem, self.operations, self.rounds = problem, operations, rounds
        self.choose = choose
        self.candidates = candidates
        self.cpu = cpu_key(problem.topology)

    def run(self, excess: Mapping[DeviceKey, int]) -> Evaluation | None:
        wanted: dict[DeviceKey, int] = dict(excess)
        for _ in range(self.rounds):
            chosen = self._choose(wanted)
            found = self._evaluate(chosen)
            over = {key: nbytes for key, nbytes in found.excess.items() if key != self.cpu}
            if not over:
                return self._with_two_slots(wanted, found) if found.feasible else None
            for key, nbytes in over.items():
                listed = self.candidates.get(key, [])
                taken = [c.nbytes for c in listed if c.names[0] in chosen]
                left = [c.nbytes for c in listed if c.names[0] not in chosen]
                if not left:
                    return None
                wanted[key] = max(wanted.get(key, 0) + nbytes, sum(taken) + min(left))
        return None

    def _with_two_slots(self, wanted: Mapping[DeviceKey, int], found: Evaluation) -> Evaluation:
        """Stream as much more as a second slot takes, where one was all that fitted, if that pays."""
        best = found
        for ring in found.schedule.rings:
            if len(ring.slots) != 1 or len(ring.segments) < 2:
                continue
            more = dict(wanted)
            more[ring.device] = more.get(ring.device, 0) + ring.slots[0]
            for _ in range(_TRIALS):
                trial = self._evaluate(self._choose(more), {ring.device: 2})
                if trial.feasible:
                    best = min(best, trial, key=lambda evaluation: evaluation.seconds)
                    break
                more[ring.device] += trial.excess.get(ring.device, 0)
        return best

    def _evaluate(self, chosen: set[str], slots: Mapping[DeviceKey, int] | None = None) -> Evaluation:
        assignment = reside(self.problem, self.operations, chosen)
        return evaluate(self.problem, replace(assignment, slots=slots or {}))

    def _choose(self, wanted: Mapping[DeviceKey, int]) -> set[str]:
        chosen: set[str] = set()
        for key, nbytes in wanted.items():
            for candidate in self.choose(self.candidates.get(key, []), nbytes):
                chosen.update(candidate.names)
        return chosen


def _spread_evenly(candidates: list[_Candidate], wanted: int) -> list[_Candidate]:
    """Candidates of at least ``wanted`` bytes, if there are as many: as evenly as their places allow."""
    total = max((c.seconds for c in candidates), default=0.0)
    chosen: list[_Candidate] = []
    left: list[_Candidate] = []
    taken = 0
    for candidate in candidates:
        due = wanted * candidate.seconds / total if total else wanted
        if taken + candidate.nbytes / 2 <= due and taken < wanted:
            chosen.append(candidate)
            taken += candidate.nbytes
        else:
            left.append(candidate)
    left.sort(key=lambda candidate: -candidate.nbytes)
    while taken < wanted and left:
        # the smallest that is enough, else the largest
        enough = [i for i, c in enumerate(left) if taken + c.nbytes >= wanted]
        chosen.append(left.pop(enough[-1] if enough else 0))
        taken += chosen[-1].nbytes
    return chosen


def _first(candidates: list[_Candidate], wanted: int) -> list[_Candidate]:
    """The first candidates of at least ``wanted`` bytes."""
    before = accumulate((c.nbytes for c in candidates), initial=0)
    return [candidate for candidate, nbytes in zip(candidates, before, strict=False) if nbytes < wanted]


def _last(candidates: list[_Candidate], wanted: int) -> list[_Candidate]:
    """The last candidates of at least ``wanted`` bytes."""
    return _first(candidates[::-1], wanted)


def _largest(candidates: list[_Candidate], wanted: int) -> list[_Candidate]:
    """The fewest candidates of at least ``wanted`` bytes: each copy has its latency."""
    return _first(sorted(candidates, key=lambda candidate: -candidate.nbytes), wanted)


def _candidates(problem: Problem, found: Evaluation) -> dict[DeviceKey, list[_Candidate]]:
    """For each device, the weights that live there and may be streamed, in the order of their use."""
    graph, topology = problem.graph, problem.topology
    homes = found.schedule.assignment.weights
    device = found.schedule.assignment.operations
    clock: dict[DeviceKey, float] = defaultdict(float)
    listed: dict[DeviceKey, list[_Candidate]] = defaultdict(list)
    seen: set[str] = set()
    sizes: dict[DeviceKey, list[int]] = defaultdict(list)
    for name, key in homes.items():
        if may_stream(problem, graph.weights[name]):
            sizes[key].append(graph.weights[name].nbytes)
    typical = {key: _typical(listed) for key, listed in sizes.items()}
    for operation in graph.operations.values():
        if operation.host_only:
            continue
        key = device[operation.name]
        clock[key] += problem.seconds(operation, topology[key])
        weights = [
            graph.weights[name]
            for name in operation.inputs
            if homes.get(name) == key and name not in seen and may_stream(problem, graph.weights[name])
        ]
        if weights:
            names = tuple(weight.name for weight in weights)
            seen.update(names)
            level = max(_level(graph, weight) for weight in weights)
            nbytes = sum(weight.nbytes for weight in weights)
            level = max(level, sum(1 for part in _PARTS if part * nbytes < typical[key]))
            if nbytes > _HUGE * typical[key]:
                level = max(level, _TABLES - 1)
            listed[key].append(_Candidate(names, nbytes, clock[key], level))
    return listed


def _typical(sizes: list[int]) -> int:
    """The size that as many bytes are in larger weights of as in smaller ones."""
    passed, half = 0, sum(sizes) / 2
    for size in sorted(sizes):
        passed += size
        if passed >= half:
            return size
    return 0


def may_stream(problem: Problem, weight: Weight) -> bool:
    """Whether a weight may live on the CPU and be copied to where it is read at every call."""
    small_buffer = weight.kind == "buffer" and weight.nbytes < _LARGE_BUFFER
    return (
        weight.fetchable
        and weight.nbytes > 0
        and weight.name not in problem.fixed_weights
        and not small_buffer
        and (weight.name in problem.graph.streamable or not problem.streams)
    )


def _level(graph: Graph, weight: Weight) -> int:
    readers = graph.readers.get(weight.name, ())
    if any(2 * graph.operations[r].bytes_accessed < weight.nbytes for r in readers):
        return _TABLES
    return 0 if len(readers) == 1 else _TABLES - 1
