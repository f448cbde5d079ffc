"""The page of a plan, in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import (
    HOSTILE,
    UNet,
    budgets_of,
    by_hand,
    hostile_plan,
    large_plan,
    llama,
    llama_plan,
    unet_plan,
)

import graphplan
from graphplan import Plan, PlanError
from graphplan.ir.remarks import Remarks
from graphplan.report.html_page import _SCRIPTS, to_html
from graphplan.report.text import module_range
from graphplan.report.time_parts import time_parts, what_takes_the_time

playwright = pytest.importorskip("playwright.sync_api", reason="the browser's driver is missing: playwright")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHOTS = Path(__file__).parents[2] / "out" / "screenshots"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@dataclass
class Opened:
    """A page, with what it asked for and complained of until it is left."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listeners: dict[str, Callable[[Any], None]] = {
            "request": lambda request: self.requests.append(request.url),
            "pageerror": lambda error: self.complaints.append(str(error)),
            "console": lambda message: self.complaints.append(message.text),
        }
        for event, heard in self.listeners.items():
            self.page.on(event, heard)

    def leave(self) -> None:
        for event, heard in self.listeners.items():
            self.page.remove_listener(event, heard)
        assert self.complaints == []
        assert len(self.requests) == 1, self.requests  # the file itself

    def js(self, expression: str, *arguments: Any) -> Any:
        return self.page.evaluate(expression, *arguments)

    def click(self, node: str) -> None:
        """Click the middle of what is drawn."""
        point = self.js("id => GraphView.point(id)", node)
        self.page.mouse.click(point["x"], point["y"])

    def ids(self) -> set[str]:
        return set(self.js("() => GraphView.ids()"))

    def shoot(self, name: str, *, whole: bool = False) -> None:
        if "SCREENSHOTS" not in os.environ:
            return
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.wait_for_timeout(250)  # the picture glides to its place
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=whole)


Open = Callable[..., Opened]
WINDOW: Any = {"width": 1440, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@cache
def llama_remarks() -> Remarks:
    """Advice takes a second to find."""
    return llama_plan().remarks()


@pytest.fixture(scope="module")
def open_page(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a plan in the tab that shows such plans, or in one of its own: a tab takes longer than a page."""
    path = tmp_path_factory.mktemp("pages") / "plan.html"
    tabs: dict[str, Any] = {}

    def open_plan(
        plan: Plan,
        *,
        scheme: str = "light",
        html: str = "",
        title: str = "",
        remarks: bool = False,
        alone: bool = False,
    ) -> Opened:
        words = llama_remarks() if remarks else None
        path.write_text(html or to_html(plan, title, remarks=words), encoding="utf-8")
        page = tabs.get(scheme)
        if page is None or alone:
            page = browser.new_page(viewport=WINDOW, color_scheme=scheme, reduced_motion="reduce")
        if not alone:
            tabs[scheme] = page
        page.set_viewport_size(WINDOW)
        page.emulate_media(media="screen")
        page.mouse.move(0, 0)
        opened = Opened(page)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return opened

    return open_plan


@pytest.fixture
def show(open_page: Open) -> Iterator[Open]:
    """Opens one plan after another."""
    shown: list[Opened] = []

    def next_plan(plan: Plan, **options: Any) -> Opened:
        if shown:
            shown.pop().leave()
        shown.append(open_page(plan, **options))
        return shown[-1]

    yield next_plan
    for opened in shown:
        opened.leave()


@pytest.fixture(scope="module")
def read(open_page: Open) -> Iterator[Opened]:
    """A page that tests only read, or leave as it was."""
    opened = open_page(llama_plan(), title="Llama", remarks=True, alone=True)
    yield opened
    opened.leave()


@pytest.mark.slow
def test_figures_just_below_a_unit_are_rounded_up(read: Opened) -> None:
    sizes = [read.js("n => Format.bytes(n)", n) for n in (1023, 1024, (1 << 20) - 1, (1 << 30) - 1)]
    assert sizes == ["1023 B", "1.0 KiB", "1.0 MiB", "1.0 GiB"]
    times = [read.js("s => Format.seconds(s)", s) for s in (9.996e-4, 9.99e-4, 0.99996, 1.5)]
    assert times == ["1.00 ms", "999 µs", "1.00 s", "1.50 s"]


def test_opens_with_stages_lanes_and_summary(read: Opened) -> None:
    plan, page = llama_plan(), read.page
    assert page.title() == "Llama"
    assert page.locator(".lane-name").count() == len(plan.topology.devices)
    stages = {i for i in read.ids() if i.startswith("g")}
    assert len(stages) == len(plan.stages)
    assert not {i for i in read.ids() if i.startswith("o") and i != "out"}
    figures = page.inner_text("#figures")
    assert f"by {plan.proof}" in figures
    assert plan.proof in page.locator(".figure[title^=Proved]").get_attribute("title")
    assert f"{len(plan.streams)} copies per forward pass" in figures
    read.shoot("light", whole=True)


def test_first_panel_shows_slowest_part_and_advice(read: Opened) -> None:
    plan = llama_plan()
    said = read.page.inner_text("#answer").splitlines()
    assert said[0] == f"{what_takes_the_time(plan)}."
    assert re.search(r"[0-9.]+ [KM]iB more memory on GPU [01] would save .* \([0-9.]+ %\)\.", said[-1])


def test_one_bar_has_all_of_the_time(read: Opened) -> None:
    plan, page = llama_plan(), read.page
    parts = time_parts(plan)
    together = *parts.compute.values(), parts.transfers, parts.streaming, parts.inputs, parts.outputs
    assert sum(together) == pytest.approx(plan.makespan)
    legend = page.locator("#shares li").all_text_contents()
    assert sum(float(re.findall(r"([0-9.]+) %", text)[0]) for text in legend) == pytest.approx(100, abs=2)
    assert [text.split(" ")[0] for text in legend] == [
        "GPU",
        "GPU",
        "transfers",
        "waiting",
        "inputs",
        "outputs",
    ]
    assert ("return_outputs=False" in page.inner_text("#shares")) == (parts.outputs > 0.05 * plan.makespan)


@pytest.mark.slow
def test_assumptions_are_inputs_and_speeds_with_their_origin(show: Open) -> None:
    model, inputs = llama(1)
    memory, speeds = {0: "1GiB", "cpu": "1GiB"}, {0: graphplan.Speed(flops=123e12)}
    plan = graphplan.plan(model.to("meta"), memory, kwargs=inputs, devices=speeds)
    page = show(plan).page
    page.click("#assumptions summary")
    rows = page.inner_text("#assumptions tbody").replace("\t", " ").splitlines()
    assert "input_ids int64[2, 16] input" in rows
    assert "GPU 0 123 TFLOP/s, 1,000 GB/s, 4.0 µs an operation given by the caller" in rows
    assert "CPU → GPU 0 25 GB/s, 15 µs a copy default" in rows


@pytest.mark.slow
def test_first_panel_marks_default_speeds(show: Open) -> None:
    model, x = torch.nn.Linear(64, 64, device="meta"), torch.empty(4, 64, device="meta")
    links = {(0, "cpu"): graphplan.Link(bandwidth=12e9)}
    memory, known = {0: "1GiB", "cpu": "1GiB"}, {0: graphplan.Speed(1e15, 3e12, 4e-6)}
    for devices, given, said in (
        (None, None, "estimated, at default speeds of GPU 0, copies"),  # the CPU computes nothing
        (known, None, "estimated, at default speeds of copies"),
        (known, links, "estimated"),
        ({0: "H100"}, None, "estimated"),  # its bandwidth to the CPU is known too
    ):
        plan = graphplan.plan(model, memory, (x,), devices=devices, links=given)
        assert show(plan).page.locator(".figure .note").first.inner_text() == said


@pytest.mark.slow
def test_an_address_names_a_module(show: Open) -> None:
    plan = llama_plan()
    opened = show(plan)
    for path in ("model.layers.1.mlp", "model.layers.2.self_attn"):
        opened.js("path => { location.hash = path; }", path)
        opened.page.wait_for_function(
            "p => document.querySelector('#details').innerText.includes(p)", arg=path
        )
    opened.page.reload()
    assert "model.layers.2.self_attn" in opened.page.inner_text("#details")
    opened.requests.pop()  # of the reload
    opened.js("() => { location.hash = 'no%such.module'; }")


def test_transfers_are_arrows_with_their_bytes(read: Opened) -> None:
    plan = llama_plan()
    edges = read.js("() => GraphView.edges()")
    moved = [edge for edge in edges if "transfer" in edge["classes"]]
    fetched = [edge for edge in edges if "stream" in edge["classes"]]
    flows = [(flow["kind"], flow["bytes"]) for flow in page_flows(plan)]
    assert sum(flows[i][1] for edge in moved for i in edge["flows"]) == plan.transfer_bytes > 0
    assert sum(flows[i][1] for edge in fetched for i in edge["flows"]) == plan.streamed_bytes > 0
    assert all(edge["label"].endswith("B") for edge in moved)


def page_flows(plan: Plan) -> list[dict[str, Any]]:
    text = to_html(plan).partition('<script type="application/json" id="plan">')[2].partition("</script>")[0]
    flows: list[dict[str, Any]] = json.loads(text)["flows"]
    return flows


def test_a_stage_opens_down_to_an_operation_and_closes(show: Open) -> None:
    opened = show(llama_plan(), scheme="dark")
    first = opened.ids()
    depth, node = 0, "g0"
    while not {i for i in opened.ids() - first if i.startswith("o")} and depth < 8:
        before = opened.ids()
        opened.click(node)
        inside = opened.ids() - before
        assert inside
        node = next((i for i in sorted(inside) if i.startswith("g")), node)
        opened.js("id => { const n = GraphView.point(id); return n; }", node)
        depth += 1
    opened.shoot("open-dark")
    operations = {i for i in opened.ids() - first if i.startswith("o")}
    assert operations
    opened.page.click("#collapse")
    assert opened.ids() == first


@pytest.mark.slow
def test_click_on_an_open_stage_closes_the_stage(show: Open) -> None:
    opened = show(unet_plan())
    closed = opened.ids()
    opened.click("g0")
    assert opened.ids() > closed
    opened.shoot("unet-open")
    opened.page.focus("#canvas")
    opened.page.keyboard.press("Enter")
    assert opened.ids() == closed


def test_hovering_an_operation_shows_its_cost(show: Open) -> None:
    plan = llama_plan()
    opened = show(plan)
    name = next(n for n in plan.stages[0].operations if plan.graph.operations[n].target == "linear")
    opened.page.fill("#search", name)
    opened.page.keyboard.press("Enter")
    index = list(plan.graph.operations).index(name)
    point = opened.js("id => GraphView.point(id)", f"o{index}")
    opened.page.mouse.move(point["x"], point["y"])
    tip = opened.page.inner_text("#tip")
    for word in ("FLOPs", "output size", "time", "module", "source"):
        assert word in tip
    assert plan.graph.operations[name].module_path in tip
    assert "modeling_llama.py:" in tip


@pytest.mark.slow
def test_search_finds_a_parameter_a_module_and_an_operation(show: Open) -> None:
    plan = llama_plan()
    opened = show(plan)
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("layers.2 q_proj.weight")
    assert "model.layers.2.self_attn.q_proj.weight" in page.inner_text("#hits")
    opened.shoot("search")
    page.keyboard.press("Enter")
    details = page.inner_text("#details")
    assert "model.layers.2.self_attn.q_proj.weight" in details
    home = plan.placement["model.layers.2.self_attn.q_proj.weight"]
    assert f"resides on\nGPU {home}" in details.replace("\t", "\n")
    page.fill("#search", "model.layers.1.mlp")
    page.keyboard.press("Enter")
    assert "module" in page.inner_text("#details")
    assert "mlp" in page.inner_text("#details h3")
    page.fill("#search", "no such thing")
    assert "No matches" in page.inner_text("#hits")


def test_memory_shows_weights_activations_budget_and_peak(read: Opened) -> None:
    plan = llama_plan()
    for key in (0, 1):
        chart = read.page.locator(f'svg.memory[data-device="{key}"]')
        assert chart.locator(".budget line").count() == 1
        assert "budget" in chart.locator(".budget text").text_content()
        peak = plan.graph.operations[plan.peaks[key].operation]
        assert f"at {peak.module_path} ({peak.target})" in chart.locator(".peak text").text_content()
        assert chart.locator("path.activations").count() == 1
        assert chart.locator("rect.weights").count() == 1
        assert chart.locator("rect.buffer").count() == any(
            buffer.device == key for buffer in plan.schedule.prefetch_buffers
        )
        assert budget_is_above(chart)
    read.page.locator("#memory").screenshot(path=shot("memory"))


def budget_is_above(chart: Any) -> bool:
    """Whether the peak's dot lies below the budget's line or on it."""
    line = float(chart.locator(".budget line").get_attribute("y1"))
    return line <= float(chart.locator(".peak circle").get_attribute("cy")) + 0.01


def shot(name: str) -> Path:
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS / f"{name}.png"


def test_the_memory_cursor_follows_the_arrow_keys(read: Opened) -> None:
    plan, page = llama_plan(), read.page
    page.focus('svg.memory[data-device="0"]')
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert list(plan.graph.operations)[2] in page.inner_text("#tip")


def test_the_timeline_has_compute_transfers_and_streams(show: Open) -> None:
    opened = show(llama_plan(), scheme="dark")
    chart = opened.page.locator("svg.timeline")
    for kind in ("compute", "transfers", "streams"):
        assert chart.locator(f"rect.bar.{kind}").count() > 0
    bars = chart.locator("rect.bar").count()
    opened.page.click("#time-in")
    opened.page.click("#time-in")
    assert chart.locator("rect.bar").count() != bars
    opened.page.locator("#timeline").screenshot(path=shot("timeline-dark"))


def test_tables_sort_and_lead_to_the_graph(show: Open) -> None:
    plan = llama_plan()
    page = show(plan).page
    first = page.locator("#weights tbody tr").first
    largest = max(plan.graph.weights.values(), key=lambda weight: weight.nbytes)
    assert largest.name in [row.split("\t")[0] for row in page.inner_text("#weights tbody").splitlines()]
    page.click("#weights th button >> nth=0")
    assert first.locator("td").first.text_content() == min(plan.graph.weights)
    first.click()
    assert min(plan.graph.weights) in page.inner_text("#details")
    assert page.locator("#transfers tbody tr").count() > 3


def test_the_outline_is_a_tree_for_the_keyboard(show: Open) -> None:
    opened = show(llama_plan())
    page = opened.page
    page.focus("#outline li")
    page.keyboard.press("ArrowRight")
    assert page.locator('#outline li[aria-expanded="true"]').count() == 1
    page.keyboard.press("ArrowDown")
    assert page.locator('#outline li li[aria-selected="true"]').count() == 1
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator('#outline li[aria-expanded="true"]').count() == 0


def test_hostile_names_stay_text(show: Open) -> None:
    opened = show(hostile_plan(), title=HOSTILE)
    page = opened.page
    assert page.title() == HOSTILE
    opened.click("g0")
    opened.click("g1")
    page.fill("#search", "script")
    assert HOSTILE in page.inner_text("#hits")
    page.keyboard.press("Enter")
    assert HOSTILE in page.inner_text("#details")
    assert page.inner_text("h1") == HOSTILE
    assert opened.js("() => document.querySelectorAll('script:not([type])').length") == len(_SCRIPTS)
    assert opened.js("() => document.querySelectorAll('h1 *, #details script, #outline script').length") == 0
    opened.shoot("hostile")


def test_invisible_characters_are_shown_as_code_points(show: Open) -> None:
    page = show(hostile_plan(), title="a\u202eb\u200bc\nd \\u202e 语言").page
    assert page.title() == "a\\u202eb\\u200bc\\nd \\u202e 语言"
    assert page.inner_text("h1") == page.title()


def test_page_cannot_fetch_from_the_network(show: Open) -> None:
    opened = show(hostile_plan())
    blocked = opened.js("() => fetch('https://example.org/').then(() => false, () => true)")
    assert blocked
    assert any("Content Security Policy" in line for line in opened.complaints)
    opened.complaints.clear()
    del opened.requests[1:]


def test_dark_and_light(show: Open) -> None:
    opened = show(unet_plan(), scheme="dark")
    background = "() => getComputedStyle(document.body).backgroundColor"
    dark = opened.js(background)
    opened.shoot("unet-dark", whole=True)
    opened.page.click("#theme")
    assert opened.js(background) != dark
    assert opened.js("() => document.documentElement.dataset.theme") == "light"


PAINTED = """() => {
  const picture = document.querySelector("canvas.paper");
  const pixels = picture.getContext("2d").getImageData(0, 0, picture.width, picture.height).data;
  let painted = 0;
  for (let i = 3; i < pixels.length; i += 4) painted += pixels[i] > 0;
  return painted / (pixels.length / 4);
}"""


@pytest.mark.slow
def test_prints_light_and_without_controls(show: Open) -> None:
    opened = show(llama_plan(), scheme="dark")
    page = opened.page
    opened.js("() => dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert opened.js("() => document.documentElement.dataset.theme") == "light"
    assert not page.locator("#search").is_visible()
    assert opened.js(PAINTED) > 0.01, "the graph is blank on paper"
    assert page.locator("#memory-charts svg").first.is_visible()
    opened.shoot("print", whole=True)
    page.emulate_media(media="screen")
    opened.js("() => dispatchEvent(new Event('afterprint'))")
    assert opened.js("() => document.documentElement.dataset.theme") == "dark"
    assert page.locator("canvas.paper").count() == 0
    assert page.pdf()[:5] == b"%PDF-"


def page_is_as_wide_as_the_window(opened: Opened) -> bool:
    return bool(opened.js("() => document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.slow
def test_a_narrow_window(show: Open) -> None:
    opened = show(llama_plan(), title="A model with a rather long name, on two accelerators and the CPU")
    opened.page.set_viewport_size({"width": 390, "height": 844})
    opened.page.wait_for_timeout(150)  # charts are redrawn
    assert page_is_as_wide_as_the_window(opened)
    for chart in opened.page.locator("svg.memory").all():
        frame = chart.bounding_box()
        for text in chart.locator("text").all():
            box = text.bounding_box()
            assert box["x"] >= frame["x"] - 1
            assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 1
    opened.shoot("narrow", whole=True)


def test_hooked_plan_page_has_no_bound(show: Open) -> None:
    plan = replace(hostile_plan(), method="hooks", lower_bound=0.0, proof="the model runs module by module")
    figures = show(plan).page.inner_text("#figures")
    assert "unknown" in figures
    assert "%" not in figures


def test_peak_label_does_not_cross_the_budget_line(read: Opened) -> None:
    page = read.page
    for chart in page.locator("svg.memory").filter(has=page.locator(".budget line")).all():
        line = float(chart.locator(".budget line").get_attribute("y1"))
        foot = float(chart.locator(".peak text").get_attribute("y"))
        assert foot + 4 <= line or line <= foot - 11
        text = chart.locator(".peak text").bounding_box()
        other = chart.locator(".budget text").bounding_box()
        assert text["x"] + text["width"] <= other["x"] or other["x"] + other["width"] <= text["x"]


TEXTS = """() => GraphView.labels().map((label, i) => [label, GraphView.widths()[i],
  Math.max(...label.split("\\n").map((line) => Dom.textWidth(line, 12)))])"""


def test_texts_fit_their_boxes(show: Open) -> None:
    opened = show(llama_plan())
    opened.click("g0")
    for label, width, needed in opened.js(TEXTS):
        assert needed <= width, label


@pytest.mark.slow
def test_ten_thousand_operations_make_few_elements(show: Open) -> None:
    plan = large_plan()
    assert len(plan.graph.operations) == 10_000
    opened = show(plan, title="Ten thousand operations")
    print("opened after", opened.js("() => performance.now()"), "ms")
    assert len(opened.ids()) <= len(plan.stages) + 2
    assert opened.js("() => document.querySelectorAll('*').length") < 12_000
    assert page_is_as_wide_as_the_window(opened)
    assert opened.page.locator("#overview .part").count() == len(plan.stages)
    opened.shoot("large")
    before = opened.js("() => GraphView.point('g0').x")
    opened.page.click("#overview", position={"x": 200, "y": 8})
    assert opened.js("() => GraphView.point('g0').x") < before - 500
    opened.page.click("#fit")
    opened.js("() => dispatchEvent(new Event('beforeprint'))")
    opened.page.emulate_media(media="print")
    assert opened.page.locator(".paper-row").count() > 2, "the stages are too small to be read on one row"
    opened.shoot("large-print")
    opened.page.emulate_media(media="screen")
    opened.js("() => dispatchEvent(new Event('afterprint'))")
    assert opened.page.locator(".paper-row").count() == 0
    opened.click("g0")
    assert len(opened.ids()) <= len(plan.stages) + 100
    opened.page.fill("#search", "v9999")
    opened.page.keyboard.press("Enter")
    assert "o9999" in opened.ids()
    opened.shoot("large-open")


@pytest.mark.slow
def test_page_shows_measured_and_estimated_call(show: Open, tmp_path: Path) -> None:
    model, x = UNet().eval(), torch.ones(1, 4, 32, 32)
    with graphplan.simulate({0: "700KiB", 1: "700KiB"}) as machine:
        placed = graphplan.partition(model, machine.max_memory, (x,), pin={"down": 0, "up": 1})
        profile = placed.profile(x)
    path = tmp_path / "measured.html"
    profile.save_html(path, title="Measured")
    opened = show(placed.plan, html=path.read_text(encoding="utf-8"))
    assert opened.page.locator("#answer p").count() == 2  # what takes the time, and what would help
    assert "× the estimate" in opened.page.inner_text("#figures")
    assert "Measured" in opened.page.inner_text("#spent thead >> nth=0")
    groups = opened.page.locator("svg.timeline text.group").all_text_contents()
    assert [text.partition(",")[0] for text in groups] == ["estimated", "measured"]
    assert opened.page.locator("svg.memory line.measured").count() == 2
    for key, nbytes in profile.peak_bytes.items():
        text = opened.page.text_content(f'svg.memory[data-device="{key}"] .peak text')
        assert opened.js("n => Format.bytes(n)", nbytes) in text.partition("measured")[2]
    opened.shoot("measured", whole=True)


@pytest.mark.slow
def test_selected_table_rows_mark_graph_and_charts(show: Open) -> None:
    plan = llama_plan()
    opened = show(plan)
    page = opened.page
    opened.js("() => scrollTo(0, document.body.scrollHeight)")
    for row in ("#weights tbody tr >> nth=3", "#spent tbody tr >> nth=1"):
        page.locator(row).scroll_into_view_if_needed()
        before = opened.js("() => scrollY")
        page.click(row)
        assert opened.js("() => scrollY") == before
        assert opened.js("() => GraphView.chosen()")
        assert page.locator('svg.memory[data-device="0"] rect.chosen').count() > 0
        assert page.locator("svg.timeline .bar.chosen").count() > 0
        assert page.locator('tr[aria-selected="true"]').count() == 1
    streamed = page.locator("#transfers tbody tr", has_text="stream").first
    streamed.click()
    assert page.locator("svg.timeline .bar.streams.chosen").count() > 0
    page.locator("#weights").scroll_into_view_if_needed()
    before = opened.js("() => scrollY")
    page.keyboard.press("/")
    page.keyboard.type("mlp")
    page.keyboard.press("Enter")
    assert opened.js("() => scrollY") == before
    assert "mlp" in page.inner_text("#picked")
    page.click("#picked button")
    assert opened.js("() => scrollY") < before
    page.wait_for_selector("#picked", state="hidden")


def test_time_by_module_and_type_adds_up(read: Opened) -> None:
    modules, types = (table.inner_text() for table in read.page.locator("#spent tbody").all())
    assert "model.layers.*.mlp" in modules
    assert "linear" in types
    assert "waiting for weights" in types
    shares = [float(share) for share in re.findall(r"([0-9.]+) %", types)]
    assert sum(shares) == pytest.approx(100, abs=2)


def test_boxes_are_coloured_by_device_time_or_memory(read: Opened) -> None:
    fills = {"device": read.js("() => GraphView.fill('g0')")}
    for kind in ("time", "memory"):
        read.page.select_option("#colour", kind)
        fills[kind] = read.js("() => GraphView.fill('g0')")
        assert read.page.is_visible("#heat")
    read.page.select_option("#colour", "device")
    assert read.js("() => GraphView.fill('g0')") == fills["device"]
    assert len(set(fills.values())) == 3
    assert not read.page.is_visible("#heat")


def test_opened_stage_is_visible_and_readable(show: Open) -> None:
    opened = show(llama_plan())
    opened.click("g0")
    box = opened.js("() => GraphView.box('g0')")
    assert min(box["left"], box["top"]) >= -1
    assert opened.js("() => GraphView.zoom()") >= 0.75
    stages = show(unet_plan())
    before = stages.js("() => GraphView.zoom()")
    stages.click("g0")
    fits = all(side >= 0 for side in stages.js("() => GraphView.box('g0')").values())
    assert fits or stages.js("() => GraphView.zoom()") < before


def test_long_names_are_shortened_in_the_middle(show: Open) -> None:
    page = show(llama_plan()).page
    page.set_viewport_size({"width": 420, "height": 800})
    name = page.locator("#weights .middle").first
    page.wait_for_function("() => document.querySelector('#weights .middle').textContent.includes('…')")
    text, whole = name.text_content(), name.get_attribute("title")
    head, tail = text.split("…")
    assert head
    assert tail
    assert whole.startswith(head)
    assert whole.endswith(tail)


def test_devices_show_used_and_free_memory(show: Open) -> None:
    plan = llama_plan()
    opened = show(plan, remarks=True)
    spec, peak = plan.topology.devices[0], plan.peaks[0]
    said = opened.page.inner_text("#usage .device >> nth=0")
    assert opened.js("n => `${Format.bytes(n)} free`", spec.memory - peak.nbytes) in said
    assert "weights" in said
    assert "activations" in said
    opened.click(opened.js("() => `g${Plan.stages[1].group}`"))
    details = opened.page.inner_text("#details").replace("\t", "\n")
    for key, text in llama_remarks().elsewhere[1].items():
        name = f"GPU {key}" if isinstance(key, int) else "CPU"
        assert f"on {name} instead\n{text}" in details
    assert f"modules\n{module_range(plan, plan.stages[1])}" in details


@pytest.mark.slow
def test_two_plans_side_by_side(show: Open, tmp_path: Path) -> None:
    plan = llama_plan()
    assigned = plan.schedule.assignment.operations
    graph, memory = plan.graph, budgets_of(llama()[0], 0.45)
    swapped = {
        name: 1 if "layers.0" in graph.operations[name].module_path else key for name, key in assigned.items()
    }
    other = by_hand(graph, memory, swapped)
    plan.save_html(tmp_path / "two.html", other=other)
    opened = show(plan, html=(tmp_path / "two.html").read_text(encoding="utf-8"))
    page = opened.page
    both = page.inner_text("#both")
    for one in (plan, other):
        assert opened.js("s => Format.seconds(s)", one.makespan) in both
        assert opened.js("n => Format.bytes(n)", one.peak_bytes[0]) in both
    row = page.locator("#moved tbody tr", has_text="operations").first
    assert re.match(r"model\.layers\.0\s+\d+ operations\s+GPU 1\s+GPU 0", row.inner_text())
    row.click()
    assert opened.js("() => GraphView.chosen()") == ["g0"]
    opened.shoot("two", whole=True)
    with pytest.raises(PlanError, match="another model"):
        plan.save_html(tmp_path / "no.html", other=hostile_plan())
    assert not show(plan).page.is_visible("#compare")
