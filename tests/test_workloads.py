from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
from dnn_ideals import colours_and, enumerate_ideals, merge
from dnn_latency import order_start, place, spread, without_free_nodes
from dnn_latency_dp import pareto, solve
from dnn_partitioning import save
from dnn_slices import contiguous_optimum, parts_of
from dnn_tables import Tables, completions
from dnn_throughput import anneal, lower_bound
from dnn_workload import (
    CPU,
    FOLDER,
    InvalidPlacementError,
    Workload,
    from_json,
    inputs,
    latency,
    loads,
    placement_from_json,
    throughput,
    to_json,
)


def workload(
    times: list[tuple[float, float]],
    edges: list[tuple[int, int]],
    cost: list[float],
    size: list[float] | None = None,
    colours: list[int] | None = None,
    limit: float = 100.0,
    accelerators: int = 2,
) -> Workload:
    nodes = [
        {
            "id": 10 + i,
            "cpuLatency": cpu,
            "fpgaLatency": accelerator,
            "size": size[i] if size else 1.0,
            "isBackwardNode": False,
            "supportedOnFpga": 1,
        }
        | ({"colorClass": colours[i]} if colours else {})
        for i, (cpu, accelerator) in enumerate(times)
    ]
    data = {
        "maxSizePerFPGA": limit,
        "maxFPGAs": accelerators,
        "maxCPUs": 1,
        "nodes": nodes,
        "edges": [{"sourceId": 10 + u, "destId": 10 + v, "cost": cost[u]} for u, v in edges],
    }
    return from_json(data, "small")


def diamond(**changes: object) -> Workload:
    # 0 -> 1, 2 -> 3
    return workload(
        [(10, 1), (20, 2), (30, 3), (40, 4)],
        [(0, 1), (0, 2), (1, 3), (2, 3)],
        [0.5, 0.25, 0.125, 9],
        **changes,
    )


def drawn(seed: int) -> Workload:
    """A random graph of at most seven nodes, some of one colour."""
    rng = random.Random(seed)
    n = rng.randint(4, 7)
    edges = [(u, v) for v in range(n) for u in range(v) if rng.random() < 0.4]
    return workload(
        [(rng.choice([0, rng.uniform(1, 20)]), rng.choice([0, rng.uniform(0.5, 3)])) for _ in range(n)],
        edges,
        [rng.choice([0.0, rng.uniform(0, 2)]) for _ in range(n)],
        size=[rng.uniform(0, 4) for _ in range(n)],
        colours=[rng.choice([i, i, max(0, i - 1)]) for i in range(n)],
        limit=rng.uniform(5, 12),
    )


def exhausted(graph: Workload, objective) -> float:
    best = np.inf
    for placement in itertools.product(range(-1, graph.accelerators), repeat=len(graph)):
        try:
            best = min(best, objective(graph, placement))
        except InvalidPlacementError:
            continue
    return best


def test_loads_count_each_value_once_per_accelerator():
    # 0 and 1 on accelerator 0; 2 on 1; 3 on the CPU
    found = loads(diamond(), [0, 0, 1, CPU])
    assert found[0] == 1 + 2 + 0.5 + 0.25  # both values leave
    assert found[1] == 3 + 0.5 + 0.125
    assert found[CPU] == 40
    assert throughput(diamond(), [0, 0, 1, CPU]) == 40
    # both users of node 0 are on one accelerator: one transfer in
    assert loads(diamond(), [CPU, 1, 1, 1])[1] == 2 + 3 + 4 + 0.5


def test_latency_waits_for_all_inputs_of_a_subgraph():
    assert latency(diamond(), [0, 0, 0, 0]) == 10
    assert latency(diamond(), [CPU] * 4) == 10 + 30 + 40
    first = 1 + 2 + 0.5 + 0.25
    second = first + 0.5 + 3 + 0.125
    assert latency(diamond(), [0, 0, 1, CPU]) == second + 40
    # side by side: 1 on the CPU ends at 30, 2 on the accelerator at 10 + 3.625
    assert latency(diamond(), [CPU, CPU, 0, CPU]) == 10 + 20 + 40


def test_circles_between_subgraphs_are_refused():
    with pytest.raises(InvalidPlacementError, match="not contiguous"):
        latency(diamond(), [0, 1, CPU, 0])


def test_memory_and_colours_are_kept():
    with pytest.raises(InvalidPlacementError, match="accelerator 0 holds 4 bytes of 3"):
        throughput(diamond(limit=3.0), [0, 0, 0, 0])
    with pytest.raises(InvalidPlacementError, match="apart from its colour"):
        throughput(diamond(colours=[0, 1, 1, 2]), [0, 0, 1, 1])


@pytest.mark.parametrize("seed", range(12))
def test_latency_equals_exhaustion_on_small_graphs(seed):
    graph = drawn(seed)
    result = place(graph, work=2)
    best = exhausted(graph, latency)
    assert result.latency == latency(graph, result.placement) <= result.start + 1e-9
    assert result.proof.startswith("optimal")
    assert result.latency == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_latency_bounds_do_not_exceed_the_optimum(seed):
    graph = drawn(seed)
    best = exhausted(graph, latency)
    groups = merge(graph, colours_and(graph))
    tables = Tables(groups, enumerate_ideals(groups, 1000))
    # a class whose nodes finish apart on the CPU is slower as one unit, so compare with the merged optimum
    chain = solve(groups, tables.ideals, graph.limit, graph.accelerators)
    assert chain is not None
    assert completions(tables, graph.limit, graph.accelerators)[0, -1] <= chain.latency + 1e-9
    assert latency(graph, spread(graph, groups, chain)) <= chain.latency + 1e-9
    _, rest = without_free_nodes(graph)
    assert exhausted(rest, latency) <= best + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_throughput_is_between_its_bound_and_its_start(seed):
    graph = drawn(seed)
    best = exhausted(graph, throughput)
    parts = parts_of(graph)
    slices = contiguous_optimum(graph, parts, 1000)
    start = parts.spread(slices.devices, len(graph))
    found = parts.spread(anneal(graph, parts, slices.devices, 2000, 0, 0.05), len(graph))
    assert throughput(graph, start) == pytest.approx(slices.load)
    assert lower_bound(graph, parts) <= best + 1e-9
    assert best - 1e-9 <= throughput(graph, found) <= throughput(graph, start)


def test_annealing_finds_the_exchange_that_slices_cannot():
    # a chain of 3, 3, 1, 1: slices give 3 and 5, the best is 4 and 4
    uneven = workload([(90, 3), (90, 3), (90, 1), (90, 1)], [(0, 1), (1, 2), (2, 3)], [0, 0, 0, 0])
    parts = parts_of(uneven)
    slices = contiguous_optimum(uneven, parts, 100)
    assert slices.load == 5
    found = anneal(uneven, parts, slices.devices, 2000, 0, 0.05)
    assert throughput(uneven, parts.spread(found, 4)) == 4 == pytest.approx(lower_bound(uneven, parts))


def test_pareto_keeps_what_nothing_beats():
    rows = np.array([[1, 5, 5], [1, 4, 6], [0, 5, 5], [1, 6, 6], [2, 3, 3]], dtype=float)
    keep, whole = pareto(rows, None)
    assert (sorted(keep), whole) == ([1, 2, 4], True)
    assert pareto(np.array([[0.0, 1, 3], [0, 2, 2], [0, 3, 1]]), 2)[1] is False


def test_written_placements_score_the_same(tmp_path):
    graph = diamond()
    placement = [0, 0, 1, CPU]
    save(tmp_path / "x.json", "throughput", graph, throughput(graph, placement), placement)
    data = json.loads((tmp_path / "x.json").read_text())
    assert data["placement"] == {"10": 0, "11": 0, "12": 1, "13": "cpu"} == to_json(graph, placement)
    assert throughput(graph, placement_from_json(graph, data["placement"])) == data["value"] == 40


@pytest.fixture(scope="module")
def folder() -> Path:
    if not FOLDER.is_dir():
        pytest.skip(f"the dnn-partitioning workloads are not at {FOLDER}")
    return FOLDER


RECORDED = sorted((Path(__file__).parents[1] / "benchmarks/results/dnn_partitioning").glob("*.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: p.stem)
def test_recorded_placements_score_as_recorded(folder, path):
    data = json.loads(path.read_text(encoding="utf-8"))
    (graph,) = [w for w in inputs(folder, data["objective"]) if w.name == data["input"]]
    score = {"latency": latency, "throughput": throughput}[data["objective"]]
    assert score(graph, placement_from_json(graph, data["placement"])) == pytest.approx(
        data["value"], rel=1e-12
    )


def test_contiguous_figures_of_the_peers(folder):
    graphs = {w.name: w for w in inputs(folder, "throughput")}
    for name, figure in (
        ("bert24-layer", 17.790),
        ("bert24_training-layer", 41.746),
        ("resnet50-op", 124.349),
    ):
        parts = parts_of(graphs[name])
        assert contiguous_optimum(graphs[name], parts, 1000).load == pytest.approx(figure, abs=6e-4)
    (bert,) = [w for w in inputs(folder, "latency") if w.name == "bert24-layer"]
    assert latency(bert, order_start(bert)) == pytest.approx(100.219, abs=6e-4)
