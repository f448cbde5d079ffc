"use strict";
// The head of the page, and the start of everything.

(() => {
  const { summary, devices } = Plan;
  const { el, byId } = Dom;
  const hooked = summary.method === "hooks";

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

  function usage() {
    byId("usage").append(...devices.map((device, index) => {
      const whole = Math.max(device.budget || 0, device.peak, 1);
      const part = (bytes, name) => el("i", { class: name, style: `width:${100 * bytes / whole}%` });
      const fixed = device.weights + device.buffer;
      const budget = device.budget === null ? ", no budget" : ` of ${Format.bytes(device.budget)}`;
      return el("div", { class: "device", style: `--device: var(--device-${index})` },
        el("span", { class: "who" }, el("b", {}, device.key), device.device === device.key ? "" : ` ${device.device}`),
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
  head();
  usage();
  legend();
  GraphView.start();
  Outline.start();
  Details.start();
  Search.start();
  MemoryCharts.start();
  Timeline.start();
  Tables.start();

  let width = innerWidth, due = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(due);
    due = setTimeout(() => { MemoryCharts.draw(); Timeline.draw(); }, 80);
  });
  document.documentElement.dataset.ready = "true";
})();
