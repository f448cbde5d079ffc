"use strict";
// Bytes over the order of operations, a chart for each device: weights, what is streamed, activations.

const MemoryCharts = (() => {
  const box = Dom.byId("memory-charts");
  const HEIGHT = 132, LEFT = 66, RIGHT = 14, TOP = 16, BOTTOM = 20;
  const total = Math.max(1, Model.operations);

  // The most bytes at each position, from the changes that the plan lists.
  function levels(device) {
    const line = device.memory, found = new Float64Array(total + 1);
    for (let i = 0; i < line.length; i += 2) found.fill(line[i + 1], line[i], i + 2 < line.length ? line[i + 2] : total + 1);
    return found;
  }

  // One step for each pixel: the highest of the positions that fall on it.
  function outline(values, base, x, y, width) {
    const columns = Math.min(values.length, Math.floor(width));
    let path = "";
    for (let i = 0; i < columns; i += 1) {
      const from = Math.floor(i * values.length / columns), to = Math.floor((i + 1) * values.length / columns);
      let most = base;
      for (let k = from; k < Math.max(to, from + 1); k += 1) most = Math.max(most, values[k]);
      path += `${path ? "L" : "M"}${x(from).toFixed(1)},${y(most).toFixed(1)}H${x(Math.max(to, from + 1)).toFixed(1)}`;
    }
    return `${path}V${y(base).toFixed(1)}H${x(0).toFixed(1)}Z`;
  }

  function chart(device, index) {
    const width = Math.max(320, box.clientWidth), inner = width - LEFT - RIGHT;
    const values = levels(device);
    const highest = Math.max(device.peak, device.measuredPeak || 0, device.weights + device.buffer, 1);
    const far = device.budget !== null && device.budget > 4 * highest;
    const scale = far || device.budget === null ? highest * 1.25 : Math.max(device.budget, highest) * 1.08;
    const x = (position) => LEFT + inner * position / (total + 1);
    const y = (bytes) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - bytes / scale);
    const fixed = device.weights + device.buffer;
    const colour = `var(--device-${index})`;
    const band = (low, high, name, fill, opacity) => (high > low
      ? Dom.svg("rect", { class: name, x: LEFT, width: inner, y: y(high), height: Math.max(0.5, y(low) - y(high)), fill, opacity })
      : null);
    const ticks = [0, 0.5, 1].map((part) => part * (far || device.budget === null ? highest : device.budget));
    const root = Dom.svg("svg", {
      class: "chart memory", width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: "0", role: "img", "data-device": device.key,
      "aria-label": `Memory of ${device.name}: peak ${Format.bytes(device.peak)}${device.budget === null ? "" : ` of ${Format.bytes(device.budget)}`}`,
    },
    ticks.map((bytes) => [
      Dom.svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(bytes), y2: y(bytes) }),
      Dom.svg("text", { class: "tick", x: LEFT - 8, y: y(bytes) + 4, "text-anchor": "end" }, Format.bytes(Math.round(bytes))),
    ]),
    Dom.svg("path", { class: "activations", d: outline(values, fixed, x, y, inner), fill: "var(--activation)", opacity: 0.85 }),
    band(device.weights, fixed, "buffer", colour, 0.45),
    band(0, device.weights, "weights", colour, 0.85),
    budget(device, far, width, y),
    peak(device, far, width, x, y),
    device.measuredPeak === null ? null : Dom.svg("line", {
      class: "measured", x1: LEFT, x2: width - RIGHT, y1: y(device.measuredPeak), y2: y(device.measuredPeak),
    }),
    Plan.phases.length ? Plan.phases.map((phase) => phaseMark(phase, width, x)) : [
      Dom.svg("text", { class: "tick", x: LEFT, y: HEIGHT - 5 }, "first operation"),
      Dom.svg("text", { class: "tick", x: width - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, "last"),
    ]);
    follow(root, device, values, x, inner);
    return root;
  }

  // A phase of a training step: a line where it begins, its name below; the optimizer's is after the last operation.
  function phaseMark(phase, width, x) {
    const last = phase.at >= Model.operations;
    return Dom.svg("g", { class: "phase" },
      phase.at ? Dom.svg("line", { x1: x(phase.at), x2: x(phase.at), y1: TOP, y2: HEIGHT - BOTTOM + 4 }) : null,
      Dom.svg("text", { class: "tick", x: last ? width - RIGHT : x(phase.at), y: HEIGHT - 5, "text-anchor": last ? "end" : "start" }, phase.name));
  }

  const isLate = (device) => device.peakAt > total * 0.5;

  function budgetLabel(device, far) {
    const share = device.budget ? ` · ${Format.percent(device.peak / device.budget)} used` : "";
    return `budget ${Format.bytes(device.budget)}${far ? (box.clientWidth < 520 ? " ↑" : " ↑ above this chart") : ""}${share}`;
  }

  function budget(device, far, width, y) {
    if (device.budget === null) return null;
    const label = budgetLabel(device, far);
    const at = far ? TOP - 8 : y(device.budget);
    return Dom.svg("g", { class: "budget" },
      far ? null : Dom.svg("line", { x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
      Dom.svg("text", { x: isLate(device) ? LEFT + 4 : width - RIGHT, y: Math.max(11, at - 4), "text-anchor": isLate(device) ? "start" : "end" }, label));
  }

  // A line of text over a height, moved up where a line of the chart would strike it through.
  function clear(at, lines) {
    return [...lines].sort((a, b) => b - a).reduce((place, line) => (place > line - 4 && place - 11 < line ? line - 5 : place), at);
  }

  function peak(device, far, width, x, y) {
    const at = x(Math.min(device.peakAt, total) + 0.5);
    const op = Math.min(device.peakAt, Model.operations - 1);
    const late = isLate(device);
    const measured = device.measuredPeak === null ? "" : `, measured ${Format.bytes(device.measuredPeak)}`;
    const label = (name) => `peak ${Format.bytes(device.peak)}${name}${measured}`;
    const limit = device.budget === null || far ? null : y(device.budget);
    const lines = [...(limit === null ? [] : [limit]), ...(device.measuredPeak === null ? [] : [y(device.measuredPeak)])];
    const height = Math.max(11, clear(y(device.peak) - 6, lines));
    const beside = limit !== null && height < limit ? Dom.textWidth(budgetLabel(device, far), 11.5) + 16 : 0;
    const room = (late ? at - 9 - LEFT : width - RIGHT - at - 9) - beside;
    const named = op >= 0 && device.peakAt < Model.operations ? ` at ${Model.place(op)}` : Plan.phases.length ? " in the optimizer" : " at the end";
    const text = Dom.textWidth(label(named), 11.5) <= room ? label(named) : label("");
    return Dom.svg("g", { class: "peak" },
      Dom.svg("circle", { cx: at, cy: y(device.peak), r: 4 }),
      Dom.svg("text", { x: at + (late ? -9 : 9), y: height, "text-anchor": late ? "end" : "start" },
        Dom.svg("title", {}, label(named)), text));
  }

  // A cursor that follows the mouse and the arrow keys.
  function follow(root, device, values, x, inner) {
    const cursor = Dom.svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    root.append(cursor);
    let position = 0;
    function move(to, place) {
      position = Math.max(0, Math.min(total, to));
      const at = x(position + 0.5);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
      cursor.setAttribute("visibility", "visible");
      const box = root.getBoundingClientRect();
      const name = position < Model.operations ? Model.place(position) : Plan.phases.length ? "optimizer" : "end of the forward pass";
      const fixed = device.weights + device.buffer;
      const rows = [
        ["total", Format.bytes(values[position])],
        ["weights", Format.bytes(device.weights)],
        ...(device.buffer ? [["prefetch buffers", Format.bytes(device.buffer)]] : []),
        ["activations", Format.bytes(Math.max(0, values[position] - fixed))],
        ...(position < Model.operations ? [["operation", Plan.operations.name[position]], ["runs on", Model.deviceName(Plan.operations.device[position])]] : []),
      ];
      Tip.show(name, rows, place ? place.x : box.left + at, place ? place.y : box.top + 20);
    }
    const hide = () => { cursor.setAttribute("visibility", "hidden"); Tip.hide(); };
    root.addEventListener("mousemove", (event) => {
      const left = root.getBoundingClientRect().left;
      move(Math.floor((event.clientX - left - LEFT) / inner * (total + 1)), { x: event.clientX, y: event.clientY });
    });
    root.addEventListener("mouseleave", hide);
    root.addEventListener("blur", hide);
    root.addEventListener("click", () => {
      if (position < Model.operations && Model.hasPlace(position)) View.choose({ node: Model.operation(position) }, { centre: true });
    });
    root.addEventListener("keydown", (event) => {
      const far = event.shiftKey ? Math.ceil(total / 20) : 1;
      const steps = { ArrowLeft: -far, ArrowRight: far, Home: -total, End: total };
      if (!(event.key in steps)) return;
      event.preventDefault();
      move(position + steps[event.key], null);
    });
  }

  // Where the operations that are chosen stand; those that would share a pixel as one.
  function mark() {
    const chosen = [...new Set(View.operations())].sort((a, b) => a - b);
    for (const root of box.querySelectorAll("svg.memory")) {
      root.querySelectorAll(".chosen").forEach((old) => old.remove());
      const inner = root.clientWidth - LEFT - RIGHT, runs = [];
      for (const op of chosen) {
        const last = runs[runs.length - 1];
        if (last && (op - last.to) * inner < 2 * total) last.to = op + 1;
        else runs.push({ from: op, to: op + 1 });
      }
      const x = (position) => LEFT + inner * position / (total + 1);
      root.append(...runs.map((run) => Dom.svg("rect", { class: "chosen", x: x(run.from), width: Math.max(2, x(run.to) - x(run.from)), y: TOP, height: HEIGHT - TOP - BOTTOM })));
    }
  }

  function draw() {
    const used = Plan.devices.map((device, index) => ({ device, index })).filter(({ device }) => device.peak > 0 || device.budget);
    box.replaceChildren(...used.map(({ device, index }) => Dom.el("figure", {},
      Dom.el("figcaption", {}, Dom.el("i", { class: "dot", style: `--device: var(--device-${index})` }), Dom.el("b", {}, device.name), device.device === device.key ? "" : ` ${device.device}`),
      device.peak > 0 ? chart(device, index) : Dom.el("p", { class: "empty" }, `nothing here; budget ${Format.bytes(device.budget)}`))));
    mark();
  }

  function start() {
    const item = (name, text) => Dom.el("li", {}, Dom.el("i", { class: `key ${name}` }), text);
    Dom.byId("memory-legend").append(item("weights", "resident weights"), item("activations", "activations, copies and workspace"),
      ...(Plan.devices.some((device) => device.buffer) ? [item("buffer", "prefetch buffers")] : []), item("budget", "budget"), item("peak", "peak"),
      ...(Plan.measured ? [item("measured", "measured peak")] : []));
    draw();
    View.on((change) => { if (change.chosen !== undefined) mark(); });
  }

  return { start, draw };
})();
