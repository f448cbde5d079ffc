"use strict";
// Where the visible boxes go: stages in the order of the call from left to right, each in the lane of its
// device; inside an open box dagre's layered layout of what is right inside.

const Layout = (() => {
  const GAP = 40, PAD = 18, HEAD = 30, CHIP = { w: 92, h: 40 };
  const LANE = { pad: 30, least: 104, most: 260 };
  let least = LANE.least;

  // The visible node that stands for each operation.
  function standIns() {
    const rep = new Int32Array(Model.operations);
    const has = new Uint8Array(Model.operations);
    const visit = (node, shown) => {
      for (const child of Model.children(node)) {
        const visible = View.isOpen(node) && shown === node ? child : shown;
        if (Model.isGroup(child)) visit(child, visible);
        else {
          rep[Model.index(child)] = visible;
          has[Model.index(child)] = 1;
        }
      }
    };
    Model.stages.forEach((stage) => visit(stage, stage));
    return { of: (op) => (op !== null && has[op] ? rep[op] : null) };
  }

  // Pairs of visible nodes that depend on one another, and for each open box the pairs right inside.
  function links(reps) {
    const pairs = new Map(), inside = new Map();
    const ends = Plan.dependencies;
    for (let i = 0; i < ends.length; i += 2) {
      const a = reps.of(ends[i]), b = reps.of(ends[i + 1]);
      if (a === null || b === null || a === b) continue;
      const key = `${a}>${b}`;
      if (pairs.has(key)) continue;
      pairs.set(key, [a, b]);
      const up = [...Model.ancestors(a), a], down = [...Model.ancestors(b), b];
      let depth = 0;
      while (up[depth] === down[depth]) depth += 1;
      if (depth === 0) continue;
      const box = up[depth - 1];
      if (!inside.has(box)) inside.set(box, new Map());
      inside.get(box).set(`${up[depth]}>${down[depth]}`, [up[depth], down[depth]]);
    }
    return { pairs, inside };
  }

  const slowest = Math.max(...Model.stages.map(Model.seconds), 1e-12);
  const textWidth = (text, size) => Dom.textWidth(text, size, 600) + 26;

  function closedSize(node) {
    if (Model.isStage(node)) {
      const text = Math.min(240, textWidth(Model.about(node), 14) - 12);
      return { w: Math.max(140, text, 220 * Model.seconds(node) / slowest), h: 80 };
    }
    if (Model.isGroup(node)) return { w: Math.min(210, Math.max(96, textWidth(`▸ ${Model.label(node)}`, 12))), h: 50 };
    return { w: Math.min(190, Math.max(64, textWidth(Model.label(node), 11))), h: 32 };
  }

  // Size of a node, and of an open one the places of its children from its own top left corner.
  function measure(node, inside, found) {
    if (!View.isOpen(node)) {
      const size = closedSize(node);
      found.set(node, { ...size, children: null });
      return size;
    }
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ rankdir: "LR", nodesep: 14, ranksep: 34, edgesep: 8 });
    graph.setDefaultEdgeLabel(() => ({}));
    for (const child of Model.children(node)) {
      const size = measure(child, inside, found);
      graph.setNode(String(child), { width: size.w, height: size.h });
    }
    for (const [a, b] of (inside.get(node) || new Map()).values()) graph.setEdge(String(a), String(b));
    dagre.layout(graph);
    const { width, height } = graph.graph();
    const children = Model.children(node).map((child) => {
      const at = graph.node(String(child));
      return { node: child, x: at.x + PAD, y: at.y + HEAD + PAD / 2 };
    });
    const w = Math.max(width + 2 * PAD, textWidth(Model.label(node), 13) + 60);
    const size = { w, h: height + HEAD + PAD * 1.5 };
    found.set(node, { ...size, children });
    return size;
  }

  function spread(node, x, y, sizes, boxes, depth) {
    const { w, h, children } = sizes.get(node);
    boxes.set(node, { x, y, w, h, depth, open: children !== null });
    for (const child of children || []) {
      spread(child.node, x - w / 2 + child.x, y - h / 2 + child.y, sizes, boxes, depth + 1);
    }
  }

  // Bytes of weights that each stage streams, by the device that they come from.
  function streams() {
    const found = new Map();
    Plan.flows.forEach((flow, index) => {
      if (flow.kind !== "weight" || flow.reader === null || !Model.hasPlace(flow.reader)) return;
      const stage = Model.stage(Model.operation(flow.reader));
      const key = `f${stage}_${flow.from}`;
      const chip = found.get(key) || { id: key, stage, device: flow.from, bytes: 0, flows: [] };
      chip.bytes += flow.bytes;
      chip.flows.push(index);
      found.set(key, chip);
    });
    return [...found.values()];
  }
  const chips = streams();

  function ends() {
    const found = [];
    for (const [id, kinds, label] of [["in", ["input"], "inputs"], ["out", ["output", "writeback"], "outputs"]]) {
      const flows = Plan.flows.map((flow, index) => ({ flow, index })).filter((f) => kinds.includes(f.flow.kind));
      if (!flows.length) continue;
      const first = flows[0].flow;
      const bytes = flows.reduce((sum, f) => sum + f.flow.bytes, 0);
      const device = id === "in" ? first.from : first.to;
      found.push({ id, label, device, bytes, flows: flows.map((f) => f.index) });
    }
    return found;
  }
  const callEnds = ends();

  function place() {
    const reps = standIns();
    const { pairs, inside } = links(reps);
    const sizes = new Map();
    Model.stages.forEach((stage) => measure(stage, inside, sizes));
    const heights = Plan.devices.map(() => 0);
    Model.stages.forEach((stage) => {
      const device = Model.device(stage);
      heights[device] = Math.max(heights[device], sizes.get(stage).h);
    });
    for (const chip of [...chips, ...callEnds]) heights[chip.device] = Math.max(heights[chip.device], CHIP.h);
    const lanes = [];
    let top = 0;
    heights.forEach((height, device) => {
      const h = height ? Math.max(least, height + 2 * LANE.pad + 14) : 40;
      lanes.push({ device, top, h, used: height > 0 });
      top += h;
    });
    const middle = (device) => lanes[device].top + lanes[device].h / 2 + (lanes[device].used ? 10 : 0);
    const boxes = new Map(), special = [];
    let x = 0;
    // how far inputs and outputs stand from a stage: partly above or below it, where the lane is another
    const beside = (end, stage) => (stage === undefined || Model.device(stage) === end.device ? CHIP.w + GAP : CHIP.w / 2);
    const source = callEnds.find((end) => end.id === "in");
    if (source) {
      special.push({ ...source, x: x + CHIP.w / 2, y: middle(source.device), ...CHIP });
      x += beside(source, Model.stages[0]);
    }
    Model.stages.forEach((stage, index) => {
      const mine = chips.filter((chip) => chip.stage === index);
      const width = Math.max(sizes.get(stage).w, mine.length ? CHIP.w : 0);
      spread(stage, x + width / 2, middle(Model.device(stage)), sizes, boxes, 0);
      for (const chip of mine) special.push({ ...chip, label: "weights", x: x + width / 2, y: middle(chip.device), ...CHIP });
      x += width + GAP;
    });
    const sink = callEnds.find((end) => end.id === "out");
    if (sink) x -= CHIP.w + GAP - beside(sink, Model.stages[Model.stages.length - 1]);
    if (sink) special.push({ ...sink, x: x + CHIP.w / 2, y: middle(sink.device), ...CHIP });
    return { boxes, special, lanes, pairs, reps, tall: top };
  }

  // Lanes fill a canvas of this size, as far as that looks well; returns the zoom that shows all.
  function suit(width, height) {
    least = LANE.least;
    const { boxes, special, lanes, tall } = place();
    const ends = [...boxes.values(), ...special].map((box) => box.x + box.w / 2);
    let zoom = Math.min(1.1, (width - 56) / Math.max(1, ...ends), height / tall);
    if (zoom < 0.5) zoom = Math.min(0.9, height / tall); // too much for one look: the first part, to be read
    const used = lanes.filter((lane) => lane.used).length || 1;
    const idle = lanes.filter((lane) => !lane.used).reduce((sum, lane) => sum + lane.h, 0);
    if (zoom >= 0.5) least = Math.max(LANE.least, Math.min(LANE.most, (height / zoom - idle) / used));
    return Math.max(0.5, zoom);
  }

  // Lanes as low as they can be, for paper; what undoes it.
  function pack() {
    const before = least;
    least = LANE.least;
    return () => { least = before; };
  }

  return { place, suit, pack };
})();
