"use strict";
// How Cytoscape draws boxes and arrows, in the colours of the page.

// coloured: what the colour of a box shows, "device", "time" or "memory"
function graphStyle(coloured) {
  const surface = Colours.variable("--surface"), ink = Colours.variable("--ink");
  const muted = Colours.variable("--muted"), accent = Colours.variable("--accent");
  const transfer = Colours.variable("--transfer");
  const device = (element) => Colours.device(element.data("device"));
  const tint = (part) => (element) => Colours.mix(device(element), surface, part);
  const strong = Colours.isDark() ? 0.42 : 0.3, faint = Colours.isDark() ? 0.16 : 0.1;
  const hot = Colours.variable("--hot");
  const fill = (part) => (e) => (coloured === "device" || e.data("chip") ? tint(part)(e) : Colours.mix(hot, surface, 0.04 + 0.66 * e.data("heat")));
  return [
    { selector: "node", style: {
      shape: "round-rectangle", width: "data(w)", height: "data(h)", label: "data(label)",
      "font-family": "system-ui, sans-serif", "font-size": 12, color: ink, "text-wrap": "wrap",
      "text-valign": "center", "line-height": 1.35, "min-zoomed-font-size": 5, "corner-radius": 7,
      "background-fill": "linear-gradient", "background-gradient-direction": "to-right",
      "background-gradient-stop-colors": (e) => `${fill(strong)(e)} ${fill(strong)(e)} ${fill(faint)(e)} ${fill(faint)(e)}`,
      "background-gradient-stop-positions": (e) => `0% ${e.data("part")}% ${e.data("part")}% 100%`,
      "border-width": 1.2, "border-color": tint(0.75), "z-index-compare": "manual", "z-index": 30, "overlay-opacity": 0,
    } },
    { selector: "node.stage", style: { "font-size": 14, "border-width": 1.6, "border-color": device } },
    { selector: "node.operation", style: { "font-size": 11, "border-width": 1, "corner-radius": 5 } },
    { selector: "node.open", style: {
      "background-fill": "solid", "background-color": tint(0.06), "text-valign": "top", "text-margin-y": 24,
      "font-weight": 600, "z-index": (e) => 1 + e.data("depth"), "border-style": "solid",
    } },
    { selector: "node.chip", style: {
      "background-fill": "solid", "background-color": surface, "border-style": "dashed", "font-size": 11,
      color: muted, "border-color": tint(0.7), "corner-radius": 20,
    } },
    { selector: "edge", style: {
      width: "data(width)", "curve-style": "bezier", "control-point-step-size": 34, "target-arrow-shape": "triangle", "arrow-scale": 0.9,
      "line-color": muted, "target-arrow-color": muted, "z-index-compare": "manual", "z-index": 20,
      "font-family": "system-ui, sans-serif", "font-size": 11, "min-zoomed-font-size": 6, label: "data(label)", color: ink,
      "text-background-color": surface, "text-background-opacity": 0.92, "text-background-padding": 3,
      "text-background-shape": "round-rectangle", "overlay-opacity": 0,
    } },
    { selector: "edge.dependency", style: { "line-opacity": 0.42, "arrow-scale": 0.7, "z-index": 18 } },
    { selector: "edge.transfer", style: { "line-color": transfer, "target-arrow-color": transfer, color: transfer, "font-weight": 600, "z-index": 25 } },
    { selector: "edge.stream", style: { "line-style": "dashed", "line-color": device, "target-arrow-color": device } },
    { selector: "edge.end", style: { "line-style": "dashed", "line-dash-pattern": [2, 5], "line-color": muted, "target-arrow-color": muted, color: muted } },
    { selector: "edge.far", style: { "line-opacity": 0.28, "text-opacity": 0.75 } },
    { selector: "edge.dependency.far", style: { "line-opacity": 0.2 } },
    { selector: "edge.near", style: { "line-opacity": 1, "text-opacity": 1, "z-index": 28 } },
    { selector: ".chosen", style: { "border-width": 3, "border-color": accent, "line-color": accent, "target-arrow-color": accent } },
  ];
}
