"use strict";
// The head of the page, and the start of everything.

(() => {
  const { summary, devices } = Plan;
  const { el, byId } = Dom;
  const hooked = summary.method === "hooks";
  const WORTH = 0.05; // of the time: what takes less needs no hint
  const SMALL = 0.4; // of the time of computing, likewise

  const capital = (text) => text[0].toUpperCase() + text.slice(1);

  function figure(title, value, note, hover) {
    return el("div", { class: "figure", title: hover }, el("span", { class: "title" }, title), el("b", {}, value), el("span", { class: "note" }, note || ""));
  }

  function head() {
    byId("title").textContent = Plan.title;
    const parts = [Format.count(Model.operations, "operation"), Format.count(Plan.weights.length, "weight"), Format.bytes(summary.weightBytes)];
    byId("subtitle").textContent = `${parts.join(" · ")} · ${hooked ? "runs module by module" : `traced by ${summary.method}`}`;
    const bounded = summary.lowerBound > 0 || summary.makespan === 0;
    const measured = summary.measuredSeconds === null ? "" : ` · ${Format.seconds(summary.measuredSeconds)} measured, ${(summary.measuredSeconds / (summary.makespan || 1)).toPrecision(2)} × the estimate`;
    byId("figures").append(
      figure(capital(summary.call), Format.seconds(summary.makespan), `${hooked ? "copies only: runs module by module" : "estimated"}${guessed()}${measured}`,
        guessed() ? "Nothing is known of how fast these are: see Assumptions. Give devices= and links=, or graphplan.measure_devices()." : null),
      figure("Within", bounded ? Format.percent(summary.gap) : "unknown", bounded ? `of optimal, at least ${Format.seconds(summary.lowerBound)} by ${summary.proof}` : summary.proof, bounded ? `Proved by: ${summary.proof}` : null),
      figure("Transferred", Format.bytes(summary.transferBytes), `${Format.count(summary.transfers, "value")} between devices`),
      figure("Weights streamed", Format.bytes(summary.streamedBytes), `${Format.count(summary.streams, "copy", "copies")} per ${summary.call}`),
      figure("Compute", summary.flops || !hooked ? Format.flops(summary.flops) : "unknown", `${Format.count(Model.stages.length, "stage")}${summary.calls > 1 ? `, one of ${summary.calls} example inputs` : ""}`),
    );
    if (!summary.activationsKnown) byId("summary").append(el("p", { class: "warning" }, "Activation sizes are unknown: memory counts weights only."));
  }

  // Whose speeds, of those that the estimate counts with, are defaults.
  function guessed() {
    const computing = devices.filter((device, index) => device.speed && Plan.time.compute[index] > 0);
    const found = computing.filter(({ speed }) => speed.origin === "default").map(({ name }) => name);
    if (Plan.links.some((link) => link.origin === "default")) found.push("copies");
    return found.length ? `, at default speeds of ${found.join(", ")}` : "";
  }

  function answer() {
    const coded = (text) => text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));
    byId("answer").append(...Plan.answer.filter(Boolean).map((text) => el("p", {}, coded(`${capital(text)}.`))));
  }

  // Seconds that operations take at least, however small they are.
  function starts() {
    const { seconds, device } = Plan.operations, timed = seconds.map((_, op) => op).filter((op) => seconds[op] > 0 && devices[device[op]].speed);
    return { count: timed.length, start: timed.reduce((sum, op) => sum + Math.min(seconds[op], devices[device[op]].speed.overhead), 0) };
  }

  // One bar: what each part takes of the whole time.
  function shares() {
    const { compute, transfers, streaming, inputs, outputs } = Plan.time;
    const parts = [
      ...compute.map((seconds, index) => ({ name: devices[index].name, seconds, fill: `--fill: var(--device-${index})` })),
      { name: "transfers", seconds: transfers, fill: "--fill: var(--transfer)" },
      { name: "waiting for weights", seconds: streaming, fill: "--fill: var(--activation)" },
      { name: "inputs", seconds: inputs, fill: "--fill: var(--ink)" },
      { name: "outputs", seconds: outputs, fill: "--fill: var(--measured)" },
    ].filter((part) => part.seconds > 0);
    const whole = parts.reduce((sum, part) => sum + part.seconds, 0);
    if (!whole) return;
    byId("shares").append(
      el("span", { class: "meter", "aria-hidden": "true" }, parts.map((part) => el("i", { style: `${part.fill}; width:${100 * part.seconds / whole}%` }))),
      el("ul", { class: "legend" }, parts.map((part) => el("li", { style: part.fill }, el("i", { class: "key" }), `${part.name} ${Format.percent(part.seconds / whole)}, ${Format.seconds(part.seconds)}`))));
    const busy = compute.reduce((sum, seconds) => sum + seconds, 0), { start, count } = starts();
    if (start > SMALL * busy) byId("shares").append(el("p", { class: "hint" }, `${Format.percent(start / busy)} of the computing is the fixed time of starting ${Format.count(count, "operation")}, whatever their size: larger inputs would cost little more.`));
    if (outputs > WORTH * whole) byId("shares").append(el("p", { class: "hint" }, "return_outputs=False leaves outputs on the devices that compute them, without these copies."));
  }

  function assumptions() {
    const from = (origin) => (origin === "given" ? "given by the caller" : origin);
    const speeds = devices.filter((device) => device.speed && device.speed.flops).map(({ name, speed }) => [name,
      `${Format.flops(speed.flops)}/s, ${Format.rate(speed.bandwidth)}, ${Format.seconds(speed.overhead)} an operation`, from(speed.origin)]);
    const links = Plan.links.map((link) => [`${Model.deviceName(link.from)} → ${Model.deviceName(link.to)}`,
      `${Format.rate(link.bandwidth)}, ${Format.seconds(link.latency)} a copy`, from(link.origin)]);
    const inputs = Plan.inputs.map(({ name, shape }) => [name, shape || "size unknown", "input"]);
    byId("assumptions").append(el("table", {}, el("tbody", {}, [...inputs, ...speeds, ...links].map((row) => el("tr", {}, row.map((text) => el("td", {}, text)))))));
  }

  // What the peak of a device consists of, the kinds in the colours of its bar.
  function parts(device) {
    const rest = device.peak - device.weights - device.buffer;
    return [["weights", device.weights, "weights"], ["buffer", device.buffer, "prefetch buffers"], ["activations", rest, "activations"]]
      .filter(([, bytes]) => bytes > 0).map(([name, bytes, text]) => el("span", {}, el("i", { class: `key ${name}` }), `${text} ${Format.bytes(bytes)}`));
  }

  // What a budget leaves: some is kept for CUDA and PyTorch, the rest nothing has needed.
  function headroom({ budget, peak, reserve }) {
    if (budget === null) return null;
    const free = Math.max(0, budget - peak - reserve);
    return el("span", { title: "The peak has everything that the plan puts there: weights, activations, copies, workspace. The plan leaves the rest of the budget free." },
      reserve ? `${Format.bytes(reserve)} kept for CUDA and PyTorch · ` : "", free ? `${Format.bytes(free)} free at the peak` : "full at the peak");
  }

  function usage() {
    byId("usage").append(...devices.map((device, index) => {
      const whole = Math.max(device.budget || 0, device.peak, 1);
      const part = (bytes, name) => el("i", { class: name, style: `width:${100 * bytes / whole}%` });
      const fixed = device.weights + device.buffer;
      const budget = device.budget === null ? ", no budget" : ` of ${Format.bytes(device.budget)}`;
      return el("div", { class: "device", style: `--device: var(--device-${index})` },
        el("span", { class: "who" }, el("b", {}, device.name), device.device === device.key ? "" : ` ${device.device}`),
        el("span", { class: device.budget === null ? "meter unbounded" : "meter", role: "img", "aria-label": `${Format.bytes(device.peak)}${budget}` },
          part(device.weights, "weights"), part(device.buffer, "buffer"), part(Math.max(0, device.peak - fixed), "activations")),
        el("span", { class: "amount" }, `${Format.bytes(device.peak)}${budget}`),
        el("span", { class: "note" }, parts(device), headroom(device)));
    }));
  }

  function legend() {
    const item = (name, text) => el("li", {}, el("i", { class: `line ${name}` }), text);
    byId("edge-legend").append(
      item("transfer", "transfer between devices, with its bytes"),
      ...(summary.streams ? [item("stream", "weights streamed to a stage")] : []),
      item("end", "inputs and outputs"),
      item("dependency", "reads, without a copy"));
  }

  function theme() {
    const button = byId("theme");
    const name = () => { button.textContent = Colours.isDark() ? "Light" : "Dark"; };
    button.addEventListener("click", () => { Colours.force(!Colours.isDark()); name(); });
    Colours.on(name);
  }

  theme();
  Colours.apply();
  answer();
  head();
  shares();
  usage();
  assumptions();
  legend();
  Details.start();
  GraphView.start();
  Outline.start();
  Search.start();
  MemoryCharts.start();
  Timeline.start();
  Compare.start();
  Spent.start();
  Tables.start();
  Search.follow();

  let width = innerWidth, due = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(due);
    due = setTimeout(() => { MemoryCharts.draw(); Timeline.draw(); }, 80);
  });
  document.documentElement.dataset.ready = "true";
})();
