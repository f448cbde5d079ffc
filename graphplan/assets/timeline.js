"use strict";
// When each device computes, receives and fetches; the measured call, if there is one, below the modelled.

const Timeline = (() => {
  const box = Dom.byId("timeline-charts");
  const ROW = 20, LEFT = 132, RIGHT = 14, AXIS = 24, SPLIT = 10;
  const KINDS = { r: "compute", m: "transfers in", l: "fetches", w: "waits" };
  const longest = Math.max(Plan.modelled.seconds, Plan.measured ? Plan.measured.seconds : 0, 1e-9);
  let from = 0, to = longest;

  // One row for each device and kind that has events; waits are in the row of fetches.
  function rowsOf(events, measured) {
    const rows = new Map();
    events.kind.forEach((kind, index) => {
      const row = kind === "w" ? "r" : kind;
      const key = `${events.device[index]}${row}`;
      if (!rows.has(key)) rows.set(key, { device: events.device[index], kind: row, measured, events, members: [] });
      if (events.end[index] > events.start[index]) rows.get(key).members.push(index);
    });
    const order = "rml";
    return [...rows.values()].filter((row) => row.members.length)
      .sort((a, b) => a.device - b.device || order.indexOf(a.kind) - order.indexOf(b.kind));
  }

  const modelled = rowsOf(Plan.modelled, false);
  const measured = Plan.measured ? rowsOf(Plan.measured, true) : [];

  // Events that would share a pixel are drawn as one bar.
  function bars(row, x) {
    const { events, members } = row, found = [];
    for (const index of members) {
      if (events.end[index] < from || events.start[index] > to) continue;
      const left = x(Math.max(from, events.start[index])), right = x(Math.min(to, events.end[index]));
      const wait = events.kind[index] === "w";
      const last = found[found.length - 1];
      if (last && last.wait === wait && left - last.right < 0.6 && (last.right - last.left < 1.5 || right - left < 1.5)) {
        last.right = Math.max(last.right, right);
        last.members.push(index);
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
    return typeof what === "number" ? Plan.operations.name[what] : bar.wait ? `waits for ${what}` : what;
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
    if (typeof what === "number" && Model.module(what)) rows.push(["module", Model.module(what)]);
    Tip.show(title(row, bar), rows, event.clientX, event.clientY);
  }

  function drawRow(row, top, x) {
    const colour = row.kind === "m" ? "var(--transfer)" : `var(--device-${row.device})`;
    return bars(row, x).map((bar) => Dom.svg("rect", {
      class: `bar ${bar.wait ? "wait" : KINDS[row.kind].split(" ")[0]}`, x: bar.left, y: top + 3, height: ROW - 6, width: Math.max(0.75, bar.right - bar.left - 0.3),
      rx: 2, fill: bar.wait ? "url(#waiting)" : colour, opacity: row.kind === "l" ? 0.55 : 0.9,
      onmousemove: (event) => tip(row, bar, event), onmouseleave: () => Tip.hide(),
      onclick: () => {
        const what = row.events.what[bar.members[0]];
        if (typeof what === "number" && Model.hasPlace(what)) View.choose({ node: Model.operation(what) }, { centre: true });
      },
    }));
  }

  function drawRows(rows, name, y, x, parts) {
    let top = y, device = null;
    if (name) {
      parts.push(Dom.svg("text", { class: "group", x: 0, y: top + 14 }, name));
      top += ROW;
    }
    for (const row of rows) {
      if (row.device !== device && device !== null) top += SPLIT / 2;
      const label = row.device === device ? KINDS[row.kind] : `${Model.deviceName(row.device)}  ${KINDS[row.kind]}`;
      device = row.device;
      parts.push(
        Dom.svg("rect", { class: "track", x: LEFT, y: top + 3, width: x(to) - LEFT, height: ROW - 6, rx: 2 }),
        Dom.svg("text", { class: "tick", x: LEFT - 10, y: top + 14, "text-anchor": "end" }, label),
        ...drawRow(row, top, x),
      );
      top += ROW;
    }
    return top + SPLIT;
  }

  function draw() {
    const width = Math.max(360, box.clientWidth), inner = width - LEFT - RIGHT;
    const x = (time) => LEFT + inner * (time - from) / (to - from);
    const parts = [];
    let y = drawRows(modelled, measured.length ? "modelled" : "", AXIS, x, parts);
    if (measured.length) y = drawRows(measured, "measured", y, x, parts);
    const step = niceStep(to - from, Math.max(3, inner / 110));
    const axis = [];
    for (let time = Math.ceil(from / step) * step; time <= to + step * 1e-6; time += step) {
      axis.push(Dom.svg("line", { class: "grid", x1: x(time), x2: x(time), y1: AXIS - 6, y2: y - SPLIT }),
        Dom.svg("text", { class: "tick", x: x(time), y: AXIS - 10, "text-anchor": x(time) > width - 50 ? "end" : "middle" }, Format.seconds(time)));
    }
    const pattern = Dom.svg("defs", {}, Dom.svg("pattern", { id: "waiting", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      Dom.svg("rect", { width: 5, height: 5, fill: "var(--surface)" }), Dom.svg("rect", { width: 2, height: 5, fill: "var(--muted)" })));
    const root = Dom.svg("svg", {
      class: "chart timeline", width, height: y, viewBox: `0 0 ${width} ${y}`, tabindex: "0", role: "img",
      "aria-label": `Timeline of one call: ${Format.seconds(Plan.modelled.seconds)} modelled`,
    }, pattern, axis, parts);
    listen(root, inner);
    const focused = box.contains(document.activeElement);
    box.replaceChildren(root);
    if (focused) root.focus({ preventScroll: true });
  }

  function show(start, end) {
    const span = Math.min(longest, Math.max(longest / 5000, end - start));
    from = Math.max(0, Math.min(longest - span, start));
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
        ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), 0: () => show(0, longest),
      };
      if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      actions[event.key]();
    });
  }

  function start() {
    const item = (name, text) => Dom.el("li", {}, Dom.el("i", { class: `key ${name}` }), text);
    const has = (kind) => Plan.modelled.kind.includes(kind);
    Dom.byId("time-legend").append(...[
      item("compute", "compute"),
      has("m") ? item("moved", "transfers in") : null,
      has("l") ? item("fetched", "fetches of streamed weights") : null,
      has("w") ? item("waiting", "waits for a fetch") : null,
    ].filter(Boolean));
    const hidden = Plan.summary.hiddenSeconds;
    Dom.byId("timeline-hint").textContent = hidden > 0 ? `${Format.seconds(hidden)} of the fetches run behind other work.` : "When each device computes and receives.";
    Dom.byId("time-all").addEventListener("click", () => show(0, longest));
    Dom.byId("time-in").addEventListener("click", () => zoom(0.6));
    Dom.byId("time-out").addEventListener("click", () => zoom(1 / 0.6));
    draw();
  }

  return { start, draw };
})();
