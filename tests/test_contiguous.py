"""Contiguous pieces: what they read, need and take, and which are the cheapest."""

from __future__ import annotations

import random
from itertools import combinations, permutations, product

import numpy as np
import pytest
from test_dozen import draw_graph

from graphplan.device import read_max_memory
from graphplan.passes import contiguous
from graphplan.passes.chain import Chain
from graphplan.passes.contiguous import split
from graphplan.passes.evaluate import Problem
from graphplan.passes.piece_tables import PieceTables, piece_seconds, piece_tables
from graphplan.speeds import Speed, with_speeds

Cut = tuple[int, int, object]  # start, end and device of a piece
MODES = [
    {"use_cpu": False, "fetch": False},
    {"use_cpu": True, "fetch": False},
    {"use_cpu": False, "fetch": True},
    {"use_cpu": False, "fetch": False, "balance": True},
]


def drawn(seed: int, most: int = 12) -> tuple[Problem, Chain]:
    """A random graph over one to three unlike accelerators that hold a part of it each."""
    draw = random.Random(seed)
    graph = draw_graph(draw, ties=seed % 2 == 0, least=3, most=most)
    shares = [draw.uniform(0.2, 0.9) for _ in range(draw.randint(1, 3))]
    budgets = {index: int(share * graph.weight_bytes) for index, share in enumerate(shares)}
    topology = read_max_memory({**budgets, "cpu": 1 << 40})
    speeds = {index: Speed(1e13 / 2**index, 5e11 / 2**index) for index in budgets}
    problem = Problem(graph, with_speeds(topology, speeds), "cpu")
    return problem, Chain(graph, topology.devices[0])


def test_tables_are_what_pieces_read_and_need() -> None:
    for seed in range(40):
        _, chain = drawn(seed)
        tables = piece_tables(chain, 400, np.inf, part_groups=False)
        for i, j in combinations(range(len(tables.cuts)), 2):
            start, end = int(tables.cuts[i]), int(tables.cuts[j])
            at = i, j - i - 1
            weights, read_again = _weights(chain, start, end)
            outside = _values_from_outside(chain, start, end)
            assert tables.weights[at] == weights
            assert tables.arriving[at] == read_again + sum(nbytes for nbytes, _, _ in outside)
            assert tables.activations[at] == _most_alive(chain, start, end, outside)


def _weights(chain: Chain, start: int, end: int) -> tuple[int, int]:
    """Bytes of what the piece reads, and of what of that earlier ones read too."""
    graph, seen = chain.graph, set[str]()
    fresh = again = 0
    before = {name for op in chain.operations[:start] for name in op.inputs}
    for op in chain.operations[start:end]:
        for name in op.inputs:
            if name in graph.weights and name not in seen:
                seen.add(name)
                fresh += chain.spec.rounded(graph.weights[name].nbytes)
                again += chain.spec.rounded(graph.weights[name].nbytes) if name in before else 0
    return fresh, again


def _values_from_outside(chain: Chain, start: int, end: int) -> list[tuple[int, int, int]]:
    """(bytes, first reader, last reader anywhere) of values that are copied to the piece."""
    graph = chain.graph
    made = {name for op in chain.operations[start:end] for name in op.outputs}
    found: dict[str, tuple[int, int, int]] = {}
    for index in range(start, end):
        for name in chain.operations[index].inputs:
            if name in graph.values and name not in made and name not in found:
                nbytes = chain.spec.allocated(graph.values[name].copy_bytes)
                found[name] = nbytes, index, min(chain.last[name], chain.count - 1)
    return list(found.values())


def _most_alive(chain: Chain, start: int, end: int, outside: list[tuple[int, int, int]]) -> int:
    alive = [int(chain.workspace[index]) for index in range(start, end)]
    spans = [(int(size), int(birth), int(death)) for birth, death, size in zip(*chain.storages, strict=True)]
    for nbytes, first, last in [*outside, *(s for s in spans if start <= s[1] < end)]:
        for index in range(max(first, start), min(last + 1, end)):
            alive[index - start] += nbytes
    return max(alive)


@pytest.mark.parametrize("mode", MODES)
def test_pieces_are_the_cheapest(mode: dict[str, bool]) -> None:
    compared = 0
    for seed in range(60):
        problem, chain = drawn(seed, most=5 if mode["use_cpu"] else 7)
        pieces = split(chain, problem, **mode)
        least = _cheapest(problem, chain, **mode)
        assert (pieces is None) == np.isinf(least)
        if pieces is not None:
            cuts = [(piece.start, piece.end, piece.device) for piece in pieces]
            assert _seconds(problem, chain, cuts, **mode) == pytest.approx(least, rel=1e-9)
            compared += 1
    assert compared > 10


def _cheapest(problem: Problem, chain: Chain, **mode: bool) -> float:
    """Of every way to cut the order and to give the pieces out."""
    keys = [spec.key for spec in problem.topology.devices if spec.is_accelerator]
    least = np.inf
    for count in range(1, chain.count + 1):
        for inner in combinations(range(1, chain.count), count - 1):
            ends = [*inner, chain.count]
            for given in _orders(keys, count, mode["use_cpu"]):
                pieces = list(zip([0, *inner], ends, given, strict=True))
                least = min(least, _seconds(problem, chain, pieces, **mode))
    return least


def _orders(keys: list[int], count: int, use_cpu: bool) -> set[tuple[object, ...]]:
    if not use_cpu:
        return set(permutations(keys, count))
    some = product([*keys, "cpu"], repeat=count)
    return {given for given in some if all(given.count(key) <= 1 for key in keys)}


def _seconds(
    problem: Problem,
    chain: Chain,
    pieces: list[Cut],
    *,
    use_cpu: bool,
    fetch: bool,
    balance: bool = False,
) -> float:
    tables = piece_tables(chain, 400, np.inf, part_groups=False)
    home = problem.topology["cpu"] if fetch else None
    found = []
    for start, end, key in pieces:
        spec = problem.topology[key]
        each = piece_seconds(chain, tables, spec, spec.room, problem, home if key != "cpu" else None)
        found.append(each[start, end - start - 1])
    return float(max(found) if balance else sum(found))


def test_pieces_that_no_accelerator_holds_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are as wide as the longest piece that fits; what is found is the same."""
    widths = []

    def wide(chain: Chain, limit: int, most: float, *, part_groups: bool) -> PieceTables:
        widths.append(piece_tables(chain, limit, most, part_groups=part_groups).weights.shape[1])
        return piece_tables(chain, limit, np.inf, part_groups=part_groups)

    for seed in range(40):
        problem, chain = drawn(seed, most=40)
        narrow = split(chain, problem, use_cpu=False, fetch=False)
        with monkeypatch.context() as patch:
            patch.setattr(contiguous, "piece_tables", wide)
            assert split(chain, problem, use_cpu=False, fetch=False) == narrow
        assert widths[-1] <= chain.count
    assert sum(widths) < 0.9 * sum(drawn(seed, most=40)[1].count for seed in range(40))
