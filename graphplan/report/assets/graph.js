"use strict";
// The picture of stages, modules and operations. Only what is visible exists as an element.

const GraphView = (() => {
  const canvas = Dom.byId("canvas"), lanesBox = Dom.byId("lanes"), namesBox = Dom.byId("lane-names");
  const idOf = (node) => (Model.isGroup(node) ? `g${node}` : `o${Model.index(node)}`);
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const MANY_FLOWS = 24; // arrows
  const READABLE = 0.75; // zoom
  const STRIP = 20; // pixels of the overview
  const WEIGH = { // what the colour of a box shows, but for its device
    time: Model.seconds,
    memory: (node) => (Model.isGroup(node) ? Plan.groups[node].weights + Plan.groups[node].made : Model.bytes(Model.index(node))),
  };
  let cy = null, placed = null, coloured = "device";

  // Where a box is on the canvas.
  const frame = (element) => element.renderedBoundingBox({ includeLabels: false, includeOverlays: false });

  const clip = (text, width, size) => Dom.clip(text, width - 14, size);

  function caption(node, box) {
    if (!Model.isGroup(node)) return clip(Model.label(node), box.w, 11);
    const group = Plan.groups[node];
    const time = Format.seconds(group.seconds);
    if (Model.isStage(node)) {
      const head = `${box.open ? "▾" : "▸"} ${Model.label(node)}`;
      if (box.open) return `${head} · ${time}`;
      const about = Model.about(node);
      const lines = [head, ...(about ? [clip(about, box.w, 14)] : []), clip(`${time} · ${Format.count(group.count, "op")}`, box.w, 14)];
      return lines.join("\n");
    }
    const head = clip(`${box.open ? "▾" : "▸"} ${group.label}`, box.w, 12);
    return box.open ? `${head} · ${time}` : `${head}\n${time}`;
  }

  // How much of a box is tinted: its time beside that of its slowest sibling.
  function share(node) {
    const up = Model.parent(node);
    if (up < 0) return 1;
    const most = Math.max(...Model.children(up).map(Model.seconds));
    return most > 0 ? Model.seconds(node) / most : 0;
  }

  // A figure of each box beside the largest of those that are closed; none where the device is shown.
  function heats() {
    const weigh = WEIGH[coloured], closed = [...placed.boxes.keys()].filter((node) => !placed.boxes.get(node).open);
    const most = weigh && Math.max(...closed.map(weigh));
    return (node) => (most > 0 ? Math.min(1, weigh(node) / most) : 0);
  }

  function nodeElement(node, box, heat) {
    const kind = Model.isStage(node) ? "stage" : Model.isGroup(node) ? "group" : "operation";
    const classes = box.open ? `${kind} open` : kind;
    const part = Math.round(100 * share(node));
    return {
      group: "nodes",
      classes,
      data: { id: idOf(node), node, label: caption(node, box), w: box.w, h: box.h, device: Model.device(node), part, depth: box.depth, heat },
      position: { x: box.x, y: box.y },
    };
  }

  function chipElement(chip) {
    const label = `${chip.label}\n${Format.bytes(chip.bytes)}`;
    return {
      group: "nodes",
      classes: "chip",
      data: { id: chip.id, chip, label, w: chip.w, h: chip.h, device: chip.device, part: 0, depth: 9 },
      position: { x: chip.x, y: chip.y },
    };
  }

  function edgeElement(id, source, target, classes, data) {
    return { group: "edges", classes, data: { id, source, target, label: "", device: 0, width: 1.2, ...data } };
  }

  // Whether an arrow begins or ends inside an open stage: faint, where there are many.
  const reaches = (ends) => ends.some((id) => id !== "in" && id !== "out" && !(id[0] === "g" && Model.isStage(Number(id.slice(1)))));
  const thickness = (bytes) => Math.min(6, 1.6 + Math.log2(1 + bytes / 65536) * 0.32);

  // Copies between the visible nodes, those between the same two as one arrow.
  function flowEdges(reps) {
    const found = new Map();
    Plan.flows.forEach((flow, index) => {
      const maker = reps.of(flow.maker), reader = reps.of(flow.reader);
      let ends = null;
      if (flow.kind === "activation" && maker !== null && reader !== null) ends = [idOf(maker), idOf(reader)];
      if (flow.kind === "input" && reader !== null) ends = ["in", idOf(reader)];
      if ((flow.kind === "output" || flow.kind === "writeback") && maker !== null) ends = [idOf(maker), "out"];
      if (!ends || ends[0] === ends[1]) return;
      const key = `${ends[0]}>${ends[1]}`;
      const edge = found.get(key) || { ends, bytes: 0, flows: [], kind: flow.kind, device: flow.from };
      edge.bytes += flow.bytes;
      edge.flows.push(index);
      found.set(key, edge);
    });
    return found;
  }

  // Whether an edge joins what is inside one box with what is outside: it is drawn faintly.
  const leaves = (a, b) => Model.parent(a) !== Model.parent(b);

  function elements() {
    const made = [];
    const heat = heats();
    placed.boxes.forEach((box, node) => made.push(nodeElement(node, box, heat(node))));
    placed.special.forEach((chip) => made.push(chipElement(chip)));
    const flows = flowEdges(placed.reps);
    const crowded = flows.size > MANY_FLOWS;
    flows.forEach((edge, key) => {
      const classes = edge.kind === "activation" ? "transfer" : "end";
      const width = edge.kind === "activation" ? thickness(edge.bytes) : 1.4;
      const data = { label: Format.bytes(edge.bytes), width, flows: edge.flows, device: edge.device };
      made.push(edgeElement(`f:${key}`, ...edge.ends, crowded && reaches(edge.ends) ? `${classes} far` : classes, data));
    });
    for (const chip of placed.special) {
      if (chip.stage === undefined) continue;
      const data = { width: Math.min(3, thickness(chip.bytes)), flows: chip.flows, device: chip.device };
      made.push(edgeElement(`w:${chip.id}`, chip.id, idOf(Model.stages[chip.stage]), "stream", data));
    }
    placed.pairs.forEach(([a, b]) => {
      const key = `${idOf(a)}>${idOf(b)}`;
      if (!flows.has(key)) made.push(edgeElement(`d:${key}`, idOf(a), idOf(b), leaves(a, b) ? "dependency far" : "dependency", {}));
    });
    return made;
  }

  function drawLanes() {
    lanesBox.replaceChildren(...placed.lanes.map((lane) => Dom.el("div", { class: "lane", style: `--device: var(--device-${lane.device})` })));
    namesBox.replaceChildren(...placed.lanes.map((lane) => {
      const device = Plan.devices[lane.device];
      const budget = device.budget === null ? "" : ` of ${Format.bytes(device.budget)}`;
      return Dom.el("div", { class: "lane-name", style: `--device: var(--device-${lane.device})` },
        Dom.el("span", {}, Dom.el("b", {}, device.name), ` ${device.device === device.key ? "" : device.device} `,
          Dom.el("i", { class: "peak" }, `peak ${Format.bytes(device.peak)}${budget}`)));
    }));
    const stages = Model.stages.map((stage) => ({ ...placed.boxes.get(stage), device: Model.device(stage) }));
    const all = cy.nodes().boundingBox({ includeLabels: false });
    Overview.draw(stages, [all.x1, all.x2], (x) => cy.viewport({ zoom: cy.zoom(), pan: { x: canvas.clientWidth / 2 - x * cy.zoom(), y: cy.pan().y } }));
    followLanes();
  }

  // A vertical place at which lanes leave no part of the canvas empty that they could fill.
  const within = (zoom, y) => Math.min(0, Math.max(y, canvas.clientHeight - placed.tall * zoom));

  function followLanes() {
    const zoom = cy.zoom(), pan = cy.pan();
    Overview.follow(-pan.x / zoom, (canvas.clientWidth - pan.x) / zoom);
    placed.lanes.forEach((lane, index) => {
      const top = lane.top * zoom + pan.y, bottom = top + lane.h * zoom;
      namesBox.children[index].style.top = `${top}px`;
      // the first and the last lane go on to the edges of the canvas
      const from = index === 0 ? Math.min(0, top) : top;
      const to = index === placed.lanes.length - 1 ? Math.max(canvas.clientHeight, bottom) : bottom;
      lanesBox.children[index].style.top = `${from}px`;
      lanesBox.children[index].style.height = `${to - from}px`;
    });
  }

  function refresh(anchor) {
    const before = anchor === null ? null : cy.getElementById(idOf(anchor));
    const at = before && before.length ? frame(before) : null;
    placed = Layout.place();
    cy.batch(() => {
      cy.elements().remove();
      cy.add(elements());
    });
    const after = at && cy.getElementById(idOf(anchor));
    if (after && after.length) {
      const now = frame(after);
      cy.panBy({ x: at.x1 - now.x1, y: 0 });
      cy.pan({ x: cy.pan().x, y: within(cy.zoom(), cy.pan().y + at.y1 - now.y1) });
    }
    drawLanes();
    mark();
  }

  function mark() {
    cy.elements(".chosen, .near").removeClass("chosen near");
    const chosen = View.chosen();
    if (!chosen) return;
    if (chosen.flows) cy.edges().filter((edge) => (edge.data("flows") || []).some((flow) => chosen.flows.includes(flow))).addClass("chosen near");
    const shown = chosen.node !== undefined ? [chosen.node] : View.nodes().map((node) => placed.reps.of(Model.index(node)));
    for (const node of new Set(shown)) {
      if (node !== null) cy.getElementById(idOf(node)).addClass("chosen").connectedEdges().addClass("near");
    }
  }

  function fit() {
    cy.resize();
    const width = canvas.clientWidth, height = canvas.clientHeight;
    const zoom = Layout.suit(width, height - STRIP);
    refresh(null);
    const all = cy.nodes().boundingBox({ includeLabels: false });
    const spare = width - all.w * zoom;
    cy.viewport({ zoom, pan: { x: (spare > 0 ? spare / 2 : 28) - all.x1 * zoom, y: 0 } });
    followLanes();
  }

  // Bring a box that was just opened into view, smaller if need be.
  function show(node) {
    const element = cy.getElementById(idOf(node));
    if (!element.length) return;
    const box = frame(element);
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (box.x1 >= 0 && box.y1 >= 0 && box.x2 <= width && box.y2 <= height) return;
    const { w, h } = element.data(), { x, y } = element.position();
    const zoom = Math.max(READABLE, Math.min(cy.zoom(), (width - 48) / w, (height - 48) / h));
    const top = Math.max(40, Math.min(box.y1, height - h * zoom - 16));
    const left = w * zoom < width ? (width - w * zoom) / 2 : 24;
    travel(zoom, { x: left - (x - w / 2) * zoom, y: within(zoom, top - (y - h / 2) * zoom) });
  }

  function travel(zoom, pan) {
    if (calm) cy.viewport({ zoom, pan });
    else cy.animate({ zoom, pan }, { duration: 180 });
  }

  function centre(node) {
    const element = cy.getElementById(idOf(node));
    if (!element.length) return;
    const zoom = Math.max(cy.zoom(), 0.8);
    const { x, y } = element.position();
    const pan = { x: canvas.clientWidth / 2 - x * zoom, y: canvas.clientHeight / 2 - y * zoom };
    travel(zoom, pan);
  }

  const isSeen = () => canvas.getBoundingClientRect().bottom > 120 && canvas.getBoundingClientRect().top < innerHeight - 120;

  // On paper; afterwards the view is what it was.
  let onScreen = null, unpack = null;
  function print(begins) {
    if (begins) onScreen = { zoom: cy.zoom(), pan: { ...cy.pan() } };
    document.documentElement.classList.toggle("printing", begins);
    if (begins) {
      unpack = Layout.pack();
      refresh(null);
      cy.resize();
      Paper.lay({ cy, canvas, lanes: lanesBox, names: namesBox, follow: followLanes, tall: placed.tall });
    } else {
      Paper.clear(canvas);
      unpack();
      refresh(null);
      cy.resize();
      cy.viewport(onScreen);
      followLanes();
    }
  }

  const zoomBy = (factor) => {
    const point = { x: canvas.clientWidth / 2, y: canvas.clientHeight / 2 };
    cy.zoom({ level: cy.zoom() * factor, renderedPosition: point });
  };

  function listen() {
    cy.on("tap", () => Tip.hide());
    cy.on("tap", "node", (event) => {
      const node = event.target.data("node");
      if (node === undefined) View.choose({ flows: event.target.data("chip").flows });
      else {
        View.choose({ node });
        if (Model.isGroup(node)) View.toggle(node);
      }
    });
    cy.on("tap", "edge", (event) => {
      const flows = event.target.data("flows");
      if (flows) View.choose({ flows });
    });
    cy.on("mousemove", "node, edge", (event) => {
      const data = event.target.data(), chip = data.chip;
      const thing = data.node !== undefined ? { node: data.node } : { flows: chip ? chip.flows : data.flows };
      canvas.style.cursor = thing.node !== undefined || thing.flows ? "pointer" : "";
      if (thing.node === undefined && !thing.flows) return Tip.hide();
      const { title, rows } = Details.describe(thing);
      return Tip.show(title, rows, event.originalEvent.clientX, event.originalEvent.clientY);
    });
    cy.on("mouseout", "node, edge", () => { canvas.style.cursor = ""; Tip.hide(); });
    cy.on("viewport", followLanes);
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        const box = canvas.getBoundingClientRect();
        const point = { x: event.clientX - box.left, y: event.clientY - box.top };
        cy.zoom({ level: cy.zoom() * Math.exp(-event.deltaY / 300), renderedPosition: point });
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        cy.panBy({ x: -(event.deltaX || event.deltaY), y: 0 });
      } else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", keys);
  }

  function keys(event) {
    const chosen = View.chosen();
    const node = chosen && chosen.node !== undefined ? chosen.node : null;
    const actions = {
      ArrowLeft: () => cy.panBy({ x: 60, y: 0 }),
      ArrowRight: () => cy.panBy({ x: -60, y: 0 }),
      ArrowUp: () => cy.panBy({ x: 0, y: 60 }),
      ArrowDown: () => cy.panBy({ x: 0, y: -60 }),
      "+": () => zoomBy(1.25),
      "=": () => zoomBy(1.25),
      "-": () => zoomBy(0.8),
      0: fit,
      Enter: () => node !== null && View.toggle(node),
      Backspace: () => node !== null && Model.parent(node) >= 0 && View.choose({ node: Model.parent(node) }, { centre: true }),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  function start() {
    cy = cytoscape({
      container: Dom.byId("graph"), style: graphStyle(coloured), layout: { name: "preset" }, autoungrabify: true, autounselectify: true,
      boxSelectionEnabled: false, userZoomingEnabled: false, minZoom: 0.02, maxZoom: 2.5, pixelRatio: "auto",
    });
    fit();
    listen();
    Overview.start();
    View.on((change) => {
      if (change.opened !== undefined && change.opened !== null) refresh(change.opened);
      if (change.chosen !== undefined) mark();
      if (change.opened >= 0 && View.isOpen(change.opened)) show(change.opened);
      if (change.centre && View.nodes().length) {
        centre(View.nodes()[0]);
        if (change.scroll && !isSeen()) Dom.byId("stages").scrollIntoView();
      }
      if (change.opened === null) fit();
    });
    Colours.on(() => cy.style(graphStyle(coloured)));
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
    Dom.byId("colour").addEventListener("change", (event) => {
      coloured = event.target.value;
      Dom.byId("heat").hidden = coloured === "device";
      refresh(null);
      cy.style(graphStyle(coloured));
    });
    Dom.byId("fit").addEventListener("click", fit);
    Dom.byId("collapse").addEventListener("click", () => View.closeAll());
    Dom.byId("zoom-in").addEventListener("click", () => zoomBy(1.25));
    Dom.byId("zoom-out").addEventListener("click", () => zoomBy(0.8));
    new ResizeObserver(() => { cy.resize(); followLanes(); }).observe(canvas);
  }

  return {
    start,
    // for tests: what is drawn, and where on the screen
    zoom: () => cy.zoom(),
    chosen: () => cy.elements(".chosen").map((element) => element.id()),
    fill: (id) => cy.getElementById(id).style("background-gradient-stop-colors"),
    box(id) {
      const { width, height } = canvas.getBoundingClientRect(), box = frame(cy.getElementById(id));
      return { left: box.x1, right: width - box.x2, top: box.y1, bottom: height - box.y2 };
    },
    ids: () => cy.nodes().map((node) => node.id()),
    widths: () => cy.nodes().map((node) => node.data("w")),
    labels: () => cy.nodes().map((node) => node.data("label")),
    edges: () => cy.edges().map((edge) => ({ ...edge.data(), classes: edge.classes() })),
    point(id) {
      const box = canvas.getBoundingClientRect(), at = cy.getElementById(id).renderedPosition();
      return { x: box.left + at.x, y: box.top + at.y };
    },
  };
})();
