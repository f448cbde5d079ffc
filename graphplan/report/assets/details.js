"use strict";
// What there is to say of a node, a weight or some copies: for the tooltip and for the panel.

const Details = (() => {
  const panel = Dom.byId("details");
  const measured = new Map(); // seconds of each operation
  if (Plan.measured) {
    const { what, kind, start, end } = Plan.measured;
    what.forEach((op, i) => { if (kind[i] === "r") measured.set(op, end[i] - start[i]); });
  }
  const some = (rows) => rows.filter(([, value]) => value !== "" && value !== null && value !== undefined);

  function operation(op) {
    const columns = Plan.operations;
    const reads = columns.reads[op].map((index) => Plan.weights[index]);
    return {
      kind: "operation",
      title: columns.name[op],
      rows: some([
        ["target", columns.target[op]],
        ["device", Model.deviceName(columns.device[op])],
        ["time", Format.seconds(columns.seconds[op])],
        ["measured", measured.has(op) ? Format.seconds(measured.get(op)) : ""],
        ["starts at", Format.seconds(Model.start(op))],
        ["FLOPs", columns.flops[op] ? Format.flops(columns.flops[op]) : ""],
        ["output size", Format.bytes(columns.made[op])],
        ["output", columns.result[op]],
        ["weight size", reads.length ? Format.bytes(reads.reduce((sum, weight) => sum + weight.bytes, 0)) : ""],
        ["weights", reads.map((weight) => weight.name).join(", ")],
        ["module", Model.module(op)],
        ["source", Model.source(op)],
      ]),
    };
  }

  function group(node) {
    const item = Plan.groups[node];
    return {
      kind: item.kind === "run" ? "consecutive operations" : item.kind,
      title: Model.isStage(node) ? `${Model.label(node)} on ${Model.deviceName(Model.device(node))}` : item.label,
      rows: some([
        ["modules", Model.isStage(node) ? Plan.stages[Model.stage(node)].modules : ""],
        ["module", item.path],
        ["device", Model.deviceName(Model.device(node))],
        ["time", Format.seconds(item.seconds)],
        ["operations", item.count.toLocaleString("en")],
        ["FLOPs", item.flops ? Format.flops(item.flops) : ""],
        ["weights", Format.bytes(item.weights)],
        ["output size", Format.bytes(item.made)],
        ...(Model.isStage(node) ? Plan.stages[Model.stage(node)].elsewhere.map(([device, cost]) => [`on ${device} instead`, cost]) : []),
      ]),
    };
  }

  function weight(index) {
    const item = Plan.weights[index];
    const readers = Model.readers(index);
    return {
      kind: item.kind,
      title: item.name,
      rows: some([
        ["resides on", Model.deviceName(item.home)],
        ["bytes", Format.bytes(item.bytes)],
        ["shape", item.shape],
        ["shared with", item.names.join(", ")],
        ["part of", item.partOf],
        ["read by", readers.map(Model.place).join(", ") || "nothing"],
      ]),
    };
  }

  function flows(indices) {
    const chosen = indices.map((index) => Plan.flows[index]);
    const bytes = chosen.reduce((sum, flow) => sum + flow.bytes, 0);
    const seconds = chosen.reduce((sum, flow) => sum + flow.end - flow.start, 0);
    const names = chosen.map(Model.carried);
    const first = chosen[0];
    const words = { activation: "transfer", weight: "weights streamed", input: "inputs", output: "outputs", writeback: "written back", gradient: "gradients" };
    return {
      kind: words[first.kind],
      title: `${Model.deviceName(first.from)} → ${Model.deviceName(first.to)}`,
      rows: some([
        ["bytes", Format.bytes(bytes)],
        ["time", Format.seconds(seconds)],
        ["copies", chosen.length.toLocaleString("en")],
        ["what", names.slice(0, 6).join(", ") + (names.length > 6 ? ` and ${names.length - 6} more` : "")],
      ]),
    };
  }

  function several({ operations, title }) {
    const total = (values) => operations.reduce((all, op) => all + values[op], 0), columns = Plan.operations;
    return {
      kind: Format.count(operations.length, "operation"),
      title,
      rows: some([
        ["devices", [...new Set(operations.map((op) => Model.deviceName(columns.device[op])))].join(", ")],
        ["time", Format.seconds(total(columns.seconds))],
        ["FLOPs", Format.flops(total(columns.flops))],
        ["output size", Format.bytes(total(columns.made))],
      ]),
    };
  }

  function describe(thing) {
    if (thing.operations) return several(thing);
    if (thing.node !== undefined) return Model.isGroup(thing.node) ? group(thing.node) : operation(Model.index(thing.node));
    return thing.weight !== undefined ? weight(thing.weight) : flows(thing.flows);
  }

  function show(thing) {
    panel.hidden = !thing; // the graph has all of the room until something is chosen
    if (!thing) return;
    const { kind, title, rows } = describe(thing);
    picked.firstElementChild.textContent = [title, kind, rows.find(([key]) => key === "time" || key === "bytes")[1]].join(" · ");
    offer();
    panel.replaceChildren(
      Dom.el("p", { class: "kind" }, kind),
      Dom.el("h3", {}, title),
      Dom.pairs(rows),
    );
  }

  // Where the panel is out of sight, a line at the foot of the window says what is chosen.
  const bench = Dom.byId("stages"), picked = Dom.byId("picked");
  function offer() {
    const box = bench.getBoundingClientRect();
    picked.hidden = !View.chosen() || (box.bottom > 160 && box.top < innerHeight - 160);
  }

  function start() {
    show(null);
    addEventListener("scroll", offer, { passive: true });
    picked.lastElementChild.addEventListener("click", () => bench.scrollIntoView());
    View.on((change) => { if (change.chosen !== undefined) show(change.chosen); });
  }

  return { start, describe, measured: (op) => measured.get(op) };
})();
