"use strict";
// When each device computes, receives and streams; the measured call, if there is one, below the estimated.

const Timeline = (() => {
  const box = Dom.byId("timeline-charts");
  const ROW = 20, LEFT = 132, RIGHT = 14, AXIS = 24, SPLIT = 10;
  const KINDS = { r: "compute", m: "transfers in", l: "streams", w: "waits" };
  // What is shown, as parts of each call's own length: a measured call may be far longer than the estimated.
  let from = 0, to = 1, drawn = [];

  // One row for each device and kind that has events; waits are in the row of streamed weights.
  function rowsOf(events, name) {
    const length = Math.max(events.seconds, 1e-12), measured = name === "measured";
    const rows = new Map();
    events.kind.forEach((kind, index) => {
      const row = kind === "w" ? "r" : kind;
      const key = `${events.device[index]}${row}`;
      if (!rows.has(key)) rows.set(key, { device: events.device[index], kind: row, measured, events, members: [] });
      if (events.end[index] > events.start[index]) rows.get(key).members.push(index);
    });
    const order = "rml";
    const sorted = [...rows.values()].filter((row) => row.members.length)
      .sort((a, b) => a.device - b.device || order.indexOf(a.kind) - order.indexOf(b.kind));
    return { name, length, rows: sorted };
  }

  const calls = [rowsOf(Plan.estimated, "estimated"), ...(Plan.measured ? [rowsOf(Plan.measured, "measured")] : [])];

  // Events that would share a pixel are drawn as one bar.
  function bars(row, x, first, last) {
    const { events, members } = row, found = [];
    for (const index of members) {
      if (events.end[index] < first || events.start[index] > last) continue;
      const left = x(Math.max(first, events.start[index])), right = x(Math.min(last, events.end[index]));
      const wait = events.kind[index] === "w";
      const before = found[found.length - 1];
      if (before && before.wait === wait && left - before.right < 0.6 && (before.right - before.left < 1.5 || right - left < 1.5)) {
        before.right = Math.max(before.right, right);
        before.members.push(index);
      } else found.push({ left, right, wait, members: [index] });
    }
    return found;
  }

  function niceStep(span, count) {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw);
  }

  function title(row, bar) {
    const { events } = row, first = bar.members[0];
    if (bar.members.length > 1) return Format.count(bar.members.length, bar.wait ? "wait" : row.kind === "r" ? "operation" : "copy", row.kind === "r" ? undefined : "copies");
    const what = events.what[first];
    return typeof what === "number" ? Model.place(what) : bar.wait ? `waits for ${what}` : what;
  }

  function tip(row, bar, event) {
    const { events } = row, first = bar.members[0], last = bar.members[bar.members.length - 1];
    const busy = bar.members.reduce((sum, index) => sum + events.end[index] - events.start[index], 0);
    const what = events.what[first];
    const rows = [
      [row.measured ? "measured" : "time", Format.seconds(busy)],
      ["from", Format.seconds(events.start[first])],
      ["to", Format.seconds(events.end[last])],
      ["device", Model.deviceName(row.device)],
    ];
    if (typeof what === "number") rows.push(["operation", Plan.operations.name[what]]);
    Tip.show(title(row, bar), rows, event.clientX, event.clientY);
  }

  function drawRow(row, top, x, first, last) {
    const colour = row.kind === "m" ? "var(--transfer)" : `var(--device-${row.device})`;
    const draw = (bar) => Dom.svg("rect", {
      class: `bar ${bar.wait ? "wait" : KINDS[row.kind].split(" ")[0]}`, x: bar.left, y: top + 3, height: ROW - 6, width: Math.max(0.75, bar.right - bar.left - 0.3),
      rx: 2, fill: bar.wait ? "url(#waiting)" : colour, opacity: row.kind === "l" ? 0.55 : 0.9,
      onmousemove: (event) => tip(row, bar, event), onmouseleave: () => Tip.hide(),
      onclick: () => {
        const what = row.events.what[bar.members[0]];
        if (typeof what === "number" && Model.hasPlace(what)) View.choose({ node: Model.operation(what) }, { centre: true });
      },
    });
    return bars(row, x, first, last).map((bar) => {
      const element = draw(bar);
      drawn.push({ element, what: bar.members.map((index) => row.events.what[index]) });
      return element;
    });
  }

  // Bars of what is chosen, and of the copies that belong to it.
  function mark() {
    const chosen = new Set([...View.operations(), ...View.copies()]);
    drawn.forEach(({ element, what }) => element.classList.toggle("chosen", what.some((one) => chosen.has(one))));
  }

  // The axis and the rows of one call; returns where they end.
  function drawCall(call, y, width, parts) {
    const inner = width - LEFT - RIGHT, first = from * call.length, last = to * call.length;
    const x = (time) => LEFT + inner * (time - first) / (last - first);
    const body = [];
    let top = y + AXIS, device = null;
    for (const row of call.rows) {
      if (row.device !== device && device !== null) top += SPLIT / 2;
      const label = row.device === device ? KINDS[row.kind] : `${Model.deviceName(row.device)}  ${KINDS[row.kind]}`;
      device = row.device;
      body.push(
        Dom.svg("rect", { class: "track", x: LEFT, y: top + 3, width: inner, height: ROW - 6, rx: 2 }),
        Dom.svg("text", { class: "tick", x: LEFT - 10, y: top + 14, "text-anchor": "end" }, label),
        ...drawRow(row, top, x, first, last),
      );
      top += ROW;
    }
    const step = niceStep(last - first, Math.max(3, inner / 110));
    for (let time = Math.ceil(first / step) * step; time <= last + step * 1e-6; time += step) {
      parts.push(Dom.svg("line", { class: "grid", x1: x(time), x2: x(time), y1: y + AXIS - 6, y2: top }));
      if (calls.length > 1 && x(time) < LEFT + 30) continue; // the name of the call is there
      parts.push(Dom.svg("text", { class: "tick", x: x(time), y: y + AXIS - 10, "text-anchor": x(time) > width - 50 ? "end" : "middle" }, Format.seconds(time)));
    }
    if (calls.length > 1) parts.push(Dom.svg("text", { class: "group", x: 0, y: y + AXIS - 10 }, `${call.name}, ${Format.seconds(call.length)}`));
    parts.push(...body);
    return top + SPLIT;
  }

  function draw() {
    const width = Math.max(360, box.clientWidth);
    const parts = [];
    drawn = [];
    let y = 0;
    for (const call of calls) y = drawCall(call, y, width, parts) + (calls.length > 1 ? SPLIT : 0);
    const pattern = Dom.svg("defs", {}, Dom.svg("pattern", { id: "waiting", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      Dom.svg("rect", { width: 5, height: 5, fill: "var(--surface)" }), Dom.svg("rect", { width: 2, height: 5, fill: "var(--muted)" })));
    const root = Dom.svg("svg", {
      class: "chart timeline", width, height: y, viewBox: `0 0 ${width} ${y}`, tabindex: "0", role: "img",
      "aria-label": `Timeline of one ${Plan.summary.call}: ${calls.map((call) => `${Format.seconds(call.length)} ${call.name}`).join(", ")}`,
    }, pattern, parts);
    listen(root, width - LEFT - RIGHT);
    const focused = box.contains(document.activeElement);
    box.replaceChildren(root);
    if (focused) root.focus({ preventScroll: true });
    mark();
  }

  function show(start, end) {
    const span = Math.min(1, Math.max(1 / 5000, end - start));
    from = Math.max(0, Math.min(1 - span, start));
    to = from + span;
    draw();
  }

  const zoom = (factor, at = (from + to) / 2) => show(at - (at - from) * factor, at + (to - at) * factor);
  const pan = (part) => show(from + part * (to - from), to + part * (to - from));

  function listen(root, inner) {
    root.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        const at = from + (to - from) * (event.clientX - root.getBoundingClientRect().left - LEFT) / inner;
        zoom(Math.exp(event.deltaY / 300), at);
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / inner);
      else return;
      event.preventDefault();
    }, { passive: false });
    root.addEventListener("keydown", (event) => {
      const actions = {
        ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), 0: () => show(0, 1),
      };
      if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      actions[event.key]();
    });
  }

  function start() {
    const item = (name, text) => Dom.el("li", {}, Dom.el("i", { class: `key ${name}` }), text);
    const has = (kind) => Plan.estimated.kind.includes(kind);
    Dom.byId("time-legend").append(...[
      item("compute", "compute"),
      has("m") ? item("moved", "transfers in") : null,
      has("l") ? item("streamed", "streamed weights") : null,
      has("w") ? item("waiting", "waiting for a weight") : null,
    ].filter(Boolean));
    const hidden = Plan.summary.hiddenSeconds;
    Dom.byId("timeline-hint").textContent = hidden > 0 ? `${Format.seconds(hidden)} of the weight streaming is hidden behind other work.` : "When each device computes and receives.";
    Dom.byId("time-all").addEventListener("click", () => show(0, 1));
    Dom.byId("time-in").addEventListener("click", () => zoom(0.6));
    Dom.byId("time-out").addEventListener("click", () => zoom(1 / 0.6));
    draw();
    View.on((change) => { if (change.chosen !== undefined) mark(); });
  }

  return { start, draw };
})();
