"use strict";
// A strip under the graph with all stages, where the canvas does not show them all: it says what part is
// seen, and a click or a drag goes elsewhere. The outline and the arrow keys do the same for the keyboard.

const Overview = (() => {
  const box = Dom.byId("overview");
  const seen = Dom.el("i", { class: "seen" });
  let from = 0, to = 1, travel = () => {};

  const share = (x) => `${(100 * (x - from) / (to - from)).toFixed(3)}%`;

  // stages: {x, w, device} each, in the order of the call; go: what brings a place to the middle
  function draw(stages, ends, go) {
    [from, to] = ends;
    travel = go;
    box.replaceChildren(...stages.map(({ x, w, device }) => Dom.el("i", {
      class: "part", style: `--device: var(--device-${device}); left: ${share(x - w / 2)}; width: ${share(from + w)}`,
    })), seen);
  }

  function follow(first, last) {
    box.hidden = first <= from + 1 && last >= to - 1;
    const left = Math.max(from, Math.min(to, first)), right = Math.max(left, Math.min(to, last));
    seen.style.left = share(left);
    seen.style.width = share(from + right - left);
  }

  function start() {
    const move = (event) => {
      const frame = box.getBoundingClientRect();
      travel(from + (to - from) * (event.clientX - frame.left) / frame.width);
    };
    box.addEventListener("pointerdown", (event) => { box.setPointerCapture(event.pointerId); move(event); });
    box.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
  }

  return { start, draw, follow };
})();
