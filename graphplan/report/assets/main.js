"use strict";
// The head of the page, and the start of everything.

(() => {
  const { summary, devices } = Plan;
  const { el, byId } = Dom;
  const hooked = summary.method === "hooks";
  const WORTH = 0.05; // of the time: what takes less needs no hint

  function figure(title, value, note) {
    return el("div", { class: "figure" }, el("span", { class: "title" }, title), el("b", {}, value), el("span", { class: "note" }, note || ""));
  }

  function head() {
    byId("title").textContent = Plan.title;
    const parts = [Format.count(Model.operations, "operation"), Format.count(Plan.weights.length, "weight"), Format.bytes(summary.weightBytes)];
    byId("subtitle").textContent = `${parts.join(" · ")} · ${hooked ? "run by hooks, module by module" : `captured by ${summary.method}`}`;
    const bounded = summary.lowerBound > 0 || summary.makespan === 0;
    const measured = summary.measuredSeconds === null ? "" : ` · ${Format.seconds(summary.measuredSeconds)} measured`;
    byId("figures").append(
      figure("Forward pass", Format.seconds(summary.makespan), `${hooked ? "copies only: hooks run the modules" : "estimated"}${measured}`),
      figure("Gap to the lower bound", bounded ? Format.percent(summary.gap) : "unknown", bounded ? `bound ${Format.seconds(summary.lowerBound)}: ${summary.proof}` : summary.proof),
      figure("Transferred", Format.bytes(summary.transferBytes), `${Format.count(summary.transfers, "value")} between devices`),
      figure("Weights streamed", Format.bytes(summary.streamedBytes), `${Format.count(summary.streams, "copy", "copies")} per forward pass`),
      figure("Compute", summary.flops || !hooked ? Format.flops(summary.flops) : "unknown", `${Format.count(Model.stages.length, "stage")}${summary.calls > 1 ? `, one of ${summary.calls} example inputs` : ""}`),
    );
    if (!summary.activationsKnown) byId("summary").append(el("p", { class: "warning" }, "No example inputs were given: activation sizes are unknown, and memory counts weights only."));
  }

  function answer() {
    byId("answer").append(...Plan.answer.filter(Boolean).map((text) => el("p", {}, `${text[0].toUpperCase()}${text.slice(1)}.`)));
  }

  // One bar: what each part takes of the whole forward pass.
  function shares() {
    const { compute, transfers, streaming, inputs, outputs } = Plan.time;
    const parts = [
      ...compute.map((seconds, index) => ({ name: devices[index].name, seconds, fill: `--fill: var(--device-${index})` })),
      { name: "transfers", seconds: transfers, fill: "--fill: var(--transfer)" },
      { name: "waiting for weights", seconds: streaming, fill: "--fill: var(--activation)" },
      { name: "inputs", seconds: inputs, fill: "--fill: var(--muted)" },
      { name: "outputs", seconds: outputs, fill: "--fill: var(--measured)" },
    ].filter((part) => part.seconds > 0);
    const whole = parts.reduce((sum, part) => sum + part.seconds, 0);
    if (!whole) return;
    byId("shares").append(
      el("span", { class: "meter", "aria-hidden": "true" }, parts.map((part) => el("i", { style: `${part.fill}; width:${100 * part.seconds / whole}%` }))),
      el("ul", { class: "legend" }, parts.map((part) => el("li", { style: part.fill }, el("i", { class: "key" }), `${part.name} ${Format.percent(part.seconds / whole)}, ${Format.seconds(part.seconds)}`))));
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
        el("span", { class: "amount" }, `${Format.bytes(device.peak)}${budget}`));
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
  GraphView.start();
  Outline.start();
  Details.start();
  Search.start();
  MemoryCharts.start();
  Timeline.start();
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
