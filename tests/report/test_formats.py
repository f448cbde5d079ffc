"""Plans as DOT, SVG, Model Explorer and trace JSON, as a digraph and in a notebook."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import textwrap
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import networkx as nx
import pytest
from builders import KIB, chain
from plans import HOSTILE, by_hand, hostile_plan, large_plan, llama_plan, unet_plan

from graphplan import Plan
from graphplan.capture.source_lines import source_line
from graphplan.devices.max_memory import read_max_memory
from graphplan.ir.graph import Graph
from graphplan.ir.schedule import Assignment, MoveKind
from graphplan.message_text import size_text
from graphplan.passes.placement.evaluate import evaluate
from graphplan.passes.placement.problem import Problem
from graphplan.report.data_flows import find_flows
from graphplan.report.dot import MOST_MODULES
from graphplan.report.html_page import _SCRIPTS, asset
from graphplan.report.module_tree import MOST_CHILDREN, Group, stage_groups
from graphplan.report.page_data import page_data
from graphplan.report.perfetto import to_trace
from graphplan.report.svg import to_svg
from graphplan.report.text import device_name, device_text, time_text

PLANS = [llama_plan, unet_plan, hostile_plan]


@pytest.fixture(params=PLANS, ids=lambda make: make.__name__)
def plan(request: pytest.FixtureRequest) -> Plan:
    found: Plan = request.param()
    return found


# -- DOT ------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("dot") is None, reason="no graphviz here: apt-get install graphviz")
def test_dot_renders(plan: Plan, tmp_path: Path) -> None:
    plan.save_dot(tmp_path / "plan.dot")
    drawn = subprocess.run(["dot", "-Tsvg", tmp_path / "plan.dot"], capture_output=True, check=True)
    assert drawn.stderr == b""
    root = ET.fromstring(drawn.stdout)
    classes = [group.get("class") for group in root.iter("{http://www.w3.org/2000/svg}g")]
    used = {stage.device for stage in plan.stages}
    assert classes.count("cluster") == len(plan.stages) + len(used)
    assert classes.count("node") == sum(len(stage.operations) for stage in plan.stages)


@pytest.mark.skipif(shutil.which("dot") is None, reason="no graphviz here: apt-get install graphviz")
def test_dot_of_large_graphs_has_module_nodes(tmp_path: Path) -> None:
    plan = large_plan()
    plan.save_dot(tmp_path / "plan.dot")
    drawn = subprocess.run(
        ["dot", "-Tsvg", tmp_path / "plan.dot"], capture_output=True, check=True, timeout=60
    )
    root = ET.fromstring(drawn.stdout)
    nodes = [g for g in root.iter("{http://www.w3.org/2000/svg}g") if g.get("class") == "node"]
    assert len(plan.stages) <= len(nodes) <= MOST_MODULES
    counts = re.findall(r"(\d+) operations", drawn.stdout.decode())
    assert sum(map(int, counts)) == len(plan.graph.operations)


def test_hooked_plan_text_has_no_bound(plan: Plan) -> None:
    hooked = replace(plan, method="hooks", lower_bound=0.0, proof="the model runs module by module")
    for text in (hooked.summary(), hooked._repr_html_()):
        assert "gap unknown (the model runs module by module)" in text


def test_stage_table_counts_an_arriving_value_once() -> None:
    made = chain(4)
    last = replace(made.operations["v3"], inputs=("v2", "w3", "v0"))
    operations = [*list(made.operations.values())[:3], last]
    graph = Graph(operations, list(made.values.values()), list(made.weights.values()), ["x"], ["v3"])
    budgets: dict[Any, Any] = {0: "1MiB", 1: "1MiB", "cpu": "1MiB"}
    plan = by_hand(graph, budgets, {"v0": 0, "v1": 1, "v2": 0, "v3": 1})
    assert plan.transfer_bytes == 3 * KIB
    read = re.findall(r"(\S+ \S+)  layer\d$", plan.summary(), re.MULTILINE)
    assert read == ["0 B", "1.0 KiB", "1.0 KiB", "1.0 KiB"]


def test_device_table_excludes_prefetch_buffers_from_weights() -> None:
    plan = by_hand(
        chain(4, activation=256), {0: "16KiB", "cpu": "1MiB"}, dict.fromkeys(("v0", "v1", "v2", "v3"), 0)
    )
    (buffer,) = plan.schedule.prefetch_buffers
    assert plan.peaks[0].weights == 4 * KIB * 2 + buffer.nbytes
    table = plan.summary()
    assert re.search(r"% of budget +weights +prefetch +operations", table)
    assert re.search(rf"^0 .* 8\.0 KiB +{re.escape(size_text(buffer.nbytes))} +4 ", table, re.MULTILINE)
    assert " in 1 prefetch buffer on 0" in table
    resident = by_hand(chain(4), {0: "1MiB", "cpu": "1MiB"}, dict.fromkeys(("v0", "v1", "v2", "v3"), 0))
    assert "weights  operations" in resident.summary()
    shared = resident.with_prefetch_buffers({0: 4 * KIB})
    assert "4.0 KiB on 0 for other calls" in shared.summary()
    assert "prefetch buffer" not in shared.summary()


def test_summary_omits_transfers_if_nothing_moves() -> None:
    names = ("v0", "v1", "v2", "v3")
    resident = by_hand(chain(4), {0: "1MiB", "cpu": "1MiB"}, dict.fromkeys(names, 0)).summary()
    assert "transfers" not in resident
    assert "streams" not in resident
    moved = by_hand(chain(4), {0: "1MiB", 1: "1MiB"}, dict(zip(names, (0, 0, 1, 1), strict=True))).summary()
    assert "transfers  1 value, 1.0 KiB per forward pass" in moved
    assert "streams" not in moved


def test_device_table_shortens_long_paths() -> None:
    plan = by_hand(chain(4), {0: "1MiB"}, dict.fromkeys(("v0", "v1", "v2", "v3"), 0))
    place, long = plan.peaks[0].operation, "encoder.layer.0.intermediate.block.intermediate_act_fn"
    made = plan.graph.operations
    graph = Graph(
        [replace(one, module_path=long) if name == place else one for name, one in made.items()],
        list(plan.graph.values.values()),
        list(plan.graph.weights.values()),
        plan.graph.inputs,
        plan.graph.outputs,
    )
    table = by_hand(graph, {0: "1MiB"}, dict.fromkeys(made, 0)).summary()
    assert re.search(r"^0 .*  encoder\.layer\.0\.\.\.intermediate_act_fn$", table, re.MULTILINE)


@pytest.mark.parametrize("script", ["tables.js", "details.js"])
def test_page_has_a_word_for_each_kind_of_move(script: str) -> None:
    """Regression: copies of gradients had none."""
    (words,) = re.findall(r"const words = \{(.*)\};", asset(script))
    assert set(re.findall(r"(\w+): ", words)) == set(get_args(MoveKind))


def test_page_scripts_are_not_closed_by_data() -> None:
    for name in _SCRIPTS:
        assert "</script" not in asset(name).lower(), name


# -- SVG ------------------------------------------------------------------------------------------


def test_svg_is_well_formed_and_shows_transfers(plan: Plan, tmp_path: Path) -> None:
    plan.save_svg(tmp_path / "plan.svg", title=HOSTILE)
    root = ET.fromstring((tmp_path / "plan.svg").read_text(encoding="utf-8"))
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert names <= {"svg", "defs", "marker", "path", "rect", "g", "title", "text", "line", "circle"}
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert HOSTILE in texts
    assert sum(text is not None and text.startswith("budget") for text in texts) == len(plan.topology.devices)
    arrows = [e for e in root.iter() if e.get("marker-end")]
    assert bool(arrows) == bool(plan.transfers)


def test_svg_draws_stages_as_wide_as_their_time() -> None:
    plan = by_hand(
        chain(4, flops=10**9), {0: "1MiB", 1: "1MiB", "cpu": "1MiB"}, {"v0": 0, "v1": 0, "v2": 0, "v3": 1}
    )
    data = plan.timeline.events
    runs = {e.name: e for e in data if e.kind == "run"}
    found = re.findall(r'width="([\d.]+)" height="40.0"', to_svg(plan))
    widths = [float(width) for width in found]
    times = [runs["v2"].end - runs["v0"].start, runs["v3"].end - runs["v3"].start]
    assert widths[0] / widths[1] == pytest.approx(times[0] / times[1], rel=0.02)


# -- Chrome's trace format ------------------------------------------------------------------------

_TIME = (int, float)
_PHASES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "ts": _TIME, "dur": _TIME, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "ts": _TIME, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": _TIME, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": int, "ts": _TIME, "pid": int, "tid": int, "bp": str},
}


def check_trace(text: str) -> list[dict[str, Any]]:
    """Hold a trace against what the Trace Event Format asks of each kind of event."""
    trace = json.loads(text)
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = trace["traceEvents"]
    for event in events:
        fields = _PHASES[event["ph"]]
        assert set(event) == {"ph", *fields}, event
        for name, kind in fields.items():
            assert isinstance(event[name], kind), event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(level, int) and level >= 0 for level in event["args"].values())
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"} <= named
    starts = [e["id"] for e in events if e["ph"] == "s"]
    assert starts == [e["id"] for e in events if e["ph"] == "f"]
    assert len(set(starts)) == len(starts)
    return events


def test_trace_is_the_estimated_timeline(plan: Plan, tmp_path: Path) -> None:
    plan.save_trace(tmp_path / "trace.json")
    events = check_trace((tmp_path / "trace.json").read_text(encoding="utf-8"))
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(plan.timeline.events)
    ends = max(event["ts"] + event["dur"] for event in slices)
    assert ends == pytest.approx(plan.makespan * 1e6)
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert f"{device_name(plan.stages[0].device)} compute" in tracks
    for track in {event["tid"] for event in slices}:
        on_track = sorted((e for e in slices if e["tid"] == track), key=lambda e: e["ts"])
        for a, b in itertools.pairwise(on_track):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6, "two at once on one track"
    for key, peak in plan.peaks.items():
        levels = [
            e["args"] for e in events if e["ph"] == "C" and e["name"] == f"memory of {device_text(key)}"
        ]
        assert max(sum(level.values()) for level in levels) <= peak.nbytes
        assert max(sum(level.values()) for level in levels) == max(plan.memory.profile[key])


def test_trace_shows_bytes_of_moved_weights() -> None:
    graph, topology = chain(1), read_max_memory({0: "1MiB", "cpu": "1MiB"})
    problem = Problem(graph, topology, "cpu", streaming=False)
    found = evaluate(problem, Assignment({"v0": 0}, {"w0": "cpu"}))
    plan = Plan(graph, topology, found.schedule, found.seconds, 0.0, "by hand", "hand", streaming=False)
    events = check_trace(to_trace(plan))
    moved = [event["args"] for event in events if event["name"] == "w0"]
    assert moved == [{"weights": ["w0"], "bytes": 4 * KIB}]


# -- Model Explorer -------------------------------------------------------------------------------


def check_collection(data: dict[str, Any]) -> dict[str, Any]:
    """Hold a collection against ``GraphCollection`` of Model Explorer's ``input_graph.ts``."""
    assert set(data) == {"label", "graphs"}
    (graph,) = data["graphs"]
    assert set(graph) == {"id", "nodes", "groupNodeAttributes"}
    ids = [node["id"] for node in graph["nodes"]]
    assert len(set(ids)) == len(ids)
    outputs = {node["id"]: {item["id"] for item in node["outputsMetadata"]} for node in graph["nodes"]}
    for node in graph["nodes"]:
        assert all(isinstance(node[name], str) for name in ("id", "label", "namespace"))
        assert not node["namespace"].startswith("/")
        assert "//" not in node["namespace"]
        inputs = {item["id"] for item in node["inputsMetadata"]}
        for item in [*node["inputsMetadata"], *node["outputsMetadata"]]:
            assert set(item) == {"id", "attrs"}
            check_pairs(item["attrs"])
        check_pairs(node["attrs"])
        for edge in node["incomingEdges"]:
            assert set(edge) == {"sourceNodeId", "sourceNodeOutputId", "targetNodeInputId"}
            assert edge["sourceNodeOutputId"] in outputs[edge["sourceNodeId"]]
            assert edge["targetNodeInputId"] in inputs
    for attributes in graph["groupNodeAttributes"].values():
        assert all(isinstance(value, str) for value in attributes.values())
    return dict(graph)


def check_pairs(pairs: list[dict[str, str]]) -> None:
    assert all(set(p) == {"key", "value"} for p in pairs)
    assert all(isinstance(text, str) for p in pairs for text in p.values())


def check_node_data(data: dict[str, Any], graph: dict[str, Any]) -> dict[str, Any]:
    """Hold node data against ``NodeDataProviderData`` of Model Explorer's ``types.ts``."""
    assert set(data) == {graph["id"]}
    found = data[graph["id"]]
    assert {"name", "results"} <= set(found) <= {"name", "results", "gradient"}
    assert set(found["results"]) <= {node["id"] for node in graph["nodes"]}
    assert all({"value"} <= set(item) <= {"value", "bgColor"} for item in found["results"].values())
    if "gradient" in found:
        assert [stop["stop"] for stop in found["gradient"]] == [0, 1]
        assert all(isinstance(item["value"], int | float) for item in found["results"].values())
    return dict(found["results"])


def test_model_explorer_files(plan: Plan, tmp_path: Path) -> None:
    plan.save_model_explorer(tmp_path / "plan.json", title="model")
    assert {p.name for p in tmp_path.iterdir()} == {
        "plan.json", "plan.device.json", "plan.bytes.json", "plan.seconds.json",
    }  # fmt: skip
    graph = check_collection(json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")))
    assert len(graph["nodes"]) == len(plan.graph.operations)
    read = {
        name: check_node_data(json.loads((tmp_path / f"plan.{name}.json").read_text(encoding="utf-8")), graph)
        for name in ("device", "bytes", "seconds")
    }
    homes = plan.schedule.assignment.operations
    assert {name: item["value"] for name, item in read["device"].items()} == {
        name: str(key) for name, key in homes.items()
    }
    total = sum(item["value"] for item in read["seconds"].values())
    assert total == pytest.approx(plan.timeline.busy("run"))


def test_model_explorer_nests_by_stage_and_module() -> None:
    from graphplan.report.model_explorer import to_model_explorer

    graph = json.loads(to_model_explorer(llama_plan())[""])["graphs"][0]
    namespaces = {node["namespace"] for node in graph["nodes"]}
    assert "stage 0 on 0/model/layers/0/self_attn/q_proj" in namespaces


# -- networkx -------------------------------------------------------------------------------------


def test_to_networkx_is_a_copy(plan: Plan) -> None:
    digraph = plan.graph.to_networkx()
    assert nx.is_directed_acyclic_graph(digraph)
    assert list(digraph) == list(plan.graph.operations)
    for source, target, values in plan.graph.edges():
        assert digraph.edges[source, target]["values"] == values
    digraph.clear()
    assert len(plan.graph.digraph) == len(plan.graph.operations)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), ((1 << 20) - 1, "1.0 MiB")],
)
def test_sizes_are_rounded_before_their_unit_is_chosen(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5e-3, "1.50 ms"), (0.9999999, "1.00 s"), (9.9999e-4, "1.00 ms"), (2.5e-6, "2.5 µs")],
)
def test_times_are_rounded_before_their_unit_is_chosen(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


# -- notebooks ------------------------------------------------------------------------------------


def test_notebook_shows_picture_figures_and_peaks(plan: Plan) -> None:
    shown = "".join(ET.fromstring(plan._repr_html_()).itertext())
    assert plan.proof in shown
    for spec in plan.topology.devices:
        assert size_text(plan.peak_bytes[spec.key]) in shown
        assert f"of {size_text(spec.memory)}" in shown


# -- the tree and the page's data -----------------------------------------------------------------


def _operations(group: Group) -> list[str]:
    return [
        name
        for child in group.children
        for name in ([child] if isinstance(child, str) else _operations(child))
    ]


def _groups(group: Group) -> list[Group]:
    return [
        group, *(g for child in group.children if isinstance(child, Group) for g in _groups(child)),
    ]  # fmt: skip


@pytest.mark.parametrize("make", [*PLANS, large_plan])
def test_the_tree_has_each_operation_once_and_few_children(make: Any) -> None:
    plan = make()
    for group, stage in zip(stage_groups(plan), plan.stages, strict=True):
        assert sorted(_operations(group)) == sorted(stage.operations)
        for inner in _groups(group):
            assert 1 <= len(inner.children) <= MOST_CHILDREN
            assert sorted(_operations(inner)) == sorted(inner.operations)


def test_numbered_module_label_includes_its_parent() -> None:
    labels = {g.path: g.label for group in stage_groups(large_plan()) for g in _groups(group)}
    assert labels["model.layers.3"] == "layers.3"
    assert labels["model.layers.3.attn"] == "attn"


def test_stage_labels_are_distinct() -> None:
    """Regression: stages of the encoder and of the decoder were both named "block.0"."""
    paths = ["encoder.block.0.layer", "encoder.block.1.layer", "decoder.block.0.layer", "decoder.norm.weight"]

    def labels(paths: list[str]) -> list[str]:
        made = chain(4)
        named = (
            replace(op, module_path=path) for op, path in zip(made.operations.values(), paths, strict=True)
        )
        graph = Graph(named, made.values.values(), made.weights.values(), ["x"], ["v3"])
        plan = by_hand(graph, {0: "1MiB", 1: "1MiB", "cpu": "1MiB"}, {"v0": 0, "v1": 0, "v2": 1, "v3": 1})
        return [group.label for group in stage_groups(plan)]

    assert labels(paths) == ["encoder.block.0 … encoder.block.1", "decoder.block.0 … decoder.norm"]
    assert labels([f"model.layers.{i}.mlp" for i in range(4)]) == [
        "layers.0 … layers.1",
        "layers.2 … layers.3",
    ]


def test_flat_graph_is_grouped_into_runs() -> None:
    plan = large_plan(5000)
    flat = [replace(op, module_path="") for op in plan.graph.operations.values()]
    graph = type(plan.graph)(flat, plan.graph.values.values(), plan.graph.weights.values(), ["x"], ["v4999"])
    one = by_hand(graph, {0: "64MiB", "cpu": "1MiB"}, dict.fromkeys(graph.operations, 0))
    (group,) = stage_groups(one)
    assert all(isinstance(child, Group) and child.kind == "run" for child in group.children)
    assert sorted(_operations(group)) == sorted(graph.operations)


def test_the_page_has_the_plans_bytes_and_seconds(plan: Plan) -> None:
    data = page_data(plan)
    flows = data["flows"]
    assert sum(f["bytes"] for f in flows if f["kind"] == "activation") == plan.transfer_bytes
    assert sum(f["bytes"] for f in flows if f["kind"] == "weight") == plan.streamed_bytes
    assert all(f["reader"] is not None for f in flows if f["kind"] in ("activation", "weight"))
    for device in data["devices"]:
        key = next(spec.key for spec in plan.topology.devices if str(spec.key) == device["key"])
        levels = device["memory"][1::2]
        assert max(levels, default=0) == max(plan.memory.profile[key])
        assert device["memory"][::2] == sorted(set(device["memory"][::2]))
        assert device["weights"] + device["buffer"] == plan.peaks[key].weights
    stages = [data["groups"][stage["group"]] for stage in data["stages"]]
    assert sum(stage["seconds"] for stage in stages) == pytest.approx(plan.timeline.busy("run"))


def test_the_page_has_no_speed_of_the_disk() -> None:
    plan = by_hand(chain(2), {0: "1MiB", "disk": "1GiB"}, {"v0": 0, "v1": 0})
    speeds = {device["key"]: device["speed"] for device in page_data(plan)["devices"]}
    assert speeds["0"]["flops"] > 0
    assert speeds["disk"] is None


# -- source lines ---------------------------------------------------------------------------------


def test_operations_have_source_lines() -> None:
    sources = {op.source for op in llama_plan().graph.operations.values()}
    assert any(
        re.fullmatch(r"transformers/models/llama/modeling_llama\.py:\d+", source) for source in sources
    )
    assert all(not source.startswith("/") for source in sources)
    assert any(op.source.startswith("plans.py:") for op in unet_plan().graph.operations.values())


def test_source_line_is_in_model_code() -> None:
    import torch

    import graphplan

    stack = (
        f'File "/somewhere/else/model.py", line 7, in forward\n    y = self.linear(x)\n'
        f'File "{torch.__path__[0]}/nn/modules/linear.py", line 134, in forward\n    return F.linear(x)\n'
    )
    assert source_line(stack) == "model.py:7"
    traced = f'File "{graphplan.__path__[0]}/tracing.py", line 7, in forward\n    return original()\n'
    assert source_line(traced + stack.splitlines(keepends=True)[2]) == "torch/nn/modules/linear.py:134"
    assert source_line("") == ""


def test_transfer_labels_do_not_overlap() -> None:
    names = [f"v{i}" for i in range(80)]
    turns = {name: i % 2 for i, name in enumerate(names)}
    plan = by_hand(chain(80, flops=10**8), {0: "8MiB", 1: "8MiB", "cpu": "1MiB"}, turns)
    root = ET.fromstring(to_svg(plan))
    rows: dict[float, list[tuple[float, float]]] = {}
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        if (
            text.text is not None
            and re.fullmatch(r"[\d.]+ (B|[KMG]iB)", text.text)
            and text.get("font-weight")
        ):
            start = float(text.get("x", "0"))
            rows.setdefault(float(text.get("y", "0")), []).append((start, start + 6 * len(text.text)))
    for row in rows.values():
        row.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(row))
    titles = [e for e in root.iter("{http://www.w3.org/2000/svg}path") if e.get("marker-end")]
    assert titles
    assert all(len(path) == 1 and path[0].text for path in titles)


# -- a format of one's own ------------------------------------------------------------------------


def test_example_format_of_contributing_runs(plan: Plan) -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^ +```python\n(.*?)^ +```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(block), names)
    text = names["to_list"](plan)
    assert all(text.count(f"{name} = ") == 1 for name in plan.graph.operations)
    assert text.count("copy of ") == len(find_flows(plan))
    assert all(f"{name} on {device_name(key)}: " in text for name, key in plan.placement.items())
    assert len(text.splitlines()) > len(plan.stages) + len(plan.graph.operations)
