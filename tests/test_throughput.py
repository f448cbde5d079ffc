"""The benchmark of published throughput workloads: its loads are those of its own definition."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from throughput import FOLDER, KNOWN, Workload, best, costs, loads, optimum, orders, read

ROOT = Path(__file__).parent.parent / FOLDER


def random_workload(seed: int, count: int = 9) -> Workload:
    rng = np.random.default_rng(seed)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    sends = []
    for source in range(count - 1):
        takers = sorted(set(rng.integers(source + 1, count, 2).tolist()))
        graph.add_edges_from((source, taker) for taker in takers)
        backward = rng.integers(0, source + 1, 1).tolist() if rng.random() < 0.3 else []
        sends.append((float(rng.random()), source, tuple(sorted({*takers, *backward} - {source}))))
    fast, size = rng.random(count), rng.random(count)
    return Workload("random", 3, 1, float(size.sum() * 0.6), fast, 5 * fast, size, sends, graph)


@pytest.mark.parametrize("seed", range(6))
def test_the_table_ofloads_is_that_of_the_definition(seed: int) -> None:
    workload = random_workload(seed)
    for order in list(orders(workload.graph, 4)):
        table = costs(workload, order)
        for start in range(len(order)):
            for end in range(start + 1, len(order) + 1):
                fast, slow = loads(workload, frozenset(order[start:end]))
                assert table.load[0][start, end] == pytest.approx(fast)
                assert table.load[1][start, end] == pytest.approx(slow)


@pytest.mark.parametrize("seed", range(6))
def test_orders_lead_to_the_optimum_over_all_ideals(seed: int) -> None:
    workload = random_workload(seed)
    found, _ = best(workload, 0.3)
    assert found.slowest == pytest.approx(optimum(workload))


@pytest.mark.skipif(not ROOT.is_dir(), reason="the published workloads are not beside the project")
@pytest.mark.parametrize("name", ["LayerGraphs/bert24_inference", "OperatorGraphs/bert_l-3_inference"])
def test_published_optima_are_reached(name: str) -> None:
    found, _ = best(read(ROOT / "dnn-partitioning/throughput-inputs" / f"{name}.json"), 0.5)
    assert found.slowest <= KNOWN[name] * (1 + 1e-4)
